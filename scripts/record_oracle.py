"""Records what `transformers` computes for tiny random models, as test data for the executors.

Owns: the tiny models, their conversion to GGUF tensors and metadata, the recorded logits. Must not
import martlet: an oracle shares no code with what it judges. Recording needs torch and
transformers; the conversion alone needs NumPy, so that tests can use it on other checkpoints.

    python scripts/record_oracle.py tests/data/oracle --stories ../shared/data/stories260k-hf
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

_SEED = 20
_N_TOKENS = 40
_N_STORY_TOKENS = 24
_VOCAB = 96

_SIZES: dict[str, Any] = {
    "vocab_size": _VOCAB,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,  # low, so that this short context has all three kinds of dims
}
# The stretched base first, as in the larger sizes; 6 local layers to each global one.
_GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_GEMMA_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 9,
    "rope_parameters": _GEMMA_ROPE,
}
# name -> (HF class stem, architecture, config beyond _SIZES)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "llama", {"tie_word_embeddings": False}),
    "llama3": (
        "Llama",
        "llama",
        {"rope_parameters": _LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen2": ("Qwen2", "qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3", "qwen3", {"head_dim": 16}),
    "yarn": (
        "Qwen3",
        "qwen3",
        {"head_dim": 16, "num_hidden_layers": 1, "rope_parameters": _YARN_ROPE},
    ),
    "gemma3": ("Gemma3", "gemma3", _GEMMA_SIZES),
}

_GLOBAL_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


# -- conversion ---------------------------------------------------------------------------------


def gguf_name(name: str, arch: str) -> str:
    """model.layers.3.self_attn.q_proj.bias -> blk.3.attn_q.bias"""
    stem, suffix = name.rsplit(".", 1)
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    if part == "post_attention_layernorm":  # only gemma means by it what it says
        return f"blk.{layer}.{'post_attention_norm' if arch == 'gemma3' else 'ffn_norm'}.{suffix}"
    return f"blk.{layer}.{_LAYER_NAMES[part]}.{suffix}"


def gguf_tensors(
    state: Mapping[str, np.ndarray], config: Mapping[str, Any], arch: str
) -> dict[str, np.ndarray]:
    """A checkpoint's weights under GGUF names, laid out as GGUF converters do."""
    tensors = {}
    for hf_name, values in state.items():
        name, values = gguf_name(hf_name, arch), values.astype(np.float32)
        if name == "output.weight" and config["tie_word_embeddings"]:
            continue
        if arch == "gemma3" and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if arch == "llama" and ".attn_q." in name:
            values = _halves_to_pairs(values, config["num_attention_heads"])
        if arch == "llama" and ".attn_k." in name:
            values = _halves_to_pairs(values, config["num_key_value_heads"])
        tensors[name] = values
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = _llama3_divisors(rope, _head_dim(config))
    return tensors


def _halves_to_pairs(values: np.ndarray, heads: int) -> np.ndarray:
    """Row 2i of each head takes row i, row 2i + 1 takes row i + head_dim / 2."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _head_dim(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _llama3_divisors(rope: Mapping[str, Any], n_rot: int) -> np.ndarray:
    """Long wavelengths are stretched by `factor`, short ones kept, those between are blended."""
    wavelengths = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, n_rot, 2) / n_rot)
    original = rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    share = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    return (1 / ((1 - share) / factor + share)).astype(np.float32)


def gguf_metadata(config: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """Keys as converters write them; those that older files lack are left to the defaults."""
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    rope = rope.get("full_attention", rope)
    values: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if config.get("head_dim"):
        values["attention.key_length"] = values["attention.value_length"] = config["head_dim"]
    if rope.get("rope_type") == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if rope.get("rope_type") == "yarn":
        values |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope["beta_fast"],
        }
    if arch == "gemma3":
        values["attention.sliding_window"] = config["sliding_window"]
    named = {f"{arch}.{key}": value for key, value in values.items()}
    return {"general.architecture": arch, "general.name": f"tiny {arch}", **named}


# -- recording ----------------------------------------------------------------------------------


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if isinstance(value, str) and key != "general.architecture":
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
    # One token per printable character and one merge: enough to open the file, not for prose.
    printable = [*(chr(code) for code in range(ord("!"), ord("~"))), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["<s>", "</s>", *printable][:_VOCAB])
    writer.add_token_types([3, 3, *[1] * len(printable)][:_VOCAB])  # 3: control, 1: normal
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _logits(model: Any, ids: np.ndarray) -> np.ndarray:
    torch: Any = import_module("torch")

    with torch.no_grad():
        return model.eval()(torch.from_numpy(ids[None])).logits[0].numpy()


def record_tiny(name: str, folder: Path) -> None:
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")

    stem, arch, extra = MODELS[name]
    torch.manual_seed(_SEED)
    rng = np.random.default_rng(_SEED)
    config_class = getattr(transformers, f"{stem}{'Text' if stem == 'Gemma3' else ''}Config")
    config = config_class(**{**_SIZES, **extra}, attn_implementation="eager")
    model = getattr(transformers, f"{stem}ForCausalLM")(config).float()
    with torch.no_grad():
        for key, values in model.named_parameters():
            # Constant initial values would hide a missing bias or a misplaced "+1".
            std = 0.3 if values.ndim == 1 else values.shape[1] ** -0.5
            is_plain_norm = key.endswith("norm.weight") and arch != "gemma3"
            centre = 1.0 if is_plain_norm else 0.0
            values.copy_(torch.from_numpy(centre + std * rng.standard_normal(values.shape)))
    model.tie_weights()
    ids = rng.integers(0, _VOCAB, _N_TOKENS)
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    merged = {**_SIZES, **extra}
    tensors = gguf_tensors(state, merged, arch)
    write_gguf(folder / f"{name}.gguf", gguf_metadata(merged, arch), tensors)
    np.savez_compressed(folder / f"{name}.npz", ids=ids, logits=_logits(model, ids))


def record_stories(checkpoint: Path, folder: Path) -> None:
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")

    model = transformers.LlamaForCausalLM.from_pretrained(
        checkpoint, attn_implementation="eager", dtype=torch.float32
    )
    config = json.loads((checkpoint / "config.json").read_text())
    ids = np.random.default_rng(_SEED).integers(0, config["vocab_size"], _N_STORY_TOKENS)
    ids[0] = config["bos_token_id"]
    np.savez_compressed(folder / "stories260k.npz", ids=ids, logits=_logits(model, ids))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stories", type=Path, help="the stories260k-hf checkpoint")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in MODELS:
        record_tiny(name, args.folder)
    if args.stories:
        record_stories(args.stories, args.folder)


if __name__ == "__main__":
    main()
