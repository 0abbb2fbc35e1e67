/* The table of loops that exist once per ISA. Every entry computes any part of its output, alone,
 * without allocating; equal inputs give equal bits in every table (see simd_scalar.h). */
#ifndef MT_KERNELS_H
#define MT_KERNELS_H

#include "formats.h"
#include "martlet.h"

enum {
    MT_K_BLOCKS = 16,    /* blocks of 32 columns unpacked at a time: 16 KB of codes */
    MT_SCALE_COPIES = 2, /* of an unpacked scale, at most */
    MT_TILE_COLS = 6,    /* of the widest tile */
    MT_DIRECT_COLS = 8   /* of the widest product without unpacking */
};

enum {
    MT_SPLIT = 256,        /* positions of one attention split, aligned at absolute multiples */
    MT_WEIGHT_RUN = 256,   /* weights that are summed at a time, see mt_draw */
    MT_ATTN_MAX_ROWS = 96, /* query vectors that attend_split takes at once */
    MT_ATTN_BLOCK = 64,    /* positions and dimensions made floats at a time: 16 KB, of an L1 */
    MT_ATTN_SCRATCH = MT_ATTN_MAX_ROWS * MT_SPLIT + MT_ATTN_BLOCK * MT_ATTN_BLOCK
};

static inline size_t mt_kv_width(int type) {
    return type == MT_KV_F16 ? 2 : type == MT_KV_F32 ? 4 : 1;
}
static inline int mt_kv_scales(int dim) { return (dim + 31) / 32; }

/* How keys and values of one layer lie in a block of the pool, in elements:
 * per kv head: K as [token group of 16][head_dim][16 tokens], then V as [token][v_stride]; of a
 * latent layer K alone, whose first value_dim dimensions, a multiple of 16, are V. */
typedef struct mt_kv_view {
    const uint8_t *base;   /* block 0 of the layer */
    size_t block_bytes;    /* one block of the layer, all heads */
    size_t head_bytes;     /* one kv head inside it */
    size_t v_offset_bytes; /* V inside a head */
    size_t k_scales_bytes; /* Q8_0: half-precision scales of K, [group][head_dim / 32][16] */
    size_t v_scales_bytes; /* and of V, [token][value_dim / 32] */
    int32_t block_tokens;
    int32_t head_dim;
    int32_t value_dim;
    int32_t v_stride; /* value_dim rounded up to 16 */
    int32_t type;     /* mt_kv_type */
    int32_t is_latent;
    const int32_t *blocks; /* block ids of the sequence, by position / block_tokens */
} mt_kv_view;

/* Query vectors that read the same keys: rows x head group. */
typedef struct mt_attn_rows {
    int32_t n;      /* query vectors, at most MT_ATTN_MAX_ROWS */
    const float *q; /* (n, head_dim) */
    float scale;
    float cap;                       /* scores are cap * tanh(score / cap); 0: as they are */
    int32_t begin[MT_ATTN_MAX_ROWS]; /* visible positions [begin, end) of each */
    int32_t end[MT_ATTN_MAX_ROWS];
} mt_attn_rows;

/* Up to MT_K_BLOCKS blocks of one tile, ready to multiply. */
typedef struct mt_unpacked {
    const uint8_t *codes; /* u8 [block][half][column group][64], blocks code_stride apart; see
                             kernels_neon_unpack.h for 64-bit ARM */
    size_t code_stride;
    uint8_t *buffer;      /* room for the codes of formats that do not lie like this in memory */
    float *scales, *mins; /* f32 [block][sub][32]; mins of formats that have them */
} mt_unpacked;

/* How a row is normed, group by group: weight and bias are NULL, or as long as a group or the row. */
typedef struct mt_norm {
    const float *weight, *bias;
    int weight_len, bias_len;
    int group;
    int is_centered; /* 1: the mean of the group is taken off first */
    int accumulate;
    float eps;
} mt_norm;

typedef struct mt_kernels {
    /* `n_blocks` blocks from block `b` of a tile; `out` holds the memory. Here and in mm_q8,
     * ahead_bytes at `ahead` are meanwhile fetched towards the core: packed blocks needed next. */
    void (*unpack)(const mt_layout *f, const uint8_t *tile, int64_t b, int n_blocks,
                   const uint8_t *ahead, size_t ahead_bytes, mt_unpacked *out);
    /* acc[column][32] += (is_first: =) products of unpacked blocks with n_cols activation rows, in
     * ascending block order. `x` points at block b of the first row. */
    void (*mm_q8)(const mt_layout *f, const mt_unpacked *w, int n_blocks, const mt_q8_block *x,
                  size_t x_stride, int n_cols, int is_first, const uint8_t *ahead,
                  size_t ahead_bytes, float *acc);
    /* acc[column][32] = the same products of a whole packed tile, for up to direct_cols columns,
     * each with its own activation row: nothing is unpacked to memory. */
    int direct_cols; /* at most MT_DIRECT_COLS: beyond, unpacking once is cheaper */
    void (*mm_direct)(const mt_layout *f, const uint8_t *tile, int n_blocks,
                      const mt_q8_block *const *x, int n_cols, float *acc);
    /* Columns k..k + n of a float tile as f32 [n][32]. */
    void (*unpack_float)(int32_t format, const uint8_t *tile, int64_t k, int n, float *w);
    /* Unpacked blocks as f32 [32 * n_blocks][32]: the values that the file's format defines. */
    void (*widen)(const mt_layout *f, const mt_unpacked *from, int n_blocks, float *w);
    /* acc[column][32] += w[k][32] * x[column][k], k ascending. */
    void (*mm_f32)(const float *w, int n, const float *x, size_t x_stride, int n_cols, float *acc);

    /* x as blocks of a kind of buffer, out_stride bytes apart; in `rest`, where it is not NULL, those
     * of x - out. Of MT_BUF_Q8 and MT_BUF_BF16, which has no rest. */
    void (*round[MT_N_BUFFER_KINDS])(const float *x, int n, size_t out_stride, void *out,
                                     void *rest);
    /* Per group: out (+)= weight * x / sqrt(mean(x^2) + eps) + bias. */
    void (*norm)(const float *x, int n, const mt_norm *how, float *out);
    /* One row of a recurrence, `n` value columns of a state S[n_keys][stride] (floats):
     * S = decay * S; w = rate * (corrects ? v - S' k : v); S += k w'; out = S' q. Keys in ascending
     * order. */
    void (*recur)(float *state, int n_keys, int stride, float decay, float rate, int corrects,
                  const float *k, const float *q, const float *v, int n, float *out);
    /* up may be NULL */
    void (*glu)(const float *gate, const float *up, int n, int activation, float *out);
    /* The first n_rot values of each of `heads` neighbouring heads, by (cos, sin) pairs. */
    void (*rotate)(float *x, int heads, int head_dim, int n_rot, int style, const float *trig);
    void (*add)(const float *x, int n, float *out);
    /* out = cap * tanh(scale * x / cap); cap 0: scale * x. NaN stays NaN. */
    void (*scale)(const float *x, int n, float scale, float cap, float *out);
    /* The first `width` sums of each row of a tile: out (+)= acc + rest + bias, where rest and bias
     * may be NULL. Rows of acc and rest are MT_TILE_ROWS apart, those of out `stride` floats. */
    void (*emit)(const float *acc, const float *rest, const float *bias, int n_rows, int width,
                 int accumulate, size_t stride, float *out);
    /* Rounds n values of one head to the cache's type, `stride` values apart; for Q8_0 the scale of
     * every 32 of them goes to `scales`, scale_stride apart. */
    void (*store_kv)(const float *x, int n, int type, size_t stride, uint8_t *out,
                     size_t scale_stride, uint16_t *scales);

    /* One split of positions: for each query vector r the maximum m[r], the sum l[r] of
     * exp(score - m) and the weighted values o[r][v_stride]; l = 0 where nothing is visible.
     * `scratch` holds MT_ATTN_SCRATCH floats. */
    void (*attend_split)(const mt_kv_view *kv, const mt_attn_rows *rows, int32_t split, float *m,
                         float *l, float *o, float *scratch);
    /* Folds the partials (m, l, o) of n_rows query vectors into the running (big_m, big_l, big_o);
     * `stride` values, a multiple of 16, belong to each. */
    void (*attend_merge)(int n_rows, const float *m, const float *l, const float *o, int stride,
                         float *big_m, float *big_l, float *big_o);
    void (*attend_finish)(const float *o, float l, int n, float *out);

    /* w = exp((x - best) / temperature), and its sum over every MT_WEIGHT_RUN neighbours. */
    void (*weigh)(const float *x, int n, float best, float temperature, float *w, double *sums);
} mt_kernels;

extern const mt_kernels mt_kernels_scalar;
#if defined(__x86_64__) || defined(_M_X64)
extern const mt_kernels mt_kernels_sse41;
extern const mt_kernels mt_kernels_avx2;
extern const mt_kernels mt_kernels_avxvnni;
extern const mt_kernels mt_kernels_avx512;
extern const mt_kernels mt_kernels_amx;
#elif defined(__aarch64__) || defined(_M_ARM64)
extern const mt_kernels mt_kernels_neon;
extern const mt_kernels mt_kernels_dotprod;
extern const mt_kernels mt_kernels_i8mm;
#endif

#endif
