"""Tokens that are matched as literal text before any merging, and what each kind may do.

Owns: the search for such tokens, the end-of-generation set, and which of them user text may
match. Must not know: merges, scores, streaming. Called by tokenizer.py.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .tokenizer_vocab import TokenType, Vocab, role_id

SPACE_MARK = "\u2581"  # the letter SentencePiece writes for a space

# Token texts that end a generation whatever role the file gives them.
# fmt: off
EOG_TEXTS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<turn|>", "<|tool_response>", "<|endoftext|>", "<|end_of_text|>",
    "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "</s>", "<eos>", "<end_of_utterance>",
    "[e~[",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
))
# fmt: on
# (all of these present, this one does not end a generation). Harmony ends a message, not the
# answer, with <|end|>; to Gemma </s> is HTML for the end of struck-out text.
EOG_EXCEPTIONS = (
    ({"<|return|>", "<|call|>"}, "<|end|>"),
    ({"<|calls|>", "<|flush|>"}, "<|end|>"),
    ({"<|tool_response>"}, "</s>"),
    ({"<end_of_turn>"}, "</s>"),
)
EOG_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")

# Roles of the three marks around a gap, as files name them now and as they used to.
FIM_ROLES = (("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle"))


class FimTokens(NamedTuple):
    """What a model trained to fill a gap wants before the text's beginning, its end, the gap."""

    prefix: int
    suffix: int
    middle: int


_ALWAYS_MARKUP = re.compile(
    r"<\|.*>|<.*\|>|<(?:start|end)_of_\w+>|\[PAD\d+\]|\[multimodal\]", re.DOTALL
)
_BRACKETS = frozenset("<>[]|")


def find_eog(vocab: Vocab, metadata: Mapping[str, Any], eos_id: int | None) -> frozenset[int]:
    """Every id that ends a generation. A text from the list counts only where the file marks the
    token as control or user-defined: an ordinary word spelt `[EOS]` must not stop anything."""
    markup = (TokenType.CONTROL, TokenType.USER_DEFINED)
    by_text = {
        text: vocab.ids[text]
        for text in EOG_TEXTS
        if text in vocab.ids and vocab.types[vocab.ids[text]] in markup
    }
    by_role = {role_id(metadata, role, vocab) for role in EOG_ROLES}
    harmless = {by_text.get(text) for present, text in EOG_EXCEPTIONS if present <= by_text.keys()}
    ends = (by_role | set(by_text.values())) - harmless | {eos_id}
    return frozenset(id_ for id_ in ends if id_ is not None)


def find_fim(vocab: Vocab, metadata: Mapping[str, Any]) -> FimTokens | None:
    """The marks that the file names; all three or none."""
    for roles in FIM_ROLES:
        ids = [role_id(metadata, role, vocab) for role in roles]
        found = [id_ for id_ in ids if id_ is not None]
        if len(found) == len(roles):
            return FimTokens(*found)
    return None


def is_markup(text: str, chat_template: str | None) -> bool:
    """Is this user-defined token part of the prompt format, so that content must not match it?

    Line breaks and runs of spaces also occur in templates; only what has a bracket is markup."""
    if _ALWAYS_MARKUP.fullmatch(text):
        return True
    return bool(chat_template and _BRACKETS & set(text) and text in chat_template)


class SpecialMatcher:
    """Cuts text at literal token texts: leftmost first, and of several there the longest."""

    def __init__(
        self,
        ids: Mapping[str, int],
        eats_right: frozenset[int] = frozenset(),
        eats_left: frozenset[int] = frozenset(),
    ) -> None:
        self._ids = {text: id_ for text, id_ in ids.items() if text}
        self._eats_right, self._eats_left = eats_right, eats_left
        lengths: dict[str, set[int]] = {}
        for text in self._ids:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(ns, reverse=True) for first, ns in lengths.items()}
        first_chars = "".join(map(re.escape, self._lengths))
        self._candidate = re.compile(f"[{first_chars}]") if first_chars else None

    def split(self, text: str) -> Iterator[str | int]:
        """Yields text pieces (never empty) and token ids in order."""
        start = search_from = 0
        while self._candidate and (candidate := self._candidate.search(text, search_from)):
            at = candidate.start()
            end, id_ = self._longest_at(text, at)
            if id_ is None:
                search_from = at + 1
                continue
            before = text[start:at]
            if before := before.rstrip() if id_ in self._eats_left else before:
                yield before
            yield id_
            start = search_from = self._skip_spaces(text, end) if id_ in self._eats_right else end
        if start < len(text):
            yield text[start:]

    def _longest_at(self, text: str, at: int) -> tuple[int, int | None]:
        for length in self._lengths[text[at]]:
            id_ = self._ids.get(text[at : at + length])
            if id_ is not None:
                return at + length, id_
        return at, None

    @staticmethod
    def _skip_spaces(text: str, at: int) -> int:
        while at < len(text) and text[at].isspace():
            at += 1
        return at


def space_eaters(
    vocab: Vocab, metadata: Mapping[str, Any]
) -> tuple[frozenset[int], frozenset[int]]:
    """(ids that swallow spaces to their right, to their left). Model files do not store these
    flags of the source tokenizers, so the few models that need them are listed here."""
    architecture, model = metadata.get("general.architecture"), metadata["tokenizer.ggml.model"]
    eats_right: set[int] = set()
    if architecture == "phi3" and model == "llama":
        keeps = {vocab.ids.get(text) for text in ("<unk>", "<s>", "<|endoftext|>")}
        eats_right = {i for i in vocab.of_type(TokenType.CONTROL) if i not in keeps}
    eats_left: set[int] = set()
    if metadata.get("tokenizer.ggml.pre") == "modern-bert" and "[MASK]" in vocab.ids:
        eats_left = {vocab.ids["[MASK]"]}
    return frozenset(eats_right), frozenset(eats_left)
