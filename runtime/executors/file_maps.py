"""Mapped files that C reads weights from: to lose one must end no process, and be told.

Owns: which maps are watched, from when until when. Must not know: plans, what C does with weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...quant.file_map import FileMap, changed, map_under


class FileMaps:
    """Of one executor. Closed before its maps may go."""

    def __init__(self, ffi: Any, lib: Any) -> None:
        self._ffi, self._lib = ffi, lib
        self._watched: dict[int, tuple[FileMap, int]] = {}  # by identity; C's numbers of them
        self._staying: set[int] = set()

    def watch(self, values: np.ndarray, *, stays: bool = False) -> None:
        """The map under the array, if there is one. stays: it is read after loading as well."""
        mapped = map_under(values)
        if mapped is None:
            return
        if id(mapped) not in self._watched:
            start = self._ffi.from_buffer(mapped)
            self._watched[id(mapped)] = mapped, self._lib.mt_map_watch(start, len(mapped))
        if stays:
            self._staying.add(id(mapped))

    def loaded(self) -> None:
        """What was only packed or copied is needed no more. Raises FileChanged."""
        self.check()
        for key in self._watched.keys() - self._staying:
            self._lib.mt_map_unwatch(self._watched.pop(key)[1])

    def check(self) -> None:
        """Whether what was read until now is what the files held when they were opened. Raises
        FileChanged."""
        for mapped, number in self._watched.values():
            if self._lib.mt_map_is_lost(number):
                raise changed(mapped.path)
            mapped.check()

    def close(self) -> None:
        while self._watched:
            self._lib.mt_map_unwatch(self._watched.popitem()[1][1])

    def __del__(self) -> None:
        self.close()
