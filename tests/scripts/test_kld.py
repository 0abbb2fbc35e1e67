"""`martlet kld` and `divergence` on tiny files, against the definitions done the slow way."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from martlet.quant.formats import FORMATS, dequantize
from martlet.runtime.weights import StoredTensor, StoredWeights
from martlet.scripts import comparison
from martlet.scripts.base_logits import BaseLogits
from martlet.scripts.comparison import FileBase, Text, compare, groups_that_fit
from martlet.scripts.console import chunk_progress
from martlet.scripts.errors import TokensMismatch, VocabularyMismatch
from martlet.scripts.generate import open_model
from martlet.scripts.logit_stats import TOKEN_SCORES, log_softmax
from martlet.scripts.options import ActivationsName, ExecutorName, LoadOptions
from martlet.scripts.scored_text import chunks_of, scored_logits

from ..runtime.tiny import tiny_model
from .conftest import Martlet
from .tiny_file import DIMS, write_tiny_model

TEXT = "the quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 3
FLOAT = LoadOptions(executor=ExecutorName.reference, activations=ActivationsName.f32)


def noisy(noise: float) -> StoredWeights:
    """The tiny model's weights, and so much of their own size in noise. Embeddings, which are the
    head too, are made smaller: a random model is very sure of everything."""
    source = tiny_model("llama", dims=DIMS, formats=("Q8_0",)).weights
    rng = np.random.default_rng(1)
    tensors = {}
    for name in source.names():
        fmt, shape = FORMATS[source.format_name(name)], source.shape(name)
        assert shape is not None
        values = dequantize(source.data(name), fmt, shape)
        spread = rng.normal(1, noise, shape) if len(shape) == 2 else 1
        spread *= 0.3 if name == "token_embd.weight" else 1
        tensors[name] = StoredTensor.from_floats(values * spread)
    return StoredWeights(tensors)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A base, and the same with little and with more noise."""
    folder = tmp_path_factory.mktemp("models")
    sizes = {"base": 0.0, "near": 0.02, "far": 0.2}
    return {
        name: str(write_tiny_model(folder / f"{name}.gguf", weights=noisy(noise)))
        for name, noise in sizes.items()
    }


def run(base: str, *tests: str, text: Text | None = None, **more: Any) -> list[np.ndarray]:
    text = text or Text(TEXT, 32, 5)
    return compare(base, tests, text, FLOAT, chunk_progress, **more).scores


def test_scores_are_the_definition(files: dict[str, str]) -> None:
    (scores,) = run(files["base"], files["far"])
    assert scores.shape == (5, 15)
    load = FLOAT.over_contexts(32)
    with open_model(files["base"], **load) as base, open_model(files["far"], **load) as far:
        for row, tokens in zip(scores, chunks_of(TEXT, base.tokenizer, 32, 5), strict=True):
            (targets, p), (_, q) = (
                next(scored_logits(model.executor, tokens, 256)) for model in (base, far)
            )
            log_p, log_q = log_softmax(p), log_softmax(q)
            assert row["target"].tolist() == targets.tolist() == tokens[17:]
            assert row["kl"] == pytest.approx((np.exp(log_p) * (log_p - log_q)).sum(axis=1))
            assert row["nll"].tolist() == [-log_q[i, t] for i, t in enumerate(targets)]
    assert scores["kl"].min() > 0


def test_the_same_file_with_floats_diverges_by_nothing(files: dict[str, str]) -> None:
    (scores,) = run(files["base"], files["base"])
    assert (scores["kl"] == 0).all()
    assert scores["same_top"].all()


def test_neither_slices_nor_groups_change_a_bit(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(files["base"], files["near"], files["far"])
    monkeypatch.setattr(comparison, "SLICE_VALUES", 1000)  # three rows of 259
    monkeypatch.setattr(comparison, "MEMORY_SHARE", 0)  # each test alone
    for a, b in zip(whole, run(files["base"], files["near"], files["far"]), strict=True):
        assert (a == b).all()


def test_groups_hold_what_fits(files: dict[str, str]) -> None:
    n_bytes = Path(files["base"]).stat().st_size
    specs = [files[name] for name in ("base", "near", "far")]
    assert groups_that_fit(specs, 3 * n_bytes) == [specs]
    assert groups_that_fit(specs, 2 * n_bytes) == [specs[:2], specs[2:]]
    assert groups_that_fit(specs, 0) == [[spec] for spec in specs]
    assert groups_that_fit([], 1) == []


def test_a_saved_base_stands_for_its_model(files: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "base"
    (exact,) = run(files["base"], files["far"], save_base=path)
    (stored,) = run(str(path), files["far"], text=Text(None, None, None))
    # 16 nats in 65,535 steps, weighed by divergences of up to 6; exp(-16) of 259 tokens
    assert stored["kl"] == pytest.approx(exact["kl"], abs=1e-3)
    assert stored["nll_base"] == pytest.approx(exact["nll_base"], abs=2e-4)
    assert (stored["nll"] == exact["nll"]).all()
    assert (stored["same_top"] == exact["same_top"]).mean() > 0.95


@pytest.mark.parametrize("rows", [1, 7, 16, 31, 64])
def test_a_file_is_cut_into_the_same_steps_as_a_model(
    files: dict[str, str], tmp_path: Path, rows: int
) -> None:
    path = tmp_path / "base"
    run(files["base"], save_base=path)
    file = BaseLogits.open(path)
    with open_model(files["base"], **FLOAT.over_contexts(32)) as model:
        tokens = file.tokens[1].tolist()
        steps = [t for t, _ in scored_logits(model.executor, tokens, rows)]
    parts = list(FileBase(file).chunk(1, tokens, rows))
    found = [part(slice(0, len(t))) for part, t in zip(parts, steps, strict=True)]
    assert (np.concatenate(found) == file.rows(1, slice(0, 15))).all()


def test_fewer_chunks_of_a_file(files: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "base"
    run(files["base"], save_base=path)
    (all_of_them,) = run(str(path), files["far"], text=Text(None, None, None))
    (two,) = run(str(path), files["far"], text=Text(TEXT, 32, 2))
    assert (two == all_of_them[:2]).all()


def test_other_words_for_a_token_are_refused(files: dict[str, str], tmp_path: Path) -> None:
    other = str(write_tiny_model(tmp_path / "other.gguf", first_token="<what>"))
    with pytest.raises(VocabularyMismatch, match=r"token 0 is '<what>' .* '<unk>' in the base"):
        run(files["base"], other)


def test_a_base_of_another_text_is_refused(files: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "base"
    run(files["base"], save_base=path)
    with pytest.raises(TokensMismatch, match=r"token 7 of the text is \d+ for .*far.gguf"):
        run(str(path), files["far"], text=Text("the Quick" + TEXT, 32, None))
    with pytest.raises(TokensMismatch, match=r"has [34] chunks of 32 .* the base 5"):
        run(str(path), files["far"], text=Text(TEXT[:100], 32, None))


def test_a_base_of_another_vocabulary_is_refused(files: dict[str, str], tmp_path: Path) -> None:
    from martlet.scripts.base_logits import write_base_logits

    path = tmp_path / "base"
    write_base_logits(path, [[1, 2, 0, 1]] * 2, 3, [np.zeros((2, 3), np.float32)])
    with pytest.raises(VocabularyMismatch, match="predicts 259 tokens, the base 3"):
        run(str(path), files["far"], text=Text(None, None, None))


def test_the_command(martlet: Martlet, files: dict[str, str], tmp_path: Path) -> None:
    text, tokens = tmp_path / "text", tmp_path / "tokens.npy"
    text.write_text(TEXT)
    options = ["-f", str(text), "-c", "32", "--executor", "reference", "--activations", "f32"]
    names = [files["base"], files["far"], files["near"]]
    done = martlet("kld", *names, *options, "--json", "--save-tokens", str(tokens))
    found = json.loads(done.stdout)
    far, near = found["tests"]
    assert found["measured"].startswith("what the file lost")
    assert found["base"]["activations"] == far["activations"] == "f32"
    assert 0 < near["mean_kl"]["value"] < far["mean_kl"]["value"]
    assert far["minus_first"] is None
    assert near["minus_first"]["mean_kl"]["high"] < 0
    scores = np.load(tokens)
    assert scores.dtype == TOKEN_SCORES
    assert scores.shape == (2, far["n_chunks"], 15)
    assert scores[1]["kl"].mean() == pytest.approx(near["mean_kl"]["value"])
    shown = martlet("kld", *names, *options).stdout
    assert "closer to the base" in shown
    assert f"{far['mean_kl']['value']:.6f} ± " in shown


def test_what_one_chunk_cannot_tell_is_null(
    martlet: Martlet, files: dict[str, str], tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT)
    names = [files["base"], files["far"], files["near"]]
    options = ["-f", str(text), "-c", "32", "--chunks", "1", "--executor", "reference", "--json"]

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    found = json.loads(martlet("kld", *names, *options).stdout, parse_constant=no_constant)
    near = found["tests"][1]
    assert near["mean_kl"]["error"] is None
    assert near["mean_kl"]["token_error"] > 0
    assert near["minus_first"]["mean_kl"]["low"] is None


def test_divergence_is_of_the_arithmetic(martlet: Martlet, tiny_file: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT)
    options = ["-f", str(text), "-c", "32", "--executor", "reference", "--json"]
    (as_served,) = json.loads(martlet("divergence", str(tiny_file), *options).stdout)["tests"]
    assert as_served["activations"] == "int8"
    assert 0 < as_served["mean_kl"]["value"] < 0.1
    options += ["--activations", "f32"]
    (plain,) = json.loads(martlet("divergence", str(tiny_file), *options).stdout)["tests"]
    assert plain["mean_kl"]["value"] == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["{base}"], "name a TEST"),
        (["{base}", "--save-base", "x", "--save-tokens", "y"], "--save-tokens takes a TEST"),
        (["{base}", "{far}"], "takes a text"),
        (["{base}", "{far}", "-f", "{text}", "-c", "1000"], "the protocol needs 2000"),
        (["{saved}", "{far}", "-c", "16"], "has chunks of 32 tokens"),
        (["{saved}", "--save-base", "x"], "already"),
        (["{text}", "{far}", "-f", "{text}"], "not a GGUF file"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    martlet: Martlet, files: dict[str, str], tmp_path: Path, arguments: list[str], told: str
) -> None:
    text, saved = tmp_path / "text", tmp_path / "saved"
    text.write_text(TEXT)
    run(files["base"], save_base=saved)
    names = {**files, "text": text, "saved": saved}
    done = martlet("kld", *(argument.format(**names) for argument in arguments))
    assert done.returncode != 0
    assert told in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
