"""Statistics of a text become estimates that hold for roundings they were not made with."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from martlet.quant.allocate import allocate
from martlet.quant.errors import MartletError
from martlet.quant.formats import FORMATS, dequantize
from martlet.quant.gptq import Feedback
from martlet.runtime.weights import StoredTensor, StoredWeights
from martlet.scripts import calibrated
from martlet.scripts.calibrated import Matrix, Texts, TextTooShort
from martlet.scripts.logit_stats import log_softmax
from martlet.scripts.trial import Trial

from ..runtime.tiny import TinyDims, TinyModel, tiny_model

DIMS = TinyDims(dim=64, ffn_dim=96, heads=4, kv_heads=2, head_dim=16, n_layers=2, vocab_size=90)


def chunks(n: int, context: int = 64, seed: int = 0) -> list[list[int]]:
    """Walks that prefer some tokens, so that channels differ."""
    rng = np.random.default_rng(seed)
    tokens = (90 * rng.random((n, context)) ** 3).astype(int)
    return [list(map(int, row)) for row in tokens]


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return tiny_model("llama", formats=("F32",), dims=DIMS)


@pytest.fixture(scope="module")
def matrices(model: TinyModel) -> list[Matrix]:
    texts = Texts.split(chunks(100), 8192)
    found, _ = calibrated.observe(model.config, model.weights, texts)
    trial = Trial(model.config, model.weights, texts.trial)
    calibrated.count_lookups(found, trial)
    calibrated.measure_sensitivities(found, trial, lambda: None)
    calibrated.estimate_errors(found, model.weights, lambda: None)
    return found


def test_no_chunk_serves_twice() -> None:
    texts = Texts.split(chunks(100), 6400)
    seen = [tuple(c) for part in (*texts.halves, texts.trial) for c in part]
    assert len(seen) == len(set(seen)) == 100
    assert abs(len(texts.halves[0]) - len(texts.halves[1])) <= 1
    assert len(texts.trial) * 64 == calibrated.TRIAL_TOKENS
    few = Texts.split(chunks(100), 4096)
    assert sum(map(len, few.halves)) == 64
    with pytest.raises(TextTooShort, match="4096 are the least"):
        Texts.split(chunks(20), 6400)


def test_trials_of_large_models_run_fewer_tokens() -> None:
    def tokens(cols: int, layers: int) -> int:
        body = {f"blk.{i}.ffn_up.weight": (4 * cols, cols) for i in range(layers)}
        head = {"token_embd.weight": (262144, cols), "output_norm.weight": (cols,)}
        return calibrated.trial_tokens(body | head)

    assert tokens(64, 4) == calibrated.TRIAL_TOKENS  # the embedding is no part of a trial's layers
    assert tokens(8192, 100) == calibrated.LEAST_TRIAL_TOKENS
    between = [tokens(1024, layers) for layers in (32, 36, 40)]
    assert between[0] > between[1] > between[2] > calibrated.LEAST_TRIAL_TOKENS
    assert between[0] < calibrated.TRIAL_TOKENS


def test_trials_run_several_texts() -> None:
    def lengths(context: int, n_tokens: int, n_chunks: int = 80) -> list[int]:
        texts = Texts.split(chunks(n_chunks, context), 8192, n_tokens)
        return [len(chunk) for chunk in texts.trial]

    assert lengths(512, 1024) == [128] * 8
    assert lengths(512, 512) == [64] * 8
    assert lengths(32, 1024, 400) == [32] * 32
    assert lengths(512, 1024, 12) == [341] * 3  # a short text keeps most of itself for moments
    assert lengths(4096, 1024, 4) == [1024]


def test_moments_that_do_not_fit_are_refused_with_both_numbers(
    model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # per layer 64 wide for q k v, for the output, for gate and up, and 96 for down; then the head
    need = 2 * 8 * (2 * (3 * 64 * 65 + 96 * 97) + 64 * 65)
    texts = Texts.split(chunks(80), 8192)
    monkeypatch.setattr(calibrated, "memory", lambda: SimpleNamespace(available_bytes=need - 1))
    with pytest.raises(MartletError, match=f"take {need} bytes, {need - 1} are free"):
        calibrated.observe(model.config, model.weights, texts)


def test_a_change_of_nothing_diverges_by_nothing(model: TinyModel) -> None:
    names = {n for n in model.weights.names() if n.endswith("weight")}
    trial = Trial(model.config, model.weights, chunks(4))
    found = dict(trial.divergences(names, lambda name, values: values.copy()))
    assert found.keys() == names
    assert max(map(abs, found.values())) < 1e-9


def test_divergence_is_that_of_the_two_models(model: TinyModel) -> None:
    """Of the embedding too, which is read at both ends of this model."""
    sequences = chunks(3, seed=1)
    trial = Trial(model.config, model.weights, sequences)
    for name in ("token_embd.weight", "blk.0.ffn_up.weight"):
        ((_, found),) = trial.divergences({name}, lambda _, values: values * np.float32(1.1))
        tensors = {
            n: StoredTensor.from_floats(
                model.weights.dequantized(n) * np.float32(1.1 if n == name else 1)
            )
            for n in model.weights.names()
        }
        p, q = (
            logits(m, sequences) for m in (model, TinyModel(model.config, StoredWeights(tensors)))
        )
        expected = float((np.exp(p) * (p - q)).sum(axis=1).mean())
        assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("changes", [{"logit_scale": 0.25}, {"logit_cap": 1.5}])
def test_divergence_is_that_of_scaled_and_capped_logits(
    model: TinyModel, changes: dict[str, float]
) -> None:
    """As Granite scales logits, and Gemma 2 caps them: both flatten what is predicted."""
    from martlet.runtime.executors.reference import ReferenceExecutor
    from martlet.runtime.models import record_plan
    from martlet.runtime.ops import BufferKind, KvType

    from ..runtime.tiny import run_tokens

    config = replace(model.config, **changes)
    tokens, name = chunks(1, seed=1)[0], "blk.0.ffn_up.weight"
    trial = Trial(config, model.weights, [tokens])
    ((_, found),) = trial.divergences({name}, lambda _, values: values * np.float32(1.2))
    predictions = []
    for factor in (1, 1.2):
        values = {n: model.weights.dequantized(n) for n in model.weights.names()}
        values[name] = values[name] * np.float32(factor)
        weights = StoredWeights({n: StoredTensor.from_floats(v) for n, v in values.items()})
        plan = record_plan(config, weights, 64, activations=BufferKind.F32)
        executor = ReferenceExecutor(plan, weights, n_blocks=4, kv_type=KvType.F32)
        predictions.append(log_softmax(run_tokens(executor, tokens)))
    p, q = predictions
    assert found == pytest.approx(float((np.exp(p) * (p - q)).sum(axis=1).mean()), rel=1e-3)


def test_the_uses_of_a_tied_embedding_are_told_apart(model: TinyModel) -> None:
    sequences = [[token % 45 for token in chunk] for chunk in chunks(3, seed=3)]
    trial = Trial(model.config, model.weights, sequences)

    def upper_rows(_: str, values: np.ndarray) -> np.ndarray:
        return np.concatenate([values[:45], values[45:] * np.float32(1.1)])

    looked_up, computed = trial.divergences_of_tied(upper_rows)
    assert abs(looked_up) < 1e-9 < 1e-5 < computed
    looked_up, computed = trial.divergences_of_tied(lambda _, values: values * np.float32(1.1))
    ((_, both),) = trial.divergences({"token_embd.weight"}, lambda _, values: values * 1.1)
    assert min(looked_up, computed) > 1e-5
    assert both < 4 * max(looked_up, computed)


def test_lookups_of_a_tied_embedding_count_alike_in_all_columns(model: TinyModel) -> None:
    texts = Texts.split(chunks(100), 8192, 48)  # trials shorter than the chunks that are read
    found, _ = calibrated.observe(model.config, model.weights, texts)
    before = {m.name: m.moment() for m in found}
    calibrated.count_lookups(found, Trial(model.config, model.weights, texts.trial))
    for m in found:
        added = m.moment() - before[m.name]
        if m.name == "token_embd.weight":
            even = added[0, 0]
            assert even > 0
            assert np.allclose(added, even * np.eye(len(added)), atol=1e-9 * even)
            assert np.allclose(m.seen.squares / m.seen.n_rows, m.seen.mean_products().diagonal())
        else:
            assert not added.any()


def logits(model: TinyModel, sequences: list[list[int]]) -> np.ndarray:
    from martlet.runtime.dense import DenseRunner

    dense = DenseRunner(model.config, model.weights, sequences)
    run = dense.begin()
    dense.advance(run, 0)
    return log_softmax(run.hidden() @ model.weights.dequantized("token_embd.weight").T)


def test_estimates_foretell_the_divergence_of_a_rounded_weight(
    model: TinyModel, matrices: list[Matrix]
) -> None:
    trial = Trial(model.config, model.weights, chunks(8, seed=2))  # of tokens not seen before
    by_name = {m.name: m for m in matrices}

    def rounded(name: str, values: np.ndarray) -> np.ndarray:
        m = by_name[name]
        feedback = Feedback.of(m.moment(), m.shrinkage) if m.shrinkage < 1 else None
        data = calibrated.final_blocks(m, "Q4_0", values, feedback, None)
        return dequantize(data.reshape(-1), FORMATS["Q4_0"], values.shape)

    for name, divergence in trial.divergences(by_name.keys(), rounded):
        assert divergence / 3 < by_name[name].cost("Q4_0") < 3 * divergence, name


def test_every_matrix_has_choices_and_more_bytes_cost_less(matrices: list[Matrix]) -> None:
    assert {m.role for m in matrices} == {
        "token_embd.weight",
        *(f"blk.attn_{k}.weight" for k in ("q", "k", "v", "output")),
        *(f"blk.ffn_{k}.weight" for k in ("gate", "up", "down")),
    }
    choices = {m.name: m.choices() for m in matrices}
    least = sum(min(c.n_bytes for c in each) for each in choices.values())
    costs = [
        sum(c.cost for c in allocate(choices, int(least * factor)).values())
        for factor in (1, 1.1, 1.3, 1.6, 2)
    ]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < costs[0] / 50
