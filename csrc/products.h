/* Products of one tile of 32 weight rows with rows of activations: what ops_linear.c and
 * ops_experts.c share. Must not know which rows an op takes, or where its results go. */
#ifndef MT_PRODUCTS_H
#define MT_PRODUCTS_H

#include "engine.h"

/* Activation rows, `stride` bytes apart. */
typedef struct mt_operand {
    const uint8_t *x, *rest; /* rest: the second plane, or NULL */
    size_t stride;
    int32_t kind; /* mt_buffer_kind */
    int n;
} mt_operand;

static inline int mt_planes(const mt_op *op) { return op->in[1] >= 0 ? 2 : 1; }

/* Work items of an op, chunk by chunk: `runs` runs of `run` tiles, then single tiles. Where all rows
 * are one chunk, three quarters of the tiles go out in runs, in which a thread reads on where it
 * stopped; the rest go one by one, so that the threads end together. */
typedef struct mt_work {
    int chunks, n_tiles, run, runs;
} mt_work;

static inline int mt_items_of_chunk(const mt_work *w) {
    return w->runs + w->n_tiles - w->runs * w->run;
}
/* The tiles [first, stop) of item i of a chunk. */
static inline void mt_tiles_of(const mt_work *w, int i, int *first, int *stop) {
    *first = i < w->runs ? i * w->run : w->runs * w->run + i - w->runs;
    *stop = *first + (i < w->runs ? w->run : 1);
}
void mt_set_runs(const mt_engine *e, mt_work *w);

/* acc[n][32] = tile * rows, and behind that the same of the rest. */
void mt_multiply_tile(mt_engine *e, const mt_weight *w, int64_t tile, const mt_operand *x,
                      mt_scratch *s, float *acc);
/* out (+)= the sums that mt_multiply_tile left in acc, `planes` of n rows each, and 32 values of a
 * bias, or NULL; of each row the first `width`. In place where out is acc. */
void mt_emit_tile(mt_engine *e, const float *bias, int width, int n, int planes, const float *acc,
                  int accumulate, size_t stride, float *out);
/* Gates and ups as mt_multiply_tile leaves them: activation(gate + bias) * (up + bias) becomes
 * columns [32 * tile, 32 * tile + width) of n rows of the op's output, from row `first` on. */
void mt_glu_tile(mt_engine *e, const mt_op *op, int activation, const float *const bias[2],
                 int width, int first, int n, int64_t tile, float *gates, float *ups);

#endif
