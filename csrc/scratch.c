/* The memory that a step computes in: the arena, scratch of each thread, and what threads share.
 * All of it is sized by the plan and allocated once. */
#include "engine.h"
#include "memory.h"

/* Room for as many rows as an expert takes at a time, in all planes. */
static size_t gathered_bytes(const mt_engine *e) {
    size_t most = 0;
    for (int32_t i = 0; i < e->plan.n_ops; i++) {
        const mt_op *op = &e->ops[i];
        if (op->kind != MT_OP_EXPERT_GLU) continue;
        /* one plane has twice as many rows: see MT_COL_CHUNK in ops_experts.c */
        const int fits = MT_COL_CHUNK / 2, rows = e->plan.max_rows < fits ? e->plan.max_rows : fits;
        const size_t n = (size_t)rows * (size_t)e->buffers[op->in[0]].row_bytes;
        if (n > most) most = n;
    }
    return 2 * most;
}

/* One tile of every row at least. */
static size_t sums_bytes(const mt_engine *e) {
    const size_t n = (size_t)e->plan.max_rows * MT_TILE_ROWS;
    for (int32_t i = 0; i < e->plan.n_ops; i++)
        if (e->ops[i].kind == MT_OP_EXPERT_SUM)
            return (n > MT_SUM_VALUES ? n : MT_SUM_VALUES) * sizeof(float);
    return 0;
}

/* Sizes, and with a base places, of the tables of mt_pairs. */
static size_t pairs_layout(mt_engine *e, uint8_t *base) {
    int32_t n_experts = 0, used = 0;
    for (int32_t i = 0; i < e->plan.n_ops; i++) {
        const mt_op *op = &e->ops[i];
        if (op->kind != MT_OP_EXPERT_GLU && op->kind != MT_OP_EXPERT_SUM) continue;
        if (op->i[0] > n_experts) n_experts = op->i[0];
        if (op->i[1] > used) used = op->i[1];
    }
    const size_t n_pairs = (size_t)e->plan.max_rows * (size_t)used;
    const size_t of_experts = mt_aligned(((size_t)n_experts + 1) * sizeof(int32_t));
    const size_t of_pairs = mt_aligned(n_pairs * sizeof(int32_t));
    if (base)
        e->pairs = (mt_pairs){.start = (int32_t *)(void *)base,
                              .active = (int32_t *)(void *)(base + of_experts),
                              .row = (int32_t *)(void *)(base + 2 * of_experts),
                              .weight = (float *)(void *)(base + 2 * of_experts + of_pairs)};
    return 2 * (of_experts + of_pairs);
}

/* Of the widest matrix that stays in the file. */
static size_t file_tile_bytes(const mt_engine *e) {
    size_t most = 0;
    for (int32_t i = 0; i < e->plan.n_tensors; i++) {
        const mt_weight *w = &e->weights[i];
        const size_t n = w->stored.data ? mt_tile_bytes(w->layout, w->cols) : 0;
        if (n > most) most = n;
    }
    return most;
}

static size_t scratch_layout(mt_engine *e, mt_scratch *s, uint8_t *base) {
    size_t widest = MT_GLU_CHUNK, head_dim = 16, keys = MT_K_FLOATS, at = 0;
    for (int32_t i = 0; i < e->plan.n_buffers; i++)
        if (e->buffers[i].width > (int32_t)widest) widest = (size_t)e->buffers[i].width;
    for (int32_t i = 0; i < e->plan.n_ops; i++) {
        const mt_op *op = &e->ops[i];
        const int32_t of_state = op->kind == MT_OP_DELTA  ? op->i[2]
                                 : op->kind == MT_OP_SCAN ? op->i[3]
                                                          : 0;
        if (of_state > (int32_t)keys) keys = (size_t)of_state;
    }
    for (int32_t i = 0; i < e->plan.n_kv_layers; i++) {
        if ((size_t)e->kv[i].shape.head_dim > head_dim) head_dim = (size_t)e->kv[i].shape.head_dim;
        if ((size_t)e->max_v_stride > widest) widest = (size_t)e->max_v_stride;
    }
    const size_t per_row = (size_t)MT_ATTN_MAX_ROWS * (size_t)e->max_v_stride * sizeof(float);
    struct {
        void **slot;
        size_t n_bytes;
    } parts[] = {{(void **)&s->unpacked.buffer, MT_K_BLOCKS * 1024},
                 {(void **)&s->wide, keys * MT_TILE_ROWS * sizeof(float)},
                 {(void **)&s->unpacked.scales, MT_K_BLOCKS * 64 * MT_SCALE_COPIES * sizeof(float)},
                 {(void **)&s->unpacked.mins, MT_K_BLOCKS * 64 * MT_SCALE_COPIES * sizeof(float)},
                 {(void **)&s->acc, MT_COL_CHUNK * MT_TILE_ROWS * sizeof(float)},
                 {(void **)&s->rows, MT_FLOAT_ROWS * MT_K_FLOATS * sizeof(float)},
                 {(void **)&s->row, widest * sizeof(float)},
                 {(void **)&s->tile, file_tile_bytes(e)},
                 {(void **)&s->gathered, gathered_bytes(e)},
                 {(void **)&s->sums, sums_bytes(e)},
                 {(void **)&s->attn, MT_ATTN_SCRATCH * sizeof(float)},
                 {(void **)&s->q, MT_ATTN_MAX_ROWS * head_dim * sizeof(float)},
                 {(void **)&s->part, per_row},
                 {(void **)&s->total, per_row}};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        const size_t start = mt_place(base, &at, parts[i].n_bytes);
        *parts[i].slot = base ? base + start : NULL;
    }
    return at;
}

static void attention_shape(mt_engine *e) {
    e->max_group = 1;
    e->min_kv_heads = INT32_MAX;
    for (int32_t i = 0; i < e->plan.n_ops; i++) {
        const mt_op *op = &e->ops[i];
        if (op->kind != MT_OP_ATTENTION) continue;
        if (op->i[0] > e->max_heads) e->max_heads = op->i[0];
        const int32_t group = op->i[0] / op->i[1];
        if (group > e->max_group) e->max_group = group;
        if (e->max_group > MT_ATTN_MAX_ROWS) e->max_group = MT_ATTN_MAX_ROWS;
        if (op->i[1] < e->min_kv_heads) e->min_kv_heads = op->i[1];
        if (e->kv[op->i[4]].shape.is_windowed && op->i[5] > e->window) e->window = op->i[5];
    }
    e->max_splits = (int32_t)(((int64_t)e->n_blocks * e->block_tokens + MT_SPLIT - 1) / MT_SPLIT);
    e->split_rows = e->plan.max_rows < MT_SPLIT_ROWS ? e->plan.max_rows : MT_SPLIT_ROWS;
}

/* What threads share, behind the scratch of each; with a base, places of it too. */
static size_t shared_layout(mt_engine *e, uint8_t *base, size_t at) {
    const size_t rows = (size_t)e->plan.max_rows;
    const size_t partials = (size_t)e->split_rows * (size_t)e->max_heads * (size_t)e->max_splits *
                            (size_t)(e->max_v_stride + 2) * sizeof(float);
    struct {
        void **slot;
        size_t n_bytes;
    } parts[] = {{(void **)&e->partials, partials},
                 {(void **)&e->shares, (size_t)e->n_threads * sizeof *e->shares},
                 {(void **)&e->row_seq, rows * sizeof *e->row_seq},
                 {(void **)&e->tiles, rows * sizeof *e->tiles}};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        const size_t start = mt_place(base, &at, parts[i].n_bytes);
        if (base) *parts[i].slot = base + start;
    }
    const size_t pairs = mt_place(base, &at, pairs_layout(e, NULL));
    if (base) pairs_layout(e, base + pairs);
    return at;
}

int32_t mt_load_scratch(mt_engine *e, char *err) {
    attention_shape(e);
    mt_scratch none;
    const size_t n = (size_t)e->n_threads, per_thread = scratch_layout(e, &none, NULL);
    e->arena_bytes = mt_aligned((size_t)e->plan.arena_bytes);
    e->scratch_bytes = shared_layout(e, NULL, per_thread * n);
    e->arena = mt_big_alloc(e->arena_bytes);
    uint8_t *at = e->scratch_memory = mt_big_alloc(e->scratch_bytes);
    if (!e->arena || !at)
        return mt_fail(err, "no memory for %zu bytes of activations",
                       e->arena_bytes + e->scratch_bytes);
    for (size_t t = 0; t < n; t++, at += per_thread) scratch_layout(e, &e->scratch[t], at);
    shared_layout(e, e->scratch_memory, per_thread * n);
    return 0;
}
