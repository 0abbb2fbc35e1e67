"""qwen2 and qwen3, dense or with experts: as llama, but rope turns halves.

qwen2 adds biases to Q, K and V (loaded where present); qwen3 norms every Q and K head instead.
The shared expert of qwen2moe counts as much as a gate says.
"""

from __future__ import annotations

from ..ops import Activation, RopeStyle
from .blocks import Recording


def record(r: Recording) -> None:
    head_norm = r.config.arch in ("qwen3", "qwen3moe")
    x = r.embed()
    for n in range(r.config.n_layers):
        normed = r.norm(x, f"blk.{n}.attn_norm")
        r.attention(n, normed, RopeStyle.HALF, head_norm=head_norm, add_to=x)
        r.feed_forward(n, r.norm(x, f"blk.{n}.ffn_norm"), Activation.SILU, add_to=x)
    r.logits(x)
