"""Experts of a checkpoint: their tensors as one, what configs say, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from martlet.quant.convert_config import read_settings
from martlet.quant.convert_experts import stacked
from martlet.quant.errors import FileFormatError, UnsupportedError
from martlet.quant.safetensors_file import SourceTensor

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
_OTHERS = {key: value for key, value in CONFIG.items() if key != "num_experts"}
GLM = {**_OTHERS, "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8}
ERNIE = {**_OTHERS, "architectures": ["Ernie4_5_MoeForCausalLM"]}


def tensor(name: str, values: np.ndarray) -> SourceTensor:
    values = np.ascontiguousarray(values, np.float32)
    return SourceTensor(name, "F32", values.shape, Path("x"), values.reshape(-1).view(np.uint8))


def numbered(count: int, rows: int = 3) -> dict[str, SourceTensor]:
    names = [f"a.experts.{e}.up.weight" for e in range(count)]
    return {
        name: tensor(name, np.full((rows, 4), e) + np.arange(rows)[:, None] / 10)
        for e, name in enumerate(names)
    }


def test_experts_become_one_tensor_in_the_order_of_their_numbers() -> None:
    parts = numbered(12)  # by name, 10 stands before 2
    found = stacked({name: parts[name] for name in sorted(parts)})["a.experts.up.weight"]
    assert found.shape == (12, 3, 4)
    assert found.n_rows == 36
    whole = found.rows(slice(0, 36))
    np.testing.assert_array_equal(whole[:, 0] // 1, np.repeat(np.arange(12), 3))
    for start, stop in ((0, 1), (2, 4), (3, 9), (35, 36)):
        np.testing.assert_array_equal(found.rows(slice(start, stop)), whole[start:stop])


def test_other_tensors_stay() -> None:
    plain = tensor("b.weight", np.zeros((2, 2)))
    assert stacked({"b.weight": plain, **numbered(2)})["b.weight"] is plain


def test_a_stored_stack_of_gate_and_up_is_taken_apart() -> None:
    values = np.arange(3 * 4 * 2, dtype=np.float32).reshape(3, 4, 2)
    found = stacked({"a.experts.gate_up_proj": tensor("a.experts.gate_up_proj", values)})
    assert list(found) == ["a.experts.gate_proj.weight", "a.experts.up_proj.weight"]
    for part, expected in zip(found.values(), (values[:, :2], values[:, 2:]), strict=True):
        assert part.shape == (3, 2, 2)
        np.testing.assert_array_equal(part.rows(slice(0, 6)), expected.reshape(6, 2))
        np.testing.assert_array_equal(part.rows(slice(1, 3)), expected.reshape(6, 2)[1:3])
    with pytest.raises(FileFormatError, match="5 rows of every expert"):
        stacked({"a.experts.gate_up_proj": tensor("x", np.zeros((3, 5, 2)))})


@pytest.mark.parametrize("kind", ["a gap", "another shape"])
def test_experts_that_do_not_fit_together_are_refused(kind: str) -> None:
    parts = numbered(3)
    if kind == "a gap":
        del parts["a.experts.1.up.weight"]
    else:
        parts["a.experts.1.up.weight"] = tensor("x", np.zeros((2, 4)))
    with pytest.raises(FileFormatError, match=r"a\.experts\.up\.weight"):
        stacked(parts)


def test_metadata() -> None:
    said = read_settings(CONFIG).metadata()
    assert said["qwen3moe.expert_count"] == 6
    assert said["qwen3moe.expert_used_count"] == 2
    assert said["qwen3moe.expert_feed_forward_length"] == 32
    glm = read_settings({**GLM, "routed_scaling_factor": 2, "n_group": 4, "topk_group": 2})
    said = {key.removeprefix("glm4moe."): value for key, value in glm.metadata().items()}
    assert said["expert_weights_scale"] == 2.0
    assert (said["expert_group_count"], said["expert_group_used_count"]) == (4, 2)
    assert (said["expert_gating_func"], said["expert_weights_norm"]) == (2, True)
    assert said["leading_dense_block_count"] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok is 7 of 6"),
        ({"num_experts": 0}, "of 0 experts"),
        ({"num_experts": 1 << 20}, "no more than 1024"),
        ({"num_experts": "6"}, "num_experts is '6'"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size is -1"),
    ],
)
def test_counts_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        read_settings({**CONFIG, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_topk_prob": False},
        {"decoder_sparse_step": 2},
        {"mlp_only_layers": [0]},
    ],
)
def test_what_no_reader_would_know_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=next(iter(changes))):
        read_settings({**CONFIG, **changes})


def test_dense_layers_at_the_end_are_refused() -> None:
    assert read_settings({**ERNIE, "moe_layer_end_index": 1}).experts is not None
    with pytest.raises(UnsupportedError, match="moe_layer_end_index is 0"):
        read_settings({**ERNIE, "moe_layer_end_index": 0})
