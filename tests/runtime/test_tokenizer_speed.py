"""No text makes tokenizing slow out of proportion: bounds are generous, the growth is not."""

import functools
import threading
import time

import pytest
from martlet.runtime.textstream import TextStream
from martlet.runtime.tokenizer import Tokenizer

from . import vocabularies as v

LONG_MS = 1000
# Each doubling of the text may cost less than this much more; quadratic work costs 4 times more.
DOUBLING = 3.0
SHORTEST_MS = 5.0  # what is faster than this cannot be told from noise

TOKENIZERS = {
    "byte level": v.byte_level(),
    "byte level, digits": v.byte_level(pre="tiny_aya"),
    "sentencepiece": v.spm(),
    "raw": v.raw_bpe(),
    "wordpiece": v.wordpiece(),
}


def best_ms(tokenizer: Tokenizer, text: str) -> float:
    times = []
    for _ in range(3):
        start = time.process_time()  # of this process alone: other work on the machine is no fault
        tokenizer.encode(text, add_special=True, parse_special=True)
        times.append((time.process_time() - start) * 1000)
    return min(times)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("unit", ["a", " ", "_", "漢", "1", "\n", "<", "<|im_end|>", "<b>a"])
def test_long_runs_take_little_time_and_longer_ones_in_proportion(name, unit):
    tokenizer = Tokenizer.from_metadata(TOKENIZERS[name])
    one, four = (best_ms(tokenizer, unit * (n // len(unit))) for n in (20_000, 80_000))
    assert four < LONG_MS
    assert four < DOUBLING**2 * max(one, SHORTEST_MS)


# What generates text; word pieces are for encoders, and take no text of this length.
@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name != "wordpiece"])
def test_other_threads_run_while_a_long_text_is_tokenized(name):
    tokenizer = Tokenizer.from_metadata(TOKENIZERS[name])
    encode = functools.partial(tokenizer.encode, add_special=True, parse_special=True)
    encode("a")  # tables that are built once are not the matter here
    thread = threading.Thread(target=encode, args=("word 123 " * 40_000,))
    n_turns = 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        n_turns += 1
    assert n_turns > 10


def test_many_parts_and_long_stops_do_not_add_up():
    tokenizer = Tokenizer.from_metadata(v.byte_level())
    start = time.process_time()
    tokenizer.encode_parts([("a", True)] * 40_000)
    stream = TextStream(tokenizer, ["a" * 10_000 + "b"])
    for _ in range(20_000):
        stream.push(ord("a"))
    assert (time.process_time() - start) * 1000 < LONG_MS
    assert len(stream.finish()) == 10_000


def test_a_large_sentencepiece_vocabulary_is_built_in_little_time():
    n = 200_000
    pieces = [(f"w{i}", -float(i)) for i in range(n)]
    metadata = v.spm(pieces=pieces)
    start = time.process_time()
    tokenizer = Tokenizer.from_metadata(metadata)
    assert (time.process_time() - start) * 1000 < 3 * LONG_MS
    assert tokenizer.vocab_size == 3 + 256 + n + len(v.SPM_USER)
