"""`martlet perplexity`: how well a model predicts a text, by llama-perplexity's protocol.
Owns the figure with its error bar, and the command; the protocol is in scored_text.py. Formulas:
tools/perplexity/perplexity.cpp of llama.cpp."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from martlet.scripts import options
from martlet.scripts.console import chunk_progress, note, print_json
from martlet.scripts.scored_text import chunks_of, read_text, rows_per_step, scored_logits

if TYPE_CHECKING:
    import numpy as np
    from martlet.runtime.executors import Executor


@dataclass(frozen=True)
class Perplexity:
    """exp(mean nll) with one standard error, over `n_scored` tokens."""

    perplexity: float
    standard_error: float
    mean_nll: float
    n_chunks: int
    n_scored: int

    @classmethod
    def from_nll(cls, nll: np.ndarray, n_chunks: int) -> Perplexity:
        """nll: float64 (n_scored), negative natural-log likelihoods."""
        mean, count = float(nll.mean()), len(nll)
        variance = float((nll**2).mean()) - mean**2
        ppl = math.exp(mean)
        error = ppl * math.sqrt(max(variance, 0.0) / (count - 1)) if count > 1 else math.nan
        return cls(ppl, error, mean, n_chunks, count)


def chunk_nll(executor: Executor, tokens: Sequence[int], rows: int) -> np.ndarray:
    """Scores positions n/2 + 1 … n - 1 of a chunk computed alone from position 0, as float64."""
    import numpy as np

    steps = scored_logits(executor, tokens, rows)
    return np.concatenate([token_nll(logits, targets) for targets, logits in steps])


def token_nll(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """-log softmax of the targets: exponentials in float32, their sum in float64."""
    import numpy as np

    best = logits.max(axis=1, keepdims=True)
    sums = np.exp(logits - best).sum(axis=1, dtype=np.float64)
    picked = np.take_along_axis(logits, targets[:, None].astype(np.int64), axis=1)
    return np.log(sums) - (picked - best)[:, 0].astype(np.float64)


def measure(
    executor: Executor,
    chunks: Sequence[Sequence[int]],
    vocab_size: int,
    on_chunk: Callable[[int, str], None],
) -> Perplexity:
    import numpy as np

    rows = rows_per_step(executor, vocab_size)
    parts: list[np.ndarray] = []
    for tokens in chunks:
        parts.append(chunk_nll(executor, tokens, rows))
        result = Perplexity.from_nll(np.concatenate(parts), len(parts))
        on_chunk(result.n_chunks, f"{result.perplexity:.3f}")
    return result


@options.with_load_options
def perplexity(
    model: options.ModelArgument,
    file: options.TextOption,
    n_ctx: options.ChunkTokensOption = 512,
    n_chunks: options.ChunksOption = None,
    *,
    load: options.LoadOptions,
    as_json: options.JsonOption = False,
) -> None:
    """Perplexity of MODEL on FILE, comparable with llama-perplexity's."""
    from martlet.scripts.generate import open_model

    text = read_text(file)
    with open_model(model, **load.over_contexts(n_ctx)) as opened:
        chunks = chunks_of(text, opened.tokenizer, n_ctx, n_chunks)
        start = time.monotonic()
        with chunk_progress("perplexity", len(chunks)) as on_chunk:
            result = measure(opened.executor, chunks, opened.config.vocab_size, on_chunk)
        seconds = time.monotonic() - start
        name = opened.executor.name
    # Tokens of whole chunks, as llama-perplexity counts them.
    tokens_per_s = result.n_chunks * n_ctx / seconds
    if as_json:
        print_json(report(result, model, file, n_ctx, tokens_per_s, name))
        return
    print(f"perplexity {result.perplexity:.4f} ± {result.standard_error:.4f}")
    note(
        f"{result.n_chunks} chunks of {n_ctx}, {result.n_scored} tokens scored, {seconds:.1f} s,"
        f" {tokens_per_s:.1f} tokens/s, {name} executor"
    )


def report(
    result: Perplexity, model: str, file: Path, n_ctx: int, tokens_per_s: float, executor: str
) -> dict[str, Any]:
    about = {"model": model, "file": str(file), "n_ctx": n_ctx, "executor": executor}
    return {**asdict(result), "tokens_per_s": tokens_per_s, **about}


if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["perplexity", *sys.argv[1:]])
