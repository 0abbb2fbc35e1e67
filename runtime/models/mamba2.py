"""Decoders with layers of Mamba-2 (arXiv 2405.21060) beside those that have attention.

Owns: the layer, and the architectures that are put together of it. Must not know: where states are
kept. What a layer consists of comes with the config.
"""

from __future__ import annotations

from ..ops import Activation, RopeStyle
from .blocks import Recording

SILU = Activation.SILU


def granite_hybrid(r: Recording) -> None:
    """Norms before, SwiGLU, rope of pairs or none, scaled residuals and logits; Mamba-2 else."""
    x = r.embed()
    for n, layer in enumerate(r.config.layers):
        normed = r.norm(x, f"blk.{n}.attn_norm")
        if layer.is_recurrent:
            _mamba2(r, n, normed, add_to=x)
        else:
            r.attention(n, normed, RopeStyle.PAIR, add_to=x)
        r.feed_forward(n, r.norm(x, f"blk.{n}.ffn_norm"), SILU, add_to=x)
    r.logits(x)


def falcon_h1(r: Recording) -> None:
    """Norms before, SwiGLU, rope of halves; Mamba-2 beside attention."""
    x = r.embed()
    for n in range(r.config.n_layers):
        normed = r.norm(x, f"blk.{n}.attn_norm")
        r.attention(n, normed, RopeStyle.HALF, add_to=x)
        _mamba2(r, n, normed, add_to=x)
        r.gated_mlp(n, r.norm(x, f"blk.{n}.ffn_norm"), SILU, add_to=x)
    r.logits(x)


def nemotron_h(r: Recording) -> None:
    """Norms before, squared ReLU without a gate; each layer Mamba-2, attention or MLP alone."""
    x = r.embed()
    for n, layer in enumerate(r.config.layers):
        normed = r.norm(x, f"blk.{n}.attn_norm")
        if layer.is_recurrent:
            _mamba2(r, n, normed, add_to=x)
        elif layer.kv_heads:
            r.attention(n, normed, RopeStyle.HALF, add_to=x)
        else:
            r.feed_forward(n, normed, Activation.RELU2, add_to=x)
    r.logits(x)


def _mamba2(r: Recording, n: int, x: int, *, add_to: int) -> None:
    """ssm_out(norm(scan(silu(conv([x | B | C])), dt) * silu(z))), [z | x | B | C | dt] = ssm_in(x),
    with a norm of every group, where there is one."""
    p, dim, c = r.plan, r.config.dim, r.config.recurrence
    heads, groups, values = c.v_heads, c.k_heads, c.v_heads * c.head_dim
    dt_col = values + c.channels
    parts = r.linear(n, x, {"ssm_in": (dt_col + heads, dim)}, name="ssm_in")
    kernel = p.vector(f"blk.{n}.ssm_conv1d.weight", c.channels, c.taps)
    bias = p.optional(f"blk.{n}.ssm_conv1d.bias", c.channels)
    mixed = p.scan(
        p.conv(parts, kernel, bias, SILU, taps=c.taps, x_col=values),
        parts,
        (
            p.vector(f"blk.{n}.ssm_a", heads, 1),
            p.weight(f"blk.{n}.ssm_dt.bias", heads),
            p.vector(f"blk.{n}.ssm_d", heads, 1),
        ),
        heads=heads,
        head_dim=c.head_dim,
        groups=groups,
        state_dim=c.key_dim,
        dt_col=dt_col,
    )
    out = p.gate(mixed, parts, SILU, width=values)
    norm = f"blk.{n}.ssm_norm.weight"
    if r.weights.shape(norm) is not None:
        weight = p.vector(norm, groups, values // groups)
        out = p.norm(out, weight, r.config.norm_eps, group=values // groups)
    r.linear(n, out, {"ssm_out": (dim, values)}, name="ssm_out", add_to=add_to)
