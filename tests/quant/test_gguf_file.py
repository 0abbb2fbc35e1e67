"""The GGUF reader on files that other tools write, and what it promises about memory."""

import logging
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from martlet.quant.errors import MartletError
from martlet.quant.formats import dequantize
from martlet.quant.gguf_file import GGUFFile

from . import gguf_bytes as gb


@pytest.fixture
def tiny_path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gb.tiny())
    return path


def test_every_value_type_is_read(tiny_path: Path) -> None:
    with GGUFFile.open(tiny_path) as file:
        metadata = dict(file.metadata)
    scores = metadata.pop("scores")
    nested = metadata.pop("nested")
    assert metadata == {
        "general.architecture": "llama",
        "u8": 255, "i8": -1, "u16": 65_535, "i16": -2, "u32": 2**32 - 1, "i32": -3, "f32": 0.5,
        "yes": True, "u64": 2**64 - 1, "i64": -4, "f64": 0.1,
        "tokens": ["a", "", "\udce2\udc96"],
        "flags": [True, False],
    }  # fmt: skip
    assert {type(metadata[key]) for key in ("u8", "i64", "u64")} == {int}
    assert {type(flag) for flag in (metadata["yes"], *metadata["flags"])} == {bool}
    assert (scores.dtype, scores.tolist()) == (np.float32, [-1.0, 2.0])
    assert scores.flags.owndata
    assert scores.flags.writeable
    assert [inner.tolist() for inner in nested] == [[7], []]


def test_token_bytes_survive_and_shown_text_is_always_printable(tmp_path: Path) -> None:
    raw = bytes(range(256))
    path = tmp_path / "bytes.gguf"
    path.write_bytes(
        gb.gguf(
            [
                gb.pair("tokens", gb.ARRAY, gb.array(gb.STRING, [gb.string(raw)])),
                gb.pair("general.name", gb.STRING, gb.string(b"bad \xff name")),
            ]
        )
    )
    with GGUFFile.open(path) as file:
        assert file.metadata["tokens"][0].encode("utf-8", "surrogateescape") == raw
        assert file.metadata["general.name"] == "bad \ufffd name"


def test_tensors_have_numpy_shapes_and_their_own_bytes(tiny_path: Path) -> None:
    with GGUFFile.open(tiny_path) as file:
        assert (file.version, file.alignment, file.path) == (3, 32, tiny_path)
        assert file.n_bytes == tiny_path.stat().st_size
        assert list(file.tensors) == ["q8", "f32"]
        q8, f32 = file.tensors.values()
        assert (q8.format.name, q8.shape, q8.n_weights, q8.n_bytes) == ("Q8_0", (2, 32), 64, 68)
        assert dequantize(q8.data, q8.format, q8.shape).tolist() == [list(range(32))] * 2
        assert dequantize(f32.data, f32.format, f32.shape).ravel().tolist() == list(range(64))


def test_version_2_reads_the_same(tiny_path: Path) -> None:
    raw = bytearray(tiny_path.read_bytes())
    raw[4] = 2
    tiny_path.write_bytes(raw)
    with GGUFFile.open(str(tiny_path)) as file:
        assert (file.version, len(file.tensors)) == (2, 2)


@pytest.mark.parametrize("alignment", [8, 64, 4096, 65_536])
def test_data_follow_the_alignment_key(tmp_path: Path, alignment: int) -> None:
    pairs = [gb.u32_pair("general.alignment", alignment)]
    tensors = [gb.tensor("a", [2]), gb.tensor("b", [2], offset=alignment)]
    data = b"A" * 8 + bytes(alignment - 8) + b"B" * 8 + bytes(alignment - 8)
    path = tmp_path / "aligned.gguf"
    path.write_bytes(gb.gguf(pairs, tensors, data, alignment=alignment))
    with GGUFFile.open(path) as file:
        assert file.alignment == alignment
        assert [t.data.tobytes() for t in file.tensors.values()] == [b"A" * 8, b"B" * 8]


def test_a_file_of_the_gguf_package_reads_back(tmp_path: Path) -> None:
    """Names, types, shapes and bytes as the package's own writer meant them."""
    logging.getLogger("gguf").setLevel(logging.ERROR)
    rng = np.random.default_rng(0)
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(["<s>", "\u2581a", "b"])
    writer.add_token_scores([0.0, -1.0, -2.0])
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    weights: dict[str, Any] = {
        "norm": rng.standard_normal(64).astype(np.float32),
        "half": rng.standard_normal((3, 64)).astype(np.float16),
    }
    for name, values in weights.items():
        writer.add_tensor(name, values)
    q4_1 = gguf.quants.quantize(
        rng.standard_normal((2, 3, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q4_1
    )
    writer.add_tensor("experts", q4_1, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with GGUFFile.open(path) as file:
        assert file.metadata["tokenizer.ggml.tokens"] == ["<s>", "\u2581a", "b"]
        assert file.metadata["tokenizer.ggml.scores"].tolist() == [0.0, -1.0, -2.0]
        for name, values in weights.items():
            tensor = file.tensors[name]
            assert np.array_equal(dequantize(tensor.data, tensor.format, tensor.shape), values)
        experts = file.tensors["experts"]
        assert (experts.format.name, experts.shape) == ("Q4_1", (2, 3, 64))
        assert np.array_equal(experts.data, q4_1.ravel())


def test_a_large_vocabulary_opens_in_linear_time(tmp_path: Path) -> None:
    """262,144 tokens, scores and types; the bound is many times what a busy machine needs."""
    n = 262_144
    pairs = [
        gb.pair("tokens", gb.ARRAY, gb.array(gb.STRING, [gb.string(f"t{i}") for i in range(n)])),
        gb.pair("scores", gb.ARRAY, gb.array(gb.F32, [bytes(4 * n)], count=n)),
        gb.pair("types", gb.ARRAY, gb.array(gb.I32, [bytes(4 * n)], count=n)),
    ]
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(gb.gguf(pairs))
    with gb.bounded(seconds=10.0), GGUFFile.open(path) as file:
        assert file.metadata["tokens"][-1] == f"t{n - 1}"
        assert len(file.metadata["scores"]) == len(file.metadata["types"]) == n


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")


@needs_proc
def test_closing_releases_the_map(tiny_path: Path) -> None:
    with GGUFFile.open(tiny_path) as file:
        assert is_mapped(tiny_path)
    assert not is_mapped(tiny_path)
    assert file.metadata["general.architecture"] == "llama"
    with pytest.raises(MartletError, match="is closed"):
        _ = file.tensors
    file.close()  # twice is fine


@needs_proc
def test_a_view_that_outlives_the_file_stays_valid(tiny_path: Path) -> None:
    with GGUFFile.open(tiny_path) as file:
        data = file.tensors["q8"].data
    assert data[2:34].tolist() == list(range(32))
    del data
    assert not is_mapped(tiny_path)


@needs_proc
def test_a_refused_file_is_not_left_mapped(tiny_path: Path) -> None:
    tiny_path.write_bytes(tiny_path.read_bytes()[:-1])
    with pytest.raises(MartletError) as caught:
        GGUFFile.open(tiny_path)
    assert not is_mapped(tiny_path), caught


def test_tensor_data_are_read_only(tiny_path: Path) -> None:
    with GGUFFile.open(tiny_path) as file:
        data = file.tensors["q8"].data
        with pytest.raises(ValueError, match="read-only"):
            data[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            data.flags.writeable = True
