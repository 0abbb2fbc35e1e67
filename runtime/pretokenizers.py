r"""How byte-level BPE text is cut into pieces before merging: one table row per `pre` name.

Owns: the patterns and the quirks that go with a name. Must not know: vocabularies, merges, ids.
Called by tokenizer_bpe.py.

A row is a sequence of steps; each cuts every piece the step before left, and keeps both the
matches and the gaps. The patterns are facts of the models' own published tokenizer files; the
names are llama.cpp's values of `tokenizer.ggml.pre`. Case and mark classes are the true Unicode
ones, where llama.cpp approximates them (so Hindi or Thai text follows the model, not llama.cpp).
"""

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from .errors import UnsupportedError

Step = str | pre_tokenizers.PreTokenizer


@dataclass(frozen=True)
class PreTokenizer:
    """One row: the cutting steps and the three habits that come with the name."""

    steps: tuple[Step, ...]
    ignore_merges: bool = False  # a piece that is a token is taken whole, whatever the merges say
    add_bos: bool = False  # used where the file has no add_bos_token key
    nfc: bool = False  # the source tokenizer composes characters first; llama.cpp does not

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The steps as one object, ending in exactly one byte-to-character mapping."""
        built = [_split(s) if isinstance(s, str) else s for s in self.steps]
        if not any(isinstance(s, pre_tokenizers.ByteLevel) for s in built):
            built.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(built)

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _any(*alternatives: str) -> str:
    return "|".join(alternatives)


def _digits_from_right(digit: str, end: str) -> str:
    # Threes counted from the end of a run. Only the run's head looks ahead; the rest continues at
    # \G, the end of the previous match. Looking ahead from every group would be quadratic.
    head = rf"(?<!{digit}){digit}{{1,3}}(?=(?:{digit}{{3}})*+{end})"
    return _any(head, rf"(?<={digit})\G{digit}{{3}}")


# Alternatives that many patterns share.
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
WORD_MARKS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
DIGIT, DIGITS_3, DIGITS = r"\p{N}", r"\p{N}{1,3}", r"\p{N}+"
PUNCT = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
PUNCT_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
NEWLINES = r"\s*[\r\n]+"
# The last space of a run stays with the word after it.
SPACES = r"\s+(?!\S)|\s+"

_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased_word(ending: str = "", without: str = "") -> str:
    """Words that also break where a capital follows a small letter."""
    upper, lower = (f"[{c}&&[^{without}]]" if without else f"[{c}]" for c in (_UPPER, _LOWER))
    lead = r"[^\r\n\p{L}\p{N}]?"
    return f"{lead}{upper}*{lower}+{ending}|{lead}{upper}+{lower}*{ending}"


CASED = _cased_word()
CASED_CONTRACTION = _cased_word(f"{CONTRACTION}?")

# Scripts, as code point ranges.
CJK_KANA = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
CJK_HANGUL = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
HANGUL = r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+"
BOPOMOFO = r"[\x{3105}-\x{312F}]+"
CJK_PUNCT = (
    r"[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}"
    r"\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+"
)
ASIAN = (  # Han, kana, Thai, Lao, Khmer, Burmese, Hangul
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{F900}-\x{FAFF}\x{3040}-\x{309F}\x{30A0}-\x{30FF}"
    r"\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}\x{0E40}-\x{0E7F}\x{0E80}-\x{0EFF}\x{1780}-\x{17FF}"
    r"\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+"
)
ASCII_WIDE_PUNCT = (
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+"
)
# `\s+$` would be retried from every space of a run; only a run's first space can start a match.
TRAILING_SPACES = r"(?<!\s)\s++$"
NEWLINE_RUNS = r"[^\n]+|[\n]+"

DEEPSEEK3_WORDS = _any(
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r" ?[\p{P}\p{S}]+[\r\n]*",
    NEWLINES,
    SPACES,
)
LLAMA3 = _any(CONTRACTION, WORD, DIGITS_3, PUNCT, NEWLINES, SPACES)
QWEN2 = _any(CONTRACTION, WORD, DIGIT, PUNCT, NEWLINES, SPACES)
GPT4O = _any(CASED_CONTRACTION, DIGITS_3, PUNCT_SLASH, NEWLINES, SPACES)

GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
EACH_DIGIT = pre_tokenizers.Digits(individual_digits=True)
DIGIT_RUNS = pre_tokenizers.Digits(individual_digits=False)
PUNCT_RUNS = pre_tokenizers.Punctuation("contiguous")

# Every name in the key of an entry shares its row.
_ROWS: dict[str, PreTokenizer] = {
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": PreTokenizer(
        (LLAMA3,), ignore_merges=True, add_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe": PreTokenizer((LLAMA3,)),
    "glm4 glm5": PreTokenizer((LLAMA3,), ignore_merges=True),
    "qwen2": PreTokenizer((QWEN2,), nfc=True),
    "deepseek-r1-qwen megrez stablelm2 hunyuan solar-open grok-2 kormo": PreTokenizer((QWEN2,)),
    "qwen35": PreTokenizer(
        (
            _any(
                CONTRACTION,
                WORD_MARKS,
                DIGIT,
                r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
                NEWLINES,
                SPACES,
            ),
        ),
        nfc=True,
    ),
    "gpt-2 phi-2 mpt olmo exaone4 mellum modern-bert gigachat jais trillion granite-docling": (
        PreTokenizer((GPT2,))
    ),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": PreTokenizer(
        (EACH_DIGIT, GPT2)
    ),
    "falcon": PreTokenizer((PUNCT_RUNS, GPT2, DIGIT_RUNS, "[0-9]{3}")),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
            ASCII_WIDE_PUNCT,
            TRAILING_SPACES,
            CJK_HANGUL,
            DIGITS,
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK_HANGUL, DIGIT)),
    "deepseek-v3 joyai-llm hunyuan-dense hy_v4": PreTokenizer(
        (DIGITS_3, CJK_KANA, DEEPSEEK3_WORDS)
    ),
    "tekken": PreTokenizer(
        (_any(CASED, DIGIT, PUNCT_SLASH, NEWLINES, SPACES),), ignore_merges=True, add_bos=True
    ),
    "gpt-4o llama4 kanana2 minimax-m2": PreTokenizer((GPT4O,)),
    "minicpm5": PreTokenizer(
        (DIGITS_3, _any(CONTRACTION, WORD, DIGITS, PUNCT, NEWLINES, SPACES)), ignore_merges=True
    ),
    "bailingmoe bailingmoe2": PreTokenizer(
        (_any(r"'(?i:[sdmt]|ll|ve|re)", WORD, DIGIT, PUNCT, r"\s*[\r\n]", SPACES),)
    ),
    "seed-coder": PreTokenizer(
        (_any(CONTRACTION, WORD, DIGIT, r" ?[^\s\p{L}\p{N}\r\n]+", NEWLINES, SPACES),)
    ),
    "tiny_aya cohere2moe": PreTokenizer((_digits_from_right(r"\d", r"\b"), GPT4O)),
    "youtu": PreTokenizer(
        (
            _any(HANGUL, CJK_PUNCT, BOPOMOFO, CJK_KANA),
            _any(CASED_CONTRACTION, DIGIT, PUNCT_SLASH, NEWLINES, SPACES),
        ),
        ignore_merges=True,
    ),
    "kimi-k2": PreTokenizer(
        (
            _any(
                r"\p{Han}+",
                _cased_word(f"{CONTRACTION}?", without=r"\p{Han}"),
                DIGITS_3,
                PUNCT,
                NEWLINES,
                SPACES,
            ),
        )
    ),
    "afmoe": PreTokenizer((_digits_from_right(r"\p{N}", r"(?!\p{N})"), ASIAN, DEEPSEEK3_WORDS)),
    "laguna": PreTokenizer((NEWLINE_RUNS, QWEN2)),
}

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: row for names, row in _ROWS.items() for name in names.split()
}


def pre_tokenizer(name: str | None) -> PreTokenizer:
    """The row of that name; a missing or unknown name is refused, because guessing a split would
    give ids the model was not trained on, and readable but wrong answers."""
    row = PRE_TOKENIZERS.get(name or "")
    if row is None:
        what = "is missing" if name is None else f"is {name!r}, which martlet does not know"
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedError(
            f"tokenizer.ggml.pre {what}; convert the model again with a current converter, or set "
            f"the key to one of: {known}"
        )
    return row
