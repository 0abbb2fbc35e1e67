"""One Python target under atheris: `python -m tests.fuzz.drive TARGET [libFuzzer arguments]`."""

from __future__ import annotations

import gc
import importlib
import logging
import shlex
import sys
from types import FunctionType

import atheris  # type: ignore[import-not-found]

WATCHED = ("martlet.", "jinja2.")


def watch() -> None:
    """Coverage of our functions. The hook on imports does not see those of an editable install."""
    for value in gc.get_objects():
        if isinstance(value, FunctionType) and str(value.__module__).startswith(WATCHED):
            atheris.instrument_func(value)


def main() -> None:
    name = sys.argv.pop(1)
    target = importlib.import_module(f"{__package__}.{name}")
    # What libFuzzer runs again for each part of a merge, through a shell and without our help.
    sys.argv[0] = f"{shlex.quote(sys.executable)} -m {__package__}.drive {name}"
    logging.getLogger("martlet").setLevel(logging.ERROR)  # here alone: tests read what is logged
    watch()
    gc.freeze()  # what was imported stays: collections need not look at it again and again
    atheris.Setup(sys.argv, target.run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
