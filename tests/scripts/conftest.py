"""What the command-line tests share: a tiny model file, and the command as a real process."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .tiny_file import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))  # where scripts that need no installation find each other

Martlet = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def martlet(tmp_path: Path) -> Martlet:
    """Runs `martlet ARGUMENTS` with an empty cache."""

    def run(*arguments: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "MARTLET_CACHE": str(tmp_path), "MARTLET_DEBUG": "", **environ}
        command = [sys.executable, "-m", "martlet.scripts.cli", *arguments]
        return subprocess.run(
            command, input=stdin, env=environ, capture_output=True, text=True, timeout=120
        )

    return run
