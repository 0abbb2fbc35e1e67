"""Random blocks are what they claim: whole, finite, centred and of the asked spread."""

import numpy as np
import pytest
from martlet.quant.formats import FORMATS, dequantize
from martlet.quant.random_blocks import random_weights

N_WEIGHTS = 1 << 16
SPREAD = 0.1  # relative; the spread at a scale of one comes from 64 blocks


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("std", [0.02, 1.0])
def test_weights_have_the_asked_spread(name: str, std: float) -> None:
    data = random_weights(name, N_WEIGHTS, np.random.default_rng(0), std)
    weights = dequantize(data, FORMATS[name], (N_WEIGHTS,))
    assert np.isfinite(weights).all()
    assert float(weights.std()) == pytest.approx(std, rel=SPREAD)
    assert abs(float(weights.mean())) < SPREAD * std


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_come_from_the_generator_alone(name: str) -> None:
    first, again, other = (
        random_weights(name, 512, np.random.default_rng(seed)) for seed in (1, 1, 2)
    )
    assert (first == again).all()
    assert (first != other).any()


def test_blocks_differ() -> None:
    data = random_weights("Q4_0", 64 * 32, np.random.default_rng(0)).reshape(64, -1)
    assert len({block.tobytes() for block in data}) == 64
