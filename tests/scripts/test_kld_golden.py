"""What llama-perplexity said of two small float models, and the file of base logits it wrote.

tests/data/quality/llama-perplexity.txt holds its words and the commands; base.gguf and test.gguf
are tests/scripts/test_kld.py's noisy(0) and noisy(0.02) in a vocabulary of bytes."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from martlet.scripts.base_logits import BaseLogits
from martlet.scripts.comparison import Text, compare
from martlet.scripts.console import chunk_progress
from martlet.scripts.logit_stats import Divergence
from martlet.scripts.options import ActivationsName, ExecutorName, KvTypeName, LoadOptions
from martlet.scripts.scored_text import read_text

from .conftest import Martlet

DATA = Path(__file__).parents[1] / "data" / "quality"
BASE, TEST, LOGITS = (str(DATA / name) for name in ("base.gguf", "test.gguf", "base.logits"))
TEXT = read_text(DATA / "text.txt")
ALL = Text(TEXT, 32, None)
FLOAT = LoadOptions(
    executor=ExecutorName.reference, activations=ActivationsName.f32, kv_type=KvTypeName.f32
)
F16_CACHE = 1e-3  # nats that a key or value in float16 moves a log-probability here

# Labels of llama-perplexity and (value, error) here; errors are those over tokens.
MEASURES = {
    r"Mean PPL\(Q\)": "perplexity",
    r"Mean PPL\(base\)": "perplexity_base",
    r"Mean ln\(PPL\(Q\)/PPL\(base\)\)": "ln_perplexity_ratio",
    r"Mean PPL\(Q\)-PPL\(base\)": "perplexity_change",
    "Mean    KLD": "mean_kl",
    "RMS Δp": "rms_dp",
    "Same top p": "same_top",
}
KL_QUANTILES = {"99.9%   KLD": "p99_9", "99.0%   KLD": "p99", "95.0%   KLD": "p95"}


def said(label: str) -> list[float]:
    """The numbers behind a label, percent as they are."""
    line = re.search(rf"^{label}\s*:(.*)$", (DATA / "llama-perplexity.txt").read_text(), re.M)
    assert line, label
    return [float(number) for number in re.findall(r"-?\d+\.\d+", line[1])]


@pytest.fixture(scope="module")
def found() -> Divergence:
    (scores,) = compare(LOGITS, [TEST], Text(None, None, None), FLOAT, chunk_progress).scores
    return Divergence.of(scores)


@pytest.mark.parametrize(("label", "name"), MEASURES.items(), ids=MEASURES.values())
def test_figures_and_their_errors(found: Divergence, label: str, name: str) -> None:
    estimate = getattr(found, name)
    percent = 100 if name in ("rms_dp", "same_top") else 1
    value, error = said(label)
    last_digit = 1e-3 if percent == 100 else 1e-6
    near = {"rel": 1e-5, "abs": last_digit}
    assert percent * estimate.token_error == pytest.approx(error, **near)
    # The change is a small difference of two perplexities of 1,245.
    near["abs"] = 1e-3 if name == "perplexity_change" else last_digit
    assert percent * estimate.value == pytest.approx(value, **near)


@pytest.mark.parametrize(("label", "name"), KL_QUANTILES.items())
def test_quantiles(found: Divergence, label: str, name: str) -> None:
    assert found.quantiles_kl[name] == pytest.approx(said(label)[0], rel=1e-4)


def test_median_and_maximum(found: Divergence) -> None:
    assert found.median_kl == pytest.approx(said("Median  KLD")[0], rel=1e-4)
    assert found.max_kl == pytest.approx(said("Maximum KLD")[0], rel=1e-4)


def test_both_write_the_same_base(tmp_path: Path) -> None:
    path = tmp_path / "base"
    compare(BASE, [], ALL, FLOAT, chunk_progress, save_base=path)
    theirs, ours = BaseLogits.open(Path(LOGITS)), BaseLogits.open(path)
    assert ours.path.stat().st_size == theirs.path.stat().st_size
    assert (ours.tokens == theirs.tokens).all()
    assert ours.n_vocab == theirs.n_vocab
    for chunk in range(len(theirs.tokens)):
        a, b = (file.rows(chunk, slice(0, 15)) for file in (ours, theirs))
        assert np.abs(np.exp(a) - np.exp(b)).max() < F16_CACHE


def test_the_base_as_a_model_says_the_same(found: Divergence) -> None:
    (scores,) = compare(BASE, [TEST], ALL, FLOAT, chunk_progress).scores
    exact = Divergence.of(scores)
    assert exact.mean_kl.value == pytest.approx(found.mean_kl.value, rel=2e-3)
    assert exact.perplexity_base.value == pytest.approx(found.perplexity_base.value, rel=1e-4)


def test_perplexity_alone(martlet: Martlet) -> None:
    options = ["-f", str(DATA / "text.txt"), "-c", "32", "--executor", "reference"]
    exact = ["--activations", "f32", "--kv-type", "f32", "--json"]
    result = json.loads(martlet("perplexity", TEST, *options, *exact).stdout)
    value, error = said(r"Mean PPL\(Q\)")
    assert result["perplexity"] == pytest.approx(value, rel=1e-5)
    assert result["standard_error"] == pytest.approx(error, rel=1e-5)
