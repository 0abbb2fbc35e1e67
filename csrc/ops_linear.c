/* Matrix products: one work item is a tile of 32 output rows times a chunk of activation rows.
 *
 * Every product has its own sum: x and, where the plan keeps a second plane, the rest; for a gated
 * pair gate and up. The sums of a chunk lie one behind the other in the accumulators. */
#include <string.h>

#include "pack.h"
#include "products.h"

/* A packed tile. Of a weight without a packed copy it lies in the scratch until the next one does; its
 * values were looked at when the weights were loaded. */
static const uint8_t *tile_of(mt_engine *e, const mt_weight *w, int64_t tile, mt_scratch *s) {
    int64_t row, col;
    if (w->stored.data) {
        mt_pack_tile(w->layout, &w->stored, tile, s->tile, &row, &col);
        return s->tile;
    }
    if (w->is_packed && !w->is_packed[tile]) mt_pack_late(e, w, tile);
    return w->packed + (size_t)tile * mt_tile_bytes(w->layout, w->cols);
}

static const mt_q8_block *q8_row(const uint8_t *rows, size_t stride, int r) {
    return (const mt_q8_block *)(const void *)(rows + (size_t)r * stride);
}

static void multiply_unpacked(mt_engine *e, const mt_weight *w, const uint8_t *tile,
                              const mt_operand *x, mt_scratch *s, float *acc) {
    const mt_kernels *k = e->kernels;
    const int n_blocks = (int)(w->cols / MT_BLOCK);
    const mt_q8_block *first = q8_row(x->x, 0, 0);
    const mt_q8_block *rest = x->rest ? q8_row(x->rest, 0, 0) : NULL;
    const int runs = (n_blocks + MT_K_BLOCKS - 1) / MT_K_BLOCKS; /* of almost equal length */
    /* the blocks that come next are fetched in shares, one of them during unpacking */
    const size_t passes = (size_t)(x->n + MT_TILE_COLS - 1) / MT_TILE_COLS;
    for (int r = 0, b = 0, run; r < runs; r++, b += run) {
        run = (n_blocks - b + runs - r - 1) / (runs - r);
        const uint8_t *next = tile + mt_block_offset(w->layout, b + run);
        const size_t share =
            (size_t)run * mt_block_bytes(w->layout) / (1 + passes * (rest ? 2 : 1));
        k->unpack(w->layout, tile, b, run, next, share, &s->unpacked);
        next += share;
        k->mm_q8(w->layout, &s->unpacked, run, first + b, x->stride, x->n, b == 0, next,
                 share * passes, acc);
        if (rest)
            k->mm_q8(w->layout, &s->unpacked, run, rest + b, x->stride, x->n, b == 0,
                     next + share * passes, share * passes, acc + x->n * MT_TILE_ROWS);
    }
}

/* Columns k..k + n of rows [first, first + n_rows) as floats, *stride of them from row to row. */
static const float *float_rows(mt_engine *e, const mt_operand *x, int first, int n_rows, int64_t k,
                               int n, mt_scratch *s, size_t *stride) {
    const uint8_t *row = x->x + (size_t)first * x->stride;
    if (x->kind == MT_BUF_F32) {
        *stride = x->stride / sizeof(float);
        return (const float *)(const void *)row + k;
    }
    *stride = MT_K_FLOATS;
    for (int r = 0; r < n_rows; r++) /* 32 values at a time, as if they were a column of a tile */
        e->kernels->unpack_float(MT_BF16, row + (size_t)r * x->stride, k / MT_BLOCK, n / MT_BLOCK,
                                 s->rows + r * MT_K_FLOATS);
    return s->rows;
}

/* Float rows: columns k..k + n of the tile are widened, then multiplied in ascending order with as
 * many rows at a time as a first-level cache holds. */
static void multiply_floats(mt_engine *e, const mt_weight *w, const uint8_t *tile,
                            const mt_operand *x, mt_scratch *s, float *acc) {
    const mt_kernels *kernels = e->kernels;
    for (int64_t k = 0; k < w->cols; k += MT_K_FLOATS) {
        const int run = (int)(w->cols - k < MT_K_FLOATS ? w->cols - k : MT_K_FLOATS);
        if (w->layout->codes == MT_CODES_FLOAT) {
            kernels->unpack_float(w->format, tile, k, run, s->wide);
        } else {
            const int blocks = run / MT_BLOCK;
            kernels->unpack(w->layout, tile, k / MT_BLOCK, blocks, tile, 0, &s->unpacked);
            kernels->widen(w->layout, &s->unpacked, blocks, s->wide);
        }
        for (int r = 0; r < x->n; r += MT_FLOAT_ROWS) {
            const int n = x->n - r < MT_FLOAT_ROWS ? x->n - r : MT_FLOAT_ROWS;
            size_t stride;
            const float *rows = float_rows(e, x, r, n, k, run, s, &stride);
            kernels->mm_f32(s->wide, run, rows, stride, n, acc + r * MT_TILE_ROWS);
        }
    }
}

void mt_multiply_tile(mt_engine *e, const mt_weight *w, int64_t tile, const mt_operand *x,
                      mt_scratch *s, float *acc) {
    const uint8_t *packed = tile_of(e, w, tile, s);
    const int sums = x->n * (x->rest ? 2 : 1);
    if (x->kind == MT_BUF_Q8 && sums <= e->kernels->direct_cols) {
        const mt_q8_block *rows[MT_DIRECT_COLS];
        for (int i = 0; i < sums; i++)
            rows[i] = i < x->n ? q8_row(x->x, x->stride, i) : q8_row(x->rest, x->stride, i - x->n);
        e->kernels->mm_direct(w->layout, packed, (int)(w->cols / MT_BLOCK), rows, sums, acc);
    } else if (x->kind == MT_BUF_Q8) {
        multiply_unpacked(e, w, packed, x, s, acc);
    } else {
        for (int i = 0; i < x->n * MT_TILE_ROWS; i++) acc[i] = 0.0f;
        multiply_floats(e, w, packed, x, s, acc);
    }
}

void mt_emit_tile(mt_engine *e, const float *bias, int width, int n, int planes, const float *acc,
                  int accumulate, size_t stride, float *out) {
    e->kernels->emit(acc, planes == 2 ? acc + n * MT_TILE_ROWS : NULL, bias, n, width, accumulate,
                     stride, out);
}

void mt_glu_tile(mt_engine *e, const mt_op *op, int activation, const float *const bias[2],
                 int width, int first, int n, int64_t tile, float *gates, float *ups) {
    float *parts[2] = {gates, ups};
    for (int i = 0; i < 2 && parts[i]; i++)
        if (mt_planes(op) == 2 || bias[i])
            mt_emit_tile(e, bias[i], width, n, mt_planes(op), parts[i], 0, MT_TILE_ROWS, parts[i]);
    e->kernels->glu(gates, ups, n * MT_TILE_ROWS, activation, gates);
    const mt_buffer *out = &e->buffers[op->out];
    if (out->kind == MT_BUF_F32)
        mt_emit_tile(e, NULL, width, n, 1, gates, 0, (size_t)out->width,
                     mt_row_f32(e, op->out, first) + tile * MT_TILE_ROWS);
    else /* the 32 values of a row and tile are one block */
        mt_store_blocks(e, op, first, (int)tile, gates, n * MT_TILE_ROWS, (size_t)out->row_bytes);
}

/* Chunks of activation rows: as few as fit the accumulators, more where tiles are scarce. */
static int count_chunks(const mt_engine *e, int n_tiles, int n, int sums) {
    const int fits = MT_COL_CHUNK / sums;
    int chunks = (n + fits - 1) / fits;
    while (n_tiles * chunks < 4 * e->n_threads && n / (chunks + 1) >= 24) chunks++;
    return chunks;
}

void mt_set_runs(const mt_engine *e, mt_work *w) {
    const int run = w->n_tiles / (8 * e->n_threads);
    w->run = w->chunks == 1 && run > 1 ? (run < MT_TILE_RUN ? run : MT_TILE_RUN) : 1;
    w->runs = w->n_tiles * 3 / 4 / w->run;
}

/* Tiles one by one: a thread has a share of its own, in which it reads on anyway. */
static mt_work work_of(const mt_engine *e, int n_tiles, int n, int sums) {
    return (mt_work){.chunks = count_chunks(e, n_tiles, n, sums), .n_tiles = n_tiles, .run = 1};
}

/* The tiles [first, stop) of an item, its rows, and which of the op's rows is the first of them. */
static mt_operand rows_of_item(const mt_engine *e, const mt_op *op, const mt_work *w, int item,
                               int *first, int *stop, int *row) {
    const int per_chunk = mt_items_of_chunk(w), chunk = item / per_chunk, n = mt_count_rows(e, op);
    mt_tiles_of(w, item % per_chunk, first, stop);
    *row = (int)((int64_t)n * chunk / w->chunks);
    const mt_buffer *in = &e->buffers[op->in[0]];
    return (mt_operand){.x = mt_row(e, op->in[0], *row),
                        .rest = mt_planes(op) == 2 ? mt_row(e, op->in[1], *row) : NULL,
                        .stride = (size_t)in->row_bytes,
                        .kind = in->kind,
                        .n = (int)((int64_t)n * (chunk + 1) / w->chunks) - *row};
}

/* The part of a bias (a tensor id, or -1) that belongs to a tile, or NULL. */
static const float *bias_of(const mt_engine *e, int32_t bias, int64_t tile) {
    const float *values = bias >= 0 ? e->weights[bias].values : NULL;
    return values ? values + tile * MT_TILE_ROWS : NULL;
}

static int width_of(const mt_weight *w, int64_t tile) {
    const int64_t left = w->rows - tile * MT_TILE_ROWS;
    return (int)(left < MT_TILE_ROWS ? left : MT_TILE_ROWS);
}

/* -- linear: up to three stacked weights ------------------------------------------------------- */

static int stacked_tiles(const mt_engine *e, const mt_op *op) {
    int64_t n = 0;
    for (int w = 0; w < 3 && op->w[w] >= 0; w++) n += e->weights[op->w[w]].n_tiles;
    return (int)n;
}

static mt_work linear_work(const mt_engine *e, const mt_op *op) {
    return work_of(e, stacked_tiles(e, op), mt_count_rows(e, op), mt_planes(op));
}

static int count_linear(const mt_engine *e, const mt_op *op) {
    const mt_work w = linear_work(e, op);
    return w.chunks * mt_items_of_chunk(&w);
}

static void run_linear(mt_engine *e, const mt_op *op, int item, mt_scratch *s) {
    const mt_work work = linear_work(e, op);
    int first, stop, row;
    const mt_operand x = rows_of_item(e, op, &work, item, &first, &stop, &row);
    for (int i = first; i < stop; i++) {
        int64_t tile = i, col = op->i[0];
        int at = 0;
        for (; tile >= e->weights[op->w[at]].n_tiles; at++) {
            tile -= e->weights[op->w[at]].n_tiles;
            col += e->weights[op->w[at]].rows;
        }
        const mt_weight *w = &e->weights[op->w[at]];
        mt_multiply_tile(e, w, tile, &x, s, s->acc);
        mt_emit_tile(e, bias_of(e, op->w[3 + at], tile), width_of(w, tile), x.n, mt_planes(op),
                     s->acc, op->flags & MT_FLAG_ACCUMULATE, (size_t)e->buffers[op->out].width,
                     mt_row_f32(e, op->out, row) + col + tile * MT_TILE_ROWS);
    }
}

const mt_phase mt_linear_phase = {count_linear, run_linear};

/* -- linear_glu: activation(gate) * up, tile by tile ------------------------------------------- */

static mt_work glu_work(const mt_engine *e, const mt_op *op) {
    const int products = op->w[1] < 0 ? 1 : 2;
    return work_of(e, (int)e->weights[op->w[0]].n_tiles, mt_count_rows(e, op),
                   products * mt_planes(op));
}

static int count_linear_glu(const mt_engine *e, const mt_op *op) {
    const mt_work w = glu_work(e, op);
    return w.chunks * mt_items_of_chunk(&w);
}

static void run_linear_glu(mt_engine *e, const mt_op *op, int item, mt_scratch *s) {
    const mt_weight *gate = &e->weights[op->w[0]];
    const mt_work work = glu_work(e, op);
    int first, stop, row;
    const mt_operand x = rows_of_item(e, op, &work, item, &first, &stop, &row);
    float *gates = s->acc, *ups = op->w[1] < 0 ? NULL : gates + x.n * mt_planes(op) * MT_TILE_ROWS;
    for (int tile = first; tile < stop; tile++) {
        mt_multiply_tile(e, gate, tile, &x, s, gates);
        if (ups) mt_multiply_tile(e, &e->weights[op->w[1]], tile, &x, s, ups);
        const float *const bias[2] = {bias_of(e, op->w[2], tile), bias_of(e, op->w[3], tile)};
        mt_glu_tile(e, op, op->i[0], bias, width_of(gate, tile), row, x.n, tile, gates, ups);
    }
}

const mt_phase mt_linear_glu_phase = {count_linear_glu, run_linear_glu};

/* -- head_linear: every head's own matrix, stacked; each has whole tiles ------------------------- */

static mt_work head_work(const mt_engine *e, const mt_op *op) {
    const int n_tiles = (int)e->weights[op->w[0]].n_tiles;
    return work_of(e, n_tiles, mt_count_rows(e, op), mt_planes(op));
}

static int count_head_linear(const mt_engine *e, const mt_op *op) {
    const mt_work w = head_work(e, op);
    return w.chunks * mt_items_of_chunk(&w);
}

/* From value `first` on, which begins a block where the buffer has blocks. */
static size_t bytes_before(const mt_buffer *b, int first) {
    const size_t n = (size_t)first;
    return b->kind == MT_BUF_F32 ? n * sizeof(float) : n / MT_BLOCK * MT_BLOCK_BYTES;
}

static void run_head_linear(mt_engine *e, const mt_op *op, int item, mt_scratch *s) {
    const mt_weight *w = &e->weights[op->w[0]];
    const mt_work work = head_work(e, op);
    const mt_buffer *in = &e->buffers[op->in[0]];
    const int heads = op->i[0], rows = (int)w->rows / heads, cols = (int)w->cols;
    const int width = in->width / heads, tail = width - cols, stride = e->buffers[op->out].width;
    int first, stop, row;
    const mt_operand all = rows_of_item(e, op, &work, item, &first, &stop, &row);
    for (int tile = first; tile < stop; tile++) {
        const int head = tile * MT_TILE_ROWS / rows, from = tile * MT_TILE_ROWS % rows;
        mt_operand x = all;
        x.x += bytes_before(in, head * width);
        if (x.rest) x.rest += bytes_before(in, head * width);
        float *out = mt_row_f32(e, op->out, row) + head * (rows + tail);
        mt_multiply_tile(e, w, tile, &x, s, s->acc);
        mt_emit_tile(e, NULL, MT_TILE_ROWS, x.n, mt_planes(op), s->acc, 0, (size_t)stride,
                     out + from);
        if (!tail || from) continue;
        const float *kept = mt_row_f32(e, op->in[2], row) + head * width + cols;
        for (int r = 0; r < x.n; r++)
            memcpy(out + (size_t)r * (size_t)stride + rows, kept + (size_t)r * (size_t)in->width,
                   (size_t)tail * sizeof(float));
    }
}

const mt_phase mt_head_linear_phase = {count_head_linear, run_head_linear};
