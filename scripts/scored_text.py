"""A text as llama-perplexity scores it: chunks, BOS, and the logits of each chunk's second half.
Owns the protocol; must not know what is made of the logits.
Protocol: tools/perplexity/perplexity.cpp of llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from martlet.quant.errors import MartletError
from martlet.scripts.errors import TextTooShort

if TYPE_CHECKING:
    import numpy as np
    from martlet.runtime.executors import Executor
    from martlet.runtime.step import Step
    from martlet.runtime.tokenizer import Tokenizer

LOGITS_BYTES = 64 << 20  # of one step's logits: a large vocabulary gets fewer rows per step


def read_text(path: Path) -> str:
    """The file as it is but for one newline at its end."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise MartletError(
            f"{path} is not UTF-8 at byte {error.start}; convert it (iconv -t utf-8)"
        ) from None
    return text.removesuffix("\n")


def token_chunks(
    text: str, tokenizer: Tokenizer, n_ctx: int, n_chunks: int | None
) -> list[list[int]]:
    """The text's tokens in chunks of n_ctx, the first n_chunks of them; the tail is dropped."""
    ids = tokenizer.encode(text, add_special=True, parse_special=False)
    if len(ids) < 2 * n_ctx:
        raise TextTooShort(
            f"the text has {len(ids)} tokens, the protocol needs {2 * n_ctx} (twice -c); take a"
            " longer text or a smaller -c"
        )
    found = len(ids) // n_ctx
    return [ids[i * n_ctx : (i + 1) * n_ctx] for i in range(min(n_chunks or found, found))]


def with_bos(chunks: Sequence[list[int]], tokenizer: Tokenizer) -> list[list[int]]:
    """Each chunk's first token replaced by BOS, if the vocabulary adds it."""
    if not tokenizer.add_bos or tokenizer.bos_id is None:
        return list(chunks)
    return [[tokenizer.bos_id, *chunk[1:]] for chunk in chunks]


def chunks_of(text: str, tokenizer: Tokenizer, n_ctx: int, n_chunks: int | None) -> list[list[int]]:
    return with_bos(token_chunks(text, tokenizer, n_ctx, n_chunks), tokenizer)


def n_scored(n_ctx: int) -> int:
    """Tokens of one chunk that are scored: those after its middle but the first."""
    return n_ctx - 1 - n_ctx // 2


def scored_logits(
    executor: Executor, tokens: Sequence[int], rows: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """A chunk computed alone from position 0, `rows` rows a step, and its scored positions:
    the tokens they should predict, int (n), and their logits, float32 (n, vocab).
    The logits hold until the next are asked for."""
    import numpy as np

    n, first = len(tokens), len(tokens) // 2
    for start in range(0, n - 1, rows):  # the last token has nothing to predict
        end = min(start + rows, n - 1)
        scored = np.arange(max(start, first), end)
        logits = executor.run(chunk_step(executor, tokens, start, end, scored - start))
        if len(scored):
            yield np.asarray(tokens)[scored + 1], logits


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


def rows_per_step(executor: Executor, vocab_size: int) -> int:
    return max(1, min(executor.max_rows, LOGITS_BYTES // (4 * vocab_size)))
