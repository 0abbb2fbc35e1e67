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
 *   scales = legacy: d f16[32] (| m f16[32]);  K: s u8/i8[n_sub][32] (| m u8[n_sub][32]);
 *            exponents: e u8[32]
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

/* What a code stands for: itself, or a value of a table. Every value has the bias added. */
enum mt_table {
    MT_TABLE_NONE,
    MT_TABLE_IQ4,
    MT_TABLE_FP4,
    MT_TABLE_IQ1, /* bits 0 and 1: the value's index; the top bit in use is the sign of a delta */
    MT_TABLE_IQ2, /* the same of a magnitude, and its sign */
    MT_TABLE_IQ3_XXS,
    MT_TABLE_IQ3_S,
    MT_N_TABLES
};

/* Where a weight's value comes from, c being the code or its value in the table: d * (c - bias),
 * d * c + m, d * unit * s * (c - bias), d * s * c - dmin * m, 2^(e - 127) * (c - bias),
 * d * (c - bias). The d of D and DM belongs to a block, that of S, SM and SUPER to eight. */
enum mt_scales {
    MT_SCALES_D,
    MT_SCALES_DM,
    MT_SCALES_S,
    MT_SCALES_SM,
    MT_SCALES_E,
    MT_SCALES_SUPER,
    MT_SCALES_NONE
};

/* Every block format: name, ggml id, codes, table, scales, n_sub, bias, is_signed_s, unit, raw_block,
 * raw_bytes. Adding a format is a row here and a case in raw_block.c. */
#define MT_BLOCK_LAYOUTS(X)                                                                        \
    X(q4_0, MT_Q4_0, MT_CODES_N4, MT_TABLE_NONE, MT_SCALES_D, 1, 8, 0, 1, 32, 18)                  \
    X(q4_1, MT_Q4_1, MT_CODES_N4, MT_TABLE_NONE, MT_SCALES_DM, 1, 0, 0, 1, 32, 20)                 \
    X(q5_0, MT_Q5_0, MT_CODES_N4H1, MT_TABLE_NONE, MT_SCALES_D, 1, 16, 0, 1, 32, 22)               \
    X(q5_1, MT_Q5_1, MT_CODES_N4H1, MT_TABLE_NONE, MT_SCALES_DM, 1, 0, 0, 1, 32, 24)               \
    X(q8_0, MT_Q8_0, MT_CODES_B8, MT_TABLE_NONE, MT_SCALES_D, 1, 128, 0, 1, 32, 34)                \
    X(iq4_nl, MT_IQ4_NL, MT_CODES_N4, MT_TABLE_IQ4, MT_SCALES_D, 1, 128, 0, 1, 32, 18)             \
    X(iq4_xs, MT_IQ4_XS, MT_CODES_N4, MT_TABLE_IQ4, MT_SCALES_S, 1, 128, 1, 1, 256, 136)           \
    X(q2_k, MT_Q2_K, MT_CODES_P2, MT_TABLE_NONE, MT_SCALES_SM, 2, 0, 0, 1, 256, 84)                \
    X(q3_k, MT_Q3_K, MT_CODES_P2H1, MT_TABLE_NONE, MT_SCALES_S, 2, 4, 1, 1, 256, 110)              \
    X(q4_k, MT_Q4_K, MT_CODES_N4, MT_TABLE_NONE, MT_SCALES_SM, 1, 0, 0, 1, 256, 144)               \
    X(q5_k, MT_Q5_K, MT_CODES_N4H1, MT_TABLE_NONE, MT_SCALES_SM, 1, 0, 0, 1, 256, 176)             \
    X(q6_k, MT_Q6_K, MT_CODES_N4P2, MT_TABLE_NONE, MT_SCALES_S, 2, 32, 1, 1, 256, 210)             \
    X(mxfp4, MT_MXFP4, MT_CODES_N4, MT_TABLE_FP4, MT_SCALES_E, 1, 16, 0, 1, 32, 17)                \
    X(tq1_0, MT_TQ1_0, MT_CODES_P2, MT_TABLE_NONE, MT_SCALES_SUPER, 1, 1, 0, 1, 256, 54)           \
    X(tq2_0, MT_TQ2_0, MT_CODES_P2, MT_TABLE_NONE, MT_SCALES_SUPER, 1, 1, 0, 1, 256, 66)           \
    X(iq1_s, MT_IQ1_S, MT_CODES_P2H1, MT_TABLE_IQ1, MT_SCALES_S, 1, 16, 0, 0.125f, 256, 50)        \
    X(iq1_m, MT_IQ1_M, MT_CODES_P2H1, MT_TABLE_IQ1, MT_SCALES_S, 2, 16, 0, 0.125f, 256, 56)        \
    X(iq2_xxs, MT_IQ2_XXS, MT_CODES_P2H1, MT_TABLE_IQ2, MT_SCALES_S, 1, 64, 0, 0.125f, 256, 66)    \
    X(iq2_xs, MT_IQ2_XS, MT_CODES_P2H1, MT_TABLE_IQ2, MT_SCALES_S, 2, 64, 0, 0.125f, 256, 74)      \
    X(iq2_s, MT_IQ2_S, MT_CODES_P2H1, MT_TABLE_IQ2, MT_SCALES_S, 2, 64, 0, 0.125f, 256, 82)        \
    X(iq3_xxs, MT_IQ3_XXS, MT_CODES_N4, MT_TABLE_IQ3_XXS, MT_SCALES_S, 1, 64, 0, 0.25f, 256, 98)   \
    X(iq3_s, MT_IQ3_S, MT_CODES_N4, MT_TABLE_IQ3_S, MT_SCALES_S, 1, 16, 0, 1, 256, 110)

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
    int32_t table;       /* mt_table */
    int32_t scales;      /* mt_scales */
    int32_t n_sub;       /* scales per block of 32: 1, or 2 (one per 16 columns) */
    int32_t bias;        /* subtracted from every code: 0, or a power of two up to 128 */
    int32_t is_signed_s; /* the 8-bit scales are signed */
    float unit;          /* of the 8-bit scales */
    int32_t raw_block;   /* weights of one block in the file */
    int32_t raw_bytes;   /* its bytes */
} mt_layout;

/* NULL for a format without kernels. */
const mt_layout *mt_layout_of(int32_t format);
/* Of each mt_table, by code: the value and the bias. */
extern const uint8_t mt_values[MT_N_TABLES][16];

static inline size_t mt_code_bytes(int codes) {
    static const uint16_t bytes[] = {512, 512 + 128, 512 + 256, 1024, 256, 256 + 128, 0};
    return bytes[codes];
}
static inline int mt_has_min(const mt_layout *f) {
    return f->scales == MT_SCALES_DM || f->scales == MT_SCALES_SM;
}
/* Codes in the file stand for vectors. */
static inline int mt_has_codebook(const mt_layout *f) { return f->table >= MT_TABLE_IQ1; }
/* The largest code, as products see it. */
static inline int mt_most_code(const mt_layout *f) {
    static const uint8_t most[] = {15, 31, 63, 255, 3, 7, 0};
    static const uint8_t most_value[MT_N_TABLES] = {0, 255, 31, 31, 127, 127, 31};
    return f->table ? most_value[f->table] : most[f->codes];
}
/* Eight blocks stand behind one header. */
static inline int mt_is_super(const mt_layout *f) { return f->raw_block == MT_SUPER; }
static inline int mt_float_bytes(int32_t format) { return format == 0 ? 4 : 2; }
static inline size_t mt_header_bytes(const mt_layout *f) {
    return mt_is_super(f) ? (mt_has_min(f) ? 128 : 64) : 0;
}
static inline size_t mt_scale_bytes(const mt_layout *f) {
    const size_t n_sub = (size_t)f->n_sub;
    const size_t bytes[] = {64, 128, 32 * n_sub, 64 * n_sub, 32, 0, 0};
    return bytes[f->scales];
}
static inline size_t mt_block_bytes(const mt_layout *f) {
    return mt_code_bytes(f->codes) + mt_scale_bytes(f);
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
