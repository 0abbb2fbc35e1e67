/* Sixteen-lane primitives on SSE4.1 and SSSE3, for x86 without AVX2; meaning in simd_scalar.h. These
 * machines have no fused multiply-add and no half floats: both are made of what there is, exactly. */
#ifndef MT_SIMD_H
#define MT_SIMD_H

#include <smmintrin.h>
#include <stdint.h>
#include <string.h>

#include "formats.h"
#include "simd_parts.h"

#define SIMD_HAS_DOT 0
#define SIMD_TAKES_U8 0
#define MM_COLS 2
#define MM_HALVES 1
#define DIRECT_HALVES 1
#define DIRECT_COLS MM_COLS
#define ATTN_ROWS 2
#define ATTN_VECS 1

/* Four registers a vector. */
typedef struct {
    __m128 v[4];
} vf;
typedef struct {
    __m128i v[4];
} vi;
typedef vi vb;
typedef vi vp; /* 32 lanes of 16 bits */

PARTWISE(vf, vf_load, (const float *p), _mm_loadu_ps(p + 4 * i))
EACH_PART(vf_store, (float *p, vf a), _mm_storeu_ps(p + 4 * i, a.v[i]))
static inline vf vf_set1(float x) {
    const __m128 v = _mm_set1_ps(x);
    return (vf){{v, v, v, v}};
}
PARTWISE(vf, vf_add, (vf a, vf b), _mm_add_ps(a.v[i], b.v[i]))
PARTWISE(vf, vf_sub, (vf a, vf b), _mm_sub_ps(a.v[i], b.v[i]))
PARTWISE(vf, vf_mul, (vf a, vf b), _mm_mul_ps(a.v[i], b.v[i]))
PARTWISE(vf, vf_div, (vf a, vf b), _mm_div_ps(a.v[i], b.v[i]))

/* p + c rounded to odd, from s = p + c rounded to nearest: whatever a double is rounded to after
 * that, it is rounded as the exact sum would be (Boldo and Melquiond, 2008). */
static inline __m128d mt_to_odd(__m128d p, __m128d c, __m128d s) {
    const __m128d part = _mm_sub_pd(s, p), zero = _mm_setzero_pd();
    const __m128d error = _mm_add_pd(_mm_sub_pd(p, _mm_sub_pd(s, part)), _mm_sub_pd(c, part));
    const __m128i bits = _mm_castpd_si128(s), one = _mm_set1_epi64x(1);
    const __m128i is_even = _mm_cmpeq_epi64(_mm_and_si128(bits, one), _mm_setzero_si128());
    const __m128d is_inexact = _mm_or_pd(_mm_cmplt_pd(error, zero), _mm_cmpgt_pd(error, zero));
    const __m128i signs = _mm_srai_epi32(_mm_castpd_si128(_mm_xor_pd(error, s)), 31);
    const __m128i step = _mm_or_si128(_mm_shuffle_epi32(signs, 0xf5), one); /* 1, or -1 inwards */
    const __m128i where = _mm_and_si128(is_even, _mm_castpd_si128(is_inexact));
    return _mm_castsi128_pd(_mm_add_epi64(bits, _mm_and_si128(step, where)));
}
/* The product of two floats is exact as a double. Their sum is rounded twice, to 53 bits and to 24,
 * which differs from rounding once only where the first comes to lie halfway. */
static inline __m128 mt_fma(__m128 a, __m128 b, __m128 c) {
    const __m128i below = _mm_set1_epi64x(0x1fffffff), half = _mm_set1_epi64x(0x10000000);
    const __m128 high_c = _mm_movehl_ps(c, c);
    const __m128d c0 = _mm_cvtps_pd(c), c1 = _mm_cvtps_pd(high_c);
    const __m128d p0 = _mm_mul_pd(_mm_cvtps_pd(a), _mm_cvtps_pd(b));
    const __m128d p1 =
        _mm_mul_pd(_mm_cvtps_pd(_mm_movehl_ps(a, a)), _mm_cvtps_pd(_mm_movehl_ps(b, b)));
    __m128d s0 = _mm_add_pd(p0, c0), s1 = _mm_add_pd(p1, c1);
    const __m128i tie0 = _mm_cmpeq_epi64(_mm_and_si128(_mm_castpd_si128(s0), below), half);
    const __m128i tie1 = _mm_cmpeq_epi64(_mm_and_si128(_mm_castpd_si128(s1), below), half);
    if (__builtin_expect(_mm_movemask_epi8(_mm_or_si128(tie0, tie1)), 0)) {
        s0 = mt_to_odd(p0, c0, s0);
        s1 = mt_to_odd(p1, c1, s1);
    }
    return _mm_movelh_ps(_mm_cvtpd_ps(s0), _mm_cvtpd_ps(s1));
}
PARTWISE(vf, vf_fma, (vf a, vf b, vf c), mt_fma(a.v[i], b.v[i], c.v[i]))

PARTWISE(vf, vf_max, (vf a, vf b), _mm_max_ps(a.v[i], b.v[i]))
PARTWISE(vf, vf_min, (vf a, vf b), _mm_min_ps(a.v[i], b.v[i]))
PARTWISE(vf, vf_abs, (vf a), _mm_andnot_ps(_mm_set1_ps(-0.0f), a.v[i]))
static inline __m128 mt_max_of(__m128 a, __m128 b) {
    return _mm_castsi128_ps(_mm_max_epi32(_mm_castps_si128(a), _mm_castps_si128(b)));
}
static inline vf vf_max_abs(vf a, vf b) {
    const vf p = vf_abs(a), q = vf_abs(b);
    UNROLL(4)
    PARTS a.v[i] = mt_max_of(p.v[i], q.v[i]);
    return a;
}
static inline __m128 mt_max4(vf a) {
    return mt_max_of(mt_max_of(a.v[0], a.v[1]), mt_max_of(a.v[2], a.v[3]));
}
static inline vf vf_hmax16(const vf *v) {
    vf r;
    PARTS {
        __m128 w = mt_max4(v[4 * i]), x = mt_max4(v[4 * i + 1]);
        __m128 y = mt_max4(v[4 * i + 2]), z = mt_max4(v[4 * i + 3]);
        _MM_TRANSPOSE4_PS(w, x, y, z);
        r.v[i] = mt_max_of(mt_max_of(w, x), mt_max_of(y, z));
    }
    return r;
}
PARTWISE(vf, vf_select_lt, (vf x, vf limit, vf a, vf b),
         _mm_blendv_ps(b.v[i], a.v[i], _mm_cmplt_ps(x.v[i], limit.v[i])))
PARTWISE(vi, vf_round_i32, (vf a), _mm_cvtps_epi32(a.v[i]))
PARTWISE(vf, vf_from_i32, (vi a), _mm_cvtepi32_ps(a.v[i]))
PARTWISE(vf, vf_scale2, (vf x, vi n),
         _mm_castsi128_ps(_mm_add_epi32(_mm_castps_si128(x.v[i]), _mm_slli_epi32(n.v[i], 23))))

/* Integers all the way, but for subnormal halves: floats that small would be flushed. */
static inline __m128 mt_from_halves(__m128i h) {
    const __m128i sign = _mm_slli_epi32(_mm_and_si128(h, _mm_set1_epi32(0x8000)), 16);
    const __m128i rest = _mm_and_si128(h, _mm_set1_epi32(0x7fff));
    const __m128i shift = _mm_set1_epi32(112 << 23), top = _mm_set1_epi32(0x7bff);
    const __m128i above = _mm_and_si128(_mm_cmpgt_epi32(rest, top), shift); /* inf and NaN */
    const __m128i normal = _mm_add_epi32(_mm_add_epi32(_mm_slli_epi32(rest, 13), shift), above);
    const __m128 small = _mm_mul_ps(_mm_cvtepi32_ps(rest), _mm_set1_ps(0x1p-24f));
    const __m128i is_small = _mm_cmplt_epi32(rest, _mm_set1_epi32(0x400));
    const __m128i bits = _mm_blendv_epi8(normal, _mm_castps_si128(small), is_small);
    return _mm_castsi128_ps(_mm_or_si128(bits, sign));
}
static inline __m128i mt_load_u16(const uint16_t *p) {
    return _mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
}
PARTWISE(vf, vf_load_f16, (const uint16_t *p), mt_from_halves(mt_load_u16(p + 4 * i)))
static inline float f16_to_f32(uint16_t h) {
    return _mm_cvtss_f32(mt_from_halves(_mm_cvtsi32_si128(h)));
}
/* Round to nearest even, overflow to infinity, NaN kept quiet; as simd_scalar.h has it. */
static inline __m128i mt_to_halves(__m128 x) {
    const __m128i bits = _mm_castps_si128(x), a = _mm_and_si128(bits, _mm_set1_epi32(0x7fffffff));
    const __m128i sign = _mm_and_si128(_mm_srli_epi32(bits, 16), _mm_set1_epi32(0x8000));
    const __m128i odd = _mm_and_si128(_mm_srli_epi32(a, 13), _mm_set1_epi32(1));
    const __m128i biased = _mm_add_epi32(a, _mm_add_epi32(odd, _mm_set1_epi32((int)0xc8000fffu)));
    __m128i r = _mm_srli_epi32(biased, 13);
    /* below the normal halves: adding a half puts the last kept bit where a float has its own */
    const __m128 sum = _mm_add_ps(_mm_castsi128_ps(a), _mm_set1_ps(0.5f));
    const __m128i small = _mm_sub_epi32(_mm_castps_si128(sum), _mm_set1_epi32(0x3f000000));
    r = _mm_blendv_epi8(r, small, _mm_cmplt_epi32(a, _mm_set1_epi32(0x38800000)));
    const __m128i infinite = _mm_cmpgt_epi32(a, _mm_set1_epi32(0x477fefff));
    r = _mm_blendv_epi8(r, _mm_set1_epi32(0x7c00), infinite);
    const __m128i payload = _mm_and_si128(_mm_srli_epi32(a, 13), _mm_set1_epi32(0x3ff));
    const __m128i quiet = _mm_or_si128(payload, _mm_set1_epi32(0x7e00));
    r = _mm_blendv_epi8(r, quiet, _mm_cmpgt_epi32(a, _mm_set1_epi32(0x7f800000)));
    return _mm_or_si128(r, sign);
}
static inline void mt_store_u16(uint16_t *p, __m128i x) {
    _mm_storel_epi64((__m128i *)(void *)p, _mm_packus_epi32(x, x));
}
EACH_PART(vf_store_f16, (uint16_t *p, vf a), mt_store_u16(p + 4 * i, mt_to_halves(a.v[i])))
static inline uint16_t f32_to_f16(float f) {
    return (uint16_t)_mm_extract_epi16(mt_to_halves(_mm_set_ss(f)), 0);
}
PARTWISE(vf, vf_load_bf16, (const uint16_t *p),
         _mm_castsi128_ps(_mm_slli_epi32(mt_load_u16(p + 4 * i), 16)))
static inline void vf_store_bf16(uint16_t *p, vf a) {
    UNROLL(4)
    PARTS {
        const __m128i bits = _mm_castps_si128(a.v[i]);
        const __m128i odd = _mm_and_si128(_mm_srli_epi32(bits, 16), _mm_set1_epi32(1));
        const __m128i nearest = _mm_add_epi32(bits, _mm_add_epi32(odd, _mm_set1_epi32(0x7fff)));
        const __m128i quiet = _mm_or_si128(bits, _mm_set1_epi32(0x400000));
        const __m128i is_nan = _mm_castps_si128(_mm_cmpunord_ps(a.v[i], a.v[i]));
        mt_store_u16(p + 4 * i, _mm_srli_epi32(_mm_blendv_epi8(nearest, quiet, is_nan), 16));
    }
}
static inline __m128i mt_load4(const uint8_t *p) {
    int32_t x4;
    memcpy(&x4, p, 4);
    return _mm_cvtsi32_si128(x4);
}
PARTWISE(vf, vf_load_u8, (const uint8_t *p),
         _mm_cvtepi32_ps(_mm_cvtepu8_epi32(mt_load4(p + 4 * i))))
PARTWISE(vf, vf_load_i8, (const uint8_t *p),
         _mm_cvtepi32_ps(_mm_cvtepi8_epi32(mt_load4(p + 4 * i))))
PARTWISE(vf, vf_load_exponents, (const uint8_t *p),
         _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu8_epi32(mt_load4(p + 4 * i)), 23)))
/* The same folding as simd_scalar.h: 8+8, 4+4, 2+2, 1+1. */
static inline float vf_hsum(vf a) {
    __m128 q = _mm_add_ps(_mm_add_ps(a.v[0], a.v[2]), _mm_add_ps(a.v[1], a.v[3]));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
static inline float vf_hmax(vf a) {
    __m128 q = _mm_max_ps(_mm_max_ps(a.v[0], a.v[2]), _mm_max_ps(a.v[1], a.v[3]));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}

static inline void vf_load_pairs(const float *p, vf *a, vf *b) {
    UNROLL(4)
    PARTS {
        const __m128 x = _mm_loadu_ps(p + 8 * i), y = _mm_loadu_ps(p + 8 * i + 4);
        a->v[i] = _mm_shuffle_ps(x, y, 0x88);
        b->v[i] = _mm_shuffle_ps(x, y, 0xdd);
    }
}
static inline void vf_store_pairs(float *p, vf a, vf b) {
    UNROLL(4)
    PARTS {
        _mm_storeu_ps(p + 8 * i, _mm_unpacklo_ps(a.v[i], b.v[i]));
        _mm_storeu_ps(p + 8 * i + 4, _mm_unpackhi_ps(a.v[i], b.v[i]));
    }
}
static inline void store_transposed(const float *x, float *out, int stride) {
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 16; j += 4) {
            const float *p = x + 16 * i + j;
            float *to = out + j * stride + i;
            __m128 r0 = _mm_loadu_ps(p), r1 = _mm_loadu_ps(p + 16);
            __m128 r2 = _mm_loadu_ps(p + 32), r3 = _mm_loadu_ps(p + 48);
            _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
            _mm_storeu_ps(to, r0);
            _mm_storeu_ps(to + stride, r1);
            _mm_storeu_ps(to + 2 * stride, r2);
            _mm_storeu_ps(to + 3 * stride, r3);
        }
}

static inline vi vi_set1(int32_t x) {
    const __m128i v = _mm_set1_epi32(x);
    return (vi){{v, v, v, v}};
}
PARTWISE(vi, vi_load, (const int32_t *p),
         _mm_loadu_si128((const __m128i *)(const void *)(p + 4 * i)))
static inline __m128i mt_low_bytes(vi a) {
    const __m128i low = _mm_set1_epi32(255);
    const __m128i first = _mm_packus_epi32(_mm_and_si128(a.v[0], low), _mm_and_si128(a.v[1], low));
    const __m128i second = _mm_packus_epi32(_mm_and_si128(a.v[2], low), _mm_and_si128(a.v[3], low));
    return _mm_packus_epi16(first, second);
}
static inline void vi_store_i8(int8_t *p, vi a) {
    _mm_storeu_si128((__m128i *)(void *)p, mt_low_bytes(a));
}
/* Of 16 signed bytes: as if they were unsigned, 128 more each. */
static inline int32_t mt_sum_i8(__m128i x) {
    const __m128i sums =
        _mm_sad_epu8(_mm_xor_si128(x, _mm_set1_epi8((char)0x80)), _mm_setzero_si128());
    return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 16 * 128;
}
static inline void vi_store_q8(mt_q8_block *to, vi a, vi b, float d) {
    const __m128i first = mt_low_bytes(a), second = mt_low_bytes(b);
    const int32_t h0 = mt_sum_i8(first), h1 = mt_sum_i8(second);
    _mm_storeu_si128((__m128i *)(void *)to->q, first);
    _mm_storeu_si128((__m128i *)(void *)(to->q + 16), second);
    to->d = d;
    to->ds = d * (float)(h0 + h1);
    to->n8 = -8 * (h0 + h1);
    to->nh8[0] = -8 * h0;
    to->nh8[1] = -8 * h1;
    to->dh[0] = d * (float)h0;
    to->dh[1] = d * (float)h1;
    to->pad = 0;
}
static inline __m128i mt_broadcast(const int8_t *x) {
    int32_t x4;
    memcpy(&x4, x, 4);
    return _mm_set1_epi32(x4);
}
/* Sums of neighbouring products in 16 bits: cheap to add up, until they would not fit. */
static inline vp vp_dot(vb w, const int8_t *x) {
    const __m128i x4 = mt_broadcast(x);
    UNROLL(4)
    PARTS w.v[i] = _mm_maddubs_epi16(w.v[i], x4);
    return w;
}
/* |w| * (x with w's sign): 2 * 128 * 127 still fits into int16. */
static inline vp vp_dot_signed(vb u, const int8_t *x) {
    const __m128i x4 = mt_broadcast(x);
    UNROLL(4)
    PARTS {
        const __m128i w = _mm_xor_si128(u.v[i], _mm_set1_epi8((char)0x80));
        u.v[i] = _mm_maddubs_epi16(_mm_abs_epi8(w), _mm_sign_epi8(x4, w));
    }
    return u;
}
static inline vp vp_add(vp x, vp y) {
    UNROLL(4)
    PARTS x.v[i] = _mm_add_epi16(x.v[i], y.v[i]);
    return x;
}
PARTWISE(vi, vi_add_pairs, (vi acc, vp x),
         _mm_add_epi32(acc.v[i], _mm_madd_epi16(x.v[i], _mm_set1_epi16(1))))
PARTWISE(vi, vi_shift, (vi x, int left),
         left < 0 ? _mm_srai_epi32(x.v[i], -left) : _mm_slli_epi32(x.v[i], left))

PARTWISE(vb, vb_load, (const uint8_t *p),
         _mm_loadu_si128((const __m128i *)(const void *)(p + 16 * i)))
EACH_PART(vb_store, (uint8_t *p, vb a), _mm_storeu_si128((__m128i *)(void *)(p + 16 * i), a.v[i]))
PARTWISE(vb, vb_low4, (vb a), _mm_and_si128(a.v[i], _mm_set1_epi8(15)))
static inline vb vb_high4(vb a) {
    UNROLL(4)
    PARTS a.v[i] = _mm_srli_epi16(a.v[i], 4);
    return vb_low4(a);
}
/* Bits of a byte that would leave it come into its neighbour, where the mask takes them off. */
static inline __m128i mt_moved(__m128i x, int left, int mask) {
    const __m128i moved = left < 0 ? _mm_srli_epi16(x, -left) : _mm_slli_epi16(x, left);
    return _mm_and_si128(moved, _mm_set1_epi8((char)mask));
}
static inline vb vb_or_bit(vb a, vb mask, int bit, int value) {
    const int left = __builtin_ctz((unsigned)value) - bit;
    UNROLL(4)
    PARTS a.v[i] = _mm_or_si128(a.v[i], mt_moved(mask.v[i], left, value));
    return a;
}
PARTWISE(vb, vb_pair, (vb a, int pair, int to), mt_moved(a.v[i], to - 2 * pair, 3 << to))
PARTWISE(vb, vb_or, (vb a, vb b), _mm_or_si128(a.v[i], b.v[i]))
static inline vf vb_column(vb a, int j) {
    vf r;
    UNROLL(4)
    PARTS {
        const __m128i x = _mm_srli_epi32(a.v[i], 8 * j);
        r.v[i] = _mm_cvtepi32_ps(_mm_and_si128(x, _mm_set1_epi32(255)));
    }
    return r;
}
static inline vb vb_lookup16(vb index, const uint8_t *table) {
    const __m128i t = _mm_loadu_si128((const __m128i *)(const void *)table);
    UNROLL(4)
    PARTS index.v[i] = _mm_shuffle_epi8(t, index.v[i]);
    return index;
}

#endif
