"""Where each named pattern cuts: some by hand, all against a recorded list, none in long time."""

import json
import time
from pathlib import Path

import pytest
from martlet.runtime.pretokenizers import PRE_TOKENIZERS, pre_tokenizer
from martlet.runtime.tokenizer_bpe import BYTE_OF_LETTER, merges_from_ranks

GOLDEN = Path(__file__).parents[1] / "data" / "tokenizer" / "pretokenizers.json"
ROWS = {id(row): name for name, row in PRE_TOKENIZERS.items()}  # one name per row
LONG_MS = 10_000  # bound of one long text; a quadratic pattern needs minutes


def pieces(name: str, text: str) -> list[str]:
    cut = pre_tokenizer(name).build().pre_tokenize_str(text)
    raw = [bytes(map(BYTE_OF_LETTER.__getitem__, piece)) for piece, _ in cut]
    return [piece.decode("utf-8", "backslashreplace") for piece in raw]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("llama-bpe", "I'LL pay 12345", ["I", "'LL", " pay", " ", "123", "45"]),
        ("qwen2", "a12", ["a", "1", "2"]),
        ("gpt-2", "I'LL 12345", ["I", "'", "LL", " 12345"]),  # small contractions only
        ("gpt-2", "it's", ["it", "'s"]),
        ("smollm", "a 12", ["a", " ", "1", "2"]),
        ("falcon", "12345--x", ["123", "45", "--", "x"]),
        ("llama-bpe", "a   b\n\n c", ["a", "  ", " b", "\n\n", " c"]),
        ("tekken", "aÉb ПриветМир", ["a", "Éb", " Привет", "Мир"]),  # not llama.cpp's one piece
        ("gpt-4o", "हिन्दी", ["हिन्दी"]),  # marks belong to the word
        ("llama-bpe", "हिन्दी", ["ह", "िन", "्द", "ी"]),  # here they do not
        ("gpt-4o", "HeLLo'll", ["He", "LLo'll"]),
        ("tekken", "Hello'll", ["Hello", "'ll"]),
        ("qwen35", "हिन्दी!", ["हिन्दी", "!"]),
        ("tiny_aya", "1234567 1234a", ["1", "234", "567", " ", "123", "4", "a"]),
        ("afmoe", "1234567a 12", ["1", "234", "567", "a", " ", "12"]),
        ("afmoe", "123456", ["123", "456"]),
        ("kimi-k2", "abc漢字kana", ["abc", "漢字", "kana"]),
        ("deepseek-v3", "漢字 x1234", ["漢字", " x", "123", "4"]),
        ("deepseek-llm", "a\r\n  1", ["a", "\r", "\n", "  ", "1"]),
        ("deepseek-coder", "x12!", ["x", "1", "2", "!"]),
        ("minicpm5", "1234x", ["123", "4", "x"]),
        ("seed-coder", "a!\n", ["a", "!", "\n"]),
        ("llama-bpe", "a!\n", ["a", "!\n"]),
        ("tekken", "a!\n/b", ["a", "!\n/", "b"]),
        ("laguna", "a \n\n b", ["a", " ", "\n\n", " b"]),
        ("youtu", "한국어漢字", ["한국어", "漢字"]),
        ("bailingmoe", "it'S 12", ["it", "'S", " ", "1", "2"]),
    ],
)
def test_cuts_by_hand(name, text, expected):
    assert pieces(name, text) == expected


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_cuts_are_as_recorded_and_lose_nothing(name):
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    for text, expected in zip(golden["texts"], golden["pieces"][name], strict=True):
        assert pieces(name, text) == expected
        cut = pre_tokenizer(name).build().pre_tokenize_str(text)
        raw = b"".join(bytes(map(BYTE_OF_LETTER.__getitem__, piece)) for piece, _ in cut)
        assert raw == text.encode()


@pytest.mark.parametrize("name", ROWS.values())
@pytest.mark.parametrize(
    ("unit", "count", "tail"),
    [
        ("a", 40_000, ""),
        (" ", 50_000, ""),
        (" ", 50_000, "1"),  # a trailing-space pattern must not start over at each space
        ("1", 40_000, ""),
        ("1", 40_000, "a"),
        ("漢", 40_000, ""),
        ("_", 50_000, ""),
        ("\n ", 20_000, "x"),
    ],
    ids=repr,
)
def test_long_runs_are_cut_in_little_time(name, unit, count, tail):
    cutter, text = pre_tokenizer(name).build(), unit * count + tail
    start = time.process_time()
    cutter.pre_tokenize_str(text)
    assert (time.process_time() - start) * 1000 < LONG_MS


def test_the_names_of_the_notes_are_there():
    names = "llama-bpe pixtral lfm2 dbrx glm5 qwen2 qwen35 gpt-2 granite-docling smollm refact"
    assert set(names.split()) <= PRE_TOKENIZERS.keys()
    assert "default" not in PRE_TOKENIZERS


def test_merges_follow_from_ranks_alone():
    ids = {text: rank for rank, text in enumerate(["a", "b", "c", "bc", "ab", "abc"])}
    assert merges_from_ranks(ids) == [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")]
