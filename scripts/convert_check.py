"""Whether a converted model is the one it was made from: its token ids, and its logits.

Owns: the probe texts, the fixed token ids, the comparison. Must not know: how anything is
converted. Token ids are compared before a file is written, with the libraries that the checkpoint
was made for; logits afterwards, with source_forward.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tokenizers
from martlet.quant.checkpoint import Checkpoint
from martlet.quant.convert import Conversion
from martlet.quant.errors import FileFormatError, UnsupportedError
from martlet.runtime.executors.choice import likely_executor
from martlet.runtime.model import load_model
from martlet.runtime.ops import BufferKind, KvType
from martlet.runtime.tokenizer import Tokenizer
from martlet.scripts.scored_text import chunk_step
from martlet.scripts.source_forward import source_logits

EXACT_ERROR = 1e-4  # max |a - b| / max |b| of logits where no weight was rounded
_N_TOKENS = 24
_SEED = 20
_N_SPECIAL = 12

# Letters of many scripts, composed and not, numbers, spaces of all kinds, code, emoji.
PROBES = (
    "It's what they'll say, isn't it? WE'VE DON'T I'm you'd.",
    "1 12 123 1234 12345678 3.14159 1,000,000 ½ ² ١٢٣ १२३",
    "a  b   c    d\te\t\tf\n\ng\r\nh \n i\n  j   ",
    "café cafe\u0301 Ünïcödé \ufb01sh ﬁ Å A\u030a ẛ̣",
    "Привет, мир! ПриветМир тМ aÉ aB ǅ",
    "हिन्दी में लिखा हुआ; ภาษาไทย; 中文字符\uff0c日本語のテキスト、カタカナ; 한국어; עברית; العربية",
    "👩‍🚀🏳️‍🌈 🚀🚀 ☃ €5 ©2024 →",
    'def f(x):\n    return x**2  # comment\n\tif (a!=b) {c[0] += "d"; }',
    "camelCase HTTPServer snake_case_name ALLCAPS https://example.org/a?b=c&d=%20",
    "\u00a0nbsp\u3000wide\u200bzero\u2028line … — “quoted”",
    "aaaaaaaaaaaaaaaaaaaaaaaa================////////",
)
_LEADING_SPACES = (" one", "   three", "\n\n line", "\t tab")


def check_token_ids(checkpoint: Checkpoint, metadata: Mapping[str, Any]) -> None:
    """Raises UnsupportedError where the file's tokenizer would give other ids than its source."""
    mine = Tokenizer.from_metadata(metadata)
    expected_of, texts = _oracle(checkpoint, metadata)
    for text in texts:
        expected = expected_of(text)
        found = mine.encode(text, add_special=False, parse_special=True)
        if found != expected:
            raise UnsupportedError(
                f"the tokenizer gives {expected[:16]} for {text!r}, as a GGUF file it would give "
                f"{found[:16]}; this tokenizer is not supported"
            )


def _oracle(
    checkpoint: Checkpoint, metadata: Mapping[str, Any]
) -> tuple[Callable[[str], list[int]], Sequence[str]]:
    """The source's own encoder, and the texts on which the two must agree."""
    spm = checkpoint.raw("tokenizer.model")
    if metadata["tokenizer.ggml.model"] == "llama" and spm is not None:
        processor = sentencepiece.SentencePieceProcessor(model_proto=spm)
        return processor.EncodeAsIds, (*PROBES, *_LEADING_SPACES)
    try:
        library = tokenizers.Tokenizer.from_str(checkpoint.text("tokenizer.json") or "")
    except Exception as error:  # the library raises bare Exception
        raise FileFormatError(f"{checkpoint.folder / 'tokenizer.json'}: {error}") from error
    texts = [*PROBES, *_LEADING_SPACES]
    if metadata["tokenizer.ggml.model"] == "llama":
        # Metaspace adds no space before a space, SentencePiece does. GGUF follows the latter.
        cutter = checkpoint.json("tokenizer.json").get("pre_tokenizer") or {}
        texts = list(PROBES) if cutter.get("type") == "Metaspace" else texts
    else:
        texts += _beside_special(checkpoint.json("tokenizer.json"), metadata)

    def encode(text: str) -> list[int]:
        ids: list[int] = library.encode(text, add_special_tokens=False).ids
        return ids

    return encode, texts


def _beside_special(tokenizer: Mapping[str, Any], metadata: Mapping[str, Any]) -> list[str]:
    """Texts before, between and behind special tokens. Those that swallow spaces beside them are
    left out: a GGUF file cannot say so."""
    n_tokens = len(metadata["tokenizer.ggml.tokens"])
    names = [
        token["content"]
        for token in tokenizer.get("added_tokens") or []
        if token["id"] < n_tokens and not (token.get("lstrip") or token.get("rstrip"))
    ][:_N_SPECIAL]
    return [f"{n}text{n} a text {n}{n}\n\nmore 12{n}" for n in names]


@dataclass(frozen=True)
class LogitsCheck:
    """Logits of the file against those of the checkpoint, on fixed ids."""

    n_tokens: int
    max_error: float  # max |a - b| / max |b|
    rms_error: float  # relative to the RMS of the checkpoint's logits around their mean
    mean_kl: float  # nats per token, checkpoint || file
    same_top: float

    @property
    def is_exact(self) -> bool:
        return self.max_error <= EXACT_ERROR


def compare_logits(conversion: Conversion, path: Path, executor: str = "auto") -> LogitsCheck:
    """Computes both sides in float32, apart from the weights that the file has rounded."""
    ids = _fixed_ids(conversion)
    expected = source_logits(
        conversion.checkpoint, conversion.config, conversion.settings, ids
    ).astype(np.float64)
    found = file_logits(path, ids, executor).astype(np.float64)
    p, q = (x - np.logaddexp.reduce(x, axis=1, keepdims=True) for x in (expected, found))
    error = found - expected
    return LogitsCheck(
        n_tokens=len(ids),
        max_error=float(np.abs(error).max() / np.abs(expected).max()),
        rms_error=float(np.sqrt((error**2).mean() / expected.var(axis=1).mean())),
        mean_kl=float((np.exp(p) * (p - q)).sum(axis=1).mean()),
        same_top=float((p.argmax(axis=1) == q.argmax(axis=1)).mean()),
    )


def file_logits(path: Path, ids: Sequence[int], executor: str = "auto") -> np.ndarray:
    """float32 (len(ids), vocab_size), with activations and cache that round nothing."""
    if likely_executor(executor)[1] == "numba":
        executor = "reference"  # numba rounds activations where it multiplies blocks
    model = load_model(
        path,
        executor=executor,
        context=len(ids),
        max_rows=len(ids),
        kv_type=KvType.F32,
        activations=BufferKind.F32,
        gives_back=False,
    )
    try:
        rows = np.arange(len(ids))
        return model.executor.run(chunk_step(model.executor, ids, 0, len(ids), rows))
    finally:
        model.close()


def _fixed_ids(conversion: Conversion) -> list[int]:
    """Random ordinary tokens; the same for the same vocabulary."""
    types = np.asarray(conversion.tokenizer["tokenizer.ggml.token_type"])
    ordinary = np.flatnonzero(types == 1)
    n = min(_N_TOKENS, conversion.settings.context)
    return np.random.default_rng(_SEED).choice(ordinary, n).tolist()
