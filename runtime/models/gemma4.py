"""Gemma 4: local and global layers of two head sizes, the last of which may read keys of others.

Owns: what its layers have that others have not: normed values, keys that are the values as well,
vectors of a token for each layer, experts beside the MLP. Must not know: where rows of a table come
from.
"""

from __future__ import annotations

import math

from ..errors import ModelError
from ..ops import Activation, RopeStyle
from .blocks import Recording

GELU = Activation.GELU_TANH


def gemma4(r: Recording) -> None:
    """Norms before and behind, GeGLU, rope of halves, norms of heads and values, two head sizes."""
    x = r.embed()
    of_layers = _of_layers(r, x) if r.config.per_layer_dim else -1
    owners: dict[bool, int] = {}
    for n, layer in enumerate(r.config.layers):
        mixed = _mix(r, n, r.norm(x, f"blk.{n}.attn_norm"), owners)
        out = {"attn_output": (r.config.dim, layer.heads * layer.value_dim)}
        mixed = r.linear(n, mixed, out, name="attn_out")
        r.norm(mixed, f"blk.{n}.post_attention_norm", add_to=x)
        r.norm(_feed(r, n, x), f"blk.{n}.post_ffw_norm", add_to=x)
        if of_layers >= 0:
            _add_own(r, n, x, of_layers)
        if (factor := r.factor(f"blk.{n}.layer_output_scale.weight")) is not None:
            r.plan.scale(x, factor)
    r.logits(x)


def _mix(r: Recording, n: int, x: int, owners: dict[bool, int]) -> int:
    """Attention of layer n; one of the last reads the last keys of its kind, local or global."""
    p, c, layer, dim = r.plan, r.config, r.config.layers[n], r.config.dim
    is_local, reads = layer.window > 0, n >= c.n_layers - c.n_readers
    shapes = [("attn_q", (layer.heads * layer.head_dim, dim))]
    k_norm = -1
    if reads:
        if is_local not in owners:
            raise ModelError(f"layer {n} reads keys of other layers, and none of its kind has any")
    else:
        owners[is_local] = p.new_kv_layer(layer.kv_heads, layer.head_dim, layer.value_dim)
        has_values = r.weights.shape(f"blk.{n}.attn_v.weight") is not None
        shapes.append(("attn_k", (layer.kv_heads * layer.head_dim, dim)))
        values = (layer.kv_heads * layer.value_dim, dim)
        shapes.append(("attn_v" if has_values else "attn_k", values))
        k_norm = p.weight(f"blk.{n}.attn_k_norm.weight", layer.head_dim)
    qkv = r.linear(n, x, shapes, name="qkv")
    p.rope_kv(
        qkv,
        r.trig_of(n),
        kv_layer=owners[is_local],
        heads=layer.heads,
        style=RopeStyle.HALF,
        q_norm=p.weight(f"blk.{n}.attn_q_norm.weight", layer.head_dim),
        k_norm=k_norm,
        eps=c.norm_eps,
        v_norm=not reads,
    )
    return p.attention(
        qkv,
        kv_layer=owners[is_local],
        heads=layer.heads,
        scale=c.attention_scale,
        window=layer.window,
    )


def _feed(r: Recording, n: int, x: int) -> int:
    """The MLP, or where there are experts norm(MLP) + norm(experts); their router has its norm."""
    p, c, experts = r.plan, r.config, r.config.layers[n].experts
    fed = r.gated_mlp(n, r.norm(x, f"blk.{n}.ffn_norm"), GELU)
    if experts is None:
        return fed
    total = r.norm(fed, f"blk.{n}.post_ffw_norm_1")
    scale = p.weight(f"blk.{n}.ffn_gate_inp.scale", c.dim)
    logits = r.router_logits(n, p.norm(x, scale, c.norm_eps), experts)
    p.scale(logits, 1 / math.sqrt(c.dim))
    routed = r.routed(
        n,
        r.norm(x, f"blk.{n}.pre_ffw_norm_2"),
        experts,
        GELU,
        logits=logits,
        shares=p.optional(f"blk.{n}.ffn_down_exps.scale", experts.count),
    )
    return r.norm(routed, f"blk.{n}.post_ffw_norm_2", add_to=total)


def _of_layers(r: Recording, x: int) -> int:
    """(n, layers x dim) what each layer gets: half of the token, half of its embedding x."""
    p, c, d = r.plan, r.config, r.config.per_layer_dim
    width = c.n_layers * d
    name = "per_layer_token_embd.weight"
    n_tokens = (r.weights.shape(name) or (0,))[0]
    of_token = p.embed(p.file_rows(name, n_tokens, width), math.sqrt(d))
    projected = p.linear(x, [p.weight("per_layer_model_proj.weight", width, c.dim)], precise=True)
    weight = p.weight("per_layer_proj_norm.weight", d)
    # The original scales x by 1 / sqrt(dim) first: a norm sees the same where eps grows with it.
    p.norm(projected, weight, c.norm_eps * c.dim, group=d, add_to=of_token)
    return p.scale(of_token, math.sqrt(0.5))


def _add_own(r: Recording, n: int, x: int, of_layers: int) -> None:
    """x += norm(proj(gelu(inp_gate x) * what layer n gets))."""
    d, dim = r.config.per_layer_dim, r.config.dim
    gate = r.linear(n, x, {"inp_gate": (d, dim)}, name="own_gate")
    gated = r.plan.gate(of_layers, gate, GELU, width=d, x_col=n * d)
    out = r.linear(n, gated, {"proj": (dim, d)}, name="own")
    r.norm(out, f"blk.{n}.post_norm", add_to=x)
