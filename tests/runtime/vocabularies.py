"""Vocabularies small enough to check ids by hand, as model file metadata.

Byte-level: id = byte value; merges from 256 in order. SentencePiece: 0..2 special, byte b is
BYTE_0 + b, then letters and merged pieces.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from martlet.runtime.tokenizer_bpe import BYTE_OF_LETTER

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
LETTER_OF_BYTE = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}

MERGES = ("Ġ t", "h e", "Ġt he", "a a", "aa aa", "Ċ Ċ")
G_T, HE, G_THE, AA, AAAA, NL_NL = range(256, 262)
IM_START, IM_END, EOT, TOOL, ACCENT = range(262, 267)
BYTE_LEVEL_SPECIAL = (
    ("<|im_start|>", CONTROL),
    ("<|im_end|>", CONTROL),
    ("<|endoftext|>", CONTROL),
    ("<tool>", USER),
    ("ø", USER),
)

BYTE_0 = 3
SPM_PIECES = (
    ("▁", -10.0),
    ("a", -10.0),
    ("b", -10.0),
    ("c", -10.0),
    ("ab", -1.0),
    ("bc", -2.0),
    ("▁ab", -3.0),
    ("aa", -4.0),
    ("▁▁", -5.0),
)
SPACE, A, B, C, AB, BC, S_AB, SPM_AA, SPACES_2 = range(259, 268)
SPM_USER = (("\n\n", USER), ("<b>", USER))
SPM_NL_NL, SPM_BOLD = 268, 269


def byte_level(
    merges: Sequence[str] = MERGES,
    special: Iterable[tuple[str, int]] = BYTE_LEVEL_SPECIAL,
    pre: str = "gpt-2",
    **keys: Any,
) -> dict[str, Any]:
    normal = [LETTER_OF_BYTE[b] for b in range(256)] + [m.replace(" ", "") for m in merges]
    texts, types = zip(*[(t, NORMAL) for t in normal], *special, strict=True)
    return _metadata("gpt2", texts, types, merges=list(merges), pre=pre, **keys)


def spm(
    pieces: Iterable[tuple[str, float]] = SPM_PIECES,
    user: Iterable[tuple[str, int]] = SPM_USER,
    **keys: Any,
) -> dict[str, Any]:
    rows = [("<unk>", UNKNOWN, 0.0), ("<s>", CONTROL, 0.0), ("</s>", CONTROL, 0.0)]
    rows += [(f"<0x{b:02X}>", BYTE, 0.0) for b in range(256)]
    rows += [(text, NORMAL, score) for text, score in pieces]
    rows += [(text, type_, -1000.0) for text, type_ in user]
    texts, types, scores = zip(*rows, strict=True)
    return _metadata("llama", texts, types, scores=np.array(scores, np.float32), **keys)


WORDPIECE = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁play", "ing", "▁the", "▁,", "▁p", "▁cafe")
PAD, UNK, CLS, SEP, PLAY, ING, THE, COMMA, P, CAFE = range(10)


def wordpiece(**keys: Any) -> dict[str, Any]:
    types = [CONTROL] * 4 + [NORMAL] * (len(WORDPIECE) - 4)
    roles = {"cls_token_id": CLS, "seperator_token_id": SEP, "unknown_token_id": UNK}
    return _metadata("bert", WORDPIECE, types, **roles, **keys)


RAW_BPE = ("<pad>", "<eos>", "<bos>", "<unk>", "▁", "a", "b", "\n", "\n\n", "ab", "▁ab")
R_BOS, R_UNK, R_SPACE, R_A, R_B, R_NL, R_NL_NL, R_AB, R_S_AB, R_BYTE_0 = range(2, 12)


def raw_bpe(**keys: Any) -> dict[str, Any]:
    texts = [*RAW_BPE, *(f"<0x{b:02X}>" for b in range(256))]
    types = [CONTROL] * 3 + [UNKNOWN] + [NORMAL] * 7 + [BYTE] * 256
    merges = ["a b", "\n \n", "▁ ab"]
    roles = {"bos_token_id": 2, "eos_token_id": 1, "add_bos_token": False}
    return _metadata("gemma4", texts, types, merges=merges, **roles, **keys)


def _metadata(model: str, tokens: Iterable[str], types: Iterable[int], **keys: Any) -> dict:
    template = keys.pop("chat_template", None)
    metadata = {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": np.array(list(types), np.int32),
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }
    return metadata | ({"tokenizer.chat_template": template} if template else {})
