"""Synthesized files: sizes of real models, whole or absent, and readable by martlet."""

import dataclasses
from pathlib import Path

import gguf
import numpy as np
import pytest
from martlet.quant import whole_file
from martlet.quant.errors import MartletError, NoSpace
from martlet.quant.formats import FORMATS
from martlet.quant.gguf_file import GGUFFile
from martlet.quant.mixtures import PRESETS, mixture
from martlet.runtime.model import load_model
from martlet.runtime.tokenizer import Tokenizer
from martlet.scripts.random_vocabulary import LEAST_SIZE, vocabulary
from martlet.scripts.shapes import SHAPES, Shape, find_shape
from martlet.scripts.synthesize import metadata, write_model

from ..runtime.tiny import Chunk, make_step
from .conftest import Martlet

SMALL = Shape("small", "llama", 256, 512, 4, 4, 2, 64, 1000, 512, 1e4, 1e-5)
SMALL_GEMMA = dataclasses.replace(SMALL, name="small-gemma", arch="gemma3", window=32)
UNTIED = dataclasses.replace(SMALL, name="untied", is_tied=False)


def sizes(shape_name: str, preset: str) -> dict[str, int]:
    shape = find_shape(shape_name)
    tensors = dict(shape.tensors())
    formats = mixture(PRESETS[preset], metadata(shape, PRESETS[preset]), tensors)
    return {
        name: FORMATS[formats.get(name, "F32")].data_bytes(size) for name, size in tensors.items()
    }


@pytest.mark.parametrize(
    ("shape", "preset", "mega_bytes"),
    [
        # Sizes of the tensors in the files that llama-quantize makes of the real models.
        ("llama-1b", "Q4_K_M", 800),
        ("llama-1b", "Q8_0", 1313),
        ("llama-3b", "Q4_K_M", 2011),
        ("llama-8b", "Q4_K_M", 4913),
        ("smollm2-135m", "Q4_1", 96.6),
        ("gemma3-270m", "Q4_K_M", 246.6),
    ],
)
def test_shapes_have_the_sizes_of_real_files(shape: str, preset: str, mega_bytes: float) -> None:
    assert sum(sizes(shape, preset).values()) / 1e6 == pytest.approx(mega_bytes, rel=0.002)


@pytest.mark.parametrize("name", ["qwen3.5-0.8b", "granite-4-h-micro"])
def test_recurrent_shapes_load_and_run(tmp_path: Path, name: str) -> None:
    shape = dataclasses.replace(find_shape(name), n_layers=6, vocab_size=300)
    recurrent = shape.recurrent
    assert recurrent is not None
    small = dataclasses.replace(recurrent, attention=(2, 5), v_heads=2 * recurrent.k_heads)
    shape = dataclasses.replace(shape, dim=256, ffn_dim=256, recurrent=small)
    path = tmp_path / "model.gguf"
    write_model(path, shape, PRESETS["Q4_0"])
    model = load_model(path, executor="reference", context=32)
    logits = model.executor.run(make_step([Chunk([1, 2, 3], 0, [0])]))
    model.close()
    assert np.isfinite(logits).all()
    assert len(model.executor.plan.kv_layers) == 2


def test_gpt_oss_loads_and_runs(tmp_path: Path) -> None:
    small = {"dim": 64, "ffn_dim": 64, "n_layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
    shape = dataclasses.replace(find_shape("gpt-oss-20b"), vocab_size=300, **small, experts=5)
    path = tmp_path / "model.gguf"
    write_model(path, shape, PRESETS["MXFP4_MOE"])
    with GGUFFile.open(path) as file:
        formats = {file.tensors[f"blk.1.ffn_{p}_exps.weight"].format.name for p in ("up", "down")}
        assert formats == {"MXFP4"}
        assert file.tensors["blk.1.attn_q.weight"].format.name == "Q8_0"
    model = load_model(path, executor="reference", context=32)
    logits = model.executor.run(make_step([Chunk([1, 2, 3], 0, [0])]))
    assert [layer.window for layer in model.config.layers] == [128, 0]
    model.close()
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("preset", PRESETS)
def test_every_type_loads_and_runs(tmp_path: Path, preset: str) -> None:
    path = tmp_path / "model.gguf"
    assert write_model(path, SMALL, PRESETS[preset]) == path.stat().st_size
    model = load_model(path, executor="reference", context=32)
    logits = model.executor.run(make_step([Chunk([1, 2, 3], 0, [0])]))
    model.close()
    assert logits.shape == (3, SMALL.vocab_size)
    assert np.isfinite(logits).all()
    assert 0.1 < logits.std() < 10


@pytest.mark.parametrize("shape", [SMALL_GEMMA, UNTIED], ids=lambda shape: shape.name)
def test_every_kind_of_shape_runs(tmp_path: Path, shape: Shape) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, shape, PRESETS["Q4_K_M"])
    model = load_model(path, executor="reference", context=32)
    logits = model.executor.run(make_step([Chunk([1, 2, 3], 0, [0])]))
    assert [layer.window for layer in model.config.layers] == [shape.window] * shape.n_layers
    model.close()
    assert np.isfinite(logits).all()


def test_the_reader_of_the_gguf_package_agrees(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, SMALL, PRESETS["Q4_K_M"])
    reader = gguf.GGUFReader(path)
    with GGUFFile.open(path) as file:
        theirs = {tensor.name: tensor for tensor in reader.tensors}
        assert list(theirs) == list(file.tensors)
        for name, tensor in file.tensors.items():
            assert theirs[name].tensor_type == tensor.format.ggml_type
            assert (theirs[name].data.reshape(-1).view(np.uint8) == tensor.data).all()


def test_the_same_seed_gives_the_same_file(tmp_path: Path) -> None:
    files = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_model(tmp_path / name, SMALL, PRESETS["Q4_0"], seed=seed)
        files.append((tmp_path / name).read_bytes())
    assert files[0] == files[1] != files[2]


@pytest.mark.parametrize("size", [LEAST_SIZE + 1, 1000, 5000])
def test_every_text_survives_the_vocabulary(size: int) -> None:
    tokenizer = Tokenizer.from_metadata(vocabulary(size))
    text = "Hello there, naïve 世界! \x00\t\n"
    ids = tokenizer.encode(text, add_special=True, parse_special=False)
    assert tokenizer.vocab_size == size
    assert ids[0] == tokenizer.bos_id == size - 3
    assert tokenizer.decode(ids) == text
    assert len(ids) <= 1 + len(text.encode())


def test_a_vocabulary_without_room_for_bytes_is_refused() -> None:
    with pytest.raises(MartletError, match="at least 260"):
        vocabulary(LEAST_SIZE)


def test_a_broken_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"old")

    def stop(what: str, done_bytes: int, total_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_model(path, SMALL, PRESETS["Q4_0"], progress=stop)
    assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]
    assert path.read_bytes() == b"old"


def test_too_small_a_disk_is_told_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_file, "MARGIN_BYTES", 1 << 60)
    with pytest.raises(NoSpace, match="MiB free, the model needs"):
        write_model(tmp_path / "model.gguf", SMALL, PRESETS["Q4_0"])
    assert not list(tmp_path.iterdir())


def test_the_command_writes_a_file_and_names_what_it_knows(
    martlet: Martlet, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    small = ("--layers", "1", "--vocab-size", "300", "--type", "Q4_0")
    assert martlet("synthesize", "smollm2-135m", str(path), *small).returncode == 0
    with GGUFFile.open(path) as file:
        assert file.metadata["llama.block_count"] == 1
        assert file.tensors["token_embd.weight"].shape == (300, 576)
    wrong = martlet("synthesize", "llama-2b", str(path))
    assert wrong.returncode == 1
    assert all(name in wrong.stderr for name in SHAPES)
