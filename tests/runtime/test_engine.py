"""Requests through the whole loop, stepped by hand: why they end, what is refused, what fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from martlet.runtime.constraint import Allowed, allowed_of
from martlet.runtime.errors import ContextTooLong, ModelError, QueueFull, RequestError
from martlet.runtime.events import Event, TokenEvent
from martlet.runtime.sampling import SamplingParams

from .harness import Answer, ask, engine_of, run_all
from .scripted import EOS, EOT, VOCAB_SIZE, reply_text, reply_with

PROMPT = list(b"prompt")


# ---- why a request ends --------------------------------------------------------------------------


def test_every_end_token_stops_and_is_counted_but_not_shown() -> None:
    """B36: the second of two end tokens, after two tokens of text."""
    engine, _ = engine_of(reply_with([65, 66, EOT, 67]))
    answer = ask(engine, PROMPT)
    run_all(engine)
    assert answer.ids == [65, 66, EOT]
    assert (answer.text, answer.finish.reason, answer.finish.n_output) == ("AB", "stop", 3)


def test_without_end_tokens_token_zero_does_not_stop() -> None:
    """B36: none declared, output 0 0 0."""
    engine, _ = engine_of(lambda history: 0, eog_ids=())
    answer = ask(engine, PROMPT, max_tokens=3)
    run_all(engine)
    assert answer.ids == [0, 0, 0]
    assert answer.finish.reason == "length"


def test_ignore_eos_goes_on_to_max_tokens() -> None:
    engine, _ = engine_of(reply_with([65]))
    answer = ask(engine, PROMPT, max_tokens=4, ignore_eos=True)
    run_all(engine)
    assert answer.ids == [65, EOS, EOS, EOS]
    assert (answer.text, answer.finish.reason) == ("A", "length")


def test_a_stop_string_ends_the_request_and_never_shows() -> None:
    engine, _ = engine_of(reply_text("one END two"))
    answer = ask(engine, PROMPT, stop=("xyz", "END"))
    run_all(engine)
    assert (answer.text, answer.finish.reason, answer.finish.n_output) == ("one ", "stop", 7)


def test_a_beginning_of_a_stop_string_is_shown_at_the_end() -> None:
    engine, _ = engine_of(reply_text("one EN"))
    answer = ask(engine, PROMPT, stop=("END",))
    run_all(engine)
    assert answer.text == "one EN"
    assert answer.finish.text == "EN"


@pytest.mark.parametrize(("n_prompt", "n_output"), [(62, 2), (63, 1)])
def test_prompt_and_completion_fill_the_context_exactly(n_prompt: int, n_output: int) -> None:
    """B82, with prefix reuse on a second round."""
    engine, _ = engine_of()
    for _ in range(2):
        answer = ask(engine, [1] * n_prompt, max_tokens=10)
        run_all(engine)
        assert (answer.finish.n_output, answer.finish.reason) == (n_output, "length")


@pytest.mark.parametrize("n_prompt", [64, 65, 1000])
def test_a_prompt_as_long_as_the_context_is_refused_with_both_numbers(n_prompt: int) -> None:
    engine, _ = engine_of()
    with pytest.raises(ContextTooLong, match=rf"{n_prompt} tokens.*64") as caught:
        ask(engine, [1] * n_prompt)
    assert (caught.value.needed, caught.value.limit) == (n_prompt + 1, 64)
    assert engine.stats().waiting == 0


@pytest.mark.parametrize("max_tokens", [None, 1000, 2**31 - 1])
def test_generation_ends_with_the_context(max_tokens: int | None) -> None:
    """B84"""
    engine, _ = engine_of()
    answer = ask(engine, [1] * 50, max_tokens=max_tokens)
    run_all(engine)
    assert (answer.finish.n_output, answer.finish.reason) == (14, "length")


# ---- the pool ------------------------------------------------------------------------------------


def test_what_never_fits_the_pool_is_refused_and_others_are_served() -> None:
    """B94 (a) and (c): ten blocks of four; 41 tokens fit, as the last one needs no slot."""
    engine, _ = engine_of(executor={"block_tokens": 4, "n_blocks": 10})
    with pytest.raises(ContextTooLong, match=r"42 tokens.*41"):
        ask(engine, [1] * 30, max_tokens=12)
    exact, small = ask(engine, [1] * 30, max_tokens=11), ask(engine, [2] * 4, max_tokens=4)
    run_all(engine)
    assert exact.finish.n_output == 11
    assert small.finish.n_output == 4


def test_without_max_tokens_the_end_of_the_pool_is_the_end_of_the_context() -> None:
    engine, _ = engine_of(executor={"block_tokens": 4, "n_blocks": 10})
    answer, longest = ask(engine, [1] * 30), ask(engine, [1] * 40)
    run_all(engine)
    assert (answer.finish.n_output, longest.finish.n_output) == (11, 1)
    with pytest.raises(ContextTooLong):
        ask(engine, [1] * 41)


# ---- errors --------------------------------------------------------------------------------------


def test_an_executor_error_ends_the_requests_of_that_step_and_no_others() -> None:
    engine, executor = engine_of(max_running=2)
    first, second = ask(engine, PROMPT, max_tokens=5), ask(engine, [1], max_tokens=5)
    queued = ask(engine, [2], max_tokens=5)
    engine.step()
    executor.fail_next = RuntimeError("kernel refused\nsecond line")
    run_all(engine)
    for answer in (first, second):
        assert answer.finish.reason == "error"
        assert answer.finish.error == "RuntimeError: kernel refused"
        assert answer.finish.n_output == 1
    assert queued.finish.reason == "length"
    finished = engine.stats().finished
    assert {reason: n for reason, n in finished.items() if n} == {"length": 1, "error": 2}


def test_rows_of_a_failed_step_are_not_found_by_later_requests() -> None:
    engine, executor = engine_of()
    executor.fail_next = RuntimeError("half written")
    ask(engine, [1] * 40, max_tokens=1)
    run_all(engine)
    answer = ask(engine, [1] * 40, max_tokens=1)
    run_all(engine)
    assert (answer.finish.n_cached, answer.finish.reason) == (0, "length")


def test_nan_logits_end_only_the_request_they_belong_to() -> None:
    def script(history: np.ndarray) -> int | np.ndarray:
        return np.full(VOCAB_SIZE, np.nan, np.float32) if history[0] == 13 else 65

    engine, _ = engine_of(script)
    bad, good = ask(engine, [13], max_tokens=3), ask(engine, [14], max_tokens=3)
    run_all(engine)
    assert bad.finish.reason == "error"
    assert "nan" in (bad.finish.error or "")
    assert good.ids == [65, 65, 65]


def test_a_failing_owner_loses_its_own_request_only() -> None:
    engine, _ = engine_of()
    seen: list[Event] = []

    def owner(event: Event) -> None:
        seen.append(event)
        raise ValueError("broken pipe")

    engine.submit([1], SamplingParams(max_tokens=9), owner)
    good = ask(engine, [2], max_tokens=9)
    run_all(engine)
    assert len(seen) == 2, "one token, then the end"
    assert good.finish.n_output == 9


@pytest.mark.parametrize(
    "prompt", [[], [VOCAB_SIZE], [-1], [1.5], [True], ["a"], [2**70], [[1]], [1, None]]
)
def test_prompts_of_other_than_known_ids_are_refused(prompt: list[Any]) -> None:
    engine, _ = engine_of()
    with pytest.raises(RequestError) as caught:
        ask(engine, prompt)
    assert caught.value.field == "prompt"


def test_a_bias_for_an_unknown_token_is_refused() -> None:
    engine, _ = engine_of()
    with pytest.raises(RequestError, match=f"{VOCAB_SIZE}"):
        ask(engine, PROMPT, logit_bias={VOCAB_SIZE: 1.0})


def test_the_queue_has_an_end_and_opens_again() -> None:
    """B92: one may run, one may wait."""
    engine, _ = engine_of(max_running=1, max_queue=1)
    accepted = [ask(engine, PROMPT, max_tokens=2) for _ in range(2)]
    for _ in range(4):
        with pytest.raises(QueueFull) as caught:
            ask(engine, PROMPT)
    assert (caught.value.unfinished, caught.value.limit) == (2, 2)
    engine.step()
    engine.step()
    assert accepted[0].finish.n_output == 2
    ask(engine, PROMPT, max_tokens=2)
    run_all(engine)


def test_an_unfinished_request_id_cannot_be_used_twice() -> None:
    engine, _ = engine_of()
    ask(engine, PROMPT, request_id="a", max_tokens=1)
    with pytest.raises(RequestError):
        ask(engine, PROMPT, request_id="a")
    run_all(engine)
    ask(engine, PROMPT, request_id="a", max_tokens=1)
    run_all(engine)


# ---- constraint hook -----------------------------------------------------------------------------


def test_a_constraint_sees_each_token_and_masks_the_next() -> None:
    class OnlyRising:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def allowed(self) -> Allowed:
            next_id = self.seen[-1] + 1 if self.seen else 70
            return allowed_of(np.arange(VOCAB_SIZE) == next_id)

        def accept(self, token_id: int) -> None:
            self.seen.append(token_id)

        is_done = False

    engine, _ = engine_of()
    answer, rising = Answer(), OnlyRising()
    engine.submit(PROMPT, SamplingParams(max_tokens=3), answer, constraint=rising)
    run_all(engine)
    assert answer.ids == [70, 71, 72] == rising.seen


# ---- closing -------------------------------------------------------------------------------------


def test_close_cancels_what_is_unfinished_and_refuses_what_comes() -> None:
    engine, _ = engine_of(max_running=1)
    answers = [ask(engine, PROMPT) for _ in range(2)]
    engine.step()
    late = ask(engine, PROMPT)
    engine.close()
    assert {a.finish.reason for a in [*answers, late]} == {"cancelled"}
    with pytest.raises(ModelError, match="closed"):
        ask(engine, PROMPT)


def test_an_owner_may_close_the_engine_from_its_own_event() -> None:
    engine, _ = engine_of()
    engine.submit(PROMPT, SamplingParams(), lambda event: engine.close())
    other = ask(engine, PROMPT)
    run_all(engine)
    assert (other.finish.reason, other.finish.n_output) == ("cancelled", 0)


@pytest.mark.parametrize("option", [{"max_running": 0}, {"max_queue": -1}, {"step_rows": -5}])
def test_limits_that_serve_nobody_are_refused(option: dict[str, int]) -> None:
    with pytest.raises(ModelError, match=str(next(iter(option.values())))):
        engine_of(**option)


def test_token_events_come_one_per_token_in_order() -> None:
    engine, _ = engine_of(reply_text("héllo"))
    answer = ask(engine, PROMPT)
    run_all(engine)
    assert [e.text for e in answer.tokens] == ["h", "", "é", "l", "l", "o", ""]
    assert all(isinstance(e, TokenEvent) for e in answer.tokens)
    assert [e.time_ns for e in answer.tokens] == sorted(e.time_ns for e in answer.tokens)


# ---- telling owners ------------------------------------------------------------------------------


def test_owners_hear_of_a_step_once_all_its_tokens_are_drawn() -> None:
    engine, _ = engine_of()
    n_drawn: list[int] = []

    def note(event: Event) -> None:
        n_drawn.append(engine.stats().tokens_decoded)

    for i in range(3):
        engine.submit([i], SamplingParams(temperature=0, max_tokens=1), note)
    run_all(engine)
    assert n_drawn == [3] * 6, "each has a token event and its end"


def test_closing_from_an_event_keeps_the_order_of_everybodys_events() -> None:
    engine, _ = engine_of(eog_ids=())
    first = Answer()

    def close(event: Event) -> None:
        first(event)
        engine.close()

    engine.submit(PROMPT, SamplingParams(temperature=0), close)
    second = ask(engine, PROMPT[1:])  # asserts that nothing follows its end
    engine.step()
    assert [len(first.ids), len(second.ids)] == [1, 1]
    assert (first.finish.reason, second.finish.reason) == ("cancelled", "cancelled")
