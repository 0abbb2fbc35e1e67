/* Matrix products on packed tiles, written once against the primitives of simd_*.h.
 *
 * The law: the sum over the columns of one (row, token) is taken block by block in ascending
 * order, each block as one exact integer sum, whatever the number of tokens. */
#include "formats.h"

#define ALWAYS static inline __attribute__((always_inline))

/* Column group g (4 columns) of one 16-row half of a block. */
ALWAYS vb load_codes(int kind, const uint8_t *codes, int half, int g) {
    const uint8_t *n4 = codes + half * 256;
    switch (kind) {
    case MT_CODES_B8: return vb_load(codes + half * 512 + g * 64);
    case MT_CODES_P2: return vb_pair(vb_load(codes + half * 128 + g / 4 * 64), g & 3, 0);
    case MT_CODES_P2H1: {
        vb low = vb_pair(vb_load(codes + half * 128 + g / 4 * 64), g & 3, 0);
        return vb_or_bit(low, vb_load(codes + 256 + half * 64), g, 4);
    }
    default: break;
    }
    vb packed = vb_load(n4 + (g & 3) * 64);
    vb low = g < 4 ? vb_low4(packed) : vb_high4(packed);
    if (kind == MT_CODES_N4H1) return vb_or_bit(low, vb_load(codes + 512 + half * 64), g, 16);
    if (kind == MT_CODES_N4P2)
        return vb_or(low, vb_pair(vb_load(codes + 512 + half * 128 + g / 4 * 64), g & 3, 4));
    return low;
}

ALWAYS void unpack_codes(int kind, int is_lookup, const uint8_t *block, uint8_t *out) {
    for (int half = 0; half < 2; half++) {
        UNROLL(8)
        for (int g = 0; g < 8; g++) {
            vb v = load_codes(kind, block, half, g);
            if (is_lookup) v = vb_lookup16(v, mt_iq4_values);
            vb_store(out + (g * 2 + half) * 64, v);
        }
    }
}

ALWAYS void unpack_scales(const mt_layout *f, const uint8_t *scale, const uint8_t *header,
                          float *scales, float *mins) {
    const uint16_t *d = (const uint16_t *)(const void *)header;
    for (int half = 0; half < 2; half++) {
        const int at = half * 16;
        if (f->scales == MT_SCALES_D || f->scales == MT_SCALES_DM) {
            const uint16_t *legacy = (const uint16_t *)(const void *)scale;
            vf_store(scales + at, vf_load_f16(legacy + at));
            if (f->scales == MT_SCALES_DM) vf_store(mins + at, vf_load_f16(legacy + 32 + at));
            continue;
        }
        const vf super_d = vf_load_f16(d + at);
        for (int sub = 0; sub < f->n_sub; sub++) {
            const uint8_t *s = scale + sub * 32 + at;
            vf_store(scales + sub * 32 + at,
                     vf_mul(super_d, f->is_signed_s ? vf_load_i8(s) : vf_load_u8(s)));
            if (f->scales == MT_SCALES_SM) {
                vf m = vf_mul(vf_load_f16(d + 32 + at), vf_load_u8(s + f->n_sub * 32));
                vf_store(mins + sub * 32 + at, vf_sub(vf_set1(0.0f), m));
            }
        }
    }
}

#define UNPACK_CASE(kind, lookup)                                                                  \
    for (int i = 0; i < n_blocks; i++)                                                             \
        unpack_codes(kind, lookup, tile + mt_block_offset(f, b + i), codes + (size_t)i * 1024);    \
    break

static void unpack(const mt_layout *f, const uint8_t *tile, int64_t b, int n_blocks, uint8_t *codes,
                   float *scales, float *mins) {
    switch (f->codes) {
    case MT_CODES_N4:
        if (f->is_lookup) {
            UNPACK_CASE(MT_CODES_N4, 1);
        }
        UNPACK_CASE(MT_CODES_N4, 0);
    case MT_CODES_N4H1: UNPACK_CASE(MT_CODES_N4H1, 0);
    case MT_CODES_N4P2: UNPACK_CASE(MT_CODES_N4P2, 0);
    case MT_CODES_P2: UNPACK_CASE(MT_CODES_P2, 0);
    case MT_CODES_P2H1: UNPACK_CASE(MT_CODES_P2H1, 0);
    default: UNPACK_CASE(MT_CODES_B8, 0);
    }
    const size_t code_bytes = mt_code_bytes(f->codes);
    for (int i = 0; i < n_blocks; i++) {
        const uint8_t *scale = tile + mt_block_offset(f, b + i) + code_bytes;
        const size_t at = (size_t)i * (size_t)f->n_sub * 32;
        unpack_scales(f, scale, tile + mt_header_offset(f, b + i), scales + at, mins + at);
    }
}

/* -bias * sum(q), from -8 * sum(q); wraps around where a hostile plan points at other bytes. */
ALWAYS int32_t biased_start(int32_t n8, int bias) {
    if (bias == 0) return 0;
    return bias == 4 ? n8 / 2 : (int32_t)((uint32_t)n8 * (uint32_t)(bias / 8));
}

/* Column c of the activations. */
ALWAYS const mt_q8_block *column(const mt_q8_block *x, size_t x_stride, int c) {
    return (const mt_q8_block *)(const void *)((const char *)x + (size_t)c * x_stride);
}

/* COLS columns x HALVES halves of a tile. All attributes but the pointers are compile-time. */
ALWAYS void mm_tile(int cols, int halves, int n_sub, int has_min, int bias, const uint8_t *codes,
                    const float *scales, const float *mins, int n_blocks, const mt_q8_block *x,
                    size_t x_stride, int is_first, float *acc) {
    vf sum[MM_HALVES][MM_COLS];
    for (int h = 0; h < halves; h++)
        for (int c = 0; c < cols; c++)
            sum[h][c] = is_first ? vf_set1(0.0f) : vf_load(acc + c * 32 + h * 16);
    const int wide = bias == 128 && !SIMD_HAS_DPBUSD;
    for (int b = 0; b < n_blocks; b++) {
        UNROLL(2)
        for (int sub = 0; sub < n_sub; sub++) {
            vi dot[MM_HALVES][MM_COLS];
            UNROLL(6)
            for (int c = 0; c < cols; c++) {
                const mt_q8_block *xb = column(x, x_stride, c) + b;
                const int32_t n8 = n_sub == 1 ? xb->n8 : xb->nh8[sub];
                const vi start = vi_set1(wide ? 0 : biased_start(n8, bias));
                UNROLL(2)
                for (int h = 0; h < halves; h++) dot[h][c] = start;
            }
            UNROLL(8)
            for (int g = 0; g < 8 / n_sub; g++) {
                vb w[MM_HALVES];
                UNROLL(2)
                for (int h = 0; h < halves; h++)
                    w[h] = vb_load(codes + ((sub * 4 + g) * 2 + h) * 64);
                UNROLL(6)
                for (int c = 0; c < cols; c++) {
                    const mt_q8_block *xb = column(x, x_stride, c) + b;
                    const int8_t *q = xb->q + (sub * 4 + g) * 4;
                    UNROLL(2)
                    for (int h = 0; h < halves; h++) {
#if SIMD_HAS_DPBUSD
                        dot[h][c] = vi_dot(dot[h][c], w[h], q);
#else
                        dot[h][c] =
                            wide ? vi_dot_wide(dot[h][c], w[h], q) : vi_dot(dot[h][c], w[h], q);
#endif
                    }
                }
            }
            UNROLL(2)
            for (int h = 0; h < halves; h++) {
                const vf dw = vf_load(scales + sub * 32 + h * 16);
                const vf mw = has_min ? vf_load(mins + sub * 32 + h * 16) : dw;
                UNROLL(6)
                for (int c = 0; c < cols; c++) {
                    const mt_q8_block *xb = column(x, x_stride, c) + b;
                    sum[h][c] =
                        vf_fma(vf_mul(dw, vf_set1(xb->d)), vf_from_i32(dot[h][c]), sum[h][c]);
                    if (has_min)
                        sum[h][c] =
                            vf_fma(mw, vf_set1(n_sub == 1 ? xb->ds : xb->dh[sub]), sum[h][c]);
                }
            }
        }
        codes += 1024;
        scales += 32 * n_sub;
        mins += 32 * n_sub;
    }
    for (int h = 0; h < halves; h++)
        for (int c = 0; c < cols; c++) vf_store(acc + c * 32 + h * 16, sum[h][c]);
}

typedef void mm_tile_fn(const uint8_t *, const float *, const float *, int, const mt_q8_block *,
                        size_t, int, float *);

/* clang-format off */
/* One function per (bias class, columns): name, n_sub, has_min, bias. */
#define MM_CLASSES_1(X) X(b0m, 1, 1, 0) X(b8, 1, 0, 8) X(b16, 1, 0, 16) X(b128, 1, 0, 128)
#define MM_CLASSES(X) MM_CLASSES_1(X) X(b32s, 2, 0, 32) X(b4s, 2, 0, 4) X(b0ms, 2, 1, 0)
#define MM_FUNCTION(name, cols, n_sub, has_min, bias)                                              \
    static void mm_##name##_##cols(const uint8_t *codes, const float *scales, const float *mins,   \
                                   int n_blocks, const mt_q8_block *x, size_t x_stride,            \
                                   int is_first, float *acc) {                                     \
        for (int h = 0; h < 2; h += MM_HALVES)                                                     \
            mm_tile(cols, MM_HALVES, n_sub, has_min, bias, codes + h * 64, scales + h * 16,        \
                    mins + h * 16, n_blocks, x, x_stride, is_first, acc + h * 16);                 \
    }
#if MM_COLS == 6
#define MM_EACH_COLS(X, ...)                                                                       \
    X(1, __VA_ARGS__)                                                                              \
    X(2, __VA_ARGS__) X(3, __VA_ARGS__) X(4, __VA_ARGS__) X(5, __VA_ARGS__) X(6, __VA_ARGS__)
#elif MM_COLS == 3
#define MM_EACH_COLS(X, ...) X(1, __VA_ARGS__) X(2, __VA_ARGS__) X(3, __VA_ARGS__)
#else
#define MM_EACH_COLS(X, ...) X(1, __VA_ARGS__) X(2, __VA_ARGS__)
#endif
#define MM_DEFINE(cols, name, n_sub, has_min, bias) MM_FUNCTION(name, cols, n_sub, has_min, bias)
#define MM_DEFINE_CLASS(name, n_sub, has_min, bias)                                                \
    MM_EACH_COLS(MM_DEFINE, name, n_sub, has_min, bias)
MM_CLASSES(MM_DEFINE_CLASS)
#define MM_NAME(cols, name) mm_##name##_##cols,

typedef struct {
    int n_sub, has_min, bias;
    mm_tile_fn *by_cols[MM_COLS];
} mm_class;
#define MM_ROW(name, n_sub, has_min, bias) {n_sub, has_min, bias, {MM_EACH_COLS(MM_NAME, name)}},
static const mm_class mm_classes[] = {MM_CLASSES(MM_ROW)};

static const mm_class *mm_class_of(const mt_layout *f) {
    for (size_t i = 0; i < sizeof mm_classes / sizeof mm_classes[0]; i++) {
        const mm_class *c = &mm_classes[i];
        if (c->n_sub == f->n_sub && c->has_min == mt_has_min(f) && c->bias == f->bias) return c;
    }
    return 0; /* unreachable: every row of the layout table has a class (checked by the op tests) */
}

static void mm_q8(const mt_layout *f, const uint8_t *codes, const float *scales, const float *mins,
                  int n_blocks, const mt_q8_block *x, size_t x_stride, int n_cols, int is_first,
                  const uint8_t *ahead, size_t ahead_bytes, float *acc) {
    const mm_class *class = mm_class_of(f);
    /* passes of almost equal width, so that 7 columns are 4 + 3 and not 6 + 1 */
    const int passes = (n_cols + MM_COLS - 1) / MM_COLS;
    const size_t lines = (ahead_bytes + 63) / 64;
    for (int p = 0, c = 0; p < passes; p++) {
        const size_t stop = lines * ((size_t)p + 1) / (size_t)passes;
        for (size_t line = lines * (size_t)p / (size_t)passes; line < stop; line++)
            __builtin_prefetch(ahead + line * 64, 0, 2);
        const int cols = (n_cols - c + passes - p - 1) / (passes - p);
        const void *first = (const char *)x + (size_t)c * x_stride;
        class->by_cols[cols - 1](codes, scales, mins, n_blocks, first, x_stride, is_first,
                                 acc + c * 32);
        c += cols;
    }
}

/* -- straight from packed memory, for a few columns --------------------------------------- */

/* Scale and minimum of one half of a block, as unpack_scales. */
ALWAYS void load_scales(const mt_layout *f, const uint8_t *scale, const uint8_t *header, int sub,
                        int half, vf *dw, vf *mw) {
    const int at = half * 16;
    const uint16_t *legacy = (const uint16_t *)(const void *)scale;
    const uint16_t *d = (const uint16_t *)(const void *)header;
    if (!mt_is_super(f)) {
        *dw = vf_load_f16(legacy + at);
        *mw = f->scales == MT_SCALES_DM ? vf_load_f16(legacy + 32 + at) : *dw;
        return;
    }
    const uint8_t *s = scale + sub * 32 + at;
    *dw = vf_mul(vf_load_f16(d + at), f->is_signed_s ? vf_load_i8(s) : vf_load_u8(s));
    *mw = *dw;
    if (f->scales == MT_SCALES_SM) {
        vf m = vf_mul(vf_load_f16(d + 32 + at), vf_load_u8(s + f->n_sub * 32));
        *mw = vf_sub(vf_set1(0.0f), m);
    }
}

ALWAYS void direct_tile(const mt_layout *f, int cols, int halves, int first_half, int is_first,
                        const uint8_t *tile, int n_blocks, const mt_q8_block *const *x,
                        float *acc) {
    enum { AHEAD = 4096 }; /* bytes: the hardware's own prefetch ends at every page */
    const int wide = f->bias == 128 && !SIMD_HAS_DPBUSD;
    const size_t block_bytes = mt_block_bytes(f), code_bytes = mt_code_bytes(f->codes);
    vf sum[2][MM_COLS];
    for (int h = 0; h < halves; h++)
        for (int c = 0; c < cols; c++) sum[h][c] = vf_set1(0.0f);
    const uint8_t *header = tile, *block = tile + mt_header_bytes(f);
    for (int b = 0; b < n_blocks; b++, block += block_bytes) {
        if (mt_is_super(f) && b && b % 8 == 0) {
            header = block;
            block += mt_header_bytes(f);
        }
        for (size_t line = 0; is_first && line < block_bytes; line += 64)
            __builtin_prefetch(block + AHEAD + line, 0, 2);
        UNROLL(2)
        for (int sub = 0; sub < f->n_sub; sub++) {
            UNROLL(2)
            for (int h = 0; h < halves; h++) {
                const int half = first_half + h;
                vi dot[MM_COLS];
                for (int c = 0; c < cols; c++) {
                    const int32_t n8 = f->n_sub == 1 ? x[c][b].n8 : x[c][b].nh8[sub];
                    dot[c] = vi_set1(wide ? 0 : biased_start(n8, f->bias));
                }
                UNROLL(8)
                for (int g = sub * 4; g < (sub + 1) * 8 / f->n_sub; g++) {
                    vb w = load_codes(f->codes, block, half, g);
                    if (f->is_lookup) w = vb_lookup16(w, mt_iq4_values);
                    for (int c = 0; c < cols; c++) {
#if SIMD_HAS_DPBUSD
                        dot[c] = vi_dot(dot[c], w, x[c][b].q + g * 4);
#else
                        dot[c] = wide ? vi_dot_wide(dot[c], w, x[c][b].q + g * 4)
                                      : vi_dot(dot[c], w, x[c][b].q + g * 4);
#endif
                    }
                }
                vf dw, mw;
                load_scales(f, block + code_bytes, header, sub, half, &dw, &mw);
                for (int c = 0; c < cols; c++) {
                    const mt_q8_block *xb = x[c] + b;
                    sum[h][c] = vf_fma(vf_mul(dw, vf_set1(xb->d)), vf_from_i32(dot[c]), sum[h][c]);
                    if (mt_has_min(f))
                        sum[h][c] =
                            vf_fma(mw, vf_set1(f->n_sub == 1 ? xb->ds : xb->dh[sub]), sum[h][c]);
                }
            }
        }
    }
    for (int h = 0; h < halves; h++)
        for (int c = 0; c < cols; c++) vf_store(acc + c * 32 + (first_half + h) * 16, sum[h][c]);
}

#define DIRECT_CASE(cols, f)                                                                       \
    case cols: direct_tile(f, cols, MM_HALVES, h, is_first &&h == 0, tile, n_blocks, x, acc); break;
#define DIRECT_FUNCTION(name, ...)                                                                 \
    static void direct_##name(int n_cols, int is_first, const uint8_t *tile, int n_blocks,         \
                              const mt_q8_block *const *x, float *acc) {                           \
        static const mt_layout f = {MT_AT_##name, __VA_ARGS__};                                    \
        for (int h = 0; h < 2; h += MM_HALVES) switch (n_cols) {                                   \
                MM_EACH_COLS(DIRECT_CASE, &f)                                                      \
            }                                                                                      \
    }
MT_BLOCK_LAYOUTS(DIRECT_FUNCTION)

#define DIRECT_ROW(name, ...) direct_##name,
typedef void direct_fn(int, int, const uint8_t *, int, const mt_q8_block *const *, float *);

static void mm_direct(const mt_layout *f, const uint8_t *tile, int n_blocks,
                      const mt_q8_block *const *x, int n_cols, float *acc) {
    static direct_fn *const by_layout[] = {MT_BLOCK_LAYOUTS(DIRECT_ROW)};
    const int passes = (n_cols + MM_COLS - 1) / MM_COLS;
    for (int p = 0, c = 0; p < passes; p++) {
        const int cols = (n_cols - c + passes - p - 1) / (passes - p);
        by_layout[f->index](cols, p == 0, tile, n_blocks, x + c, acc + c * 32);
        c += cols;
    }
}

/* -- float weights ----------------------------------------------------------------------------- */

static void unpack_float(int32_t format, const uint8_t *tile, int64_t k, int n, float *w) {
    for (int i = 0; i < n * 32; i += 16) {
        const int64_t at = k * 32 + i;
        if (format == 0)
            vf_store(w + i, vf_load((const float *)(const void *)tile + at));
        else if (format == 1)
            vf_store(w + i, vf_load_f16((const uint16_t *)(const void *)tile + at));
        else
            vf_store(w + i, vf_load_bf16((const uint16_t *)(const void *)tile + at));
    }
}

static void widen_blocks(const mt_layout *f, const uint8_t *codes, const float *scales,
                         const float *mins, int n_blocks, float *w) {
    const vf bias = vf_set1((float)f->bias);
    const size_t sub_blocks = (size_t)f->n_sub;
    for (int b = 0; b < n_blocks; b++)
        for (int g = 0; g < 8; g++)
            for (int half = 0; half < 2; half++) {
                const size_t sub = (size_t)b * sub_blocks + (size_t)(g / 4) * (sub_blocks - 1);
                const size_t at = sub * 32;
                const vf dw = vf_load(scales + at + half * 16);
                const vb four = vb_load(codes + (size_t)b * 1024 + (g * 2 + half) * 64);
                for (int j = 0; j < 4; j++) {
                    vf value = vf_mul(dw, vf_sub(vb_column(four, j), bias));
                    if (mt_has_min(f)) value = vf_add(value, vf_load(mins + at + half * 16));
                    vf_store(w + (size_t)(b * 32 + g * 4 + j) * 32 + half * 16, value);
                }
            }
}

ALWAYS void mm_f32_tile(int cols, const float *w, int n, const float *x, size_t x_stride,
                        float *acc) {
    vf sum[2][MM_COLS];
    for (int h = 0; h < 2; h++)
        for (int c = 0; c < cols; c++) sum[h][c] = vf_load(acc + c * 32 + h * 16);
    for (int k = 0; k < n; k++)
        for (int h = 0; h < 2; h++) {
            const vf wk = vf_load(w + k * 32 + h * 16);
            UNROLL(6)
            for (int c = 0; c < cols; c++)
                sum[h][c] = vf_fma(wk, vf_set1(x[(size_t)c * x_stride + (size_t)k]), sum[h][c]);
        }
    for (int h = 0; h < 2; h++)
        for (int c = 0; c < cols; c++) vf_store(acc + c * 32 + h * 16, sum[h][c]);
}

#define MM_F32_CASE(cols, unused)                                                                  \
    case cols: mm_f32_tile(cols, w, n, x + (size_t)c * x_stride, x_stride, acc + c * 32); break;

static void mm_f32(const float *w, int n, const float *x, size_t x_stride, int n_cols, float *acc) {
    const int passes = (n_cols + MM_COLS - 1) / MM_COLS;
    for (int p = 0, c = 0; p < passes; p++) {
        const int cols = (n_cols - c + passes - p - 1) / (passes - p);
        switch (cols) { MM_EACH_COLS(MM_F32_CASE, 0) }
        c += cols;
    }
}
