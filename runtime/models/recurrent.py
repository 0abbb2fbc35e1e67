"""Decoders whose layers mix tokens by a recurrence, all but a few that have attention.

Owns: short convolutions (lfm2) and gated delta nets (qwen35, qwen3next); Mamba-2 is in mamba2.py.
Must not know: where states are kept. Which layers have attention comes with the config: those with
kv_heads.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

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
    _with_delta_nets(r, is_grouped=False)


def qwen3next(r: Recording) -> None:
    """Norms before, SwiGLU, rope of halves, head norms, gated attention; gated delta nets else."""
    _with_delta_nets(r, is_grouped=True)


def _with_delta_nets(r: Recording, *, is_grouped: bool) -> None:
    x = r.embed()
    for n in range(r.config.n_layers):
        delta_net_layer(r, n, x, is_grouped=is_grouped)
    r.logits(x)


def delta_net_layer(r: Recording, n: int, x: int, *, is_grouped: bool) -> None:
    """Or one with attention, where the config says so."""
    normed = r.norm(x, f"blk.{n}.attn_norm")
    if r.config.layers[n].kv_heads:
        _gated_attention(r, n, normed, add_to=x)
    else:
        _delta_net(r, n, normed, is_grouped=is_grouped, add_to=x)
    r.feed_forward(n, r.norm(x, f"blk.{n}.post_attention_norm"), SILU, add_to=x)


def _gated_attention(r: Recording, n: int, x: int, *, add_to: int) -> None:
    """As any, but attn_q holds [query | gate] of every head; sigmoid(gate) times what is mixed."""
    layer, dim = r.config.layers[n], r.config.dim
    d, width = layer.head_dim, layer.heads * layer.head_dim
    q, gate = (row_runs("attn_q", at, at + d, 2 * d) for at in (0, d))
    mixed = r.mix(n, x, RopeStyle.HALF, head_norm=HeadNorm.HEADS, q_stem=q)
    gates = r.linear(n, x, {gate: (width, dim)}, name="gate")
    gated = r.plan.gate(mixed, gates, SIGMOID, width=width)
    r.linear(n, gated, {"attn_output": (dim, width)}, name="attn_out", add_to=add_to)


def _delta_net(r: Recording, n: int, x: int, *, is_grouped: bool, add_to: int) -> None:
    """ssm_out(norm(delta rule over silu(conv([q | k | v]))) * silu(z)).

    is_grouped: heads of v of one key head stand side by side, else head h belongs to key head
    h mod k_heads.
    """
    p, dim, c = r.plan, r.config.dim, r.config.recurrence
    values = c.v_heads * c.head_dim
    inputs, gates, rates = _delta_projections(r, n)
    qkv = r.linear(n, x, inputs, name="delta_qkv")
    z = r.linear(n, x, gates, name="z")
    beta_alpha = r.linear(n, x, rates, name="rates")
    kernel = p.vector(f"blk.{n}.ssm_conv1d.weight", c.channels, c.taps)
    mixed = p.delta(
        p.conv(qkv, kernel, -1, SILU, taps=c.taps),
        beta_alpha,
        p.weight(f"blk.{n}.ssm_a", c.v_heads),
        p.weight(f"blk.{n}.ssm_dt.bias", c.v_heads),
        k_heads=c.k_heads,
        v_heads=c.v_heads,
        head_dim=c.head_dim,
        is_grouped=is_grouped,
    )
    norm = p.weight(f"blk.{n}.ssm_norm.weight", c.head_dim)
    normed = p.norm(mixed, norm, r.config.norm_eps, group=c.head_dim)
    out = p.gate(normed, z, SILU, width=values)
    r.linear(n, out, {"ssm_out": (dim, values)}, name="delta_out", add_to=add_to)


_Shapes = dict[str, tuple[int, int]]


def _delta_projections(r: Recording, n: int) -> tuple[_Shapes, _Shapes, _Shapes]:
    """Stems and shapes of [q | k | v], of z and of [beta | alpha].

    qwen3next has beta and alpha of each key head's values in turn in one tensor; its old files have
    q, k, v and z in turn as well.
    """
    dim, c = r.config.dim, r.config.recurrence
    keys, values, each = c.k_heads * c.head_dim, c.v_heads * c.head_dim, c.v_heads // c.k_heads
    inputs, gates = {"attn_qkv": (c.channels, dim)}, {"attn_gate": (values, dim)}
    heads = (c.v_heads, dim)
    rates = {"ssm_beta": heads, "ssm_alpha": heads}
    if r.weights.shape(f"blk.{n}.ssm_ba.weight") is not None:
        rates = {row_runs("ssm_ba", at, at + each, 2 * each): heads for at in (0, each)}
    if r.weights.shape(f"blk.{n}.ssm_in.weight") is not None:
        d, of_values = c.head_dim, each * c.head_dim
        ends = [*accumulate((0, d, d, of_values, of_values))]
        q, k, v, z = (row_runs("ssm_in", a, b, ends[-1]) for a, b in pairwise(ends))
        inputs, gates = {q: (keys, dim), k: (keys, dim), v: (values, dim)}, {z: (values, dim)}
    return inputs, gates, rates
