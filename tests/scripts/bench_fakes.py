"""Stand-ins for the benchmark's tests: an executor that notes its steps, and llama.cpp's programs
as scripts that print figures of a known speed."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import numpy as np
from martlet.runtime.step import Step

FAKE_BENCH = """
import json, sys
def option(name, default="0"):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default
rows = []
for depth in map(int, option("-d").split(",")):
    for key, name, speed in (("n_prompt", "-p", 200.0), ("n_gen", "-n", 20.0)):
        n = int(option(name))
        if n:
            row = {"n_prompt": 0, "n_gen": 0, "n_depth": depth, "avg_ts": speed / (1 + depth)}
            rows.append({**row, key: n, "build_number": 7, "build_commit": "abc",
                         "argv": sys.argv[1:]})
print(json.dumps(rows))
"""
FAKE_BATCHED = """
import json, sys
def option(name):
    return sys.argv[sys.argv.index(name) + 1]
prompt, n_gen, cells = int(option("-npp")), int(option("-ntg")), int(option("-c"))
print("some log line")
for n in map(int, option("-npl").split(",")):
    assert n * (prompt + n_gen) <= cells and ("-pps" in sys.argv) == (prompt > 1)
    print(json.dumps({"pp": prompt, "tg": n_gen, "pl": n, "speed_tg": 20.0 * n / prompt}))
"""


class CountingExecutor:
    """Takes any step; keeps what it was given, and the blocks it was told to copy."""

    name = "counting"

    def __init__(self, *, max_rows: int = 8, block_tokens: int = 4, n_blocks: int = 64) -> None:
        self.max_rows, self.block_tokens, self.n_blocks = max_rows, block_tokens, n_blocks
        self.ran: list[Step] = []
        self.copied: list[tuple[int, int]] = []

    def run(self, step: Step) -> np.ndarray:
        self.ran.append(step)
        return np.zeros((step.n_out, 10), np.float32)

    def copy_block(self, src: int, dst: int) -> None:
        self.copied.append((src, dst))

    def close(self) -> None: ...


def write_programs(folder: Path, **sources: str) -> Path:
    """Executable scripts by name; `_` in a name becomes `-`."""
    for name, source in sources.items():
        path = folder / name.replace("_", "-")
        path.write_text(f"#!{sys.executable}\n{source}", encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return folder


def fake_llama(folder: Path) -> Path:
    return write_programs(folder, llama_bench=FAKE_BENCH, llama_batched_bench=FAKE_BATCHED)


HAS_PROGRAMS = os.name == "posix"  # scripts with a #! line
