"""Models that make a vector or scores of a text: rows see each other both ways.

Owns: the order of their norms and what tokens are embedded by. Must not know: how vectors are
pooled, how many rows a text has. Gemma's embedding model is a decoder in all else (dense.py).
"""

from __future__ import annotations

from ..ops import Activation, EmbedBy, RopeStyle
from .blocks import Recording

HALF, GELU = RopeStyle.HALF, Activation.GELU_ERF


def post_norm(r: Recording, *, is_gated: bool, activation: Activation) -> None:
    """Norms behind, LayerNorm, learned segments; rope of halves or learned positions."""
    x = _embed(r)
    for n in range(r.config.n_layers):
        r.attention(n, x, HALF, add_to=x)
        x = r.norm(x, f"blk.{n}.attn_output_norm")
        r.feed_forward(n, x, activation, is_gated=is_gated, add_to=x)
        x = r.norm(x, f"blk.{n}.layer_output_norm")
    r.hidden(x)


def modern_bert(r: Recording) -> None:
    """Norms before, LayerNorm, GeGLU, rope of halves; that of layer 0 is the embedding's."""
    x = _embed(r)
    for n in range(r.config.n_layers):
        normed = r.norm(x, f"blk.{n}.attn_norm") if n else x
        r.attention(n, normed, HALF, add_to=x)
        r.gated_mlp(n, r.norm(x, f"blk.{n}.ffn_norm"), GELU, add_to=x)
    r.hidden(x, norm="output_norm")


def _embed(r: Recording) -> int:
    """norm(token + position + segment), of those that the file has tables for."""
    x, p, dim = r.embed(), r.plan, r.config.dim
    for by, name in (
        (EmbedBy.POSITION, "position_embd.weight"),
        (EmbedBy.SEGMENT, "token_types.weight"),
    ):
        shape = r.weights.shape(name)
        if shape is not None:
            p.embed(p.weight(name, shape[0], dim), by=by, add_to=x)
    return r.norm(x, "token_embd_norm")
