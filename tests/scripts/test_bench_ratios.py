"""A guard on speed that holds on any machine: ratios within one run, never absolute times.

The bounds are far below what a quiet machine gives; a regression that undoes batching or the tiles
of a prefill falls below them. Shared machines are noisy, so a run may be measured again."""

import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from martlet.quant.errors import MartletError
from martlet.scripts.bench_cases import Case
from martlet.scripts.bench_measure import measure
from martlet.scripts.bench_open import Opened, Options, open_bench
from martlet.scripts.shapes import MIXTURES, Shape
from martlet.scripts.synthesize import write_model

SHAPE = Shape("guard", "llama", 512, 1536, 4, 8, 4, 64, 4096, 512, 1e4, 1e-5)
PREFILL, DECODE, DECODE_8 = Case("prefill", 128), Case("decode", 16), Case("decode", 16, n_seqs=8)
CASES = [PREFILL, DECODE, DECODE_8]
LEAST_BATCH_GAIN = 1.5  # tokens/s of eight sequences ÷ one
LEAST_PREFILL_GAIN = 2.0  # tokens/s of a prefill ÷ a decode
LEAST_PEAK_SHARE = 0.1  # of the int8 peak, by a prefill
ATTEMPTS = 3


def require_vector_kernels() -> None:
    try:
        from martlet.runtime.executors.native import Library

        best = Library().best_isa()
    except (ImportError, OSError, MartletError) as error:
        pytest.skip(f"no native library: {error}")
    if best == "scalar":
        pytest.skip("plain C kernels are bound by multiplying, whatever the number of rows")


@pytest.fixture(scope="module", params=["Q4_0", "Q8_0", "Q4_K_M"])
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Opened]:
    require_vector_kernels()
    path: Path = tmp_path_factory.mktemp("guard") / "guard.gguf"
    write_model(path, SHAPE, MIXTURES[request.param])
    # One thread: two would also measure how soon a busy machine runs the second.
    with open_bench(str(path), CASES, Options("native", threads=1, buffer_bytes=64 << 20)) as found:
        yield found


def test_batches_and_prefill_pay(opened: Opened) -> None:
    found: list[dict[str, float]] = []
    for _ in range(ATTEMPTS):
        found.append(ratios(opened))
        if all(found[-1][name] >= least for name, least in LEAST.items()):
            return
    pytest.fail(f"below {LEAST} in every attempt: {found}")


LEAST = {"batch": LEAST_BATCH_GAIN, "prefill": LEAST_PREFILL_GAIN, "peak": LEAST_PEAK_SHARE}


def ratios(opened: Opened) -> dict[str, float]:
    """Medians over turns of what was measured in the same turn."""
    opened.limits.samples.clear()
    results = measure(opened.bench, opened.plan, CASES, opened.limits, 3, lambda what: None)
    prefill, one, eight = (result.tokens_per_s.samples for result in results)
    share = results[0].share(opened.limits.speed())
    assert share is not None
    return {
        "batch": statistics.median(b / a for a, b in zip(one, eight, strict=True)),
        "prefill": statistics.median(p / a for a, p in zip(one, prefill, strict=True)),
        "peak": share.of_limit,
    }
