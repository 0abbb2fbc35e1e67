"""The latency figures of one finished request, with their meanings, as a line and as JSON.
Owns the wording of the line; what the figures mean is said in runtime/latency.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from martlet.runtime import latency
from martlet.runtime.latency import rate_per_s

if TYPE_CHECKING:
    from martlet.runtime.events import FinishEvent

TOLD = ("queue_ms", "prefill_ms", "decode_ms", "end_to_end_ms", "ttft_ms", "tpot_ms")
MEANINGS = {
    **{name: latency.DEFINITIONS[name].meaning for name in TOLD},
    "tokens_per_s": "1000 / tpot_ms",
    "prefill_tokens_per_s": "Prompt tokens computed (not cached) / prefill time.",
}


def figures(finish: FinishEvent) -> dict[str, Any]:
    timings = finish.timings
    return {
        "n_prompt": finish.n_prompt,
        "n_cached": finish.n_cached,
        "n_output": finish.n_output,
        "finish_reason": finish.reason,
        "seed": finish.seed,
        **{name: getattr(timings, name) for name in TOLD},
        "tokens_per_s": rate_per_s(1, timings.tpot_ms),
        "prefill_tokens_per_s": rate_per_s(finish.n_prompt - finish.n_cached, timings.prefill_ms),
    }


def figures_line(values: dict[str, Any]) -> str:
    """`ttft 45 ms (submit to first token) · tpot 8.1 ms (decode / (n - 1)) · 123.4 tokens/s …`"""
    cached = f" ({values['n_cached']} cached)" if values["n_cached"] else ""
    parts = [
        f"ttft {number(values['ttft_ms'])} ms (submit to first token)",
        f"tpot {number(values['tpot_ms'])} ms (decode / (n - 1))",
        f"{number(values['tokens_per_s'])} tokens/s (1 / tpot)",
        f"{values['n_prompt']} prompt{cached} + {values['n_output']} output tokens",
        f"end: {values['finish_reason']}",
    ]
    if values.get("seed") is not None:
        parts.append(f"seed {values['seed']}")
    return " · ".join(parts)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
