"""Spans of requests, as OpenTelemetry's own in-memory exporter keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk.trace", reason="the extra `otel` is not installed")

import httpx
from martlet.server.telemetry import OtelSpans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from .scripted_engine import ScriptedEngine, says
from .serving import assert_refused, chat_body, serving, wait_until

CHAT = "/v1/chat/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PHASES = ["queue", "prefill", "decode"]


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Iterator[OtelSpans]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield OtelSpans(provider)
    provider.shutdown()


def finished(exporter: InMemorySpanExporter, n: int) -> tuple[ReadableSpan, list[ReadableSpan]]:
    """The one request, and its children in their order."""
    wait_until(lambda: len(exporter.get_finished_spans()) == n)
    *children, root = exporter.get_finished_spans()
    return root, children


def post(client: httpx.Client, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    answer = client.post(path, json={**chat_body(), **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_and_its_phases(
    exporter: InMemorySpanExporter, spans: OtelSpans, is_stream: bool
) -> None:
    engine = ScriptedEngine(says("four"), token_s=0.002)
    asked = {"temperature": 0.5, "max_tokens": 9, "seed": 3, "stop": ["x"], "top_p": 0.9}
    with serving(engine, spans=spans) as client:
        body = {**chat_body(), **asked, "stream": is_stream}
        answer = client.post(CHAT, json=body)
        assert answer.status_code == 200
        root, children = finished(exporter, 4)
    assert root.name == "chat tiny"
    assert root.kind is SpanKind.SERVER
    assert root.parent is None
    assert [each.name for each in children] == PHASES
    told = dict(root.attributes or {})
    assert told.pop("gen_ai.response.id").startswith("chatcmpl-")
    assert told.pop("martlet.time_to_first_token_ms") > 0
    assert told == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "martlet",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 3,
        "gen_ai.request.stop_sequences": ("x",),
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": len(engine.requests[0].prompt_ids),
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "martlet.preemptions": 0,
    }
    # One after the other, from the arrival to the last token.
    at = root.start_time
    for child in children:
        assert child.parent is not None
        assert child.parent.span_id == root.context.span_id
        assert child.start_time == at
        at = child.end_time
    assert abs(at - root.end_time) <= 2  # nanoseconds: each phase is rounded


def test_the_phases_are_those_the_answer_tells(
    exporter: InMemorySpanExporter, spans: OtelSpans
) -> None:
    with serving(ScriptedEngine(says("hello"), token_s=0.003), spans=spans) as client:
        timings = post(client)["timings"]
        _, children = finished(exporter, 4)
    lasted = {each.name: (each.end_time - each.start_time) / 1e6 for each in children}
    for phase in PHASES:
        assert lasted[phase] == pytest.approx(timings.get(f"{phase}_ms", lasted[phase]), abs=1e-3)
    assert lasted["decode"] == pytest.approx(timings["predicted_ms"], abs=1e-3)


def test_a_caller_s_span_is_the_parent(exporter: InMemorySpanExporter, spans: OtelSpans) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    with serving(ScriptedEngine(), spans=spans) as client:
        assert client.post(CHAT, json=chat_body(), headers=headers).status_code == 200
        root, children = finished(exporter, 4)
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == PARENT
    assert {f"{each.context.trace_id:032x}" for each in (root, *children)} == {TRACE}


def test_answers_to_one_request_lie_side_by_side(
    exporter: InMemorySpanExporter, spans: OtelSpans
) -> None:
    engine = ScriptedEngine(says("ab"))
    with serving(engine, spans=spans) as client:
        post(client, "/v1/completions", prompt="x", n=2, messages=None)
        root, children = finished(exporter, 7)
    assert root.name == "text_completion tiny"
    told = root.attributes or {}
    assert told["gen_ai.request.choice.count"] == 2
    assert told["gen_ai.response.finish_reasons"] == ("stop", "stop")
    assert told["gen_ai.usage.output_tokens"] == 6
    by_choice = [((each.attributes or {})["martlet.choice"], each.name) for each in children]
    assert by_choice == [(choice, phase) for choice in (0, 1) for phase in PHASES]


def test_how_others_end(exporter: InMemorySpanExporter, spans: OtelSpans) -> None:
    engine = ScriptedEngine(says("", end=False), token_s=0.005)
    with serving(engine, spans=spans, grace_s=0.01) as client:
        with client.stream("POST", CHAT, json=chat_body(stream=True)) as answer:
            next(answer.iter_bytes())
        root, _ = finished(exporter, 4)
        assert (root.attributes or {})["gen_ai.response.finish_reasons"] == ("cancelled",)
        assert root.status.status_code is StatusCode.UNSET
        exporter.clear()
        assert_refused(client.post(CHAT, json=chat_body(temperature=-1)))
    assert exporter.get_finished_spans() == ()


def test_an_engine_that_fails_is_an_error(exporter: InMemorySpanExporter, spans: OtelSpans) -> None:
    from martlet.runtime.events import FinishEvent
    from martlet.runtime.latency import Timings
    from martlet.runtime.sampling_params import SamplingParams
    from martlet.server.spans import Told

    told = Told("/v1/messages", {}, "msg-1", "alias", "tiny", SamplingParams(), 1, 10**9)
    timings = Timings(queue_ms=1.0, prefill_ms=0.0, decode_ms=0.0, n_output=0)
    end = FinishEvent("error", "", timings, "no memory", 3, 0, 0, 1)
    spans(told)(0, end)
    root, _ = finished(exporter, 4)
    assert root.name == "chat alias"
    assert root.status.status_code is StatusCode.ERROR
    assert root.status.description == "no memory"
    attributes = root.attributes or {}
    assert attributes["error.type"] == "error"
    assert attributes["gen_ai.response.model"] == "tiny"
    assert "martlet.time_to_first_token_ms" not in attributes


def test_without_the_extra_the_way_to_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from martlet.scripts.errors import MissingExtra
    from martlet.scripts.telemetry import open_spans

    with open_spans(False) as none:
        assert none is None
    with open_spans(True) as made:
        assert isinstance(made, OtelSpans)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"martlet\[otel\]"), open_spans(True):
        pass
