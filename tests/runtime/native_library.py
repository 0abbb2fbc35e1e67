"""The native library as the tests see it: imported first, it skips the file where there is none."""

from __future__ import annotations

import os

import pytest
from martlet.runtime.executors.native_library import Library, NativeUnavailable

try:
    LIBRARY = Library()
except NativeUnavailable as error:
    pytest.skip(f"native library: {error}", allow_module_level=True)

ISAS = tuple(name for name, is_supported in LIBRARY.isas() if is_supported)
# Set by scripts/sanitize.py, whose unoptimized checked code is fifty times slower.
IS_SANITIZED = bool(os.environ.get("MARTLET_SANITIZED"))
