"""The block that predicts the token after the next (MTP, `nextn` in files), as a plan of its own.

Owns: how its input is made and what its logits come from; the layer in it is the architecture's.
Must not know: where hidden states come from, who guesses.

Row t is given token t + 1 and the hidden state of row t, both normed and laid side by side, the
token first; `eh_proj` makes a row of the residual stream of them. Behind the layer stands a norm of
its own, or the model's, and an output matrix of its own, or the model's: the logits are of token
t + 2. What is behind the norm stands for the hidden state of row t + 1, which was not computed:
given to the block with a guess for token t + 2, it leads one token further.

The hidden states that go in are those behind the model's final norm, in every architecture here
(deepseek2, glm4moe, qwen35), as they come out of a plan beside its logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from .blocks import Recording

Layer: TypeAlias = Callable[[Recording, int, int], None]
"""Records layer n on rows x of the residual stream, in place."""


def record(r: Recording, n: int, layer: Layer) -> None:
    """Block n."""
    p, c, stem = r.plan, r.config, f"blk.{n}.nextn"

    def own(part: str, other: str) -> str:
        name = f"{stem}.{part}.weight"
        return name if r.weights.shape(name) is not None else other

    table, head = own("embed_tokens", "token_embd.weight"), own("shared_head_head", r.head)
    # Rows of the table are read where they lie: the model has packed them for itself already.
    take = p.weight if table == head and not r.n_words else p.file_rows
    token = p.embed(take(table, c.vocab_size, c.dim), c.embedding_scale)
    rope = c.layers[n].rope
    if rope:
        r.record_trig(rope)
    both = p.beside(r.norm(token, f"{stem}.enorm"), r.norm(p.given(c.dim), f"{stem}.hnorm"))
    x = r.linear(n, both, {"nextn.eh_proj": (c.dim, 2 * c.dim)}, name="x")
    layer(r, n, x)
    has_norm = r.weights.shape(f"{stem}.shared_head_norm.weight") is not None
    r.logits(x, norm=f"{stem}.shared_head_norm" if has_norm else "output_norm", head=head)
