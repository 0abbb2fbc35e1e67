"""The helpers other tests stand on: random weights are sane, every op case runs and differs."""

import numpy as np
import pytest
from martlet.quant.formats import FORMATS
from martlet.runtime.executors.reference import ReferenceExecutor
from martlet.runtime.ops import OpKind

from .op_cases import OP_CASES, OpCase
from .tiny import BLOCK_FORMATS, FLOAT_FORMATS, random_tensor, run_tokens, tiny_model

ARCHS = ("llama", "qwen2", "qwen3", "gemma3")


@pytest.mark.parametrize("name", [*FLOAT_FORMATS, *BLOCK_FORMATS])
def test_random_tensors_have_the_asked_spread(name: str) -> None:
    tensor = random_tensor(name, (16, 512), np.random.default_rng(1), std=0.5)
    values = tensor.format.decode(tensor.data.reshape(-1, FORMATS[name].nbytes))
    assert np.isfinite(values).all()
    assert 0.4 < values.std() < 0.65
    assert abs(values.mean()) < 0.1


@pytest.mark.parametrize("arch", ARCHS)
def test_tiny_models_give_lively_finite_logits(arch: str) -> None:
    model = tiny_model(arch, formats=("Q4_K", "Q6_K", "Q8_0"))
    executor = ReferenceExecutor(model.plan(), model.weights, n_blocks=2)
    logits = run_tokens(executor, list(range(40)))
    assert logits.shape == (40, 300)
    assert np.isfinite(logits).all()
    assert logits.std() > 0.1


@pytest.mark.parametrize("case", OP_CASES, ids=str)
def test_every_op_case_shows_its_op(case: OpCase) -> None:
    for step, shown in zip(case.steps, case.run(ReferenceExecutor), strict=True):
        assert len(shown) == step.n_out
        assert np.isfinite(shown).all()
        assert shown.size == 0 or shown.any()


def test_op_cases_cover_every_op() -> None:
    kinds = {op.kind for case in OP_CASES for op in case.build()[0].ops}
    assert kinds == set(OpKind)


def test_case_names_are_distinct() -> None:
    assert len({case.name for case in OP_CASES}) == len(OP_CASES)
