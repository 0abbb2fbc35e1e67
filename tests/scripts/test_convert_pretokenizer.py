"""Pre-tokenizers found by what they do, whichever way a tokenizer.json writes it.

B30: an unknown one is refused by its pattern, a known one in other spelling is accepted.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from martlet.quant.convert_pretokenizer import canonical_pattern, find_name
from martlet.quant.errors import UnsupportedError
from martlet.runtime.pretokenizers import PRE_TOKENIZERS
from martlet.scripts.convert_facts import reader_facts

KNOWN = reader_facts().pre_tokenizers
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
NFC = {"type": "NFC"}


def split(pattern: str, behavior: str = "Isolated", *, invert: bool = False) -> dict[str, Any]:
    return {
        "type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert
    }  # fmt: skip


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def name_of(pre: Any, *, ignore_merges: bool = False, normalizer: Any = None) -> str:
    model = {"type": "BPE", "ignore_merges": ignore_merges}
    return find_name({"pre_tokenizer": pre, "normalizer": normalizer, "model": model}, KNOWN)


def test_published_files_get_their_names() -> None:
    assert name_of(sequence(split(LLAMA3), BYTES), ignore_merges=True) == "llama-bpe"
    assert name_of(sequence(split(LLAMA3), BYTES)) == "dbrx"
    assert name_of(sequence(split(QWEN2), BYTES), normalizer=NFC) == "qwen2"
    assert name_of(sequence(split(QWEN2), BYTES)) == "deepseek-r1-qwen"
    assert name_of(sequence(split(TEKKEN), BYTES), ignore_merges=True) == "tekken"
    assert name_of(sequence(split(O200K), BYTES)) == "gpt-4o"
    assert name_of({**BYTES, "use_regex": True}) == "gpt-2"
    digits = {"type": "Digits", "individual_digits": True}
    assert name_of(sequence(digits, {**BYTES, "use_regex": True})) == "smollm"


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_known_form_finds_a_name_of_its_own_row(name: str) -> None:
    form = KNOWN[name]
    normalizer = NFC if form.nfc else None
    found = name_of(form.pre_tokenizer, ignore_merges=form.ignore_merges, normalizer=normalizer)
    same = [PRE_TOKENIZERS[found], PRE_TOKENIZERS[name]]
    assert same[0].steps == same[1].steps
    assert same[0].ignore_merges == same[1].ignore_merges


@pytest.mark.parametrize(
    "pre",
    [
        sequence(split(GPT2), BYTES),
        sequence(sequence(split(GPT2)), sequence(BYTES)),
        sequence(split(GPT2, "Removed", invert=True), BYTES),
        sequence(split(GPT2.replace(" ?", r"\u0020?").replace(r"\s\p{L}", r"\p{L}\s")), BYTES),
        sequence(split(GPT2.replace(" ?", r"\x20?").replace("'", r"\'")), BYTES),
    ],
)
def test_other_spellings_are_the_same(pre: Any) -> None:
    assert name_of(pre) == "gpt-2"


@pytest.mark.parametrize(
    ("pre", "told"),
    [
        (sequence(split(r"\w+|made up"), BYTES), r"\w+|made up"),
        (sequence(split(LLAMA3.replace("{1,3}", "{1,4}")), BYTES), "{1,4}"),
        (sequence(split(GPT2, "Removed"), BYTES), "behavior 'Removed'"),
        ({**BYTES, "add_prefix_space": True}, "add_prefix_space"),
        ({"type": "Whitespace"}, "'Whitespace'"),
        (sequence({"type": "Metaspace"}, BYTES), "'Metaspace'"),
        (None, "None"),
        ("ByteLevel", "ByteLevel"),
    ],
)
def test_unknown_ones_are_refused_by_what_they_are(pre: Any, told: str) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        name_of(pre)
    assert told in str(refusal.value)


@pytest.mark.parametrize("normalizer", [{"type": "Lowercase"}, {"type": "Sequence"}, "NFC", []])
def test_other_normalizers_are_refused(normalizer: Any) -> None:
    with pytest.raises(UnsupportedError, match="normalizer"):
        name_of({**BYTES, "use_regex": True}, normalizer=normalizer)


def test_a_known_pattern_with_flags_of_no_name_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="ignore_merges = True and NFC = True"):
        name_of(sequence(split(QWEN2), BYTES), ignore_merges=True, normalizer=NFC)


def test_sets_and_escapes() -> None:
    assert canonical_pattern(r"[\r\n]") == canonical_pattern("[\n\r]")
    assert canonical_pattern(r"[^a-z\x{41}-\x5A]") == canonical_pattern("[^A-Za-z]")
    assert canonical_pattern(r"\.") != canonical_pattern(".")
    assert canonical_pattern(r"[\-a]") != canonical_pattern("[a-]b")
    assert canonical_pattern("[ab]+") != canonical_pattern("[ab]")
    assert canonical_pattern(r"\S") != canonical_pattern(r"\s")
    assert canonical_pattern(r"[a\]b]") == canonical_pattern(r"[b\]a]")


@given(st.text(alphabet=r"ab[]\^-&{}()|?*+.xpu0Ls ", max_size=30))
def test_any_text_has_a_form_and_it_is_stable(pattern: str) -> None:
    form = canonical_pattern(pattern)
    assert canonical_pattern(form) == form
