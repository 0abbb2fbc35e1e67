"""Formats under a budget: it is kept, and no other choice of those bytes costs much less."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from martlet.quant.allocate import BudgetTooSmall, Choice, allocate, efficient

Options = dict[str, list[Choice]]


@st.composite
def options(draw: st.DrawFn) -> Options:
    numbers = st.tuples(st.integers(1, 60), st.floats(0, 9))
    lists = draw(st.lists(st.lists(numbers, min_size=1, max_size=4), min_size=1, max_size=4))
    return {
        f"t{i}": [Choice(f"f{k}", n_bytes, cost) for k, (n_bytes, cost) in enumerate(numbers)]
        for i, numbers in enumerate(lists)
    }


def total(chosen: dict[str, Choice]) -> tuple[int, float]:
    return sum(c.n_bytes for c in chosen.values()), sum(c.cost for c in chosen.values())


@given(options(), st.integers(0, 250))
def test_the_budget_is_kept_and_nothing_of_those_bytes_costs_less(o: Options, budget: int) -> None:
    least = sum(min(c.n_bytes for c in each) for each in o.values())
    if budget < least:
        with pytest.raises(BudgetTooSmall, match=str(least)):
            allocate(o, budget)
        return
    n_bytes, cost = total(allocate(o, budget))
    assert n_bytes <= budget
    best = min(
        sum(c.cost for c in each)
        for each in product(*o.values())
        if sum(c.n_bytes for c in each) <= budget
    )
    widest = max(c.cost for each in o.values() for c in each)
    assert best <= cost + 1e-9
    assert cost <= best + widest + 1e-9


@given(options())
def test_with_all_the_bytes_every_tensor_costs_its_least(o: Options) -> None:
    for name, choice in allocate(o, 10**6).items():
        assert choice.cost == min(c.cost for c in o[name])


def test_a_format_above_the_line_between_its_neighbours_is_never_taken() -> None:
    small, poor, large = Choice("Q4_K", 45, 10.0), Choice("Q4_1", 50, 9.5), Choice("Q5_K", 55, 2.0)
    assert efficient([poor, large, small]) == [small, large]


def test_bytes_go_where_they_save_most() -> None:
    o = {
        "head": [Choice("Q4_K", 40, 8.0), Choice("Q6_K", 60, 1.0)],
        "attn_q": [Choice("Q4_K", 40, 2.0), Choice("Q6_K", 60, 1.0)],
    }
    chosen = allocate(o, 100)
    assert (chosen["head"].format, chosen["attn_q"].format) == ("Q6_K", "Q4_K")


def test_a_large_tensor_takes_a_step_that_others_make_room_for() -> None:
    """From the smallest on, steps of the small ones pay more per byte and leave no room."""
    small = [Choice("Q4_0", 10, 2.0), Choice("Q8_0", 20, 0.5)]
    o = {
        "embedding": [Choice("Q4_0", 100, 9.0), Choice("Q5_0", 130, 5.0)],
        **{f"blk.{i}": small for i in range(2)},
    }
    chosen = allocate(o, 150)
    assert [c.format for c in chosen.values()] == ["Q5_0", "Q4_0", "Q4_0"]
