"""llama: also Mistral, Mixtral, SmolLM2, TinyLlama and most fine-tunes. Pre-norm, SwiGLU.

The converter has re-ordered the rows of Q and K so that rope turns neighbouring dims.
"""

from __future__ import annotations

from ..ops import Activation, RopeStyle
from .blocks import Recording


def record(r: Recording) -> None:
    x = r.embed()
    for n in range(r.config.n_layers):
        r.attention(n, r.norm(x, f"blk.{n}.attn_norm"), RopeStyle.PAIR, add_to=x)
        r.feed_forward(n, r.norm(x, f"blk.{n}.ffn_norm"), Activation.SILU, add_to=x)
    r.logits(x)
