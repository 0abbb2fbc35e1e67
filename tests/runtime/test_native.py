"""The C executor against the reference, op by op and model by model, on every ISA of the machine."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from martlet.quant.gguf_file import GGUFFile
from martlet.runtime.config import ModelConfig
from martlet.runtime.errors import ModelError
from martlet.runtime.executors.native import Library, NativeExecutor, NativeUnavailable
from martlet.runtime.executors.reference import ReferenceExecutor
from martlet.runtime.models import record_plan
from martlet.runtime.ops import KvType
from martlet.runtime.weights import StoredWeights

from .op_cases import OP_CASES, OpCase
from .tiny import BLOCK_FORMATS, Chunk, make_step, run_tokens, tiny_model

OP_TOLERANCE = 2e-5  # max |a - b| / max |b| of one op: float rounding alone
# A value on a rounding boundary of the int8 activations may fall to the other side, and then moves
# a product by one step of 1/254 of the block's largest value.
QUANTIZED_TOLERANCE = 2e-2
ORACLE_TOLERANCE = 1e-4  # transformers in fp32, F32 weights and cache

DATA = Path(__file__).parents[1] / "data" / "oracle"

try:
    LIBRARY = Library()
except NativeUnavailable as error:
    pytest.skip(f"native library: {error}", allow_module_level=True)
ISAS = [name for name, is_supported in LIBRARY.isas() if is_supported]


def relative_error(mine: np.ndarray, expected: np.ndarray) -> float:
    if not expected.size:
        return float(mine.shape != expected.shape)
    return float(np.abs(mine - expected).max() / max(np.abs(expected).max(), 1e-30))


@pytest.mark.parametrize("case", OP_CASES, ids=str)
def test_every_op_on_every_isa(case: OpCase) -> None:
    expected = case.run(ReferenceExecutor)
    runs = {isa: case.run(NativeExecutor, isa=isa, n_threads=2) for isa in ISAS}
    for isa, steps in runs.items():
        for mine, step in zip(steps, expected, strict=True):
            tolerance = QUANTIZED_TOLERANCE if case.show_blocks else OP_TOLERANCE
            assert relative_error(mine, step) <= tolerance, isa
        for mine, scalar in zip(steps, runs["scalar"], strict=True):
            np.testing.assert_array_equal(mine, scalar, err_msg=f"{isa} against scalar")
