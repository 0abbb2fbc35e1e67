"""Metadata of experts: which layers have them, defaults of architectures, refusals by name."""

from typing import Any

import pytest
from martlet.runtime.config import LayerConfig, ModelConfig
from martlet.runtime.errors import FileFormatError, UnsupportedError
from martlet.runtime.experts import Experts
from martlet.runtime.ops import Gating

from .tiny import TinyDims, tiny_metadata

DIMS = TinyDims(dim=48, heads=4, head_dim=16, n_layers=4)


def layers(arch: str = "qwen3moe", **changes: Any) -> tuple[LayerConfig, ...]:
    metadata = tiny_metadata(arch, DIMS)
    metadata |= {f"{arch}.{key}": value for key, value in changes.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return ModelConfig.from_metadata(metadata, {"token_embd.weight": (300, DIMS.dim)}).layers


def experts(arch: str = "qwen3moe", **changes: Any) -> Experts:
    found = layers(arch, **changes)[-1].experts
    assert found is not None
    return found


def test_defaults_of_architectures() -> None:
    assert experts() == Experts(5, 2, 512, 0, Gating.SOFTMAX, True, 1.0, 1, 1)
    assert experts("qwen2moe") == Experts(5, 2, 512, 512, Gating.SOFTMAX, False, 1.0, 1, 1)
    mixtral = experts("llama", expert_count=8, expert_used_count=2)
    assert mixtral == Experts(8, 2, 512, 0, Gating.SOFTMAX, True, 1.0, 1, 1)
    assert {layer.experts for layer in layers("llama")} == {None}


def test_keys_come_before_defaults() -> None:
    changes: dict[str, Any] = {
        "expert_gating_func": 2,
        "expert_weights_norm": False,
        "expert_weights_scale": 2.5,
        "expert_count": 8,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
        "expert_shared_count": 3,
    }
    found = experts(**changes)
    assert found == Experts(8, 2, 512, 3 * 512, Gating.SIGMOID, False, 2.5, 4, 2)
    assert experts(expert_weights_scale=0.0).scale == 1.0
    both = experts("ernie4_5-moe", expert_shared_count=2, expert_shared_feed_forward_length=96)
    assert both.shared_dim == 96  # of both together


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [True, True, True, True]),
        ({"leading_dense_block_count": 1}, [False, True, True, True]),
        ({"interleave_moe_layer_step": 2}, [False, True, False, True]),
    ],
)
def test_which_layers_have_experts(changes: dict[str, int], expected: list[bool]) -> None:
    assert [layer.experts is not None for layer in layers(**changes)] == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_used_count": 6}, "6 of 5 experts"),
        ({"expert_used_count": None}, "expert_used_count' is missing"),
        ({"expert_group_count": 2}, "of 2 of 2 groups"),
        ({"expert_count": 6, "expert_group_count": 3, "expert_group_used_count": 4}, "4 of 3"),
        ({"expert_weights_norm": 1}, "expected true or false"),
        ({"expert_feed_forward_length": 0}, "expert_feed_forward_length is 0"),
        ({"expert_feed_forward_length": [512, 512]}, "2 values for 4 layers"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        layers(**changes)


def test_what_is_not_computed_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="expert_gating_func is 4"):
        layers(expert_gating_func=4)
    with pytest.raises(UnsupportedError, match=r"qwen3\.expert_count is 5: experts"):
        layers("qwen3", expert_count=5)


def test_blocks_that_predict_further_tokens_are_no_layers() -> None:
    changes = {"nextn_predict_layers": 1, "expert_weights_norm": True}
    found = layers("glm4moe", **changes)
    assert len(found) == DIMS.n_layers - 1
    assert found[-1].experts == Experts(5, 2, 512, 0, Gating.SIGMOID, True, 1.0, 1, 1)
    with pytest.raises(FileFormatError, match="leaves 0 layers"):
        layers("glm4moe", nextn_predict_layers=4)
