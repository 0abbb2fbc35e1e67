"""Guesses of the most frequent tokens alone: their logits are as ever, others are never guessed,
and texts stay what they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from martlet.quant.errors import MartletError
from martlet.runtime.draft_model import DraftModel
from martlet.runtime.draft_words import Words, frequent_words
from martlet.runtime.drafts import Drafter
from martlet.runtime.engine import Engine
from martlet.runtime.errors import RequestError
from martlet.runtime.model import Model, load_model
from martlet.runtime.nextn_drafter import NextnDrafter
from martlet.runtime.sampling import SamplingParams
from martlet.runtime.speculation import Speculation
from martlet.scripts.generate import open_drafter

from .. import nextn
from ..recorded import gguf_of
from .harness import Answer, run_all
from .scripted import EOS, EOT, VOCAB_SIZE, ScriptedTokenizer
from .test_draft_model import CONTEXT, Owner
from .tiny import Chunk, make_step

EXECUTORS = ("reference", "native")


def some_words(vocabulary: Any) -> Words:
    return frequent_words(vocabulary, 40, [7, 7, 90, 250])


@given(text=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60), n=st.integers(3, VOCAB_SIZE))
def test_the_most_frequent_come_first_and_ends_always(text: list[int], n: int) -> None:
    found = frequent_words(ScriptedTokenizer(), n, text).tolist()
    assert found == sorted(set(found))
    assert len(found) == n
    assert {EOS, EOT} <= set(found)
    others = set(range(VOCAB_SIZE)) - set(found)
    kept = set(found) - {EOS, EOT}
    if others and kept:
        worst = min((text.count(token), -token) for token in kept)
        assert worst > max((text.count(token), -token) for token in others)


@pytest.mark.parametrize("n", [0, 2, VOCAB_SIZE + 1])
def test_numbers_that_leave_nothing_to_choose_are_refused(n: int) -> None:
    with pytest.raises(RequestError, match=f"expected 3 to {VOCAB_SIZE}"):
        frequent_words(ScriptedTokenizer(), n)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_logits_of_a_draft_model_are_those_of_all_tokens(name: str, executor: str) -> None:
    options: dict[str, Any] = {"context": CONTEXT, "executor": executor, "gives_back": False}
    step = make_step([Chunk([5, 6, 7, 8], 0, range(1))], [1, 3])
    whole, some = (
        load_model(gguf_of(name), **options, words=words) for words in (None, some_words)
    )
    assert some.words is not None
    assert len(some.words) == 40
    found, expected = some.executor.run(step), whole.executor.run(step)
    assert found.shape == (2, 40)
    assert (found == expected[:, some.words]).all()
    whole.close()
    some.close()


@pytest.mark.parametrize("name", ["qwen35", "glm4moe"])
def test_logits_of_a_model_s_own_block_are_those_of_all_tokens(name: str) -> None:
    """With an output matrix that is the model's, and with one of its own."""
    model = load_model(nextn.gguf_of(name), context=CONTEXT, executor="native", threads=1)
    words = some_words(model.tokenizer)
    hidden = np.random.default_rng(1).standard_normal((4, 32)).astype(np.float32)
    step = make_step([Chunk([5, 6, 7, 8], 0, range(1))], [0, 3])
    step = replace(step, given=hidden, hidden_rows=np.array([3], np.int32))
    (_, whole), (_, some) = model.open_nextn(), model.open_nextn(words)
    assert (some.run(step) == whole.run(step)[:, words]).all()
    assert (some.hidden == whole.hidden).all()
    model.close()


@pytest.fixture(scope="module")
def target() -> Iterator[Model]:
    model = load_model(nextn.gguf_of("glm4moe"), context=CONTEXT, executor="native", threads=1)
    yield model
    model.close()


@pytest.fixture(params=["model", "mtp"])
def drafter(target: Model, request: pytest.FixtureRequest) -> Iterator[Drafter]:
    """The model itself with fewer tokens, and its own block."""
    if request.param == "mtp":
        yield NextnDrafter(target, some_words(target.tokenizer))
        return
    options: dict[str, Any] = {"context": CONTEXT, "executor": "native", "threads": 1}
    path = nextn.gguf_of("glm4moe")
    small = load_model(path, **options, gives_back=False, words=some_words)
    yield DraftModel(small, target.tokenizer)
    small.close()


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_texts_stay_and_only_chosen_tokens_are_guessed(
    target: Model, drafter: Drafter, temperature: float
) -> None:
    words = set(some_words(target.tokenizer).tolist())
    propose, guessed = drafter.propose, []

    def noted(*asked: Any) -> Any:
        drafts = propose(*asked)
        guessed.extend(token for draft in drafts for token in draft.tokens)
        return drafts

    drafter.propose = noted  # type: ignore[method-assign]
    said = []
    for speculation in (None, Speculation(drafter, length=3)):
        engine = Engine(target.executor, target.tokenizer, context=CONTEXT, speculation=speculation)
        answers = [Answer() for _ in range(3)]
        for i, answer in enumerate(answers):
            params = SamplingParams(max_tokens=25, temperature=temperature, seed=i, ignore_eos=True)
            engine.submit([5 + i] * (9 + i), params, answer, request_id=str(i))
        run_all(engine)
        said.append([answer.ids for answer in answers])
    assert said[0] == said[1]
    assert guessed
    assert set(guessed) <= words


def test_what_is_not_guessed_has_no_chance(target: Model) -> None:
    """Which the rule that preserves the distribution goes by."""
    options: dict[str, Any] = {"context": CONTEXT, "executor": "native", "threads": 1}
    path = nextn.gguf_of("glm4moe")
    small = load_model(path, **options, gives_back=False, words=some_words)
    words = some_words(target.tokenizer)
    for top_k in (0, 5):
        owner = Owner("a", [5, 6, 7, 8], rejects=True)
        owner.params = SamplingParams(temperature=1.5, top_k=top_k)
        (draft,) = DraftModel(small, target.tokenizer).propose([owner], 3)  # type: ignore[list-item]
        for token, chances in zip(draft.tokens, draft.chances, strict=True):
            of_all = [chances.chance(other) for other in range(target.tokenizer.vocab_size)]
            assert sum(of_all) == pytest.approx(1)
            assert of_all[token] > 0
            assert set(np.flatnonzero(of_all)) <= set(words.tolist())
            assert np.count_nonzero(of_all) == (top_k or len(words))
    small.close()


@pytest.mark.parametrize("choice", ["many", "-3", "100:/no/such/file"])
def test_choices_that_are_none_are_refused(target: Model, choice: str) -> None:
    with (
        pytest.raises(MartletError, match="--draft-vocab"),
        open_drafter(target, None, "2", choice),
    ):
        pass


def test_without_a_guessing_matrix_the_choice_is_refused(target: Model) -> None:
    with (
        pytest.raises(MartletError, match="output matrix"),
        open_drafter(target, None, "off", "100"),
    ):
        pass
    with open_drafter(target, None, "2", "100") as own:
        assert isinstance(own, NextnDrafter)
        assert own._n_words == 100
