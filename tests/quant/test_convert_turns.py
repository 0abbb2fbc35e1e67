"""gpt-oss: gate and up in turns, experts in MXFP4, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from martlet.quant.convert import read_conversion
from martlet.quant.convert_config import read_settings
from martlet.quant.errors import FileFormatError, UnsupportedError
from martlet.quant.formats import dequantize
from martlet.quant.gguf_file import GGUFFile
from martlet.scripts.convert_check import compare_logits
from martlet.scripts.convert_facts import reader_facts

from ..recorded import convert
from .checkpoints import copied, edit_json, rewrite, stored_arrays

FACTS = reader_facts()
MAGNITUDES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
UP = "model.layers.1.mlp.experts.gate_up_proj"
DOWN = "model.layers.1.mlp.experts.down_proj"


def weight(code: int, exponent: int) -> float:
    return float((-1) ** (code >> 3) * MAGNITUDES[code & 7] * 2.0 ** (exponent - 127))


def packed(shape: tuple[int, int, int], rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Blocks, scales and the weights (experts, rows, cols) that they are."""
    experts, rows, cols = shape
    blocks = rng.integers(0, 256, (experts, rows, cols // 32, 16), dtype=np.uint8)
    scales = rng.integers(120, 126, (experts, rows, cols // 32), dtype=np.uint8)
    values = np.empty(shape, np.float32)
    for e, r, c in np.ndindex(shape):
        byte = blocks[e, r, c // 32, c % 32 // 2]
        values[e, r, c] = weight(int(byte >> 4 * (c % 2)) & 15, int(scales[e, r, c // 32]))
    return blocks, scales, values


@pytest.fixture(scope="module")
def packed_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """gpt-oss with the experts of all layers in blocks, and the weights of layer 1's."""
    folder = copied("gpt-oss", tmp_path_factory.mktemp("packed"))
    arrays, rng, found = stored_arrays(folder), np.random.default_rng(0), {}
    for name in [name for name in arrays if name.endswith("_proj") and ".experts." in name]:
        experts, cols, rows = arrays.pop(name).shape
        blocks, scales, values = packed((experts, rows, cols), rng)
        arrays |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        found[name] = values
    rewrite(folder, arrays)
    edit_json(folder / "config.json", quantization_config={"quant_method": "mxfp4"})
    return folder, found


def test_blocks_stay_blocks_and_keep_their_values(
    packed_checkpoint: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, values = packed_checkpoint
    path = convert(folder, tmp_path / "x.gguf", "BF16")
    with GGUFFile.open(path) as file:
        tensors = file.tensors

        def read(part: str) -> np.ndarray:
            found = tensors[f"blk.1.ffn_{part}_exps.weight"]
            assert found.format.name == "MXFP4"
            return dequantize(found.data, found.format, found.shape)

        np.testing.assert_array_equal(read("gate"), values[UP][:, 0::2])
        np.testing.assert_array_equal(read("up"), values[UP][:, 1::2])
        np.testing.assert_array_equal(read("down"), values[DOWN])
        assert tensors["blk.1.attn_q.weight"].format.name == "BF16"
    assert compare_logits(read_conversion(folder, FACTS), path).is_exact


def test_turns_and_transposed_stacks_are_undone(tmp_path: Path) -> None:
    folder = copied("gpt-oss", tmp_path)
    stored = stored_arrays(folder)
    with GGUFFile.open(convert(folder, tmp_path / "x.gguf", "BF16")) as file:
        for part, of in (("gate", np.s_[:, :, 0::2]), ("up", np.s_[:, :, 1::2])):
            found = file.tensors[f"blk.1.ffn_{part}_exps.weight"]
            bits = found.data.view(np.uint16).reshape(found.shape)
            np.testing.assert_array_equal(bits, stored[UP][of].transpose(0, 2, 1))
            bias = file.tensors[f"blk.1.ffn_{part}_exps.bias"]
            wanted = (stored[f"{UP}_bias"].astype(np.uint32) << 16).view(np.float32)
            values = bias.data.view(np.float32).reshape(bias.shape)
            np.testing.assert_array_equal(values, wanted[of[1:]])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda a: a.pop(f"{UP}_scales"), "a scale for each block"),
        (lambda a: a.pop(f"{UP}_blocks"), "no blocks beside it"),
        (lambda a: a.update({f"{UP}_blocks": a[f"{UP}_blocks"][..., :8]}), "expected bytes"),
        (lambda a: a.update({f"{UP}_blocks": a[f"{UP}_blocks"][0]}), "expected 4 sizes"),
        (lambda a: a.update({f"{UP}_bias": a[f"{UP}_bias"][0]}), "expected 2 sizes"),
        (lambda a: a.pop("model.layers.0.self_attn.sinks"), "sinks.weight.* is missing"),
    ],
)
def test_stacks_that_do_not_fit_are_refused(
    spoil: Any, said: str, packed_checkpoint: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, arrays = copied("gpt-oss", tmp_path), stored_arrays(packed_checkpoint[0])
    spoil(arrays)
    rewrite(folder, arrays)
    with pytest.raises(FileFormatError, match=said):
        read_conversion(folder, FACTS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is 'gptq'"),
        ({"swiglu_limit": 6.0}, "swiglu_limit is 6.0"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        read_settings({**CONFIG, **changes})


def test_rounded_yarn_is_refused() -> None:
    rope = {**CONFIG["rope_parameters"], "truncate": True}
    with pytest.raises(UnsupportedError, match="truncate = True"):
        read_settings({**CONFIG, "rope_parameters": rope})


CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
}
