"""Each figure of a load on a server with known delays is what its definition says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from martlet.scripts.load_figures import figures_of
from martlet.scripts.load_http import Chunked, Connections
from martlet.scripts.load_run import Asked, Run, run_load
from martlet.scripts.load_stream import Heard, read_stream
from martlet.scripts.load_targets import HttpTarget
from martlet.scripts.load_workload import Conversation, Turn

from .paced_server import PacedServer, end, paced_server

Script = list[tuple[float, Any]]
SLACK_MS = 400  # of a machine that does other things
USAGE = {"prompt_tokens": 7, "completion_tokens": 3}
PLAIN: Script = [(120, "a"), (40, "b"), (40, "c"), (0, end("length", USAGE))]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, PacedServer]]:
    with paced_server() as both:
        yield both


def ask(url: str, *scripts: Script, n_streams: int | None = 1, **others: Any) -> Run:
    """Each script is what one conversation of one turn is answered."""
    timeout_s = others.pop("timeout_s", None)
    at_s = others.pop("at_s", [None] * len(scripts))
    work = [
        Conversation((Turn(json.dumps(script), 8),), at)
        for script, at in zip(scripts, at_s, strict=True)
    ]

    async def run() -> Run:
        target = HttpTarget(url, "paced", **others)
        try:
            return await run_load(target, work, n_streams, timeout_s=timeout_s)
        finally:
            await target.close()

    return asyncio.run(run())


def one(url: str, script: Script, **others: Any) -> Asked:
    (found,) = ask(url, script, **others).asked
    return found


def is_about(value: float | None, expected_ms: float) -> bool:
    """A time from the request on: never shorter than the server waits."""
    return value is not None and expected_ms - 2 <= value < expected_ms + SLACK_MS


def lasts_about(value: float | None, expected_ms: float) -> bool:
    """A time between arrivals: shorter by as much as the first of them was late."""
    return value is not None and expected_ms / 2 <= value < expected_ms + SLACK_MS


def test_a_plain_stream(server: tuple[str, PacedServer]) -> None:
    found = one(server[0], PLAIN)
    seen = found.seen
    assert (seen.outcome, seen.n_output, seen.n_prompt, found.reason) == ("ok", 3, 7, "length")
    assert is_about(seen.ttft_ms, 120)
    assert lasts_about(seen.tpot_ms, 40)
    assert is_about(seen.end_to_end_ms, 200)
    assert seen.piece_tokens == (1, 1, 1)
    assert len(seen.token_gaps_ms) == 2
    assert seen.end_to_end_ms == pytest.approx(seen.ttft_ms + 2 * seen.tpot_ms)


def test_nothing_that_is_not_a_token_counts(server: tuple[str, PacedServer]) -> None:
    """A role before the prefill is no first token; usage after the last one is no end."""
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    text = {"choices": [{"delta": {"content": "a"}, "finish_reason": None}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 1}}
    seen = one(server[0], [(0, role), (150, text), (0, end("length")), (300, usage)]).seen
    assert is_about(seen.ttft_ms, 150)
    assert seen.end_to_end_ms == seen.ttft_ms
    assert (seen.n_output, seen.tpot_ms) == (1, None)


def test_reasoning_and_calls_are_tokens(server: tuple[str, PacedServer]) -> None:
    thought = {"choices": [{"delta": {"reasoning_content": "hm"}, "finish_reason": None}]}
    call = {"choices": [{"delta": {"tool_calls": [{"index": 0}]}, "finish_reason": None}]}
    usage = {"prompt_tokens": 7, "completion_tokens": 2}
    seen = one(server[0], [(100, thought), (60, call), (0, end("tool_calls", usage))]).seen
    assert is_about(seen.ttft_ms, 100)
    assert lasts_about(seen.tpot_ms, 60)


def test_steps_of_several_tokens(server: tuple[str, PacedServer]) -> None:
    def told(text: str, n: int) -> dict[str, Any]:
        return {"choices": [{"text": text}], "usage": {"completion_tokens": n}}

    usage = {"prompt_tokens": 7, "completion_tokens": 4}
    seen = one(
        server[0], [(50, told("a", 1)), (90, told("bcd", 4)), (0, end("length", usage))]
    ).seen
    assert seen.piece_tokens == (1, 3)
    assert lasts_about(seen.step_gaps_ms[0], 90)
    assert seen.token_gaps_ms == [seen.step_gaps_ms[0], 0, 0]
    assert seen.tpot_ms == pytest.approx(seen.step_gaps_ms[0] / 3)


def test_pieces_that_hold_nobody_knows_what(server: tuple[str, PacedServer]) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 9}
    seen = one(server[0], [(10, "a"), (30, "bcd"), (0, end("length", usage))]).seen
    assert seen.piece_tokens is None
    assert seen.token_gaps_ms == []
    assert seen.tpot_ms == pytest.approx(seen.step_gaps_ms[0] / 8)


def test_the_token_that_ends_an_answer_has_no_text(server: tuple[str, PacedServer]) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    seen = one(server[0], [(10, "a"), (30, "b"), (80, end("stop", usage))]).seen
    assert seen.piece_tokens == (1, 1, 1)
    assert lasts_about(seen.step_gaps_ms[1], 80)
    only = one(server[0], [(60, end("stop", {"prompt_tokens": 7, "completion_tokens": 1}))]).seen
    assert is_about(only.ttft_ms, 60)
    assert only.end_to_end_ms == only.ttft_ms


def test_without_usage_pieces_are_counted(server: tuple[str, PacedServer]) -> None:
    seen = one(server[0], [(10, "a"), (10, "b"), (0, end("length"))]).seen
    assert (seen.n_output, seen.n_prompt) == (2, None)


def test_cached_tokens_in_both_dialects(server: tuple[str, PacedServer]) -> None:
    usage = {**USAGE, "prompt_tokens_details": {"cached_tokens": 5}}
    assert one(server[0], [(1, "a"), (0, end("length", usage))]).seen.n_cached == 5
    theirs = {**end("length", USAGE), "timings": {"cache_n": 4}}
    assert one(server[0], [(1, "a"), (0, theirs)]).seen.n_cached == 4


def test_without_a_stream_there_is_only_an_end(server: tuple[str, PacedServer]) -> None:
    whole = {**end("length", USAGE), "choices": [{"text": "abc", "finish_reason": "length"}]}
    seen = one(server[0], [(80, whole)], is_stream=False).seen
    assert (seen.outcome, seen.n_output, seen.ttft_ms, seen.tpot_ms) == ("ok", 3, None, None)
    assert is_about(seen.end_to_end_ms, 80)


@pytest.mark.parametrize(
    ("script", "outcome", "error"),
    [
        ([(1, "a"), (0, {"error": {"message": "no more"}})], "error", "no more"),
        ([(1, "a"), (0, {"close": True})], "error", "in the middle of an answer"),
        ([(1, "a"), (0, {"cut": True})], "error", "broke off"),
        ([(0, {"status": 503, "error": {"message": "full"}})], "error", "status 503"),
        ([(1, "a"), (5000, "b")], "cancelled", "no end after 0.2 s"),
    ],
)
def test_what_does_not_end_well(
    server: tuple[str, PacedServer], script: Script, outcome: str, error: str
) -> None:
    run = ask(server[0], script, PLAIN, timeout_s=None if outcome == "error" else 0.2, n_streams=2)
    bad = next(each for each in run.asked if each.error)
    assert (bad.seen.outcome, error in (bad.error or "")) == (outcome, True), bad.error
    figures = figures_of([run], {"ttft_ms": 1e6})
    if outcome == "error":
        assert figures["ended_badly"].samples == (1,)
        assert figures["goodput.share"].samples == (0.5,)
        assert figures["output_tokens_per_s"].median == pytest.approx(
            3 / figures["window_s"].median
        )


def test_a_server_that_is_not_there() -> None:
    found = one("http://127.0.0.1:9", PLAIN)
    assert found.seen.outcome == "error"


def test_a_closed_loop_has_as_many_in_flight_and_keeps_connections(
    server: tuple[str, PacedServer],
) -> None:
    url, paced = server
    before = paced.n_connections
    run = ask(url, *[PLAIN] * 6, n_streams=2)
    changes = sorted(
        [(each.sent_ns, 1) for each in run.asked] + [(each.seen.end_ns, -1) for each in run.asked]
    )
    in_flight = [sum(change for _, change in changes[: i + 1]) for i in range(len(changes))]
    assert max(in_flight) == 2
    # One for each stream and one for looking at the cache.
    assert paced.n_connections - before <= 3


def test_an_open_loop_counts_from_when_a_request_was_due(server: tuple[str, PacedServer]) -> None:
    run = ask(server[0], *[PLAIN] * 3, n_streams=None, at_s=[0.0, 0.05, 0.1])
    due_s = [(each.seen.arrived_ns - run.start_ns) / 1e9 for each in run.asked]
    assert due_s == pytest.approx([0, 0.05, 0.1], abs=1e-6)
    assert all(each.late_ms >= 0 for each in run.asked)
    # Nobody waits for anybody: the third begins before the first has ended.
    assert run.asked[2].sent_ns < run.asked[0].seen.end_ns


def test_turns_follow_each_other_and_hold_what_was_said(server: tuple[str, PacedServer]) -> None:
    url, paced = server
    work = [Conversation((Turn("first", 2), Turn(" second", 3)))]

    async def run(endpoint: Any) -> Run:
        return await run_load(HttpTarget(url, "paced", endpoint), work, 1)

    found = asyncio.run(run("completions"))
    assert [each.turn for each in found.asked] == [0, 1]
    assert paced.asked[-1]["prompt"] == "firstxx second"
    asyncio.run(run("chat"))
    assert paced.asked[-1]["messages"] == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "xx"},
        {"role": "user", "content": " second"},
    ]


@given(
    st.lists(st.binary(min_size=1, max_size=20), max_size=6),
    st.lists(st.integers(1, 9), max_size=40),
    st.sampled_from((b"", b"Server-Timing: a\r\n")),
)
def test_frames_come_off_however_reads_are_cut(
    chunks: list[bytes], cuts: list[int], trailers: bytes
) -> None:
    framed = b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in chunks)
    framed += b"0\r\n" + trailers + b"\r\n"
    chunked, got, at = Chunked(), b"", 0
    for size in [*cuts, len(framed)]:
        got += chunked.feed(framed[at : at + size])
        at += size
        # What is left of an answer would be taken for the beginning of the next one.
        assert chunked.is_over == (at >= len(framed))
    assert got == b"".join(chunks)


def test_a_server_that_closes_after_each_answer_is_asked_anew() -> None:
    """As llama-server does: the last line end by itself, then the connection goes, unannounced."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    n_connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal n_connections
        n_connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head + b"2\r\nhi\r\n0\r\n")
        await asyncio.sleep(0.05)
        writer.write(b"\r\n")
        await asyncio.sleep(0.05)
        writer.close()

    async def visit() -> list[bytes]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connections = Connections(f"http://127.0.0.1:{port}")
        replies = [await connections.ask("POST", "/", b"") for _ in range(3)]
        server.close()
        return [reply.body for reply in replies]

    assert asyncio.run(visit()) == [b"hi"] * 3
    assert n_connections == 3


@given(st.lists(st.integers(1, 30), max_size=60))
def test_events_are_read_however_they_were_cut(cuts: list[int]) -> None:
    events = [{"choices": [{"text": "é" * n}]} for n in (1, 2, 3)]
    usage = {"prompt_tokens": 2, "completion_tokens": 3}
    lines = [json.dumps(each, ensure_ascii=False) for each in [*events, end("length", usage)]]
    data = "".join(f": ping\n\ndata: {line}\r\n\r\n" for line in [*lines, "[DONE]"]).encode()
    pieces, at = [], 0
    for nth, size in enumerate([*cuts, len(data)]):
        pieces.append((nth, data[at : at + size]))
        at += size
    heard = read_stream(pieces)
    assert (heard.text, heard.error, heard.n_output) == ("é" * 6, None, 3)
    assert heard.piece_ns == sorted(heard.piece_ns)
    assert isinstance(heard, Heard)
