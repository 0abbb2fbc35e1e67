"""Metadata of recurrent layers: which they are, sizes of their states, refusals by name."""

from typing import Any

import numpy as np
import pytest
from martlet.runtime.config import ModelConfig
from martlet.runtime.errors import FileFormatError, UnsupportedError
from martlet.runtime.executors.reference import ReferenceExecutor
from martlet.runtime.models import record_plan, unused_tensors
from martlet.runtime.ops import KvType
from martlet.runtime.weights import StoredTensor, StoredWeights

from ..recorded import recorded_ids, recorded_model
from .tiny import TinyDims, run_tokens, tiny_metadata

_SPLIT = ("blk.0.attn_qkv.weight", "blk.0.attn_gate.weight")
DIMS = TinyDims(dim=48, heads=4, head_dim=16, n_layers=4)
SSM: dict[str, Any] = {
    "ssm.conv_kernel": 4,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 8,
    "ssm.state_size": 24,
    "ssm.inner_size": 128,
}


def config(arch: str, **changes: Any) -> ModelConfig:
    metadata = tiny_metadata(arch, DIMS)
    metadata |= {f"{arch}.{key}": value for key, value in {**SSM, **changes}.items()}
    return ModelConfig.from_metadata(metadata, {"token_embd.weight": (300, DIMS.dim)})


def test_layers_without_kv_heads_are_recurrent() -> None:
    found = config("granitehybrid", **{"attention.head_count_kv": [0, 2, 0, 2]})
    assert [layer.is_recurrent for layer in found.layers] == [True, False, True, False]
    assert found.recurrence.head_dim == 16
    # three rows of 128 + 2 * 2 * 24 channels, eight matrices of 24 x 16
    assert found.recurrence.state_values(DIMS.dim) == 3 * 224 + 8 * 24 * 16


def test_every_fourth_layer_of_qwen35_has_attention() -> None:
    found = config("qwen35", **{"ssm.inner_size": 8 * 24})
    assert [layer.is_recurrent for layer in found.layers] == [True, True, True, False]
    assert [layer.kv_heads for layer in found.layers] == [0, 0, 0, 2]
    assert not any(layer.is_recurrent for layer in config("qwen3").layers)


def test_a_layer_of_one_part_is_told_by_its_sizes() -> None:
    sizes = {"attention.head_count_kv": [0, 0, 2, 0], "feed_forward_length": [0, 96, 0, 0]}
    found = config("nemotron_h", **sizes)
    assert [layer.is_recurrent for layer in found.layers] == [True, False, False, True]
    assert {layer.rope for layer in found.layers} == {None}
    only_other = {"attention.layer_norm_rms_epsilon": 0.0, "attention.layer_norm_epsilon": 1e-3}
    assert config("nemotron_h", **sizes, **only_other).norm_eps == 1e-3


def test_old_files_of_qwen3next_compute_the_same() -> None:
    """They have q, k, v and z of each key head in turn in one tensor."""
    config, weights = recorded_model("qwen3next")
    c = config.recurrence
    stored = {name: StoredTensor.from_floats(weights.dequantized(name)) for name in weights.names()}
    qkv, z = (weights.dequantized(name) for name in _SPLIT)
    parts = (*np.split(qkv, [c.k_heads * c.head_dim, 2 * c.k_heads * c.head_dim]), z)
    in_turn = np.concatenate([part.reshape(c.k_heads, -1, config.dim) for part in parts], axis=1)
    old = {name: t for name, t in stored.items() if name not in _SPLIT}
    old["blk.0.ssm_in.weight"] = StoredTensor.from_floats(in_turn.reshape(-1, config.dim))
    logits = []
    for tensors in (stored, old):
        source = StoredWeights(tensors)
        plan = record_plan(config, source, max_rows=32)
        assert unused_tensors(plan, source, config) == []
        runner = ReferenceExecutor(plan, source, n_blocks=2, kv_type=KvType.F32)
        logits.append(run_tokens(runner, recorded_ids("qwen3next"), chunk=32))
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize(
    ("arch", "changes", "error", "told"),
    [
        ("granitehybrid", {"ssm.group_count": 3}, FileFormatError, "8 value heads"),
        ("granitehybrid", {"ssm.inner_size": 100}, FileFormatError, "inner_size is 100"),
        ("granitehybrid", {"ssm.inner_size": 1 << 20}, FileFormatError, "inner_size is 1048576"),
        ("granitehybrid", {"ssm.conv_kernel": 1}, FileFormatError, "expected 2 to 64"),
        ("granitehybrid", {"ssm.state_size": 5000}, FileFormatError, "expected 1 to 4096"),
        ("nemotron_h", {}, FileFormatError, "layer 0 has 2 kv_heads and an MLP of 512"),
        ("nemotron_h_moe", {"moe_latent_size": 16}, UnsupportedError, "moe_latent_size is 16"),
        ("qwen35", {}, UnsupportedError, "values of other sizes than keys, 24"),
        ("qwen35", {"attention.recurrent_layers": [True]}, FileFormatError, "does not name 4"),
    ],
)
def test_what_cannot_be_is_refused(
    arch: str, changes: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        config(arch, **changes)
