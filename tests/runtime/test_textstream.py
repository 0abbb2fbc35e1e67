"""Streams show whole characters, no part of a stop string, and in the end everything else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from martlet.runtime.errors import RequestError
from martlet.runtime.textstream import TextStream
from martlet.runtime.tokenizer import Tokenizer

from . import vocabularies as v

BYTE_LEVEL = Tokenizer.from_metadata(v.byte_level())
SPM = Tokenizer.from_metadata(v.spm())
ROCKET = "🚀".encode()


class Pieces:
    """A tokenizer whose token i is the i-th of the given texts."""

    def __init__(self, *pieces: str | bytes) -> None:
        self._pieces = [p.encode() if isinstance(p, str) else p for p in pieces]

    def token_bytes(self, token_id: int, *, special: bool = False) -> bytes:
        return self._pieces[token_id]


def stream_of(*pieces: str | bytes, stops: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    """What each piece showed, and last what finish() showed."""
    stream = TextStream(Pieces(*pieces), stops)
    shown = [stream.push(i) for i in range(len(pieces))]
    return [*shown, stream.finish()], stream


def test_a_character_appears_when_its_last_byte_arrives():
    shown, _ = stream_of(ROCKET[:1], ROCKET[1:3], ROCKET[3:] + b"!")
    assert shown == ["", "", "🚀!", ""]


def test_an_unfinished_character_becomes_one_replacement_character():
    assert stream_of("ok", ROCKET[:2])[0] == ["ok", "", "\ufffd"]
    assert stream_of(ROCKET[:1], ROCKET[1:3])[0] == ["", "", "\ufffd"]


def test_bytes_that_can_never_be_a_character_do_not_hold_up_the_rest():
    assert stream_of(b"\xff", "a")[0] == ["\ufffd", "a", ""]
    assert stream_of(ROCKET[:2], "a")[0] == ["", "\ufffda", ""]


def test_text_held_back_for_a_stop_is_shown_when_the_stop_does_not_come():
    shown, stream = stream_of("ple", "as", " EN", stops=("END!",))
    assert shown == ["ple", "as", " ", "EN"]
    assert not stream.stopped


def test_a_stop_hides_itself_and_everything_after():
    shown, stream = stream_of("ple", "asE", "ND", "! more", "x", stops=("END!",))
    assert shown == ["ple", "as", "", "", "", ""]
    assert stream.stopped


def test_a_false_start_is_shown_as_soon_as_it_is_one():
    assert stream_of("a\n", "b", stops=("\n\n",))[0] == ["a", "\nb", ""]
    assert stream_of("aab", "aac", stops=("aabaabx", "aac"))[0] == ["", "aab", ""]


def test_the_stop_that_is_complete_first_counts():
    assert stream_of("xabcd", stops=("abcd", "bc"))[0] == ["xa", ""]
    assert stream_of("xabc", stops=("bc", "abc"))[0] == ["x", ""]  # together: the longer


def test_a_stop_may_span_a_character_in_pieces():
    assert stream_of("a", ROCKET[:2], ROCKET[2:], "b", stops=("🚀b",))[0] == ["a", "", "", "", ""]


def test_an_unfinished_character_after_a_held_back_beginning():
    assert stream_of("E", ROCKET[:3], stops=("END",))[0] == ["", "", "E\ufffd"]


def test_an_empty_stop_is_refused():
    with pytest.raises(RequestError) as caught:
        TextStream(Pieces(), ("x", ""))
    assert caught.value.field == "stop"


def test_control_tokens_are_shown_only_on_request():
    ids = [ord("a"), v.IM_END, ord("b")]
    hidden = TextStream(BYTE_LEVEL)
    shown = TextStream(BYTE_LEVEL, show_ids=[v.IM_END])
    assert "".join(map(hidden.push, ids)) == "ab"
    assert "".join(map(shown.push, ids)) == "a<|im_end|>b"


def test_the_first_space_is_hidden_only_at_the_start_of_a_text():
    ids = [1, v.S_AB, v.S_AB]
    assert "".join(map(TextStream(SPM).push, ids)) == " ab ab"
    assert "".join(map(TextStream(SPM, hide_first_space=True).push, ids)) == "ab ab"


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1)))
def test_a_stream_adds_up_to_decode(ids):
    stream = TextStream(BYTE_LEVEL)
    assert "".join(map(stream.push, ids)) + stream.finish() == BYTE_LEVEL.decode(ids)


@given(st.lists(st.integers(0, SPM.vocab_size - 1)))
def test_a_stream_from_the_start_of_a_text_adds_up_to_decode(ids):
    stream = TextStream(SPM, hide_first_space=True)
    assert "".join(map(stream.push, ids)) + stream.finish() == SPM.decode(ids)


def cut_at_stop(text: str, stops: list[str]) -> str:
    """The rule as written: find what ends first; of those the longest; show what is before."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(found)[1]] if found else text


SHORT_STOPS = st.lists(st.text("ab🚀", min_size=1, max_size=4), max_size=4)


@given(st.text("ab🚀 "), SHORT_STOPS, st.data())
def test_stops_do_not_depend_on_how_the_text_was_cut(text, stops, data):
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)))))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    shown, stream = stream_of(*pieces, stops=tuple(stops))
    expected = cut_at_stop(text, stops)
    assert "".join(shown) == expected
    assert stream.stopped == (expected != text or any(stop in text for stop in stops))


@given(st.text("ab🚀"), SHORT_STOPS)
def test_nothing_is_held_back_without_need(text, stops):
    stream = TextStream(Pieces(text), stops)
    shown = stream.push(0)
    held = text[len(shown) :]
    assert stream.stopped or held == "" or any(stop.startswith(held) for stop in stops)
