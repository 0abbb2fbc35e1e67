"""What `martlet top` says of a server whose answers are scripted, and of a real engine."""

import numpy as np
import pytest
from martlet.runtime.engine import Engine
from martlet.runtime.work import Speed
from martlet.scripts.top_sample import Change, NoServer, Sample, Server, counts_of
from martlet.scripts.top_view import bar, lines, view
from typer.testing import CliRunner

from ..runtime.scripted import ScriptedExecutor
from ..server.scripted_engine import VOCAB_SIZE, ScriptedEngine, byte_tokenizer, says
from ..server.serving import chat_body, running_app, serving, serving_engine

STEP = {
    "rows": 8,
    "sequences": 8,
    "int8_macs": 3_000_000,
    "f32_macs": 1_000_000,
    "bytes": 2_000_000,
    "seconds": 0.001,
    "binds": None,
}
STATS = {
    "model": "tiny",
    "state": "ready",
    "last_step": STEP,
    "recent": {
        "n": 3,
        "ttft_ms": {"p50": 12.0, "p95": 34.0},
        "tpot_ms": {"p50": None, "p95": None},
    },
}


def change_of(before: dict, now: dict, seconds: float = 2.0, stats: dict | None = None) -> Change:
    return Change(Sample(0.0, before, {}), Sample(seconds, now, stats or STATS))


def said(change: Change, speed: Speed | None = None) -> dict[str, str]:
    _, *rest = lines(change, speed)
    return dict(line.rsplit(": ", 1) for line in rest)


def test_rates_are_of_the_time_between_two_looks() -> None:
    before = {"steps": 100, "rows": 500, "generation_tokens": 50, "prompt_tokens.cached": 64}
    now = {
        **{"steps": 110, "rows": 540, "generation_tokens": 90, "prompt_tokens.cached": 96},
        **{"prompt_tokens.computed": 96, "requests.stop": 4, "requests.cancelled": 2},
        **{"requests_running": 3, "requests_waiting": 1, "preemptions": 5},
        **{"kv_blocks": 24, "kv_blocks_used": 6, "kv_blocks_cached": 12, "kv_blocks_shared": 2},
        **{"draft_tokens.lookup.accepted": 2, "draft_tokens.model.accepted": 1},
        **{"draft_tokens.lookup.rejected": 1},
    }
    found = said(change_of(before, now))
    assert found["steps: steps/s"] == "5.00"
    assert found["steps: rows per step"] == "4.00"
    assert found["steps: output tokens/s"] == "20.0"
    assert found["steps: from the cache/s"] == "16.0"
    assert found["steps: guesses right"] == "75%"
    assert found["requests: running"] == "3"
    assert found["requests: ended: stop"] == "4"
    assert found["requests: ended: cancelled"] == "2"
    assert found["requests: ended per second"] == "3.00"
    assert "requests: ended: error" not in found
    assert found["KV blocks: in use"] == "6 of 24"
    assert found["KV blocks: prefix hits"] == "50% of prompt tokens"
    assert found["KV blocks: now"] == "25%"
    assert found["last answers: first token, p50/p95"] == "12.0 / 34.0 ms"
    assert found["last answers: per token after, p50/p95"] == "- / - ms"


def test_a_server_started_anew_has_no_negative_rates() -> None:
    assert said(change_of({"steps": 100}, {"steps": 3}))["steps: steps/s"] == "0.00"


def test_the_bar_is_as_wide_as_the_pool() -> None:
    assert bar(6, 12, 24) == "█" * 6 + "▒" * 12 + "·" * 6
    assert bar(24, 24, 24) == "█" * 24
    assert bar(0, 0, 0) == "-"


@pytest.mark.parametrize(
    ("speed", "bound"),
    [
        (None, "not known: give --int8 and --read"),
        (Speed(6e9, 2e9, 8e9), "multiply, 100% of it"),
        (Speed(600e9, 200e9, 4e9), "memory, 50% of it"),
    ],
)
def test_what_binds_is_the_slower_limit(speed: Speed | None, bound: str) -> None:
    found = dict(line.split(": ", 2)[1:] for line in lines(change_of({}, {}), speed)[1:])
    assert found["bound by"] == bound
    assert found["multiplied"] == "4.00 GMAC/s"
    assert found["read"] == "2.00 GB/s"
    known = {**STATS, "last_step": {**STEP, "binds": "memory", "limit_share": 0.25}}
    told = [line for line in lines(change_of({}, {}, stats=known), None) if "bound" in line]
    assert told == ["last step: bound by: memory, 25% of it"]


def test_counts_of_other_models_are_left_out() -> None:
    text = (
        "# TYPE martlet_steps_total counter\n"
        'martlet_steps_total{model_name="a"} 3.0\nmartlet_steps_total{model_name="b"} 4.0\n'
        "# TYPE martlet_requests_total counter\n"
        'martlet_requests_total{model_name="a",reason="stop"} 5.0\n'
        "# TYPE other gauge\nother 1.0\n"
    )
    assert counts_of(text, "a") == {"steps": 3.0, "requests.stop": 5.0}


def test_the_screen_says_the_same() -> None:
    from rich.console import Console

    change = change_of({}, {"requests_running": 3, "kv_blocks": 8, "kv_blocks_used": 8})
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(view(change, None))
    text = console.export_text()
    for part in ("requests", "steps", "KV blocks", "last answers", "last step", "tiny · ready"):
        assert part in text
    assert "█" * 24 in text


def test_against_a_server_that_answers() -> None:
    engine = ScriptedEngine(says("four"))
    with serving(engine) as client:
        server = Server(str(client.base_url))
        before = server.look()
        for _ in range(3):
            assert client.post("/v1/chat/completions", json=chat_body()).status_code == 200
        change = Change(before, server.look())
    found = said(change)
    assert found["requests: ended: stop"] == "3"
    assert change.of("generation_tokens") == 3 * 5
    assert found["last answers: counted"] == "3"
    assert found["last answers: first token, p50/p95/p99"].endswith(" ms")


def test_rows_of_a_real_engine() -> None:
    def script(history: np.ndarray) -> np.ndarray:
        return np.zeros(VOCAB_SIZE, np.float32)

    tokenizer = byte_tokenizer()
    engine = Engine(ScriptedExecutor(script), tokenizer, context=64)
    with serving_engine(engine, tokenizer) as client:
        server = Server(str(client.base_url))
        before = server.look()
        body = {"prompt": "abcd", "max_tokens": 3}
        assert client.post("/v1/completions", json=body).status_code == 200
        change = Change(before, server.look())
    n_prompt = change.of("prompt_tokens.computed")
    assert change.of("steps") == 3
    assert change.of("rows") == n_prompt + 2  # the last token is never computed


def run(*words: str) -> tuple[int, str, str]:
    from martlet.scripts.cli import app

    done = CliRunner().invoke(app, ["top", *words])
    return done.exit_code, done.stdout, done.stderr


def test_the_command() -> None:
    with serving(ScriptedEngine(), api_keys=("k",)) as client:
        address = str(client.base_url).removeprefix("http://")
        quick = ("--once", "--every", "0.1")
        code, out, _ = run(address, *quick, "--api-key", "k", "--int8", "1", "--read", "1")
        assert code == 0
        assert out.startswith("tiny · ready · over 0.")
        assert "last step: : none yet" in out
        code, _, error = run(address, *quick)
        assert (code, error.count("\n")) == (1, 1)
        assert "answered 401; give its key with --api-key" in error
    code, _, error = run(address, *quick)
    assert (code, error.count("\n")) == (1, 1)
    assert "nobody answers at" in error
    assert run("--int8", "3")[0] == 2


def test_who_is_no_martlet_is_told_so() -> None:
    async def app(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hello"})

    with running_app(app) as url, pytest.raises(NoServer, match="does not answer as martlet does"):
        Server(url).look()
