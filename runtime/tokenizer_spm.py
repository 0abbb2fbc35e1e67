r"""SentencePiece models, and BPE (`tokenizer.ggml.model` = "llama"): merges by score, unknown text
as bytes. Unigram (tokenizer_unigram.py) is another algorithm of the same library.

Owns: turning a token table into a SentencePiece model, and its token-to-bytes rule.
Must not know: special tokens, BOS, prefix rules of templates. Called by tokenizer.py.

The sentencepiece library is the source of these ids and needs no merge list, which for 262,144
tokens would take seconds to derive. It wants a serialized ModelProto; the message is four fields
deep, so it is written here by hand. Field layout (sentencepiece_model.proto):

    ModelProto      1: SentencePiece*   2: TrainerSpec   3: NormalizerSpec
    SentencePiece   1: text             2: score (f32)   3: type (same numbers as GGUF's)
    TrainerSpec     3: model_type       35: byte_fallback
    NormalizerSpec  2: precompiled_charsmap   3: add_dummy_prefix
                    4: remove_extra_whitespaces   5: escape_whitespaces
"""

from dataclasses import dataclass

from .errors import FileFormatError, RequestError, UnsupportedError
from .tokenizer_special import SPACE_MARK
from .tokenizer_vocab import TokenType, Vocab, check_byte_tokens

UNIGRAM, BPE = 1, 2
_N_BYTES = 256


@dataclass(frozen=True)
class Normalizer:
    """What becomes of a text before it is cut."""

    charsmap: bytes = b""  # the library's own form of a table of replacements
    space_prefix: bool = False
    single_spaces: bool = False  # runs of spaces become one, none is left at the ends


class SentencePiece:
    """One of the library's algorithms over a token table."""

    def __init__(
        self,
        vocab: Vocab,
        *,
        unknown_id: int | None,
        algorithm: int,
        normalizer: Normalizer,
        prefix: str = "",
    ) -> None:
        """prefix: what stands before every text, normalized like it."""
        self._vocab_size, self._prefix = len(vocab), prefix
        proto = model_proto(vocab, unknown_id, algorithm, normalizer)
        try:
            import sentencepiece  # has no wheel for musl
        except ImportError as error:
            raise UnsupportedError(
                "this tokenizer needs a package that is not installed; pip install sentencepiece"
            ) from error
        try:
            self._sp = sentencepiece.SentencePieceProcessor(model_proto=proto)
        except UnicodeDecodeError as error:  # its reason quotes a token that is no text
            reason = error.object.decode(errors="replace")
            raise FileFormatError(f"sentencepiece refuses the token list: {reason}") from error
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise FileFormatError(f"sentencepiece refuses the token list: {reason}") from error

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._sp.EncodeAsIds(self._prefix + text)
        # The id after the last is the stand-in for "unknown" of a vocabulary that has none.
        if ids and max(ids) >= self._vocab_size:
            raise RequestError(
                f"a character of the text is not among the {self._vocab_size} tokens, and the "
                "vocabulary has neither byte tokens nor an unknown token"
            )
        return ids


def token_bytes(text: str, type_: int) -> bytes:
    if type_ == TokenType.BYTE:
        return bytes([int(text[3:5], 16)])
    return text.replace(SPACE_MARK, " ").encode("utf-8", "surrogateescape")


def sentencepiece_bpe(vocab: Vocab, *, unknown_id: int | None, space_prefix: bool) -> SentencePiece:
    """The prefix comes before every text, one that begins with a space as well."""
    prefix = " " if space_prefix else ""
    return SentencePiece(
        vocab, unknown_id=unknown_id, algorithm=BPE, normalizer=Normalizer(), prefix=prefix
    )


def model_proto(
    vocab: Vocab, unknown_id: int | None, algorithm: int, normalizer: Normalizer
) -> bytes:
    """The token table as a serialized SentencePiece model."""
    check_byte_tokens(vocab)
    if vocab.scores is None:
        raise FileFormatError("tokenizer.ggml.scores is missing; this kind of tokenizer needs it")
    texts = _library_texts(vocab)
    types = _library_types(vocab, unknown_id)
    score_bytes = vocab.scores.astype("<f4").tobytes()
    tails = [_varint_field(3, type_) for type_ in range(TokenType.BYTE + 1)]
    heads: dict[int, bytes] = {}  # the fields before the text depend on its length alone
    parts: list[bytes] = []
    for at, (text, type_) in enumerate(zip(texts, types, strict=True)):
        n = len(text)
        if n not in heads:
            text_head = b"\x0a" + _varint(n)
            heads[n] = b"\x0a" + _varint(len(text_head) + n + 5 + len(tails[1])) + text_head
        parts.append(heads[n] + text + b"\x15" + score_bytes[4 * at : 4 * at + 4] + tails[type_])
    if TokenType.UNKNOWN not in types:
        unknown = b"\x0a\x01\xff" + tails[TokenType.UNKNOWN]
        parts.append(b"\x0a" + _varint(len(unknown)) + unknown)
    has_all_bytes = types.count(TokenType.BYTE) == _N_BYTES
    trainer = _varint_field(3, algorithm) + _varint_field(35, has_all_bytes)
    charsmap = normalizer.charsmap
    rules = (b"\x12" + _varint(len(charsmap)) + charsmap) if charsmap else b""
    rules += _varint_field(3, normalizer.space_prefix)
    rules += _varint_field(4, normalizer.single_spaces) + _varint_field(5, 1)
    parts.append(b"\x12" + _varint(len(trainer)) + trainer)
    parts.append(b"\x1a" + _varint(len(rules)) + rules)
    return b"".join(parts)


def _library_texts(vocab: Vocab) -> list[bytes]:
    """Texts as the library accepts them: not empty, without NUL and all different. Where a token
    breaks that, it gets a text that no input contains; a NUL in a text still has its byte token."""
    texts = [text.encode("utf-8", "surrogateescape") for text in vocab.tokens]
    if len(set(texts)) == len(texts) and b"" not in texts and b"\0" not in b"".join(texts):
        return texts
    seen = {b""}
    for at, text in enumerate(texts):
        if text in seen or b"\0" in text:
            texts[at] = b"\xff%d" % at
        seen.add(text)
    return texts


def _library_types(vocab: Vocab, unknown_id: int | None) -> list[int]:
    """User-defined tokens become control tokens here: tokenizer.py has already cut the text at
    those that may match, so what is left must match none of them."""
    hidden = (TokenType.USER_DEFINED, TokenType.UNKNOWN)
    types = [TokenType.CONTROL if t in hidden else t for t in vocab.types]
    if unknown_id is not None and types[unknown_id] == TokenType.CONTROL:
        types[unknown_id] = TokenType.UNKNOWN
    return types


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _varint_field(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)
