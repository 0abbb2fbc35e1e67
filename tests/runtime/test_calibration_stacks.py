"""What each expert and each head reads: squares per matrix, as the ops of the reference take it."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any

import numpy as np
import pytest
from martlet.quant.encode import encode
from martlet.quant.formats import FORMATS, dequantize
from martlet.runtime.calibration import Calibrator
from martlet.runtime.calibration_stacks import PRIOR_ROWS, StackSquares, observed_stacks
from martlet.runtime.config import ModelConfig
from martlet.runtime.errors import ModelError
from martlet.runtime.executors.choice import executor_class
from martlet.runtime.executors.reference import ReferenceExecutor
from martlet.runtime.models import record_plan
from martlet.runtime.ops import BufferKind, KvType, OpKind
from martlet.runtime.weights import StoredTensor, StoredWeights, WeightSource

from ..recorded import recorded_model
from .tiny import run_tokens

TOKENS = [(7 * i) % 60 for i in range(40)]


def squares(config: ModelConfig, weights: WeightSource, executor: str) -> list[StackSquares]:
    calibrator = Calibrator(config, weights, context=40, executor=executor)
    moments, stacks = calibrator.empty(), calibrator.empty_stacks()
    calibrator.add(TOKENS, moments, stacks)
    calibrator.add(TOKENS[:10], moments, stacks)
    calibrator.close()
    return stacks


@cache
def rows_read(name: str) -> dict[tuple[str, int], np.ndarray]:
    """(tensor, matrix) -> the rows that went through it, by the ops of the reference themselves."""
    return rows_of(*recorded_model(name), [TOKENS, TOKENS[:10]])


def rows_of(
    config: ModelConfig, weights: WeightSource, texts: list[list[int]]
) -> dict[tuple[str, int], np.ndarray]:
    plan = record_plan(config, weights, 40, activations=BufferKind.F32)
    executor = ReferenceExecutor(plan, weights, n_blocks=2, kv_type=KvType.F32)
    found: dict[tuple[str, int], list[np.ndarray]] = defaultdict(list)

    def spied(kind: OpKind, run_op: Any) -> Any:
        def run_and_keep(run: Any, op: Any) -> None:
            x = run.floats(op.inputs[0])
            tensors = [plan.tensors[at] for at in op.weights if at >= 0]
            for tensor in (t for t in tensors if len(t.shape) == 3):
                n, _, cols = tensor.shape
                if kind is OpKind.HEAD_LINEAR:
                    for row in x.reshape(len(x), n, -1):
                        for k in range(n):
                            found[tensor.name, k].append(row[k, :cols].copy())
                else:
                    pairs = run.pairs(op)
                    each = range(len(x)) if kind is OpKind.EXPERT_SUM else pairs.rows
                    for row, k in zip(each, pairs.experts, strict=True):
                        found[tensor.name, int(k)].append(x[row].copy())
            run_op(run, op)

        return run_and_keep

    for kind in (OpKind.EXPERT_GLU, OpKind.EXPERT_SUM, OpKind.HEAD_LINEAR):
        executor._run_op[kind] = spied(kind, executor._run_op[kind])
    for tokens in texts:
        run_tokens(executor, tokens)
    return {key: np.array(rows) for key, rows in found.items()}


@pytest.mark.parametrize("executor", ["native", "reference"])
@pytest.mark.parametrize("name", ["qwen3moe", "deepseek2", "gpt-oss", "gemma4-moe"])
def test_squares_are_those_of_the_rows_that_the_ops_take(name: str, executor: str) -> None:
    try:
        executor_class(executor)
    except (ImportError, OSError, ModelError) as error:
        pytest.skip(f"{executor} is not available: {error}")
    expected = rows_read(name)
    stacks = squares(*recorded_model(name), executor)
    assert {n for sums in stacks for n in sums.weights} == {n for n, _ in expected}
    for sums in stacks:
        for weight in sums.weights:
            for k, n_rows in enumerate(sums.n_rows):
                rows = expected.get((weight, k), np.zeros((0, sums.squares.shape[1])))
                assert n_rows == len(rows)
                assert np.allclose(sums.squares[k], (rows**2).sum(axis=0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3moe", "deepseek2", "qwen3next", "granitehybrid"])
def test_every_matrix_is_a_product_s_or_a_stack_s(name: str) -> None:
    """But for embeddings, and what presets leave as it is."""
    config, weights = recorded_model(name)
    plan = record_plan(config, weights, 8, activations=BufferKind.F32, keep=True)
    from martlet.runtime.calibration import observed_inputs

    seen = [name for group in observed_inputs(plan).values() for name in group]
    seen += [name for stack in observed_stacks(plan) for name in stack.weights]
    assert len(set(seen)) == len(seen)
    rest = {n for n in weights.names() if len(weights.shape(n) or ()) > 1} - set(seen)
    kept = ("token_embd.weight", "ssm_conv1d.weight", "ssm_a", "ssm_d", "ssm_norm.weight")
    assert all(name.endswith(kept) for name in rest), rest


def test_few_rows_say_less_than_what_all_matrices_read() -> None:
    sums = StackSquares(("w",), 0, np.zeros(3, np.int64), np.zeros((3, 2)))
    assert np.array_equal(sums.means(), np.ones((3, 2)))
    rows = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    sums.add(rows, np.array([0, 2, 2]), 2)
    assert (sums.n_tokens, list(sums.n_rows)) == (2, [1, 0, 2])
    common = (rows**2).mean(axis=0)
    means = sums.means()
    assert np.allclose(means[1], common)
    assert np.allclose(means[0], (rows[0] ** 2 + PRIOR_ROWS * common) / (1 + PRIOR_ROWS))
    sums.add(np.repeat(rows[:1], 4000, axis=0), np.ones(4000, np.int64), 2)
    assert np.allclose(sums.means()[1], rows[0] ** 2, rtol=0.01)


def test_experts_rounded_by_what_they_read_lose_less() -> None:
    """The error of their outputs, on tokens that were not read before."""
    config, recorded = recorded_model("qwen3moe")
    rng = np.random.default_rng(0)
    values = {name: recorded.dequantized(name) for name in recorded.names()}
    for name, v in values.items():
        if name.endswith("ffn_norm.weight"):  # channels of very different sizes
            values[name] = v * np.exp(1.5 * rng.standard_normal(v.shape)).astype(np.float32)
    weights = StoredWeights({n: StoredTensor.from_floats(v) for n, v in values.items()})
    unseen = rows_of(config, weights, [[int(t) for t in rng.integers(0, 60, 40)]])
    for sums in squares(config, weights, "reference"):
        for name in sums.weights:
            lost = {"even": 0.0, "text": 0.0}
            for k, importance in enumerate(sums.means().astype(np.float32)):
                w, rows = values[name][k], unseen.get((name, k), np.zeros((0, 32), np.float32))
                for how, given in (("even", None), ("text", importance)):
                    data = encode(w, "Q4_0", given)
                    rest = w - dequantize(data.reshape(-1), FORMATS["Q4_0"], w.shape)
                    lost[how] += float(((rows @ rest.T) ** 2).sum())
            # What goes into `down` is about as large in all channels of a random model.
            assert lost["text"] < (0.97 if "down" in name else 0.7) * lost["even"], name
