"""Blocks that predict further tokens: their tensors in a file, and how they are left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from martlet.quant.convert import Conversion, read_conversion
from martlet.quant.convert_nextn import count_blocks
from martlet.quant.errors import FileFormatError, UnsupportedError
from martlet.scripts.convert_facts import reader_facts

from .. import nextn
from ..recorded import RECORDED
from .checkpoints import copied, rewrite, stored_arrays

NEEDED = {"eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head_norm.weight"}


def read(folder: Path, **options: bool) -> Conversion:
    return read_conversion(folder, reader_facts(), **options)


def parts(conversion: Conversion) -> dict[str, tuple[int, ...]]:
    """Of the block behind the last layer: names and shapes."""
    n = conversion.settings.n_layers
    stem = f"blk.{n}."
    return {w.name.removeprefix(stem): w.shape for w in conversion.weights if stem in w.name}


@pytest.mark.parametrize("name", nextn.NAMES)
def test_a_block_is_a_layer_and_what_joins_two_rows(name: str) -> None:
    conversion = read(nextn.checkpoint(name))
    found, arch = parts(conversion), conversion.settings.family.arch
    own = {part.removeprefix("nextn."): shape for part, shape in found.items() if "nextn." in part}
    tables = {"embed_tokens.weight", "shared_head_head.weight"}
    assert own.keys() == NEEDED | (tables if name in nextn.OWN_TABLES else set())
    assert own["eh_proj.weight"] == (32, 64)
    layer = f"blk.{nextn.LIKE[name]}."
    like = {w.name.removeprefix(layer): w.shape for w in conversion.weights if layer in w.name}
    assert {part: shape for part, shape in found.items() if "nextn." not in part} == like
    metadata, n_layers = conversion.metadata("", 0), conversion.settings.n_layers
    assert metadata[f"{arch}.block_count"] == n_layers + 1
    assert metadata[f"{arch}.nextn_predict_layers"] == 1
    recurrent = metadata.get(f"{arch}.attention.recurrent_layers", [False] * (n_layers + 1))
    assert len(recurrent) == n_layers + 1
    assert not recurrent[-1]


@pytest.mark.parametrize("name", nextn.NAMES)
def test_without_it_the_file_is_that_of_a_checkpoint_without_it(name: str) -> None:
    without, plain = read(nextn.checkpoint(name), nextn=False), read(RECORDED / name)
    assert [w.name for w in without.weights] == [w.name for w in plain.weights]
    keys, expected = without.metadata("", 0), plain.metadata("", 0)
    assert keys.keys() == expected.keys()
    arch = plain.settings.family.arch
    assert {k: v for k, v in keys.items() if k.startswith(arch)} == {
        k: v for k, v in expected.items() if k.startswith(arch)
    }


def test_qwen_s_block_is_known_inside_the_model_as_well(tmp_path: Path) -> None:
    plain, folder = nextn.checkpoint("qwen35"), copied("qwen35", tmp_path)
    stored = stored_arrays(plain)
    inside = {f"model.{key}" if key.startswith("mtp.") else key: v for key, v in stored.items()}
    assert inside.keys() != stored.keys()
    rewrite(folder, inside)
    assert parts(read(folder)) == parts(read(plain))
    assert count_blocks(inside, 5) == 1


def test_norms_of_qwen_hold_the_sum() -> None:
    conversion = read(nextn.checkpoint("qwen35"))
    stored = stored_arrays(nextn.checkpoint("qwen35"))["mtp.pre_fc_norm_hidden.weight"]
    weight = next(w for w in conversion.weights if w.name.endswith("nextn.hnorm.weight"))
    floats = (stored.astype(np.uint32) << 16).view(np.float32)
    assert (weight.rows(0, 32) == floats + 1).all()


def test_a_block_without_its_parts_is_refused(tmp_path: Path) -> None:
    stored = stored_arrays(nextn.checkpoint("glm4moe"))
    folder = copied("glm4moe", tmp_path)
    del stored["model.layers.2.hnorm.weight"]
    rewrite(folder, stored)
    with pytest.raises(FileFormatError, match=r"layers\.2\.hnorm\.weight.*missing"):
        read(folder)
    read(folder, nextn=False)


def test_several_blocks_of_one_product_are_refused() -> None:
    names = [f"mtp.layers.{n}.input_layernorm.weight" for n in range(2)]
    with pytest.raises(UnsupportedError, match="--no-nextn"):
        count_blocks(names, 4)
    assert count_blocks(names[:1], 4) == 1
    assert count_blocks([f"model.layers.{n}.eh_proj.weight" for n in (3, 4, 5)], 4) == 2
