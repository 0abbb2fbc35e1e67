/* Weights of any bytes: packed, read back by every kernel table, and multiplied by, in memory that ends
 * where they do. Values that pack.c calls finite are read back as numbers. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cpu.h"
#include "engine.h"
#include "memory.h"
#include "pack.h"

enum { MOST_ROWS = 33, MOST_SUPERS = 2, MOST_FLOATS = 96, MOST_ISAS = 16 };

/* Asked once: the instruction that tells is slow in a virtual machine. */
static int32_t is_supported[MOST_ISAS];

static const int32_t FORMATS[] = {
    MT_F32,   MT_F16,   MT_BF16,    MT_Q4_0,   MT_Q4_1,  MT_Q5_0,    MT_Q5_1,   MT_Q8_0,   MT_Q2_K,
    MT_Q3_K,  MT_Q4_K,  MT_Q5_K,    MT_Q6_K,   MT_TQ1_0, MT_TQ2_0,   MT_IQ4_NL, MT_IQ4_XS, MT_MXFP4,
    MT_IQ1_S, MT_IQ1_M, MT_IQ2_XXS, MT_IQ2_XS, MT_IQ2_S, MT_IQ3_XXS, MT_IQ3_S};

/* As many vectors as codes of the format can name. */
static uint16_t *codebook_of(int32_t format) {
    const size_t n = format == MT_IQ2_XXS || format == MT_IQ3_XXS ? 256
                     : format == MT_IQ2_XS || format == MT_IQ3_S  ? 512
                     : format == MT_IQ2_S                         ? 1024
                                                                  : 2048;
    uint16_t *book = malloc(n * sizeof *book);
    for (size_t i = 0; i < n; i++) book[i] = (uint16_t)(i * 40503u);
    return book;
}

static void *whole_lines(size_t n_bytes) {
    void *p = mt_line_alloc(n_bytes);
    return memset(p, 0, n_bytes);
}

/* One row of activations times a tile, as ops_linear.c asks for it. */
static void multiply(const mt_kernels *k, const mt_layout *f, const uint8_t *tile, int64_t cols) {
    const int n_blocks = (int)(cols / MT_BLOCK);
    mt_q8_block *x = whole_lines((size_t)n_blocks * sizeof *x);
    float *acc = whole_lines(MT_TILE_ROWS * sizeof(float));
    mt_unpacked w = {.buffer = whole_lines((size_t)MT_K_BLOCKS * 1024),
                     .scales = whole_lines(MT_K_BLOCKS * 64 * MT_SCALE_COPIES * sizeof(float)),
                     .mins = whole_lines(MT_K_BLOCKS * 64 * MT_SCALE_COPIES * sizeof(float))};
    float *wide = whole_lines((size_t)MT_BLOCK * MT_K_BLOCKS * MT_TILE_ROWS * sizeof(float));
    for (int b = 0; b < n_blocks; b++)
        for (int i = 0; i < MT_BLOCK; i++) x[b].q[i] = (int8_t)(i * 37 + b);
    k->unpack(f, tile, 0, n_blocks, tile, 0, &w);
    k->mm_q8(f, &w, n_blocks, x, (size_t)n_blocks * MT_BLOCK_BYTES, 1, 1, tile, 0, acc);
    k->widen(f, &w, n_blocks, wide);
    const mt_q8_block *rows[] = {x};
    if (k->direct_cols > 0) k->mm_direct(f, tile, n_blocks, rows, 1, acc);
    mt_line_free(x);
    mt_line_free(acc);
    mt_line_free(w.buffer);
    mt_line_free(w.scales);
    mt_line_free(w.mins);
    mt_line_free(wide);
}

static void use_tile(const mt_layout *f, const uint8_t *tile, int64_t cols) {
    for (int isa = 0; isa < mt_n_isas(); isa++) {
        if (!is_supported[isa]) continue;
        const mt_kernels *k = mt_isa_kernels(isa);
        if (f->codes != MT_CODES_FLOAT) {
            multiply(k, f, tile, cols);
            continue;
        }
        float *w = whole_lines((size_t)cols * MT_TILE_ROWS * sizeof(float));
        k->unpack_float(f->format, tile, 0, (int)cols, w);
        mt_line_free(w);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 4) return 0;
    const mt_layout *f = mt_layout_of(FORMATS[data[0] % (sizeof FORMATS / sizeof FORMATS[0])]);
    const int64_t rows = 1 + data[1] % MOST_ROWS;
    const int64_t cols = f->codes == MT_CODES_FLOAT ? 1 + data[2] % MOST_FLOATS
                         : mt_is_super(f)           ? f->raw_block * (1 + data[2] % MOST_SUPERS)
                                                    : f->raw_block * (1 + data[2] % 5);
    mt_tensor t = {.format = f->format, .rows = rows, .cols = cols};
    t.n_bytes = rows * (cols / f->raw_block) * f->raw_bytes;
    uint8_t *raw = malloc((size_t)t.n_bytes);
    for (int64_t i = 0; i < t.n_bytes; i++) raw[i] = data[3 + (size_t)i % (size - 3)];
    t.data = raw;
    if (mt_has_codebook(f)) t.codebook = codebook_of(f->format);
    const size_t tile_bytes = mt_tile_bytes(f, cols);
    uint8_t *tile = whole_lines(tile_bytes);
    float *row = malloc((size_t)cols * sizeof *row);
    for (int64_t i = 0; i < (rows + MT_TILE_ROWS - 1) / MT_TILE_ROWS; i++) {
        int64_t bad_row = -1, bad_col = -1;
        const int is_finite = mt_pack_tile(f, &t, i, tile, &bad_row, &bad_col);
        if (!is_finite && (bad_row < 0 || bad_row >= rows || bad_col < 0 || bad_col >= cols))
            abort();
        for (int64_t r = 0; r < MT_TILE_ROWS && i * MT_TILE_ROWS + r < rows; r++) {
            mt_unpack_row(f, tile, cols, r, row);
            for (int64_t k = 0; is_finite && k < cols; k++)
                if (isnan(row[k])) abort();
        }
        use_tile(f, tile, cols);
    }
    free(row);
    mt_line_free(tile);
    free(raw);
    free((void *)t.codebook);
    return 0;
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    if (mt_n_isas() > MOST_ISAS) abort();
    for (int32_t isa = 0; isa < mt_n_isas(); isa++) is_supported[isa] = mt_isa_supported(isa);
    return 0;
}
