"""The summary of a model file, against sizes worked out by hand."""

import json
from pathlib import Path

import pytest
from martlet.quant.gguf_file import GGUFFile
from martlet.runtime.config import LayerConfig, Rope
from martlet.runtime.models import record_plan
from martlet.scripts.inspect_model import (
    attention_kind,
    headline,
    kv_bytes_per_token,
    plain,
    summarize,
)

from ..recorded import gguf_of, recorded_model
from .conftest import Martlet
from .tiny_file import DIMS


def layer(heads: int, kv_heads: int) -> LayerConfig:
    return LayerConfig(heads, kv_heads, 64, 64, 128, 0, Rope(1e4, 64))


@pytest.mark.parametrize(
    ("layers", "kind"),
    [
        ([layer(8, 8)], "MHA"),
        ([layer(8, 2)] * 2, "GQA"),
        ([layer(8, 1)], "MQA"),
        ([layer(1, 1)], "MHA"),
        ([layer(8, 2), layer(8, 1)], "mixed"),
    ],
)
def test_attention_kinds(layers: list[LayerConfig], kind: str) -> None:
    assert attention_kind(layers) == kind


def test_kv_bytes() -> None:
    # 2 layers x 2 kv heads x (64 key + 64 value) x 2 bytes
    assert kv_bytes_per_token([layer(8, 2)] * 2) == 1024


def test_the_summary_adds_up(tiny_file: Path) -> None:
    with GGUFFile.open(tiny_file) as file:
        summary = summarize(file)
    d = DIMS
    per_layer = 2 * d.dim * d.heads * d.head_dim + 2 * d.dim * d.kv_heads * d.head_dim
    matrices = d.vocab_size * d.dim + d.n_layers * (per_layer + 3 * d.dim * d.ffn_dim)
    norms = (2 * d.n_layers + 1) * d.dim
    assert summary["types"]["Q8_0"]["weights"] == matrices
    assert summary["types"]["Q8_0"]["bits_per_weight"] == 8.5  # 34 bytes for 32 weights
    assert summary["types"]["F32"]["bytes"] == 4 * norms
    assert summary["weights"]["weights"] == matrices + norms
    assert summary["weights"]["bytes"] == matrices * 34 // 32 + 4 * norms
    assert summary["file_bytes"] == tiny_file.stat().st_size
    assert summary["model"]["attention"] == "MQA"
    assert summary["model"]["kv_bytes_per_token"] == 2 * (16 + 16) * 2
    json.dumps(summary)


@pytest.mark.parametrize("name", ["lfm2", "qwen35", "granitehybrid", "falcon-h1", "deepseek2"])
def test_states_are_as_large_as_the_plan_has_them(name: str) -> None:
    with GGUFFile.open(gguf_of(name)) as file:
        model = summarize(file)["model"]
        config, weights = recorded_model(name)
        plan = record_plan(config, weights, 8)
        assert model["state_bytes"] == plan.state_bytes
        assert model["kv_bytes_per_token"] == plan.kv_bytes_per_token()
        assert model["attention_layers"] == len(plan.kv_layers)
        assert (model["attention"] == "MLA") is (name == "deepseek2")
        assert model["recurrent_layers"] == sum(layer.is_recurrent for layer in config.layers)


def test_long_arrays_are_told_by_length() -> None:
    assert plain(list(range(8))) == list(range(8))
    assert plain(list(range(9))) == {"length": 9, "first": list(range(8))}


def test_the_table_for_people(martlet: Martlet, tiny_file: Path) -> None:
    shown = martlet("inspect", str(tiny_file)).stdout
    assert "MQA attention: 2 heads, 1 kv heads of 16" in shown
    assert "vocabulary 259, context 512" in shown
    assert "tokenizer.ggml.tokens = [259 items: '<unk>'" in shown


def test_a_file_martlet_cannot_run_is_still_shown(martlet: Martlet, tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_name("\x1b[2Jwiped")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    done = martlet("inspect", str(path))
    assert done.returncode == 0
    assert "not supported" in done.stdout
    assert "mamba" in done.stdout
    assert "\x1b" not in done.stdout


def test_weights_that_a_token_meets() -> None:
    with GGUFFile.open(gguf_of("glm4moe")) as file:
        summary = summarize(file)
    # one dense layer, one where 3 of 8 experts of 3 x 32 x 32 weights are used
    expected = {"layers": 1, "count": 8, "used": 3, "weights_active": 64_200 - 5 * 3 * 32 * 32}
    assert summary["model"]["experts"] == expected
    assert summary["weights"]["weights"] == 64_200
    assert "3 of 8 experts on 1 layers" in "\n".join(headline(summary))
