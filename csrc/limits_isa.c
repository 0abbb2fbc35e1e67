/* The loops of limits.h, written once against the primitives of simd_*.h and compiled per ISA.
 *
 * A compiler that saw through them would take out the very work that is measured: hence distinct
 * accumulators, and fences after which it must take x to point elsewhere. */
#include "limits.h"

#if defined(__AMX_INT8__)
#include "amx.h"
#endif

/* Enough accumulators to hide the latency of the unit, few enough to stay in registers. */
#if defined(__AVX512VNNI__)
#include "simd_avx512.h"
enum { N_INT8 = 16, N_F32 = 16, FENCE_EACH = 0 };
#elif defined(__AVXVNNI__)
#include "simd_avx2.h"
enum { N_INT8 = 6, N_F32 = 6, FENCE_EACH = 0 };
#elif defined(__AVX2__)
#include "simd_avx2.h"
enum { N_INT8 = 4, N_F32 = 5, FENCE_EACH = 1 }; /* products could be shared by accumulators */
#elif defined(__SSE4_1__)
#include "simd_sse41.h"
enum { N_INT8 = 2, N_F32 = 2, FENCE_EACH = 1 };
#elif defined(MT_NEON)
#include "simd_neon.h"
enum { N_INT8 = SIMD_HAS_DOT ? 5 : 2, N_F32 = 5, FENCE_EACH = 1 };
#else
#include "simd_scalar.h"
enum { N_INT8 = 1, N_F32 = 1, FENCE_EACH = 1 };
#endif

#define FENCE(p) __asm__ volatile("" : "+r"(p))

#if defined(__AMX_INT8__)
static int64_t multiply_int8(int n_rounds, const int32_t *operands, int32_t *sink) {
    enum { TILE_PRODUCTS = 16 * 16 * 64 };
    _Alignas(64) int32_t sums[16];
    amx_config config = {.palette = 1};
    for (int i = 0; i < 6; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = 16;
    }
    amx_configure(&config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, operands, 0); /* every row the same */
    _tile_loadd(5, operands + 16, 0);
    for (int r = 0; r < n_rounds; r++) {
        _tile_dpbsud(0, 4, 5);
        _tile_dpbsud(1, 4, 5);
        _tile_dpbsud(2, 4, 5);
        _tile_dpbsud(3, 4, 5);
    }
    _tile_stored(0, sums, 0);
    _tile_release();
    *sink = sums[0];
    return (int64_t)n_rounds * 4 * TILE_PRODUCTS;
}
#elif !SIMD_HAS_DOT
/* As codes of four bits are multiplied: eight products share one widening to 32 bits. Codes of eight
 * bits need one for each, and so reach at most 9 / 16 of this. */
static int64_t multiply_int8(int n_rounds, const int32_t *operands, int32_t *sink) {
    enum { SHARED = 8 };
    const int8_t *x = (const int8_t *)operands;
    const vb codes = vb_load((const uint8_t *)operands);
    vi acc = vi_load(operands);
    for (int r = 0; r < n_rounds; r++) {
        vp pairs[N_INT8];
#pragma GCC unroll 8
        for (int g = 0; g < SHARED; g++)
#pragma GCC unroll 4
            for (int i = 0; i < N_INT8; i++) {
                FENCE(x);
                const vp product = vp_dot(codes, x);
                pairs[i] = g ? vp_add(pairs[i], product) : product;
            }
#pragma GCC unroll 4
        for (int i = 0; i < N_INT8; i++) acc = vi_add_pairs(acc, pairs[i]);
    }
    *sink = (int32_t)vf_hsum(vf_from_i32(acc));
    return (int64_t)n_rounds * SHARED * N_INT8 * 64;
}
#elif defined(MT_NEON) && SIMD_HAS_MATMUL
/* Products of matrices of 2 x 8 and 8 x 2. */
static int64_t multiply_int8(int n_rounds, const int32_t *operands, int32_t *sink) {
    enum { SUMS = 16, PRODUCTS = 2 * 8 * 2 };
    const int8x16_t codes = vld1q_s8((const int8_t *)operands);
    const int8x16_t x = vld1q_s8((const int8_t *)(operands + 4));
    int32x4_t acc[SUMS];
#pragma GCC unroll 16
    for (int i = 0; i < SUMS; i++) acc[i] = vld1q_s32(operands + i);
    for (int r = 0; r < n_rounds; r++)
#pragma GCC unroll 16
        for (int i = 0; i < SUMS; i++) acc[i] = vmmlaq_s32(acc[i], codes, x);
    int32_t sum = 0;
#pragma GCC unroll 16
    for (int i = 0; i < SUMS; i++) sum ^= vaddvq_s32(acc[i]);
    *sink = sum;
    return (int64_t)n_rounds * SUMS * PRODUCTS;
}
#else
static int64_t multiply_int8(int n_rounds, const int32_t *operands, int32_t *sink) {
    const int8_t *x = (const int8_t *)operands;
    const vb codes = vb_load((const uint8_t *)operands);
    vi acc[N_INT8];
#pragma GCC unroll 16
    for (int i = 0; i < N_INT8; i++) acc[i] = vi_load(operands + i);
    for (int r = 0; r < n_rounds; r++) {
        FENCE(x);
#pragma GCC unroll 16
        for (int i = 0; i < N_INT8; i++) {
            if (FENCE_EACH) FENCE(x);
            acc[i] = vi_dot(acc[i], codes, x, 0);
        }
    }
    int32_t sum = 0;
#pragma GCC unroll 16
    for (int i = 0; i < N_INT8; i++) sum ^= (int32_t)vf_hsum(vf_from_i32(acc[i]));
    *sink = sum;
    return (int64_t)n_rounds * N_INT8 * 64;
}
#endif

static int64_t multiply_f32(int n_rounds, const float *operands, float *sink) {
    const float *x = operands;
    const vf weights = vf_load(operands);
    vf acc[N_F32];
#pragma GCC unroll 16
    for (int i = 0; i < N_F32; i++) acc[i] = vf_load(operands + i);
    for (int r = 0; r < n_rounds; r++) {
        FENCE(x);
        const vf values = vf_load(x);
#pragma GCC unroll 16
        for (int i = 0; i < N_F32; i++) acc[i] = vf_fma(weights, values, acc[i]);
    }
    float sum = 0;
#pragma GCC unroll 16
    for (int i = 0; i < N_F32; i++) sum += vf_hsum(acc[i]);
    *sink = sum;
    return (int64_t)n_rounds * N_F32 * 16;
}

#define MT_LOOPS_NAME2(isa) mt_limit_loops_##isa
#define MT_LOOPS_NAME(isa) MT_LOOPS_NAME2(isa)

const mt_limit_loops MT_LOOPS_NAME(MT_ISA) = {
    .multiply_int8 = multiply_int8,
    .multiply_f32 = multiply_f32,
};
