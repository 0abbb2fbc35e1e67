"""Architectures that no class of transformers is, but that compute what another one does: its
checkpoint under their names gives the logits recorded for it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from martlet.quant.convert import read_conversion
from martlet.quant.errors import UnsupportedError
from martlet.quant.gguf_file import GGUFFile
from martlet.runtime.config import ModelConfig
from martlet.runtime.executors.choice import create_executor
from martlet.runtime.models import record_plan
from martlet.runtime.ops import KvType
from martlet.runtime.weights import StoredWeights
from martlet.scripts.convert_check import compare_logits
from martlet.scripts.convert_facts import reader_facts

from ..quant.checkpoints import copied, rewrite, stored_arrays
from ..recorded import RELATIVE_ERROR, convert, error_of, gguf_of, recorded_ids
from .test_oracle import executor as executor
from .tiny import run_tokens

_LING_PARTS = {
    "embed_tokens": "word_embeddings",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "e_score_correction_bias": "expert_bias",
}
# As Ling-mini-2.0's config.json names what GLM-4.5's calls otherwise.
_LING_KEYS = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "attention_bias": "use_qkv_bias",
}


def ling_folder(tmp_path: Path, **changes: Any) -> Path:
    """The checkpoint of glm4moe as if it were Ling 2."""
    folder = copied("glm4moe", tmp_path)
    arrays = stored_arrays(folder)
    for n in range(2):
        for kind in ("weight", "bias"):
            parts = [arrays.pop(f"model.layers.{n}.self_attn.{p}_proj.{kind}") for p in "qkv"]
            fused = f"model.layers.{n}.attention.query_key_value.{kind}"
            arrays[fused] = np.concatenate(parts)
    for old, new in _LING_PARTS.items():
        arrays = {name.replace(old, new): values for name, values in arrays.items()}
    config = json.loads((folder / "config.json").read_text())
    named = {_LING_KEYS.get(key, key): value for key, value in config.items()}
    rope = named.pop("rope_parameters")
    named |= {"architectures": ["BailingMoeV2ForCausalLM"], "score_function": "sigmoid"}
    named |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor")}
    (folder / "config.json").write_text(json.dumps({**named, **changes}))
    rewrite(folder, arrays)
    return folder


def check_logits(
    metadata: Mapping[str, Any], weights: StoredWeights, executor: str, name: str
) -> None:
    shapes = {tensor: weights.shape(tensor) or () for tensor in weights.names()}
    config, ids = ModelConfig.from_metadata(metadata, shapes), recorded_ids(name)
    plan = record_plan(config, weights, max_rows=64)
    runner, _ = create_executor(executor, plan, weights, n_blocks=4, kv_type=KvType.F32)
    try:
        whole, *others = (run_tokens(runner, ids, chunk=chunk) for chunk in (64, 7, 1))
        assert error_of(name, whole) < RELATIVE_ERROR
        for logits in others:
            np.testing.assert_array_equal(logits, whole)
    finally:
        runner.close()


def test_bailingmoe2_computes_what_glm4moe_does(tmp_path: Path, executor: str) -> None:
    folder = ling_folder(tmp_path)
    path = convert(folder, tmp_path / "ling.gguf")
    assert compare_logits(read_conversion(folder, reader_facts()), path).is_exact
    with GGUFFile.open(path) as file:
        assert file.metadata["general.architecture"] == "bailingmoe2"
        assert "blk.1.exp_probs_b.bias" in file.tensors
        check_logits(file.metadata, StoredWeights(file.tensors), executor, "glm4moe")


@pytest.mark.parametrize(("key", "value"), [("score_function", "softmax"), ("use_qk_norm", False)])
def test_other_forms_of_ling_are_refused(tmp_path: Path, key: str, value: object) -> None:
    folder = ling_folder(tmp_path, **{key: value})
    with pytest.raises(UnsupportedError, match=f"{key} is {value!r}"):
        read_conversion(folder, reader_facts())


def test_qwen3vlmoe_computes_of_texts_what_qwen3moe_does(executor: str) -> None:
    with GGUFFile.open(gguf_of("qwen3moe")) as file:
        renamed = {key.replace("qwen3moe.", "qwen3vlmoe."): v for key, v in file.metadata.items()}
        renamed |= {
            "general.architecture": "qwen3vlmoe",
            "qwen3vlmoe.rope.dimension_sections": [24, 20, 20, 0],
            "qwen3vlmoe.n_deepstack_layers": 3,
        }
        check_logits(renamed, StoredWeights(file.tensors), executor, "qwen3moe")
