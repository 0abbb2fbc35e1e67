"""`martlet quantize`: the whole command, on a model that runs."""

import json
from pathlib import Path

import numpy as np
import pytest
from martlet.quant.gguf_file import GGUFFile
from martlet.quant.mixtures import PRESETS, mixture
from martlet.runtime.model import load_model
from martlet.scripts.shapes import Shape
from martlet.scripts.synthesize import write_model

from ..quant.imatrix_bytes import write_imatrix
from ..runtime.tiny import Chunk, make_step
from .conftest import Martlet

F16 = PRESETS["F16"]
SMALL = Shape("small", "llama", 256, 512, 2, 4, 2, 64, 300, 64, 1e4, 1e-5)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantize") / "f16.gguf"
    write_model(path, SMALL, F16)
    return path


def logits(path: Path) -> np.ndarray:
    model = load_model(path, executor="reference", context=32)
    values = model.executor.run(make_step([Chunk([1, 2, 3], 0, [0])]))
    model.close()
    return np.asarray(values)


def test_a_preset_by_name(martlet: Martlet, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "q.gguf"
    done = martlet("quantize", str(source), str(out), "--type", "q4_k_m", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    with GGUFFile.open(out) as file, GGUFFile.open(source) as before:
        shapes = {t.name: t.shape for t in before.tensors.values()}
        wanted = mixture(PRESETS["Q4_K_M"], before.metadata, shapes)
        assert {t.name: t.format.name for t in file.tensors.values()} == {
            name: wanted.get(name, "F32") for name in shapes
        }
        assert file.metadata["general.file_type"] == 15
        assert [row["to"] for row in report["tensors"]] == [
            t.format.name for t in file.tensors.values()
        ]
    assert report["file_bytes"] == out.stat().st_size
    assert all(0 < r["relative_rmse"] < 0.1 for r in report["tensors"] if r["from"] != r["to"])
    before_, after = logits(source), logits(out)
    assert np.corrcoef(before_.reshape(-1), after.reshape(-1))[0, 1] > 0.97


def test_options_and_a_dry_run(martlet: Martlet, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "q.gguf"
    given = ["--type", "Q4_K_M", "--pure", "--tensor-type", r"\.attn_v=q8_0"]
    given += ["--token-embedding-type", "Q5_1"]
    dry = martlet("quantize", str(source), str(out), *given, "--dry-run", "--json")
    assert not out.exists()
    done = martlet("quantize", str(source), str(out), *given, "--json")
    assert done.returncode == 0, done.stderr
    plan, report = json.loads(dry.stdout), json.loads(done.stdout)
    assert [r["bytes"] for r in plan["tensors"]] == [r["bytes"] for r in report["tensors"]]
    formats = {row["name"]: row["to"] for row in report["tensors"]}
    assert formats["token_embd.weight"] == "Q5_1"
    assert formats["blk.1.attn_v.weight"] == "Q8_0"
    assert formats["blk.1.ffn_down.weight"] == "Q4_K"
    text = martlet("quantize", str(source), str(out), *given).stdout
    assert "blk.1.attn_v.weight" in text
    assert "bits per weight (Q4_K_M)" in text


def test_what_a_fallback_replaced_is_told(martlet: Martlet, tmp_path: Path) -> None:
    """Rows of 96 fill blocks of 32, rows of 256 those of 256."""
    source, out = tmp_path / "f16.gguf", tmp_path / "q.gguf"
    write_model(source, Shape("odd", "llama", 96, 256, 2, 3, 3, 32, 300, 64, 1e4, 1e-5), F16)
    arguments = ("quantize", str(source), str(out), "--type", "Q4_K_S")
    report = json.loads(martlet(*arguments, "--json").stdout)
    rows = {row["name"]: (row["wanted"], row["to"]) for row in report["tensors"]}
    assert rows["blk.1.attn_q.weight"] == ("Q4_K", "Q5_0")
    assert rows["blk.1.ffn_down.weight"] == ("Q4_K", "Q4_K")
    assert rows["token_embd.weight"] == ("Q6_K", "Q8_0")
    told = {(sum_["wanted"], sum_["to"]): sum_ for sum_ in report["fallbacks"]}
    assert {formats: sum_["n_tensors"] for formats, sum_ in told.items()} == {
        formats: list(rows.values()).count(formats) for formats in told
    }
    embedding = told["Q6_K", "Q8_0"]
    assert embedding["bytes"] == 300 * 96 // 32 * 34
    assert embedding["wanted_bytes"] == 300 * 96 * 210 // 256
    text = martlet(*arguments, "--dry-run").stdout
    line = next(line for line in text.splitlines() if line.startswith("blk.1.attn_q.weight"))
    assert line.endswith("instead of Q4_K")
    assert "1 tensors are Q8_0 instead of Q6_K, as their rows are no multiple of 256: +" in text


def test_a_file_whose_rows_fit_speaks_of_no_fallback(martlet: Martlet, source: Path) -> None:
    done = martlet("quantize", str(source), "none.gguf", "--type", "Q4_K_M", "--dry-run")
    assert "instead" not in done.stdout


def test_importance_from_a_file(martlet: Martlet, source: Path, tmp_path: Path) -> None:
    out, imatrix = tmp_path / "q.gguf", tmp_path / "i.gguf"
    name = "blk.0.ffn_up.weight"
    write_imatrix(imatrix, {name: np.arange(256.0)[None]}, {name: np.ones((1, 1))})
    arguments = ("quantize", str(source), str(out), "--type", "Q4_0", "--imatrix", str(imatrix))
    assert martlet(*arguments).returncode == 0
    plain = tmp_path / "plain.gguf"
    assert martlet("quantize", str(source), str(plain), "--type", "Q4_0").returncode == 0
    with GGUFFile.open(out) as with_it, GGUFFile.open(plain) as without:
        changed = [
            key for key, t in with_it.tensors.items() if (t.data != without.tensors[key].data).any()
        ]
        assert changed == [name]
        assert with_it.metadata["quantize.imatrix.file"] == "i.gguf"
        assert with_it.metadata["quantize.imatrix.chunks_count"] == 3
    write_imatrix(imatrix, {"other": np.ones((1, 4))}, {"other": np.ones((1, 1))})
    wrong = martlet(*arguments)
    assert wrong.returncode == 1
    assert "it was made for another model" in wrong.stderr


def test_a_quantized_source_is_told_of(martlet: Martlet, source: Path, tmp_path: Path) -> None:
    first, out = tmp_path / "q8.gguf", tmp_path / "q4.gguf"
    martlet("quantize", str(source), str(first), "--type", "Q8_0")
    done = martlet("quantize", str(first), str(out), "--type", "Q4_0")
    assert done.returncode == 0
    assert "WARNING: 15 tensors of" in done.stderr
    assert "quantized already (Q8_0)" in done.stderr


def test_a_source_cut_short_leaves_nothing(martlet: Martlet, source: Path, tmp_path: Path) -> None:
    cut, out = tmp_path / "cut.gguf", tmp_path / "out.gguf"
    cut.write_bytes(source.read_bytes()[:-40])
    done = martlet("quantize", str(cut), str(out), "--type", "Q4_0")
    assert done.returncode == 1
    assert "damaged or was cut short" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["cut.gguf"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--type", "Q9"), "no type is called 'Q9'"),
        (("--type", "Q4_0", "--tensor-type", "attn_v"), "'attn_v' is not REGEX=FORMAT"),
        (("--type", "Q4_0", "--tensor-type", "(=Q8_0"), "no regular expression"),
        (("--type", "Q4_0", "--output-tensor-type", "Q4_K_M"), "no format is called 'Q4_K_M'"),
    ],
)
def test_wrong_options_are_one_line(
    martlet: Martlet, source: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = martlet("quantize", str(source), str(tmp_path / "o.gguf"), *arguments)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_source_is_not_overwritten(martlet: Martlet, source: Path) -> None:
    before = source.read_bytes()
    done = martlet("quantize", str(source), str(source), "--type", "Q4_0")
    assert "OUT.gguf is IN.gguf" in done.stderr
    assert source.read_bytes() == before
