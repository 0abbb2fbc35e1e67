/* Loads a plan (copies, allocates everything once; weights are weights.c) and runs steps of it. */
#include "engine.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "memory.h"

int32_t mt_abi_version(void) { return MT_ABI_VERSION; }

int64_t mt_sizeof(int32_t which) {
    static const size_t sizes[] = {sizeof(mt_op),         sizeof(mt_buffer), sizeof(mt_tensor),
                                   sizeof(mt_kv_layer),   sizeof(mt_plan),   sizeof(mt_options),
                                   sizeof(mt_step),       sizeof(mt_info),   sizeof(mt_bad_value),
                                   sizeof(mt_draw_terms), sizeof(mt_op_span)};
    return which >= 0 && which < 11 ? (int64_t)sizes[which] : -1;
}

static void *copied(const void *from, size_t n, size_t size) {
    void *to = malloc(n * size + 1); /* never zero bytes */
    return to && n ? memcpy(to, from, n * size) : to;
}

/* A slot holds all layers' parts, each from a cache line on, so that one copy moves a state. Rows
 * that may be taken back lie elsewhere: snapshots have none, and their pages are never touched. */
static int32_t load_states(mt_engine *e, const mt_plan *p, char *err) {
    for (int32_t i = 0; i < p->n_states; i++) {
        e->state_offsets[i] = e->state_width;
        e->state_width += mt_aligned((size_t)p->states[i] * sizeof(float)) / sizeof(float);
        const size_t n_inputs = (size_t)e->n_guesses * (size_t)p->inputs[i];
        e->guess_offsets[i] = e->guess_width;
        e->guess_width += mt_aligned(n_inputs * sizeof(float)) / sizeof(float);
    }
    e->state_bytes = e->state_width * (size_t)e->n_states * sizeof(float);
    e->guess_bytes = e->guess_width * (size_t)e->n_states * sizeof(float);
    if (!e->state_bytes) return 0;
    e->state_memory = (float *)(void *)mt_big_alloc(e->state_bytes);
    e->guess_memory = (float *)(void *)mt_big_alloc(e->guess_bytes);
    if (e->state_memory && e->guess_memory) return 0;
    return mt_fail(err, "no memory for %zu bytes of states: run fewer sequences",
                   e->state_bytes + e->guess_bytes);
}

/* -- KV pool, arena, scratch ------------------------------------------------------------------- */

/* Bytes between the regions of two layers. Where all of them are whole huge pages, every layer
   would enter a new one at the same block, and one step would clear them all (30 of 2 MB: 240 ms).
   This far apart they take turns. A pool of a few pages is left dense. */
static size_t kv_stagger(const mt_engine *e, int32_t n_layers) {
    enum { HUGE_PAGE = 2 << 20, FEW_PAGES = 4 };
    const size_t region = e->kv_bytes / (size_t)n_layers;
    return region < FEW_PAGES * HUGE_PAGE ? 0 : mt_aligned(HUGE_PAGE / (size_t)n_layers);
}

static int32_t load_kv(mt_engine *e, const mt_plan *p, char *err) {
    const size_t width = mt_kv_width(e->kv_type), tokens = (size_t)e->block_tokens;
    const size_t scale = e->kv_type == MT_KV_Q8_0 ? 2 : 0;
    for (int32_t i = 0; i < p->n_kv_layers; i++) {
        mt_kv_region *r = &e->kv[i];
        r->shape = p->kv_layers[i];
        r->v_stride = (r->shape.value_dim + 15) / 16 * 16;
        r->v_offset_bytes = tokens * (size_t)r->shape.head_dim * width;
        const size_t v_plane = r->shape.is_latent ? 0 : (size_t)r->v_stride;
        const size_t v_scales = r->shape.is_latent ? 0 : (size_t)mt_kv_scales(r->shape.value_dim);
        r->k_scales_bytes = r->v_offset_bytes + tokens * v_plane * width;
        r->v_scales_bytes =
            r->k_scales_bytes + tokens * (size_t)mt_kv_scales(r->shape.head_dim) * scale;
        r->head_bytes = mt_aligned(r->v_scales_bytes + tokens * v_scales * scale);
        r->block_bytes = r->head_bytes * (size_t)r->shape.kv_heads;
        r->offset = e->kv_bytes;
        if (r->shape.is_windowed) e->window = 1; /* raised to what attention sees in them */
        e->kv_bytes +=
            r->block_bytes * (size_t)(r->shape.is_windowed ? e->n_window_blocks : e->n_blocks);
        if (r->v_stride > e->max_v_stride) e->max_v_stride = r->v_stride;
    }
    const size_t apart = p->n_kv_layers ? kv_stagger(e, p->n_kv_layers) : 0;
    for (int32_t i = 0; i < p->n_kv_layers; i++) e->kv[i].offset += apart * (size_t)i;
    e->kv_bytes += apart * (size_t)p->n_kv_layers;
    e->kv_memory = mt_big_alloc(e->kv_bytes);
    return e->kv_memory ? 0
                        : mt_fail(err, "no memory for %zu bytes of KV cache: use a smaller context",
                                  e->kv_bytes);
}

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

static int32_t load_scratch(mt_engine *e, char *err) {
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

static int32_t create(mt_engine *e, const mt_plan *p, const mt_options *o, mt_bad_value *bad,
                      char *err) {
    e->plan = *p;
    e->block_tokens = o->block_tokens;
    e->n_blocks = o->n_blocks;
    e->n_window_blocks = o->n_window_blocks;
    e->n_states = p->n_states ? o->n_states : 0;
    e->n_guesses = o->n_guesses;
    e->kv_type = o->kv_type;
    e->n_threads = o->n_threads;
    e->isa = o->isa < 0 ? mt_isa_best() : o->isa;
    e->kernels = mt_isa_kernels(e->isa);
    if (!e->kernels)
        return mt_fail(err, "there is no ISA %d, only 0 to %d", e->isa, mt_n_isas() - 1);
    if (!mt_isa_supported(e->isa))
        return mt_fail(err, "this machine cannot run kernels for %s; its best is %s",
                       mt_isa_name(e->isa), mt_isa_name(mt_isa_best()));
    e->ops = copied(p->ops, (size_t)p->n_ops, sizeof *p->ops);
    e->buffers = copied(p->buffers, (size_t)p->n_buffers, sizeof *p->buffers);
    e->weights = calloc((size_t)p->n_tensors, sizeof *e->weights);
    e->kv = calloc((size_t)p->n_kv_layers + 1, sizeof *e->kv);
    e->state_offsets = calloc((size_t)p->n_states + 1, sizeof *e->state_offsets);
    e->guess_offsets = calloc((size_t)p->n_states + 1, sizeof *e->guess_offsets);
    e->scratch = calloc((size_t)o->n_threads, sizeof *e->scratch);
    mt_gate_init(&e->phases_done);
    e->pool = mt_pool_create(o->n_threads);
    if (!e->ops || !e->buffers || !e->weights || !e->kv || !e->state_offsets || !e->guess_offsets ||
        !e->scratch || !e->pool)
        return mt_fail(err, "no memory for a plan of %d ops on %d threads", p->n_ops, o->n_threads);
    for (int32_t i = 0; i < p->n_buffers; i++) e->has_logits |= p->buffers[i].is_logits;
    e->plan.ops = e->ops;
    e->plan.buffers = e->buffers;
    e->plan.tensors = NULL;
    e->plan.kv_layers = NULL;
    e->plan.states = NULL;
    e->plan.inputs = NULL;
    if (mt_load_weights(e, p, bad, err) || load_kv(e, p, err) || load_states(e, p, err) ||
        load_scratch(e, err))
        return -1;
    return 0;
}

mt_engine *mt_engine_create(const mt_plan *plan, const mt_options *options, mt_bad_value *bad,
                            char *err) {
    *bad = (mt_bad_value){.tensor = -1};
    if (mt_check_plan(plan, options, err)) return NULL;
    mt_engine *e = mt_line_alloc(sizeof *e); /* its gates have cache lines of their own */
    if (!e) {
        mt_fail(err, "no memory");
        return NULL;
    }
    memset(e, 0, sizeof *e);
    if (create(e, plan, options, bad, err)) {
        mt_engine_free(e);
        return NULL;
    }
    return e;
}

void mt_engine_free(mt_engine *e) {
    if (!e) return;
    mt_pool_free(e->pool);
    mt_gate_destroy(&e->phases_done);
    mt_free_weights(e);
    mt_big_free(e->kv_memory, e->kv_bytes);
    mt_big_free((uint8_t *)(void *)e->state_memory, e->state_bytes);
    free(e->state_offsets);
    mt_big_free((uint8_t *)(void *)e->guess_memory, e->guess_bytes);
    free(e->guess_offsets);
    mt_big_free(e->arena, e->arena_bytes);
    mt_big_free(e->scratch_memory, e->scratch_bytes);
    free(e->ops);
    free(e->buffers);
    free(e->weights);
    free(e->kv);
    free(e->scratch);
    free(e->slowed);
    mt_line_free(e);
}

void mt_engine_info(const mt_engine *e, mt_info *info) {
    *info = (mt_info){.weight_bytes = (int64_t)e->weight_bytes,
                      .late_bytes = (int64_t)e->late_bytes,
                      .kv_bytes = (int64_t)e->kv_bytes,
                      .state_bytes = (int64_t)e->state_bytes,
                      .guess_bytes = (int64_t)e->guess_bytes,
                      .arena_bytes = (int64_t)(e->arena_bytes + e->scratch_bytes),
                      .n_threads = e->n_threads,
                      .isa = e->isa};
}

void mt_engine_trace(mt_engine *e, mt_op_span *spans) { e->spans = spans; }

int32_t mt_engine_slow_down(mt_engine *e, int32_t thread, double times, char *err) {
    if (thread < 0 || thread >= e->n_threads || !(times >= 0 && times <= 1000))
        return mt_fail(err, "cannot slow thread %d of %d down by %g times: use 0 to 1000", thread,
                       e->n_threads, times);
    if (!e->slowed) e->slowed = calloc((size_t)e->n_threads, sizeof *e->slowed);
    if (!e->slowed) return mt_fail(err, "no memory for %d numbers", e->n_threads);
    e->slowed[thread] = times;
    return 0;
}

/* Part of a block in one layer, within the pool. */
static uint8_t *block_part(const mt_engine *e, int32_t layer, mt_block block) {
    const mt_kv_region *r = &e->kv[layer];
    const int32_t id = r->shape.is_windowed ? block.window_id : block.id;
    return e->kv_memory + r->offset + (size_t)id * r->block_bytes;
}

static int has_block(const mt_engine *e, mt_block block) {
    const int in_window = block.window_id >= 0 && block.window_id < e->n_window_blocks;
    return block.id >= 0 && block.id < e->n_blocks && (in_window || !e->window);
}

static int32_t check_block(const mt_engine *e, const char *verb, mt_block block, char *err) {
    if (has_block(e, block)) return 0;
    return mt_fail(err, "cannot %s block %d (windowed: %d), the pool has %d (%d)", verb, block.id,
                   block.window_id, e->n_blocks, e->n_window_blocks);
}

int32_t mt_engine_copy_block(mt_engine *e, mt_block src, mt_block dst, char *err) {
    if (!has_block(e, src) || !has_block(e, dst))
        return mt_fail(err, "cannot copy block %d to %d (windowed: %d to %d), the pool has %d (%d)",
                       src.id, dst.id, src.window_id, dst.window_id, e->n_blocks,
                       e->n_window_blocks);
    for (int32_t i = 0; i < e->plan.n_kv_layers; i++)
        memmove(block_part(e, i, dst), block_part(e, i, src), e->kv[i].block_bytes);
    return 0;
}

int32_t mt_engine_copy_state(mt_engine *e, int32_t src, int32_t dst, char *err) {
    if (src < 0 || src >= e->n_states || dst < 0 || dst >= e->n_states)
        return mt_fail(err, "cannot copy state %d to %d, there are %d", src, dst, e->n_states);
    memmove(e->state_memory + (size_t)dst * e->state_width,
            e->state_memory + (size_t)src * e->state_width, e->state_width * sizeof(float));
    return 0;
}

int64_t mt_engine_block_bytes(const mt_engine *e) {
    size_t n_bytes = 0;
    for (int32_t i = 0; i < e->plan.n_kv_layers; i++) n_bytes += e->kv[i].block_bytes;
    return (int64_t)n_bytes;
}

int32_t mt_engine_read_block(const mt_engine *e, mt_block block, uint8_t *out, char *err) {
    if (check_block(e, "read", block, err)) return -1;
    for (int32_t i = 0; i < e->plan.n_kv_layers; out += e->kv[i++].block_bytes)
        memcpy(out, block_part(e, i, block), e->kv[i].block_bytes);
    return 0;
}

int32_t mt_engine_write_block(mt_engine *e, mt_block block, const uint8_t *in, char *err) {
    if (check_block(e, "write", block, err)) return -1;
    for (int32_t i = 0; i < e->plan.n_kv_layers; in += e->kv[i++].block_bytes)
        memcpy(block_part(e, i, block), in, e->kv[i].block_bytes);
    return 0;
}

/* -- one step ---------------------------------------------------------------------------------- */

/* Rows of one attention item: the more, the fewer times keys and values are made floats; but enough
 * items that no thread waits long for another. */
static int32_t tile_rows(const mt_engine *e, const mt_step *step) {
    const int32_t most = MT_ATTN_MAX_ROWS / e->max_group, least = MT_TILE_VECTORS / e->max_group;
    const int32_t fair = (int32_t)((int64_t)step->n_rows * e->min_kv_heads / (6 * e->n_threads));
    const int32_t rows = fair > most ? most : fair < least ? least : fair;
    return rows > 1 ? rows : 1;
}

/* Whoever finishes early then waits for little. */
static int dearer_first(const void *a, const void *b) {
    const int64_t x = ((const mt_row_tile *)a)->cost, y = ((const mt_row_tile *)b)->cost;
    return (x < y) - (x > y);
}

static void lay_out_rows(mt_engine *e, const mt_step *step) {
    const int32_t tile = tile_rows(e, step);
    e->n_tiles = 0;
    int32_t longest = 0;
    for (int32_t r = 0; r < step->n_rows; r++)
        if (step->positions[r] >= longest) longest = step->positions[r] + 1;
    e->n_splits = (longest + MT_SPLIT - 1) / MT_SPLIT;
    for (int32_t seq = 0; seq < step->n_seqs; seq++)
        for (int32_t r = step->seq_start[seq]; r < step->seq_start[seq + 1];) {
            const int32_t left = step->seq_start[seq + 1] - r;
            const int32_t n = left < tile ? left : tile;
            const int64_t cost = (int64_t)n * (step->positions[r + n - 1] + 1);
            e->tiles[e->n_tiles++] = (mt_row_tile){seq, r, n, cost};
            for (int32_t end = r + n; r < end; r++) e->row_seq[r] = seq;
        }
    qsort(e->tiles, (size_t)e->n_tiles, sizeof *e->tiles, dearer_first);
}

int32_t mt_engine_run(mt_engine *e, const mt_step *step, char *err) {
    if (mt_check_step(e, step, err)) return -1;
    e->step = step;
    lay_out_rows(e, step);
    e->first_phase = atomic_load(&e->phases_done.value);
    atomic_store(&e->n_bad, 0);
    mt_settle_shares(e);
    mt_pool_run(e->pool, mt_walk, e);
    if (atomic_load(&e->n_bad)) {
        e->step = NULL;
        return mt_fail(err, "tensor %d is not finite at row %lld, column %lld", e->bad.tensor,
                       (long long)e->bad.row, (long long)e->bad.col);
    }
    const size_t width = step->n_hidden ? (size_t)e->buffers[e->plan.hidden].width : 0;
    for (int32_t i = 0; i < step->n_hidden; i++)
        memcpy(step->hidden + (size_t)i * width, mt_row(e, e->plan.hidden, i),
               width * sizeof(float));
    e->step = NULL;
    return 0;
}

void mt_engine_bad(const mt_engine *e, mt_bad_value *bad) {
    *bad = atomic_load(&e->n_bad) ? e->bad : (mt_bad_value){.tensor = -1};
}

int32_t mt_engine_read_rows(const mt_engine *e, int32_t buffer, int32_t n_rows, float *out,
                            char *err) {
    if (buffer < 0 || buffer >= e->plan.n_buffers)
        return mt_fail(err, "there is no buffer %d, the plan has %d", buffer, e->plan.n_buffers);
    const mt_buffer *b = &e->buffers[buffer];
    if (b->kind != MT_BUF_F32 || b->is_logits)
        return mt_fail(err, "buffer %d holds no floats of the arena", buffer);
    if (n_rows < 0 || n_rows > e->plan.max_rows * b->per_row)
        return mt_fail(err, "cannot read %d rows, the buffer has %d", n_rows,
                       e->plan.max_rows * b->per_row);
    const size_t width = (size_t)b->width;
    for (int32_t i = 0; i < n_rows; i++)
        memcpy(out + (size_t)i * width, mt_row(e, buffer, i), width * sizeof(float));
    return 0;
}
