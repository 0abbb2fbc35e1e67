/* Attention of a group of query vectors over one split of cached positions.
 *
 * A row's arithmetic depends on its own visible range alone: scores are sums over head_dim in
 * ascending order, one lane a position; maxima and sums reduce over 16-lane groups in order;
 * values are added position by position. Rows of a tile only share the loads. */

enum { ATTN_AHEAD = 4096 }; /* bytes: hardware prefetch ends at every page */

#define ALWAYS_INLINE static inline __attribute__((always_inline))
/* Shapes of the value tile, (rows, vectors of a value): few rows take long pieces of a value, many
 * rows share the conversion of a short one. */
#if MM_COLS == 6
enum { FEW_ROWS = 6, FEW_DVECS = 4, MANY_ROWS = 12, MANY_DVECS = 2 };
#else
enum { FEW_ROWS = ATTN_ROWS, FEW_DVECS = 2, MANY_ROWS = ATTN_ROWS, MANY_DVECS = 2 };
#endif

/* 16 keys or values as floats; the integers of Q8_0 are still to be multiplied by their scale. */
ALWAYS_INLINE vf load_kv(const uint8_t *p, int type, size_t at) {
    if (type == MT_KV_F16) return vf_load_f16((const uint16_t *)(const void *)p + at);
    if (type == MT_KV_F32) return vf_load((const float *)(const void *)p + at);
    return vf_load_i8(p + at);
}

static inline const uint8_t *kv_block(const mt_kv_view *kv, int32_t position) {
    return kv->base + (size_t)kv->blocks[position / kv->block_tokens] * kv->block_bytes;
}

/* The keys of 16 positions, [head_dim][16], and for Q8_0 their scales, [head_dim / 32][16]. */
typedef struct {
    const uint8_t *keys;
    const uint16_t *scales;
} key_group;

static inline key_group key_group_at(const mt_kv_view *kv, int32_t position) {
    const uint8_t *block = kv_block(kv, position);
    const size_t group = (size_t)(position % kv->block_tokens) / 16;
    const size_t group_bytes = (size_t)kv->head_dim * 16 * mt_kv_width(kv->type);
    const uint16_t *scales = (const uint16_t *)(const void *)(block + kv->k_scales_bytes);
    return (key_group){block + group * group_bytes,
                       scales + group * (size_t)mt_kv_scales(kv->head_dim) * 16};
}

/* Dimension d of the group. q * scale is exact in float, so early or late is the same. */
ALWAYS_INLINE vf load_keys(key_group group, int type, int d) {
    const vf k = load_kv(group.keys, type, (size_t)d * 16);
    return type == MT_KV_Q8_0 ? vf_mul(k, vf_load_f16(group.scales + d / 32 * 16)) : k;
}

/* Scores of `n` query vectors against `groups` groups of 16 keys. */
ALWAYS_INLINE void score_tile(int n, int groups, int type, const key_group *keys, int head_dim,
                              const float *const *q, vf scale, float *const *out) {
    vf sum[ATTN_ROWS][2];
    for (int r = 0; r < n; r++)
        for (int g = 0; g < groups; g++) sum[r][g] = vf_set1(0.0f);
    for (int d = 0; d < head_dim; d++) {
        vf k[2];
        for (int g = 0; g < groups; g++) {
            k[g] = load_keys(keys[g], type, d);
            if (type == MT_KV_F16) __builtin_prefetch(keys[g].keys + d * 32 + ATTN_AHEAD, 0, 2);
        }
        UNROLL(6)
        for (int r = 0; r < n; r++)
            for (int g = 0; g < groups; g++) sum[r][g] = vf_fma(k[g], vf_set1(q[r][d]), sum[r][g]);
    }
    for (int r = 0; r < n; r++)
        for (int g = 0; g < groups; g++) vf_store(out[r] + g * 16, vf_mul(sum[r][g], scale));
}

#if ATTN_ROWS == 6
#define SCORE_ROWS(X) X(1) X(2) X(3) X(4) X(5) X(6)
#elif ATTN_ROWS == 3
#define SCORE_ROWS(X) X(1) X(2) X(3)
#else
#define SCORE_ROWS(X) X(1) X(2)
#endif
#define SCORE_CASE(n)                                                                              \
    case n:                                                                                        \
        if (groups == 2)                                                                           \
            score_tile(n, 2, type, keys, head_dim, q, scale, out);                                 \
        else                                                                                       \
            score_tile(n, 1, type, keys, head_dim, q, scale, out);                                 \
        break;
#define SCORE_FUNCTION(name, kv_type)                                                              \
    static void name(int n, int groups, const key_group *keys, int head_dim,                       \
                     const float *const *q, vf scale, float *const *out) {                         \
        enum { type = kv_type };                                                                   \
        switch (n) { SCORE_ROWS(SCORE_CASE) }                                                      \
    }
SCORE_FUNCTION(score_f16, MT_KV_F16)
SCORE_FUNCTION(score_f32, MT_KV_F32)
SCORE_FUNCTION(score_q8_0, MT_KV_Q8_0)

/* The group as floats, in memory: worth it where many rows read it. */
static key_group widen(key_group group, int type, int head_dim, float *wide) {
    for (int d = 0; d < head_dim; d++)
        vf_store(wide + (size_t)d * 16, type == MT_KV_F16 ? load_keys(group, MT_KV_F16, d)
                                                          : load_keys(group, MT_KV_Q8_0, d));
    return (key_group){(const uint8_t *)wide, NULL};
}

/* Scores of all rows for the groups at [first, stop), into scores[r][position - split start]. */
static void score_range(const mt_kv_view *kv, const mt_attn_rows *rows, int32_t start,
                        int32_t first, int32_t stop, float *scores, float *widened) {
    const vf scale = vf_set1(rows->scale);
    const int widens = kv->type != MT_KV_F32 && rows->n > ATTN_ROWS;
    const int type = widens ? MT_KV_F32 : kv->type;
    const size_t group_values = (size_t)kv->head_dim * 16;
    for (int32_t at = first, groups; at < stop; at += 16 * groups) {
        groups = at + 16 < stop ? 2 : 1;
        key_group keys[2];
        for (int g = 0; g < groups; g++) {
            keys[g] = key_group_at(kv, at + 16 * g);
            if (widens)
                keys[g] =
                    widen(keys[g], kv->type, kv->head_dim, widened + (size_t)g * group_values);
        }
        for (int r = 0; r < rows->n; r += ATTN_ROWS) {
            const int n = rows->n - r < ATTN_ROWS ? rows->n - r : ATTN_ROWS;
            float *out[ATTN_ROWS];
            for (int i = 0; i < n; i++) out[i] = scores + (size_t)(r + i) * MT_SPLIT + (at - start);
            if (type == MT_KV_F16)
                score_f16(n, groups, keys, kv->head_dim, rows->q + r, scale, out);
            else if (type == MT_KV_F32)
                score_f32(n, groups, keys, kv->head_dim, rows->q + r, scale, out);
            else
                score_q8_0(n, groups, keys, kv->head_dim, rows->q + r, scale, out);
        }
    }
}

/* Turns the scores of one row into weights; those outside [begin, end) become 0. */
static void softmax_row(float *s, int32_t n, int32_t begin, int32_t end, float *m, float *l) {
    for (int32_t t = 0; t < begin; t++) s[t] = -INFINITY;
    for (int32_t t = end; t < n; t++) s[t] = -INFINITY;
    vf top = vf_set1(-INFINITY), sum = vf_set1(0.0f);
    for (int32_t t = 0; t < n; t += 16) top = vf_max(vf_load(s + t), top);
    *m = vf_hmax(top);
    for (int32_t t = 0; t < n; t += 16) {
        const vf p = vf_exp(vf_sub(vf_load(s + t), vf_set1(*m)));
        vf_store(s + t, p);
        sum = vf_add(sum, p);
    }
    *l = vf_hsum(sum);
}

/* o[r][16 dvecs from d] = sum over positions of p[r] * value, for n rows. */
ALWAYS_INLINE void value_tile(int n, int dvecs, int type, const mt_kv_view *kv, int32_t start,
                              int32_t first, int32_t stop, int d, const float *p, float *o) {
    vf sum[MANY_ROWS][FEW_DVECS];
    for (int r = 0; r < n; r++)
        for (int j = 0; j < dvecs; j++) sum[r][j] = vf_set1(0.0f);
    const size_t stride = (size_t)kv->v_stride * mt_kv_width(type);
    const size_t n_scales = (size_t)mt_kv_scales(kv->value_dim);
    int32_t at = first;
    while (at < stop) { /* runs of positions inside one block */
        const int32_t in_block = at % kv->block_tokens;
        int32_t run = at - in_block + kv->block_tokens;
        if (run > stop) run = stop;
        const uint8_t *block = kv_block(kv, at);
        const uint8_t *v = block + kv->v_offset_bytes + (size_t)in_block * stride;
        const uint16_t *scales = (const uint16_t *)(const void *)(block + kv->v_scales_bytes) +
                                 (size_t)in_block * n_scales;
        for (; at < run; at++, v += stride, scales += n_scales) {
            vf value[FEW_DVECS];
            for (int j = 0; j < dvecs; j++) {
                value[j] = load_kv(v, type, (size_t)(d + 16 * j));
                if (type == MT_KV_Q8_0)
                    value[j] = vf_mul(value[j], vf_set1(f16_to_f32(scales[(d + 16 * j) / 32])));
            }
            if (type == MT_KV_F16) __builtin_prefetch(v + 2 * d + ATTN_AHEAD, 0, 2);
            UNROLL(12)
            for (int r = 0; r < n; r++) {
                const vf weight = vf_set1(p[(size_t)r * MT_SPLIT + (size_t)(at - start)]);
                for (int j = 0; j < dvecs; j++) sum[r][j] = vf_fma(value[j], weight, sum[r][j]);
            }
        }
    }
    for (int r = 0; r < n; r++)
        for (int j = 0; j < dvecs; j++) vf_store(o + r * kv->v_stride + d + 16 * j, sum[r][j]);
}

#define VALUE_CASE(n)                                                                              \
    case n:                                                                                        \
        if (dvecs == FEW_DVECS)                                                                    \
            value_tile(n, FEW_DVECS, type, kv, start, first, stop, d, p, o);                       \
        else                                                                                       \
            value_tile(n, 1, type, kv, start, first, stop, d, p, o);                               \
        break;
#define VALUE_FUNCTION(name, kv_type)                                                              \
    static void name(int n, int dvecs, const mt_kv_view *kv, int32_t start, int32_t first,         \
                     int32_t stop, int d, const float *p, float *o) {                              \
        enum { type = kv_type };                                                                   \
        if (n == MANY_ROWS && dvecs == MANY_DVECS) {                                               \
            value_tile(MANY_ROWS, MANY_DVECS, type, kv, start, first, stop, d, p, o);              \
            return;                                                                                \
        }                                                                                          \
        switch (n) { SCORE_ROWS(VALUE_CASE) }                                                      \
    }
VALUE_FUNCTION(value_f16, MT_KV_F16)
VALUE_FUNCTION(value_f32, MT_KV_F32)
VALUE_FUNCTION(value_q8_0, MT_KV_Q8_0)

/* o[r] = sum of the weighted values of positions [low, high), for all rows. */
static void value_range(const mt_kv_view *kv, int n_rows, int32_t start, int32_t low, int32_t high,
                        const float *scores, float *o) {
    const int pieces = kv->v_stride / 16;
    for (int r = 0, n; r < n_rows; r += n) {
        const int is_many = n_rows - r >= MANY_ROWS && pieces % MANY_DVECS == 0;
        n = is_many ? MANY_ROWS : n_rows - r < FEW_ROWS ? n_rows - r : FEW_ROWS;
        const float *p = scores + (size_t)r * MT_SPLIT;
        float *out = o + (size_t)r * (size_t)kv->v_stride;
        for (int piece = 0, dvecs; piece < pieces; piece += dvecs) {
            dvecs = is_many ? MANY_DVECS : pieces - piece >= FEW_DVECS ? FEW_DVECS : 1;
            if (kv->type == MT_KV_F16)
                value_f16(n, dvecs, kv, start, low, high, piece * 16, p, out);
            else if (kv->type == MT_KV_F32)
                value_f32(n, dvecs, kv, start, low, high, piece * 16, p, out);
            else
                value_q8_0(n, dvecs, kv, start, low, high, piece * 16, p, out);
        }
    }
}

static void attend_split(const mt_kv_view *kv, const mt_attn_rows *rows, int32_t split, float *m,
                         float *l, float *o, float *scratch) {
    const int32_t start = split * MT_SPLIT;
    int32_t begin[MT_ATTN_MAX_ROWS], end[MT_ATTN_MAX_ROWS], low = INT32_MAX, high = 0;
    for (int r = 0; r < rows->n; r++) {
        begin[r] = rows->begin[r] > start ? rows->begin[r] : start;
        end[r] = rows->end[r] < start + MT_SPLIT ? rows->end[r] : start + MT_SPLIT;
        if (begin[r] >= end[r]) continue;
        if (begin[r] < low) low = begin[r];
        if (end[r] > high) high = end[r];
    }
    for (int r = 0; r < rows->n; r++) l[r] = 0.0f;
    if (low >= high) return;
    const int32_t first = low / 16 * 16, stop = (high + 15) / 16 * 16;
    float *scores = scratch, *widened = scratch + (size_t)MT_ATTN_MAX_ROWS * MT_SPLIT;
    score_range(kv, rows, start, first, stop, scores, widened);
    for (int r = 0; r < rows->n; r++) {
        float *s = scores + (size_t)r * MT_SPLIT + (first - start);
        if (begin[r] < end[r])
            softmax_row(s, stop - first, begin[r] - first, end[r] - first, &m[r], &l[r]);
        else
            memset(s, 0, (size_t)(stop - first) * sizeof(float));
    }
    value_range(kv, rows->n, start, low, high, scores, o);
}

static void attend_merge(float m, float l, const float *o, int n, float *big_m, float *big_l,
                         float *big_o) {
    if (l == 0.0f) return;
    const float top = *big_m > m ? *big_m : m;
    float weights[16] = {*big_m - top, m - top};
    vf_store(weights, vf_exp(vf_load(weights)));
    const vf old = vf_set1(weights[0]), new = vf_set1(weights[1]);
    for (int i = 0; i < n; i += 16)
        vf_store(big_o + i, vf_fma(vf_load(o + i), new, vf_mul(vf_load(big_o + i), old)));
    *big_l = fmaf(l, weights[1], *big_l * weights[0]);
    *big_m = top;
}

static void attend_finish(const float *o, float l, int n, float *out) {
    const vf inverse = vf_set1(1.0f / l);
    for (int i = 0; i < n; i += 16)
        store_part(out + i, vf_mul(load_part(o + i, 16), inverse), n - i);
}
