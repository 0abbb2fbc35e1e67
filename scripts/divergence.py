"""`martlet divergence`: what the executor's arithmetic costs, against the same file in fp32.
Owns the comparison (KL divergence, same top token) and the command; chunks and scored positions
are perplexity's. The base takes float activations, and every weight as its format defines it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from martlet.scripts import options
from martlet.scripts.console import note, print_json
from martlet.scripts.perplexity import chunk_step, chunks_of, read_text, rows_per_step

if TYPE_CHECKING:
    import numpy as np
    from martlet.runtime.executors import Executor


@dataclass(frozen=True)
class Divergence:
    """KL(base || model) in nats per scored token, and how often both prefer the same token."""

    mean_kl: float
    median_kl: float
    p99_kl: float
    max_kl: float
    same_top: float
    n_scored: int

    @classmethod
    def of(cls, kl: np.ndarray, same_top: np.ndarray) -> Divergence:
        import numpy as np

        p99 = float(np.quantile(kl, 0.99))
        middle = float(np.median(kl))
        return cls(float(kl.mean()), middle, p99, float(kl.max()), float(same_top.mean()), len(kl))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Float64 log-probabilities of (n, vocab) logits."""
    import numpy as np

    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def compare_chunk(
    base: Executor, model: Executor, tokens: Sequence[int], rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """KL divergence and same-top flags at the second half of a chunk, each (n_scored)."""
    import numpy as np

    n, first = len(tokens), len(tokens) // 2
    kl, same = [], []
    for start in range(0, n - 1, rows):
        end = min(start + rows, n - 1)
        scored = np.arange(max(start, first), end)
        logits = [e.run(chunk_step(e, tokens, start, end, scored - start)) for e in (base, model)]
        if not len(scored):
            continue
        p, q = (log_softmax(x) for x in logits)
        kl.append((np.exp(p) * (p - q)).sum(axis=1))
        same.append(p.argmax(axis=1) == q.argmax(axis=1))
    return np.concatenate(kl), np.concatenate(same)


@options.with_load_options
def divergence(
    model: options.ModelArgument,
    file: Annotated[Path, typer.Option("-f", "--file", help="UTF-8 text.")],
    n_ctx: Annotated[int, typer.Option("-c", "--context", min=4, help="Tokens per chunk.")] = 512,
    n_chunks: Annotated[int | None, typer.Option("--chunks", min=1, help="First N chunks.")] = None,
    *,
    load: options.LoadOptions,
    as_json: options.JsonOption = False,
) -> None:
    """KL divergence of MODEL as computed here from the same file computed in fp32."""
    import numpy as np
    from martlet.scripts.generate import open_model

    text = read_text(file)
    # steps are laid out here, over whole contexts
    arguments = load.arguments(context=n_ctx, gives_back=False)
    with ExitStack() as stack:
        plain = {**arguments, "kv_type": "f16", "activations": "f32"}
        base = stack.enter_context(open_model(model, **plain))
        opened = stack.enter_context(open_model(model, **arguments))
        chunks = chunks_of(text, opened.tokenizer, n_ctx, n_chunks)
        rows = rows_per_step(opened.executor, opened.config.vocab_size)
        pairs = []
        for i, tokens in enumerate(chunks):
            pairs.append(compare_chunk(base.executor, opened.executor, tokens, rows))
            note(f"chunk {i + 1} of {len(chunks)}: mean KL {np.mean(pairs[-1][0]):.5f}")
    result = Divergence.of(*(np.concatenate(parts) for parts in zip(*pairs, strict=True)))
    if as_json:
        print_json({**asdict(result), "model": model, "n_ctx": n_ctx, "n_chunks": len(chunks)})
        return
    print(
        f"mean KL {result.mean_kl:.5f}, median {result.median_kl:.5f}, 99 % {result.p99_kl:.4f}, "
        f"max {result.max_kl:.3f}; same top token {result.same_top:.1%} of {result.n_scored}"
    )


if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["divergence", *sys.argv[1:]])
