"""What the last step asked of the machine, and which of its limits binds.

Owns: the shape of those figures. Must not know: HTTP, how limits are measured.

The work is calculated from the model's plan (runtime/work.py), the seconds are measured.
"""

from __future__ import annotations

from typing import Any

from ..runtime.engine import Engine
from ..runtime.work import PlanWork, Speed


def last_step(engine: Engine, counted: PlanWork, limits: Speed | None) -> dict[str, Any] | None:
    """None before the first step. `binds` is null where the machine's limits are not known."""
    last = engine.last_step
    if last is None:
        return None
    step, seconds = last
    work = counted.of(step)
    found: dict[str, Any] = {
        "rows": step.n_rows,
        "sequences": step.n_seqs,
        "int8_macs": work.int8_macs,
        "f32_macs": work.f32_macs,
        "bytes": work.n_bytes,
        "seconds": seconds,
        "binds": None,
    }
    if limits:
        multiply, memory = limits.seconds(work)
        found["binds"] = "multiply" if multiply > memory else "memory"
        found["limit_share"] = max(multiply, memory) / seconds
    return found
