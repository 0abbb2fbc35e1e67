"""`martlet convert` from end to end: the same text as llama.cpp, the same bytes, nothing half done.

The checkpoints and llama.cpp's answers are recorded (scripts/record_checkpoints.py). That the files
compute what transformers computes is shown in tests/runtime/test_oracle.py.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from martlet.quant.checkpoint import Checkpoint
from martlet.quant.convert import packed_weight, read_conversion
from martlet.quant.convert_config import read_settings
from martlet.quant.errors import MartletError, NoSpace
from martlet.quant.gguf_file import GGUFFile
from martlet.quant.mixtures import find_preset, mixture
from martlet.quant.quantize import Plan, quantize_file
from martlet.runtime.architectures import ARCHITECTURES
from martlet.runtime.model import load_model
from martlet.runtime.ops import BufferKind, KvType
from martlet.scripts import convert as command
from martlet.scripts.convert_check import EXACT_ERROR, compare_logits
from martlet.scripts.convert_facts import reader_facts
from martlet.scripts.scored_text import chunk_step
from martlet.scripts.source_forward import source_logits

from ..quant.checkpoints import copied, edit_json, rewrite, stored_arrays
from ..recorded import (
    ENCODERS,
    RECORDED,
    STORED,
    TINY,
    checkpoint_of,
    convert,
    error_of,
    gguf_of,
    recorded_ids,
)
from ..runtime.test_convert_adapter import factors_of, saved
from .conftest import Martlet

LLAMA_CPP = json.loads((RECORDED / "llama_cpp.json").read_text())
FACTS = reader_facts()


@pytest.mark.parametrize("name", [*TINY, *STORED])
def test_the_source_forward_equals_transformers(name: str) -> None:
    checkpoint = Checkpoint.open(checkpoint_of(name))
    config = checkpoint.json("config.json")
    logits = source_logits(checkpoint, config, read_settings(config), recorded_ids(name))
    assert error_of(name, logits) < EXACT_ERROR


def greedy(path: Path, prompt: str, n_tokens: int) -> str:
    model = load_model(
        path, context=128, max_rows=64, kv_type=KvType.F32, activations=BufferKind.F32
    )
    try:
        tokenizer, run = model.tokenizer, model.executor.run
        ids = tokenizer.encode(prompt, add_special=True, parse_special=True)
        n_prompt = done = len(ids)
        logits = run(chunk_step(model.executor, ids, 0, done, np.array([done - 1])))
        while (best := int(logits[0].argmax())) not in tokenizer.eog_ids:
            ids.append(best)
            if len(ids) == n_prompt + n_tokens:
                break
            logits = run(chunk_step(model.executor, ids, done, len(ids), np.array([0])))
            done = len(ids)
        raw = b"".join(tokenizer.token_bytes(i) for i in ids[n_prompt:])
        return raw.decode("utf-8", "replace")
    finally:
        model.close()


@pytest.mark.parametrize("name", LLAMA_CPP["said"])
def test_the_greedy_text_is_that_of_llama_cpp(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = gguf_of(name)
    if name == "gpt-oss":  # llama.cpp rounds the ends of YaRN's ramp
        rounding = replace(ARCHITECTURES[name], exact_yarn=False)
        monkeypatch.setitem(ARCHITECTURES, name, rounding)
    if name == "mistral":  # llama.cpp does not know the window of this architecture
        folder = copied(name, tmp_path)
        edit_json(folder / "config.json", sliding_window=None)
        path = convert(folder, tmp_path / "mistral.gguf")
    said = LLAMA_CPP["said"][name]
    found = greedy(path, LLAMA_CPP["prompt"], LLAMA_CPP["n_tokens"])
    assert found.replace("\0", "") == said  # llama-completion prints no NUL


def test_the_window_of_mistral_is_in_the_file() -> None:
    with GGUFFile.open(gguf_of("mistral")) as file:
        assert file.metadata["llama.attention.sliding_window"] == 9


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("type_", ["F32", "BF16"])
def test_the_same_bytes_twice(name: str, type_: str, tmp_path: Path) -> None:
    paths = [convert(RECORDED / name, tmp_path / f"{n}.gguf", type_) for n in range(2)]
    first, second = (hashlib.sha256(p.read_bytes()).hexdigest() for p in paths)
    assert first == second


@pytest.mark.parametrize("name", [*TINY, *ENCODERS])
def test_the_gguf_package_reads_it(name: str) -> None:
    reader = gguf.GGUFReader(gguf_of(name))
    with GGUFFile.open(gguf_of(name)) as file:
        assert {t.name for t in reader.tensors} == set(file.tensors)
        for tensor in reader.tensors:
            mine = file.tensors[tensor.name]
            assert tuple(tensor.shape.tolist()[::-1]) == mine.shape
            assert np.array_equal(tensor.data.reshape(-1).view(np.uint8), mine.data)
        tokens = reader.fields["tokenizer.ggml.tokens"].contents()
        assert tokens == file.metadata["tokenizer.ggml.tokens"]


def test_gemma_inside_a_class_for_images(tmp_path: Path) -> None:
    folder = copied("gemma3", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    kept = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    (folder / "config.json").write_text(json.dumps({**kept, "text_config": config}))
    arrays = stored_arrays(folder)
    arrays = {f"model.language_model.{n.removeprefix('model.')}": a for n, a in arrays.items()}
    arrays["model.vision_tower.patch.weight"] = np.zeros((3, 2, 2, 2), np.float32)
    rewrite(folder, arrays)
    path = convert(folder, tmp_path / "gemma3.gguf")
    assert path.read_bytes() == gguf_of("gemma3").read_bytes()
    assert compare_logits(read_conversion(folder, FACTS), path).is_exact


def test_fused_projections_compute_the_same(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    arrays = stored_arrays(folder)
    for n in range(2):
        for kind in ("weight", "bias"):
            stem = f"model.layers.{n}."
            qkv = [arrays.pop(f"{stem}self_attn.{p}_proj.{kind}") for p in "qkv"]
            arrays[f"{stem}self_attn.qkv_proj.{kind}"] = np.concatenate(qkv)
            mlp = [arrays.pop(f"{stem}mlp.{p}_proj.{kind}") for p in ("gate", "up")]
            arrays[f"{stem}mlp.gate_up_proj.{kind}"] = np.concatenate(mlp)
    rewrite(folder, arrays)
    conversion = read_conversion(folder, FACTS)
    assert compare_logits(conversion, convert(folder, tmp_path / "x.gguf")).is_exact


def test_stored_stacks_of_experts_compute_the_same(tmp_path: Path) -> None:
    folder = copied("qwen35moe", tmp_path)
    arrays = stored_arrays(folder)
    for n in range(2):
        stem = f"model.layers.{n}.mlp.experts."
        gate, up, down = (
            np.stack([arrays.pop(f"{stem}{e}.{part}_proj.weight") for e in range(5)])
            for part in ("gate", "up", "down")
        )
        arrays[f"{stem}gate_up_proj"] = np.concatenate((gate, up), axis=1)
        arrays[f"{stem}down_proj"] = down
    rewrite(folder, arrays)
    path = convert(folder, tmp_path / "qwen35moe.gguf")
    assert path.read_bytes() == gguf_of("qwen35moe").read_bytes()
    assert compare_logits(read_conversion(folder, FACTS), path).is_exact


def test_an_adapter_is_converted_for_its_base(tmp_path: Path, martlet: Martlet) -> None:
    folder, out = saved(tmp_path / "kind", factors_of("llama")), tmp_path / "kind.gguf"
    done = martlet("convert", str(folder), str(out), "--base", str(RECORDED / "llama"), "--json")
    told = json.loads(done.stdout)
    assert told["n_adapted"] == 8
    assert told["alpha"] == 5.0
    with GGUFFile.open(out) as file:
        assert file.metadata["general.name"] == "kind"
        assert len(file.tensors) == 16
    for arguments, said in (([], "--base"), (["--base", ".", "--check"], "leave it out")):
        refused = martlet("convert", str(folder), str(tmp_path / "x.gguf"), *arguments)
        assert refused.returncode
        assert said in refused.stderr
    assert not (tmp_path / "x.gguf").exists()


# -- quantized ------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_", ["Q8_0", "Q5_1", "Q4_K_M", "IQ4_NL"])
def test_quantizing_on_the_way_gives_the_bytes_of_quantizing_the_f32_file(
    type_: str, tmp_path: Path
) -> None:
    out = convert(RECORDED / "llama", tmp_path / "out.gguf", type_)
    preset = find_preset(type_)
    with GGUFFile.open(gguf_of("llama")) as file:
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        plan = Plan(mixture(preset, file.metadata, shapes), preset.file_type)
        quantize_file(file, tmp_path / "quantized.gguf", plan)
    assert out.read_bytes() == (tmp_path / "quantized.gguf").read_bytes()


@pytest.mark.parametrize(("type_", "most_kl"), [("Q8_0", 0.002), ("Q4_K_M", 0.05)])
def test_a_quantized_file_says_nearly_the_same(type_: str, most_kl: float, tmp_path: Path) -> None:
    out = convert(checkpoint_of("prose-1m-hf"), tmp_path / "out.gguf", type_)
    result = compare_logits(read_conversion(checkpoint_of("prose-1m-hf"), FACTS), out)
    assert 0 < result.mean_kl < most_kl


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers_are_refused_with_their_place(
    tmp_path: Path, value: float
) -> None:
    # B34
    folder = copied("llama", tmp_path)
    arrays = stored_arrays(folder)
    arrays["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    rewrite(folder, arrays)
    with pytest.raises(MartletError, match=r"'blk\.1\.ffn_up\.weight'.* \[3, 5\] is"):
        convert(folder, tmp_path / "out.gguf")
    assert not [p for p in tmp_path.iterdir() if p.is_file()]


def test_values_too_large_for_f16_are_refused(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    arrays = stored_arrays(folder)
    arrays["lm_head.weight"][0, 0] = 70000
    rewrite(folder, arrays)
    with pytest.raises(MartletError, match="F16 holds up to 65504"):
        convert(folder, tmp_path / "out.gguf", "F16")
    convert(folder, tmp_path / "out.gguf", "BF16")


def test_f32_to_bf16_rounds_to_the_nearest_even(tmp_path: Path) -> None:
    # B32
    folder = copied("llama", tmp_path)
    arrays = stored_arrays(folder)
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001], np.uint32)
    arrays["lm_head.weight"][0, :3] = bits.view(np.float32)
    rewrite(folder, arrays)
    with GGUFFile.open(convert(folder, tmp_path / "out.gguf", "BF16")) as file:
        found = file.tensors["output.weight"].data.view("<u2")[:3]
        assert [hex(v) for v in found] == ["0x3f80", "0x3f82", "0x3f81"]


def test_pieces_of_a_tensor_make_the_same_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    conversion = read_conversion(RECORDED / "llama", FACTS)
    for weight in conversion.weights:
        whole = packed_weight(weight, "F32")
        monkeypatch.setattr("martlet.quant.convert.SLICE_WEIGHTS", 100)
        assert np.array_equal(packed_weight(weight, "F32"), whole)
        monkeypatch.undo()


# -- the command ----------------------------------------------------------------------------------


def test_the_command_converts_and_checks(martlet: Martlet, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    done = martlet("convert", str(RECORDED / "qwen2"), str(out), "--check", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["type"] == "BF16"  # as stored
    assert told["n_bytes"] == out.stat().st_size
    assert told["check"]["max_error"] < EXACT_ERROR
    assert told["check"]["same_top"] == 1
    assert "13 rows" in told["notes"][0]
    shown = martlet("inspect", str(out))
    assert shown.returncode == 0
    assert "qwen2" in shown.stdout


def test_the_file_also_runs_as_a_script(tmp_path: Path) -> None:
    script = Path(command.__file__)
    arguments = [str(RECORDED / "llama"), str(tmp_path / "x.gguf"), "--type", "f16"]
    done = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "llama as F16, tensors: 20 in F32, 16 in F16" in done.stdout


def unknown_pattern(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\w+|made up"
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def missing_shard(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()


def other_class(folder: Path) -> None:
    edit_json(folder / "config.json", architectures=["FalconForCausalLM"])


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def deep_json(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (unknown_pattern, r"\w+|made up"),
        (missing_shard, "model-00002-of-00003.safetensors"),
        (other_class, "FalconForCausalLM"),
        (no_config, "has no config.json"),
        (deep_json, "nested too deeply"),
    ],
)
def test_refusals_come_before_anything_is_written(
    tmp_path: Path, change: Callable[[Path], None], told: str
) -> None:
    # B28, B30
    folder = copied("llama", tmp_path)
    change(folder)
    with pytest.raises(MartletError) as refusal:
        convert(folder, tmp_path / "new" / "out.gguf")
    assert told in str(refusal.value)
    assert not (tmp_path / "new").exists()


def test_a_refusal_is_one_line_and_an_exit_code(martlet: Martlet, tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    unknown_pattern(folder)
    done = martlet("convert", str(folder), str(tmp_path / "out.gguf"))
    assert done.returncode == 1
    assert "made up" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out.gguf").exists()


def test_an_unknown_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MartletError, match="'Q9'"):
        convert(RECORDED / "llama", tmp_path / "x.gguf", "Q9")


def test_a_full_disk_is_told_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # B38
    def usage(folder: Any) -> Any:
        return type("Usage", (), {"free": 1000})

    monkeypatch.setattr("martlet.quant.whole_file.shutil.disk_usage", usage)
    with pytest.raises(NoSpace):
        convert(RECORDED / "llama", tmp_path / "out.gguf")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_computes_otherwise_never_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # K rows as if they had the heads of Q: B26's bug.
    monkeypatch.setattr(
        "martlet.quant.convert_tensors.halves_to_pairs", lambda rows, head_dim: rows
    )
    out = tmp_path / "out.gguf"
    out.write_bytes(b"an older one")
    with pytest.raises(MartletError, match="nothing was written"):
        command.convert(RECORDED / "llama", out, "F32", check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]
    assert out.read_bytes() == b"an older one"


def test_the_check_reads_the_file_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, seen = tmp_path / "out.gguf", []

    def look(conversion: Any, whole: Path, type_: str) -> Any:
        seen.append((whole.name, whole.stat().st_size, out.exists()))
        return checked(conversion, whole, type_)

    checked = command.checked
    monkeypatch.setattr(command, "checked", look)
    command.convert(RECORDED / "llama", out, "F32", check=True)
    assert seen == [(".out.gguf.part", out.stat().st_size, False)]
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]
