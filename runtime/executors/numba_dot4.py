"""The four-byte dot product that quantized matmul is made of, by what the CPU offers.

Owns: `dot4` and the table of instructions behind it; all rows give the same integers. Must not
know: formats or matrices. A CPU that is not in the table gets plain multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types

from .numba_llvm import I32, INTS, LANES, call, constant, spread, target_has
from .numba_vectors import I32X16, intrinsic


@intrinsic
def dot4(typing: Any, acc: Any, codes: Any, x: Any) -> Any:
    """acc + per lane: the sum of its four unsigned bytes times the four signed bytes of x."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for feature, build, lanes, name in _X86:
            if target_has(context, feature):
                return build(builder, lanes, name, args[0], args[1], spread(builder, args[2]))
        return _plain(builder, *args)

    return I32X16(I32X16, I32X16, types.int32), generate


def _plain(builder: Any, acc: Any, codes: Any, x: Any) -> Any:
    for byte in range(4):
        up, down = ir.Constant(I32, 24 - 8 * byte), ir.Constant(I32, 24)
        signed = builder.ashr(builder.shl(x, up), down)
        unsigned = builder.lshr(codes, constant(INTS, 8 * byte))
        unsigned = builder.and_(unsigned, constant(INTS, 0xFF))
        acc = builder.add(acc, builder.mul(unsigned, spread(builder, signed)))
    return acc


def _vnni(builder: Any, lanes: int, name: str, acc: Any, codes: Any, x: Any) -> Any:
    part = ir.VectorType(I32, lanes)
    return _in_parts(
        builder, lanes, [acc, codes, x], lambda values: call(builder, name, part, values)
    )


def _multiply_add_pairs(builder: Any, lanes: int, name: str, acc: Any, codes: Any, x: Any) -> Any:
    """Even and odd bytes as int16, each pair multiplied and added by one instruction."""
    shorts = ir.VectorType(ir.IntType(16), 2 * LANES)
    eight, low = constant(shorts, 8), constant(shorts, 0xFF)
    codes, x = builder.bitcast(codes, shorts), builder.bitcast(x, shorts)
    pairs = (
        (builder.and_(codes, low), builder.ashr(builder.shl(x, eight), eight)),
        (builder.lshr(codes, eight), builder.ashr(x, eight)),
    )
    part, part_shorts = ir.VectorType(I32, lanes), ir.VectorType(ir.IntType(16), 2 * lanes)

    def multiply_add(values: list[Any]) -> Any:
        return call(builder, name, part, [builder.bitcast(v, part_shorts) for v in values])

    for pair in pairs:
        values = [builder.bitcast(v, INTS) for v in pair]
        acc = builder.add(acc, _in_parts(builder, lanes, values, multiply_add))
    return acc


def _in_parts(builder: Any, lanes: int, values: list[Any], work: Callable[[list[Any]], Any]) -> Any:
    """Applies work to slices of `lanes` lanes of the values, and joins the results."""
    parts = []
    for start in range(0, LANES, lanes):
        index = ir.Constant(ir.VectorType(I32, lanes), list(range(start, start + lanes)))
        parts.append(work([builder.shuffle_vector(v, v, index) for v in values]))
    while len(parts) > 1:
        n = parts[0].type.count
        both = ir.Constant(ir.VectorType(I32, 2 * n), list(range(2 * n)))
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [builder.shuffle_vector(a, b, both) for a, b in pairs]
    return parts[0]


# (LLVM feature it needs, code generator, lanes of the instruction, LLVM's name), best first.
_X86: tuple[tuple[str, Callable[..., Any], int, str], ...] = (
    ("avx512vnni", _vnni, 16, "llvm.x86.avx512.vpdpbusd.512"),
    ("avxvnni", _vnni, 8, "llvm.x86.avx512.vpdpbusd.256"),
    ("avx512bw", _multiply_add_pairs, 16, "llvm.x86.avx512.pmaddw.d.512"),
    ("avx2", _multiply_add_pairs, 8, "llvm.x86.avx2.pmadd.wd"),
    ("sse2", _multiply_add_pairs, 4, "llvm.x86.sse2.pmadd.wd"),
)
