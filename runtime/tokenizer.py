"""Text to token ids and back, from the metadata of a model file alone.

Owns: `Tokenizer`, which adds special tokens, BOS and display rules around one of the
algorithms in tokenizer_families.py.
Must not know: chat templates' language, requests, streaming.

Three degrees of trust decide which token texts a piece of text may match:
    template    all special tokens (`parse_special`)
    plain       user-defined tokens, never control tokens
    content     user-defined tokens that are ordinary text; prompt markup stays letters
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from .errors import FileFormatError, UnsupportedError
from .tokenizer_families import FAMILIES, Encoder, Family
from .tokenizer_special import SpecialMatcher, find_eog, find_fim, is_markup, space_eaters
from .tokenizer_vocab import TokenType, Vocab, flag, read_vocab, role_id

_LOG = logging.getLogger(__name__)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """Immutable after construction, except that the warning on a doubled BOS is given once."""

    def __init__(
        self, vocab: Vocab, encoder: Encoder, family: Family, metadata: Mapping[str, Any]
    ) -> None:
        template = metadata.get("tokenizer.chat_template")
        self.chat_template: str | None = template if isinstance(template, str) else None
        ranking = metadata.get("tokenizer.chat_template.rerank")
        self.rerank_template: str | None = ranking if isinstance(ranking, str) else None
        self.bos_id = role_id(metadata, family.bos_role, vocab, default=family.bos)
        if self.bos_id is None:
            self.bos_id = role_id(metadata, "bos", vocab)
        self.eos_id = role_id(metadata, "eos", vocab, default=family.eos)
        self.sep_id = role_id(metadata, "seperator", vocab)  # spelt so in the format
        self.pad_id = role_id(metadata, "padding", vocab)
        self.fim = find_fim(vocab, metadata)
        self.add_bos = family.forces_bos or flag(
            metadata, "add_bos_token", family.adds_bos(metadata)
        )
        self.add_eos = flag(metadata, "add_eos_token", family.add_eos)
        self.add_sep = flag(metadata, "add_sep_token", family.add_sep)
        self.eog_ids = find_eog(vocab, metadata, self.eos_id)
        self.vocab_size = len(vocab)
        # The first space of a whole text is the tokenizer's own, not the author's. A text that
        # continues a prompt keeps it.
        self.hides_first_space = family.hides_first_space or (
            family.space_prefix and flag(metadata, "add_space_prefix", True)
        )
        self._vocab = _with_control_eog(vocab, self.eog_ids)
        self.special_ids = frozenset(self._vocab.of_type(TokenType.CONTROL, TokenType.UNKNOWN))
        self._encoder, self._bytes_of = encoder, family.token_bytes
        self._eats_right, self._eats_left = space_eaters(vocab, metadata)
        self._warned_double_bos = False
        self._check_added("bos", self.add_bos, self.bos_id)
        self._check_added("eos", self.add_eos, self.eos_id)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], *, pre: str | None = None) -> "Tokenizer":
        """`pre` overrides the file's pre-tokenizer name, for files that lack it."""
        if pre is not None:
            metadata = {**metadata, "tokenizer.ggml.pre": pre}
        model = metadata.get("tokenizer.ggml.model")
        family = FAMILIES.get(model) if isinstance(model, str) else None
        if family is None:
            raise UnsupportedError(
                f"tokenizer.ggml.model is {model!r}; martlet reads {', '.join(sorted(FAMILIES))}"
            )
        vocab = read_vocab(metadata)
        return cls(vocab, family.build(vocab, metadata), family, metadata)

    # Text to ids.

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """`add_special` puts BOS and the like around the text as the model asks. Nothing is
        removed: a text that spells out its own BOS then has two, and a warning says so."""
        matcher = self._template_matcher if parse_special else self._plain_matcher
        ids = self._encode([(text, matcher)])
        return self._surround(ids) if add_special else ids

    def encode_content(self, text: str) -> list[int]:
        """Ids of what a user wrote: it can never become control tokens or prompt markup."""
        return self._encode([(text, self._content_matcher)])

    def encode_parts(self, parts: Iterable[tuple[str, bool]]) -> list[int]:
        """Ids of a rendered prompt given as (text, is_content) in order.

        Special tokens are found within a part, never across a seam; ordinary text is merged across
        seams. So honest content gives the same ids as the whole prompt in one piece."""
        return self._encode(
            (text, self._content_matcher if is_content else self._template_matcher)
            for text, is_content in parts
        )

    def with_single_bos(self, ids: Sequence[int]) -> list[int]:
        """A rendered chat prompt with exactly one BOS if the template or the model asks for one,
        and none if neither does."""
        if self.bos_id is None:
            return list(ids)
        n_bos = 0
        while n_bos < len(ids) and ids[n_bos] == self.bos_id:
            n_bos += 1
        if n_bos > 1:
            self._warn_double_bos()
        return [self.bos_id] * (n_bos > 0 or self.add_bos) + list(ids[n_bos:])

    # Ids to text.

    def token_bytes(self, token_id: int, *, special: bool = False) -> bytes:
        """The bytes a token stands for; a control token stands for none unless `special`."""
        if not 0 <= token_id < self.vocab_size:
            raise IndexError(f"token id {token_id} is outside 0..{self.vocab_size - 1}")
        text = self._vocab.tokens[token_id]
        if token_id in self.special_ids:
            return text.encode("utf-8", "surrogateescape") if special else b""
        return self._bytes_of(text, self._vocab.types[token_id])

    def token_text(self, token_id: int) -> str:
        """For people: the text, control tokens by name, incomplete characters as U+FFFD."""
        return self.token_bytes(token_id, special=True).decode("utf-8", "replace")

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of a whole sequence that starts where a text starts."""
        raw = b"".join(self.token_bytes(id_, special=special) for id_ in ids)
        text = raw.decode("utf-8", "replace")
        return text.removeprefix(" ") if self.hides_first_space else text

    # Inner workings.

    def _encode(self, parts: Iterable[tuple[str, SpecialMatcher]]) -> list[int]:
        ids: list[int] = []
        pending: list[str] = []

        def flush() -> None:
            if pending:
                ids.extend(self._encoder.encode("".join(pending)))
                pending.clear()

        for text, matcher in parts:
            # Half a surrogate pair is no character; UTF-8 cannot carry it.
            for item in matcher.split(_LONE_SURROGATE.sub("\ufffd", text)):
                if isinstance(item, str):
                    pending.append(item)
                else:
                    flush()
                    ids.append(item)
        flush()
        return ids

    def _surround(self, ids: list[int]) -> list[int]:
        if self.add_bos and ids[:1] == [self.bos_id]:
            self._warn_double_bos()
        before = [self.bos_id] if self.add_bos else []
        after = [self.eos_id] if self.add_eos else []
        if self.add_sep and self.sep_id is not None:
            after.append(self.sep_id)
        return [i for i in (*before, *ids, *after) if i is not None]

    def _warn_double_bos(self) -> None:
        if not self._warned_double_bos:
            self._warned_double_bos = True
            name = self.token_text(self.bos_id or 0)
            _LOG.warning("the prompt spells out %s and the tokenizer adds it too", name)

    def _check_added(self, role: str, is_added: bool, id_: int | None) -> None:
        if is_added and id_ is None:
            raise FileFormatError(
                f"tokenizer.ggml.add_{role}_token is true but the file names no {role} token"
            )

    def _matcher(self, wanted: Callable[[int], bool], *types: TokenType) -> SpecialMatcher:
        # Texts are matched as people write them: with spaces, not the file's space marks.
        ids: dict[str, int] = {}
        for id_ in filter(wanted, self._vocab.of_type(*types)):
            raw = self.token_bytes(id_, special=True)
            ids.setdefault(raw.decode("utf-8", "surrogateescape"), id_)
        return SpecialMatcher(ids, self._eats_right, self._eats_left)

    @cached_property
    def _template_matcher(self) -> SpecialMatcher:
        types = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
        return self._matcher(lambda _: True, *types)

    @cached_property
    def _plain_matcher(self) -> SpecialMatcher:
        return self._matcher(lambda _: True, TokenType.USER_DEFINED)

    @cached_property
    def _content_matcher(self) -> SpecialMatcher:
        def is_text(id_: int) -> bool:
            return not is_markup(self._vocab.tokens[id_], self.chat_template)

        return self._matcher(is_text, TokenType.USER_DEFINED)


def _with_control_eog(vocab: Vocab, eog_ids: frozenset[int]) -> Vocab:
    """User-defined tokens that end a generation become control tokens: not shown, not typed."""
    types = list(vocab.types)
    for id_ in eog_ids:
        if types[id_] == TokenType.USER_DEFINED:
            types[id_] = TokenType.CONTROL
    return replace(vocab, types=types)
