/* Matrix products: one work item is a tile of 32 output rows times a chunk of activation rows.
 *
 * Every product has its own sum: x and, where the plan keeps a second plane, the rest; for a gated
 * pair gate and up. The sums of a chunk lie one behind the other in the accumulators. */
#include "engine.h"

/* The chunk of an item, and where its operands are. */
typedef struct {
    int32_t in, rest; /* buffer ids; rest -1 where x has one plane */
    int first, n;     /* activation rows */
} row_chunk;

static int n_planes(const mt_op *op) { return op->in[1] >= 0 ? 2 : 1; }

static const uint8_t *tile_of(const mt_weight *w, int64_t tile) {
    return w->packed + (size_t)tile * mt_tile_bytes(w->layout, w->cols);
}

static void multiply_unpacked(mt_engine *e, const mt_weight *w, const uint8_t *tile,
                              const row_chunk *c, mt_scratch *s, float *acc) {
    const mt_kernels *k = e->kernels;
    const int n_blocks = (int)(w->cols / MT_BLOCK);
    const size_t stride = (size_t)e->buffers[c->in].row_bytes;
    const mt_q8_block *x = mt_row_q8(e, c->in, c->first);
    const mt_q8_block *rest = c->rest >= 0 ? mt_row_q8(e, c->rest, c->first) : NULL;
    const int runs = (n_blocks + MT_K_BLOCKS - 1) / MT_K_BLOCKS; /* of almost equal length */
    /* the blocks that come next are fetched in shares, one of them during unpacking */
    const size_t passes = (size_t)(c->n + MT_TILE_COLS - 1) / MT_TILE_COLS;
    for (int r = 0, b = 0, run; r < runs; r++, b += run) {
        run = (n_blocks - b + runs - r - 1) / (runs - r);
        const uint8_t *next = tile + mt_block_offset(w->layout, b + run);
        const size_t share =
            (size_t)run * mt_block_bytes(w->layout) / (1 + passes * (rest ? 2 : 1));
        k->unpack(w->layout, tile, b, run, next, share, &s->unpacked);
        next += share;
        k->mm_q8(w->layout, &s->unpacked, run, x + b, stride, c->n, b == 0, next, share * passes,
                 acc);
        if (rest)
            k->mm_q8(w->layout, &s->unpacked, run, rest + b, stride, c->n, b == 0,
                     next + share * passes, share * passes, acc + c->n * MT_TILE_ROWS);
    }
}

/* Columns k..k + n of the rows of a chunk as floats, *stride of them from row to row. */
static const float *float_rows(mt_engine *e, const row_chunk *c, int64_t k, int n, mt_scratch *s,
                               size_t *stride) {
    const mt_buffer *in = &e->buffers[c->in];
    if (in->kind == MT_BUF_F32) {
        *stride = (size_t)in->row_bytes / sizeof(float);
        return mt_row_f32(e, c->in, c->first) + k;
    }
    *stride = MT_K_FLOATS;
    for (int r = 0; r < c->n; r++) /* 32 values at a time, as if they were a column of a tile */
        e->kernels->unpack_float(MT_BF16, mt_row(e, c->in, c->first + r), k / MT_BLOCK,
                                 n / MT_BLOCK, s->rows + r * MT_K_FLOATS);
    return s->rows;
}

/* Float rows: columns k..k + n of the tile are widened, then multiplied in ascending order with as
 * many rows at a time as a first-level cache holds. */
static void multiply_floats(mt_engine *e, const mt_weight *w, const uint8_t *tile,
                            const row_chunk *c, mt_scratch *s, float *acc) {
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
        for (int r = 0; r < c->n; r += MT_FLOAT_ROWS) {
            const int n = c->n - r < MT_FLOAT_ROWS ? c->n - r : MT_FLOAT_ROWS;
            const row_chunk part = {.in = c->in, .rest = -1, .first = c->first + r, .n = n};
            size_t stride;
            const float *x = float_rows(e, &part, k, run, s, &stride);
            kernels->mm_f32(s->wide, run, x, stride, n, acc + r * MT_TILE_ROWS);
        }
    }
}

/* acc[n][32] = tile * rows, and behind that the same of the rest. */
static void multiply_tile(mt_engine *e, const mt_weight *w, int64_t tile, const row_chunk *c,
                          mt_scratch *s, float *acc) {
    const uint8_t *packed = tile_of(w, tile);
    const int planes = c->rest >= 0 ? 2 : 1, n = c->n * MT_TILE_ROWS;
    const int is_q8 = e->buffers[c->in].kind == MT_BUF_Q8;
    if (is_q8 && c->n * planes <= e->kernels->direct_cols) {
        const mt_q8_block *x[MT_DIRECT_COLS];
        for (int i = 0; i < c->n * planes; i++)
            x[i] = i < c->n ? mt_row_q8(e, c->in, c->first + i)
                            : mt_row_q8(e, c->rest, c->first + i - c->n);
        e->kernels->mm_direct(w->layout, packed, (int)(w->cols / MT_BLOCK), x, c->n * planes, acc);
    } else if (is_q8) {
        multiply_unpacked(e, w, packed, c, s, acc);
    } else {
        for (int i = 0; i < n; i++) acc[i] = 0.0f;
        multiply_floats(e, w, packed, c, s, acc);
    }
}

/* out (+)= the sums that multiply_tile left in acc, planes and bias (a tensor id) added up. */
static void emit_tile(mt_engine *e, const mt_weight *w, int32_t bias, int64_t tile,
                      const row_chunk *c, const float *acc, int accumulate, size_t stride,
                      float *out) {
    const int64_t left = w->rows - tile * MT_TILE_ROWS;
    const float *b = bias >= 0 ? e->weights[bias].values : NULL;
    e->kernels->emit(acc, c->rest >= 0 ? acc + c->n * MT_TILE_ROWS : NULL,
                     b ? b + tile * MT_TILE_ROWS : NULL, c->n,
                     (int)(left < MT_TILE_ROWS ? left : MT_TILE_ROWS), accumulate, stride, out);
}

/* Chunks of activation rows: as few as fit the accumulators, more where tiles are scarce. */
static int count_chunks(const mt_engine *e, int n_tiles, int n, int sums) {
    const int fits = MT_COL_CHUNK / sums;
    int chunks = (n + fits - 1) / fits;
    while (n_tiles * chunks < 4 * e->n_threads && n / (chunks + 1) >= 24) chunks++;
    return chunks;
}

/* Work items of an op, chunk by chunk: `runs` runs of `run` tiles, then single tiles. Where all rows
 * are one chunk, three quarters of the tiles go out in runs, in which a thread reads on where it
 * stopped; the rest go one by one, so that the threads end together. */
typedef struct {
    int chunks, n_tiles, run, runs;
} work;

static work work_of(const mt_engine *e, int n_tiles, int n, int sums) {
    work w = {.chunks = count_chunks(e, n_tiles, n, sums), .n_tiles = n_tiles, .run = 1};
    const int run = n_tiles / (8 * e->n_threads);
    if (w.chunks == 1 && run > 1) w.run = run < MT_TILE_RUN ? run : MT_TILE_RUN;
    w.runs = n_tiles * 3 / 4 / w.run;
    return w;
}

static int items_of_chunk(const work *w) { return w->runs + w->n_tiles - w->runs * w->run; }

/* The tiles [first, stop) of an item, and its rows. */
static row_chunk chunk_of(const mt_op *op, const work *w, int item, int n, int *first, int *stop) {
    const int per_chunk = items_of_chunk(w), chunk = item / per_chunk, i = item % per_chunk;
    *first = i < w->runs ? i * w->run : w->runs * w->run + i - w->runs;
    *stop = *first + (i < w->runs ? w->run : 1);
    const int row = (int)((int64_t)n * chunk / w->chunks);
    return (row_chunk){op->in[0], op->in[1], row,
                       (int)((int64_t)n * (chunk + 1) / w->chunks) - row};
}

static int rows_of(const mt_engine *e, const mt_op *op) {
    return mt_rows_of(e, &e->buffers[op->out]);
}

/* -- linear: up to three stacked weights ------------------------------------------------------- */

static int stacked_tiles(const mt_engine *e, const mt_op *op) {
    int64_t n = 0;
    for (int w = 0; w < 3 && op->w[w] >= 0; w++) n += e->weights[op->w[w]].n_tiles;
    return (int)n;
}

static work linear_work(const mt_engine *e, const mt_op *op) {
    return work_of(e, stacked_tiles(e, op), rows_of(e, op), n_planes(op));
}

static int count_linear(const mt_engine *e, const mt_op *op) {
    const work w = linear_work(e, op);
    return w.chunks * items_of_chunk(&w);
}

static void run_linear(mt_engine *e, const mt_op *op, int item, mt_scratch *s) {
    const work work = linear_work(e, op);
    int first, stop;
    const row_chunk c = chunk_of(op, &work, item, rows_of(e, op), &first, &stop);
    for (int i = first; i < stop; i++) {
        int64_t tile = i, col = op->i[0];
        int at = 0;
        for (; tile >= e->weights[op->w[at]].n_tiles; at++) {
            tile -= e->weights[op->w[at]].n_tiles;
            col += e->weights[op->w[at]].rows;
        }
        const mt_weight *w = &e->weights[op->w[at]];
        multiply_tile(e, w, tile, &c, s, s->acc);
        emit_tile(e, w, op->w[3 + at], tile, &c, s->acc, op->flags & MT_FLAG_ACCUMULATE,
                  (size_t)e->buffers[op->out].width,
                  mt_row_f32(e, op->out, c.first) + col + tile * MT_TILE_ROWS);
    }
}

const mt_phase mt_linear_phase = {count_linear, run_linear};

/* -- linear_glu: activation(gate) * up, tile by tile ------------------------------------------- */

static work glu_work(const mt_engine *e, const mt_op *op) {
    return work_of(e, (int)e->weights[op->w[0]].n_tiles, rows_of(e, op), 2 * n_planes(op));
}

static int count_linear_glu(const mt_engine *e, const mt_op *op) {
    const work w = glu_work(e, op);
    return w.chunks * items_of_chunk(&w);
}

static void run_glu_tile(mt_engine *e, const mt_op *op, int tile, row_chunk c, mt_scratch *s) {
    const mt_weight *gate = &e->weights[op->w[0]], *up = &e->weights[op->w[1]];
    float *gates = s->acc, *ups = s->acc + c.n * n_planes(op) * MT_TILE_ROWS;
    multiply_tile(e, gate, tile, &c, s, gates);
    multiply_tile(e, up, tile, &c, s, ups);
    if (c.rest >= 0 || op->w[2] >= 0) /* in place */
        emit_tile(e, gate, op->w[2], tile, &c, gates, 0, MT_TILE_ROWS, gates);
    if (c.rest >= 0 || op->w[3] >= 0)
        emit_tile(e, up, op->w[3], tile, &c, ups, 0, MT_TILE_ROWS, ups);
    e->kernels->glu(gates, ups, c.n * MT_TILE_ROWS, op->i[0], gates);
    if (e->buffers[op->out].kind == MT_BUF_F32) {
        const row_chunk sums = {.rest = -1, .n = c.n};
        emit_tile(e, gate, -1, tile, &sums, gates, 0, (size_t)e->buffers[op->out].width,
                  mt_row_f32(e, op->out, c.first) + (size_t)tile * MT_TILE_ROWS);
        return;
    }
    /* the 32 values of a row and tile are one block */
    mt_store_blocks(e, op, c.first, tile, gates, c.n * MT_TILE_ROWS,
                    (size_t)e->buffers[op->out].row_bytes);
}

static void run_linear_glu(mt_engine *e, const mt_op *op, int item, mt_scratch *s) {
    const work work = glu_work(e, op);
    int first, stop;
    const row_chunk c = chunk_of(op, &work, item, rows_of(e, op), &first, &stop);
    for (int tile = first; tile < stop; tile++) run_glu_tile(e, op, tile, c, s);
}

const mt_phase mt_linear_glu_phase = {count_linear_glu, run_linear_glu};
