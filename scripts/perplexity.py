"""`martlet perplexity`: how well a model predicts a text, by llama-perplexity's protocol.
Owns the protocol (chunks, BOS, which tokens are scored, the error bar) and the command; must not
know how logits come about. Protocol: tools/perplexity/perplexity.cpp of llama.cpp."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from martlet.quant.errors import MartletError
from martlet.scripts import options
from martlet.scripts.console import note, print_json

if TYPE_CHECKING:
    import numpy as np
    from martlet.runtime.executors import Executor
    from martlet.runtime.step import Step
    from martlet.runtime.tokenizer import Tokenizer

LOGITS_BYTES = 64 << 20  # of one step's logits: a large vocabulary gets fewer rows per step


class TextTooShort(MartletError):
    """The text has too few tokens for the protocol."""


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


def read_text(path: Path) -> str:
    """The file as it is but for one newline at its end."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise MartletError(
            f"{path} is not UTF-8 at byte {error.start}; convert it (iconv -t utf-8)"
        ) from None
    return text.removesuffix("\n")


def chunks_of(text: str, tokenizer: Tokenizer, n_ctx: int, n_chunks: int | None) -> list[list[int]]:
    """Token chunks of n_ctx, the tail dropped, each starting with BOS if the vocabulary adds it."""
    ids = tokenizer.encode(text, add_special=True, parse_special=False)
    if len(ids) < 2 * n_ctx:
        raise TextTooShort(
            f"the text has {len(ids)} tokens, the protocol needs {2 * n_ctx} (twice -c); take a"
            " longer text or a smaller -c"
        )
    found = len(ids) // n_ctx
    chunks = [ids[i * n_ctx : (i + 1) * n_ctx] for i in range(min(n_chunks or found, found))]
    if tokenizer.add_bos and tokenizer.bos_id is not None:
        chunks = [[tokenizer.bos_id, *chunk[1:]] for chunk in chunks]
    return chunks


def chunk_nll(executor: Executor, tokens: Sequence[int], rows_per_step: int) -> np.ndarray:
    """Scores positions n/2 + 1 … n - 1 of a chunk computed alone from position 0, as float64."""
    import numpy as np

    n, first = len(tokens), len(tokens) // 2
    parts = []
    for start in range(0, n - 1, rows_per_step):  # the last token has nothing to predict
        end = min(start + rows_per_step, n - 1)
        scored = np.arange(max(start, first), end)
        logits = executor.run(chunk_step(executor, tokens, start, end, scored - start))
        if len(scored):
            parts.append(token_nll(logits, np.asarray(tokens)[scored + 1]))
    return np.concatenate(parts)


def chunk_step(
    executor: Executor, tokens: Sequence[int], start: int, end: int, out_rows: np.ndarray
) -> Step:
    """Rows start … end - 1 of one sequence that owns the pool's first blocks."""
    import numpy as np
    from martlet.runtime.step import Step

    n_blocks = -(-len(tokens) // executor.block_tokens)
    return Step(
        tokens=np.array(tokens[start:end], np.int32),
        positions=np.arange(start, end, dtype=np.int32),
        seq_start=np.array([0, end - start], np.int32),
        block_table=np.arange(n_blocks, dtype=np.int32)[None, :],
        out_rows=out_rows.astype(np.int32),
    )


def token_nll(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """-log softmax of the targets: exponentials in float32, their sum in float64."""
    import numpy as np

    best = logits.max(axis=1, keepdims=True)
    sums = np.exp(logits - best).sum(axis=1, dtype=np.float64)
    picked = np.take_along_axis(logits, targets[:, None].astype(np.int64), axis=1)
    return np.log(sums) - (picked - best)[:, 0].astype(np.float64)


def rows_per_step(executor: Executor, vocab_size: int) -> int:
    return max(1, min(executor.max_rows, LOGITS_BYTES // (4 * vocab_size)))


def measure(
    executor: Executor,
    chunks: Sequence[Sequence[int]],
    vocab_size: int,
    on_chunk: Callable[[Perplexity], None],
) -> Perplexity:
    import numpy as np

    rows = rows_per_step(executor, vocab_size)
    parts: list[np.ndarray] = []
    for tokens in chunks:
        parts.append(chunk_nll(executor, tokens, rows))
        result = Perplexity.from_nll(np.concatenate(parts), len(parts))
        on_chunk(result)
    return result


@options.with_load_options
def perplexity(
    model: options.ModelArgument,
    file: Annotated[Path, typer.Option("-f", "--file", help="UTF-8 text.")],
    n_ctx: Annotated[int, typer.Option("-c", "--context", min=4, help="Tokens per chunk.")] = 512,
    n_chunks: Annotated[
        int | None, typer.Option("--chunks", min=1, help="Only the first N chunks.")
    ] = None,
    *,
    load: options.LoadOptions,
    as_json: options.JsonOption = False,
) -> None:
    """Perplexity of MODEL on FILE, comparable with llama-perplexity's."""
    from martlet.scripts.generate import open_model

    text = read_text(file)
    # steps are laid out here, over whole contexts
    arguments = load.arguments(context=n_ctx, gives_back=False)
    with open_model(model, **arguments) as opened:
        chunks = chunks_of(text, opened.tokenizer, n_ctx, n_chunks)
        start = time.monotonic()
        with chunk_progress(len(chunks)) as on_chunk:
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


def chunk_progress(n_chunks: int) -> Any:
    """A context manager: a bar on stderr with the perplexity so far."""
    import contextlib
    from collections.abc import Iterator

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    @contextlib.contextmanager
    def bar() -> Iterator[Callable[[Perplexity], None]]:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Remaining()
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("perplexity", total=n_chunks)

            def on_chunk(so_far: Perplexity) -> None:
                text = f"perplexity {so_far.perplexity:.3f}"
                progress.update(task, completed=so_far.n_chunks, description=text)

            yield on_chunk

    return bar()


if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["perplexity", *sys.argv[1:]])
