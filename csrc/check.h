/* What check.c and check_ops.c share: the limits of plans, and how a buffer is looked up.
 *
 * The limits are far above any model. With them no product of sizes overflows: 64 bits hold the
 * bytes of the KV pool and of the scratch, 31 bits the work items of an op. */
#ifndef MARTLET_CHECK_H
#define MARTLET_CHECK_H

#include "engine.h"

enum {
    MAX_ROWS = 1 << 15,        /* of a step */
    MAX_WIDTH = 1 << 24,       /* of a buffer, and columns of a tensor */
    MAX_POOL_TOKENS = 1 << 26, /* of all KV blocks: no sequence is longer */
    MAX_BLOCK_TOKENS = 1 << 16,
    MAX_KV_HEADS = 1 << 12,
    MAX_HEADS = 1 << 16,
    MAX_HEAD_DIM = 1 << 16,     /* of keys and of values */
    MAX_TOKEN_VALUES = 1 << 30, /* keys and values of one token in all layers */
    MAX_STATE = 1 << 28,        /* floats of one sequence in all recurrent layers */
    MAX_STATES = 1 << 16,
    MAX_TAPS = 64,
    MAX_THREADS = 512
};
#define MAX_TENSOR_ROWS (INT64_C(1) << 32)

/* NULL where there is none of this kind. */
static inline const mt_buffer *buffer_of(const mt_plan *p, int32_t id, int32_t kind) {
    if (id < 0 || id >= p->n_buffers || p->buffers[id].kind != kind) return NULL;
    return &p->buffers[id];
}

static inline int64_t bytes_of(const mt_plan *p, const mt_buffer *b) {
    return b->row_bytes * p->max_rows * b->per_row;
}

/* Whether the operands of an op fit each other. */
int mt_check_op(const mt_plan *p, const mt_op *op);

#endif
