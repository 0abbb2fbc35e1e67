/* Low-rank adapters: what a sequence's adapter adds to a product, out += scale * share * x a' b'.
 *
 * Rows are taken in runs of one sequence, and those whose sequence gets nothing of the adapter are
 * not touched: a request's answer has the same bits whatever adapters its neighbours use. */
#include "products.h"

enum { CHUNK = MT_FLOAT_ROWS /* rows of one item */ };

static int n_chunks(const mt_engine *e, const mt_op *op) {
    return (mt_count_rows(e, op) + CHUNK - 1) / CHUNK;
}
static int n_tiles(const mt_weight *w) { return (int)w->n_tiles; }

static int seq_of(const mt_engine *e, const mt_op *op, int row) {
    switch (e->buffers[op->out].rows) {
    case MT_ROWS_OUT: return e->row_seq[e->step->out_rows[row]];
    case MT_ROWS_HIDDEN: return e->row_seq[e->step->hidden_rows[row]];
    default: return e->row_seq[row];
    }
}
static float share_of(const mt_engine *e, const mt_op *op, int seq) {
    return e->step->adapters[(size_t)seq * (size_t)e->plan.n_adapters + (size_t)op->i[1]];
}
static int is_used(const mt_engine *e, const mt_op *op) {
    for (int seq = 0; seq < e->step->n_seqs; seq++)
        if (share_of(e, op, seq) != 0.0f) return 1;
    return 0;
}

/* From row *first of a chunk on, the next run of rows [*first, *stop) of one sequence that gets
 * something of the adapter; returns how much, or 0 where none is left before `end`. */
static float next_run(const mt_engine *e, const mt_op *op, int end, int *first, int *stop) {
    for (; *first < end; *first = *stop) {
        const int seq = seq_of(e, op, *first);
        for (*stop = *first + 1; *stop < end && seq_of(e, op, *stop) == seq;) ++*stop;
        const float share = share_of(e, op, seq);
        if (share != 0.0f) return share;
    }
    return 0.0f;
}

/* acc = a tile of the weight times n rows of a buffer from `first` on. */
static void multiply(mt_engine *e, int32_t weight, int tile, int32_t buffer, int first, int n,
                     mt_scratch *s) {
    const mt_operand rows = {.x = mt_row(e, buffer, first),
                             .stride = (size_t)e->buffers[buffer].row_bytes,
                             .kind = MT_BUF_F32,
                             .n = n};
    mt_multiply_tile(e, &e->weights[weight], tile, &rows, s, s->acc);
}

/* How many of a tile's rows are there. */
static int width_of(const mt_weight *w, int tile) {
    const int64_t left = w->rows - (int64_t)tile * MT_TILE_ROWS;
    return left < MT_TILE_ROWS ? (int)left : MT_TILE_ROWS;
}

static int count_down(const mt_engine *e, const mt_op *op) {
    return is_used(e, op) ? n_chunks(e, op) * n_tiles(&e->weights[op->w[0]]) : 0;
}

static void run_down(mt_engine *e, const mt_op *op, int item, mt_scratch *s) {
    const mt_weight *a = &e->weights[op->w[0]];
    const int tile = item % n_tiles(a), width = width_of(a, tile), n_rows = mt_count_rows(e, op);
    int first = item / n_tiles(a) * CHUNK, stop = first;
    const int end = first + CHUNK < n_rows ? first + CHUNK : n_rows;
    for (float share; (share = next_run(e, op, end, &first, &stop)) != 0.0f; first = stop) {
        multiply(e, op->w[0], tile, op->in[0], first, stop - first, s);
        for (int r = first; r < stop; r++) {
            float *low = mt_row_f32(e, op->in[1], r) + tile * MT_TILE_ROWS;
            for (int i = 0; i < width; i++)
                low[i] = op->f[0] * share * s->acc[(r - first) * MT_TILE_ROWS + i];
        }
    }
}

static int count_up(const mt_engine *e, const mt_op *op) {
    return is_used(e, op) ? n_chunks(e, op) * n_tiles(&e->weights[op->w[1]]) : 0;
}

static void run_up(mt_engine *e, const mt_op *op, int item, mt_scratch *s) {
    const mt_weight *b = &e->weights[op->w[1]];
    const int tile = item % n_tiles(b), n_rows = mt_count_rows(e, op);
    const size_t width = (size_t)e->buffers[op->out].width;
    int first = item / n_tiles(b) * CHUNK, stop = first;
    const int end = first + CHUNK < n_rows ? first + CHUNK : n_rows;
    for (; next_run(e, op, end, &first, &stop) != 0.0f; first = stop) {
        multiply(e, op->w[1], tile, op->in[1], first, stop - first, s);
        float *out = mt_row_f32(e, op->out, first) + op->i[0] + tile * MT_TILE_ROWS;
        mt_emit_tile(e, NULL, width_of(b, tile), stop - first, 1, s->acc, 1, width, out);
    }
}

const mt_phase mt_adapt_phases[MT_PHASES] = {{count_down, run_down}, {count_up, run_up}};
