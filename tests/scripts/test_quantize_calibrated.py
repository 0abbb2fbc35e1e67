"""`martlet quantize --calibrate` and `martlet imatrix`: whole commands on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from martlet.quant.errors import FileFormatError
from martlet.quant.gguf_file import GGUFFile
from martlet.quant.gguf_write import write_gguf
from martlet.quant.imatrix import read_imatrix
from martlet.quant.quantize import Plan, quantized_bytes
from martlet.runtime.model import load_model
from martlet.scripts.calibrated_plan import Budget, nearest_file_type

from ..runtime.tiny import tiny_model
from .conftest import Martlet
from .tiny_file import DIMS, write_tiny_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    floats = tiny_model("llama", dims=DIMS, formats=("F32",)).weights
    return write_tiny_model(tmp_path_factory.mktemp("calibrate") / "f32.gguf", weights=floats)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    words = ["".join(map(chr, rng.integers(97, 123, n))) for n in rng.integers(1, 9, 40)]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(rng.choice(words, 1600)))
    return path


def formats(path: Path) -> dict[str, str]:
    with GGUFFile.open(path) as file:
        return {name: t.format.name for name, t in file.tensors.items()}


def test_a_size_is_kept_and_used(
    martlet: Martlet, source: Path, text: Path, tmp_path: Path
) -> None:
    arguments = ["--calibrate", str(text), "-c", "64", "--tokens", "4096"]
    outs = [tmp_path / f"{i}.gguf" for i in range(2)]
    for out in outs:
        size = ["--size", "90%-of Q5_0"]
        done = martlet("quantize", str(source), str(out), *arguments, *size, "--json")
        assert done.returncode == 0, done.stderr
    assert outs[0].read_bytes() == outs[1].read_bytes()
    report = json.loads(done.stdout)
    with GGUFFile.open(source) as file:
        budget = Budget.parse("90%-of Q5_0").of(file)
    assert 0.97 * budget < report["file_bytes"] == outs[0].stat().st_size <= budget
    kept = {r["to"] for r in report["tensors"]}
    assert kept <= {"F32", "Q4_0", "IQ4_NL", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
    assert len(kept) > 2, "formats differ by tensor"
    with GGUFFile.open(outs[0]) as file:
        recipe = json.loads(file.metadata["martlet.quantize.recipe"])
        assert recipe["allocated"]
        assert recipe["tokens"] + 1024 >= 4096
    load_model(outs[0], executor="reference", context=32).close()


def test_a_preset_keeps_its_formats(
    martlet: Martlet, source: Path, text: Path, tmp_path: Path
) -> None:
    plain, fitted = tmp_path / "plain.gguf", tmp_path / "fitted.gguf"
    done = martlet("quantize", str(source), str(plain), "--type", "Q4_0")
    assert done.returncode == 0, done.stderr
    arguments = ["--calibrate", str(text), "-c", "64", "--tokens", "4096"]
    done = martlet("quantize", str(source), str(fitted), "--type", "Q4_0", *arguments)
    assert done.returncode == 0, done.stderr
    assert formats(plain)["blk.0.ffn_up.weight"] == formats(fitted)["blk.0.ffn_up.weight"] == "Q4_0"
    assert plain.read_bytes() != fitted.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "1M"], "add --calibrate"),
        (["--type", "Q4_0", "--bpw", "4"], "one of --type, --size and --bpw"),
        ([], "given: none"),
        (["--size", "95%-of Q9"], "Q9"),
        (["--size", "3000"], "is the least"),
        (["--bpw", "2"], "is the least"),
    ],
)
def test_refusals_leave_nothing(
    martlet: Martlet, source: Path, text: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    out = tmp_path / "out.gguf"
    if message != "add --calibrate":
        arguments = [*arguments, "--calibrate", str(text), "-c", "64", "--tokens", "4096"]
    done = martlet("quantize", str(source), str(out), *arguments)
    assert done.returncode != 0
    assert message in " ".join(done.stderr.split())
    assert not list(tmp_path.iterdir())


def test_budgets_as_people_write_them(source: Path) -> None:
    with GGUFFile.open(source) as file:
        assert Budget.parse("2K").of(file) == 2048
        whole, most = Budget.parse("Q5_0").of(file), Budget.parse("50%-of Q5_0").of(file)
        assert most == whole // 2
        stored = quantized_bytes(file, Plan({}, 0))
        assert abs(Budget(bits_per_weight=32).of(file) - stored) < 1024


def test_an_imatrix_of_the_text(martlet: Martlet, source: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "i.gguf"
    arguments = ["-f", str(text), "-o", str(out), "-c", "64", "--chunks", "4"]
    done = martlet("imatrix", str(source), *arguments)
    assert done.returncode == 0, done.stderr
    found = read_imatrix(out)
    assert (found.datasets, found.n_chunks) == (["words.txt"], 4)
    assert len(found.importance) == 7 * DIMS.n_layers
    assert np.array_equal(
        found.importance["blk.0.attn_q.weight"], found.importance["blk.0.attn_v.weight"]
    )
    quantized = tmp_path / "q.gguf"
    given = ["--type", "Q4_0", "--imatrix", str(out)]
    done = martlet("quantize", str(source), str(quantized), *given)
    assert done.returncode == 0, done.stderr


def test_the_nearest_file_type_is_that_of_most_weights(source: Path, tmp_path: Path) -> None:
    with GGUFFile.open(source) as file:
        matrices = [name for name, tensor in file.tensors.items() if len(tensor.shape) > 1]
        assert nearest_file_type(file, dict.fromkeys(matrices, "Q4_0")) == 2
        assert nearest_file_type(file, {}) == 0, "no matrix is in the plan: as it is, F32"
    write_gguf(tmp_path / "none.gguf", {}, [])
    with (
        GGUFFile.open(tmp_path / "none.gguf") as file,
        pytest.raises(FileFormatError, match="holds no tensors"),
    ):
        nearest_file_type(file, {})
