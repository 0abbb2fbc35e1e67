"""Which text becomes a special token: by degree of trust, and next to spaces and each other."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from martlet.runtime.tokenizer import Tokenizer
from martlet.runtime.tokenizer_special import SpecialMatcher, is_markup

from . import vocabularies as v

CHAT = "<|im_start|>{{ user }}<|im_end|>\n<tool>"
BYTE_LEVEL = Tokenizer.from_metadata(v.byte_level(chat_template=CHAT))
SPM = Tokenizer.from_metadata(v.spm())


def template(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False, parse_special=True)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("<|im_end|>aa", [v.IM_END, v.AA]),
        ("<|im_end|> the", [v.IM_END, v.G_THE]),
        ("aa<|im_end|>", [v.AA, v.IM_END]),
        ("<|im_start|><|im_end|>", [v.IM_START, v.IM_END]),
        ("a<|im_end|>a", [ord("a"), v.IM_END, ord("a")]),  # the two do not merge to "aa"
        ("<|im_end|>\n\n", [v.IM_END, v.NL_NL]),
    ],
)
def test_text_around_special_tokens_byte_level(text, ids):
    assert template(BYTE_LEVEL, text) == ids


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("<s>ab", [1, v.S_AB]),  # the prefix comes back after every special token
        ("<s> ab", [1, v.SPACE, v.S_AB]),
        ("ab<s>ab", [v.S_AB, 1, v.S_AB]),
        ("<s></s>", [1, 2]),
        ("ab</s>", [v.S_AB, 2]),
        ("a\n\nab", [v.SPACE, v.A, v.SPM_NL_NL, v.S_AB]),
    ],
)
def test_text_around_special_tokens_sentencepiece(text, ids):
    assert template(SPM, text) == ids


def test_plain_text_matches_user_defined_tokens_and_no_control_token():
    ids = BYTE_LEVEL.encode("<|im_end|><tool>ø", add_special=False, parse_special=False)
    assert ids == [*b"<|im_end|>", v.TOOL, v.ACCENT]


def test_content_matches_neither_control_tokens_nor_the_templates_markup():
    assert BYTE_LEVEL.encode_content("<|im_end|><tool>ø") == [*b"<|im_end|><tool>", v.ACCENT]
    assert SPM.encode_content("<s><b>") == [v.SPACE, *(v.BYTE_0 + b for b in b"<s>"), v.SPM_BOLD]


@given(st.lists(st.sampled_from([*"<|>im_ø \n", "<|im_end|>", "<tool>"])).map("".join))
def test_content_never_yields_a_control_token(text):
    ids = BYTE_LEVEL.encode_content(text)
    assert BYTE_LEVEL.special_ids.isdisjoint(ids)
    assert v.TOOL not in ids
    assert BYTE_LEVEL.decode(ids) == text


def test_parts_merge_across_seams_but_special_tokens_do_not_form_there():
    parts = [("<|im_start|>\n", False), ("\n", True), ("<|im_end|>", False)]
    whole = "".join(text for text, _ in parts)
    assert template(BYTE_LEVEL, whole) == [v.IM_START, v.NL_NL, v.IM_END]
    assert BYTE_LEVEL.encode_parts(parts) == template(BYTE_LEVEL, whole)
    forged = [("<|im_", True), ("end|>", False)]
    assert BYTE_LEVEL.encode_parts(forged) == list(b"<|im_end|>")
    assert BYTE_LEVEL.encode_parts([("<|im_end|>", True)]) == list(b"<|im_end|>")


def test_control_tokens_cannot_be_reached_by_merging():
    merges = (*v.MERGES, "< |", "<| x")
    forged = v.byte_level(merges=merges, special=[])
    forged["tokenizer.ggml.token_type"][-1] = v.CONTROL  # "<|x", the result of the last merge
    tokenizer = Tokenizer.from_metadata(forged)
    bar = 256 + merges.index("< |")
    assert tokenizer.encode_content("<|x") == [bar, ord("x")]
    assert template(tokenizer, "<|x") == [bar + 1]


def test_ignore_merges_takes_whole_pieces_but_no_control_token():
    special = [("zzz", v.NORMAL), ("EOT", v.CONTROL)]
    keys = {"bos_token_id": v.IM_START + 1, "pre": "llama-bpe"}
    tokenizer = Tokenizer.from_metadata(v.byte_level(special=special, **keys))
    assert tokenizer.encode_content("zzz") == [v.IM_START]  # no merge leads to it
    assert tokenizer.encode_content("EOT") == list(b"EOT")


def test_of_tokens_that_start_together_the_longest_matches():
    matcher = SpecialMatcher({"\n": 1, "\n\n": 2, "\n\n\n": 3})
    assert list(matcher.split("a" + "\n" * 8 + "b\n")) == ["a", 3, 3, 2, "b", 1]
    assert list(SpecialMatcher({}).split("ab")) == ["ab"]


@given(st.text(st.sampled_from("ab<>x")))
def test_matching_loses_no_text(text):
    texts = {"<a>": 0, "<a>b": 1, "bb": 2, "<": 3}
    by_id = {id_: text for text, id_ in texts.items()}
    pieces = list(SpecialMatcher(texts).split(text))
    assert "".join(p if isinstance(p, str) else by_id[p] for p in pieces) == text
    assert not any(isinstance(p, str) and ("<" in p or "bb" in p) for p in pieces)


def test_space_eating_tokens():
    matcher = SpecialMatcher({"<R>": 1, "<L>": 2}, frozenset({1}), frozenset({2}))
    assert list(matcher.split("a <R> \n b <L> c")) == ["a ", 1, "b", 2, " c"]


def test_phi3_control_tokens_eat_the_line_break_after_them():
    user = [("<|user|>", v.CONTROL), *v.SPM_USER]
    metadata = v.spm(user=user) | {"general.architecture": "phi3"}
    ids = template(Tokenizer.from_metadata(metadata), "<|user|>\nab<s>\n")
    assert ids == [268, v.S_AB, 1, v.SPACE, v.BYTE_0 + 10]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|START_OF_TURN_TOKEN|>", True),
        ("<|tool_call>", True),
        ('<|"|>', True),
        ("<turn|>", True),
        ("[PAD151646]", True),
        ("<tool>", True),  # because the template writes it
        ("<b>", False),
        ("\n", False),  # although the template writes it
        ("    ", False),
        ("é", False),
    ],
)
def test_markup_is_what_the_template_writes_or_what_looks_like_it(text, expected):
    assert is_markup(text, CHAT) is expected


@pytest.mark.parametrize("n_bos", [0, 1, 2, 3])
@pytest.mark.parametrize("add_bos", [True, False])
def test_a_chat_prompt_has_one_bos_if_either_side_asks_for_it(n_bos, add_bos):
    tokenizer = Tokenizer.from_metadata(v.spm(add_bos_token=add_bos))
    expected = [1, v.A] if n_bos or add_bos else [v.A]
    assert tokenizer.with_single_bos([1] * n_bos + [v.A]) == expected


def test_raw_text_keeps_its_own_bos_and_is_warned_about_once(caplog):
    tokenizer = Tokenizer.from_metadata(v.spm())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            ids = tokenizer.encode("<s>ab", add_special=True, parse_special=True)
            assert ids == [1, 1, v.S_AB]
    assert len(caplog.records) == 1
    assert "<s>" in caplog.text


def eog(texts: dict[str, int], **keys: int) -> set[str]:
    """The ending tokens of a byte-level vocabulary with these special tokens, by text."""
    tokenizer = Tokenizer.from_metadata(v.byte_level(special=texts.items(), **keys))
    return {tokenizer.token_text(i) for i in tokenizer.eog_ids}


def test_end_of_generation_by_role_and_by_text():
    texts = {"<|im_end|>": v.CONTROL, "<|endoftext|>": v.CONTROL, "<stop>": v.CONTROL}
    assert eog(texts) == {"<|im_end|>", "<|endoftext|>"}
    assert eog(texts, eot_token_id=264) == {"<|im_end|>", "<|endoftext|>", "<stop>"}


def test_an_ordinary_word_spelt_like_an_end_token_does_not_end():
    assert eog({"[EOS]": v.NORMAL, "<eos>": v.CONTROL}) == {"<eos>"}


def test_end_of_a_harmony_message_is_not_the_end_of_the_answer():
    end = {"<|end|>": v.CONTROL}
    assert eog(end) == {"<|end|>"}
    harmony = end | {"<|return|>": v.CONTROL, "<|call|>": v.CONTROL}
    assert eog(harmony, eot_token_id=262) == {"<|return|>", "<|call|>"}


def test_struck_out_text_does_not_end_gemmas_answer():
    assert eog({"</s>": v.USER}) == {"</s>"}
    assert eog({"</s>": v.USER, "<end_of_turn>": v.CONTROL}) == {"<end_of_turn>"}
    assert eog({"</s>": v.USER, "<|tool_response>": v.USER}) == {"<|tool_response>"}
    both = {"</s>": v.USER, "<end_of_turn>": v.CONTROL}
    assert eog(both, eos_token_id=262) == {"</s>", "<end_of_turn>"}  # the file's word counts


def test_a_user_defined_end_token_is_hidden_and_cannot_be_typed():
    tokenizer = Tokenizer.from_metadata(v.byte_level(special=[("<|tool_response>", v.USER)]))
    (end,) = tokenizer.eog_ids
    assert end in tokenizer.special_ids
    assert tokenizer.token_bytes(end) == b""
    assert tokenizer.encode("<|tool_response>", add_special=False, parse_special=False)[0] != end
