"""The encoders that can be converted, and how their checkpoints differ from those of decoders.

Owns: the table. Must not know: config.json's values, tensors, files. Class names, key names and
defaults are those of Hugging Face's `transformers` 5.24.
"""

from __future__ import annotations

from dataclasses import replace

from .convert_family import (
    ATTENTION_PARTS,
    GATE_UP,
    MLP_PARTS,
    QKV,
    Family,
    FamilyChoice,
    Norms,
    Windows,
)

_EMBEDDED, _BEHIND, _LAST = "model.embed_norm", "attn_out_norm", "mlp_out_norm"
_POSITIONS, SEGMENTS = "model.embed_positions", "model.embed_segments"
_ENCODER_NAMES = {
    _POSITIONS: "position_embd",
    SEGMENTS: "token_types",
    _EMBEDDED: "token_embd_norm",
    _BEHIND: "attn_output_norm",
    _LAST: "layer_output_norm",
    **dict(zip(ATTENTION_PARTS, ("attn_q", "attn_k", "attn_v", "attn_output"), strict=True)),
    **dict(zip(MLP_PARTS, ("ffn_gate", "ffn_up", "ffn_down"), strict=True)),
    "pooler.dense": "cls",
    "classifier": "cls.output",
}
_BERT = Family(
    "bert",
    activation="gelu",
    norms=Norms("", _BEHIND, "", _LAST),
    is_centered=True,
    is_causal=False,
    turns=False,
    tables={_POSITIONS: "max_position_embeddings", SEGMENTS: "type_vocab_size"},
    embedding_norm=_EMBEDDED,
    has_gate=False,
    biased=(*ATTENTION_PARTS, *MLP_PARTS[1:], _EMBEDDED, _BEHIND, _LAST),
    renames={
        "embeddings.word_embeddings.": "model.embed_tokens.",
        "embeddings.position_embeddings.": f"{_POSITIONS}.",
        "embeddings.token_type_embeddings.": f"{SEGMENTS}.",
        "embeddings.LayerNorm.": f"{_EMBEDDED}.",
        "encoder.layer.": "model.layers.",
        ".attention.self.query.": ".self_attn.q_proj.",
        ".attention.self.key.": ".self_attn.k_proj.",
        ".attention.self.value.": ".self_attn.v_proj.",
        ".attention.output.dense.": ".self_attn.o_proj.",
        ".attention.output.LayerNorm.": f".{_BEHIND}.",
        ".intermediate.dense.": ".mlp.up_proj.",
        ".output.dense.": ".mlp.down_proj.",
        ".output.LayerNorm.": f".{_LAST}.",
    },
    own_names=_ENCODER_NAMES,
    final_norm="",
    eps_key="layer_norm_eps",
    defaults={
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "tie_word_embeddings": True,
    },
)
_NOMIC_BERT = replace(
    _BERT,
    arch="nomic-bert",
    activation="silu",
    turns=True,
    tables={SEGMENTS: "type_vocab_size"},
    has_gate=True,
    biased=(_EMBEDDED, _BEHIND, _LAST),
    renames={
        "embeddings.word_embeddings.": "model.embed_tokens.",
        "embeddings.token_type_embeddings.": f"{SEGMENTS}.",
        "embeddings.LayerNorm.": f"{_EMBEDDED}.",
        "emb_ln.": f"{_EMBEDDED}.",
        "encoder.layers.": "model.layers.",
        ".attn.Wqkv.": ".self_attn.qkv_proj.",
        ".attn.out_proj.": ".self_attn.o_proj.",
        ".mlp.fc11.": ".mlp.up_proj.",
        ".mlp.fc12.": ".mlp.gate_proj.",
        ".mlp.fc2.": ".mlp.down_proj.",
        ".post_attention_layernorm.": f".{_BEHIND}.",
        ".post_mlp_layernorm.": f".{_LAST}.",
        ".norm1.": f".{_BEHIND}.",
        ".norm2.": f".{_LAST}.",
    },
    other_keys={
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "layer_norm_epsilon": "layer_norm_eps",
        "rotary_emb_base": "rope_theta",
    },
    defaults={
        **_BERT.defaults,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rope_theta": 1000.0,
    },
)
_MODERN_BERT = Family(
    "modern-bert",
    activation="gelu",
    norms=Norms("attn_norm", "", "mlp_norm", ""),
    is_centered=True,
    is_causal=False,
    windows=Windows.LAYERS,
    plain_local_rope=True,
    skips_first_norm=True,
    embedding_norm=_EMBEDDED,
    keeps_fused=(QKV, GATE_UP),
    renames={
        "embeddings.tok_embeddings.": "model.embed_tokens.",
        "embeddings.norm.": f"{_EMBEDDED}.",
        ".attn.Wqkv.": f".{QKV}.",
        ".attn.Wo.": ".self_attn.o_proj.",
        ".mlp.Wi.": f".{GATE_UP}.",
        ".mlp.Wo.": ".mlp.down_proj.",
    },
    other_keys={
        "local_attention": "sliding_window",
        "global_rope_theta": "rope_theta",
        "local_rope_theta": "rope_local_base_freq",
        "norm_eps": "layer_norm_eps",
    },
    own_names={
        **_ENCODER_NAMES,
        "attn_norm": "attn_norm",
        "mlp_norm": "ffn_norm",
        QKV: "attn_qkv",
        GATE_UP: "ffn_up",
        "final_norm": "output_norm",
    },
    final_norm="final_norm",
    eps_key="layer_norm_eps",
    defaults={
        "hidden_activation": "gelu",
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "sliding_window": 128,
        "rope_theta": 160000.0,
        "rope_local_base_freq": 10000.0,
    },
)

ENCODERS: dict[str, FamilyChoice] = {
    "BertModel": _BERT,
    "BertForSequenceClassification": replace(_BERT, classifier="classifier"),
    "NomicBertModel": _NOMIC_BERT,
    "ModernBertModel": _MODERN_BERT,
}
