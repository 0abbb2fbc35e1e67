/* Loops over the values of one row: quantize, norm, activation, add. Written once against simd_*.h.
 *
 * Tails shorter than 16 lanes go through a zero-padded copy, so lanes reduce in one fixed order. */
#include "martlet.h"

static inline vf load_part(const float *p, int n) {
    if (n >= 16) return vf_load(p);
    float part[16] = {0};
    memcpy(part, p, (size_t)n * sizeof(float));
    return vf_load(part);
}

static inline void store_part(float *p, vf a, int n) {
    if (n >= 16) {
        vf_store(p, a);
        return;
    }
    float part[16];
    vf_store(part, a);
    memcpy(p, part, (size_t)n * sizeof(float));
}

/* exp by 2^n * p(r), |r| <= ln2 / 2, Taylor to the 7th power (relative error below 2e-7);
 * exactly 0 below -87, which is where attention puts masked scores. */
static inline vf vf_exp(vf x) {
    const vf low = vf_set1(-87.0f);
    const vf a = vf_min(vf_max(x, low), vf_set1(88.0f));
    const vi n = vf_round_i32(vf_mul(a, vf_set1(1.44269504f)));
    const vf nf = vf_from_i32(n);
    /* ln 2 in two parts, the first exact in n * part */
    vf r = vf_fma(nf, vf_set1(-0.693145752f), a);
    r = vf_fma(nf, vf_set1(-1.42860677e-6f), r);
    static const float taylor[] = {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24,
                                   1.0f / 6,    0.5f,       1.0f,       1.0f};
    vf p = vf_set1(taylor[0]);
    for (int i = 1; i < 8; i++) p = vf_fma(p, r, vf_set1(taylor[i]));
    return vf_select_lt(x, low, vf_set1(0.0f), vf_scale2(p, n));
}

static inline mt_q8_block *block_at(mt_q8_block *first, int b, size_t stride) {
    return (mt_q8_block *)(void *)((char *)first + (size_t)b * stride);
}

/* Rows of a tile's output lie far apart, and another core wrote them last: each is asked for, to be
 * written, while those before it are. */
enum { MT_ROWS_AHEAD = 12 };
static inline void fetch_to_write(const void *row, int n_bytes) {
    for (int i = 0; i < n_bytes; i += 64) __builtin_prefetch((const char *)row + i, 1);
}

/* Up to 16 blocks, so that their divisions are two vector divisions. Where 127 / amax would
 * overflow, the block is zero for any purpose. What is left over goes to `left`, if it is not NULL.
 * Nothing that was just stored is loaded in another width: such a load waits for the memory. */
static void quantize_blocks(const float *x, int n, size_t stride, mt_q8_block *out, float *left) {
    const vf least = vf_set1(127.0f / 3.4e38f), zero = vf_set1(0.0f), full = vf_set1(127.0f);
    vf largest[16];
    for (int i = 0; i < n; i++)
        largest[i] = vf_max_abs(vf_load(x + i * 32), vf_load(x + i * 32 + 16));
    for (int i = n; i < 16; i++) largest[i] = zero;
    const vf a = vf_hmax16(largest);
    float d[16], inverse[16];
    vf_store(inverse, vf_select_lt(a, least, zero, vf_div(full, a)));
    vf_store(d, vf_select_lt(a, least, zero, vf_div(a, full)));
    for (int i = 0; i < n; i++) {
        const vf x0 = vf_load(x + i * 32), x1 = vf_load(x + i * 32 + 16);
        const vi q0 = vf_round_i32(vf_mul(x0, vf_set1(inverse[i])));
        const vi q1 = vf_round_i32(vf_mul(x1, vf_set1(inverse[i])));
        vi_store_q8(block_at(out, i, stride), q0, q1, d[i]);
        if (!left) continue;
        vf_store(left + i * 32, vf_fma(vf_set1(-d[i]), vf_from_i32(q0), x0));
        vf_store(left + i * 32 + 16, vf_fma(vf_set1(-d[i]), vf_from_i32(q1), x1));
    }
}

static void quantize(const float *x, int n, size_t out_stride, void *out, void *rest) {
    float left[16 * 32];
    for (int first = 0; first < n / 32; first += 16) {
        const int count = n / 32 - first < 16 ? n / 32 - first : 16;
        for (int next = first + 16; next < first + 32 && next < n / 32; next++)
            fetch_to_write(block_at(out, next, out_stride), MT_BLOCK_BYTES);
        quantize_blocks(x + first * 32, count, out_stride, block_at(out, first, out_stride),
                        rest ? left : NULL);
        if (rest) quantize_blocks(left, count, out_stride, block_at(rest, first, out_stride), NULL);
    }
}

static void round_bf16(const float *x, int n, size_t out_stride, void *out, void *rest) {
    (void)rest;
    for (int b = 0; b < n / 32; b++) {
        uint16_t *to = (uint16_t *)(void *)((char *)out + (size_t)b * out_stride);
        vf_store_bf16(to, vf_load(x + b * 32));
        vf_store_bf16(to + 16, vf_load(x + b * 32 + 16));
    }
}

/* The first n lanes; the others are 0. */
static inline vf first_lanes(vf a, int n) {
    float part[16] = {0};
    store_part(part, a, n);
    return n >= 16 ? a : vf_load(part);
}

static float mean_of(const float *x, int n) {
    vf sum = vf_set1(0.0f);
    for (int i = 0; i < n; i += 16) sum = vf_add(sum, load_part(x + i, n - i));
    return vf_hsum(sum) / (float)n;
}

static void norm(const float *x, int n, const mt_norm *how, float *out) {
    const int group = how->group;
    for (int at = 0; at < n; at += group) {
        const vf mean = vf_set1(how->is_centered ? mean_of(x + at, group) : 0.0f);
        vf squares = vf_set1(0.0f);
        for (int i = 0; i < group; i += 16) {
            vf v = load_part(x + at + i, group - i);
            if (how->is_centered) v = first_lanes(vf_sub(v, mean), group - i);
            squares = vf_fma(v, v, squares);
        }
        const float mean_square = vf_hsum(squares) / (float)group;
        const vf scale = vf_set1(1.0f / sqrtf(mean_square + how->eps));
        const float *w = how->weight ? how->weight + (how->weight_len == n ? at : 0) : NULL;
        const float *b = how->bias ? how->bias + (how->bias_len == n ? at : 0) : NULL;
        for (int i = 0; i < group; i += 16) {
            vf y = load_part(x + at + i, group - i);
            if (how->is_centered) y = vf_sub(y, mean);
            y = vf_mul(y, scale);
            if (w) y = vf_mul(y, load_part(w + i, group - i));
            if (b) y = vf_add(y, load_part(b + i, group - i));
            if (how->accumulate) y = vf_add(load_part(out + at + i, group - i), y);
            store_part(out + at + i, y, group - i);
        }
    }
}

/* cap * tanh(x / cap); tanh(z) = (1 - e) / (1 + e) with e = exp(-2 z). The product by 0 keeps what
 * is NaN. */
static inline vf soft_cap(vf x, float cap) {
    const vf one = vf_set1(1.0f), e = vf_exp(vf_mul(x, vf_set1(-2.0f / cap)));
    const vf tanh = vf_div(vf_sub(one, e), vf_add(one, e));
    return vf_fma(x, vf_set1(0.0f), vf_mul(tanh, vf_set1(cap)));
}

/* g times the share of a normal distribution below it. Its upper tail, beyond z >= 0, is
 * (1 - erf(z / sqrt(2))) / 2 = P(t) exp(-z^2 / 2) / 2, t = 1 / (1 + 0.3275911 z / sqrt(2)), within
 * 1e-7: Abramowitz and Stegun, formula 7.1.26. */
static inline vf gelu_erf(vf g) {
    static const float factors[] = {1.061405429f, -1.453152027f, 1.421413741f, -0.284496736f,
                                    0.254829592f};
    const vf one = vf_set1(1.0f), z = vf_abs(g);
    const vf t = vf_div(one, vf_fma(z, vf_set1(0.3275911f * 0.70710678f), one));
    vf p = vf_set1(factors[0]);
    for (int i = 1; i < 5; i++) p = vf_fma(p, t, vf_set1(factors[i]));
    const vf tail = vf_mul(vf_mul(p, t), vf_exp(vf_mul(vf_mul(z, z), vf_set1(-0.5f))));
    return vf_sub(vf_max(g, vf_set1(0.0f)), vf_mul(vf_mul(z, vf_set1(0.5f)), tail));
}

/* sigmoid(g) = 1 / (1 + exp(-g)); silu(g) = g / (1 + exp(-g)); gelu_tanh(g) = g / (1 + exp(-2 z)) with
 * z = sqrt(2/pi) (g + 0.044715 g^3), as (1 + tanh z) / 2 is the logistic function of 2 z;
 * clamped(g, u) = g / (1 + exp(-1.702 g)) (u + 1), both cut off at 7; relu2(g) = g max(g, 0), which is
 * NaN where g is. Without up, u is 1. */
static void glu(const float *gate, const float *up, int n, int activation, float *out) {
    const vf one = vf_set1(1.0f);
    for (int i = 0; i < n; i += 16) {
        vf g = load_part(gate + i, n - i), u = up ? load_part(up + i, n - i) : one, z = g;
        if (activation == MT_ACT_IDENTITY || activation == MT_ACT_GELU_ERF ||
            activation == MT_ACT_TANH || activation == MT_ACT_RELU2) {
            const vf y = activation == MT_ACT_GELU_ERF ? gelu_erf(g)
                         : activation == MT_ACT_TANH   ? soft_cap(g, 1.0f)
                         : activation == MT_ACT_RELU2  ? vf_mul(g, vf_max(g, vf_set1(0.0f)))
                                                       : g;
            store_part(out + i, vf_mul(y, u), n - i);
            continue;
        }
        if (activation == MT_ACT_GELU_TANH) {
            const vf cubic = vf_fma(vf_mul(vf_mul(g, g), g), vf_set1(0.044715f), g);
            z = vf_mul(cubic, vf_set1(1.5957691216f)); /* 2 sqrt(2 / pi) */
        } else if (activation == MT_ACT_CLAMPED) {
            const vf limit = vf_set1(7.0f);
            g = vf_min(g, limit);
            z = vf_mul(g, vf_set1(1.702f));
            u = vf_add(vf_max(vf_min(u, limit), vf_set1(-7.0f)), one);
        }
        const vf e = vf_exp(vf_sub(vf_set1(0.0f), z));
        const vf share = activation == MT_ACT_SIGMOID ? one : g;
        const vf y = vf_mul(vf_div(share, vf_add(one, e)), u);
        store_part(out + i, y, n - i);
    }
}

/* Up to 32 columns at a time: what S' k sums up is read once more for the update, from an L1. */
/* Thirty-two whole columns: two chains of sums side by side, so that neither waits for itself. */
static void recur_pair(float *s, int n_keys, size_t stride, vf fade, vf rate, int corrects,
                       const float *k, const float *q, const float *v, float *out) {
    vf write = vf_load(v), write2 = vf_load(v + 16), seen = vf_set1(0.0f), seen2 = seen;
    vf sum = seen, sum2 = seen;
    if (corrects) {
        for (int j = 0; j < n_keys; j++) {
            const float *row = s + (size_t)j * stride;
            const vf key = vf_set1(k[j]);
            seen = vf_fma(vf_mul(fade, vf_load(row)), key, seen);
            seen2 = vf_fma(vf_mul(fade, vf_load(row + 16)), key, seen2);
        }
        write = vf_sub(write, seen), write2 = vf_sub(write2, seen2);
    }
    write = vf_mul(write, rate), write2 = vf_mul(write2, rate);
    for (int j = 0; j < n_keys; j++) {
        float *row = s + (size_t)j * stride;
        const vf key = vf_set1(k[j]), query = vf_set1(q[j]);
        const vf now = vf_fma(key, write, vf_mul(fade, vf_load(row)));
        const vf now2 = vf_fma(key, write2, vf_mul(fade, vf_load(row + 16)));
        vf_store(row, now), vf_store(row + 16, now2);
        sum = vf_fma(now, query, sum), sum2 = vf_fma(now2, query, sum2);
    }
    vf_store(out, sum), vf_store(out + 16, sum2);
}

static void recur(float *state, int n_keys, int stride, float decay, float rate, int corrects,
                  const float *k, const float *q, const float *v, int n, float *out) {
    const vf fade = vf_set1(decay);
    int i = 0;
    for (; i + 32 <= n; i += 32)
        recur_pair(state + i, n_keys, (size_t)stride, fade, vf_set1(rate), corrects, k, q, v + i,
                   out + i);
    for (; i < n; i += 16) {
        float *s = state + i;
        vf write = load_part(v + i, n - i), seen = vf_set1(0.0f), sum = seen;
        if (corrects) {
            for (int j = 0; j < n_keys; j++)
                seen = vf_fma(vf_mul(fade, load_part(s + (size_t)j * (size_t)stride, n - i)),
                              vf_set1(k[j]), seen);
            write = vf_sub(write, seen);
        }
        write = vf_mul(write, vf_set1(rate));
        for (int j = 0; j < n_keys; j++) {
            float *row = s + (size_t)j * (size_t)stride;
            const vf now = vf_fma(vf_set1(k[j]), write, vf_mul(fade, load_part(row, n - i)));
            store_part(row, now, n - i);
            sum = vf_fma(now, vf_set1(q[j]), sum);
        }
        store_part(out + i, sum, n - i);
    }
}

/* Sixteen sums side by side, folded in halves: the same order for every width of vectors. */
static double sum_of(const float *w, int n) {
    double lanes[16] = {0};
    for (int i = 0; i < n / 16 * 16; i += 16)
        for (int lane = 0; lane < 16; lane++) lanes[lane] += w[i + lane];
    for (int i = n / 16 * 16; i < n; i++) lanes[i % 16] += w[i];
    for (int half = 8; half; half /= 2)
        for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

static void weigh(const float *x, int n, float best, float temperature, float *w, double *sums) {
    const vf b = vf_set1(best), t = vf_set1(temperature);
    for (int at = 0; at < n; at += MT_WEIGHT_RUN) {
        const int count = n - at < MT_WEIGHT_RUN ? n - at : MT_WEIGHT_RUN;
        for (int i = at; i < at + count; i += 16) {
            vf below = vf_sub(load_part(x + i, at + count - i), b);
            if (temperature != 1.0f) below = vf_div(below, t);
            store_part(w + i, vf_exp(below), at + count - i);
        }
        sums[at / MT_WEIGHT_RUN] = sum_of(w + at, count);
    }
}

static void add(const float *x, int n, float *out) {
    for (int i = 0; i < n; i += 16)
        store_part(out + i, vf_add(load_part(out + i, n - i), load_part(x + i, n - i)), n - i);
}

static void scale(const float *x, int n, float scale, float cap, float *out) {
    const vf factor = vf_set1(scale);
    for (int i = 0; i < n; i += 16) {
        const vf y = vf_mul(load_part(x + i, n - i), factor);
        store_part(out + i, cap > 0.0f ? soft_cap(y, cap) : y, n - i);
    }
}

static void emit(const float *acc, const float *rest, const float *bias, int n_rows, int width,
                 int accumulate, size_t stride, float *out) {
    for (int r = 0; r < n_rows; r++, acc += MT_TILE_ROWS, out += stride) {
        if (r + MT_ROWS_AHEAD < n_rows)
            fetch_to_write(out + MT_ROWS_AHEAD * stride, width * (int)sizeof(float));
        for (int i = 0; i < width; i += 16) {
            vf y = vf_load(acc + i);
            if (rest) y = vf_add(y, vf_load(rest + r * MT_TILE_ROWS + i));
            if (bias) y = vf_add(y, load_part(bias + i, width - i));
            if (accumulate) y = vf_add(load_part(out + i, width - i), y);
            store_part(out + i, y, width - i);
        }
    }
}

static inline void turn(vf *x, vf *y, vf c, vf s) {
    const vf a = *x, b = *y;
    *x = vf_sub(vf_mul(a, c), vf_mul(b, s));
    *y = vf_add(vf_mul(a, s), vf_mul(b, c));
}

/* Pair i of a head is (2 i, 2 i + 1) or (i, i + n_rot / 2). The pairs past the last 16 take the
 * same steps one by one, in lanes as well: compilers fuse the scalar form whatever flags say. */
static void rotate_head(float *x, int n_rot, int style, const float *trig) {
    const int half = n_rot / 2;
    const int step = style == MT_ROPE_PAIR ? 2 : 1, apart = style == MT_ROPE_PAIR ? 1 : half;
    int i = 0;
    for (; i + 16 <= half; i += 16) {
        vf c, s, a, b;
        vf_load_pairs(trig + 2 * i, &c, &s);
        if (style == MT_ROPE_PAIR) {
            vf_load_pairs(x + 2 * i, &a, &b);
            turn(&a, &b, c, s);
            vf_store_pairs(x + 2 * i, a, b);
        } else {
            a = vf_load(x + i);
            b = vf_load(x + half + i);
            turn(&a, &b, c, s);
            vf_store(x + i, a);
            vf_store(x + half + i, b);
        }
    }
    for (; i < half; i++) {
        vf a = vf_set1(x[i * step]), b = vf_set1(x[i * step + apart]);
        float first[16], second[16];
        turn(&a, &b, vf_set1(trig[2 * i]), vf_set1(trig[2 * i + 1]));
        vf_store(first, a);
        vf_store(second, b);
        x[i * step] = first[0];
        x[i * step + apart] = second[0];
    }
}

static void rotate(float *x, int heads, int head_dim, int n_rot, int style, const float *trig) {
    for (int h = 0; h < heads; h++) rotate_head(x + h * head_dim, n_rot, style, trig);
}

/* d = amax / 127 rounded to half, q = x / d rounded: what the cache holds is exactly q * d. */
static void store_q8_0(const float *x, int n, size_t stride, uint8_t *out, size_t scale_stride,
                       uint16_t *scales) {
    for (int b = 0; b * 32 < n; b++) {
        const int count = n - b * 32 < 32 ? n - b * 32 : 32;
        float part[32] = {0};
        memcpy(part, x + b * 32, (size_t)count * sizeof(float));
        const vf x0 = vf_load(part), x1 = vf_load(part + 16);
        const float amax = vf_hmax(vf_max(vf_abs(x0), vf_abs(x1)));
        const float wanted = amax / 127.0f;
        const uint16_t half = f32_to_f16(wanted < 65504.0f ? wanted : 65504.0f);
        const float d = f16_to_f32(half);
        const vf inverse = vf_set1(d > 0.0f ? 1.0f / d : 0.0f);
        const vf low = vf_set1(-127.0f), high = vf_set1(127.0f);
        int8_t q[32];
        vi_store_i8(q, vf_round_i32(vf_max(low, vf_min(high, vf_mul(x0, inverse)))));
        vi_store_i8(q + 16, vf_round_i32(vf_max(low, vf_min(high, vf_mul(x1, inverse)))));
        for (int l = 0; l < count; l++) out[(size_t)(b * 32 + l) * stride] = (uint8_t)q[l];
        scales[(size_t)b * scale_stride] = half;
    }
}

/* Half precision saturates: an infinite key would poison every later row through 0 * inf. The
 * limits come first in min and max, so that a NaN stays one. */
static void store_kv(const float *x, int n, int type, size_t stride, uint8_t *out,
                     size_t scale_stride, uint16_t *scales) {
    if (type == MT_KV_Q8_0) {
        store_q8_0(x, n, stride, out, scale_stride, scales);
        return;
    }
    for (int i = 0; i < n; i += 16) {
        const int count = n - i < 16 ? n - i : 16;
        const vf v = load_part(x + i, count);
        if (type == MT_KV_F32) {
            for (int l = 0; l < count; l++)
                memcpy(out + (size_t)(i + l) * stride * 4, x + i + l, 4);
            continue;
        }
        uint16_t half[16];
        vf_store_f16(half, vf_max(vf_set1(-65504.0f), vf_min(vf_set1(65504.0f), v)));
        if (stride == 1)
            memcpy(out + (size_t)i * 2, half, (size_t)count * 2);
        else
            for (int l = 0; l < count; l++) memcpy(out + (size_t)(i + l) * stride * 2, half + l, 2);
    }
}
