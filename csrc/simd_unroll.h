/* UNROLL(n) before a loop, as each compiler spells it. For the vector headers. */
#ifndef MT_SIMD_UNROLL_H
#define MT_SIMD_UNROLL_H

#define SIMD_PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define UNROLL(n) SIMD_PRAGMA(unroll n)
#else
#define UNROLL(n) SIMD_PRAGMA(GCC unroll n)
#endif

#endif
