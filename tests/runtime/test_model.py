"""Opening a model file: defaults that depend on the machine, and refusals before anything loads."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from martlet.quant.errors import FileFormatError
from martlet.quant.gguf_field import Field
from martlet.quant.gguf_file import GGUFFile
from martlet.quant.gguf_write import OutTensor, write_gguf
from martlet.runtime.errors import ModelError, RequestError
from martlet.runtime.executors import choice
from martlet.runtime.executors import reference as choice_reference
from martlet.runtime.executors.reference import ReferenceExecutor
from martlet.runtime.model import PoolSize, load_model, size_pool

from ..recorded import gguf_of, relative_error
from .tiny import run_tokens, tiny_model

MODEL = tiny_model()
BLOCK_BYTES = MODEL.plan().kv_bytes_per_token() * 32


def pool(**options: Any) -> PoolSize:
    return size_pool(MODEL.plan(), MODEL.config, 32, **options)


def test_the_pool_holds_eight_contexts_where_memory_allows() -> None:
    assert pool(free_bytes=1 << 40) == PoolSize(context=512, n_blocks=8 * 16)


def test_the_pool_takes_a_quarter_of_the_free_memory_at_most() -> None:
    assert pool(free_bytes=4 * 40 * BLOCK_BYTES) == PoolSize(context=512, n_blocks=40)


def test_a_default_context_gives_way_to_a_small_pool() -> None:
    assert pool(kv_bytes=3 * BLOCK_BYTES) == PoolSize(context=96, n_blocks=3)


def test_a_context_that_was_asked_for_must_fit() -> None:
    assert pool(context=96, kv_bytes=3 * BLOCK_BYTES).context == 96
    with pytest.raises(RequestError, match="context of 97 tokens"):
        pool(context=97, kv_bytes=3 * BLOCK_BYTES)


@pytest.mark.parametrize("option", ["context", "kv_bytes"])
def test_sizes_are_positive(option: str) -> None:
    with pytest.raises(RequestError, match=f"{option} is 0"):
        pool(**{option: 0})


def test_load_model_puts_everything_together() -> None:
    model = load_model(gguf_of("qwen3"), executor="reference", block_tokens=16, max_rows=8)
    try:
        assert model.config.arch == "qwen3"
        assert model.context == model.config.context_train == 256
        assert model.executor.block_tokens == 16
        assert model.executor_reason == "reference: asked for"
        assert model.tokenizer.vocab_size == model.config.vocab_size == 305
        assert run_tokens(model.executor, list(range(20))).shape == (20, 305)
    finally:
        model.close()


def test_dequantize_decodes_blocks_and_keeps_the_answer_near() -> None:
    tiny = tiny_model(formats=("Q8_0",))
    from martlet.runtime.executors.reference import ReferenceExecutor
    from martlet.runtime.models import record_plan
    from martlet.runtime.weights import DequantizedWeights

    floats = DequantizedWeights(tiny.weights)
    plan = record_plan(tiny.config, floats, 64)
    assert {tensor.format for tensor in plan.tensors} == {"F32", "F64"}
    logits = run_tokens(ReferenceExecutor(plan, floats, n_blocks=2), [1, 2, 3])
    quantized = run_tokens(ReferenceExecutor(tiny.plan(), tiny.weights, n_blocks=2), [1, 2, 3])
    assert 0 < relative_error(quantized, logits) < 0.05


def rewritten(
    path: Path,
    *,
    drop: str = "",
    rename: tuple[str, str] = ("", ""),
    vocab_rows: int | None = None,
    copies: tuple[str, ...] = (),
) -> Path:
    """A llama file without a tensor, with one under another name, with fewer embeddings than
    tokens, or with copies of its last norm."""
    with GGUFFile.open(gguf_of("llama")) as file:
        fields = {key: Field.of(value) for key, value in file.metadata.items()}
        tensors = []
        for name, tensor in file.tensors.items():
            values = tensor.data.view("<f4").reshape(tensor.shape)
            if name in ("token_embd.weight", "output.weight"):
                values = values[:vocab_rows]
            names = [rename[1] if name == rename[0] else name] if name != drop else []
            names += copies if name == "output_norm.weight" else ()
            tensors += [
                OutTensor(name, values.shape, tensor.format, partial(np.array, values))
                for name in names
            ]
        write_gguf(path, fields, tensors)
    return path


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    path = rewritten(tmp_path / "m.gguf", drop="blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"'blk\.1\.ffn_up\.weight' is missing"):
        load_model(path, executor="reference")


def test_b18_a_misspelt_tensor_is_missing(tmp_path: Path) -> None:
    misspelt = ("blk.0.ffn_down.weight", "blk.0.ffn_dwn.weight")
    path = rewritten(tmp_path / "m.gguf", rename=misspelt)
    with pytest.raises(ModelError, match=r"'blk\.0\.ffn_down\.weight' is missing"):
        load_model(path, executor="reference")


def test_b18_a_tensor_of_another_shape_is_refused_with_both_shapes(tmp_path: Path) -> None:
    swapped = rewritten(
        tmp_path / "m.gguf", drop="blk.1.attn_q.weight", copies=("blk.1.attn_q.weight",)
    )
    with pytest.raises(ModelError, match=r"'blk\.1\.attn_q\.weight' has shape \(32,\).*, 32\)"):
        load_model(swapped, executor="reference")


def test_b18_unknown_tensors_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = rewritten(tmp_path / "m.gguf", copies=("blk.0.surprise.weight",))
    models = [load_model(each, executor="reference") for each in (path, gguf_of("llama"))]
    logits = [run_tokens(model.executor, [1, 2, 3]) for model in models]
    for model in models:
        model.close()
    np.testing.assert_array_equal(*logits)
    assert "1 tensors of the file are not used: blk.0.surprise.weight" in caplog.text


def test_tokens_without_embeddings_are_refused(tmp_path: Path) -> None:
    path = rewritten(tmp_path / "m.gguf", vocab_rows=290)
    with pytest.raises(FileFormatError, match=r"300 tokens.*only 290 rows"):
        load_model(path, executor="reference")


# -- choice of the executor ---------------------------------------------------------------------


def test_unknown_executor_is_refused_with_the_list() -> None:
    with pytest.raises(RequestError, match="'cuda' is unknown; known: auto, native, numba, ref"):
        load_model(gguf_of("llama"), executor="cuda")


def test_auto_takes_the_first_that_is_available_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = {
        "native": ("no_such_module", "Nothing", None),
        "numba": ("reference", "ReferenceExecutor", None),
        "reference": ("reference", "ReferenceExecutor", None),
    }
    monkeypatch.setattr(choice, "EXECUTORS", table)
    plan = MODEL.plan()
    executor, reason = choice.create_executor(
        "auto", plan, MODEL.weights, n_blocks=1, n_threads=2, isa=None
    )
    assert executor.name == "reference"
    assert reason.startswith("native is not available: ")
    assert reason.endswith("; numba: the fastest available")


@pytest.mark.parametrize(
    ("numba_module", "module"), [("reference", "reference"), ("no_such_module", "slow")]
)
def test_auto_passes_over_an_executor_that_would_be_slow(
    monkeypatch: pytest.MonkeyPatch, numba_module: str, module: str
) -> None:
    class Slow(ReferenceExecutor):
        name = "slow"

        @staticmethod
        def why_slow() -> str:
            return "no vector kernels for this CPU"

    monkeypatch.setattr(choice_reference, "Slow", Slow, raising=False)
    table = {
        "native": ("reference", "Slow", None),
        "numba": (numba_module, "ReferenceExecutor", None),
    }
    monkeypatch.setattr(choice, "EXECUTORS", table)
    executor, reason = choice.create_executor("auto", MODEL.plan(), MODEL.weights, n_blocks=1)
    assert executor.name == module
    assert reason.startswith("native: no vector kernels for this CPU; ")
