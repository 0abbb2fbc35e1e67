"""What a model's own block guesses: its own likeliest tokens, of texts that stay as they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from martlet.runtime import nextn_drafter
from martlet.runtime.drafts import Draft
from martlet.runtime.engine import Engine
from martlet.runtime.executors import Executor
from martlet.runtime.model import Model, load_model
from martlet.runtime.nextn_drafter import NextnDrafter, own_drafter
from martlet.runtime.request import Request
from martlet.runtime.sampling import SamplingParams
from martlet.runtime.speculation import Speculation
from martlet.runtime.step_costs import StepCosts

from .. import nextn
from ..recorded import gguf_of
from .harness import Answer, run_all
from .tiny import Chunk, make_step

CONTEXT, BLOCK, N_WORDS = 128, 16, 300


def opened(name: str, **options: Any) -> Model:
    options = {"executor": "native", "threads": 1, "block_tokens": BLOCK, **options}
    return load_model(nextn.gguf_of(name), context=CONTEXT, **options)


@pytest.fixture(scope="module")
def glm() -> Any:
    model = opened("glm4moe")
    yield model
    model.close()


# Bytes of keys and values of nine blocks, little more than one context: requests give theirs up to
# others.
POOLS = {"glm4moe": 9 * BLOCK * 128, "deepseek2-glm": 9 * BLOCK * 160}


@pytest.fixture(scope="module", params=POOLS)
def model(request: pytest.FixtureRequest) -> Any:
    model = opened(request.param, kv_bytes=POOLS[request.param])
    assert model.executor.n_blocks == 9
    yield model
    model.close()


@pytest.fixture(scope="module", params=["qwen35", "qwen35moe", "qwen3next"])
def recurrent(request: pytest.FixtureRequest) -> Any:
    model = opened(request.param)
    yield model
    model.close()


class Checked(NextnDrafter):
    """Says what it would guess, and guesses something that is often right."""

    def __init__(self, model: Model, outputs: dict[str, list[int]], seed: int) -> None:
        super().__init__(model)
        self.outputs, self.random = outputs, np.random.default_rng(seed)
        self.proposed: list[tuple[list[int], int, list[int]]] = []  # text, first row, guesses

    def propose(self, requests: Sequence[Request], most: int) -> list[Draft]:
        found = super().propose(requests, most)
        for request, draft in zip(requests, found, strict=True):
            if draft.tokens:
                first = self._known[request.id].first
                self.proposed.append((request.tokens.tolist(), first, list(draft.tokens)))
        return [
            Draft([self._often_right(request, i) for i in range(len(draft.tokens))])
            for request, draft in zip(requests, found, strict=True)
        ]

    def _often_right(self, request: Request, i: int) -> int:
        coming = self.outputs[request.id][request.n_output :]
        is_right = i < len(coming) and self.random.random() < 0.7
        return coming[i] if is_right else int(self.random.integers(N_WORDS))


def guesses_of(model: Model, block: Executor, text: list[int], first: int, n: int) -> list[int]:
    """From nothing: the model's hidden states of the text, its rows from `first` on in the block,
    and then guess after guess, each in a step of all rows."""
    step = make_step([Chunk(text, 0, range(-(-len(text) // BLOCK)))], [])
    rows = np.arange(first, len(text) - 1, dtype=np.int32)
    model.executor.run(replace(step, hidden_rows=rows))
    hidden, tokens = model.executor.hidden, text[first + 1 :]
    found: list[int] = []
    for _ in range(n):
        step = make_step([Chunk(tokens, 0, range(-(-len(tokens) // BLOCK)))], [len(tokens) - 1])
        last = np.array([len(tokens) - 1], np.int32)
        logits = block.run(replace(step, given=hidden, hidden_rows=last))
        found.append(int(logits[0, : model.tokenizer.vocab_size].argmax()))
        tokens, hidden = [*tokens, found[-1]], np.concatenate((hidden, block.hidden))
    return found


def check_guesses(model: Model, proposed: Sequence[tuple[list[int], int, list[int]]]) -> None:
    _, block = model.open_nextn()
    for text, first, guesses in proposed:
        assert first >= 0
        assert guesses == guesses_of(model, block, text, first, len(guesses))
    for executor in model._others:
        executor.close()
    model._others.clear()


def said(model: Model, visits: list[dict[str, Any]], speculation: Any, **options: Any) -> Any:
    """Answers of these requests, arriving in turn."""
    engine = Engine(
        model.executor, model.tokenizer, context=CONTEXT, speculation=speculation, **options
    )
    answers = [Answer() for _ in visits]
    for i, visit in enumerate(visits):
        for _ in range(visit["after"]):
            engine.step()
        params = SamplingParams(
            seed=i,
            temperature=visit["temperature"],
            max_tokens=visit["max_tokens"],
            ignore_eos=True,
        )
        word, length = visit["word"], visit["length"]
        prompt = [(word + k * k) % 61 + 3 for k in range(length)]
        engine.submit(prompt, params, answers[i], request_id=str(i))
        if visit["is_cancelled"]:
            engine.step()
            engine.cancel(str(i))
    run_all(engine)
    return [answer.ids for answer in answers], engine


VISIT = st.fixed_dictionaries(
    {
        "after": st.integers(0, 5),
        "length": st.integers(1, 60),
        "word": st.integers(0, 2),
        "temperature": st.sampled_from([0.0, 0.7, 1.3]),
        "max_tokens": st.integers(1, 40),
        "is_cancelled": st.sampled_from([False, False, False, False, True]),
    }
)


HOW = {
    "visits": st.lists(VISIT, min_size=1, max_size=4),
    "length": st.integers(1, 6),
    "step_rows": st.sampled_from([6, 24, 256]),
    "prefix_reuse": st.booleans(),
    "reach": st.sampled_from([5, 256]),
}


def check_texts(
    model: Model, visits: list[dict[str, Any]], length: int, reach: int, **options: Any
) -> None:
    """They stay, and guesses are those of the text alone: whatever was guessed before, who else is
    there, how prompts were cut and what was known."""
    plain, _ = said(model, [{**visit, "is_cancelled": False} for visit in visits], None, **options)
    drafter = Checked(model, {str(i): ids for i, ids in enumerate(plain)}, len(visits))
    drafter.reach = reach
    speculation = Speculation(drafter, length=length)
    found, engine = said(model, visits, speculation, **options)
    for visit, ids, expected in zip(visits, found, plain, strict=True):
        assert ids == (expected[: len(ids)] if visit["is_cancelled"] else expected)
    assert len(drafter._blocks.free) == drafter._executor.n_blocks, "ended requests hold blocks"
    check_guesses(model, drafter.proposed[:: len(drafter.proposed) // 8 + 1])
    event(f"accepted {speculation.counts.accepted > 0}")
    event(f"preempted {engine.stats().preemptions > 0}")


@given(**HOW)
@settings(max_examples=12, deadline=None)
def test_texts_stay_and_guesses_are_those_of_the_text_alone(model: Model, **how: Any) -> None:
    check_texts(model, **how)


@given(**HOW)
@settings(max_examples=6, deadline=None)
def test_the_same_of_recurrent_models(recurrent: Model, **how: Any) -> None:
    check_texts(recurrent, **how)


@pytest.mark.parametrize("prefix_reuse", [False, True])
def test_rows_that_are_computed_again_are_read_once(model: Model, prefix_reuse: bool) -> None:
    """Three texts outgrow the pool, and one of them gives its blocks up for a while."""
    visit = {"after": 0, "length": 50, "temperature": 0.7, "max_tokens": 40, "is_cancelled": False}
    visits = [{**visit, "word": word} for word in range(3)]
    plain, _ = said(model, visits, None, prefix_reuse=prefix_reuse)
    drafter = Checked(model, {str(i): ids for i, ids in enumerate(plain)}, 1)
    speculation = Speculation(drafter, length=3)
    found, engine = said(model, visits, speculation, prefix_reuse=prefix_reuse)
    assert found == plain
    assert engine.stats().preemptions
    check_guesses(model, drafter.proposed)


def test_a_long_text_is_read_from_not_too_far_back(
    glm: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing was guessed for long, and what passed by has become too much."""
    monkeypatch.setattr(nextn_drafter, "REACH", 20)
    drafter = Checked(glm, {"0": []}, 0)
    drafter.reach = 20
    visit = {"after": 0, "length": 90, "word": 1, "temperature": 0.0, "max_tokens": 30}
    speculation = Speculation(drafter, length=3)
    draft, n_asked = speculation.drafts, 0

    def seldom(granted: Any, most_rows: int) -> Any:
        nonlocal n_asked
        n_asked += 1
        return draft(granted, most_rows if n_asked % 25 == 2 else len(granted))

    speculation.drafts = seldom  # type: ignore[method-assign]
    said(glm, [{**visit, "is_cancelled": False}], speculation)
    firsts = [first for _, first, _ in drafter.proposed]
    lengths = [len(text) for text, _, _ in drafter.proposed]
    assert len(firsts) == 2
    assert firsts[0] == 90 - 20
    assert firsts[1] == lengths[1] - 1 - 20


def test_without_room_nothing_is_guessed_and_it_begins_anew(glm: Model) -> None:
    drafter = Checked(glm, {str(i): [] for i in range(2)}, 0)
    drafter._blocks.free = drafter._blocks.free[:2]  # of 16 tokens
    visits = [
        {"after": i, "length": 20, "word": i, "temperature": 0.0, "max_tokens": 20 - 15 * i}
        for i in range(2)
    ]
    speculation = Speculation(drafter, length=2)
    found, _ = said(glm, [{**visit, "is_cancelled": False} for visit in visits], speculation)
    assert [len(ids) for ids in found] == [20, 5]
    assert len(drafter._blocks.free) == 2
    firsts = {first for _, first, _ in drafter.proposed}
    assert 0 in firsts
    assert len(firsts) > 1, "the second request, or the first one when it has grown, begins anew"


def test_the_block_guesses_where_nothing_else_is_asked_for(glm: Model) -> None:
    assert own_drafter(glm, "off") is None
    found = own_drafter(glm, "auto")
    assert found is not None
    assert found.token_seconds(1) > 0
    plain = load_model(gguf_of("glm4moe"), context=CONTEXT, executor="native", threads=1)
    assert own_drafter(plain, "2") is None, "the file has left the block out"
    plain.close()


def test_guesses_that_cost_too_much_are_not_made(glm: Model) -> None:
    """As many rows as steps would take: hidden states pass by, and nothing is read."""
    drafter = Checked(glm, {"0": []}, 0)
    speculation = Speculation(drafter, StepCosts({1: 1.0, 16: 16.0}))
    visit = {"after": 0, "length": 9, "word": 0, "temperature": 0.0, "max_tokens": 40}
    said(glm, [{**visit, "is_cancelled": False}], speculation)
    assert not drafter.proposed


def test_what_is_shown_may_fail_and_answers_go_on(glm: Model) -> None:
    drafter = Checked(glm, {"0": []}, 0)

    def fail(request: Any, first: int, hidden: Any) -> None:
        raise RuntimeError("broken")

    drafter.see = fail  # type: ignore[method-assign]
    visit = {"after": 0, "length": 9, "word": 0, "temperature": 0.0, "max_tokens": 10}
    found, _ = said(glm, [{**visit, "is_cancelled": False}], Speculation(drafter, length=2))
    assert [len(ids) for ids in found] == [10]


def test_vectors_are_made_of_the_rows_they_ask_for(glm: Model) -> None:
    """Not of those that are shown to the block."""
    params = SamplingParams(embed=True, max_tokens=0)
    vectors = []
    for speculation in (None, Speculation(NextnDrafter(glm), length=2)):
        engine = Engine(glm.executor, glm.tokenizer, context=CONTEXT, speculation=speculation)
        events: list[Any] = []
        engine.submit(list(range(3, 40)), params, events.append)
        run_all(engine)
        vectors += [e.embedding for e in events if getattr(e, "embedding", None) is not None]
    assert len(vectors) == 2
    assert (vectors[0] == vectors[1]).all()
