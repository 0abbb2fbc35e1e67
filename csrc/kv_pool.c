/* What sequences keep from step to step: blocks of keys and values, states of recurrent layers.
 * Owns where they lie, and copies of them; which of them is whose is the caller's affair. */
#include <string.h>

#include "engine.h"
#include "memory.h"

/* Bytes between the regions of two layers. Where all of them are whole huge pages, every layer
   would enter a new one at the same block, and one step would clear them all (30 of 2 MB: 240 ms).
   This far apart they take turns. A pool of a few pages is left dense. */
static size_t kv_stagger(const mt_engine *e, int32_t n_layers) {
    enum { HUGE_PAGE = 2 << 20, FEW_PAGES = 4 };
    const size_t region = e->kv_bytes / (size_t)n_layers;
    return region < FEW_PAGES * HUGE_PAGE ? 0 : mt_aligned(HUGE_PAGE / (size_t)n_layers);
}

int32_t mt_load_kv(mt_engine *e, const mt_plan *p, char *err) {
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

/* A slot holds all layers' parts, each from a cache line on, so that one copy moves a state. Rows
 * that may be taken back lie elsewhere: snapshots have none, and their pages are never touched. */
int32_t mt_load_states(mt_engine *e, const mt_plan *p, char *err) {
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
