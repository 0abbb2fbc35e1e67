"""Decoders with latent attention: keys and values of all heads are one compressed row of a token.

Owns: how that is computed, with compressed rows in the cache and never expanded. Queries are turned
to meet them instead: q . (K c) = (q K) . c, and what attention mixes is expanded once a row. The
same in prefill and decode, or a row's bits would depend on its company.
"""

from __future__ import annotations

from ..ops import Activation, RopeStyle
from .blocks import Recording

_INNER_EPS = 1e-6  # of norms of compressed rows in `transformers` 5.24, whatever the config says


def deepseek2(r: Recording) -> None:
    """Norms before, SwiGLU, rope of pairs."""
    x = r.embed()
    for n in range(r.config.n_layers):
        deepseek2_layer(r, n, x)
    r.logits(x)


def deepseek2_layer(r: Recording, n: int, x: int) -> None:
    _attention(r, n, r.norm(x, f"blk.{n}.attn_norm"), add_to=x)
    r.feed_forward(n, r.norm(x, f"blk.{n}.ffn_norm"), Activation.SILU, add_to=x)


def _attention(r: Recording, n: int, x: int, *, add_to: int) -> None:
    p, layer, dim = r.plan, r.config.layers[n], r.config.dim
    heads, width, rank = layer.heads, layer.head_dim, layer.value_dim
    latent = layer.latent
    assert latent is not None
    key = {"attn_kv_a_mqa": (width, dim)}
    qk = r.linear(n, x, key, name="qk", out_col=heads * width)
    # Rounding errors of a query go into exponents: two planes cost little here.
    k_b = p.weight(f"blk.{n}.attn_k_b.weight", heads, rank, latent.query_dim - (width - rank))
    p.head_linear(_queries(r, n, x), k_b, out=qk, precise=True)
    kv_layer = p.new_kv_layer(1, width, rank, is_latent=True)
    p.rope_kv(
        qk,
        r.trig_of(n),
        kv_layer=kv_layer,
        heads=heads,
        style=RopeStyle.PAIR,
        k_norm=p.weight(f"blk.{n}.attn_kv_a_norm.weight", rank),
        eps=_INNER_EPS,
    )
    mixed = p.attention(qk, kv_layer=kv_layer, heads=heads, scale=r.config.attention_scale)
    v_b = p.weight(f"blk.{n}.attn_v_b.weight", heads, latent.value_dim, rank)
    values = p.head_linear(mixed, v_b, name="values")
    shapes = {"attn_output": (dim, heads * latent.value_dim)}
    r.linear(n, values, shapes, name="attn_out", add_to=add_to)


def _queries(r: Recording, n: int, x: int) -> int:
    """Of every head [what meets the compressed values | what turns]."""
    p, layer = r.plan, r.config.layers[n]
    latent = layer.latent
    assert latent is not None
    rows, cols, stem = layer.heads * latent.query_dim, r.config.dim, "attn_q"
    if latent.q_rank:
        a = r.linear(n, x, {"attn_q_a": (latent.q_rank, cols)}, name="q_a")
        x = p.norm(a, p.weight(f"blk.{n}.attn_q_a_norm.weight", latent.q_rank), _INNER_EPS)
        cols, stem = latent.q_rank, "attn_q_b"
    return r.linear(n, x, {stem: (rows, cols)}, name="q")
