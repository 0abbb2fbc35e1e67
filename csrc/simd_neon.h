/* Sixteen-lane primitives on 64-bit ARM: NEON alone (Cortex-A53, A72), with the dot product (A55, A76,
 * Neoverse) and with products of matrices (A510, X2 and later); meaning in simd_scalar.h. */
#ifndef MT_SIMD_H
#define MT_SIMD_H

#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#include "formats.h"
#include "simd_parts.h"

#if defined(__ARM_FEATURE_MATMUL_INT8)
#define SIMD_HAS_DOT 1
#define SIMD_TAKES_U8 1
#define SIMD_HAS_MATMUL 1 /* of 2 x 8 by 8 x 2 bytes */
#elif defined(__ARM_FEATURE_DOTPROD)
#define SIMD_HAS_DOT 1
#define SIMD_TAKES_U8 0
#define SIMD_HAS_MATMUL 0
#else
#define SIMD_HAS_DOT 0
#define SIMD_TAKES_U8 0
#define SIMD_HAS_MATMUL 0
#endif
#define MM_COLS 4
#define MM_HALVES 2
#define DIRECT_HALVES 1
#define DIRECT_COLS 2
#define ATTN_ROWS 6
#define ATTN_VECS 1

/* Four registers a vector. */
typedef struct {
    float32x4_t v[4];
} vf;
typedef struct {
    int32x4_t v[4];
} vi;
typedef struct {
    uint8x16_t v[4];
} vb;

PARTWISE(vf, vf_load, (const float *p), vld1q_f32(p + 4 * i))
EACH_PART(vf_store, (float *p, vf a), vst1q_f32(p + 4 * i, a.v[i]))
static inline vf vf_set1(float x) {
    const float32x4_t v = vdupq_n_f32(x);
    return (vf){{v, v, v, v}};
}
PARTWISE(vf, vf_add, (vf a, vf b), vaddq_f32(a.v[i], b.v[i]))
PARTWISE(vf, vf_sub, (vf a, vf b), vsubq_f32(a.v[i], b.v[i]))
PARTWISE(vf, vf_mul, (vf a, vf b), vmulq_f32(a.v[i], b.v[i]))
PARTWISE(vf, vf_div, (vf a, vf b), vdivq_f32(a.v[i], b.v[i]))
PARTWISE(vf, vf_fma, (vf a, vf b, vf c), vfmaq_f32(c.v[i], a.v[i], b.v[i]))
/* As x86, where FMAX would keep a NaN: the second operand where the comparison is unordered. */
PARTWISE(vf, vf_max, (vf a, vf b), vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]))
PARTWISE(vf, vf_min, (vf a, vf b), vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]))
PARTWISE(vf, vf_abs, (vf a), vabsq_f32(a.v[i]))
static inline float32x4_t mt_max_of(float32x4_t a, float32x4_t b) {
    return vreinterpretq_f32_u32(vmaxq_u32(vreinterpretq_u32_f32(a), vreinterpretq_u32_f32(b)));
}
PARTWISE(vf, vf_max_abs, (vf a, vf b), mt_max_of(vabsq_f32(a.v[i]), vabsq_f32(b.v[i])))
static inline uint32x4_t mt_max4(vf a) {
    return vreinterpretq_u32_f32(mt_max_of(mt_max_of(a.v[0], a.v[1]), mt_max_of(a.v[2], a.v[3])));
}
static inline vf vf_hmax16(const vf *v) {
    vf r;
    PARTS {
        const vf *p = v + 4 * i;
        const uint32x4_t ab = vpmaxq_u32(mt_max4(p[0]), mt_max4(p[1]));
        const uint32x4_t cd = vpmaxq_u32(mt_max4(p[2]), mt_max4(p[3]));
        r.v[i] = vreinterpretq_f32_u32(vpmaxq_u32(ab, cd));
    }
    return r;
}
PARTWISE(vf, vf_select_lt, (vf x, vf limit, vf a, vf b),
         vbslq_f32(vcltq_f32(x.v[i], limit.v[i]), a.v[i], b.v[i]))
static inline vi vf_round_i32(vf a) {
    vi r;
    UNROLL(4)
    PARTS {
        const uint32x4_t fits = vcltq_f32(vabsq_f32(a.v[i]), vdupq_n_f32(0x1p31f));
        r.v[i] = vbslq_s32(fits, vcvtnq_s32_f32(a.v[i]), vdupq_n_s32(INT32_MIN));
    }
    return r;
}
PARTWISE(vf, vf_from_i32, (vi a), vcvtq_f32_s32(a.v[i]))
PARTWISE(vf, vf_scale2, (vf x, vi n),
         vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x.v[i]), vshlq_n_s32(n.v[i], 23))))

static inline float16x4_t mt_halves(const uint16_t *p) { return vreinterpret_f16_u16(vld1_u16(p)); }
PARTWISE(vf, vf_load_f16, (const uint16_t *p), vcvt_f32_f16(mt_halves(p + 4 * i)))
EACH_PART(vf_store_f16, (uint16_t *p, vf a),
          vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i]))))
static inline float f16_to_f32(uint16_t h) {
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(h))), 0);
}
static inline uint16_t f32_to_f16(float f) {
    return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(f))), 0);
}
PARTWISE(vf, vf_load_bf16, (const uint16_t *p),
         vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)))
/* Not BFCVT: it turns every NaN into the same one, and few cores have it. */
static inline void vf_store_bf16(uint16_t *p, vf a) {
    UNROLL(4)
    PARTS {
        const uint32x4_t bits = vreinterpretq_u32_f32(a.v[i]);
        const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        const uint32x4_t nearest = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
        const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
        const uint32x4_t is_number = vceqq_f32(a.v[i], a.v[i]);
        vst1_u16(p + 4 * i, vshrn_n_u32(vbslq_u32(is_number, nearest, quiet), 16));
    }
}
static inline vf mt_from_u16(uint16x8_t low, uint16x8_t high) {
    return (vf){{vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_high_u16(low)),
                 vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))),
                 vcvtq_f32_u32(vmovl_high_u16(high))}};
}
static inline vf vf_load_u8(const uint8_t *p) {
    const uint8x16_t x = vld1q_u8(p);
    return mt_from_u16(vmovl_u8(vget_low_u8(x)), vmovl_high_u8(x));
}
static inline vf vf_load_i8(const uint8_t *p) {
    const int8x16_t x = vreinterpretq_s8_u8(vld1q_u8(p));
    const int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_high_s8(x);
    return (vf){{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
                 vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
                 vcvtq_f32_s32(vmovl_high_s16(high))}};
}
static inline vf vf_load_exponents(const uint8_t *p) {
    const uint8x16_t x = vld1q_u8(p);
    const uint16x8_t low = vshll_n_u8(vget_low_u8(x), 7), high = vshll_high_n_u8(x, 7);
    return (vf){{vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(low), 16)),
                 vreinterpretq_f32_u32(vshll_high_n_u16(low, 16)),
                 vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(high), 16)),
                 vreinterpretq_f32_u32(vshll_high_n_u16(high, 16))}};
}
/* The same folding as simd_scalar.h: 8+8, 4+4, 2+2, 1+1. */
static inline float vf_hsum(vf a) {
    const float32x4_t q = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
    const float32x2_t pair = vadd_f32(vget_low_f32(q), vget_high_f32(q));
    return vget_lane_f32(pair, 0) + vget_lane_f32(pair, 1);
}
static inline float vf_hmax(vf a) {
    float lanes[16];
    vf_store(lanes, a);
    for (int n = 8; n; n /= 2)
        for (int l = 0; l < n; l++) lanes[l] = lanes[l] > lanes[l + n] ? lanes[l] : lanes[l + n];
    return lanes[0];
}

static inline void vf_load_pairs(const float *p, vf *a, vf *b) {
    UNROLL(4)
    PARTS {
        const float32x4x2_t x = vld2q_f32(p + 8 * i);
        a->v[i] = x.val[0];
        b->v[i] = x.val[1];
    }
}
static inline void vf_store_pairs(float *p, vf a, vf b) {
    UNROLL(4)
    PARTS vst2q_f32(p + 8 * i, ((float32x4x2_t){{a.v[i], b.v[i]}}));
}

/* Four rows of four values at a time: loads that take every fourth value turn them. */
static inline void store_transposed(const float *x, float *out, int stride) {
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 16; j += 4) {
            float block[16];
            for (int r = 0; r < 4; r++) vst1q_f32(block + 4 * r, vld1q_f32(x + 16 * (i + r) + j));
            const float32x4x4_t turned = vld4q_f32(block);
            for (int c = 0; c < 4; c++) vst1q_f32(out + (j + c) * stride + i, turned.val[c]);
        }
}

static inline vi vi_set1(int32_t x) {
    const int32x4_t v = vdupq_n_s32(x);
    return (vi){{v, v, v, v}};
}
PARTWISE(vi, vi_load, (const int32_t *p), vld1q_s32(p + 4 * i))
static inline int8x16_t mt_low_bytes(vi a) {
    const int16x8_t low = vmovn_high_s32(vmovn_s32(a.v[0]), a.v[1]);
    const int16x8_t high = vmovn_high_s32(vmovn_s32(a.v[2]), a.v[3]);
    return vmovn_high_s16(vmovn_s16(low), high);
}
static inline void vi_store_i8(int8_t *p, vi a) { vst1q_s8(p, mt_low_bytes(a)); }
static inline void vi_store_q8(mt_q8_block *to, vi a, vi b, float d) {
    const int8x16_t first = mt_low_bytes(a), second = mt_low_bytes(b);
    const int32_t h0 = vaddlvq_s8(first), h1 = vaddlvq_s8(second);
    vst1q_s8(to->q, first);
    vst1q_s8(to->q + 16, second);
    to->d = d;
    to->ds = d * (float)(h0 + h1);
    to->n8 = -8 * (h0 + h1);
    to->nh8[0] = -8 * h0;
    to->nh8[1] = -8 * h1;
    to->dh[0] = d * (float)h0;
    to->dh[1] = d * (float)h1;
    to->pad = 0;
}

/* The four activations x everywhere. */
static inline int8x16_t mt_broadcast(const int8_t *x) {
    int32_t x4;
    memcpy(&x4, x, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(x4));
}
static inline int8x16_t mt_signed(uint8x16_t w) { return vreinterpretq_s8_u8(w); }
/* c - 128 */
static inline int8x16_t mt_minus_128(uint8x16_t w) {
    return mt_signed(veorq_u8(w, vdupq_n_u8(128)));
}

#if SIMD_TAKES_U8
static inline int32x4_t mt_dot_lane(int32x4_t acc, uint8x16_t w, int8x16_t x, int lane) {
    switch (lane) { /* an immediate */
    case 0: return vusdotq_laneq_s32(acc, w, x, 0);
    case 1: return vusdotq_laneq_s32(acc, w, x, 1);
    case 2: return vusdotq_laneq_s32(acc, w, x, 2);
    default: return vusdotq_laneq_s32(acc, w, x, 3);
    }
}
static inline vi vi_dot(vi acc, vb w, const int8_t *x, int g) {
    const int8x16_t x16 = vld1q_s8(x + g / 4 * 16);
    UNROLL(4)
    PARTS acc.v[i] = mt_dot_lane(acc.v[i], w.v[i], x16, g % 4);
    return acc;
}
#elif SIMD_HAS_DOT
static inline int32x4_t mt_dot_lane(int32x4_t acc, int8x16_t w, int8x16_t x, int lane) {
    switch (lane) { /* an immediate */
    case 0: return vdotq_laneq_s32(acc, w, x, 0);
    case 1: return vdotq_laneq_s32(acc, w, x, 1);
    case 2: return vdotq_laneq_s32(acc, w, x, 2);
    default: return vdotq_laneq_s32(acc, w, x, 3);
    }
}
static inline vi vi_dot(vi acc, vb w, const int8_t *x, int g) {
    const int8x16_t x16 = vld1q_s8(x + g / 4 * 16);
    UNROLL(4)
    PARTS acc.v[i] = mt_dot_lane(acc.v[i], mt_signed(w.v[i]), x16, g % 4);
    return acc;
}
static inline vi vi_dot_signed(vi acc, vb w, const int8_t *x, int g) {
    const int8x16_t x16 = vld1q_s8(x + g / 4 * 16);
    UNROLL(4)
    PARTS acc.v[i] = mt_dot_lane(acc.v[i], mt_minus_128(w.v[i]), x16, g % 4);
    return acc;
}
#else
/* Products of 8 and 8 columns of a register in 16 bits, the four of a row side by side. */
typedef struct {
    int16x8_t low[4], high[4];
} vp;
static inline vp mt_products(const int8x16_t w[4], const int8_t *x) {
    const int8x16_t x4 = mt_broadcast(x);
    vp r;
    UNROLL(4)
    PARTS {
        r.low[i] = vmull_s8(vget_low_s8(w[i]), vget_low_s8(x4));
        r.high[i] = vmull_high_s8(w[i], x4);
    }
    return r;
}
static inline vp vp_dot(vb w, const int8_t *x) {
    const int8x16_t s[4] = {mt_signed(w.v[0]), mt_signed(w.v[1]), mt_signed(w.v[2]),
                            mt_signed(w.v[3])};
    return mt_products(s, x);
}
static inline vp vp_dot_signed(vb w, const int8_t *x) {
    const int8x16_t s[4] = {mt_minus_128(w.v[0]), mt_minus_128(w.v[1]), mt_minus_128(w.v[2]),
                            mt_minus_128(w.v[3])};
    return mt_products(s, x);
}
static inline vp vp_add(vp x, vp y) {
    UNROLL(4)
    PARTS {
        x.low[i] = vaddq_s16(x.low[i], y.low[i]);
        x.high[i] = vaddq_s16(x.high[i], y.high[i]);
    }
    return x;
}
/* Neighbours first: two sums of 16 bits fit as their product of two columns would. */
PARTWISE(vi, vi_add_pairs, (vi acc, vp x), vpadalq_s16(acc.v[i], vpaddq_s16(x.low[i], x.high[i])))
PARTWISE(vi, vi_shift, (vi x, int left), vshlq_s32(x.v[i], vdupq_n_s32(left)))
#endif

PARTWISE(vb, vb_load, (const uint8_t *p), vld1q_u8(p + 16 * i))
EACH_PART(vb_store, (uint8_t *p, vb a), vst1q_u8(p + 16 * i, a.v[i]))
PARTWISE(vb, vb_low4, (vb a), vandq_u8(a.v[i], vdupq_n_u8(15)))
PARTWISE(vb, vb_high4, (vb a), vshrq_n_u8(a.v[i], 4))
static inline uint8x16_t mt_shift8(uint8x16_t x, int left) {
    return vshlq_u8(x, vdupq_n_s8((int8_t)left));
}
/* Bit `bit` of every byte goes where `value` has its one. */
static inline vb vb_or_bit(vb a, vb mask, int bit, int value) {
    UNROLL(4)
    PARTS {
        const uint8x16_t moved = mt_shift8(mask.v[i], __builtin_ctz((unsigned)value) - bit);
        a.v[i] = vorrq_u8(a.v[i], vandq_u8(moved, vdupq_n_u8((uint8_t)value)));
    }
    return a;
}
PARTWISE(vb, vb_pair, (vb a, int pair, int to),
         vandq_u8(mt_shift8(a.v[i], to - 2 * pair), vdupq_n_u8((uint8_t)(3 << to))))
PARTWISE(vb, vb_or, (vb a, vb b), vorrq_u8(a.v[i], b.v[i]))
static inline vf vb_column(vb a, int j) {
    vf r;
    UNROLL(4)
    PARTS {
        const uint32x4_t x = vshlq_u32(vreinterpretq_u32_u8(a.v[i]), vdupq_n_s32(-8 * j));
        r.v[i] = vcvtq_f32_u32(vandq_u32(x, vdupq_n_u32(255)));
    }
    return r;
}
static inline vb vb_lookup16(vb index, const uint8_t *table) {
    const uint8x16_t t = vld1q_u8(table);
    UNROLL(4)
    PARTS index.v[i] = vqtbl1q_u8(t, index.v[i]);
    return index;
}

#endif
