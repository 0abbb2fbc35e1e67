"""Adapters as PEFT saves them: converted, they compute what the checkpoint does with W + s B A."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from martlet.quant.convert_adapter import CONFIG, WEIGHTS, read_adapter, write_adapter
from martlet.quant.errors import FileFormatError, MartletError, UnsupportedError
from martlet.quant.gguf_file import GGUFFile
from martlet.runtime.adapters import Adapter, AdapterFile, all_tensors
from martlet.runtime.config import ModelConfig
from martlet.runtime.executors.reference import ReferenceExecutor
from martlet.runtime.models import record_plan
from martlet.runtime.ops import BufferKind, KvType
from martlet.runtime.step import Step
from martlet.runtime.weights import StoredWeights

from ..quant.checkpoints import copied, edit_json, rewrite, stored_arrays, write_safetensors
from ..recorded import RECORDED, convert, gguf_of, recorded_ids, relative_error
from .tiny import Chunk, make_step

RANK, ALPHA = 3, 5.0
EXACT = 1e-5  # of the largest logit: two orders of the same sums
# Each has something of its own: rows in pairs, fused rows, tiled heads, a gate behind each query.
MODULES = {
    "llama": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj"),
    "phi3": ("self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj"),
    "glm4": ("self_attn.q_proj", "mlp.gate_up_proj"),
    "qwen35": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj",
               "self_attn.q_proj"),
    "qwen3vl": ("self_attn.v_proj", "mlp.gate_proj"),
}  # fmt: skip
Factors = dict[str, np.ndarray]


def factors_of(name: str, rank: int = RANK) -> Factors:
    """By the checkpoint's module names."""
    rng, found = np.random.default_rng(11), {}
    for tensor, values in stored_arrays(RECORDED / name).items():
        module = tensor.removesuffix(".weight")
        if module.endswith(MODULES[name]) and "visual" not in module:
            rows, cols = values.shape
            found[f"{module}.lora_A.weight"] = rng.normal(size=(rank, cols)) / cols**0.5
            found[f"{module}.lora_B.weight"] = rng.normal(size=(rows, rank)) / 2
    assert found
    return {key: values.astype(np.float32) for key, values in found.items()}


def saved(folder: Path, factors: Factors, **changes: Any) -> Path:
    folder.mkdir()
    names = {f"base_model.model.{key}": values for key, values in factors.items()}
    write_safetensors(folder / WEIGHTS, names)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", **changes}
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


def run(file: GGUFFile, ids: list[int], adapter: Adapter | None = None) -> np.ndarray:
    adapters = [adapter] if adapter else []
    weights = StoredWeights(all_tensors(file, adapters))
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    config = ModelConfig.from_metadata(file.metadata, shapes).at_context(64)
    plan = record_plan(config, weights, 64, activations=BufferKind.F32, adapters=adapters)
    for each in adapters:
        each.check_used(plan)
    runner = ReferenceExecutor(plan, weights, n_blocks=2, kv_type=KvType.F32)
    step = make_step([Chunk(ids, 0, [0])])
    shares = np.ones((1, len(adapters)), np.float32)
    return runner.run(Step(**{**step.__dict__, "adapters": shares}))


def merged(name: str, factors: Factors, scales: dict[str, float], folder: Path) -> np.ndarray:
    """Logits of the checkpoint with W + s B A in the place of W, in float32."""
    copy = copied(name, folder)
    arrays = {}
    for key, stored in stored_arrays(copy).items():
        values = stored.astype(np.float32)
        if stored.dtype == np.uint16:  # BF16
            values = (stored.astype(np.uint32) << 16).view(np.float32)
        module = key.removesuffix(".weight")
        if f"{module}.lora_A.weight" in factors:
            a, b = (factors[f"{module}.lora_{part}.weight"] for part in "AB")
            scale = next(s for end, s in scales.items() if module.endswith(end))
            values = values + np.float32(scale) * (b @ a)
        arrays[key] = values
    rewrite(copy, arrays)
    with GGUFFile.open(convert(copy, folder / "merged.gguf")) as file:
        return run(file, recorded_ids(name))


def adapted(name: str, folder: Path, out: Path) -> np.ndarray:
    write_adapter(read_adapter(folder, RECORDED / name), out, format_name="F32", name="a")
    with GGUFFile.open(gguf_of(name)) as file:
        arch = str(file.metadata["general.architecture"])
        return run(file, recorded_ids(name), Adapter.open(AdapterFile(out, "a"), arch))


@pytest.mark.parametrize("name", MODULES)
def test_logits_are_those_of_the_merged_checkpoint(name: str, tmp_path: Path) -> None:
    factors = factors_of(name)
    found = adapted(name, saved(tmp_path / "adapter", factors), tmp_path / "a.gguf")
    expected = merged(name, factors, {"": ALPHA / RANK}, tmp_path)
    assert relative_error(found, expected) < EXACT
    with GGUFFile.open(gguf_of(name)) as file:
        assert relative_error(run(file, recorded_ids(name)), expected) > 0.05


@pytest.mark.parametrize("by_root", [False, True])
def test_modules_with_an_alpha_of_their_own(by_root: bool, tmp_path: Path) -> None:
    factors = factors_of("llama")
    own = {"alpha_pattern": {"q_proj": 2.0, "layers.1.mlp.up_proj": 9.0}, "use_rslora": by_root}
    found = adapted("llama", saved(tmp_path / "adapter", factors, **own), tmp_path / "a.gguf")
    divisor = RANK**0.5 if by_root else RANK
    scales = {"q_proj": 2.0 / divisor, "layers.1.mlp.up_proj": 9.0 / divisor, "": ALPHA / divisor}
    assert relative_error(found, merged("llama", factors, scales, tmp_path)) < EXACT


def test_ranks_of_their_own(tmp_path: Path) -> None:
    factors, wide = factors_of("llama"), factors_of("llama", rank=7)
    factors |= {key: values for key, values in wide.items() if "o_proj" in key}
    folder = saved(tmp_path / "adapter", factors, rank_pattern={"o_proj": 7})
    found = adapted("llama", folder, tmp_path / "a.gguf")
    scales = {"o_proj": ALPHA / 7, "": ALPHA / RANK}
    assert relative_error(found, merged("llama", factors, scales, tmp_path)) < EXACT
    (folder / CONFIG).write_text((folder / CONFIG).read_text().replace("7", "6"))
    with pytest.raises(FileFormatError, match="have rank 7"):
        read_adapter(folder, RECORDED / "llama")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_16"}, "base model was changed"),
        ({"alpha_pattern": {".*q_proj": 3}}, "only names are supported"),
        ({"r": 0}, "r is 0"),
        ({"lora_alpha": -1}, "lora_alpha of the adapter is -1"),
    ],
)
def test_settings_that_make_another_sum_are_refused(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "adapter", factors_of("llama"), **changes)
    with pytest.raises(MartletError, match=told):
        read_adapter(folder, RECORDED / "llama")


@pytest.mark.parametrize(
    ("name", "shape", "told"),
    [
        ("model.layers.0.self_attn.q_proj.lora_magnitude_vector", (64,), "no factor"),
        ("model.layers.0.self_attn.v_proj.lora_A.weight", (RANK, 32), "stands alone"),
        ("model.embed_tokens.lora_embedding_A", (RANK, 32), "no factor"),
    ],
)
def test_tensors_that_are_no_pair_are_refused(
    name: str, shape: tuple[int, ...], told: str, tmp_path: Path
) -> None:
    more = {name: np.zeros(shape, np.float32)}
    folder = saved(tmp_path / "adapter", {**factors_of("llama"), **more})
    with pytest.raises(MartletError, match=told):
        read_adapter(folder, RECORDED / "llama")


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "adapter", factors_of("qwen35"))
    with pytest.raises(UnsupportedError, match="no projection of a llama model"):
        read_adapter(folder, RECORDED / "llama")
    with pytest.raises(FileFormatError, match=r"has no config\.json"):
        read_adapter(folder, tmp_path)
    with pytest.raises(FileFormatError, match=f"has no {CONFIG}"):
        read_adapter(RECORDED / "llama", RECORDED / "llama")
    edit_json(copied("llama", tmp_path) / "config.json", intermediate_size=48)
    mlp = {k: v for k, v in factors_of("llama").items() if "mlp" in k}
    with pytest.raises(FileFormatError, match="do not make its"):
        read_adapter(saved(tmp_path / "mlp", mlp), tmp_path / "llama")
