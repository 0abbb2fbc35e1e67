/* Sixteen-lane primitives in plain C: the meaning of every primitive, and the baseline build.
 *
 * The same names exist in simd_avx2.h, simd_avx512.h and simd_neon.h. A lane of one primitive computes exactly
 * the same IEEE operation in all of them, so kernels written against these names give equal bits.
 */
#ifndef MT_SIMD_H
#define MT_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "formats.h"

#define SIMD_HAS_DOT 1  /* products of u8 x s8 go straight to 32 bits */
#define SIMD_TAKES_U8 1 /* of every u8; else of those below 128 */
#define MM_COLS 2       /* columns of one matmul tile */
#define MM_HALVES 1     /* 16-row halves of the 32-row weight tile taken together */
#define DIRECT_HALVES 1 /* the same where nothing is unpacked */
#define DIRECT_COLS 2   /* columns up to which that is faster than unpacking once */
#define ATTN_ROWS 2     /* query rows that share one load of a key or value */
#define ATTN_VECS 2     /* vectors of keys or values that they take together */
#define UNROLL(n)       /* loops over lanes are long enough */

typedef struct {
    float v[16];
} vf;
typedef struct {
    int32_t v[16];
} vi;
typedef struct {
    uint8_t v[64];
} vb;

#define LANES for (int l = 0; l < 16; l++)
#define BYTES for (int l = 0; l < 64; l++)

static inline vf vf_load(const float *p) {
    vf r;
    memcpy(&r, p, sizeof r);
    return r;
}
static inline void vf_store(float *p, vf a) { memcpy(p, &a, sizeof a); }
static inline vf vf_set1(float x) {
    vf r;
    LANES r.v[l] = x;
    return r;
}
static inline vf vf_add(vf a, vf b) {
    LANES a.v[l] += b.v[l];
    return a;
}
static inline vf vf_sub(vf a, vf b) {
    LANES a.v[l] -= b.v[l];
    return a;
}
static inline vf vf_mul(vf a, vf b) {
    LANES a.v[l] *= b.v[l];
    return a;
}
static inline vf vf_div(vf a, vf b) {
    LANES a.v[l] /= b.v[l];
    return a;
}
static inline vf vf_fma(vf a, vf b, vf c) {
    LANES c.v[l] = fmaf(a.v[l], b.v[l], c.v[l]);
    return c;
}
/* As x86: the second operand where the comparison is false or unordered. */
static inline vf vf_max(vf a, vf b) {
    LANES a.v[l] = a.v[l] > b.v[l] ? a.v[l] : b.v[l];
    return a;
}
static inline vf vf_min(vf a, vf b) {
    LANES a.v[l] = a.v[l] < b.v[l] ? a.v[l] : b.v[l];
    return a;
}
static inline vf vf_abs(vf a) {
    LANES a.v[l] = fabsf(a.v[l]);
    return a;
}
/* The larger of |a| and |b| by their bits, so that NaN is larger than all numbers. */
static inline vf vf_max_abs(vf a, vf b) {
    LANES {
        uint32_t x, y;
        memcpy(&x, &a.v[l], 4);
        memcpy(&y, &b.v[l], 4);
        x &= 0x7fffffffu;
        y &= 0x7fffffffu;
        if (y > x) x = y;
        memcpy(&a.v[l], &x, 4);
    }
    return a;
}
/* lane i: the largest lane of v[i] by its bits; none is negative */
static inline vf vf_hmax16(const vf *v) {
    vf r;
    for (int i = 0; i < 16; i++) {
        uint32_t most = 0;
        LANES {
            uint32_t x;
            memcpy(&x, &v[i].v[l], 4);
            if (x > most) most = x;
        }
        memcpy(&r.v[i], &most, 4);
    }
    return r;
}
/* a where x < limit, else b */
static inline vf vf_select_lt(vf x, vf limit, vf a, vf b) {
    LANES b.v[l] = x.v[l] < limit.v[l] ? a.v[l] : b.v[l];
    return b;
}
/* As x86: NaN and what does not fit become INT32_MIN. */
static inline vi vf_round_i32(vf a) {
    vi r;
    LANES r.v[l] = fabsf(a.v[l]) < 0x1p31f ? (int32_t)rintf(a.v[l]) : INT32_MIN;
    return r;
}
static inline vf vf_from_i32(vi a) {
    vf r;
    LANES r.v[l] = (float)a.v[l];
    return r;
}
/* x * 2^n for normal results */
static inline vf vf_scale2(vf x, vi n) {
    LANES {
        uint32_t bits;
        memcpy(&bits, &x.v[l], 4);
        bits += (uint32_t)n.v[l] << 23;
        memcpy(&x.v[l], &bits, 4);
    }
    return x;
}

static inline float f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = (h >> 10) & 31, man = h & 0x3ff, bits;
    float f;
    if (exp == 31) {
        bits = sign | 0x7f800000u | (man << 13);
    } else if (exp) {
        bits = sign | ((exp + 112) << 23) | (man << 13);
    } else {
        f = (float)man * 0x1p-24f;
        memcpy(&bits, &f, 4);
        bits |= sign;
    }
    memcpy(&f, &bits, 4);
    return f;
}
/* Round to nearest even, overflow to infinity, NaN kept quiet. */
static inline uint16_t f32_to_f16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint16_t sign = (uint16_t)((bits >> 16) & 0x8000);
    uint32_t a = bits & 0x7fffffffu;
    if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((a >> 13) & 0x3ffu));
    if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (a < 0x38800000u) { /* subnormal half: round by adding a power of two */
        float x, magic = 0.5f;
        memcpy(&x, &a, 4);
        x += magic;
        memcpy(&a, &x, 4);
        return (uint16_t)(sign | (a - 0x3f000000u));
    }
    a += 0xc8000fffu + ((a >> 13) & 1);
    return (uint16_t)(sign | (a >> 13));
}

static inline vf vf_load_f16(const uint16_t *p) {
    vf r;
    LANES r.v[l] = f16_to_f32(p[l]);
    return r;
}
static inline void vf_store_f16(uint16_t *p, vf a) { LANES p[l] = f32_to_f16(a.v[l]); }
static inline vf vf_load_bf16(const uint16_t *p) {
    vf r;
    LANES {
        uint32_t bits = (uint32_t)p[l] << 16;
        memcpy(&r.v[l], &bits, 4);
    }
    return r;
}
/* Round to nearest even, overflow to infinity, NaN kept quiet; nothing is too small. */
static inline void vf_store_bf16(uint16_t *p, vf a) {
    LANES {
        uint32_t bits;
        memcpy(&bits, &a.v[l], 4);
        const uint32_t nearest = bits + 0x7fffu + ((bits >> 16) & 1);
        const int is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
        p[l] = (uint16_t)((is_nan ? bits | 0x400000u : nearest) >> 16);
    }
}
static inline vf vf_load_u8(const uint8_t *p) {
    vf r;
    LANES r.v[l] = (float)p[l];
    return r;
}
static inline vf vf_load_i8(const uint8_t *p) {
    vf r;
    LANES r.v[l] = (float)(int8_t)p[l];
    return r;
}
/* Powers of two from the exponents of their floats; 0 from 0. */
static inline vf vf_load_exponents(const uint8_t *p) {
    vf r;
    LANES {
        const uint32_t bits = (uint32_t)p[l] << 23;
        memcpy(&r.v[l], &bits, 4);
    }
    return r;
}
/* Sum and maximum of the lanes, folding halves: 8+8, 4+4, 2+2, 1+1. */
static inline float vf_hsum(vf a) {
    for (int n = 8; n; n /= 2)
        for (int l = 0; l < n; l++) a.v[l] += a.v[l + n];
    return a.v[0];
}
static inline float vf_hmax(vf a) {
    for (int n = 8; n; n /= 2)
        for (int l = 0; l < n; l++) a.v[l] = a.v[l] > a.v[l + n] ? a.v[l] : a.v[l + n];
    return a.v[0];
}

/* 32 values a0 b0 a1 b1 ... to a and b, and back. */
static inline void vf_load_pairs(const float *p, vf *a, vf *b) {
    LANES {
        a->v[l] = p[2 * l];
        b->v[l] = p[2 * l + 1];
    }
}
static inline void vf_store_pairs(float *p, vf a, vf b) {
    LANES {
        p[2 * l] = a.v[l];
        p[2 * l + 1] = b.v[l];
    }
}

/* out[j][i] = x[i][j] of 16 x 16 values; rows of out are `stride` apart */
static inline void store_transposed(const float *x, float *out, int stride) {
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) out[j * stride + i] = x[16 * i + j];
}

static inline vi vi_set1(int32_t x) {
    vi r;
    LANES r.v[l] = x;
    return r;
}
static inline vi vi_load(const int32_t *p) {
    vi r;
    memcpy(&r, p, sizeof r);
    return r;
}
/* the low byte of every lane */
static inline void vi_store_i8(int8_t *p, vi a) { LANES p[l] = (int8_t)a.v[l]; }
/* a block of activations: the low bytes of a and b as codes, their scale d, and their sums */
static inline void vi_store_q8(mt_q8_block *to, vi a, vi b, float d) {
    int32_t h0 = 0, h1 = 0;
    vi_store_i8(to->q, a);
    vi_store_i8(to->q + 16, b);
    LANES {
        h0 += to->q[l];
        h1 += to->q[16 + l];
    }
    to->d = d;
    to->ds = d * (float)(h0 + h1);
    to->n8 = -8 * (h0 + h1);
    to->nh8[0] = -8 * h0;
    to->nh8[1] = -8 * h1;
    to->dh[0] = d * (float)h0;
    to->dh[1] = d * (float)h1;
    to->pad = 0;
}
/* lane l: acc + sum over j < 4 of u8 a[4 l + j] * s8 x[4 g + j]; the 16 values around may be read */
static inline vi vi_dot(vi acc, vb a, const int8_t *x, int g) {
    LANES {
        int32_t s = 0;
        for (int j = 0; j < 4; j++) s += (int32_t)a.v[4 * l + j] * x[4 * g + j];
        acc.v[l] = (int32_t)((uint32_t)acc.v[l] + (uint32_t)s);
    }
    return acc;
}
static inline vb vb_load(const uint8_t *p) {
    vb r;
    memcpy(&r, p, sizeof r);
    return r;
}
static inline void vb_store(uint8_t *p, vb a) { memcpy(p, &a, sizeof a); }
static inline vb vb_low4(vb a) {
    BYTES a.v[l] &= 15;
    return a;
}
static inline vb vb_high4(vb a) {
    BYTES a.v[l] >>= 4;
    return a;
}
/* a | value where bit `bit` of mask is set */
static inline vb vb_or_bit(vb a, vb mask, int bit, int value) {
    BYTES if (mask.v[l] >> bit & 1) a.v[l] |= (uint8_t)value;
    return a;
}
/* the two bits of each byte at 2 * pair, moved to bit `to` */
static inline vb vb_pair(vb a, int pair, int to) {
    BYTES a.v[l] = (uint8_t)((a.v[l] >> 2 * pair & 3) << to);
    return a;
}
static inline vb vb_or(vb a, vb b) {
    BYTES a.v[l] |= b.v[l];
    return a;
}
/* lane l: byte 4 l + j */
static inline vf vb_column(vb a, int j) {
    vf r;
    LANES r.v[l] = (float)a.v[4 * l + j];
    return r;
}
static inline vb vb_lookup16(vb index, const uint8_t *table) {
    BYTES index.v[l] = table[index.v[l]];
    return index;
}

#endif
