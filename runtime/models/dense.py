"""Decoders without recurrent layers, by where their norms stand.

Sizes, windows, rope and scales come with the config, biases and fused tensors with the file; what
is left of an architecture is a row of RECORDERS in the package. Weights of Gemma's norms already
include the +1 of the original.
"""

from __future__ import annotations

from ..ops import Activation, RopeStyle
from .blocks import HeadNorm, Recording


def pre_norm(
    r: Recording,
    style: RopeStyle,
    *,
    activation: Activation = Activation.SILU,
    head_norm: HeadNorm = HeadNorm.NONE,
    mlp_norm: str = "ffn_norm",
) -> None:
    """x += attention(norm(x)); x += mlp(norm(x))."""
    x = r.embed()
    for n in range(r.config.n_layers):
        pre_norm_layer(
            r, n, x, style, activation=activation, head_norm=head_norm, mlp_norm=mlp_norm
        )
    r.logits(x)


def pre_norm_layer(
    r: Recording,
    n: int,
    x: int,
    style: RopeStyle,
    *,
    activation: Activation = Activation.SILU,
    head_norm: HeadNorm = HeadNorm.NONE,
    mlp_norm: str = "ffn_norm",
) -> None:
    r.attention(n, r.norm(x, f"blk.{n}.attn_norm"), style, head_norm=head_norm, add_to=x)
    r.feed_forward(n, r.norm(x, f"blk.{n}.{mlp_norm}"), activation, add_to=x)


def sandwich(
    r: Recording,
    style: RopeStyle,
    *,
    activation: Activation = Activation.SILU,
    head_norm: HeadNorm = HeadNorm.NONE,
) -> None:
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x)))."""
    x = r.embed()
    for n in range(r.config.n_layers):
        mixed = r.attention(n, r.norm(x, f"blk.{n}.attn_norm"), style, head_norm=head_norm)
        r.norm(mixed, f"blk.{n}.post_attention_norm", add_to=x)
        fed = r.gated_mlp(n, r.norm(x, f"blk.{n}.ffn_norm"), activation)
        r.norm(fed, f"blk.{n}.post_ffw_norm", add_to=x)
    r.logits(x)


def post_norm(r: Recording, style: RopeStyle, *, head_norm: HeadNorm) -> None:
    """x += norm(attention(x)); x += norm(mlp(x))."""
    x = r.embed()
    for n in range(r.config.n_layers):
        mixed = r.attention(n, x, style, head_norm=head_norm)
        r.norm(mixed, f"blk.{n}.post_attention_norm", add_to=x)
        r.norm(r.gated_mlp(n, x, Activation.SILU), f"blk.{n}.post_ffw_norm", add_to=x)
    r.logits(x)


def parallel(r: Recording, style: RopeStyle) -> None:
    """x += attention(norm(x)) + mlp(norm(x)), with one norm for both."""
    x = r.embed()
    for n in range(r.config.n_layers):
        normed = r.norm(x, f"blk.{n}.attn_norm")
        r.attention(n, normed, style, add_to=x)
        r.gated_mlp(n, normed, Activation.SILU, add_to=x)
    r.logits(x)
