"""Plans of one product or gated pair in any format, whose logits are its output."""

from __future__ import annotations

import numpy as np
from martlet.quant.formats import FORMATS
from martlet.runtime.ops import Activation
from martlet.runtime.plan import Plan
from martlet.runtime.plan_builder import PlanBuilder
from martlet.runtime.weights import StoredTensor, StoredWeights

from .tiny import random_tensor

MAX_ROWS = 40
N_OUT = 64 + 9  # the last tile is mostly padding


def product_plan(format_name: str, is_gated: bool, precise: bool) -> tuple[Plan, StoredWeights]:
    """One product or gated pair. An odd number of blocks a row, more than are unpacked at once."""
    rng = np.random.default_rng(sum(map(ord, format_name)))
    block = FORMATS[format_name].block
    width = block * (5 if block > 32 else 37)
    x = rng.standard_normal((MAX_ROWS, width)).astype(np.float32)
    x[3, 64:96] = 0  # a block without a scale
    tensors = {"x": StoredTensor.from_floats(x), "eye": StoredTensor.from_floats(np.eye(N_OUT))}
    names = ["gate", "up"] if is_gated else ["w"]
    for name in names:
        tensors[name] = random_tensor(format_name, (N_OUT, width), rng, width**-0.5)
    weights = StoredWeights(tensors)
    plan = PlanBuilder(weights, MAX_ROWS)
    rows = plan.embed(plan.weight("x", *x.shape))
    shown = plan.linear(rows, [plan.weight(n, N_OUT, width) for n in names], precise=precise)
    if is_gated:
        shown = plan.glu(shown, Activation.SILU)
    eye = plan.weight("eye", N_OUT, N_OUT)
    plan.linear(plan.take_rows(shown), [eye], name="logits", logits=True)
    return plan.finish(), weights
