/* Loads a plan (copies, allocates everything once) and runs steps of it.
 * Weights are weights.c, keys and states kv_pool.c, what a step computes in scratch.c. */
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

static int32_t create(mt_engine *e, const mt_plan *p, const mt_options *o, mt_weight_room room,
                      mt_bad_value *bad, char *err) {
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
    if (mt_load_weights(e, p, room, bad, err) || mt_load_kv(e, p, err) ||
        mt_load_states(e, p, err) || mt_load_scratch(e, err))
        return -1;
    return 0;
}

static mt_engine *checked_and_created(const mt_plan *plan, const mt_options *options,
                                      mt_weight_room room, mt_bad_value *bad, char *err) {
    *bad = (mt_bad_value){.tensor = -1};
    if (mt_check_plan(plan, options, err)) return NULL;
    mt_engine *e = mt_line_alloc(sizeof *e); /* its gates have cache lines of their own */
    if (!e) {
        mt_fail(err, "no memory");
        return NULL;
    }
    memset(e, 0, sizeof *e);
    if (create(e, plan, options, room, bad, err)) {
        mt_engine_free(e);
        return NULL;
    }
    return e;
}

mt_engine *mt_engine_create(const mt_plan *plan, const mt_options *options, mt_bad_value *bad,
                            char *err) {
    return checked_and_created(plan, options, (mt_weight_room){0}, bad, err);
}

mt_engine *mt_engine_create_over(const mt_plan *plan, const mt_options *options, uint8_t *memory,
                                 int64_t n_bytes, int32_t is_packed, mt_bad_value *bad, char *err) {
    const mt_weight_room room = {memory, (size_t)n_bytes, is_packed};
    return checked_and_created(plan, options, room, bad, err);
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
