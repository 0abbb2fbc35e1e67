"""Where a prompt's rows stop, so that recurrent layers can keep their state there.

Owns: those places, the ends of full blocks. Must not know: slots, blocks, queues.

A state can be kept only between steps, and is needed where other prompts will leave this one: at
its own end, since the next turn of a chat begins with it; where a waiting request with the same
start goes on differently; where this one itself was the first to leave what was known; and now and
then in a long text, for whoever leaves it in between.
"""

from __future__ import annotations

import numpy as np

from .request import Request


def next_mark(request: Request, block_tokens: int, every: int) -> int:
    """Rows up to the next place, or to the end of what the request owns."""
    start = request.n_computed
    return min(request.n_tokens, _place_after(start, request, block_tokens, every)) - start


def rows_before_mark(request: Request, block_tokens: int, every: int) -> int:
    """Guesses behind what the request owns that stay before the next place: what leads to it is a
    row that cannot be taken back."""
    at = request.n_tokens
    return _place_after(at, request, block_tokens, every) - at - 1


def is_mark(request: Request, block_tokens: int, every: int) -> bool:
    """Whether the state behind the rows computed so far is worth keeping."""
    at = request.n_computed
    return at % every == 0 or at in request.marks or at == _prompt_end(request, block_tokens)


def _place_after(start: int, request: Request, block_tokens: int, every: int) -> int:
    marks = (*request.marks, _prompt_end(request, block_tokens))
    return min([(start // every + 1) * every, *(mark for mark in marks if mark > start)])


def common_blocks(a: Request, b: Request, block_tokens: int) -> int:
    """Tokens of the full blocks that both begin with."""
    n = min(a.n_tokens, b.n_tokens)
    is_equal = a.tokens[:n] == b.tokens[:n]
    n_equal = n if is_equal.all() else int(np.argmin(is_equal))
    return n_equal // block_tokens * block_tokens


def _prompt_end(request: Request, block_tokens: int) -> int:
    """The last token is always computed: without its row there are no logits."""
    return (request.n_prompt - 1) // block_tokens * block_tokens
