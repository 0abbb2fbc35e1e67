"""What keys and values depend on besides tokens, and packed weights at all, as one digest each: for
what outlives a process, or is shared by several.

Owns: the list of those things. Must not know: where blocks are kept.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .plan import Plan
from .weights import ChosenRows, StoredWeights, WeightSource

if TYPE_CHECKING:
    from .model import Model

DEPENDENCIES = ("martlet", "numpy", "numba")  # what computes, where it is no library of ours


def fingerprint(model: Model) -> bytes:
    """Reads all weights once: about a second per gigabyte."""
    digest = hashlib.blake2b(digest_size=32)
    add = _adder(digest)
    executor, plan = model.executor, model.plan
    add("plan", str(plan).encode())
    weights: WeightSource = StoredWeights(model.tensors())
    _add_tensors(add, plan, ChosenRows(weights, model.words) if model.words else weights)
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


def packed_key(plan: Plan, weights: WeightSource) -> str:
    """Of the weights as the native library of this package packs them; reads them all, as above."""
    digest = hashlib.blake2b(digest_size=16)
    add = _adder(digest)
    add("code", _code("native"))
    add("stays", repr([tensor.stays for tensor in plan.tensors]).encode())
    _add_tensors(add, plan, weights)
    return digest.hexdigest()


def _adder(digest: hashlib.blake2b) -> Callable[[str, bytes | memoryview], None]:
    def add(name: str, value: bytes | memoryview) -> None:
        digest.update(f"{name}:{len(value)}:".encode())
        digest.update(value)

    return add


def _add_tensors(
    add: Callable[[str, bytes | memoryview], None], plan: Plan, weights: WeightSource
) -> None:
    for tensor in plan.tensors:
        add("tensor", repr((tensor.name, tensor.shape, tensor.format)).encode())
        if tensor.values is not None:
            add("values", np.ascontiguousarray(tensor.values).tobytes())
        else:  # of a run of rows, those alone
            add("data", weights.data(tensor.name).data)


def _code(executor: str) -> bytes:
    """The native library itself, or the versions of what computes instead."""
    if executor == "native":
        from .executors.native_library import library_path

        return hashlib.blake2b(Path(library_path()).read_bytes()).digest()
    from llvmlite.binding import get_host_cpu_name  # Numba compiles for the machine it runs on

    versions = [(name, importlib.metadata.version(name)) for name in DEPENDENCIES]
    return repr((versions, get_host_cpu_name())).encode()
