"""/metrics: readable by a standard parser, and equal to what happened."""

from __future__ import annotations

import re
from dataclasses import replace

import httpx
import numpy as np
import pytest
from martlet.runtime.engine import Engine
from martlet.runtime.rejection import Distribution
from martlet.runtime.speculation import Speculation
from martlet.server.vllm_names import COUNTERS, GAUGES, HISTOGRAMS
from prometheus_client.parser import text_string_to_metric_families

from ..runtime.guessing import ChanceDrafter
from ..runtime.scripted import ScriptedExecutor
from .scripted_engine import ScriptedEngine, byte_tokenizer, says
from .serving import assert_refused, chat_body, serving, serving_engine, wait_until

PATH = "/v1/chat/completions"
LATENCIES = (
    "martlet_request_queue_seconds",
    "martlet_request_prefill_seconds",
    "martlet_request_decode_seconds",
    "martlet_time_to_first_token_seconds",
    "martlet_e2e_request_latency_seconds",
)
TPOT = "martlet_request_time_per_output_token_seconds"


def by_name(label: tuple[str, str]) -> tuple[bool, str]:
    """A bucket's bound first."""
    return label[0] != "le", label[0]


def scrape(client: httpx.Client) -> dict[tuple[str, ...], float]:
    """(sample name, label values but the model's) -> value; checks the text as a whole."""
    text = client.get("/metrics").text
    for kind in ("HELP", "TYPE"):
        named = re.findall(rf"^# {kind} (\S+)", text, re.M)
        assert len(named) == len(set(named))
    values: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [v for k, v in sorted(sample.labels.items(), key=by_name) if k != "model_name"]
            key = (sample.name, *labels)
            values[key] = sample.value
    for (name, *labels), value in values.items():
        if name.endswith("_count"):
            highest = (name.removesuffix("_count") + "_bucket", "+Inf", *labels)
            assert values[highest] == value
    return values


def test_b80_numbers_match_the_requests_made() -> None:
    engine = ScriptedEngine()
    with serving(engine, model_name='a"b\\c\nd') as client:
        body = {key: value for key, value in chat_body().items() if key != "model"}
        before = scrape(client)
        assert before[("martlet_requests_total", "stop")] == 0
        for is_stream in (False, False, True):
            assert client.post(PATH, json={**body, "stream": is_stream}).status_code == 200
        assert client.post(PATH, json={**body, "max_tokens": 1}).status_code == 200
        assert_refused(client.post(PATH, json={**body, "n": 0}))
        after = scrape(client)
        assert after[("martlet_requests_total", "stop")] == 3
        assert after[("martlet_requests_total", "length")] == 1
        assert after[("martlet_generation_tokens_total",)] == 3 * 6 + 1
        n_prompt = sum(len(request.prompt_ids) for request in engine.requests)
        assert after[("martlet_prompt_tokens_total", "computed")] == n_prompt
        assert after[("martlet_http_responses_total", PATH, "200")] == 4
        assert after[("martlet_http_responses_total", PATH, "400")] == 1
        for name in LATENCIES:
            assert after[(f"{name}_count", "false")] == 3
            assert after[(f"{name}_count", "true")] == 1
        # a request of one token has no time per output token
        assert after[(f"{TPOT}_count", "false")] == 2
        assert after[("martlet_inter_token_latency_seconds_count", "false")] == 10
        counters = [key for key in before if key[0].endswith(("_total", "_count", "_bucket"))]
        assert counters
        assert all(after[key] >= before[key] for key in counters)


def test_gateways_find_the_figures_under_vllm_s_names() -> None:
    engine = ScriptedEngine()
    with serving(engine, vllm_names=True) as client:
        for is_stream in (False, True):
            assert client.post(PATH, json=chat_body() | {"stream": is_stream}).status_code == 200
        found, stats = scrape(client), engine.stats()
    named = {key[0] for key in found if key[0].startswith("vllm:")}
    assert named >= {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:time_to_first_token_seconds_bucket",
    }
    # the other labels in the order of their names: engine, then finished_reason or stream
    assert found[("vllm:request_success_total", "0", "stop")] == 2
    assert found[("vllm:generation_tokens_total", "0")] == stats.tokens_decoded
    size = str(stats.block_tokens), "0", str(stats.blocks_total)
    assert found[("vllm:cache_config_info", *size)] == 1
    for ours, theirs in HISTOGRAMS.items():
        for is_stream in ("false", "true"):
            for figure in ("_count", "_sum"):
                same = found[(ours + figure, is_stream)]
                assert found[(theirs + figure, "0", is_stream)] == same
    with serving(ScriptedEngine()) as client:
        assert "vllm" not in client.get("/metrics").text, "only where it is asked for"


def test_vllm_s_gauges_are_what_they_say() -> None:
    stats = ScriptedEngine().stats()
    half = replace(stats, running=3, waiting=2, blocks_total=8, blocks_used=4)
    assert [value(half) for value in GAUGES.values()] == [3, 2, 0.5]
    cached = replace(stats, tokens_prefilled=30, tokens_cached=10)
    counts = {name: value(cached) for name, value in COUNTERS.items()}
    assert counts["vllm:prefix_cache_queries"] == counts["vllm:prompt_tokens"] == 40
    assert counts["vllm:prefix_cache_hits"] == 10


def test_b80_cancelled_requests_count_apart() -> None:
    engine = ScriptedEngine(says("", end=False), token_s=0.01)
    with serving(engine) as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post(PATH, json=chat_body(), timeout=0.3)
        wait_until(lambda: engine.n_unfinished == 0)
        values = scrape(client)
        assert values[("martlet_requests_total", "cancelled")] == 1
        assert not any(key[0] in {f"{name}_count" for name in LATENCIES} for key in values)


def test_gauges_show_running_and_waiting() -> None:
    engine = ScriptedEngine(says("", end=False), token_s=0.01, slots=1)
    with serving(engine, grace_s=0.01) as client:
        body = chat_body(stream=True)
        with client.stream("POST", PATH, json=body), client.stream("POST", PATH, json=body):
            wait_until(lambda: engine.stats().running == 1)
            values = scrape(client)
            assert values[("martlet_requests_running",)] == 1
            assert values[("martlet_requests_waiting",)] == 1
        wait_until(lambda: scrape(client)[("martlet_requests_running",)] == 0)


def test_two_apps_do_not_share_numbers() -> None:
    with serving(ScriptedEngine()) as one, serving(ScriptedEngine()) as two:
        one.post(PATH, json=chat_body())
        assert scrape(one)[("martlet_requests_total", "stop")] == 1
        assert scrape(two)[("martlet_requests_total", "stop")] == 0


def test_guesses_are_told_by_who_made_them() -> None:
    """In /metrics and in the answer's timings; by how many of a guess were right as well."""
    tokenizer = byte_tokenizer()
    chances = Distribution(np.arange(97, 107), np.linspace(3, 1, 10))
    speculation = Speculation(ChanceDrafter(chances), length=3)
    executor = ScriptedExecutor(lambda history: 97 + len(history) % 3)
    engine = Engine(executor, tokenizer, context=64, speculation=speculation)
    with serving_engine(engine, tokenizer) as client:
        body = {"prompt": "p", "max_tokens": 40, "seed": 3, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body).json()
        values = scrape(client)
    told = answer["timings"]
    assert 0 < told["draft_n_accepted"] < told["draft_n"]
    counts = {"drafted": told["draft_n"], "accepted": told["draft_n_accepted"]}
    assert told["draft_sources"] == {"chance": counts}
    n_wrong = told["draft_n"] - told["draft_n_accepted"]
    assert values[("martlet_draft_tokens_total", "accepted", "chance")] == told["draft_n_accepted"]
    assert values[("martlet_draft_tokens_total", "rejected", "chance")] == n_wrong
    drafts = {key[1]: n for key, n in values.items() if key[0] == "martlet_drafts_total"}
    assert sum(int(right) * n for right, n in drafts.items()) == told["draft_n_accepted"]
