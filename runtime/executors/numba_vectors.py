"""Vectors of 16 lanes for numba kernels, which otherwise get what LLVM happens to vectorise.

Owns: the two vector types and the operations kernels need on them, as LLVM IR that fits every
CPU. Must not know: formats, ops, executors. Called from inside @njit functions only.

Memory is reached through pointers (numba's CPointer, which can be indexed): handing arrays to
helpers would count their references in the innermost loops. Nothing is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending
from numba.core import types
from numba.extending import models, register_model

from .numba_llvm import (
    FLOATS,
    I32,
    INTS,
    LANES,
    SHORTS,
    call,
    constant,
    narrow,
    spread,
    target_has,
    widen,
)

intrinsic: Any = extending.intrinsic  # its declared type has the hidden first argument
_NIBBLES = 0x0F0F0F0F


class VectorType(types.Type):
    """A numba value that LLVM keeps in vector registers."""

    def __init__(self, name: str, llvm_type: ir.Type) -> None:
        self.llvm_type = llvm_type
        super().__init__(name)


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: VectorType) -> None:
        super().__init__(manager, numba_type, numba_type.llvm_type)


I32X16 = VectorType("i32x16", INTS)
F32X16 = VectorType("f32x16", FLOATS)


# -- code generators ---------------------------------------------------------------------------


def _address(builder: Any, pointer: Any, at: Any, to: Any) -> Any:
    return builder.bitcast(builder.gep(pointer, [at]), to.as_pointer())


def _lane_below(builder: Any, end: Any) -> Any:
    """Mask of the lanes below `end`."""
    lanes = ir.Constant(INTS, list(range(LANES)))
    return builder.icmp_signed("<", lanes, spread(builder, builder.trunc(end, I32)))


def _to_ints(builder: Any, floats: Any) -> Any:
    """Whole floats as ints; NaN, which would be undefined behaviour, becomes 0."""
    known = builder.fcmp_ordered("ord", floats, floats)
    return builder.fptosi(builder.select(known, floats, constant(FLOATS, 0.0)), INTS)


def _lanewise(n_args: int, vector: VectorType, build: Callable[..., Any]) -> Any:
    """An intrinsic of 1 or 2 vectors to one of the same type; build(builder, *values)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return build(builder, *args)

    signature = vector(*[vector] * n_args)
    if n_args == 1:
        return intrinsic(lambda typing, a: (signature, generate))
    return intrinsic(lambda typing, a, b: (signature, generate))


def _reduction(combine: Callable[[Any, Any, Any], Any]) -> Any:
    """An intrinsic that combines the lanes in one fixed tree: halves, quarters, eighths, pairs."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = args[0]
        for distance in (8, 4, 2, 1):
            others = ir.Constant(INTS, [(i + distance) % LANES for i in range(LANES)])
            vector = combine(builder, vector, builder.shuffle_vector(vector, vector, others))
        return builder.extract_element(vector, ir.Constant(I32, 0))

    return intrinsic(lambda typing, vector: (types.float32(F32X16), generate))


def _larger(b: Any, x: Any, y: Any) -> Any:
    """NaN where either is."""
    return call(b, "llvm.maximum.v16f32", FLOATS, [x, y])


# -- arithmetic -------------------------------------------------------------------------------

add_i = _lanewise(2, I32X16, lambda b, x, y: b.add(x, y))
add = _lanewise(2, F32X16, lambda b, x, y: b.fadd(x, y))
sub = _lanewise(2, F32X16, lambda b, x, y: b.fsub(x, y))
mul = _lanewise(2, F32X16, lambda b, x, y: b.fmul(x, y))
div = _lanewise(2, F32X16, lambda b, x, y: b.fdiv(x, y))
maximum = _lanewise(2, F32X16, _larger)
minimum = _lanewise(2, F32X16, lambda b, x, y: call(b, "llvm.minimum.v16f32", FLOATS, [x, y]))
low_nibbles = _lanewise(1, I32X16, lambda b, v: b.and_(v, constant(INTS, _NIBBLES)))
high_nibbles = _lanewise(
    1, I32X16, lambda b, v: b.and_(b.lshr(v, constant(INTS, 4)), constant(INTS, _NIBBLES))
)
absolute = _lanewise(1, F32X16, lambda b, v: call(b, "llvm.fabs.v16f32", FLOATS, [v]))
round_even = _lanewise(1, F32X16, lambda b, v: call(b, "llvm.rint.v16f32", FLOATS, [v]))
sum_lanes = _reduction(lambda b, x, y: b.fadd(x, y))
max_lanes = _reduction(_larger)


@intrinsic
def splat_i(typing: Any, value: Any) -> Any:
    return I32X16(types.int32), lambda context, builder, _, args: spread(builder, args[0])


@intrinsic
def splat(typing: Any, value: Any) -> Any:
    return F32X16(types.float32), lambda context, builder, _, args: spread(builder, args[0])


@intrinsic
def lane(typing: Any, vector: Any, at: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(args[0], builder.trunc(args[1], I32))

    return types.float32(F32X16, types.intp), generate


@intrinsic
def to_float(typing: Any, ints: Any) -> Any:
    return F32X16(I32X16), lambda context, builder, _, args: builder.sitofp(args[0], FLOATS)


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c: rounded once where the CPU can do so, and the same way everywhere on it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not target_has(context, "fma"):
            return builder.fadd(builder.fmul(args[0], args[1]), args[2])
        return call(builder, "llvm.fma.v16f32", FLOATS, list(args))

    return F32X16(F32X16, F32X16, F32X16), generate


@intrinsic
def times_power_of_two(typing: Any, x: Any, exponent: Any) -> Any:
    """x * 2 ** exponent for whole exponents within ±250; beyond the float range 0 or infinity."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole = _to_ints(builder, args[1])  # in two halves, each a normal float
        half = builder.ashr(whole, constant(INTS, 1))
        result = args[0]
        for part in (half, builder.sub(whole, half)):
            bits = builder.shl(builder.add(part, constant(INTS, 127)), constant(INTS, 23))
            result = builder.fmul(result, builder.bitcast(bits, FLOATS))
        return result

    return F32X16(F32X16, F32X16), generate


@intrinsic
def keep_lanes(typing: Any, vector: Any, first: Any, end: Any, otherwise: Any) -> Any:
    """Lanes first <= lane < end of the vector, `otherwise` in the rest."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector, first, end, otherwise = args
        kept = builder.and_(builder.not_(_lane_below(builder, first)), _lane_below(builder, end))
        return builder.select(kept, vector, spread(builder, otherwise))

    return F32X16(F32X16, types.intp, types.intp, types.float32), generate


# -- memory -----------------------------------------------------------------------------------


@intrinsic
def pointer(typing: Any, array: Any) -> Any:
    """To the first element of a C-contiguous array, which the caller keeps alive."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.make_array(signature.args[0])(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), generate


@intrinsic
def advance(typing: Any, base: Any, n: Any) -> Any:
    """The pointer n elements further on."""
    return base(base, types.intp), lambda context, builder, _, args: builder.gep(args[0], args[1:])


@intrinsic
def load_bytes(typing: Any, codes: Any, at: Any) -> Any:
    """64 bytes from byte `at`, as 16 lanes of four."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_address(builder, args[0], args[1], INTS), align=1)

    return I32X16(codes, types.intp), generate


@intrinsic
def load(typing: Any, values: Any, at: Any) -> Any:
    """16 values as float32; a uint16 array holds the bits of float16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if signature.args[0].dtype == types.uint16:
            halves = builder.load(_address(builder, args[0], args[1], SHORTS), align=2)
            return widen(context, builder, halves)
        return builder.load(_address(builder, args[0], args[1], FLOATS), align=4)

    return F32X16(values, types.intp), generate


@intrinsic
def load_first(typing: Any, values: Any, at: Any, count: Any) -> Any:
    """The first `count` of 16 float32 values; the other lanes are 0 and their memory not read."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _address(builder, args[0], args[1], FLOATS)
        mask, zeros = _lane_below(builder, args[2]), constant(FLOATS, 0.0)
        args = [address, ir.Constant(I32, 4), mask, zeros]
        return call(builder, "llvm.masked.load.v16f32.p0", FLOATS, args)

    return F32X16(values, types.intp, types.intp), generate


@intrinsic
def store_first(typing: Any, values: Any, at: Any, count: Any, vector: Any) -> Any:
    """Writes the first `count` lanes to a float32 array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _address(builder, args[0], args[1], FLOATS)
        mask = _lane_below(builder, args[2])
        args = [args[3], address, ir.Constant(I32, 4), mask]
        call(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), args)
        return context.get_dummy_value()

    return types.void(values, types.intp, types.intp, F32X16), generate


@intrinsic
def store_rounded(typing: Any, values: Any, at: Any, value: Any) -> Any:
    """values[at] = value in the array's type; a uint16 array takes the bits of float16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = args[2]
        if signature.args[0].dtype == types.uint16:
            value = narrow(context, builder, value)
        address = _address(builder, args[0], args[1], value.type)
        builder.store(value, address)
        return context.get_dummy_value()

    return types.void(values, types.intp, types.float32), generate


@intrinsic
def store(typing: Any, values: Any, at: Any, vector: Any) -> Any:
    """Writes 16 lanes to a float32 array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _address(builder, args[0], args[1], FLOATS), align=4)
        return context.get_dummy_value()

    return types.void(values, types.intp, F32X16), generate


@intrinsic
def store_int8(typing: Any, values: Any, at: Any, vector: Any) -> Any:
    """Writes 16 whole floats within -128 … 127 as bytes; NaN becomes 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bytes_ = ir.VectorType(ir.IntType(8), LANES)
        whole = _to_ints(builder, args[2])
        address = _address(builder, args[0], args[1], bytes_)
        builder.store(builder.trunc(whole, bytes_), address, align=1)
        return context.get_dummy_value()

    return types.void(values, types.intp, F32X16), generate
