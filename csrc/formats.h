/* How weights lie in memory once packed, and how activations are quantized.
 *
 * A weight matrix is cut into tiles of 32 output rows; SIMD lanes are rows. Along the columns a
 * tile is a sequence of blocks of 32 columns (for K formats eight blocks behind one header), so a
 * thread reads one linear stream and no sum ever crosses lanes.
 *
 *   tile   = super-block, super-block, ...
 *   super  = [ d f16[32] | dmin f16[32] ]   header, K formats only (1 super-block = 8 blocks)
 *            block, block, ...
 *   block  = codes | scales
 *   codes  = planes, each [16-row half 0 | half 1], each half a run of 64-byte vectors
 *            one vector = 16 rows x 4 columns: byte 4 * row + column
 *     N4    4 vectors a half: low nibble columns 4 j.., high nibble columns 16 + 4 j..
 *     H1    1 vector a half: bit g belongs to columns 4 g..4 g + 3
 *     P2    2 vectors a half: vector p holds column groups 4 p..4 p + 3, two bits each
 *     B8    8 vectors a half: whole bytes
 *   scales = legacy: d f16[32] (| m f16[32]);  K: s u8/i8[n_sub][32] (| m u8[n_sub][32])
 *
 * Float weights (F32, F16, BF16) have tiles of [column][32 rows].
 */
#ifndef MT_FORMATS_H
#define MT_FORMATS_H

#include <stddef.h>
#include <stdint.h>

#include "martlet.h"

enum { MT_TILE_ROWS = 32, MT_BLOCK = 32, MT_SUPER = 256 };

enum mt_codes {
    MT_CODES_N4,
    MT_CODES_N4H1,
    MT_CODES_N4P2,
    MT_CODES_B8,
    MT_CODES_P2,
    MT_CODES_P2H1,
    MT_CODES_FLOAT
};

/* Where a weight's value comes from: w = d * (code - bias), w = d * code + m,
 * w = d * s * (code - bias), w = d * s * code - dmin * m. */
enum mt_scales { MT_SCALES_D, MT_SCALES_DM, MT_SCALES_S, MT_SCALES_SM, MT_SCALES_NONE };

/* Every block format: name, ggml id, codes, scales, n_sub, bias, is_signed_s, is_lookup, raw_block,
 * raw_bytes. Adding a format is a row here and a case in pack.c. */
#define MT_BLOCK_LAYOUTS(X)                                                                        \
    X(q4_0, MT_Q4_0, MT_CODES_N4, MT_SCALES_D, 1, 8, 0, 0, 32, 18)                                 \
    X(q4_1, MT_Q4_1, MT_CODES_N4, MT_SCALES_DM, 1, 0, 0, 0, 32, 20)                                \
    X(q5_0, MT_Q5_0, MT_CODES_N4H1, MT_SCALES_D, 1, 16, 0, 0, 32, 22)                              \
    X(q5_1, MT_Q5_1, MT_CODES_N4H1, MT_SCALES_DM, 1, 0, 0, 0, 32, 24)                              \
    X(q8_0, MT_Q8_0, MT_CODES_B8, MT_SCALES_D, 1, 128, 0, 0, 32, 34)                               \
    X(iq4_nl, MT_IQ4_NL, MT_CODES_N4, MT_SCALES_D, 1, 128, 0, 1, 32, 18)                           \
    X(iq4_xs, MT_IQ4_XS, MT_CODES_N4, MT_SCALES_S, 1, 128, 1, 1, 256, 136)                         \
    X(q2_k, MT_Q2_K, MT_CODES_P2, MT_SCALES_SM, 2, 0, 0, 0, 256, 84)                               \
    X(q3_k, MT_Q3_K, MT_CODES_P2H1, MT_SCALES_S, 2, 4, 1, 0, 256, 110)                             \
    X(q4_k, MT_Q4_K, MT_CODES_N4, MT_SCALES_SM, 1, 0, 0, 0, 256, 144)                              \
    X(q5_k, MT_Q5_K, MT_CODES_N4H1, MT_SCALES_SM, 1, 0, 0, 0, 256, 176)                            \
    X(q6_k, MT_Q6_K, MT_CODES_N4P2, MT_SCALES_S, 2, 32, 1, 0, 256, 210)

/* Place of each block format in the tables made from the list. */
enum mt_layout_index {
#define MT_LAYOUT_INDEX(name, ...) MT_AT_##name,
    MT_BLOCK_LAYOUTS(MT_LAYOUT_INDEX)
#undef MT_LAYOUT_INDEX
        MT_N_BLOCK_LAYOUTS
};

typedef struct mt_layout {
    int32_t index; /* mt_layout_index; -1 for floats */
    int32_t format;
    int32_t codes;       /* mt_codes */
    int32_t scales;      /* mt_scales */
    int32_t n_sub;       /* scales per block of 32: 1, or 2 (one per 16 columns) */
    int32_t bias;        /* subtracted from every code: 0, 4, 8, 16, 32 or 128 */
    int32_t is_signed_s; /* the 8-bit scales are signed */
    int32_t is_lookup;   /* codes index the IQ4 value table */
    int32_t raw_block;   /* weights of one block in the file */
    int32_t raw_bytes;   /* its bytes */
} mt_layout;

/* NULL for a format without kernels. */
const mt_layout *mt_layout_of(int32_t format);
/* IQ4 values + 128, indexed by code. */
extern const uint8_t mt_iq4_values[16];

static inline size_t mt_code_bytes(int codes) {
    static const uint16_t bytes[] = {512, 512 + 128, 512 + 256, 1024, 256, 256 + 128, 0};
    return bytes[codes];
}
static inline int mt_has_min(const mt_layout *f) {
    return f->scales == MT_SCALES_DM || f->scales == MT_SCALES_SM;
}
/* The largest code, as products see it. */
static inline int mt_most_code(const mt_layout *f) {
    static const uint8_t most[] = {15, 31, 63, 255, 3, 7, 0};
    return f->is_lookup ? 255 : most[f->codes];
}
static inline int mt_is_super(const mt_layout *f) {
    return f->scales == MT_SCALES_S || f->scales == MT_SCALES_SM;
}
static inline int mt_float_bytes(int32_t format) { return format == 0 ? 4 : 2; }
static inline size_t mt_header_bytes(const mt_layout *f) {
    return f->scales == MT_SCALES_SM ? 128 : f->scales == MT_SCALES_S ? 64 : 0;
}
static inline size_t mt_block_bytes(const mt_layout *f) {
    size_t scale = mt_is_super(f) ? 32 * (size_t)f->n_sub : 64;
    return mt_code_bytes(f->codes) + scale * (mt_has_min(f) ? 2 : 1);
}
/* Bytes of one tile of 32 rows x cols. */
static inline size_t mt_tile_bytes(const mt_layout *f, int64_t cols) {
    if (f->codes == MT_CODES_FLOAT) return (size_t)cols * 32 * (size_t)mt_float_bytes(f->format);
    size_t n_blocks = (size_t)cols / MT_BLOCK;
    size_t n_headers = mt_is_super(f) ? (size_t)cols / MT_SUPER : 0;
    return n_headers * mt_header_bytes(f) + n_blocks * mt_block_bytes(f);
}
/* Offset of block b inside its tile; the header of its super-block lies before that run of 8. */
static inline size_t mt_block_offset(const mt_layout *f, int64_t b) {
    size_t n_headers = mt_is_super(f) ? (size_t)b / 8 + 1 : 0;
    return n_headers * mt_header_bytes(f) + (size_t)b * mt_block_bytes(f);
}
static inline size_t mt_header_offset(const mt_layout *f, int64_t b) {
    size_t super = (size_t)b / 8;
    return super * (mt_header_bytes(f) + 8 * mt_block_bytes(f));
}

/* 32 activations of one row: one cache line. The code bias of a format is folded into the start of
 * the integer sum, -bias * sum(q), which is why -8 * sum(q) is kept (the smallest whole bias). */
typedef struct mt_q8_block {
    int8_t q[32];
    float d;        /* value = d * q */
    float ds;       /* d * sum of q */
    int32_t n8;     /* -8 * sum of q */
    int32_t nh8[2]; /* the same for each half of 16 */
    float dh[2];    /* d * sum of each half */
    int32_t pad;
} mt_q8_block;
enum { MT_BLOCK_BYTES = 64 };
_Static_assert(sizeof(mt_q8_block) == MT_BLOCK_BYTES, "an activation block is one cache line");

/* Rows of blocks: 32 values are one cache line, an mt_q8_block or 32 halves of floats (bf16).
 *
 * An odd number of cache lines: rows a power of two apart would fight for the same few of the
 * first-level cache. */
static inline size_t mt_block_row_bytes(int64_t width) {
    return ((size_t)width / MT_BLOCK | 1) * MT_BLOCK_BYTES;
}

#endif
