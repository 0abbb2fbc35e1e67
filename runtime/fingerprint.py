"""What keys and values depend on besides tokens, as one digest: for blocks that outlive a process.

Owns: the list of those things. Must not know: where blocks are kept.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
from pathlib import Path

import numpy as np

from .model import Model

DEPENDENCIES = ("martlet", "numpy", "numba")  # what computes, where it is no library of ours


def fingerprint(model: Model) -> bytes:
    """Reads all weights once: about a second per gigabyte."""
    digest = hashlib.blake2b(digest_size=32)

    def add(name: str, value: bytes | memoryview) -> None:
        digest.update(f"{name}:{len(value)}:".encode())
        digest.update(value)

    executor, plan, tensors = model.executor, model.plan, model.tensors()
    add("plan", str(plan).encode())
    for tensor in plan.tensors:
        add("tensor", repr((tensor.name, tensor.shape, tensor.format)).encode())
        values = tensor.values
        stored = tensors.get(tensor.name) if values is None else None
        if values is not None:
            add("values", np.ascontiguousarray(values).tobytes())
        elif stored is not None:
            add("data", stored.data.data)
    model.file.drop_pages()
    for name, value in (
        ("kv type", model.kv_type.name),
        ("block tokens", executor.block_tokens),
        ("executor", executor.name),
        ("isa", getattr(executor, "isa", "")),
        ("byte order", sys.byteorder),
    ):
        add(name, str(value).encode())
    add("code", _code(executor.name))
    return digest.digest()


def _code(executor: str) -> bytes:
    """The native library itself, or the versions of what computes instead."""
    if executor == "native":
        from .executors.native_library import library_path

        return hashlib.blake2b(Path(library_path()).read_bytes()).digest()
    from llvmlite.binding import get_host_cpu_name  # Numba compiles for the machine it runs on

    versions = [(name, importlib.metadata.version(name)) for name in DEPENDENCIES]
    return repr((versions, get_host_cpu_name())).encode()
