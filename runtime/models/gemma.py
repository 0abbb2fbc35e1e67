"""gemma3: norms on both sides of each sub-layer, head norms, GeGLU, local and global layers.

Windows, the two rope bases and the embedding scale come with the config; norm weights already
include the +1 of the original.
"""

from __future__ import annotations

from ..ops import Activation, RopeStyle
from .blocks import Recording


def record(r: Recording) -> None:
    x = r.embed()
    for n in range(r.config.n_layers):
        normed = r.norm(x, f"blk.{n}.attn_norm")
        mixed = r.attention(n, normed, RopeStyle.HALF, head_norm=True)
        r.norm(mixed, f"blk.{n}.post_attention_norm", add_to=x)
        fed = r.gated_mlp(n, r.norm(x, f"blk.{n}.ffn_norm"), Activation.GELU_TANH)
        r.norm(fed, f"blk.{n}.post_ffw_norm", add_to=x)
    r.logits(x)
