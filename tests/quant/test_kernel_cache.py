"""Kernels on the disk: used again as long as their sources are the same, and no longer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from martlet.quant.kernel_cache import source_stamp

PACKAGE = {
    "__init__.py": "",
    "constants.py": "FACTOR = 2\n",
    "inner/__init__.py": "",
    "inner/arithmetic.py": """
from numba import njit
from ..constants import FACTOR
@njit
def scaled(x):
    return FACTOR * x
""",
    "kernels.py": """
from martlet.quant.kernel_cache import cached_kernel
from .inner import arithmetic
from .inner.arithmetic import scaled
@cached_kernel(nogil=True)
def run(x):
    return scaled(x) + 1
""",
    "apart.py": "",
}
RUN = """
from made_up.kernels import run
print(run(10), sum(run.stats.cache_hits.values()) if hasattr(run, "stats") else 0)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in PACKAGE.items():
        path = tmp_path / "made_up" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def run(folder: Path, **environ: str) -> tuple[int, int]:
    """What the kernel gives for 10 in a new process, and how often it came from the disk."""
    environ = {**os.environ, "NUMBA_CACHE_DIR": "", "PYTHONPATH": str(folder), **environ}
    environ["PYTHONDONTWRITEBYTECODE"] = "1"  # an edit within a second must not be missed
    done = subprocess.run(
        [sys.executable, "-c", RUN], env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    result, hits = done.stdout.split()
    return int(result), int(hits)


def test_a_kernel_is_compiled_again_when_what_it_inlines_changed(folder: Path) -> None:
    assert run(folder) == (21, 0)
    assert run(folder) == (21, 1)
    (folder / "made_up" / "apart.py").write_text("# of no concern\n")
    assert run(folder) == (21, 1)
    (folder / "made_up" / "constants.py").write_text("FACTOR = 3\n")
    assert run(folder) == (31, 0)
    assert run(folder) == (31, 1)


def test_without_the_compiler_nothing_is_cached(folder: Path) -> None:
    assert run(folder, NUMBA_DISABLE_JIT="1") == (21, 0)
    assert not list(folder.rglob("*.nbi"))


def test_the_stamp_of_our_kernels_covers_what_they_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from martlet.quant import kernel_cache

    for kernel, shared in (
        ("martlet.quant.encode_k", "martlet.quant.blocks_iq"),
        ("martlet.quant.gptq_kernels", "martlet.quant.encode_math"),
        ("martlet.runtime.executors.numba_matmul", "martlet.runtime.executors.numba_llvm"),
        ("martlet.runtime.executors.numba_attention", "martlet.runtime.executors.numba_weights"),
    ):
        __import__(kernel)
        before, source = source_stamp(kernel), kernel_cache._source
        with monkeypatch.context() as patch:
            patch.setattr(
                kernel_cache,
                "_source",
                lambda name, shared=shared, source=source: source(name) + b"#" * (name == shared),
            )
            assert source_stamp(kernel) != before, (kernel, shared)
        assert source_stamp(kernel) == before
