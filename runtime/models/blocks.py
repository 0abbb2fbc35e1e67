"""The parts that decoder-only transformers share: embedding, attention, gated MLP, logits.

Owns: tensor names of the GGUF convention and the order in which ops are recorded. Must not know:
architecture names; what differs between them is an argument. Called by the files beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..config import ModelConfig
from ..errors import ModelError
from ..experts import Experts
from ..ops import Activation, RopeStyle, RowKind
from ..plan_builder import PlanBuilder
from ..rope import Rope
from ..weights import WeightSource, chosen_rows, finite_values, row_runs

UNGATED = (Activation.RELU2,)  # what MLPs without a gate are made with


class HeadNorm(Enum):
    """RMS norms of queries and keys."""

    NONE = 0
    HEADS = 1  # of every head, before rope
    WHOLE = 2  # of all heads at once, before rope
    AFTER_ROPE = 3  # of every head, after rope
    WHERE_PRESENT = 4  # as HEADS, in files that have them


def is_factor(name: str) -> bool:
    """Whether the tensor is one number, which a recording holds itself."""
    return name.endswith(_FACTOR)


_FACTOR = "layer_output_scale.weight"


@dataclass
class Recording:
    """A plan in the making. Buffers and weights are the builder's ids."""

    plan: PlanBuilder
    config: ModelConfig
    weights: WeightSource
    n_words: int = 0  # that logits are wanted of, by rows of a ChosenRows; 0: of all
    _trig: dict[Rope, int] = field(default_factory=dict)

    def embed(self) -> int:
        table = self.plan.weight("token_embd.weight", self.config.vocab_size, self.config.dim)
        x = self.plan.embed(table, self.config.embedding_scale)
        for layer in self.config.layers:
            if layer.rope:
                self.record_trig(layer.rope)
        return x

    def norm(self, x: int, name: str, *, add_to: int = -1) -> int:
        p, c = self.plan, self.config
        stored = name if self.weights.shape(name) is not None else f"{name}.weight"  # as Falcon-H1
        weight, bias = p.weight(stored, c.dim), p.optional(f"{name}.bias", c.dim)
        return p.norm(x, weight, c.stream_eps, bias=bias, centered=c.is_centered, add_to=add_to)

    def attention(
        self,
        n: int,
        x: int,
        style: RopeStyle,
        *,
        head_norm: HeadNorm = HeadNorm.NONE,
        add_to: int = -1,
    ) -> int:
        """Attention of layer n on normed rows x, through the output projection."""
        layer = self.config.layers[n]
        mixed = self.mix(n, x, style, head_norm=head_norm)
        shapes = {"attn_output": (self.config.dim, layer.heads * layer.value_dim)}
        return self.linear(n, mixed, shapes, name="attn_out", add_to=add_to)

    def mix(
        self,
        n: int,
        x: int,
        style: RopeStyle,
        *,
        head_norm: HeadNorm = HeadNorm.NONE,
        q_stem: str = "attn_q",
    ) -> int:
        """What attention of layer n mixes of normed rows x. q_stem: the weight of the queries."""
        p, c, layer = self.plan, self.config, self.config.layers[n]
        kv_layer = p.new_kv_layer(layer.kv_heads, layer.head_dim, layer.value_dim)
        qkv = self._qkv(n, x, q_stem)
        q_norm, k_norm = self._head_norms(n, head_norm)
        p.rope_kv(
            qkv,
            self.trig_of(n),
            kv_layer=kv_layer,
            heads=layer.heads,
            style=style,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=0.0 if head_norm is HeadNorm.NONE else c.norm_eps,
            norm_after=head_norm is HeadNorm.AFTER_ROPE,
            temperature=c.temperature,
            temperature_span=c.temperature_span,
        )
        return p.attention(
            qkv,
            kv_layer=kv_layer,
            heads=layer.heads,
            scale=c.attention_scale,
            cap=c.attention_cap,
            window=layer.window,
            both_ways=not c.is_causal,
            sinks=p.weight(f"blk.{n}.attn_sinks.weight", layer.heads) if c.has_sinks else -1,
        )

    def trig_of(self, n: int) -> int:
        """The buffer of cos and sin that layer n turns by, -1 where it does not."""
        rope = self.config.layers[n].rope
        return self._trig[rope] if rope else -1

    def gated_mlp(self, n: int, x: int, activation: Activation, *, add_to: int = -1) -> int:
        """down(activation(gate x) * up x) of layer n on normed rows x; without a tensor for the
        gate, its rows are the first half of those for up. down(activation(up x)) if UNGATED."""
        return self._gated(n, x, activation, "", self.config.layers[n].ffn_dim, add_to)

    def router_logits(self, n: int, x: int, experts: Experts) -> int:
        shapes = {"ffn_gate_inp": (experts.count, self.config.dim)}
        return self.linear(n, x, shapes, name="router")

    def factor(self, name: str) -> float | None:
        """The one value of a tensor that is a factor; None where there is none."""
        if self.weights.shape(name) != (1,):
            return None
        return float(finite_values(self.weights, name)[0])

    def plain_mlp(self, n: int, x: int, activation: Activation, *, add_to: int = -1) -> int:
        """down(activation(up x)) of layer n."""
        return self._plain(n, x, activation, "", self.config.layers[n].ffn_dim, add_to)

    def feed_forward(
        self, n: int, x: int, activation: Activation, *, is_gated: bool = True, add_to: int = -1
    ) -> int:
        """gated_mlp or plain_mlp, or in layers that have experts those, and the one that is
        shared."""
        experts = self.config.layers[n].experts
        if experts is None:
            mlp = self.gated_mlp if is_gated else self.plain_mlp
            return mlp(n, x, activation, add_to=add_to)
        logits = self.router_logits(n, x, experts)
        out = self.routed(
            n, x, experts, activation, logits=logits, is_gated=is_gated, add_to=add_to
        )
        if not experts.shared_dim:
            return out
        gate = self.plan.optional(f"blk.{n}.ffn_gate_inp_shexp.weight", self.config.dim)
        if gate < 0:
            return self._gated(n, x, activation, "_shexp", experts.shared_dim, out)
        shared = self._gated(n, x, activation, "_shexp", experts.shared_dim, -1)
        return self.plan.add(shared, to=out, gate=gate, gate_by=x)

    def logits(self, x: int, *, norm: str = "output_norm", head: str = "") -> None:
        """Output norm and projection of the wanted rows, by tensor `head` or the model's own."""
        if self.config.generates:
            self._project(x, norm, head or self.head)
        self.hidden(x, norm=norm)

    def hidden(self, x: int, *, norm: str = "") -> None:
        """Rows whose hidden state is wanted, as floats, through what the file has behind it.

        Mostly there are none. Last, so that nothing is put in their place.
        """
        p = self.plan
        rows = p.take_rows(x, RowKind.HIDDEN)
        rows = self.norm(rows, norm) if norm else rows
        p.hidden = self._classified(rows) if self.config.n_labels else self._dense(rows)

    # -- inside -----------------------------------------------------------------------------

    def _classified(self, x: int) -> int:
        """The scores of cls.output, of tanh(cls x) where the file has that."""
        p, dim = self.plan, self.config.dim
        if p.weights.shape("cls.weight") is not None:
            x = p.activate(self._head(x, "cls", dim, dim), Activation.TANH)
        return self._head(x, "cls.output", self.config.n_labels, dim)

    def _dense(self, x: int) -> int:
        """Two products that stand behind the mean in the original: the mean of products is the
        product of the mean."""
        p = self.plan
        for name in ("dense_2", "dense_3"):
            shape = p.weights.shape(f"{name}.weight")
            if shape is not None:
                x = self._head(x, name, shape[0], p.buffers[x].width)
        return x

    def _head(self, x: int, name: str, rows: int, cols: int) -> int:
        p = self.plan
        weight, bias = p.weight(f"{name}.weight", rows, cols), p.optional(f"{name}.bias", rows)
        return p.linear(x, [weight], biases=[bias], name=name, precise=True)

    @property
    def head(self) -> str:
        """The tensor of the output projection: without one of its own it is tied."""
        is_tied = self.weights.shape("output.weight") is None
        return "token_embd.weight" if is_tied else "output.weight"

    def _project(self, x: int, norm: str, head: str) -> None:
        p, c = self.plan, self.config
        normed = self.norm(p.take_rows(x), norm)
        bias, n_words = "output.bias", self.n_words or c.vocab_size
        if self.n_words:
            head, bias = chosen_rows(head), chosen_rows(bias)
        weight = p.weight(head, n_words, c.dim)
        # The noise of these activations would go straight into the logits, a quarter of all noise.
        logits = p.linear(
            normed,
            [weight],
            biases=[p.optional(bias, n_words)],
            name="logits",
            logits=True,
            precise=True,
        )
        if c.logit_scale != 1 or c.logit_cap:
            p.scale(logits, c.logit_scale, c.logit_cap)

    def _gated(
        self, n: int, x: int, activation: Activation, suffix: str, width: int, add_to: int
    ) -> int:
        dim = self.config.dim
        gate, up = (f"ffn_{part}{suffix}" for part in ("gate", "up"))
        if activation in UNGATED:
            return self._plain(n, x, activation, suffix, width, add_to)
        shapes = {gate: (width, dim), up: (width, dim)}
        if self.weights.shape(f"blk.{n}.{up}.weight") == (2 * width, dim):
            halves = (row_runs(up, at, at + width, 2 * width) for at in (0, width))
            shapes = dict.fromkeys(halves, (width, dim))
        gated = self.plan.glu(self.linear(n, x, shapes, name="gate_up"), activation)
        down = {f"ffn_down{suffix}": (dim, width)}
        return self.linear(n, gated, down, name="ffn_out", add_to=add_to)

    def _plain(
        self, n: int, x: int, activation: Activation, suffix: str, width: int, add_to: int
    ) -> int:
        up = {f"ffn_up{suffix}": (width, self.config.dim)}
        activated = self.plan.activate(self.linear(n, x, up, name="up"), activation)
        down = {f"ffn_down{suffix}": (self.config.dim, width)}
        return self.linear(n, activated, down, name="ffn_out", add_to=add_to)

    def routed(
        self,
        n: int,
        x: int,
        e: Experts,
        activation: Activation,
        *,
        logits: int,
        shares: int = -1,
        is_gated: bool = True,
        add_to: int = -1,
    ) -> int:
        """What the experts of layer n that these logits choose make of rows x."""
        p, dim = self.plan, self.config.dim
        alone = not is_gated or activation in UNGATED

        def weight(part: str, rows: int, cols: int) -> int:
            return p.weight(f"blk.{n}.ffn_{part}_exps.weight", e.count, rows, cols)

        def bias(part: str, rows: int) -> int:
            name = f"blk.{n}.ffn_{part}_exps.bias"
            return -1 if p.weights.shape(name) is None else p.vector(name, e.count, rows)

        chosen = p.router(
            logits,
            e.gating,
            e.used,
            bias=p.optional(f"blk.{n}.exp_probs_b.bias", e.count),
            shares=shares,
            groups=e.groups,
            groups_used=e.groups_used,
            renormalize=e.renormalize,
            scale=e.scale,
        )
        biases = bias("gate", e.dim), bias("up", e.dim)
        if alone:
            matrices, biases = (weight("up", e.dim, dim), -1), (biases[1], -1)
        elif self.weights.shape(f"blk.{n}.ffn_gate_up_exps.weight") is not None:
            matrices = weight("gate_up", 2 * e.dim, dim), -1
        else:
            matrices = weight("gate", e.dim, dim), weight("up", e.dim, dim)
        gated = p.expert_glu(
            *(x, chosen, *matrices),
            biases=biases,
            activation=activation,
            alone=alone,
            precise=self._is_precise(n, "gate_up"),
        )
        return p.expert_sum(
            gated,
            chosen,
            weight("down", dim, e.dim),
            bias=bias("down", dim),
            add_to=add_to,
            precise=self._is_precise(n, "ffn_out"),
        )

    def _is_precise(self, n: int, name: str) -> bool:
        """Whether a product of layer n takes two planes of activations.

        Noise of the first layer passes through all others, that of the last goes straight into the
        logits, and products of gate and up have the longest tails. These few products, a fifth of
        the multiplications, carry half of all noise (measured as KL divergence from float
        activations).
        """
        n_layers = self.config.n_layers
        return n in (0, n_layers - 1) or (name == "ffn_out" and n < n_layers // 2)

    def record_trig(self, rope: Rope) -> None:
        """One table of angles per kind of rope, shared by all layers that turn alike."""
        if rope in self._trig:
            return
        divisors = None
        found = self.weights.shape(rope.divisors)
        if found is not None:
            if found != (rope.n_rot // 2,):
                raise ModelError(
                    f"tensor {rope.divisors!r} has shape {found}, expected ({rope.n_rot // 2},)"
                )
            divisors = finite_values(self.weights, rope.divisors)
        elif rope.short_context:
            raise ModelError(f"tensor {rope.divisors!r} is missing from the file; fetch it again")
        inv_freq = rope.inv_freq(divisors)
        self._trig[rope] = self.plan.rope_table(inv_freq, str(rope), rope.amplitude)

    def _head_norms(self, n: int, head_norm: HeadNorm) -> tuple[int, int]:
        """Weights for queries and for keys."""
        has_norm = self.weights.shape(f"blk.{n}.attn_q_norm.weight") is not None
        if head_norm is HeadNorm.NONE or (head_norm is HeadNorm.WHERE_PRESENT and not has_norm):
            return -1, -1
        layer = self.config.layers[n]
        q_heads, k_heads = (1, 1)
        if head_norm is HeadNorm.WHOLE:
            q_heads, k_heads = layer.heads, layer.kv_heads
        q_norm = self.plan.weight(f"blk.{n}.attn_q_norm.weight", q_heads * layer.head_dim)
        k_norm = self.plan.weight(f"blk.{n}.attn_k_norm.weight", k_heads * layer.head_dim)
        return q_norm, k_norm

    def _qkv(self, n: int, x: int, q_stem: str) -> int:
        """[q | k | v] of layer n, from one fused tensor or from three."""
        layer, dim = self.config.layers[n], self.config.dim
        q_rows = layer.heads * layer.head_dim
        k_rows = layer.kv_heads * layer.head_dim
        v_rows = layer.kv_heads * layer.value_dim
        if self.weights.shape(f"blk.{n}.attn_qkv.weight") is not None:
            shapes = {"attn_qkv": (q_rows + k_rows + v_rows, dim)}
        else:
            shapes = {q_stem: (q_rows, dim), "attn_k": (k_rows, dim), "attn_v": (v_rows, dim)}
        return self.linear(n, x, shapes, name="qkv")

    def linear(
        self,
        n: int,
        x: int,
        shapes: Mapping[str, tuple[int, int]] | Sequence[tuple[str, tuple[int, int]]],
        *,
        name: str,
        add_to: int = -1,
        out_col: int = 0,
    ) -> int:
        """Stacked projections of layer n by tensor stem; biases are loaded where present. out_col:
        columns left free before them."""
        p = self.plan
        pairs = [*(shapes.items() if isinstance(shapes, Mapping) else shapes)]
        weights = [p.weight(f"blk.{n}.{stem}.weight", *shape) for stem, shape in pairs]
        biases = [p.optional(f"blk.{n}.{stem}.bias", shape[0]) for stem, shape in pairs]
        how = {"precise": self._is_precise(n, name), "exact": name == "router"}
        return p.linear(x, weights, biases=biases, name=name, add_to=add_to, out_col=out_col, **how)
