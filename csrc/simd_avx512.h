/* Sixteen-lane primitives on AVX-512 (F, BW, VL, DQ, VNNI); see simd_scalar.h for their meaning. */
#ifndef MT_SIMD_H
#define MT_SIMD_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "simd_q8.h"
#include "simd_unroll.h"

#define SIMD_HAS_DOT 1
#define SIMD_TAKES_U8 1
#define MM_COLS 6
#define MM_HALVES 2
#define DIRECT_HALVES MM_HALVES
#define DIRECT_COLS MM_COLS
#define ATTN_ROWS 6
#define ATTN_VECS 4

typedef __m512 vf;
typedef __m512i vi;
typedef __m512i vb;

static inline vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void vf_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
static inline vf vf_set1(float x) { return _mm512_set1_ps(x); }
static inline vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
static inline vf vf_abs(vf a) { return _mm512_abs_ps(a); }
static inline __m512 mt_max_of(__m512 a, __m512 b) {
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
static inline vf vf_max_abs(vf a, vf b) { return mt_max_of(_mm512_abs_ps(a), _mm512_abs_ps(b)); }
/* Each row of four lanes with its neighbour: those of a, then those of b. */
static inline __m512 mt_max_rows(__m512 a, __m512 b) {
    return mt_max_of(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
/* First within every row of four lanes, where the results of four vectors come to lie in order. */
static inline vf vf_hmax16(const vf *v) {
    __m512 fours[4];
    for (int i = 0; i < 4; i++) {
        const vf *p = v + 4 * i;
        const __m512d ab = _mm512_castps_pd(
            mt_max_of(_mm512_unpacklo_ps(p[0], p[1]), _mm512_unpackhi_ps(p[0], p[1])));
        const __m512d cd = _mm512_castps_pd(
            mt_max_of(_mm512_unpacklo_ps(p[2], p[3]), _mm512_unpackhi_ps(p[2], p[3])));
        fours[i] = mt_max_of(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    }
    return mt_max_rows(mt_max_rows(fours[0], fours[1]), mt_max_rows(fours[2], fours[3]));
}
static inline vf vf_select_lt(vf x, vf limit, vf a, vf b) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), b, a);
}
static inline vi vf_round_i32(vf a) { return _mm512_cvtps_epi32(a); }
static inline vf vf_from_i32(vi a) { return _mm512_cvtepi32_ps(a); }
static inline vf vf_scale2(vf x, vi n) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_slli_epi32(n, 23)));
}
static inline vf vf_load_f16(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
static inline void vf_store_f16(uint16_t *p, vf a) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
static inline float f16_to_f32(uint16_t h) {
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h)));
}
static inline uint16_t f32_to_f16(float f) {
    return (uint16_t)_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(f), _MM_FROUND_TO_NEAREST_INT), 0);
}
static inline vf vf_load_bf16(const uint16_t *p) {
    __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
}
static inline void vf_store_bf16(uint16_t *p, vf a) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i nearest =
        _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(nearest, is_nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
}
static inline vf vf_load_u8(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
static inline vf vf_load_i8(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
static inline vf vf_load_exponents(const uint8_t *p) {
    const __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(e, 23));
}
/* The same folding as simd_scalar.h: 8+8, 4+4, 2+2, 1+1. */
static inline float vf_hsum(vf a) {
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
static inline float vf_hmax(vf a) {
    __m256 h = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}

static inline void vf_load_pairs(const float *p, vf *a, vf *b) {
    const __m512i even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    const __m512 x = _mm512_loadu_ps(p), y = _mm512_loadu_ps(p + 16);
    *a = _mm512_permutex2var_ps(x, even, y);
    *b = _mm512_permutex2var_ps(x, odd, y);
}
static inline void vf_store_pairs(float *p, vf a, vf b) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    _mm512_storeu_ps(p, _mm512_permutex2var_ps(a, low, b));
    _mm512_storeu_ps(p + 16, _mm512_permutex2var_ps(a, high, b));
}

/* Four rows of four values are turned in each quarter of a register; which four rows, and of which
 * columns, the loads decide. */
static inline __m512 mt_load_rows4(const float *x) {
    const __m512 a = _mm512_castps128_ps512(_mm_loadu_ps(x));
    const __m512 ab = _mm512_insertf32x4(a, _mm_loadu_ps(x + 16 * 4), 1);
    const __m512 abc = _mm512_insertf32x4(ab, _mm_loadu_ps(x + 16 * 8), 2);
    return _mm512_insertf32x4(abc, _mm_loadu_ps(x + 16 * 12), 3);
}
static inline void store_transposed(const float *x, float *out, int stride) {
    for (int j = 0; j < 16; j += 4, out += 4 * stride) {
        __m512 r[4];
        for (int i = 0; i < 4; i++) r[i] = mt_load_rows4(x + 16 * i + j);
        const __m512 a = _mm512_unpacklo_ps(r[0], r[1]), b = _mm512_unpackhi_ps(r[0], r[1]);
        const __m512 c = _mm512_unpacklo_ps(r[2], r[3]), d = _mm512_unpackhi_ps(r[2], r[3]);
        _mm512_storeu_ps(out, _mm512_shuffle_ps(a, c, 0x44));
        _mm512_storeu_ps(out + stride, _mm512_shuffle_ps(a, c, 0xee));
        _mm512_storeu_ps(out + 2 * stride, _mm512_shuffle_ps(b, d, 0x44));
        _mm512_storeu_ps(out + 3 * stride, _mm512_shuffle_ps(b, d, 0xee));
    }
}

static inline vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
static inline vi vi_load(const int32_t *p) { return _mm512_loadu_si512(p); }
static inline vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
static inline void vi_store_i8(int8_t *p, vi a) {
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(a));
}
static inline void vi_store_q8(mt_q8_block *to, vi a, vi b, float d) {
    mt_store_q8(to, _mm256_set_m128i(_mm512_cvtepi32_epi8(b), _mm512_cvtepi32_epi8(a)), d);
}
static inline vi vi_dot(vi acc, vb a, const int8_t *x, int g) {
    int32_t x4;
    memcpy(&x4, x + 4 * g, 4);
    return _mm512_dpbusd_epi32(acc, a, _mm512_set1_epi32(x4));
}

static inline vb vb_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
static inline void vb_store(uint8_t *p, vb a) { _mm512_storeu_si512(p, a); }
static inline vb vb_low4(vb a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
static inline vb vb_high4(vb a) {
    return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15));
}
static inline vb vb_or_bit(vb a, vb mask, int bit, int value) {
    __mmask64 set = _mm512_test_epi8_mask(mask, _mm512_set1_epi8((char)(1 << bit)));
    return _mm512_mask_add_epi8(a, set, a, _mm512_set1_epi8((char)value));
}
static inline vb vb_pair(vb a, int pair, int to) {
    int shift = 2 * pair - to;
    vb moved =
        shift > 0 ? _mm512_srli_epi16(a, (unsigned)shift) : _mm512_slli_epi16(a, (unsigned)-shift);
    return _mm512_and_si512(moved, _mm512_set1_epi8((char)(3 << to)));
}
static inline vb vb_or(vb a, vb b) { return _mm512_or_si512(a, b); }
static inline vf vb_column(vb a, int j) {
    const __m512i byte =
        _mm512_and_si512(_mm512_srli_epi32(a, (unsigned)(8 * j)), _mm512_set1_epi32(255));
    return _mm512_cvtepi32_ps(byte);
}
static inline vb vb_lookup16(vb index, const uint8_t *table) {
    __m128i t = _mm_loadu_si128((const __m128i *)table);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(t), index);
}

#endif
