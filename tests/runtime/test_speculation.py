"""Guesses never change a text; they are made where they pay, and found where words repeat."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from martlet.runtime.drafts import LEAST_MATCH, Draft, PromptLookup, copied
from martlet.runtime.errors import RequestError
from martlet.runtime.events import DraftCounts
from martlet.runtime.grammar import Grammars, json_grammar
from martlet.runtime.sampling import SamplingParams
from martlet.runtime.speculation import (
    FIRST_LOAN,
    LOAN_SHARE,
    MOST,
    MOST_SPARE,
    PROBE_EVERY,
    Speculation,
    speculation_of,
)
from martlet.runtime.step_costs import StepCosts
from martlet.scripts.scripted_drafter import ScriptedDrafter

from .guessing import always
from .harness import Answer, ask, engine_of, run_all
from .scripted import ScriptedExecutor, ScriptedTokenizer, hashed, hashed_logits

FLAT = {1: 1.0, 16: 1.0}  # a machine that only waits for memory
STEEP = {1: 1.0, 16: 16.0}  # one that only multiplies


# ---- the same text ------------------------------------------------------------------------------

REQUEST = st.fixed_dictionaries(
    {
        "length": st.integers(1, 40),
        "arrives_at": st.integers(0, 12),
        "cancelled_at": st.sampled_from([None, None, None, 3, 9]),
        "temperature": st.sampled_from([0.0, 0.7, 1.3]),
        "max_tokens": st.integers(1, 30),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "stop": st.sampled_from([(), ("a", "e"), ("th",)]),
    }
)


def said(visits: list[dict[str, Any]], speculation: Any, **options: Any) -> list[Answer]:
    engine, _ = engine_of(hashed_logits(), context=96, speculation=speculation, **options)
    answers = [Answer() for _ in visits]
    for now in range(14):
        for i, visit in enumerate(visits):
            if visit["arrives_at"] == now:
                names = ("temperature", "max_tokens", "repetition_penalty", "stop")
                params = SamplingParams(seed=i, **{name: visit[name] for name in names})
                prompt = [1 + k % 7 for k in range(visit["length"])]
                engine.submit(prompt, params, answers[i], request_id=str(i))
            if visit["cancelled_at"] == now:
                engine.cancel(str(i))
        engine.step()
        engine.scheduler.check()
    run_all(engine)
    return answers


@given(
    visits=st.lists(REQUEST, min_size=1, max_size=8),
    length=st.integers(1, 12),
    accuracy=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    n_blocks=st.integers(24, 60),
    step_rows=st.sampled_from([4, 9, 64]),
    prefix_reuse=st.booleans(),
    window=st.sampled_from([0, 5]),
    n_states=st.sampled_from([0, 0, 1, 2, 9]),
)
@settings(max_examples=80, deadline=None)
def test_guesses_change_no_token(
    visits: list[dict[str, Any]],
    length: int,
    accuracy: float,
    n_blocks: int,
    step_rows: int,
    prefix_reuse: bool,
    window: int,
    n_states: int,
) -> None:
    plain = said([{**visit, "cancelled_at": None} for visit in visits], None)
    outputs = {str(i): answer.ids for i, answer in enumerate(plain)}
    executor = {"block_tokens": 4, "n_blocks": n_blocks, "n_states": n_states}
    if window:
        executor |= {"window": window, "n_window_blocks": n_blocks - 4}
    speculation = always(length, outputs, accuracy)
    options = {"executor": executor, "step_rows": step_rows, "prefix_reuse": prefix_reuse}
    options["state_every"] = 8
    for visit, found, expected in zip(
        visits, said(visits, speculation, **options), plain, strict=True
    ):
        if found.finish.reason == "cancelled":
            assert visit["cancelled_at"] is not None
            assert found.ids == expected.ids[: len(found.ids)]
        else:
            assert found.ids == expected.ids
            assert found.text == expected.text
            assert found.finish.reason == expected.finish.reason
    counts = speculation.counts
    assert 0 <= counts.accepted <= counts.drafted
    assert accuracy or not counts.accepted
    event(f"states {n_states > 0}, accepted {counts.accepted > 0}, drafted {counts.drafted > 0}")


def test_right_guesses_save_steps_and_are_told() -> None:
    solo, executor = engine_of(hashed(90))
    plain = ask(solo, [1, 2, 3], max_tokens=21, ignore_eos=True)
    run_all(solo)
    assert len(executor.steps) == 21
    engine, executor = engine_of(hashed(90), speculation=always(4, {"a": plain.ids}, 1.0))
    answer = ask(engine, [1, 2, 3], max_tokens=21, ignore_eos=True, request_id="a")
    run_all(engine)
    assert answer.ids == plain.ids
    assert len(executor.steps) == 1 + 20 // 5
    assert answer.finish.drafts == {"scripted": DraftCounts(16, 16)}
    assert engine.stats().tokens_decoded == 21
    assert engine.stats().drafts == {"scripted": DraftCounts(16, 16)}
    assert engine.stats().draft_lengths == {("scripted", 4): 4}


def test_what_a_grammar_allows_is_asked_of_the_tokens_that_were_drawn() -> None:
    schema = {"type": "array", "items": {"enum": ["ab", "cd"]}, "maxItems": 6}
    rules = Grammars(ScriptedTokenizer()).compile(json_grammar(schema), field="f")
    said: list[list[int]] = []
    for accuracy in (None, 0.8, 1.0):
        speculation = None if accuracy is None else always(5, {"a": said[0]}, accuracy)
        engine, _ = engine_of(hashed_logits(), context=96, speculation=speculation)
        answer = Answer()
        params = SamplingParams(seed=3, temperature=1.5)
        engine.submit([1], params, answer, request_id="a", constraint=rules.start())
        run_all(engine)
        said.append(answer.ids)
        assert set(json.loads(answer.text)) <= {"ab", "cd"}
    assert said[0] == said[1] == said[2]
    assert speculation is not None
    assert speculation.counts.accepted > 0


def test_a_rejected_guess_is_never_found_by_others() -> None:
    """Blocks of guessed tokens are not in the prefix index until the tokens are owned."""
    engine, _ = engine_of(
        hashed(90),
        context=200,
        executor={"block_tokens": 4},
        speculation=always(8, {"a": [250] * 60}, 1.0),
    )
    ask(engine, [1] * 9, max_tokens=40, ignore_eos=True, request_id="a")
    while engine.step():
        for prefix in engine.scheduler.pool._index:
            assert 250 not in np.frombuffer(prefix.content, "<i4")


def test_recurrent_layers_take_back_as_many_as_they_have_room_for() -> None:
    """Their snapshots are those of texts without guesses: no guess passes the place of one."""
    solo, _ = engine_of(hashed(90), context=200)
    plain = ask(solo, [1, 2, 3], max_tokens=60, ignore_eos=True)
    run_all(solo)
    options = {"block_tokens": 4, "n_states": 9, "n_guesses": 3}
    speculation = always(8, {"a": plain.ids}, 1.0)
    engine, executor = engine_of(
        hashed(90), context=200, state_every=16, executor=options, speculation=speculation
    )
    answer = ask(engine, [1, 2, 3], max_tokens=60, ignore_eos=True, request_id="a")
    run_all(engine)
    assert answer.ids == plain.ids
    assert max(step.n_rows for step in executor.steps) == 4
    assert speculation.counts.accepted == speculation.counts.drafted
    again = ask(engine, [1, 2, 3, *plain.ids, 5], max_tokens=1)
    run_all(engine)
    assert again.finish.n_cached == 48, "a state was kept at 16, 32 and 48"


def test_room_for_guesses_is_asked_for_when_a_model_is_opened() -> None:
    small = ScriptedExecutor(hashed(), n_states=2, n_guesses=2)
    assert speculation_of("2", small) is not None
    assert speculation_of("off", small) is None
    for wish in ("3", "auto"):
        with pytest.raises(RequestError, match="room to take back 2 guesses"):
            speculation_of(wish, small)


def test_a_drafter_that_fails_costs_guesses_and_no_answer() -> None:
    speculation = always(3, {}, 1.0)

    def fail(requests: Any, most: int) -> Any:
        raise RuntimeError("broken")

    speculation.drafter.propose = fail  # type: ignore[method-assign]
    engine, _ = engine_of(hashed(90), speculation=speculation)
    answers = [ask(engine, [i + 1], max_tokens=9, ignore_eos=True) for i in range(3)]
    run_all(engine)
    assert [answer.finish.reason for answer in answers] == ["length"] * 3
    assert not engine.stats().drafts


# ---- as much as pays ----------------------------------------------------------------------------


def lengths_of(
    costs: dict[int, float], accuracy: float, n_tokens: int = 400
) -> tuple[list[int], int]:
    """Rows of the steps of one request, and how many tokens were guessed."""
    solo, _ = engine_of(hashed(90), context=n_tokens + 2)
    plain = ask(solo, [1], max_tokens=n_tokens, ignore_eos=True)
    run_all(solo)
    speculation = Speculation(ScriptedDrafter({"a": plain.ids}, accuracy), StepCosts(costs))
    speculation.costs.observe = lambda n_rows, seconds: None  # type: ignore[union-attr,method-assign]
    engine, executor = engine_of(hashed(90), context=n_tokens + 2, speculation=speculation)
    answer = ask(engine, [1], max_tokens=n_tokens, ignore_eos=True, request_id="a")
    run_all(engine)
    assert answer.ids == plain.ids
    return [step.n_rows for step in executor.steps[1:]], speculation.counts.drafted


def test_free_rows_take_all_that_is_guessed() -> None:
    rows, _ = lengths_of(FLAT, 1.0)
    assert np.median(rows) == MOST + 1
    assert len(rows) < 400 / MOST + 20


def test_rows_as_dear_as_steps_take_nothing() -> None:
    rows, n_drafted = lengths_of(STEEP, 1.0)
    assert n_drafted == 0
    assert max(rows) == 1


def test_what_could_pay_is_tried_now_and_then() -> None:
    """Wrong for long, then right."""
    rows, n_drafted = lengths_of(FLAT | {2: 1.2, 16: 3.0}, 0.0, n_tokens=600)
    tried = [at for at, n in enumerate(rows) if n > 1]
    gaps = np.diff(tried)
    assert n_drafted < 40
    assert gaps.max() <= PROBE_EVERY + 2
    assert rows[-PROBE_EVERY * 3 :].count(2) >= 2


def test_wrong_guesses_end() -> None:
    rows, n_drafted = lengths_of(FLAT | {2: 1.2, 16: 3.0}, 0.0)
    assert n_drafted < 40
    assert rows[-PROBE_EVERY:].count(1) >= PROBE_EVERY - 2


@given(
    prices=st.lists(st.floats(0.0, 1.2), min_size=3, max_size=3),
    accuracy=st.sampled_from([0.0, 0.1, 0.3]),
    n_tokens=st.sampled_from([60, 300]),
)
@settings(max_examples=20, deadline=None)
def test_wrong_guesses_cost_no_more_than_is_lent(
    prices: list[float], accuracy: float, n_tokens: int
) -> None:
    """Of steps as StepCosts has them, whatever the machine takes for more rows."""
    costs = {1: 1.0, 2: 1 + prices[0], 4: 1 + sum(prices[:2]), 16: 1 + 4 * sum(prices)}
    rows, _ = lengths_of(costs, accuracy, n_tokens)
    known = StepCosts(costs)
    took = sum(known.of(n) for n in rows)
    assert took <= (n_tokens - 1) * (1 + LOAN_SHARE) + FIRST_LOAN + 1e-6
    event(f"guesses {max(rows) > 1}, lost {took > n_tokens}")


def test_hope_finds_out_what_a_doubtful_mind_would_not_try() -> None:
    """Where only most of them right would pay."""
    rows, _ = lengths_of({1: 1.0, 2: 1.6, 4: 2.2, 16: 9.0}, 1.0, n_tokens=60)
    assert len(rows) < 30


def test_a_new_request_begins_with_what_others_have_shown() -> None:
    speculation = Speculation(ScriptedDrafter({}, 1.0), StepCosts(FLAT))
    engine, _ = engine_of()
    for i in range(2):
        ask(engine, [1], max_tokens=60, request_id=str(i))
    engine.step()
    first, second = engine.scheduler.running
    speculation._record(first)
    for _ in range(20):
        speculation.learn(first, Draft([7, 8]), 0)
    assert speculation._record(first).rates[0] < 0.05
    assert speculation._record(second).rates[0] < 0.2
    for _ in range(3):
        speculation.learn(second, Draft([7, 8]), 2)
    assert speculation._record(second).rates[0] > 0.6
    assert speculation._record(first).rates[0] < 0.05
    run_all(engine)


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_lengths_are_the_best_by_expectation(rate: float, batch: int) -> None:
    """Against trying all common lengths."""
    costs = StepCosts({1: 1.0, 4: 1.3, 8: 2.2, 16: 4.4})
    speculation = Speculation(ScriptedDrafter({}, 1.0), costs)
    engine, _ = engine_of()
    answers = [ask(engine, [1], max_tokens=60, request_id=str(i)) for i in range(batch)]
    for _ in range(3):
        engine.step()
    requests = engine.scheduler.running
    assert len(requests) == len(answers) == batch
    for request in requests:
        record = speculation._record(request)
        record.rates[0], record.spare = rate, MOST_SPARE
    chosen = speculation._lengths(requests, [Draft(range(MOST))] * batch, 64)

    def tokens_per_second(lengths: list[int]) -> float:
        expected = sum(sum(rate**n for n in range(length + 1)) for length in lengths)
        return expected / costs.of(batch + sum(lengths))

    best = max(tokens_per_second([n] * batch) for n in range(MOST + 1))
    assert tokens_per_second(chosen) >= best / 1.05
    run_all(engine)


def test_costs_never_fall_with_rows_and_follow_the_machine() -> None:
    costs = StepCosts({1: 1.1, 2: 0.8, 4: 2.0, 8: 3.0})
    assert [costs.of(n) for n in (1, 2, 3, 4, 6, 8)] == [0.8, 0.8, 1.4, 2.0, 2.5, 3.0]
    assert costs.of(16) == 3.0 + 8 * 0.25
    for _ in range(60):
        costs.observe(1, 3.0)
    assert costs.of(1) == pytest.approx(3.0, rel=0.1)
    assert costs.of(4) > 2.0, "other steps take longer as well"
    costs.observe(1, 1e9)
    assert costs.of(1) < 4.0, "one outlier says little"


def test_what_was_dear_once_is_not_so_for_ever() -> None:
    """Nobody guesses so much then, so that nothing else would tell."""
    costs = StepCosts({1: 1.0, 4: 1.2, 16: 2.0})
    for _ in range(30):
        costs.observe(4, 4.0)
        costs.observe(1, 1.0)
    assert costs.of(4) > 2 * costs.of(1)
    for _ in range(1000):
        costs.observe(1, 1.0)
    assert costs.of(4) < 1.4 * costs.of(1)


def test_costs_that_follow_the_machine_never_fall_with_rows() -> None:
    costs = StepCosts({1: 1.0, 8: 1.4, 16: 1.5})
    for _ in range(60):
        costs.observe(8, 6.0)
    of_all = [costs.of(n) for n in range(1, 64)]
    assert of_all == sorted(of_all)
    for _ in range(60):
        costs.observe(16, 1.5)
    of_all = [costs.of(n) for n in range(1, 64)]
    assert of_all == sorted(of_all)
    assert costs.of(16) == pytest.approx(1.5, rel=0.1)


def test_costs_are_measured_in_steps_of_the_executor() -> None:
    executor = ScriptedExecutor(hashed(), max_rows=6, block_tokens=4)
    ticks = iter(range(10_000))
    costs = StepCosts.measure(executor, clock=lambda: float(next(ticks)))
    assert costs.most == 6
    assert {step.n_rows for step in executor.steps} == {1, 2, 3, 4, 6}


@pytest.mark.parametrize(("n_states", "most"), [(1, 8), (2, 16)])
def test_costs_are_those_of_right_guesses(n_states: int, most: int) -> None:
    """States are brought up to them: the script asserts that each step has the state it needs."""
    executor = ScriptedExecutor(hashed(), n_states=n_states)
    ticks = iter(range(10_000))
    costs = StepCosts.measure(executor, clock=lambda: float(next(ticks)))
    assert costs.most == most
    assert max(step.guesses.max() for step in executor.steps) == 7
    assert max(step.replays.max() for step in executor.steps) == 7
    assert {step.n_seqs for step in executor.steps if step.n_rows > 8} <= {2}


@pytest.mark.parametrize("bad", ["", "0", "9", "-1", "2.5", "yes"])
def test_wishes_that_are_none_are_refused(bad: str) -> None:
    with pytest.raises(RequestError, match="expected auto, off or 1 to 8"):
        speculation_of(bad, ScriptedExecutor(hashed()))


def test_auto_guesses_where_steps_are_worth_a_choice() -> None:
    slow = ScriptedExecutor(hashed(), seconds_per_step=0.003)
    found = speculation_of("auto", slow)
    assert found is not None
    assert found.length is None
    slow.seconds_per_step = 0.0
    assert speculation_of("auto", slow) is None, "the choice would take longer than the step"
    assert speculation_of("off", ScriptedExecutor(hashed())) is None
    assert speculation_of("auto", ScriptedExecutor(hashed(), n_states=2)) is None, "as fast"
    slow = ScriptedExecutor(hashed(), n_states=2, seconds_per_step=0.003)
    assert speculation_of("auto", slow) is not None
    assert speculation_of("auto", ScriptedExecutor(hashed()), generates=False) is None
    fixed = speculation_of("3", ScriptedExecutor(hashed()))
    assert fixed is not None
    assert fixed.length == 3


# ---- what repeats -------------------------------------------------------------------------------


def proposals(prompt: list[int], most: int = 4) -> list[int]:
    """Of a request that owns these tokens."""
    engine, _ = engine_of(context=200)
    answer = ask(engine, prompt, max_tokens=50)
    engine.step()
    (request,) = engine.scheduler.running
    request.n_tokens = len(prompt)
    (draft,) = PromptLookup().propose([request], most)
    engine.cancel(request.id)
    run_all(engine)
    assert answer.finish
    return list(draft.tokens)


def test_lookup_goes_on_as_the_longest_common_run_did() -> None:
    assert proposals([1, 2, 3, 4, 5, 6, 9, 2, 3, 4]) == [5, 6, 9, 2]
    assert proposals([7, 1, 2, 3, 50, 8, 1, 2, 3, 60, 7, 1, 2, 3]) == [50, 8, 1, 2], "longer"
    assert proposals([1, 2, 3, 50, 1, 2, 3, 60, 1, 2, 3]) == [60, 1, 2, 3], "the latest of equals"
    assert proposals([1, 2, 3, 4, 5]) == []
    assert proposals([1, 2]) == []
    assert proposals([5] * (LEAST_MATCH + 1)) == [5, 5, 5, 5], "it goes on repeating"


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    pieces=st.lists(st.integers(1, 20), min_size=1, max_size=6),
)
def test_an_index_that_grows_finds_what_a_new_one_finds(
    tokens: list[int], pieces: list[int]
) -> None:
    from martlet.runtime.drafts import _Index

    growing, array = _Index(), np.array(tokens, np.int32)
    at = 0
    for piece in pieces:
        at = min(at + piece, len(tokens))
        found = growing.longest_match(array[:at])
        assert found == _Index().longest_match(array[:at])
        place, n_same = found
        if n_same:
            n = min(n_same, place)
            assert tokens[place - n : place] == tokens[at - n : at]
            assert place < at
        else:
            ends = [tuple(tokens[i : i + LEAST_MATCH]) for i in range(at - LEAST_MATCH)]
            assert tuple(tokens[at - LEAST_MATCH : at]) not in ends or at <= LEAST_MATCH


def test_copies_repeat_their_period() -> None:
    tokens = np.array([9, 1, 2, 3], np.int32)
    assert copied(tokens, 1, 8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert copied(tokens, 1, 2) == [1, 2]
