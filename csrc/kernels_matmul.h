/* Matrix products on unpacked tiles, written once against the primitives of simd_*.h.
 *
 * The law: the sum over the columns of one (row, token) is taken block by block in ascending
 * order, each block as one exact integer sum, whatever the number of tokens. */
/* -bias * sum(q), from -8 * sum(q); wraps around where a hostile plan points at other bytes. */
ALWAYS int32_t biased_start(int32_t n8, int bias) {
    if (bias == 0) return 0;
    return bias < 8 ? n8 / (8 / bias) : (int32_t)((uint32_t)n8 * (uint32_t)(bias / 8));
}

/* The same in every lane. */
ALWAYS vi vi_start(int32_t n8, int bias) {
    /* codes up to 255 are brought below 128, and so have no bias left */
    if (bias == 128 && !SIMD_TAKES_U8) return vi_set1(0);
#if SIMD_HAS_DOT
    return vi_set1(biased_start(n8, bias));
#else /* a broadcast is a load, and the lanes are cheaper to shift than a general register */
    if (bias == 0) return vi_set1(0);
    return vi_shift(vi_set1(n8), bias < 8 ? -__builtin_ctz(8u / (unsigned)bias)
                                          : __builtin_ctz((unsigned)bias / 8));
#endif
}

/* How many products of two columns, of codes up to `most` and activations up to 127, fit in 16 bits. */
ALWAYS int pair_room(int most) { return 32767 / (2 * 127 * most); }

#if SIMD_HAS_DOT
typedef vi vp; /* no such sums are needed */
#endif

/* dot += products of column group g of the activations q, the last of a sum being `last`. */
ALWAYS void dot_group(vi *dot, vp *pairs, vb w, const int8_t *q, int g, int last, int most) {
#if SIMD_HAS_DOT
#if SIMD_TAKES_U8
    *dot = vi_dot(*dot, w, q, g);
#else
    *dot = most > 127 ? vi_dot_signed(*dot, w, q, g) : vi_dot(*dot, w, q, g);
#endif
    (void)pairs, (void)last, (void)most;
#else
    const int room = pair_room(most) > 0 ? pair_room(most) : 1;
    const vp product = most > 127 ? vp_dot_signed(w, q + 4 * g) : vp_dot(w, q + 4 * g);
    *pairs = g % room ? vp_add(*pairs, product) : product;
    if (g % room == room - 1 || g == last) *dot = vi_add_pairs(*dot, *pairs);
#endif
}

/* Column c of the activations. */
ALWAYS const mt_q8_block *column(const mt_q8_block *x, size_t x_stride, int c) {
    return (const mt_q8_block *)(const void *)((const char *)x + (size_t)c * x_stride);
}

#if defined(MT_NEON)
#include "kernels_neon.h"
#else
enum { MM_STEP = 1 }; /* columns come by so many, but for the last */

/* COLS columns x HALVES halves of a tile. All attributes but the pointers are compile-time. */
ALWAYS void mm_tile(int cols, int halves, int n_sub, int has_min, int bias, int most,
                    const mt_unpacked *w32, int first_half, int n_blocks, const mt_q8_block *x,
                    size_t x_stride, int is_first, mm_ahead ahead, float *acc) {
    const uint8_t *codes = w32->codes + first_half * 512;
    const float *scales = w32->scales + first_half * 16, *mins = w32->mins + first_half * 16;
    const size_t code_stride = w32->code_stride;
    vf sum[MM_HALVES][MM_COLS];
    for (int h = 0; h < halves; h++)
        for (int c = 0; c < cols; c++)
            sum[h][c] = is_first ? vf_set1(0.0f) : vf_load(acc + c * 32 + h * 16);
    for (int b = 0; b < n_blocks; b++) {
        fetch_some(&ahead);
        UNROLL(2)
        for (int sub = 0; sub < n_sub; sub++) {
            vi dot[MM_HALVES][MM_COLS];
            vp pairs[MM_HALVES][MM_COLS];
            UNROLL(6)
            for (int c = 0; c < cols; c++) {
                const mt_q8_block *xb = column(x, x_stride, c) + b;
                const int32_t n8 = n_sub == 1 ? xb->n8 : xb->nh8[sub];
                const vi start = vi_start(n8, bias);
                UNROLL(2)
                for (int h = 0; h < halves; h++) dot[h][c] = start;
            }
            UNROLL(8)
            for (int g = 0; g < 8 / n_sub; g++) {
                vb w[MM_HALVES];
                UNROLL(2)
                for (int h = 0; h < halves; h++)
                    w[h] = vb_load(codes + h * 512 + (sub * 4 + g) * 64);
                UNROLL(6)
                for (int c = 0; c < cols; c++) {
                    const mt_q8_block *xb = column(x, x_stride, c) + b;
                    const int8_t *q = xb->q + sub * 16;
                    UNROLL(2)
                    for (int h = 0; h < halves; h++) {
                        dot_group(&dot[h][c], &pairs[h][c], w[h], q, g, 8 / n_sub - 1, most);
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
        codes += code_stride;
        scales += 32 * n_sub;
        mins += 32 * n_sub;
    }
    for (int h = 0; h < halves; h++)
        for (int c = 0; c < cols; c++) vf_store(acc + c * 32 + h * 16, sum[h][c]);
}
#endif

typedef void mm_tile_fn(const mt_unpacked *, int, const mt_q8_block *, size_t, int, mm_ahead,
                        float *);

/* clang-format off */
/* One function per (bias class, columns): name, n_sub, has_min, bias, largest code. */
#define MM_CLASSES_1(X)                                                                            \
    X(b0m, 1, 1, 0, 15) X(b0m5, 1, 1, 0, 31)                                                       \
    X(b8, 1, 0, 8, 15) X(b16, 1, 0, 16, 31) X(b128, 1, 0, 128, 255)                                \
    X(b64, 1, 0, 64, 127) X(b1, 1, 0, 1, 3)
#define MM_CLASSES(X)                                                                              \
    MM_CLASSES_1(X) X(b32s, 2, 0, 32, 63) X(b4s, 2, 0, 4, 7) X(b0ms, 2, 1, 0, 3)           \
    X(b16s, 2, 0, 16, 31) X(b64s, 2, 0, 64, 127)
#define MM_FUNCTION(name, cols, n_sub, has_min, bias, most)                                        \
    static void mm_##name##_##cols(const mt_unpacked *w, int n_blocks, const mt_q8_block *x,       \
                                   size_t x_stride, int is_first, mm_ahead ahead, float *acc) {    \
        for (int h = 0; h < 2; h += MM_HALVES, ahead.at = ahead.stop)                              \
            mm_tile(cols, MM_HALVES, n_sub, has_min, bias, most, w, h, n_blocks, x, x_stride,      \
                    is_first, ahead, acc + h * 16);                                                \
    }
#if MM_COLS == 6
#define MM_EACH_COLS(X, ...)                                                                       \
    X(1, __VA_ARGS__)                                                                              \
    X(2, __VA_ARGS__) X(3, __VA_ARGS__) X(4, __VA_ARGS__) X(5, __VA_ARGS__) X(6, __VA_ARGS__)
#elif MM_COLS == 4
#define MM_EACH_COLS(X, ...)                                                                       \
    X(1, __VA_ARGS__) X(2, __VA_ARGS__) X(3, __VA_ARGS__) X(4, __VA_ARGS__)
#elif MM_COLS == 3
#define MM_EACH_COLS(X, ...) X(1, __VA_ARGS__) X(2, __VA_ARGS__) X(3, __VA_ARGS__)
#else
#define MM_EACH_COLS(X, ...) X(1, __VA_ARGS__) X(2, __VA_ARGS__)
#endif
#define MM_DEFINE(cols, name, ...) MM_FUNCTION(name, cols, __VA_ARGS__)
#define MM_DEFINE_CLASS(name, ...) MM_EACH_COLS(MM_DEFINE, name, __VA_ARGS__)
MM_CLASSES(MM_DEFINE_CLASS)
#define MM_NAME(cols, name) mm_##name##_##cols,

typedef struct {
    int n_sub, has_min, bias, most;
    mm_tile_fn *by_cols[MM_COLS];
} mm_class;
#define MM_ROW(name, ...) {__VA_ARGS__, {MM_EACH_COLS(MM_NAME, name)}},
static const mm_class mm_classes[] = {MM_CLASSES(MM_ROW)};

static const mm_class *mm_class_of(const mt_layout *f) {
    for (size_t i = 0; i < sizeof mm_classes / sizeof mm_classes[0]; i++) {
        const mm_class *c = &mm_classes[i];
        if (c->n_sub == f->n_sub && c->has_min == mt_has_min(f) && c->bias == f->bias &&
            c->most == mt_most_code(f))
            return c;
    }
    return 0; /* unreachable: every row of the layout table has a class (checked by the op tests) */
}

static void mm_q8(const mt_layout *f, const mt_unpacked *w, int n_blocks, const mt_q8_block *x,
                  size_t x_stride, int n_cols, int is_first, const uint8_t *ahead,
                  size_t ahead_bytes, float *acc) {
    const mm_class *class = mm_class_of(f);
    /* passes of almost equal width, so that 7 columns are 4 + 3 and not 6 + 1 */
    const int passes = (n_cols + MM_COLS - 1) / MM_COLS;
    for (int p = 0, c = 0; p < passes; p++) {
        const int left = n_cols - c;
        int cols = (left + passes - p - 1) / (passes - p);
        if (cols < left) cols += cols % MM_STEP;
        const void *first = (const char *)x + (size_t)c * x_stride;
        class->by_cols[cols - 1](w, n_blocks, first, x_stride, is_first,
                                 share_of(ahead, ahead_bytes, p, passes, n_blocks), acc + c * 32);
        c += cols;
    }
}
