"""Kernels that numba compiles once and keeps, until a source that they were made of changes.

Owns: what a kept kernel depends on. Must not know: what any kernel computes.
numba compares the kernel's own file only, but code of other files is inlined into it, and their
constants are baked in: after an edit or an upgrade of those, stale machine code would run. Here
all modules of this package that the kernel's module imports, directly or not, are compared too.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

from numba import config, njit


def cached_kernel(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: `njit` with these options and a cache on the disk, where numba keeps it
    (NUMBA_CACHE_DIR, or beside the source)."""

    def compiled(function: Callable[..., Any]) -> Any:
        kernel = njit(cache=True, **options)(function)
        if not config.DISABLE_JIT:  # type: ignore[attr-defined]
            index = kernel._cache._cache_file
            index._source_stamp = (index._source_stamp, source_stamp(function.__module__))
        return kernel

    return compiled


def source_stamp(module: str) -> str:
    """A hash over the sources of a loaded module and of all of its package's that it imports."""
    found, todo = set[str](), [module]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += _imports(name)
    digest = hashlib.sha256()
    for name in sorted(found):
        digest.update(name.encode() + b"\0" + hashlib.sha256(_source(name)).digest())
    return digest.hexdigest()


@cache
def _imports(module: str) -> list[str]:
    """Loaded modules of the same top package that this one names in `from … import …`."""
    package = module.rpartition(".")[0]
    names = []
    for node in ast.walk(ast.parse(_source(module))):
        if isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    top = module.partition(".")[0] + "."
    return [name for name in names if name.startswith(top) and _is_file(name)]


def _is_file(module: str) -> bool:
    return getattr(sys.modules.get(module), "__file__", None) is not None


def _source(module: str) -> bytes:
    return Path(str(sys.modules[module].__file__)).read_bytes()
