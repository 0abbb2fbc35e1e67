"""A small model that guesses: it follows what requests own, whatever was guessed before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from martlet.runtime.draft_model import DraftModel, check_vocabularies
from martlet.runtime.engine import Engine
from martlet.runtime.errors import RequestError, UnsupportedError
from martlet.runtime.model import Model, load_model
from martlet.runtime.sampling import SamplingParams, Use, keyed_uniform
from martlet.runtime.speculation import Speculation
from martlet.runtime.step_costs import StepCosts
from martlet.runtime.tokenizer import Tokenizer

from ..recorded import gguf_of
from .harness import Answer, run_all
from .tiny import Chunk, make_step
from .vocabularies import spm

CONTEXT = 128


def opened(name: str = "llama", **options: Any) -> Model:
    return load_model(gguf_of(name), context=CONTEXT, executor="native", threads=1, **options)


@pytest.fixture(scope="module")
def target() -> Any:
    model = opened()
    yield model
    model.close()


@pytest.fixture
def drafter(target: Model) -> Any:
    small = DraftModel(opened(gives_back=False), target.tokenizer)
    yield small
    small.close()


class Owner:
    """As much of a request as drafters look at."""

    def __init__(self, name: str, tokens: list[int], *, rejects: bool = False) -> None:
        self.id, self.owned = name, tokens
        self.rejects, self.seed, self.n_output = rejects, 11, 0
        self.params = SamplingParams(temperature=0.9, top_k=20)

    @property
    def tokens(self) -> np.ndarray:
        return np.array(self.owned, np.int32)

    @property
    def n_tokens(self) -> int:
        return len(self.owned)


def greedy(model: Model, tokens: list[int], n: int) -> list[int]:
    """By one whole step for every token."""
    said: list[int] = []
    for _ in range(n):
        whole = tokens + said
        blocks = range(-(-len(whole) // model.executor.block_tokens))
        step = make_step([Chunk(whole, 0, blocks)], [len(whole) - 1])
        logits = model.executor.run(step)[:, : model.tokenizer.vocab_size]
        said.append(int(logits[0].argmax()))
    return said


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_guesses_are_the_small_model_s_own_text(data: st.DataObject, target: Model) -> None:
    """Whatever of earlier guesses was right, and whoever guesses at the same time."""
    drafter = DraftModel(opened(gives_back=False), target.tokenizer)
    owners = [
        Owner(str(i), data.draw(st.lists(st.integers(3, 60), min_size=1, max_size=30)))
        for i in range(data.draw(st.integers(1, 3)))
    ]
    for _ in range(data.draw(st.integers(1, 4))):
        asked = [owner for owner in owners if data.draw(st.booleans())] or owners
        n = data.draw(st.integers(1, 5))
        drafts = drafter.propose(asked, n)  # type: ignore[arg-type]
        for owner, draft in zip(asked, drafts, strict=True):
            assert list(draft.tokens) == greedy(target, owner.owned, n)
            n_right = data.draw(st.integers(0, n))
            drawn = data.draw(st.lists(st.integers(3, 60), min_size=1, max_size=3))
            owner.owned = owner.owned + list(draft.tokens[:n_right]) + drawn
    drafter.close()


def test_the_same_model_is_always_right_and_texts_stay_the_same(
    target: Model, drafter: DraftModel
) -> None:
    said = []
    for speculation in (None, Speculation(drafter, length=4)):
        engine = Engine(target.executor, target.tokenizer, context=CONTEXT, speculation=speculation)
        answers = [Answer() for _ in range(3)]
        for i, answer in enumerate(answers):
            params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
            engine.submit([5 + i] * (20 + i), params, answer, request_id=str(i))
        run_all(engine)
        said.append([answer.ids for answer in answers])
    assert said[0] == said[1]
    counts = speculation.counts  # type: ignore[union-attr]
    assert counts.accepted == counts.drafted > 3 * 12
    assert len(drafter._blocks.free) == drafter._executor.n_blocks, "ended requests hold blocks"


def test_guesses_that_may_stand_by_chance_are_drawn_from_what_they_say(
    target: Model, drafter: DraftModel
) -> None:
    """By the same numbers again; each from the small model's chances behind the ones before it."""
    owner = Owner("a", [5, 6, 7, 8], rejects=True)
    (draft,) = drafter.propose([owner], 4)  # type: ignore[list-item]
    assert list(draft.tokens) != greedy(target, owner.owned, 4)
    for at, (token, chances) in enumerate(zip(draft.tokens, draft.chances, strict=True)):
        assert chances.ids is not None
        assert len(chances.ids) == 20
        assert greedy(target, [*owner.owned, *draft.tokens[:at]], 1)[0] in chances.ids
        assert token == chances.draw(keyed_uniform(11, at, Use.GUESS))
    (again,) = drafter.propose([Owner("b", owner.owned, rejects=True)], 4)  # type: ignore[list-item]
    assert again.tokens == draft.tokens


def test_the_same_model_always_stands_and_a_seed_repeats_it(
    target: Model, drafter: DraftModel
) -> None:
    said = []
    for _ in range(2):
        speculation = Speculation(drafter, length=3, rule="reject")
        engine = Engine(target.executor, target.tokenizer, context=CONTEXT, speculation=speculation)
        answer = Answer()
        params = SamplingParams(max_tokens=30, temperature=0.8, top_p=0.9, seed=4, ignore_eos=True)
        engine.submit([5] * 9, params, answer)
        run_all(engine)
        said.append(answer.ids)
        assert speculation.counts.drafted > 15
        assert speculation.counts.accepted == speculation.counts.drafted
    assert said[0] == said[1]


def test_guesses_that_cost_too_much_are_not_made(target: Model, drafter: DraftModel) -> None:
    """The draft model is as large as the model, and rows are as dear as steps."""
    speculation = Speculation(drafter, StepCosts({1: 1.0, 16: 16.0}))
    engine = Engine(target.executor, target.tokenizer, context=CONTEXT, speculation=speculation)
    answer = Answer()
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    engine.submit([5] * 9, params, answer)
    run_all(engine)
    assert len(answer.ids) == 40
    assert speculation.counts.drafted == 0


def test_without_room_nothing_is_guessed(target: Model) -> None:
    small = opened(gives_back=False, kv_bytes=None)
    drafter = DraftModel(small, target.tokenizer)
    drafter._blocks.free = drafter._blocks.free[:1]  # of 32 tokens
    near, far = Owner("near", [5] * 20), Owner("far", [6] * 20)
    drafts = drafter.propose([near, far], 4)  # type: ignore[list-item]
    assert [len(draft.tokens) for draft in drafts] == [4, 0]
    assert not drafter.propose([near], 20)[0].tokens, "the second block is not there"  # type: ignore[list-item]
    assert len(drafter._blocks.free) == 1, "what it held is for others"
    drafts = drafter.propose([far], 4)  # type: ignore[list-item]
    assert list(drafts[0].tokens) == greedy(target, far.owned, 4)
    long = Owner("long", [7] * (CONTEXT - 2))
    assert not drafter.propose([long], 4)[0].tokens  # type: ignore[list-item]
    drafter.close()


def test_tokens_that_the_small_model_lacks_end_its_guesses(target: Model) -> None:
    class Larger:
        vocab_size = target.tokenizer.vocab_size + 8
        token_text = target.tokenizer.token_text

    drafter = DraftModel(opened(gives_back=False), Larger())  # type: ignore[arg-type]
    known, unknown = Owner("known", [5] * 4), Owner("unknown", [5, Larger.vocab_size - 1, 6])
    for _ in range(2):
        drafts = drafter.propose([unknown, known], 2)  # type: ignore[list-item]
        assert [len(draft.tokens) for draft in drafts] == [0, 2]
    drafter.close()


def test_other_vocabularies_are_refused_by_the_first_token_that_differs() -> None:
    words = [(str(i), -float(i)) for i in range(10)]
    small = Tokenizer.from_metadata(spm(words, user=()))
    check_vocabularies(small, Tokenizer.from_metadata(spm([*words, ("extra", -20.0)], user=())))
    with pytest.raises(RequestError, match="of one vocabulary"):
        check_vocabularies(
            small, Tokenizer.from_metadata(spm([*words[:-1], ("other", -9.0)], user=()))
        )
    many = [*words, *((f"w{i}", -30.0) for i in range(200))]
    with pytest.raises(RequestError, match="not of one vocabulary"):
        check_vocabularies(small, Tokenizer.from_metadata(spm(many, user=())))


def test_recurrent_models_are_refused(target: Model, tmp_path: Path) -> None:
    small = opened("lfm2", gives_back=False)
    with pytest.raises((UnsupportedError, RequestError)):
        DraftModel(small, small.tokenizer)
    small.close()
