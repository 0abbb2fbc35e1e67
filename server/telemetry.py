"""Requests as OpenTelemetry spans, by the names of its conventions for generative AI.

Owns: what a span holds, and when its phases were. Must not know: where spans go, which is the
provider's affair.

A request is one span, `chat MODEL` or `text_completion MODEL`, from its arrival to its last token,
with children `queue`, `prefill` and `decode`: the phases of the engine's own stamps, so that they
meet without a gap. Several answers to one request have their children side by side. A caller that
sends `traceparent` has our span below its own. Texts are never part of it. Conventions:
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/ (in development, as of 2026).
"""

from __future__ import annotations

import time
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, TracerProvider

from ..runtime.events import Event, FinishEvent
from ..runtime.latency import NS_PER_MS
from .spans import Observe, Told

COMPLETIONS = ("/v1/completions", "/api/generate")  # all other routes chat
FAILED = ("error", "deadline")


class OtelSpans:
    """Makes the observer of each request. Spans appear when it has ended, with their own times."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("martlet")

    def __call__(self, told: Told) -> Observe:
        ends: dict[int, FinishEvent] = {}
        # Stamps are of the monotonic clock, spans of the one on the wall.
        arrived_ns = told.arrived_ns + time.time_ns() - time.monotonic_ns()

        def observe(index: int, event: Event) -> None:
            if isinstance(event, FinishEvent):
                ends[index] = event
                if len(ends) == told.n_asks:
                    _write(self._tracer, told, arrived_ns, ends)

        return observe


def _write(tracer: Tracer, told: Told, arrived_ns: int, ends: dict[int, FinishEvent]) -> None:
    operation = "text_completion" if told.path in COMPLETIONS else "chat"
    root = tracer.start_span(
        f"{operation} {told.asked_model}",
        context=propagate.extract(told.headers),
        kind=SpanKind.SERVER,
        start_time=arrived_ns,
        attributes=_attributes(told, operation, ends),
    )
    context = trace.set_span_in_context(root)
    for index, end in sorted(ends.items()):
        at_ns, timings = arrived_ns, end.timings
        for phase, ms in (
            ("queue", timings.queue_ms),
            ("prefill", timings.prefill_ms),
            ("decode", timings.decode_ms),
        ):
            until_ns = at_ns + round(ms * NS_PER_MS)
            span = tracer.start_span(
                phase, context, start_time=at_ns, attributes={"martlet.choice": index}
            )
            span.end(until_ns)
            at_ns = until_ns
    _end(root, arrived_ns, ends)


def _end(root: Span, arrived_ns: int, ends: dict[int, FinishEvent]) -> None:
    failed = next((end for end in ends.values() if end.reason in FAILED), None)
    if failed:
        root.set_attribute("error.type", failed.reason)
        root.set_status(StatusCode.ERROR, failed.error)
    longest_ms = max(end.timings.end_to_end_ms for end in ends.values())
    root.end(arrived_ns + round(longest_ms * NS_PER_MS))


def _attributes(told: Told, operation: str, ends: dict[int, FinishEvent]) -> dict[str, Any]:
    params, finished = told.params, [end for _, end in sorted(ends.items())]
    ttft = [end.timings.ttft_ms for end in finished if end.timings.ttft_ms is not None]
    known: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "martlet",
        "gen_ai.request.model": told.asked_model,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_k": params.top_k or None,  # 0 is off
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.stop_sequences": params.stop or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.choice.count": told.n_asks if told.n_asks > 1 else None,
        "gen_ai.response.id": told.answer_id,
        "gen_ai.response.model": told.served_model,
        "gen_ai.response.finish_reasons": tuple(end.reason for end in finished),
        "gen_ai.usage.input_tokens": sum(end.n_prompt for end in finished),
        "gen_ai.usage.output_tokens": sum(end.n_output for end in finished),
        "gen_ai.usage.cache_read.input_tokens": sum(end.n_cached for end in finished),
        "martlet.time_to_first_token_ms": min(ttft, default=None),
        "martlet.preemptions": sum(end.trace.n_preempted for end in finished),
    }
    return {name: value for name, value in known.items() if value is not None}
