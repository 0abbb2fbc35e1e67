"""The native library: where it is, and that it was built for this package.

Owns: finding, opening and checking it, and the instruction sets it has kernels for.
Must not know: plans, weights, or what is computed.
"""

from __future__ import annotations

import importlib.resources
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cffi import FFI

from ..errors import ModelError
from ..ops import ABI_VERSION, BUFFER_DTYPE, KV_LAYER_DTYPE, OP_DTYPE

_LIBRARIES = ("libmartlet.so", "libmartlet.dylib", "martlet.dll")
_STRUCTS = (
    "mt_op",
    "mt_buffer",
    "mt_tensor",
    "mt_kv_layer",
    "mt_plan",
    "mt_options",
    "mt_step",
    "mt_info",
    "mt_bad_value",
    "mt_draw_terms",
    "mt_op_span",
)


class NativeUnavailable(ModelError):
    """The native library is not there, or was built for another version of this package."""


def library_path() -> Path:
    """MARTLET_LIBRARY names another build, as one with sanitizers; else the installed one."""
    named = os.environ.get("MARTLET_LIBRARY")
    if named:
        if Path(named).is_file():
            return Path(named)
        raise NativeUnavailable(f"MARTLET_LIBRARY is {named}, which is no file; unset or mend it")
    folder = importlib.resources.files(__package__)
    for name in _LIBRARIES:
        path = folder.joinpath(name)
        if path.is_file():
            return Path(str(path))
    raise NativeUnavailable("the native library was not built; install a C compiler and reinstall")


def _declarations(library: Path) -> str:
    """The plain declarations of martlet.h, which is installed beside the library."""
    header = library.with_name("martlet.h")
    text = header.read_text() if header.is_file() else ""
    match = re.search(r"cffi begins ---- \*/(.*)/\* ---- cffi ends", text, re.DOTALL)
    if match is None:
        raise NativeUnavailable(f"{header} has no marked declarations; reinstall the package")
    return match.group(1)


class Library:
    """The opened library and its declarations; refused where the two sides differ in layout."""

    def __init__(self) -> None:
        path = library_path()
        # One for each library: an FFI is locked while it opens one, and a collection of garbage
        # that ends another executor of the same FFI in that moment would wait for ever.
        self.ffi = FFI()
        self.ffi.cdef(_declarations(path))
        try:
            self.lib: Any = self.ffi.dlopen(str(path))
        except OSError as error:
            raise NativeUnavailable(f"{path} does not load: {error}") from None
        self._check_layout()

    def _check_layout(self) -> None:
        found = self.lib.mt_abi_version()
        if found != ABI_VERSION:
            raise NativeUnavailable(
                f"the native library has interface {found}, this package {ABI_VERSION}; reinstall"
            )
        for which, name in enumerate(_STRUCTS):
            there, here = self.lib.mt_sizeof(which), self.ffi.sizeof(name)
            if there != here:
                raise NativeUnavailable(f"{name} has {there} bytes in C, {here} here; reinstall")
        for name, dtype in zip(
            ("mt_op", "mt_buffer", "mt_kv_layer"),
            (OP_DTYPE, BUFFER_DTYPE, KV_LAYER_DTYPE),
            strict=True,
        ):
            if self.ffi.sizeof(name) != dtype.itemsize:
                raise NativeUnavailable(
                    f"{name} has {self.ffi.sizeof(name)} bytes in C, {dtype.itemsize} in NumPy"
                )

    def isas(self) -> Iterator[tuple[str, bool]]:
        """Every instruction set the library was built for, and whether this machine has it."""
        for i in range(self.lib.mt_n_isas()):
            yield self._name(i), bool(self.lib.mt_isa_supported(i))

    def best_isa(self) -> str:
        return self._name(self.lib.mt_isa_best())

    def isa_index(self, name: str | None) -> int:
        """The index of a named ISA; None reads MARTLET_ISA, then takes the best."""
        name = name or os.environ.get("MARTLET_ISA")
        if not name:
            return int(self.lib.mt_isa_best())
        names = dict(self.isas())
        if name not in names:
            raise ModelError(
                f"there are no kernels for ISA {name!r}; there are: {', '.join(names)}"
            )
        if not names[name]:
            raise ModelError(
                f"this machine cannot run kernels for {name}; its best is {self.best_isa()}"
            )
        return list(names).index(name)

    def _name(self, isa: int) -> str:
        return self.ffi.string(self.lib.mt_isa_name(isa)).decode()
