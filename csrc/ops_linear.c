/* Matrix products: one work item is a tile of 32 output rows times a chunk of activation rows. */
#include "engine.h"

typedef struct {
    const mt_weight *weight;
    const mt_weight *bias; /* or NULL */
    int64_t tile;
    int64_t out_col; /* of the tile's first row */
} tile_place;

static int64_t count_tiles(const mt_engine *e, const mt_op *op) {
    int64_t n = 0;
    for (int s = 0; s < 3; s++)
        if (op->w[s] >= 0) n += e->weights[op->w[s]].n_tiles;
    return n;
}

/* Tile `index` among the stacked weights of the op. */
static tile_place find_tile(const mt_engine *e, const mt_op *op, int64_t index) {
    tile_place place = {0};
    int64_t col = op->i[0];
    for (int s = 0; s < 3 && op->w[s] >= 0; s++) {
        const mt_weight *w = &e->weights[op->w[s]];
        if (index < w->n_tiles) {
            place.weight = w;
            place.bias = op->w[3 + s] >= 0 ? &e->weights[op->w[3 + s]] : NULL;
            place.tile = index;
            place.out_col = col + index * MT_TILE_ROWS;
            return place;
        }
        index -= w->n_tiles;
        col += w->rows;
    }
    return place;
}

static void multiply_blocks(mt_engine *e, const mt_op *op, const mt_weight *w, const uint8_t *tile,
                            int first, int n, const mt_scratch *s) {
    const mt_kernels *k = e->kernels;
    const int n_blocks = (int)(w->cols / MT_BLOCK);
    const size_t stride = (size_t)e->buffers[op->in[0]].row_bytes;
    const mt_q8_block *x = mt_row_q8(e, op->in[0], first);
    const mt_q8_block *rest = op->in[1] >= 0 ? mt_row_q8(e, op->in[1], first) : NULL;
    for (int b = 0; b < n_blocks; b += MT_K_BLOCKS) {
        const int run = n_blocks - b < MT_K_BLOCKS ? n_blocks - b : MT_K_BLOCKS;
        k->unpack(w->layout, tile, b, run, s->codes, s->scales, s->mins);
        k->mm_q8(w->layout, s->codes, s->scales, s->mins, run, x + b, stride, n, s->acc);
        if (rest)
            k->mm_q8(w->layout, s->codes, s->scales, s->mins, run, rest + b, stride, n, s->acc);
    }
}

static void multiply_floats(mt_engine *e, const mt_op *op, const mt_weight *w, const uint8_t *tile,
                            int first, int n, const mt_scratch *s) {
    const size_t stride = (size_t)e->buffers[op->in[0]].row_bytes / sizeof(float);
    const float *x = mt_row_f32(e, op->in[0], first);
    float *wide = (float *)(void *)s->codes;
    for (int64_t k = 0; k < w->cols; k += MT_K_FLOATS) {
        const int run = (int)(w->cols - k < MT_K_FLOATS ? w->cols - k : MT_K_FLOATS);
        e->kernels->unpack_float(w->format, tile, k, run, wide);
        e->kernels->mm_f32(wide, run, x + k, stride, n, s->acc);
    }
}

static void store_tile(mt_engine *e, const mt_op *op, const tile_place *p, int first, int n,
                       const float *acc) {
    const int64_t left = p->weight->rows - p->tile * MT_TILE_ROWS;
    const int rows = (int)(left < MT_TILE_ROWS ? left : MT_TILE_ROWS);
    const float *bias = p->bias ? (const float *)p->bias->values + p->tile * MT_TILE_ROWS : NULL;
    const int accumulate = op->flags & MT_FLAG_ACCUMULATE;
    for (int c = 0; c < n; c++) {
        float *out = mt_row_f32(e, op->out, first + c) + p->out_col;
        const float *from = acc + c * MT_TILE_ROWS;
        for (int i = 0; i < rows; i++) {
            const float y = bias ? from[i] + bias[i] : from[i];
            out[i] = accumulate ? out[i] + y : y;
        }
    }
}

/* Chunks of activation rows: as few as fit the accumulators, more where tiles are scarce. */
static int count_chunks(const mt_engine *e, int64_t n_tiles, int n) {
    int chunks = (n + MT_COL_CHUNK - 1) / MT_COL_CHUNK;
    while (n_tiles * chunks < 4 * e->n_threads && n / (chunks + 1) >= 24) chunks++;
    return chunks ? chunks : 1;
}

void mt_run_linear(mt_engine *e, int at, int thread) {
    const mt_op *op = &e->ops[at];
    const mt_scratch *s = &e->scratch[thread];
    const int n = mt_rows_of(e, &e->buffers[op->out]);
    const int n_tiles = (int)count_tiles(e, op), chunks = n ? count_chunks(e, n_tiles, n) : 0;
    for (int begin, end; mt_take(e, at, 0, n_tiles * chunks, &begin, &end);)
        for (int item = begin; item < end; item++) {
            const tile_place p = find_tile(e, op, item % n_tiles);
            const int chunk = item / n_tiles;
            const int first = (int)((int64_t)n * chunk / chunks);
            const int count = (int)((int64_t)n * (chunk + 1) / chunks) - first;
            const uint8_t *tile =
                p.weight->packed + (size_t)p.tile * mt_tile_bytes(p.weight->layout, p.weight->cols);
            for (int i = 0; i < count * MT_TILE_ROWS; i++) s->acc[i] = 0.0f;
            if (p.weight->layout->codes == MT_CODES_FLOAT)
                multiply_floats(e, op, p.weight, tile, first, count, s);
            else
                multiply_blocks(e, op, p.weight, tile, first, count, s);
            store_tile(e, op, &p, first, count, s->acc);
        }
}
