/* Sixteen-lane primitives on AVX2 + FMA + F16C, and on AVX-VNNI; meaning in simd_scalar.h. */
#ifndef MT_SIMD_H
#define MT_SIMD_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "simd_q8.h"
#include "simd_unroll.h"

#ifdef __AVXVNNI__
#define SIMD_HAS_DOT 1
#define SIMD_TAKES_U8 1
#define MM_COLS 3
#define DIRECT_HALVES 1
#define DIRECT_COLS MM_COLS
#else
#define SIMD_HAS_DOT 0
#define SIMD_TAKES_U8 0
#define MM_COLS 4 /* the sums between blocks lie in memory: a load and a store for 20 operations */
#define DIRECT_HALVES 2 /* in one walk, or nothing would be fetched during the second */
#define DIRECT_COLS 8
#endif
#define MM_HALVES 1
#define ATTN_ROWS 6
#define ATTN_VECS 1

typedef struct {
    __m256 a, b;
} vf;
typedef struct {
    __m256i a, b;
} vi;
typedef struct {
    __m256i a, b;
} vb;
#ifndef __AVXVNNI__
typedef vi vp; /* 32 lanes of 16 bits */
#define VP2 VI2
#endif

#define VF2(expr_a, expr_b) ((vf){(expr_a), (expr_b)})
#define VI2(expr_a, expr_b) ((vi){(expr_a), (expr_b)})
#define VB2(expr_a, expr_b) ((vb){(expr_a), (expr_b)})

static inline vf vf_load(const float *p) { return VF2(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
static inline void vf_store(float *p, vf x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
static inline vf vf_set1(float x) { return VF2(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
static inline vf vf_add(vf x, vf y) {
    return VF2(_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b));
}
static inline vf vf_sub(vf x, vf y) {
    return VF2(_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b));
}
static inline vf vf_mul(vf x, vf y) {
    return VF2(_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b));
}
static inline vf vf_div(vf x, vf y) {
    return VF2(_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b));
}
static inline vf vf_fma(vf x, vf y, vf z) {
    return VF2(_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b));
}
static inline vf vf_max(vf x, vf y) {
    return VF2(_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b));
}
static inline vf vf_min(vf x, vf y) {
    return VF2(_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b));
}
static inline vf vf_abs(vf x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return VF2(_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b));
}
static inline __m256 mt_max_of(__m256 a, __m256 b) {
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}
static inline vf vf_max_abs(vf x, vf y) {
    const vf p = vf_abs(x), q = vf_abs(y);
    return VF2(mt_max_of(p.a, q.a), mt_max_of(p.b, q.b));
}
/* First within every row of four lanes, where the results of four vectors come to lie in order. */
static inline __m256 mt_hmax4(const vf *v) {
    __m256 x[4];
    for (int i = 0; i < 4; i++) x[i] = mt_max_of(v[i].a, v[i].b);
    const __m256d ab =
        _mm256_castps_pd(mt_max_of(_mm256_unpacklo_ps(x[0], x[1]), _mm256_unpackhi_ps(x[0], x[1])));
    const __m256d cd =
        _mm256_castps_pd(mt_max_of(_mm256_unpacklo_ps(x[2], x[3]), _mm256_unpackhi_ps(x[2], x[3])));
    return mt_max_of(_mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)),
                     _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd)));
}
static inline __m256 mt_hmax8(const vf *v) {
    const __m256 x = mt_hmax4(v), y = mt_hmax4(v + 4);
    return mt_max_of(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
}
static inline vf vf_hmax16(const vf *v) { return VF2(mt_hmax8(v), mt_hmax8(v + 8)); }
static inline vf vf_select_lt(vf x, vf limit, vf a, vf b) {
    return VF2(_mm256_blendv_ps(b.a, a.a, _mm256_cmp_ps(x.a, limit.a, _CMP_LT_OQ)),
               _mm256_blendv_ps(b.b, a.b, _mm256_cmp_ps(x.b, limit.b, _CMP_LT_OQ)));
}
static inline vi vf_round_i32(vf x) {
    return VI2(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
}
static inline vf vf_from_i32(vi x) { return VF2(_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)); }
static inline __m256 mt_scale2(__m256 x, __m256i n) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(n, 23)));
}
static inline vf vf_scale2(vf x, vi n) { return VF2(mt_scale2(x.a, n.a), mt_scale2(x.b, n.b)); }
static inline __m256 mt_load_f16(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
static inline vf vf_load_f16(const uint16_t *p) { return VF2(mt_load_f16(p), mt_load_f16(p + 8)); }
static inline void vf_store_f16(uint16_t *p, vf x) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
static inline float f16_to_f32(uint16_t h) {
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h)));
}
static inline uint16_t f32_to_f16(float f) {
    return (uint16_t)_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(f), _MM_FROUND_TO_NEAREST_INT), 0);
}
static inline __m256 mt_load_bf16(const uint16_t *p) {
    __m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
}
static inline vf vf_load_bf16(const uint16_t *p) {
    return VF2(mt_load_bf16(p), mt_load_bf16(p + 8));
}
static inline __m256i mt_round_bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i nearest =
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(nearest, quiet, is_nan), 16);
}
static inline void vf_store_bf16(uint16_t *p, vf x) {
    const __m256i words = _mm256_packus_epi32(mt_round_bf16(x.a), mt_round_bf16(x.b));
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(words, 0xd8));
}
static inline __m256 mt_load_u8(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
static inline __m256 mt_load_i8(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
static inline vf vf_load_u8(const uint8_t *p) { return VF2(mt_load_u8(p), mt_load_u8(p + 8)); }
static inline vf vf_load_i8(const uint8_t *p) { return VF2(mt_load_i8(p), mt_load_i8(p + 8)); }
static inline __m256 mt_load_exponents(const uint8_t *p) {
    const __m256i e = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}
static inline vf vf_load_exponents(const uint8_t *p) {
    return VF2(mt_load_exponents(p), mt_load_exponents(p + 8));
}
/* The same folding as simd_scalar.h: 8+8, 4+4, 2+2, 1+1. */
static inline float vf_hsum(vf x) {
    __m256 h = _mm256_add_ps(x.a, x.b);
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
static inline float vf_hmax(vf x) {
    __m256 h = _mm256_max_ps(x.a, x.b);
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}

static inline __m256 mt_even(__m256 x, __m256 y) { /* x0 x2 x4 x6 y0 y2 y4 y6 */
    const __m256 pairs = _mm256_shuffle_ps(x, y, 0x88);
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(pairs), 0xd8));
}
static inline __m256 mt_odd(__m256 x, __m256 y) {
    const __m256 pairs = _mm256_shuffle_ps(x, y, 0xdd);
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(pairs), 0xd8));
}
static inline void vf_load_pairs(const float *p, vf *a, vf *b) {
    const vf x = vf_load(p), y = vf_load(p + 16);
    *a = VF2(mt_even(x.a, x.b), mt_even(y.a, y.b));
    *b = VF2(mt_odd(x.a, x.b), mt_odd(y.a, y.b));
}
static inline void mt_store_pairs(float *p, __m256 a, __m256 b) {
    const __m256 low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
    _mm256_storeu_ps(p, _mm256_permute2f128_ps(low, high, 0x20));
    _mm256_storeu_ps(p + 8, _mm256_permute2f128_ps(low, high, 0x31));
}
static inline void vf_store_pairs(float *p, vf a, vf b) {
    mt_store_pairs(p, a.a, b.a);
    mt_store_pairs(p + 16, a.b, b.b);
}

/* Four rows of four values are turned in each half of a register; which four rows, and of which
 * columns, the loads decide. */
static inline void mt_turn8(const float *x, float *out, int stride) {
    __m256 r[4];
    for (int i = 0; i < 4; i++)
        r[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(x + 16 * i)),
                                    _mm_loadu_ps(x + 16 * (i + 4)), 1);
    const __m256 a = _mm256_unpacklo_ps(r[0], r[1]), b = _mm256_unpackhi_ps(r[0], r[1]);
    const __m256 c = _mm256_unpacklo_ps(r[2], r[3]), d = _mm256_unpackhi_ps(r[2], r[3]);
    _mm256_storeu_ps(out, _mm256_shuffle_ps(a, c, 0x44));
    _mm256_storeu_ps(out + stride, _mm256_shuffle_ps(a, c, 0xee));
    _mm256_storeu_ps(out + 2 * stride, _mm256_shuffle_ps(b, d, 0x44));
    _mm256_storeu_ps(out + 3 * stride, _mm256_shuffle_ps(b, d, 0xee));
}
static inline void store_transposed(const float *x, float *out, int stride) {
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 16; j += 4) mt_turn8(x + 16 * i + j, out + j * stride + i, stride);
}

static inline vi vi_set1(int32_t x) { return VI2(_mm256_set1_epi32(x), _mm256_set1_epi32(x)); }
static inline vi vi_load(const int32_t *p) {
    return VI2(_mm256_loadu_si256((const __m256i *)p),
               _mm256_loadu_si256((const __m256i *)(p + 8)));
}
/* The low bytes of 16 lanes. Packing goes by 128-bit halves, so the words are put in order after. */
static inline __m128i mt_low_bytes(vi x) {
    const __m256i low = _mm256_set1_epi32(255);
    const __m256i words =
        _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
    const __m256i in_order = _mm256_permute4x64_epi64(words, 0xd8);
    return _mm_packus_epi16(_mm256_castsi256_si128(in_order),
                            _mm256_extracti128_si256(in_order, 1));
}
static inline void vi_store_i8(int8_t *p, vi x) {
    _mm_storeu_si128((__m128i *)(void *)p, mt_low_bytes(x));
}
static inline void vi_store_q8(mt_q8_block *to, vi a, vi b, float d) {
    mt_store_q8(to, _mm256_set_m128i(mt_low_bytes(b), mt_low_bytes(a)), d);
}
#if SIMD_HAS_DOT
static inline vi vi_dot(vi acc, vb w, const int8_t *x, int g) {
    int32_t x4;
    memcpy(&x4, x + 4 * g, 4);
    __m256i v = _mm256_set1_epi32(x4);
    return VI2(_mm256_dpbusd_avx_epi32(acc.a, w.a, v), _mm256_dpbusd_avx_epi32(acc.b, w.b, v));
}
#else
/* Sums of neighbouring products in 16 bits: cheap to add up, until they would not fit. */
static inline vp vp_dot(vb w, const int8_t *x) {
    int32_t x4;
    memcpy(&x4, x, 4);
    __m256i v = _mm256_set1_epi32(x4);
    return VP2(_mm256_maddubs_epi16(w.a, v), _mm256_maddubs_epi16(w.b, v));
}
/* |w| * (x with w's sign): 2 * 128 * 127 still fits into int16. */
static inline __m256i mt_dot_signed(__m256i u, __m256i s) {
    __m256i w = _mm256_xor_si256(u, _mm256_set1_epi8((char)0x80));
    return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(s, w));
}
static inline vp vp_dot_signed(vb w, const int8_t *x) {
    int32_t x4;
    memcpy(&x4, x, 4);
    __m256i v = _mm256_set1_epi32(x4);
    return VP2(mt_dot_signed(w.a, v), mt_dot_signed(w.b, v));
}
/* Left to itself gcc makes all products of a block before it adds any, in registers it lacks. */
static inline __m256i mt_in_order(__m256i x) {
    __asm__("" : "+x"(x));
    return x;
}
static inline __m256i mt_shift(__m256i x, int left) {
    return left < 0 ? _mm256_srai_epi32(x, -left) : _mm256_slli_epi32(x, left);
}
static inline vi vi_shift(vi x, int left) { return VI2(mt_shift(x.a, left), mt_shift(x.b, left)); }
static inline vp vp_add(vp x, vp y) {
    return VP2(mt_in_order(_mm256_add_epi16(x.a, y.a)), mt_in_order(_mm256_add_epi16(x.b, y.b)));
}
static inline __m256i mt_add_pairs(__m256i acc, __m256i pairs) {
    return mt_in_order(_mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
}
static inline vi vi_add_pairs(vi acc, vp x) {
    return VI2(mt_add_pairs(acc.a, x.a), mt_add_pairs(acc.b, x.b));
}
#endif

static inline vb vb_load(const uint8_t *p) {
    return VB2(_mm256_loadu_si256((const __m256i *)p),
               _mm256_loadu_si256((const __m256i *)(p + 32)));
}
static inline void vb_store(uint8_t *p, vb x) {
    _mm256_storeu_si256((__m256i *)p, x.a);
    _mm256_storeu_si256((__m256i *)(p + 32), x.b);
}
static inline vb vb_low4(vb x) {
    const __m256i m = _mm256_set1_epi8(15);
    return VB2(_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m));
}
static inline vb vb_high4(vb x) {
    return vb_low4(VB2(_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)));
}
/* Bit `bit` of every byte goes where `value` has its one, within its own byte. */
static inline __m256i mt_or_bit(__m256i x, __m256i mask, int bit, int value) {
    const int left = __builtin_ctz((unsigned)value) - bit;
    const __m256i moved = left > 0   ? _mm256_slli_epi16(mask, left)
                          : left < 0 ? _mm256_srli_epi16(mask, -left)
                                     : mask;
    return _mm256_or_si256(x, _mm256_and_si256(moved, _mm256_set1_epi8((char)value)));
}
static inline vb vb_or_bit(vb x, vb mask, int bit, int value) {
    return VB2(mt_or_bit(x.a, mask.a, bit, value), mt_or_bit(x.b, mask.b, bit, value));
}
static inline __m256i mt_pair(__m256i x, int pair, int to) {
    int shift = 2 * pair - to;
    __m256i moved = shift > 0 ? _mm256_srli_epi16(x, shift) : _mm256_slli_epi16(x, -shift);
    return _mm256_and_si256(moved, _mm256_set1_epi8((char)(3 << to)));
}
static inline vb vb_pair(vb x, int pair, int to) {
    return VB2(mt_pair(x.a, pair, to), mt_pair(x.b, pair, to));
}
static inline vb vb_or(vb x, vb y) {
    return VB2(_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b));
}
static inline __m256 mt_column(__m256i x, int j) {
    return _mm256_cvtepi32_ps(
        _mm256_and_si256(_mm256_srli_epi32(x, 8 * j), _mm256_set1_epi32(255)));
}
static inline vf vb_column(vb x, int j) { return VF2(mt_column(x.a, j), mt_column(x.b, j)); }
static inline vb vb_lookup16(vb index, const uint8_t *table) {
    __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    return VB2(_mm256_shuffle_epi8(t, index.a), _mm256_shuffle_epi8(t, index.b));
}

#endif
