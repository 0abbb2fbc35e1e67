"""Plans whose records were tampered with are refused with a message, or run inside their memory.

Fields of the record arrays are overwritten before mt_engine_create sees them. What gets through
runs: under scripts/sanitize.py any access outside the buffers ends the test run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from martlet.quant.formats import FORMATS
from martlet.runtime.ops import BUFFER_DTYPE, KV_LAYER_DTYPE, OP_DTYPE, BufferKind, OpKind

from .op_cases import OP_CASES
from .plan_records import FFI, LIB, TENSOR_FIELDS, Records, run_two_steps, sound_records

ARCHS = ("qwen2", "gemma3", "qwen2moe")
# Where checks break: zero, off by one, counts that overflow 32 bits when multiplied.
NUMBERS = (0, 1, 31, 32, 33, 64, 255, 256, 2**16, 2**24, 2**30, 2**31 - 1, -1, -(2**31))
WIDE_NUMBERS = (*NUMBERS, 2**32, 2**40, 2**62, 2**63 - 1, -(2**63))
MOST_BYTES = 1 << 26  # of pool or arena: more takes long, and beyond that the machine decides


def try_engine(records: Records) -> str:
    """Creates and, where allowed, runs; the message of a refusal, or "" where it ran."""
    if max(records.sizes["arena_bytes"], records.pool_bytes) > MOST_BYTES:
        return "not tried"
    engine, message = records.create()
    if engine == FFI.NULL:
        assert message
        return message
    try:
        run_two_steps(engine, records.logits_width, records.hidden_width)
    finally:
        LIB.mt_engine_free(engine)
    return ""


@pytest.mark.parametrize("activations", BufferKind)
@pytest.mark.parametrize("arch", ARCHS)
def test_the_untouched_records_run(arch: str, activations: BufferKind) -> None:
    assert try_engine(sound_records(arch, activations).copy()) == ""


# -- one field at a time ------------------------------------------------------------------------

Change = tuple[str, int, str, int, int]  # array, record, field, element of the field, new value


def int_fields(dtype: np.dtype) -> Iterator[tuple[str, int]]:
    """Names of integer fields, with every element of those that are arrays."""
    for name in dtype.names or ():
        base, shape = dtype[name].base, dtype[name].shape
        if base.kind == "i":
            yield from ((name, i) for i in range(shape[0] if shape else 1))


def apply(records: Records, change: Change) -> None:
    array, at, name, element, value = change
    if array == "tensors":
        records.tensors[at][name] = value
    elif array in ("sizes", "options"):
        getattr(records, array)[name] = value
    else:
        field = getattr(records, array)[name]
        field.reshape(len(field), -1)[at, element] = value


def changes(r: Records) -> st.SearchStrategy[Change]:
    one_of: list[st.SearchStrategy[Change]] = []

    def add(array: str, n_records: int, name: str, element: int, is_wide: bool) -> None:
        at = st.integers(0, n_records - 1)
        place = (st.just(array), at, st.just(name), st.just(element))
        one_of.append(st.tuples(*place, numbers(is_wide)))

    dtypes = {"ops": OP_DTYPE, "buffers": BUFFER_DTYPE, "kv_layers": KV_LAYER_DTYPE}
    for array, dtype in dtypes.items():
        for name, element in int_fields(dtype):
            add(array, len(getattr(r, array)), name, element, dtype[name].base.itemsize == 8)
    for name in TENSOR_FIELDS:
        add("tensors", len(r.tensors), name, 0, name in ("rows", "cols", "n_bytes"))
    for array in ("sizes", "options"):
        for name in getattr(r, array):
            add(array, 1, name, 0, False)
    return st.one_of(one_of)


def numbers(is_wide: bool) -> st.SearchStrategy[int]:
    return st.one_of(st.integers(-2, 40), st.sampled_from(WIDE_NUMBERS if is_wide else NUMBERS))


@pytest.mark.parametrize("arch", ARCHS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_spoiled_records_are_refused_or_harmless(arch: str, data: st.DataObject) -> None:
    records = sound_records(arch).copy()
    for change in data.draw(st.lists(changes(records), min_size=1, max_size=3)):
        apply(records, change)
    try_engine(records)


# -- holes that were open once, and every check by name -----------------------------------------


Spoil = Callable[[Records], None]


def op_of(records: Records, kind: OpKind, nth: int = 0) -> int:
    return int(np.flatnonzero(records.ops["kind"] == kind)[nth])


def logits_buffer(records: Records) -> int:
    return int(np.flatnonzero(records.buffers["is_logits"])[0])


def vector(records: Records, kind: OpKind) -> int:
    return int(records.ops["w"][op_of(records, kind), 0])


def gap_in_stack(r: Records) -> None:
    at = op_of(r, OpKind.LINEAR)
    r.ops["w"][at, 1], r.ops["w"][at, 2] = -1, 2**30


def norm_weight_as_matrix(r: Records) -> None:
    """The one-row matrix would be packed, and its values as a norm's weight would be gone."""
    linear = op_of(r, OpKind.LINEAR)
    r.ops["w"][linear, 1:3] = -1, vector(r, OpKind.NORM)


def codes_without_a_book(r: Records) -> None:
    at = next(i for i, t in enumerate(r.tensors) if t["format"] == FORMATS["Q4_K"].ggml_type)
    vectors, tensor = FORMATS["IQ2_XXS"], r.tensors[at]
    tensor["format"] = vectors.ggml_type
    tensor["n_bytes"] = vectors.data_bytes((tensor["rows"], tensor["cols"]))


def trig_from_logits(r: Records) -> None:
    at = op_of(r, OpKind.ROPE_KV)
    b = r.buffers[logits_buffer(r)]
    b["width"] = r.ops["i"][at, 4]
    b["row_bytes"] = 4 * b["width"]
    r.ops["in"][at, 1] = logits_buffer(r)


def two_widths_of_logits(r: Records) -> None:
    at = int(r.ops["out"][op_of(r, OpKind.TAKE_ROWS)])
    r.buffers["is_logits"][at] = 1


def unused_layer(r: Records) -> None:
    """Nobody reads it, but a copied block is as large as all layers say."""
    r.kv_layers = np.array([*r.kv_layers.tolist(), (2**16, 2**16, 2**16, 0, 0)], KV_LAYER_DTYPE)


def stride_overflow(r: Records) -> None:
    r.kv_layers = np.array([*r.kv_layers.tolist(), (1, 1, 2**31 - 1, 0, 0)], KV_LAYER_DTYPE)


def too_many_values(r: Records) -> None:
    more = [(2**12, 2**16, 2**16, 0, 0)] * 3
    r.kv_layers = np.array([*r.kv_layers.tolist(), *more], KV_LAYER_DTYPE)


def unused_wide_buffer(r: Records) -> None:
    wide = (int(BufferKind.F32), 0, 2**31 - 1, 0, 1, 0, 0, 0)
    r.buffers = np.array([*r.buffers.tolist(), wide], BUFFER_DTYPE)


def attend_logits(r: Records) -> None:
    """Queries of all rows, where only the wanted rows have memory."""
    at, wide = op_of(r, OpKind.ATTENTION), logits_buffer(r)
    qkv = r.buffers[int(r.ops["in"][at, 0])]
    r.buffers["width"][wide], r.buffers["row_bytes"][wide] = qkv["width"], qkv["row_bytes"]
    r.ops["in"][at, 0] = wide


def rows_over_their_copies(r: Records) -> None:
    """Rows are taken out of a buffer while others are written into it."""
    at = op_of(r, OpKind.TAKE_ROWS)
    read, written = int(r.ops["in"][at, 0]), int(r.ops["out"][at])
    r.buffers["offset"][written] = r.buffers["offset"][read] + 64


def op_with_rest(r: Records) -> int:
    return int(np.flatnonzero(r.ops["out_rest"] >= 0)[0])


def rest_is(pick: Callable[[Records, int], int]) -> Spoil:
    """What an op's output leaves over goes to the buffer picked for that op."""

    def spoil(r: Records) -> None:
        at = op_with_rest(r)
        r.ops["out_rest"][at] = pick(r, at)

    return spoil


def rest_of_other_rows(r: Records, at: int) -> int:
    rest = int(r.ops["out_rest"][at])
    r.buffers["rows"][rest] = 1
    return rest


def rest_of_other_width(r: Records, at: int) -> int:
    rest = int(r.ops["out_rest"][at])
    r.buffers["width"][rest], r.buffers["row_bytes"][rest] = 32, 64
    return rest


def rest_of_floats(r: Records) -> None:
    """In a Q8 buffer, but the op's output is not."""
    r.ops["out_rest"][op_of(r, OpKind.LINEAR)] = r.ops["out_rest"][op_with_rest(r)]


def rest_outside(r: Records) -> None:
    """No op reads it any more, but one still writes it."""
    rest = int(r.ops["out_rest"][op_with_rest(r)])
    r.ops["in"][r.ops["in"] == rest] = -1
    r.buffers["offset"][rest] = r.sizes["arena_bytes"]


def rest_over(name: str) -> Callable[[Records, int], int]:
    """Moved to where the buffer of another field lies: items would overwrite each other's."""

    def pick(r: Records, at: int) -> int:
        rest = int(r.ops["out_rest"][at])
        other = r.ops[name][at] if name == "out" else r.ops[name][at, 0]
        r.buffers["offset"][rest] = r.buffers["offset"][int(other)]
        return rest

    return pick


def kind_is(field: str, kind: int) -> Spoil:
    """The output of an op that has a rest, or that rest, becomes of another kind."""

    def spoil(r: Records) -> None:
        r.buffers["kind"][int(r.ops[field][op_with_rest(r)])] = kind

    return spoil


def set_field(array: str, kind: OpKind, name: str, element: int, value: float) -> Spoil:
    def spoil(r: Records) -> None:
        apply(r, (array, op_of(r, kind), name, element, value))

    return spoil


def hidden_in_the_logits(r: Records) -> None:
    r.sizes["hidden"] = logits_buffer(r)


def windowed_and_both_ways(r: Records) -> None:
    """The blocks ahead of a window may be those of others."""
    r.kv_layers["is_windowed"] = 1
    at = op_of(r, OpKind.ATTENTION)
    r.ops["i"][at, 5:7] = 9, 1


def stays_in_the_file(r: Records) -> None:
    """Its rows may be embedded, but there is nothing to multiply."""
    r.tensors[vector(r, OpKind.LINEAR)]["flags"] = LIB.MT_TENSOR_STAYS


def norm_stays_in_the_file(r: Records) -> None:
    r.tensors[vector(r, OpKind.NORM)]["flags"] = LIB.MT_TENSOR_STAYS


def hidden_nowhere(r: Records) -> None:
    r.sizes["hidden"] = len(r.buffers)


NAMED = {
    "hidden states in the logits": (hidden_in_the_logits, "cannot hold hidden states"),
    "hidden states out of buffers": (hidden_nowhere, "cannot hold hidden states"),
    "a window that looks ahead": (windowed_and_both_ways, "op"),
    "gap in a stack of weights": (gap_in_stack, "op"),
    "norm weight that is a matrix": (norm_weight_as_matrix, "op"),
    "codes without a book": (codes_without_a_book, r"tensor \d+ \(format 16.* is not usable"),
    "trig in the logits": (trig_from_logits, "op"),
    "queries in the logits": (attend_logits, "op"),
    "copies over their source": (rows_over_their_copies, "op"),
    "two widths of logits": (two_widths_of_logits, "logits of"),
    "a layer nobody uses": (unused_layer, "KV layer 1 has 65536 heads"),
    "values of 2^31": (stride_overflow, "KV layer 1 has 1 heads of 1 and 2147483647"),
    "layers beyond 64 bits": (too_many_values, "at most"),
    "a buffer nobody uses": (unused_wide_buffer, r"buffer \d+ \(width 2147483647\)"),
    "unknown op": (set_field("ops", OpKind.NORM, "kind", 0, 99), "kind 99"),
    "negative op": (set_field("ops", OpKind.NORM, "kind", 0, -1), "kind -1"),
    "out of buffers": (set_field("ops", OpKind.NORM, "out", 0, 1000), "op"),
    "out of tensors": (set_field("ops", OpKind.EMBED, "w", 0, 1000), "op"),
    "columns beyond the row": (set_field("ops", OpKind.LINEAR, "i", 0, 2**31 - 1), "op"),
    "columns before the row": (set_field("ops", OpKind.LINEAR, "i", 0, -4), "op"),
    "group of none": (set_field("ops", OpKind.NORM, "i", 0, 0), "op"),
    "heads without keys": (set_field("ops", OpKind.ATTENTION, "i", 1, 0), "op"),
    "no such layer": (set_field("ops", OpKind.ATTENTION, "i", 4, 7), "op"),
    "window before the row": (set_field("ops", OpKind.ATTENTION, "i", 5, -1), "op"),
    "both ways and more": (set_field("ops", OpKind.ATTENTION, "i", 6, 2), "op"),
    "embedded by nothing": (set_field("ops", OpKind.EMBED, "i", 0, 3), "op"),
    "sinks that are a matrix": (set_field("ops", OpKind.ATTENTION, "w", 0, 0), "op"),
    "sinks out of tensors": (set_field("ops", OpKind.ATTENTION, "w", 0, 1000), "op"),
    "values normed twice": (set_field("ops", OpKind.ROPE_KV, "i", 9, 2), "op"),
    "products of what stays in the file": (stays_in_the_file, "op"),
    "a norm of what stays in the file": (norm_stays_in_the_file, "op"),
    "a cap below 0": (set_field("ops", OpKind.ATTENTION, "f", 1, -1.0), "op"),
    "a cap that is no number": (set_field("ops", OpKind.ATTENTION, "f", 1, float("nan")), "op"),
    "rest out of buffers": (rest_is(lambda r, at: 1000), "op"),
    "rest in the output itself": (rest_is(lambda r, at: int(r.ops["out"][at])), "op"),
    "rest in floats": (rest_is(lambda r, at: int(r.ops["in"][at, 0])), "op"),
    "rest in the logits": (rest_is(lambda r, at: logits_buffer(r)), "op"),
    "rest of floats": (rest_of_floats, "of kind 3 "),
    "rest of other rows": (rest_is(rest_of_other_rows), "op"),
    "rest of another width": (rest_is(rest_of_other_width), "op"),
    "rest over the output": (rest_is(rest_over("out")), "op"),
    "rest over the input": (rest_is(rest_over("in")), "op"),
    "rest outside the arena": (rest_outside, r"buffer \d+"),
    "rest of bf16": (kind_is("out", BufferKind.BF16), "op"),
    "rest in bf16": (kind_is("out_rest", BufferKind.BF16), "op"),
    "rows of no kind": (kind_is("out", len(BufferKind)), "buffer"),
    "norms neither before nor after": (set_field("ops", OpKind.ROPE_KV, "i", 7, 2), "op"),
    "temperature of no span": (set_field("ops", OpKind.ROPE_KV, "i", 8, -1), "op"),
    "centered twice": (set_field("ops", OpKind.NORM, "i", 1, 2), "op"),
    "a bias out of tensors": (set_field("ops", OpKind.NORM, "w", 1, 1000), "op"),
    "odd rotation": (set_field("ops", OpKind.ROPE_KV, "i", 4, 3), "op"),
}


def a_bias_of_no_up(records: Records) -> None:
    for at, weight in ((1, -1), (3, 0)):
        set_field("ops", OpKind.EXPERT_GLU, "w", at, weight)(records)


EXPERTS = {
    "more chosen than there are": set_field("ops", OpKind.ROUTER, "i", 1, 6),
    "none chosen": set_field("ops", OpKind.ROUTER, "i", 1, 0),
    "an unknown gating": set_field("ops", OpKind.ROUTER, "i", 0, 3),
    "no group": set_field("ops", OpKind.ROUTER, "i", 2, 0),
    "groups that do not divide": set_field("ops", OpKind.ROUTER, "i", 2, 2),
    "more groups than there are": set_field("ops", OpKind.ROUTER, "i", 3, 2),
    "choices from a buffer of other width": set_field("ops", OpKind.EXPERT_GLU, "in", 2, 0),
    "choices out of buffers": set_field("ops", OpKind.EXPERT_SUM, "in", 2, 1000),
    "more experts than the weights have": set_field("ops", OpKind.EXPERT_GLU, "i", 0, 6),
    "more pairs than the buffer has": set_field("ops", OpKind.EXPERT_GLU, "i", 1, 3),
    "an unknown activation": set_field("ops", OpKind.EXPERT_GLU, "i", 2, 99),
    "a bias of no up": a_bias_of_no_up,
    "a bias that is a matrix": set_field("ops", OpKind.EXPERT_SUM, "w", 1, 0),
    "an expert weight that is none": set_field("ops", OpKind.EXPERT_SUM, "w", 0, -1),
    "a gate by rows that are none": set_field("ops", OpKind.ADD, "in", 1, -1),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_that_do_not_fit_are_refused(name: str) -> None:
    records = sound_records("qwen2moe").copy()
    EXPERTS[name](records)
    assert "operands that do not fit" in try_engine(records)


ADAPTERS = {
    "columns beyond the output": set_field("ops", OpKind.ADAPT, "i", 0, 65),
    "columns before the output": set_field("ops", OpKind.ADAPT, "i", 0, -1),
    "an adapter too many": set_field("ops", OpKind.ADAPT, "i", 1, 2),
    "an adapter before the first": set_field("ops", OpKind.ADAPT, "i", 1, -1),
    "factors in the wrong order": set_field("ops", OpKind.ADAPT, "w", 0, 0),
    "a factor in blocks": set_field("ops", OpKind.ADAPT, "w", 1, 1),
    "no second factor": set_field("ops", OpKind.ADAPT, "w", 1, -1),
    "low rows over the input": set_field("ops", OpKind.ADAPT, "in", 1, 0),
    "no input": set_field("ops", OpKind.ADAPT, "in", 0, -1),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_that_do_not_fit_are_refused(name: str) -> None:
    case = next(case for case in OP_CASES if case.name == "adapt-F32")
    records = Records.of(*case.build())
    assert not try_engine(records.copy())
    ADAPTERS[name](records)
    assert "operands that do not fit" in try_engine(records)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", NAMED)
def test_each_is_refused_with_a_message(name: str, arch: str) -> None:
    spoil, message = NAMED[name]
    records = sound_records(arch).copy()
    spoil(records)
    engine, found = records.create()
    if engine != FFI.NULL:
        LIB.mt_engine_free(engine)
    assert engine == FFI.NULL
    assert re.search(message, found), found


@pytest.mark.parametrize("name", ["tokens", "positions", "seq_start", "block_table", "out_rows"])
def test_a_step_without_one_of_its_arrays_is_refused(name: str) -> None:
    records = sound_records("qwen2").copy()
    engine, message = records.create()
    assert engine != FFI.NULL, message
    values = {"tokens": [1], "positions": [0], "seq_start": [0, 1], "block_table": [0]}
    kept = {key: FFI.new("int32_t[]", value) for key, value in {**values, "out_rows": [0]}.items()}
    counts = {"n_rows": 1, "n_seqs": 1, "n_out": 1, "table_width": 1}
    logits, error = FFI.new("float[]", records.logits_width), FFI.new("char[]", LIB.MT_ERR_BYTES)
    try:
        step = FFI.new("mt_step *", {**counts, **kept, "logits": logits})
        assert LIB.mt_engine_run(engine, step, error) == 0
        setattr(step, name, FFI.NULL)
        assert LIB.mt_engine_run(engine, step, error) != 0
        assert FFI.string(error).decode() == "the step has no rows"
    finally:
        LIB.mt_engine_free(engine)
