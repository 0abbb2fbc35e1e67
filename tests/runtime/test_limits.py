"""The measurement of the machine's limits: plausible relations, never absolute figures."""

import pytest
from martlet.runtime.errors import MartletError, ModelError
from martlet.runtime.executors.limits import MachineLimits, default_buffer_bytes

from .native_library import ISAS

SECONDS = 0.02
BUFFER_BYTES = 32 << 20
ATTEMPTS = 3  # on a shared machine one measurement may lose its core

pytestmark = pytest.mark.skipif(not ISAS, reason="no native library")


@pytest.mark.parametrize("isa", ISAS)
def test_int8_is_the_faster_multiplication_on_every_isa(isa: str) -> None:
    with MachineLimits(n_threads=1, isa=isa, buffer_bytes=BUFFER_BYTES) as limits:
        assert limits.isa == isa
        ratios = [limits.int8_macs(SECONDS) / limits.f32_macs(SECONDS) for _ in range(ATTEMPTS)]
        assert max(ratios) > 1


def test_what_fits_a_near_cache_is_read_faster() -> None:
    with MachineLimits(n_threads=1, buffer_bytes=BUFFER_BYTES) as limits:
        ratios = [
            limits.read_bytes(SECONDS, span_bytes=1 << 18) / limits.read_bytes(SECONDS)
            for _ in range(ATTEMPTS)
        ]
        assert max(ratios) > 1


@pytest.mark.parametrize("n_threads", [1, 3])
def test_every_kind_gives_a_rate(n_threads: int) -> None:
    with MachineLimits(n_threads=n_threads, buffer_bytes=BUFFER_BYTES) as limits:
        assert limits.int8_macs(SECONDS) > 0
        assert limits.f32_macs(SECONDS) > 0
        assert limits.read_bytes(SECONDS) > 0
        assert limits.read_bytes(SECONDS, small_pages=True) > 0
        assert limits.read_bytes(SECONDS, span_bytes=1 << 50) > 0  # cut to the buffer


@pytest.mark.parametrize(("n_threads", "buffer_bytes"), [(0, 1 << 25), (2, 1 << 18), (1, 1 << 60)])
def test_what_cannot_be_measured_is_refused_with_numbers(n_threads: int, buffer_bytes: int) -> None:
    with pytest.raises(ModelError, match=str(buffer_bytes)):
        MachineLimits(n_threads=n_threads, buffer_bytes=buffer_bytes)


def test_closed_limits_measure_nothing() -> None:
    limits = MachineLimits(n_threads=1, buffer_bytes=BUFFER_BYTES)
    limits.close()
    limits.close()
    with pytest.raises(MartletError, match="closed"):
        limits.int8_macs(SECONDS)


def test_the_buffer_stays_within_the_memory() -> None:
    assert default_buffer_bytes(64 << 30) == 1 << 30
    assert default_buffer_bytes(4 << 30) == 512 << 20
    assert default_buffer_bytes(0) == 64 << 20
