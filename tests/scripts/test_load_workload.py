"""Workloads hold what was asked for: lengths, arrivals, shared prefixes."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from martlet.scripts.load_workload import (
    Lengths,
    Load,
    Shape,
    WorkloadError,
    Writer,
    make_workload,
    read_trace,
)


def shape(prompt: str = "20", output: str = "8", **others: int) -> Shape:
    return Shape(Lengths.parse(prompt), Lengths.parse(output), **others)


def letters_by_three(text: str) -> int:
    """A vocabulary in which words are of several tokens, and one is added at the start."""
    return 1 + sum(-(-len(word) // 3) for word in text.split())


@pytest.mark.parametrize("count", [None, letters_by_three])
@given(n=st.integers(2, 200), seed=st.integers(0, 9))
def test_texts_have_as_many_tokens_as_asked(count: object, n: int, seed: int) -> None:
    text = Writer(count).write(n, Random(seed))  # type: ignore[arg-type]
    assert (letters_by_three(text) if count else len(text.split())) == n


def test_a_text_goes_on_where_another_ended() -> None:
    more = Writer(letters_by_three).write(7, Random(0), "once upon a time")
    assert letters_by_three("once upon a time" + more) == letters_by_three("once upon a time") + 7


def test_the_same_seed_gives_the_same_and_another_one_others() -> None:
    load = Load(n_streams=2)
    first, again = (make_workload(shape(), load, 6, "a") for _ in range(2))
    assert first == again
    others = make_workload(shape(), load, 6, "b")
    assert not {each.turns for each in first} & {each.turns for each in others}


def test_prefixes_are_shared_over_repeats_and_prompts_are_not() -> None:
    load = Load(n_streams=2)
    asked = shape(prefix=50, n_prefixes=2)
    texts = [each.turns[0].text for seed in "ab" for each in make_workload(asked, load, 12, seed)]
    assert len({tuple(text.split()[:50]) for text in texts}) == 2
    assert len(set(texts)) == len(texts)
    assert {len(text.split()) for text in texts} == {70}


def test_turns_make_conversations() -> None:
    made = make_workload(shape(turns=3), Load(n_streams=1), 7, "a")
    assert [len(each.turns) for each in made] == [3, 3, 1]


@pytest.mark.parametrize(("text", "least", "most"), [("7", 7, 7), ("5-9", 5, 9), ("50~20", 1, 150)])
def test_lengths_are_drawn_as_written(text: str, least: int, most: int) -> None:
    lengths, draw = Lengths.parse(text), Random(0)
    drawn = [lengths.draw(draw) for _ in range(500)]
    assert least <= min(drawn) <= max(drawn) <= most
    assert (len(set(drawn)) > 1) == (least != most)


@pytest.mark.parametrize("text", ["0", "", "9-5", "x", "1.5"])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(WorkloadError, match=r"length|ends below"):
        Lengths.parse(text)


@pytest.mark.parametrize(("burstiness", "spread"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gaps_follow_their_law(burstiness: float, spread: float) -> None:
    """Mean 1 ÷ rate; deviation ÷ mean is 1 ÷ sqrt(burstiness)."""
    load = Load(rate_per_s=4, burstiness=burstiness)
    made = make_workload(shape("1", "1"), load, 4000, "a")
    at = [each.at_s for each in made]
    gaps = [after - before for before, after in itertools.pairwise(at)]  # type: ignore[operator]
    assert at[0] == 0
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.1)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(spread, rel=0.1)


def test_traces_in_both_dialects(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"at_s": 1.0, "prompt_tokens": 9, "output_tokens": 3}\n\n'
        '{"timestamp": 1500, "input_length": 5, "output_length": 2, "hash_ids": [1]}\n'
    )
    load = Load(trace=read_trace(path), trace_name=path.name)
    made = make_workload(shape(), load, 99, "a")
    assert [each.at_s for each in made] == [0, 0.5]
    assert [len(each.turns[0].text.split()) for each in made] == [9, 5]
    assert [each.turns[0].max_tokens for each in made] == [3, 2]


@pytest.mark.parametrize(
    "text", ["", "x", "[]", '{"at_s": 1}', '{"at_s": 0, "prompt_tokens": 0, "output_tokens": 1}']
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=str(path)):
        read_trace(path)
