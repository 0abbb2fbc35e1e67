"""What loading costs in memory: the mapped file is given back while it is read."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
from martlet.quant.file_map import FileMap
from martlet.runtime.executors.native import NativeExecutor
from martlet.runtime.models import record_plan
from martlet.runtime.weights import StoredTensor, StoredWeights

from .native_library import ISAS
from .tiny import TinyDims, TinyModel, tiny_model

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
MOST = 1.15  # times what stays

pytestmark = pytest.mark.skipif(not ISAS, reason="no native library")


def resident_bytes(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def written(model: TinyModel, path: Path) -> dict[str, tuple[int, StoredTensor]]:
    """Every tensor's bytes in one file, and where they begin."""
    places, at = {}, 0
    with path.open("wb") as file:
        for name in model.weights.names():
            tensor = model.weights._tensors[name]
            places[name] = at, StoredTensor(tensor.format, tensor.shape, tensor.data[:0])
            at += file.write(tensor.data.tobytes())
    return places


def mapped(places: dict[str, tuple[int, StoredTensor]], path: Path) -> StoredWeights:
    memory = FileMap.open(path)
    return StoredWeights(
        {
            name: StoredTensor(
                tensor.format,
                tensor.shape,
                np.frombuffer(memory, np.uint8, tensor.format.data_bytes(tensor.shape), at),
            )
            for name, (at, tensor) in places.items()
        }
    )


@pytest.mark.skipif(not CLEAR.exists(), reason="this system does not tell peaks of memory")
@pytest.mark.parametrize("fmt", ["Q8_0", "Q4_K", "F16"])
def test_the_peak_while_loading_is_little_more_than_what_stays(fmt: str, tmp_path: Path) -> None:
    dims = TinyDims(dim=1024, ffn_dim=4096, n_layers=3, vocab_size=8192)
    model = tiny_model(formats=(fmt,), dims=dims)
    config, path = model.config, tmp_path / "weights"
    weights = mapped(written(model, path), path)
    del model
    gc.collect()
    CLEAR.write_text(RESET_PEAK)
    before = resident_bytes("VmRSS")
    executor = NativeExecutor(record_plan(config, weights, 8), weights, n_blocks=4, n_threads=2)
    grown = resident_bytes("VmHWM") - before
    stays = executor.weight_bytes + executor.kv_bytes + executor.arena_bytes
    executor.close()
    assert stays > 25 << 20
    assert grown <= MOST * stays
