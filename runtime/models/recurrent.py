"""Decoders whose layers mix tokens by a recurrence, all but a few that have attention.

Owns: short convolutions (lfm2) and gated delta nets (qwen35); Mamba-2 is in mamba2.py. Must not
know: where states are kept. Which layers have attention comes with the config: those with kv_heads.
"""

from __future__ import annotations

from ..ops import Activation, RopeStyle
from ..weights import row_runs
from .blocks import HeadNorm, Recording

IDENTITY, SIGMOID, SILU = Activation.IDENTITY, Activation.SIGMOID, Activation.SILU


def lfm2(r: Recording) -> None:
    """Norms before, SwiGLU, rope of halves, head norms; short gated convolutions else."""
    x = r.embed()
    for n, layer in enumerate(r.config.layers):
        normed = r.norm(x, f"blk.{n}.attn_norm")
        if layer.kv_heads:
            r.attention(n, normed, RopeStyle.HALF, head_norm=HeadNorm.HEADS, add_to=x)
        else:
            _short_conv(r, n, normed, add_to=x)
        r.feed_forward(n, r.norm(x, f"blk.{n}.ffn_norm"), SILU, add_to=x)
    r.logits(x, norm="token_embd_norm")


def _short_conv(r: Recording, n: int, x: int, *, add_to: int) -> None:
    """out_proj(C * conv(B * X)) with [B | C | X] = in_proj(x)."""
    p, dim, taps = r.plan, r.config.dim, r.config.recurrence.taps
    bcx = r.linear(n, x, {"shortconv.in_proj": (3 * dim, dim)}, name="bcx")
    gated = p.gate(bcx, bcx, IDENTITY, width=dim, x_col=2 * dim)
    kernel = p.vector(f"blk.{n}.shortconv.conv.weight", dim, taps)
    mixed = p.conv(gated, kernel, -1, IDENTITY, taps=taps)
    out = p.gate(mixed, bcx, IDENTITY, width=dim, gate_col=dim)
    r.linear(n, out, {"shortconv.out_proj": (dim, dim)}, name="conv_out", add_to=add_to)


def qwen35(r: Recording) -> None:
    """Norms before, SwiGLU, rope of halves, head norms, gated attention; gated delta nets else."""
    x = r.embed()
    for n, layer in enumerate(r.config.layers):
        normed = r.norm(x, f"blk.{n}.attn_norm")
        if layer.kv_heads:
            _gated_attention(r, n, normed, add_to=x)
        else:
            _delta_net(r, n, normed, add_to=x)
        r.feed_forward(n, r.norm(x, f"blk.{n}.post_attention_norm"), SILU, add_to=x)
    r.logits(x)


def _gated_attention(r: Recording, n: int, x: int, *, add_to: int) -> None:
    """As any, but attn_q holds [query | gate] of every head; sigmoid(gate) times what is mixed."""
    layer, dim = r.config.layers[n], r.config.dim
    d, width = layer.head_dim, layer.heads * layer.head_dim
    q, gate = (row_runs("attn_q", at, at + d, 2 * d) for at in (0, d))
    mixed = r.mix(n, x, RopeStyle.HALF, head_norm=HeadNorm.HEADS, q_stem=q)
    gates = r.linear(n, x, {gate: (width, dim)}, name="gate")
    gated = r.plan.gate(mixed, gates, SIGMOID, width=width)
    r.linear(n, gated, {"attn_output": (dim, width)}, name="attn_out", add_to=add_to)


def _delta_net(r: Recording, n: int, x: int, *, add_to: int) -> None:
    """ssm_out(norm(delta rule over silu(conv([q | k | v]))) * silu(z)); heads of v are tiled."""
    p, dim, c = r.plan, r.config.dim, r.config.recurrence
    values, channels = c.v_heads * c.head_dim, c.channels
    qkv = r.linear(n, x, {"attn_qkv": (channels, dim)}, name="delta_qkv")
    z = r.linear(n, x, {"attn_gate": (values, dim)}, name="z")
    heads = (c.v_heads, dim)
    rates = r.linear(n, x, {"ssm_beta": heads, "ssm_alpha": heads}, name="rates")
    kernel = p.vector(f"blk.{n}.ssm_conv1d.weight", channels, c.taps)
    mixed = p.delta(
        p.conv(qkv, kernel, -1, SILU, taps=c.taps),
        rates,
        p.weight(f"blk.{n}.ssm_a", c.v_heads),
        p.weight(f"blk.{n}.ssm_dt.bias", c.v_heads),
        k_heads=c.k_heads,
        v_heads=c.v_heads,
        head_dim=c.head_dim,
        is_grouped=False,
    )
    norm = p.weight(f"blk.{n}.ssm_norm.weight", c.head_dim)
    normed = p.norm(mixed, norm, r.config.norm_eps, group=c.head_dim)
    out = p.gate(normed, z, SILU, width=values)
    r.linear(n, out, {"ssm_out": (dim, values)}, name="delta_out", add_to=add_to)
