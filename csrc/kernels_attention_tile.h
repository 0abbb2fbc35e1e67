/* The register tile of attention, and keys and values made floats for many rows to read.
 *
 * Scores (rows of q times keys) and outputs (weights times values) are the same product: a tile
 * adds a[r][k] * w[k][16 lanes] over ascending k to what `out` holds, so a sum may be interrupted
 * anywhere and its bits stay. Rows of a tile only share the loads of w. */

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* 16 keys or values as floats; the integers of Q8_0 are still to be multiplied by their scale. */
ALWAYS_INLINE vf load_kv(const uint8_t *p, int type, size_t at) {
    if (type == MT_KV_F16) return vf_load_f16((const uint16_t *)(const void *)p + at);
    if (type == MT_KV_F32) return vf_load((const float *)(const void *)p + at);
    return vf_load_i8(p + at);
}

static inline const uint8_t *kv_block(const mt_kv_view *kv, int32_t position) {
    return kv->base + (size_t)kv->blocks[position / kv->block_tokens] * kv->block_bytes;
}

/* The keys of 16 positions, [head_dim][16]. */
static inline const uint8_t *keys_at(const mt_kv_view *kv, int32_t position) {
    const size_t group = (size_t)(position % kv->block_tokens) / 16;
    return kv_block(kv, position) + group * (size_t)kv->head_dim * 16 * mt_kv_width(kv->type);
}

/* The values of a position and of those behind it in its block, [v_stride] each. */
static inline const uint8_t *values_at(const mt_kv_view *kv, int32_t position) {
    const size_t stride = (size_t)kv->v_stride * mt_kv_width(kv->type);
    return kv_block(kv, position) + kv->v_offset_bytes +
           (size_t)(position % kv->block_tokens) * stride;
}

/* Q8_0: the scales of the keys of 16 positions, [head_dim / 32][16], and of a position's values. */
static inline const uint16_t *key_scales_at(const mt_kv_view *kv, int32_t position) {
    const size_t group = (size_t)(position % kv->block_tokens) / 16;
    return (const uint16_t *)(const void *)(kv_block(kv, position) + kv->k_scales_bytes) +
           group * (size_t)mt_kv_scales(kv->head_dim) * 16;
}
static inline const uint16_t *value_scales_at(const mt_kv_view *kv, int32_t position) {
    return (const uint16_t *)(const void *)(kv_block(kv, position) + kv->v_scales_bytes) +
           (size_t)(position % kv->block_tokens) * (size_t)mt_kv_scales(kv->value_dim);
}

typedef struct {
    const float *a; /* rows of count */
    size_t a_stride;
    const uint8_t *w[ATTN_VECS];       /* vectors of 16, the next k w_stride values on */
    const uint8_t *ahead[ATTN_VECS];   /* what will be read later, as far from here as w goes */
    const uint16_t *scales[ATTN_VECS]; /* Q8_0: keys have 16 for 32 k, values one for each k */
    size_t w_stride, scale_stride;
    int count;
    int is_first; /* the sums begin here: `out` holds nothing yet */
    float *out;
    size_t out_stride;
} attn_tile;

/* How a tile reads w: as the cache holds it, Q8_0 in two ways, or as floats without a look ahead. */
enum {
    TILE_F16 = MT_KV_F16,
    TILE_F32 = MT_KV_F32,
    TILE_Q8_KEYS = MT_KV_Q8_0,
    TILE_Q8_VALUES = MT_KV_Q8_0 + 1,
    TILE_WIDE
};

/* The product with the scale is exact in float: early, late and once for all are the same. */
ALWAYS_INLINE vf load_w(const attn_tile *t, int type, int v, size_t k) {
    const size_t at = k * t->w_stride;
    if (type == TILE_F16) return load_kv(t->w[v], MT_KV_F16, at);
    if (type == TILE_F32 || type == TILE_WIDE) return load_kv(t->w[v], MT_KV_F32, at);
    const vf scale = type == TILE_Q8_KEYS ? vf_load_f16(t->scales[v] + k / 32 * 16)
                                          : vf_set1(f16_to_f32(t->scales[v][k * t->scale_stride]));
    return vf_mul(load_kv(t->w[v], MT_KV_Q8_0, at), scale);
}

ALWAYS_INLINE void run_tile(int n, int vecs, int type, const attn_tile *t) {
    vf sum[ATTN_ROWS][ATTN_VECS];
    const float *a[ATTN_ROWS];
    UNROLL(6)
    for (int r = 0; r < n; r++) {
        a[r] = t->a + (size_t)r * t->a_stride;
        UNROLL(4)
        for (int v = 0; v < vecs; v++) sum[r][v] = vf_set1(0.0f);
    }
    if (!t->is_first) {
        UNROLL(6)
        for (int r = 0; r < n; r++) {
            const float *out = t->out + (size_t)r * t->out_stride;
            UNROLL(4)
            for (int v = 0; v < vecs; v++) sum[r][v] = vf_load(out + v * 16);
        }
    }
    const size_t ahead = t->w_stride * (type == TILE_F16 ? 2 : type == TILE_F32 ? 4 : 1);
    const int count = t->count;
    for (int k = 0; k < count; k++) {
        vf w[ATTN_VECS];
        for (int v = 0; v < vecs; v++) {
            w[v] = load_w(t, type, v, (size_t)k);
            if (type != TILE_WIDE) __builtin_prefetch(t->ahead[v] + (size_t)k * ahead, 0, 2);
        }
        UNROLL(6)
        for (int r = 0; r < n; r++) {
            const vf x = vf_set1(a[r][k]);
            for (int v = 0; v < vecs; v++) sum[r][v] = vf_fma(w[v], x, sum[r][v]);
        }
    }
    UNROLL(6)
    for (int r = 0; r < n; r++) {
        float *out = t->out + (size_t)r * t->out_stride;
        UNROLL(4)
        for (int v = 0; v < vecs; v++) vf_store(out + v * 16, sum[r][v]);
    }
}

/* Vectors of a tile: all, about half, or one. */
enum { ATTN_HALF = (ATTN_VECS + 1) / 2 };

#if ATTN_ROWS == 6
#define TILE_ROWS(X) X(1) X(2) X(3) X(4) X(5) X(6)
#else
#define TILE_ROWS(X) X(1) X(2)
#endif
#define TILE_CASE(n)                                                                               \
    case n:                                                                                        \
        if (vecs == ATTN_VECS)                                                                     \
            run_tile(n, ATTN_VECS, type, t);                                                       \
        else if (vecs == ATTN_HALF)                                                                \
            run_tile(n, ATTN_HALF, type, t);                                                       \
        else                                                                                       \
            run_tile(n, 1, type, t);                                                               \
        break;
#define TILE_FUNCTION(name, tile_type)                                                             \
    static void name(int n, int vecs, const attn_tile *t) {                                        \
        enum { type = tile_type };                                                                 \
        switch (n) { TILE_ROWS(TILE_CASE) }                                                        \
    }
TILE_FUNCTION(tile_f16, TILE_F16)
TILE_FUNCTION(tile_f32, TILE_F32)
TILE_FUNCTION(tile_q8_keys, TILE_Q8_KEYS)
TILE_FUNCTION(tile_q8_values, TILE_Q8_VALUES)
TILE_FUNCTION(tile_wide, TILE_WIDE)
static void (*const cache_tiles[])(int n, int vecs,
                                   const attn_tile *t) = {[TILE_F16] = tile_f16,
                                                          [TILE_F32] = tile_f32,
                                                          [TILE_Q8_KEYS] = tile_q8_keys,
                                                          [TILE_Q8_VALUES] = tile_q8_values};

/* How many of `left` vectors a tile takes next. */
static inline int tile_vecs(int left) {
    return left >= ATTN_VECS ? ATTN_VECS : left >= ATTN_HALF ? ATTN_HALF : 1;
}

/* `vecs` neighbouring vectors of a block of floats, MT_ATTN_BLOCK values apart, as often as fit. */
static void wide_tiles(attn_tile *t, int n, const float *wide, int vecs) {
    t->w_stride = MT_ATTN_BLOCK;
    for (int take; vecs > 0; vecs -= take, wide += 16 * take, t->out += 16 * take) {
        take = tile_vecs(vecs);
        for (int v = 0; v < take; v++) t->w[v] = (const uint8_t *)(wide + 16 * v);
        tile_wide(n, take, t);
    }
}

/* n vectors of 16 keys or values as floats, `apart` floats from each other; as much is fetched at
 * `ahead`. Of Q8_0 one scale, which differs by lane (keys) or not (values), holds for all. */
static inline void widen(const uint8_t *from, const uint8_t *ahead, int type, int n, int apart,
                         vf scale, float *to) {
    for (size_t i = 0; i < (size_t)n * 16 * mt_kv_width(type); i += 64)
        __builtin_prefetch(ahead + i, 0, 2);
    if (type == MT_KV_F16)
        for (int i = 0; i < n; i++) vf_store(to + i * apart, load_kv(from, MT_KV_F16, 16 * i));
    else if (type == MT_KV_F32)
        for (int i = 0; i < n; i++) vf_store(to + i * apart, load_kv(from, MT_KV_F32, 16 * i));
    else
        for (int i = 0; i < n; i++)
            vf_store(to + i * apart, vf_mul(load_kv(from, MT_KV_Q8_0, 16 * i), scale));
}

/* wide[d][16 groups] = dimensions [d, d + n) of the keys at [at, at + 16 groups). */
static void widen_keys(const mt_kv_view *kv, int32_t at, int32_t stop, int groups, int d, int n,
                       float *wide) {
    const int is_scaled = kv->type == MT_KV_Q8_0, most = is_scaled ? 32 : n;
    vf scale = vf_set1(1.0f);
    for (int g = 0; g < groups; g++, at += 16) {
        const uint8_t *keys = keys_at(kv, at);
        const uint8_t *ahead = keys_at(kv, at + MT_ATTN_BLOCK < stop ? at + MT_ATTN_BLOCK : at);
        const uint16_t *scales = key_scales_at(kv, at);
        for (int i = 0; i < n; i += most) {
            if (is_scaled) scale = vf_load_f16(scales + (d + i) / 32 * 16);
            const size_t at_bytes = (size_t)(d + i) * 16 * mt_kv_width(kv->type);
            widen(keys + at_bytes, ahead + at_bytes, kv->type, n - i < most ? n - i : most,
                  MT_ATTN_BLOCK, scale, wide + i * MT_ATTN_BLOCK + g * 16);
        }
    }
}

/* wide[position - at][16 vecs] = dimensions [d, d + 16 vecs) of the keys at [at, stop), which here
 * are the values, too; `at` begins a group. */
static void widen_latent(const mt_kv_view *kv, int32_t at, int32_t stop, int32_t last, int d,
                         int vecs, float *wide) {
    const size_t vec_bytes = 16 * mt_kv_width(kv->type), at_bytes = (size_t)d * vec_bytes;
    for (; at < stop; at += 16, wide += 16 * MT_ATTN_BLOCK) {
        const uint8_t *keys = keys_at(kv, at) + at_bytes;
        const int32_t later = at + MT_ATTN_BLOCK < last ? at + MT_ATTN_BLOCK : last;
        const uint8_t *ahead = keys_at(kv, later) + at_bytes;
        const uint16_t *scales = key_scales_at(kv, at);
        for (int v = 0; v < vecs; v++, keys += 16 * vec_bytes, ahead += 16 * vec_bytes) {
            float dims[16 * 16]; /* [dimension][position] */
            const int scale = (d + 16 * v) / 32 * 16;
            widen(keys, ahead, kv->type, 16, 16,
                  kv->type == MT_KV_Q8_0 ? vf_load_f16(scales + scale) : vf_set1(1.0f), dims);
            store_transposed(dims, wide + 16 * v, MT_ATTN_BLOCK);
        }
    }
}

/* wide[position - at][16 vecs] = dimensions [d, d + 16 vecs) of the values at [at, stop). */
static void widen_values(const mt_kv_view *kv, int32_t at, int32_t stop, int32_t last, int d,
                         int vecs, float *wide) {
    const int is_scaled = kv->type == MT_KV_Q8_0, most = is_scaled ? 2 : vecs;
    vf scale = vf_set1(1.0f);
    for (; at < stop; at++, wide += MT_ATTN_BLOCK) {
        const size_t d_bytes = (size_t)d * mt_kv_width(kv->type);
        const uint8_t *values = values_at(kv, at) + d_bytes;
        const int32_t later = at + MT_ATTN_BLOCK < last ? at + MT_ATTN_BLOCK : last;
        const uint8_t *ahead = values_at(kv, later) + d_bytes;
        const uint16_t *scales = value_scales_at(kv, at) + d / 32;
        for (int v = 0; v < vecs; v += most) {
            if (is_scaled) scale = vf_set1(f16_to_f32(scales[v / 2]));
            const size_t v_bytes = (size_t)v * 16 * mt_kv_width(kv->type);
            widen(values + v_bytes, ahead + v_bytes, kv->type, vecs - v < most ? vecs - v : most,
                  16, scale, wide + v * 16);
        }
    }
}
