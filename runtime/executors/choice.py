"""Chooses an executor by name, and says why.

Executors are imported only when wanted: one of them needs a compiled library, another a compiler
of its own. A new executor is a row in EXECUTORS.
"""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from typing import Any

from ..errors import MartletError, RequestError
from ..plan import Plan
from ..weights import WeightSource
from . import Executor

# name -> (module beside this file, class, what fails there where the machine lacks something),
# best first
EXECUTORS: dict[str, tuple[str, str, str | None]] = {
    "native": ("native", "NativeExecutor", "Library"),
    "numba": ("numba_executor", "NumbaExecutor", None),
    "reference": ("reference", "ReferenceExecutor", None),
}
_AUTO = ("native", "numba")


def create_executor(
    name: str, plan: Plan, weights: WeightSource, **options: Any
) -> tuple[Executor, str]:
    """The executor and one line on why it was taken. Options that are None are left out."""
    options = {key: value for key, value in options.items() if value is not None}
    _, chosen, reasons, verdict = _choose(name, options.get("isa"))
    executor = _create(chosen, plan, weights, options)
    return executor, "; ".join([*reasons, f"{chosen}: {verdict}"])


def likely_executor(name: str, isa: str | None = None) -> tuple[type, str, str]:
    """The class that create_executor would take, its name, and why. A plan may be beyond it."""
    found, chosen, reasons, verdict = _choose(name, isa)
    return found, chosen, "; ".join(reasons) if name == "auto" else verdict


def _choose(name: str, isa: str | None) -> tuple[type, str, list[str], str]:
    """The class, its name, what spoke against others, and what for this one."""
    if name != "auto":
        return executor_class(name), name, [], "asked for"
    reasons: list[str] = []
    slow: list[tuple[type, str]] = []  # works here, but another may be faster
    for candidate in _AUTO:
        try:
            found = executor_class(candidate)
        except (ImportError, OSError, MartletError) as error:
            reasons.append(f"{candidate} is not available: {error}")
            continue
        why_slow = getattr(found, "why_slow", lambda: None)()
        if not why_slow or isa is not None:
            return found, candidate, reasons, "the fastest available"
        reasons.append(f"{candidate}: {why_slow}")
        slow.append((found, candidate))
    for found, candidate in slow:
        return found, candidate, reasons, "taken all the same"
    raise RequestError("; ".join([*reasons, "choose executor='reference'"]))


def executor_class(name: str) -> type:
    """Imports what the executor needs; fails where this machine lacks it."""
    if name not in EXECUTORS:
        raise RequestError(f"executor {name!r} is unknown; known: auto, {', '.join(EXECUTORS)}")
    module_name, class_name, probe = EXECUTORS[name]
    module = import_module(f".{module_name}", __package__)
    if probe is not None:
        getattr(module, probe)()
    found: type = getattr(module, class_name)
    return found


def _create(name: str, plan: Plan, weights: WeightSource, options: dict[str, Any]) -> Executor:
    """Options that this executor has no use for, as threads or an ISA, are left out."""
    found = executor_class(name)
    known = signature(found).parameters
    taken = {key: value for key, value in options.items() if key in known}
    executor: Executor = found(plan, weights, **taken)
    return executor
