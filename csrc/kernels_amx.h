/* Matrix products on AMX tiles (Sapphire Rapids and later): the integer sums of 12 activation rows
 * x 32 weight rows come from two tile products, all float work is that of mm_tile, in its order, so
 * the bits are the same.
 *
 * Nothing is rearranged: the codes of an activation block are a row of tile A as they lie (rows
 * x_stride apart), an unpacked column group of 16 weight rows is a row of tile B. A sum has to
 * leave its tile for every block, because there the scales change: that, not the product, is what
 * takes the time, and why formats with two scales a block are left to the vectors. */

#include "amx.h"

enum { AMX_COLS = 12 }; /* x 2 halves: 24 sums, which leaves 8 vector registers */

/* Tiles: 0 to 3 are sums, of odd blocks (0, 1) and of even ones (2, 3); 4 is A, 5 and 6 are B. */
static void amx_prepare(void) {
    amx_config config = {.palette = 1};
    for (int i = 0; i < 5; i++) {
        config.rows[i] = AMX_COLS;
        config.row_bytes[i] = i < 4 ? 64 : 32;
    }
    for (int i = 5; i < 7; i++) {
        config.rows[i] = 8;
        config.row_bytes[i] = 64;
    }
    amx_configure(&config);
}

ALWAYS void amx_multiply(int b, const mt_unpacked *w, const mt_q8_block *x, size_t x_stride) {
    const uint8_t *codes = w->codes + (size_t)b * w->code_stride;
    _tile_loadd(4, x[b].q, x_stride);
    _tile_loadd(5, codes, 64);
    _tile_loadd(6, codes + 512, 64);
    if (b & 1) {
        _tile_zero(0);
        _tile_dpbsud(0, 4, 5);
        _tile_zero(1);
        _tile_dpbsud(1, 4, 6);
    } else {
        _tile_zero(2);
        _tile_dpbsud(2, 4, 5);
        _tile_zero(3);
        _tile_dpbsud(3, 4, 6);
    }
}

typedef int32_t amx_dots[2][AMX_COLS][16]; /* [half][column][row] */

ALWAYS void amx_store(int b, amx_dots dots) {
    if (b & 1) {
        _tile_stored(0, dots[0], 64);
        _tile_stored(1, dots[1], 64);
    } else {
        _tile_stored(2, dots[0], 64);
        _tile_stored(3, dots[1], 64);
    }
}

/* AMX_COLS columns x both halves, as mm_tile with n_sub 1. A product is begun two blocks before its
 * sums are used and stored one block before, so that nobody waits for it. */
ALWAYS void amx_tile(int has_min, int bias, const mt_unpacked *w, int n_blocks,
                     const mt_q8_block *x, size_t x_stride, int is_first, mm_ahead ahead,
                     float *acc) {
    const float *scales = w->scales, *mins = w->mins;
    _Alignas(64) amx_dots dots[2];
    vf sum[2][AMX_COLS];
    UNROLL(12)
    for (int c = 0; c < AMX_COLS; c++)
        for (int h = 0; h < 2; h++)
            sum[h][c] = is_first ? vf_set1(0.0f) : vf_load(acc + c * 32 + h * 16);
    amx_multiply(0, w, x, x_stride);
    if (n_blocks > 1) amx_multiply(1, w, x, x_stride);
    amx_store(0, dots[0]);
    UNROLL(2)
    for (int b = 0; b < n_blocks; b++, scales += 32, mins += 32) {
        fetch_some(&ahead);
        if (b + 2 < n_blocks) amx_multiply(b + 2, w, x, x_stride);
        if (b + 1 < n_blocks) amx_store(b + 1, dots[(b + 1) % 2]);
        vf dw[2], mw[2];
        for (int h = 0; h < 2; h++) {
            dw[h] = vf_load(scales + h * 16);
            mw[h] = has_min ? vf_load(mins + h * 16) : dw[h];
        }
        UNROLL(12)
        for (int c = 0; c < AMX_COLS; c++) {
            const mt_q8_block *xb = column(x, x_stride, c) + b;
            for (int h = 0; h < 2; h++) {
                vi dot = vi_load(dots[b % 2][h][c]);
                if (bias) dot = vi_add(dot, vi_set1(biased_start(xb->n8, bias)));
                sum[h][c] = vf_fma(vf_mul(dw[h], vf_set1(xb->d)), vf_from_i32(dot), sum[h][c]);
                if (has_min) sum[h][c] = vf_fma(mw[h], vf_set1(xb->ds), sum[h][c]);
            }
        }
    }
    UNROLL(12)
    for (int c = 0; c < AMX_COLS; c++)
        for (int h = 0; h < 2; h++) vf_store(acc + c * 32 + h * 16, sum[h][c]);
}

#define AMX_FUNCTION(name, n_sub, has_min, bias, most)                                             \
    static void amx_##name(const mt_unpacked *w, int n_blocks, const mt_q8_block *x,               \
                           size_t x_stride, int is_first, mm_ahead ahead, float *acc) {            \
        amx_tile(has_min, bias, w, n_blocks, x, x_stride, is_first, ahead, acc);                   \
    }
#define AMX_NAME(name, ...) amx_##name,
/* clang-format off */
MM_CLASSES_1(AMX_FUNCTION)
static mm_tile_fn *const amx_by_class[] = {MM_CLASSES_1(AMX_NAME)};
/* clang-format on */

/* mm_q8 by twelves; what is left over goes to vectors. */
static void mm_q8_amx(const mt_layout *f, const mt_unpacked *w, int n_blocks, const mt_q8_block *x,
                      size_t x_stride, int n_cols, int is_first, const uint8_t *ahead,
                      size_t ahead_bytes, float *acc) {
    const int passes = f->n_sub == 1 ? n_cols / AMX_COLS : 0, done = passes * AMX_COLS;
    if (passes) amx_prepare();
    for (int p = 0; p < passes; p++)
        amx_by_class[mm_class_of(f) - mm_classes](
            w, n_blocks, column(x, x_stride, p * AMX_COLS), x_stride, is_first,
            share_of(ahead, ahead_bytes, p, passes, n_blocks), acc + p * AMX_COLS * 32);
    if (passes) _tile_release(); /* or every switch of threads saves 8 KB of tiles */
    if (done < n_cols)
        mm_q8(f, w, n_blocks, column(x, x_stride, done), x_stride, n_cols - done, is_first, ahead,
              passes ? 0 : ahead_bytes, acc + done * 32);
}
