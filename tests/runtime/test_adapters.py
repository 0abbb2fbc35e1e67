"""Low-rank adapters: files, what they add, and that neighbours with others change no bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from martlet.runtime.adapters import AdapterFile, shares_of
from martlet.runtime.engine import Engine
from martlet.runtime.errors import MartletError, ModelError, RequestError
from martlet.runtime.executors.native import NativeExecutor
from martlet.runtime.executors.numba_executor import NumbaExecutor
from martlet.runtime.executors.reference import ReferenceExecutor
from martlet.runtime.fingerprint import fingerprint
from martlet.runtime.model import Model, load_model
from martlet.runtime.models import record_plan
from martlet.runtime.ops import BufferKind, KvType
from martlet.runtime.sampling import SamplingParams
from martlet.runtime.step import Step
from martlet.runtime.weights import StoredTensor, StoredWeights

from ..recorded import gguf_of, recorded_model
from .harness import Answer, run_all
from .tiny import Chunk, make_step

EXECUTORS = (NativeExecutor, NumbaExecutor, ReferenceExecutor)
ALPHA, RANK = 6.0, 4
STEMS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
PROMPT = [1, 5, 9, 2, 7, 3, 3, 8]


def factors_of(stems: tuple[str, ...] = STEMS, seed: int = 0) -> dict[str, np.ndarray]:
    """Of the recorded llama; large enough to change every token."""
    rng = np.random.default_rng(seed)
    _, weights = recorded_model("llama")
    made = {}
    for name in weights.names():
        if name.startswith("blk.") and name.split(".")[2] in stems and name.endswith(".weight"):
            rows, cols = weights.shape(name) or (0, 0)
            made[f"{name}.lora_a"] = rng.normal(size=(RANK, cols)).astype(np.float32) / cols**0.5
            made[f"{name}.lora_b"] = rng.normal(size=(rows, RANK)).astype(np.float32) / 4
    assert made
    return made


def write_adapter(path: Path, tensors: dict[str, np.ndarray], **changed: Any) -> Path:
    fields = {
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": ALPHA,
        **changed,
    }
    writer = GGUFWriter(path, fields.pop("arch", "llama"))
    for key, value in fields.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float) and abs(value) > float(np.finfo(np.float32).max):
            writer.add_float64(key, value)
        elif value is not None:
            writer.add_float32(key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def new_adapter(tmp_path: Path) -> Callable[..., AdapterFile]:
    def make(name: str = "style", share: float = 0.0, seed: int = 0, **changed: Any) -> AdapterFile:
        path = write_adapter(tmp_path / f"{name}.gguf", factors_of(seed=seed), **changed)
        return AdapterFile(path, name, share)

    return make


def opened(*adapters: AdapterFile, **options: Any) -> Model:
    return load_model(gguf_of("llama"), adapters=adapters, context=64, threads=1, **options)


def merged_weights(share: float) -> StoredWeights:
    """The model with share * alpha / rank * b @ a added to its weights."""
    _, weights = recorded_model("llama")
    factors, tensors = factors_of(), {}
    for name in weights.names():
        values = weights.dequantized(name)
        if f"{name}.lora_a" in factors:
            product = factors[f"{name}.lora_b"] @ factors[f"{name}.lora_a"]
            values = values + np.float32(share * ALPHA / RANK) * product
        tensors[name] = StoredTensor.from_floats(values)
    return StoredWeights(tensors)


@pytest.mark.parametrize("executor", ["native", "numba", "reference"])
@pytest.mark.parametrize("share", [1.0, -0.5])
def test_logits_are_those_of_the_merged_weights(
    executor: str, share: float, new_adapter: Callable[..., AdapterFile]
) -> None:
    config, _ = recorded_model("llama")
    plan = record_plan(config, merged_weights(share), 32, activations=BufferKind.F32)
    merged = ReferenceExecutor(plan, merged_weights(share), n_blocks=1, kv_type=KvType.F32)
    expected = merged.run(step_of())
    floats = {} if executor == "numba" else {"activations": BufferKind.F32}
    model = opened(new_adapter(), executor=executor, kv_type=KvType.F32, **floats)
    try:
        found = model.executor.run(step_of([share]))
        without = model.executor.run(step_of([0.0]))
    finally:
        model.close()
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()
    assert np.abs(without - expected).max() > 0.1 * np.abs(expected).max()


@pytest.mark.parametrize("executor", ["native", "numba", "reference"])
def test_heads_of_hidden_rows_take_the_share_of_their_own_sequence(
    executor: str, tmp_path: Path
) -> None:
    """Rows whose hidden state is wanted are few: their numbers are not those of the step's rows."""
    _, weights = recorded_model("bert-rank")
    rng, factors = np.random.default_rng(5), {}
    for name in ("cls.weight", "cls.output.weight"):
        rows, cols = weights.shape(name) or (0, 0)
        factors[f"{name}.lora_a"] = rng.normal(size=(3, cols)).astype(np.float32)
        factors[f"{name}.lora_b"] = rng.normal(size=(rows, 3)).astype(np.float32)
    adapter = AdapterFile(write_adapter(tmp_path / "a.gguf", factors, arch="bert"), "kind")
    model = load_model(gguf_of("bert-rank"), adapters=[adapter], executor=executor, threads=1)

    def labels(chunks: list[Chunk], last: list[int], shares: list[float]) -> np.ndarray:
        given = {"hidden_rows": np.array(last, np.int32)}
        given["adapters"] = np.array(shares, np.float32)[:, None]
        model.executor.run(Step(**{**make_step(chunks, []).__dict__, **given}))
        return np.array(model.executor.hidden)

    first, second = Chunk([2, 5, 6, 7], 0, [0]), Chunk([2, 9, 8], 0, [1])
    try:
        together = labels([first, second], [3, 6], [0.0, 1.0])
        np.testing.assert_array_equal(together[:1], labels([first], [3], [0.0]))
        np.testing.assert_array_equal(together[1:], labels([second], [2], [1.0]))
        assert (together[1:] != labels([second], [2], [0.0])).any()
    finally:
        model.close()


def step_of(shares: list[float] | None = None) -> Step:
    step = make_step([Chunk(PROMPT, 0, [0])])
    if shares is None:
        return step
    return Step(**{**step.__dict__, "adapters": np.array([shares], np.float32)})


@pytest.mark.parametrize("executor", ["native", "numba", "reference"])
def test_nobody_gets_an_adapter_by_accident(
    executor: str, new_adapter: Callable[..., AdapterFile]
) -> None:
    """An unused adapter changes no bit, and a step that does not say who gets it is refused."""
    plain, adapted = opened(executor=executor), opened(new_adapter(), executor=executor)
    try:
        expected = plain.executor.run(step_of())
        np.testing.assert_array_equal(adapted.executor.run(step_of([0.0])), expected)
        with pytest.raises(ModelError, match=r"\(1, 0\), expected \(1, 1\)"):
            adapted.executor.run(step_of())
    finally:
        plain.close()
        adapted.close()


# -- through the engine -------------------------------------------------------------------------

PROMPTS = tuple([(13 * i + 7 * n) % 90 + 1 for i in range(20 + 3 * n)] for n in range(3))
SHARES: tuple[dict[int, float] | None, ...] = (None, {}, {0: 1.0}, {1: 0.5}, {0: -1.0, 1: 0.25})
Ask = tuple[int, int]  # of PROMPTS, of SHARES


def answers(engine: Engine, asks: list[Ask]) -> list[list[int]]:
    said = []
    for n, (prompt, shares) in enumerate(asks):
        said.append(Answer())
        params = SamplingParams(temperature=0.9, seed=5, max_tokens=8, ignore_eos=True)
        engine.submit(PROMPTS[prompt], params, said[-1], request_id=str(n), adapters=SHARES[shares])
        if n % 2:
            engine.step()
    run_all(engine)
    return [answer.ids for answer in said]


def engine_over(model: Model, **options: Any) -> Engine:
    usual = [adapter.share for adapter in model.adapters]
    return Engine(model.executor, model.tokenizer, context=64, adapters=usual, **options)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    asks=st.lists(
        st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(0, len(SHARES) - 1)),
        min_size=2,
        max_size=6,
    ),
    rows=st.sampled_from([3, 16, 64]),
)
def test_requests_with_different_adapters_share_steps_and_change_nothing(
    asks: list[Ask], rows: int, two_adapters: Model
) -> None:
    alone = [answers(engine_over(two_adapters, prefix_reuse=False), [wanted])[0] for wanted in asks]
    engine = engine_over(two_adapters, step_rows=rows)
    assert answers(engine, asks) == alone
    assert answers(engine, asks) == alone, "with a warm cache"


@pytest.fixture(scope="module")
def two_adapters(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("adapters")
    files = [
        AdapterFile(write_adapter(folder / "a.gguf", factors_of()), "a"),
        AdapterFile(write_adapter(folder / "b.gguf", factors_of(("attn_q",), 1)), "b", 1.0),
    ]
    model = opened(*files, executor="native")
    yield model
    model.close()


def test_prefixes_are_shared_by_those_who_get_the_same(two_adapters: Model) -> None:
    engine = engine_over(two_adapters)
    n_cached = []
    for shares in ({0: 1.0}, {1: 1.0}, None, {0: 1.0}, {0: 0.5}):
        answer = Answer()
        prompt = [3 + i % 50 for i in range(40)]
        engine.submit(prompt, SamplingParams(max_tokens=1), answer, adapters=shares)
        run_all(engine)
        n_cached.append(answer.finish.n_cached)
    assert n_cached == [0, 0, 32, 32, 0], "None is what is usual: all of b"


def test_who_says_nothing_gets_what_is_usual() -> None:
    assert shares_of(None, [1.0, 0.0]) == (1.0, 0.0)
    assert shares_of({}, [1.0, 0.0]) == (0.0, 0.0)
    assert shares_of({1: -0.5}, [1.0, 0.0]) == (0.0, -0.5)
    for wanted in ({2: 1.0}, {-1: 1.0}, {0: float("nan")}):
        with pytest.raises(RequestError) as error:
            shares_of(wanted, [1.0, 0.0])
        assert error.value.field == "lora"


def test_blocks_on_disk_are_of_one_set_of_adapters(new_adapter: Callable[..., AdapterFile]) -> None:
    digests = []
    for names in ((), ("a",), ("b",)):
        model = opened(*(new_adapter(name, seed=ord(name)) for name in names))
        digests.append(fingerprint(model))
        model.close()
    assert len(set(digests)) == 3


# -- files --------------------------------------------------------------------------------------


def test_a_name_and_a_path() -> None:
    assert AdapterFile.parse("style=/a/b.gguf") == AdapterFile("/a/b.gguf", "style", 0.0)
    assert AdapterFile.parse("/a/b.gguf") == AdapterFile("/a/b.gguf", "b", 1.0)
    for text in ("=x.gguf", "a b=x.gguf", f"{'n' * 65}=x.gguf"):
        with pytest.raises(RequestError):
            AdapterFile.parse(text)


def dropped(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        name: values
        for name, values in tensors.items()
        if not name.endswith("0.attn_q.weight.lora_b")
    }


REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "no adapter": (dict, {"general.type": "model"}, "is not an adapter"),
    "another kind": (
        dict,
        {"adapter.type": "control_vector"},
        "'control_vector' are not supported",
    ),
    "switched by tokens": (dict, {"adapter.alora.invocation_tokens": [1, 2]}, "aLoRA"),
    "another architecture": (
        dict,
        {"arch": "qwen2"},
        "adapter of 'qwen2', the model is of 'llama'",
    ),
    "alpha": (dict, {"adapter.lora.alpha": float("inf")}, "alpha is inf"),
    "alpha beyond floats": (dict, {"adapter.lora.alpha": 1e39}, "alpha is 1e"),
    "alpha of another type": (dict, {"adapter.lora.alpha": "6"}, "not a number"),
    "half a pair": (dropped, {}, "but not 'blk.0.attn_q.weight.lora_b'"),
    "no factor": (lambda t: {**t, "x.weight": np.ones((2, 2), np.float32)}, {}, "is no factor"),
    "embedding": (
        lambda t: (
            t
            | {
                "token_embd.weight.lora_a": np.ones((2, 32), np.float32),
                "token_embd.weight.lora_b": np.ones((9, 2), np.float32),
            }
        ),
        {},
        "2 tensors belong to no weight that can be adapted",
    ),
    "three dimensions": (
        lambda t: {name: values[None] for name, values in t.items()},
        {},
        "3 dimensions",
    ),
    "ranks that differ": (
        lambda t: {n: v[:, :-1] if n.endswith("_b") else v for n, v in t.items()},
        {},
        "expected",
    ),
    "not finite": (
        lambda t: {
            n: np.where(np.arange(v.shape[1]) == 1, np.nan, v).astype("f4") for n, v in t.items()
        },
        {},
        "not finite",
    ),
    "nothing": (lambda t: {}, {}, "has no tensors"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_do_not_fit_are_refused_by_name(case: str, tmp_path: Path) -> None:
    change, fields, message = REFUSED[case]
    path = write_adapter(tmp_path / "bad.gguf", change(factors_of()), **fields)
    with pytest.raises(MartletError, match=message):
        opened(AdapterFile(path, "bad"))


def test_a_tied_embedding_is_not_adapted_as_the_output_alone(tmp_path: Path) -> None:
    rows, cols = recorded_model("gemma3")[1].shape("token_embd.weight") or (0, 0)
    factors = {
        "token_embd.weight.lora_a": np.ones((2, cols), np.float32),
        "token_embd.weight.lora_b": np.ones((rows, 2), np.float32),
    }
    path = write_adapter(tmp_path / "tied.gguf", factors, arch="gemma3")
    with pytest.raises(MartletError, match="2 tensors belong to no weight that can be adapted"):
        load_model(gguf_of("gemma3"), adapters=[AdapterFile(path, "tied")], threads=1)


def test_two_adapters_of_one_name_are_refused(new_adapter: Callable[..., AdapterFile]) -> None:
    with pytest.raises(RequestError, match="two adapters are called 'style'"):
        opened(new_adapter(), new_adapter())
