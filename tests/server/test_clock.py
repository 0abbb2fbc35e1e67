"""A wall clock that is set meanwhile: no figure, deadline or waiting time is taken from it."""

from __future__ import annotations

import itertools
import time

import pytest
from martlet.runtime.engine import Engine

from ..runtime.scripted import ScriptedExecutor
from .scripted_engine import byte_tokenizer
from .serving import assert_works, chat_body, serving_engine

YEAR_S = 365 * 86400


def test_a_clock_that_jumps_changes_nothing_but_dates(monkeypatch: pytest.MonkeyPatch) -> None:
    real, jumps = time.time, itertools.cycle((YEAR_S, -YEAR_S, 0))
    tokenizer = byte_tokenizer()
    engine = Engine(
        ScriptedExecutor(lambda history: ord("x"), seconds_per_step=0.002), tokenizer, context=256
    )
    with serving_engine(engine, tokenizer, max_request_s=60, body_s=30) as client:
        monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
        for is_stream in (False, True):
            body = chat_body(max_tokens=20, deadline_ms=50_000, stream=is_stream)
            assert client.post("/v1/chat/completions", json=body).status_code == 200
        answer = client.post("/v1/chat/completions", json=chat_body(max_tokens=20)).json()
        times = {k: v for k, v in answer["timings"].items() if k.endswith("_ms")}
        assert times["end_to_end_ms"] >= 40
        assert all(0 <= value < 50_000 for value in times.values()), times
        recent = client.get("/stats").json()["recent"]
        assert recent["n"] == 3
        for figure in ("ttft_ms", "tpot_ms"):
            assert all(0 <= value < 50_000 for value in recent[figure].values()), recent
        monkeypatch.undo()
        assert_works(client)
