"""What the code generators of numba kernels share: LLVM types of 16 lanes, and the target CPU.

Owns: short names for LLVM IR, and float16 conversion, which on old CPUs is a libm call that numba
cannot link. Must not know: numba types or kernels.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

LANES = 16
I16, I32, F16, F32 = ir.IntType(16), ir.IntType(32), ir.HalfType(), ir.FloatType()
SHORTS, INTS, HALVES, FLOATS = (ir.VectorType(t, LANES) for t in (I16, I32, F16, F32))
# Part of the architecture, hence not in LLVM's list of features; "f16c" is float16 conversion.
_ALWAYS = {"x86_64": ("sse2",), "aarch64": ("fma", "f16c"), "arm64": ("fma", "f16c")}


def constant(vector: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(vector, [value] * vector.count)


def spread(builder: Any, value: Any) -> Any:
    """The scalar in every lane."""
    undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, constant(INTS, 0))


def call(builder: Any, name: str, returns: Any, args: list[Any]) -> Any:
    """Calls an LLVM intrinsic by name."""
    fn_type = ir.FunctionType(returns, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, fn_type, name), args)


def target_has(context: Any, feature: str) -> bool:
    """Whether the CPU that numba compiles for has an LLVM feature (NUMBA_CPU_NAME counts)."""
    triple, _, features = context.codegen().magic_tuple()
    part_of_architecture = _ALWAYS.get(triple.split("-")[0], ())
    return feature in part_of_architecture or f"+{feature}" in features.split(",")


# -- float16 ----------------------------------------------------------------------------------


def widen(context: Any, builder: Any, bits: Any) -> Any:
    """16 float16s, as int16 lanes, to float32."""
    if target_has(context, "f16c"):
        return builder.fpext(builder.bitcast(bits, HALVES), FLOATS)
    bits = builder.zext(bits, INTS)
    sign = builder.shl(builder.and_(bits, constant(INTS, 0x8000)), constant(INTS, 16))
    rest = builder.shl(builder.and_(bits, constant(INTS, 0x7FFF)), constant(INTS, 13))
    # The exponent counts from another bias; multiplying also normalizes subnormal numbers.
    scaled = builder.fmul(builder.bitcast(rest, FLOATS), constant(FLOATS, 2.0**112))
    is_special = builder.icmp_unsigned(">=", rest, constant(INTS, 0x7C00 << 13))
    special = builder.or_(rest, constant(INTS, 0x7F800000))  # infinity, NaN
    value = builder.select(is_special, special, builder.bitcast(scaled, INTS))
    return builder.bitcast(builder.or_(value, sign), FLOATS)


def narrow(context: Any, builder: Any, value: Any) -> Any:
    """A float32 to the bits of the nearest float16, ties to even."""
    if target_has(context, "f16c"):
        return builder.bitcast(builder.fptrunc(value, F16), I16)
    bits = builder.bitcast(value, I32)
    rest = builder.and_(bits, I32(0x7FFFFFFF))
    is_odd = builder.and_(builder.lshr(rest, I32(13)), I32(1))
    rounded = builder.add(rest, builder.add(is_odd, I32(0xFFF - (112 << 23))))
    normal = builder.lshr(rounded, I32(13))
    # Adding 0.5 puts the last place of a float32 where the last place of a subnormal half is.
    shifted = builder.fadd(builder.bitcast(rest, F32), F32(0.5))
    subnormal = builder.sub(builder.bitcast(shifted, I32), I32(126 << 23))
    is_nan = builder.icmp_unsigned(">", rest, I32(0x7F800000))
    special = builder.select(is_nan, I32(0x7E00), I32(0x7C00))
    half = builder.select(builder.icmp_unsigned("<", rest, I32(113 << 23)), subnormal, normal)
    half = builder.select(builder.icmp_unsigned(">=", rest, I32(143 << 23)), special, half)
    sign = builder.and_(builder.lshr(bits, I32(16)), I32(0x8000))
    return builder.trunc(builder.or_(half, sign), I16)
