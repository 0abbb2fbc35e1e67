"""A model file in other formats: what is copied, what is encoded, what is refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from martlet.quant.encode import BadWeights, encode
from martlet.quant.errors import FileFormatError
from martlet.quant.formats import FORMATS, dequantize
from martlet.quant.gguf_field import Field
from martlet.quant.gguf_file import GGUFFile
from martlet.quant.gguf_part import read_stored_fields
from martlet.quant.gguf_write import OutTensor, write_gguf
from martlet.quant.quantize import Plan, TensorReport, quantize_file

RNG = np.random.default_rng(4)
VALUES = {
    "a": RNG.standard_normal((600, 256)).astype(np.float32),
    "stack": RNG.standard_normal((3, 4, 256)).astype(np.float32),
    "norm": np.ones(256, np.float32),
}
FIELDS = {
    "general.architecture": Field.string("llama"),
    "general.file_type": Field.uint32(0),
    "x.width": Field.number(3, 0),
    "x.empty": Field.strings([]),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_floats(tmp_path / "source.gguf", VALUES)


def write_floats(path: Path, values: dict[str, np.ndarray]) -> Path:
    def give(v: np.ndarray) -> Callable[[], np.ndarray]:
        return lambda: v

    tensors = [OutTensor(name, v.shape, FORMATS["F32"], give(v)) for name, v in values.items()]
    write_gguf(path, FIELDS, tensors)
    return path


def run(source: Path, plan: Plan, threads: int | None = None) -> tuple[Path, list[TensorReport]]:
    out = source.with_name("out.gguf")
    with GGUFFile.open(source) as file:
        return out, quantize_file(file, out, plan, threads=threads)


def stored(path: Path, name: str) -> np.ndarray:
    with GGUFFile.open(path) as file:
        tensor = file.tensors[name]
        return dequantize(tensor.data, tensor.format, tensor.shape)


def test_named_tensors_are_encoded_and_the_others_copied(source: Path) -> None:
    extra = {"martlet.note": Field.string("x")}
    out, reports = run(source, Plan({"a": "Q4_K", "stack": "Q8_0"}, 15, fields=extra))
    with GGUFFile.open(out) as file:
        assert [t.format.name for t in file.tensors.values()] == ["Q4_K", "Q8_0", "F32"]
        assert (file.tensors["a"].data == encode(VALUES["a"], "Q4_K").reshape(-1)).all()
    assert (stored(out, "norm") == VALUES["norm"]).all()
    versions = {"general.quantization_version": Field.uint32(2)}
    assert read_stored_fields(out) == FIELDS | versions | extra | {
        "general.file_type": Field.uint32(15)
    }
    assert [(r.source, r.format, r.n_bytes) for r in reports] == [
        ("F32", "Q4_K", 600 * 144),
        ("F32", "Q8_0", 12 * 8 * 34),
        ("F32", "F32", 1024),
    ]
    lost = stored(out, "a") - VALUES["a"]
    expected = np.sqrt((lost**2).sum() / (VALUES["a"] ** 2).sum())
    assert reports[0].relative_rmse == pytest.approx(expected, rel=1e-4)
    assert reports[2].relative_rmse == 0


def test_threads_change_nothing(source: Path) -> None:
    plan = Plan({"a": "Q6_K", "stack": "IQ4_NL"}, 18)
    one = run(source, plan, threads=1)[0].read_bytes()
    assert one == run(source, plan, threads=3)[0].read_bytes()


def test_each_matrix_of_a_stack_has_its_own_importance(source: Path) -> None:
    importance = np.exp(RNG.standard_normal((3, 256))).astype(np.float32)
    out, _ = run(source, Plan({"stack": "Q4_0"}, 2, importance={"stack": importance}))
    for k in range(3):
        alone = encode(VALUES["stack"][k], "Q4_0", importance[k])
        same = dequantize(alone.reshape(-1), FORMATS["Q4_0"], (4, 256))
        assert (stored(out, "stack")[k] == same).all()


def test_an_encoder_of_the_caller_s(source: Path) -> None:
    seen = []

    def mine(values: np.ndarray) -> np.ndarray:
        seen.append(values.copy())
        return encode(np.zeros_like(values), "Q4_0")

    out, reports = run(source, Plan({"a": "Q4_0"}, 2, encoders={"a": mine}))
    assert (seen[0] == VALUES["a"]).all()
    assert not stored(out, "a").any()
    assert reports[0].relative_rmse == 1


def test_blocks_of_the_wanted_format_are_copied_and_others_requantized(source: Path) -> None:
    first, _ = run(source, Plan({"a": "Q4_0", "stack": "Q4_0"}, 2))
    again = first.rename(source.with_name("first.gguf"))
    out, reports = run(again, Plan({"a": "Q4_0", "stack": "Q4_1"}, 2))
    assert (stored(out, "a") == stored(again, "a")).all()
    assert [r.is_requantized for r in reports] == [False, True, False]


@pytest.mark.parametrize("name", ["a", "stack", "norm"])
def test_weights_that_are_not_finite_are_named(tmp_path: Path, name: str) -> None:
    values = {key: value.copy() for key, value in VALUES.items()}
    values[name].reshape(-1)[-3] = np.nan
    source = write_floats(tmp_path / "bad.gguf", values)
    rows = values[name].size // 256
    with pytest.raises(BadWeights, match=rf"tensor '{name}': weight \[{rows - 1}, 253\] is nan"):
        run(source, Plan({"a": "Q4_0", "stack": "Q4_0"}, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["bad.gguf"]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan({"b": "Q4_0"}, 2), "has no tensor 'b'"),
        (Plan({}, 2, encoders={"b": encode}), "has no tensor 'b'"),  # type: ignore[dict-item]
        (
            Plan({"a": "Q4_0"}, 2, importance={"a": np.ones(128, np.float32)}),
            r"'a' has shape \(128,\), the tensor \(600, 256\)",
        ),
    ],
)
def test_a_plan_for_another_model_is_refused(source: Path, plan: Plan, message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        run(source, plan)
    assert [path.name for path in source.parent.iterdir()] == ["source.gguf"]


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_the_error_of_weights_whose_squares_float32_lacks(tmp_path: Path, size: float) -> None:
    rows = RNG.standard_normal((4, 256)).astype(np.float32)
    errors = []
    for scale in (1, size):
        source = write_floats(tmp_path / "s.gguf", {"a": (rows * np.float32(scale))})
        errors.append(run(source, Plan({"a": "BF16"}, 32))[1][0].relative_rmse)
    assert errors[1] == pytest.approx(errors[0], rel=0.2)
    assert errors[1] > 0


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"s\.gguf: holds no tensors"):
        run(write_floats(tmp_path / "s.gguf", {}), Plan({}, 0))
    assert not (tmp_path / "out.gguf").exists()
