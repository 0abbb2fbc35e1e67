"""A guard on speed that holds on any machine: ratios within one run, never absolute times.

The bounds are far below what a quiet machine gives; a regression that undoes batching or the tiles
of a prefill falls below them. Shared machines are noisy, so a run may be measured again."""

import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from martlet.quant.errors import MartletError
from martlet.quant.mixtures import PRESETS
from martlet.scripts.bench_cases import Case
from martlet.scripts.bench_measure import measure
from martlet.scripts.bench_open import Opened, Options, open_bench
from martlet.scripts.shapes import Shape
from martlet.scripts.synthesize import write_model

SHAPE = Shape("guard", "llama", 512, 1536, 4, 8, 4, 64, 4096, 512, 1e4, 1e-5)
PREFILL, DECODE, DECODE_8 = Case("prefill", 128), Case("decode", 16), Case("decode", 16, n_seqs=8)
CASES = [PREFILL, DECODE, DECODE_8]
LEAST_BATCH_GAIN = 1.5  # tokens/s of eight sequences ÷ one
LEAST_PREFILL_GAIN = 2.0  # tokens/s of a prefill ÷ a decode
# Of the int8 peak, by a prefill. AMX multiplies eight times faster than its sums can be scaled.
LEAST_PEAK_SHARE = {"vectors": 0.1, "amx": 0.03}
ATTEMPTS = 3


def isa_of(unit: str) -> str:
    """The best ISA that multiplies with this unit."""
    try:
        from martlet.runtime.executors.native_library import Library

        isas = [name for name, is_supported in Library().isas() if is_supported]
    except (ImportError, OSError, MartletError) as error:
        pytest.skip(f"no native library: {error}")
    found = [name for name in isas if name != "scalar" and (name == "amx") == (unit == "amx")]
    if not found:
        # Plain C kernels are bound by multiplying, whatever the number of rows.
        pytest.skip(f"this CPU has no kernels on {unit}: {', '.join(isas)}")
    return found[-1]


@pytest.fixture(scope="module", params=["vectors", "amx"])
def unit(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=["Q4_0", "Q8_0", "Q4_K_M"])
def opened(
    request: pytest.FixtureRequest, unit: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Opened]:
    isa = isa_of(unit)
    path: Path = tmp_path_factory.mktemp("guard") / "guard.gguf"
    write_model(path, SHAPE, PRESETS[request.param])
    # One thread: two would also measure how soon a busy machine runs the second.
    options = Options("native", threads=1, isa=isa, buffer_bytes=64 << 20)
    with open_bench(str(path), CASES, options) as found:
        yield found


def test_batches_and_prefill_pay(opened: Opened, unit: str) -> None:
    least = LEAST | {"peak": LEAST_PEAK_SHARE[unit]}
    found: list[dict[str, float]] = []
    for _ in range(ATTEMPTS):
        found.append(ratios(opened))
        if all(found[-1][name] >= bound for name, bound in least.items()):
            return
    pytest.fail(f"below {least} in every attempt: {found}")


LEAST = {"batch": LEAST_BATCH_GAIN, "prefill": LEAST_PREFILL_GAIN}


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
