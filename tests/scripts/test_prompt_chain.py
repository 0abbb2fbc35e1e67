"""Prompts that begin alike have chains that do, and a digest forgets what its cache would."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from martlet.scripts import routing
from martlet.scripts.prompt_chain import CHARS_PER_TOKEN, RUN, Digest, chain_of, n_known

SYSTEM = {"role": "system", "content": "You are a keeper of birds. " * 60}


def turn(n: int) -> dict[str, str]:
    return {"role": "user", "content": f"{n}. Which bird is this? " * 40}


def common(a: list[int], b: list[int]) -> int:
    return n_known(a, set(b[: len(a)]))


def test_a_longer_conversation_begins_with_a_shorter_one() -> None:
    short = chain_of({"messages": [SYSTEM, turn(0)]})
    longer = chain_of({"messages": [SYSTEM, turn(0), turn(1)]})
    other = chain_of({"messages": [SYSTEM, turn(5)]})
    assert longer[: len(short)] == short
    assert len(longer) > len(short)
    assert common(other, short) == len(str(SYSTEM)) // RUN < len(short)


def test_whatever_changes_the_whole_prompt_changes_the_chain() -> None:
    body = {"messages": [SYSTEM, turn(0)]}
    for name in ("model", "cache_salt", "tools", "lora"):
        assert common(chain_of({**body, name: "x"}), chain_of(body)) == 0
    assert chain_of({**body, "temperature": 1.0, "max_tokens": 3}) == chain_of(body)


def test_every_dialect_has_a_prompt() -> None:
    text = "a" * 3 * RUN
    for body in (
        {"prompt": text},
        {"input": text},
        {"system": text, "messages": []},
        {"instructions": text, "input": "b"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]},
        {"prompt": [1, 2, 3] * 300},
    ):
        assert len(chain_of(body)) >= 2, body
    assert chain_of({}) == chain_of({"prompt": "a" * (RUN - 1)}) == []
    assert chain_of({"prompt": None, "messages": 7}) == []
    assert len(chain_of({"prompt": "\ud800" * RUN})) == 1  # no UTF-8


@given(st.lists(st.lists(st.integers(0, 9), max_size=8), max_size=30))
def test_what_is_known_has_no_gap(chains: list[list[int]]) -> None:
    digest = Digest(4 * RUN)  # of 12 links
    for chain in chains:
        digest.learn(chain)
        found = digest.links()
        assert len(found) <= 4 * CHARS_PER_TOKEN
        assert digest.n_known(chain) == n_known(chain, found) == len(chain)


def test_the_longest_unused_is_forgotten_first() -> None:
    digest = Digest(-(-4 * RUN // CHARS_PER_TOKEN))  # of 4 links
    digest.learn([1, 2, 3])
    digest.learn([4, 5])
    assert digest.n_known([1, 2, 3]) == 2  # its end has gone
    assert digest.n_known([4, 5]) == 2
    digest.learn([1])
    digest.learn([6, 7])
    assert digest.n_known([4, 5]) == digest.n_known([1, 2]) == 1
    assert n_known([1, 2], {2}) == 0


def chosen(unfinished: list[int], known: list[int], beginning: bytes = b"x", seed: int = 0) -> int:
    names = [b"replica %d" % at for at in range(len(unfinished))]
    return routing.by_prefix(unfinished, known, names, beginning, Random(seed))


def test_who_knows_most_gets_it_unless_behind() -> None:
    assert chosen([3, 3, 3], [0, 5, 2]) == 1
    assert chosen([3, 9, 3], [0, 5, 2]) == 2  # the best is behind: the next best
    assert {chosen([2, 3, 2], [4, 4, 4], seed=seed) for seed in range(20)} == {0, 2}


def test_unknown_prompts_that_begin_alike_meet() -> None:
    places = Counter(chosen([1] * 4, [0] * 4, b"%d" % n) for n in range(400))
    assert len(places) == 4
    assert min(places.values()) > 60
    # and stay where they are when another replica goes
    names = [b"a", b"b", b"c", b"d"]
    for n in range(50):
        four, three = (
            left[routing.by_prefix([0] * len(left), [0] * len(left), left, b"%d" % n, Random(0))]
            for left in (names, names[:3])
        )
        assert four in (three, b"d")
