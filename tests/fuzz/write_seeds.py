"""Writes what the targets begin with: `python -m tests.fuzz.write_seeds FOLDER [TARGET ...]`.

The corpus of the repository has them already, and what was found to reach more.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def write(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i, seed in enumerate(importlib.import_module(f"{__package__}.{name}").seeds()):
            (folder / name / f"seed-{i:02}").write_bytes(seed)


if __name__ == "__main__":
    from martlet.scripts.fuzz import PYTHON_TARGETS

    write(Path(sys.argv[1]), sys.argv[2:] or list(PYTHON_TARGETS))
