/* Attention over the paged pool: one work item is a run of rows of one sequence times one kv head,
 * or a part of its query heads where they are many, and, while rows are few, one split of its
 * positions.
 *
 * Both ways compute the same splits and fold them in the same ascending order, so how the work was
 * cut never shows in the result. */
#include <math.h>
#include <string.h>

#include "engine.h"

typedef struct {
    mt_kv_view kv;
    mt_attn_rows rows;
    mt_row_tile tile;
    int32_t low, high; /* positions that any of the rows sees */
    int head, group;   /* the item's query heads: the first, and how many */
} item_view;

/* Parts that the query heads of a kv head are cut into, so that an item can take one. */
static int least_parts(const mt_op *op) {
    return (op->i[0] / op->i[1] + MT_ATTN_MAX_ROWS - 1) / MT_ATTN_MAX_ROWS;
}

/* Few rows over a long context: splits are work items of their own, folded in a second phase. */
static int is_split(const mt_engine *e, const mt_op *op) {
    return e->n_splits > 1 && e->step->n_rows <= e->split_rows &&
           e->n_tiles * op->i[1] * least_parts(op) < 8 * e->n_threads;
}

/* More parts where threads would have nothing to do. */
static int head_parts(const mt_engine *e, const mt_op *op) {
    const int group = op->i[0] / op->i[1];
    const int n = e->n_tiles * op->i[1] * (is_split(e, op) ? e->n_splits : 1);
    int parts = least_parts(op);
    while (n * parts < e->n_threads && group >= 2 * parts * MT_PART_HEADS) parts *= 2;
    return parts;
}

/* Without splits. */
static int count_items(const mt_engine *e, const mt_op *op) {
    return e->n_tiles * op->i[1] * head_parts(e, op);
}

static void view_item(const mt_engine *e, const mt_op *op, int item, float *q, item_view *v) {
    const int kv_heads = op->i[1], all = op->i[0] / kv_heads;
    const int window = op->i[5], both_ways = op->i[6];
    const int parts = head_parts(e, op), part = item % parts, kv_head = item / parts % kv_heads;
    const mt_kv_region *region = &e->kv[op->i[4]];
    const size_t dim = (size_t)region->shape.head_dim;
    const mt_row_tile tile = v->tile = e->tiles[item / parts / kv_heads];
    v->head = kv_head * all + all * part / parts;
    v->group = all * (part + 1) / parts - all * part / parts;
    v->kv = (mt_kv_view){
        .base = e->kv_memory + region->offset + (size_t)kv_head * region->head_bytes,
        .block_bytes = region->block_bytes,
        .head_bytes = region->head_bytes,
        .v_offset_bytes = region->v_offset_bytes,
        .k_scales_bytes = region->k_scales_bytes,
        .v_scales_bytes = region->v_scales_bytes,
        .block_tokens = e->block_tokens,
        .head_dim = region->shape.head_dim,
        .value_dim = region->shape.value_dim,
        .v_stride = region->v_stride,
        .type = e->kv_type,
        .is_latent = region->shape.is_latent,
        .blocks = mt_blocks_of(e, region, tile.seq),
    };
    v->rows.n = tile.n * v->group;
    v->rows.scale = op->f[0];
    v->rows.cap = op->f[1];
    v->rows.q = q;
    const int32_t length = e->step->positions[e->step->seq_start[tile.seq + 1] - 1] + 1;
    v->low = INT32_MAX;
    v->high = 0;
    for (int r = 0; r < v->rows.n; r++) {
        const int row = tile.first + r / v->group, head = v->head + r % v->group;
        const int32_t position = e->step->positions[row];
        memcpy(q + (size_t)r * dim, mt_row_f32(e, op->in[0], row) + (size_t)head * dim,
               dim * sizeof(float));
        v->rows.begin[r] = window && position >= window ? position - window + 1 : 0;
        v->rows.end[r] = position + 1;
        if (both_ways)
            v->rows.end[r] = window && window < length - position ? position + window : length;
        if (v->rows.begin[r] < v->low) v->low = v->rows.begin[r];
        if (v->rows.end[r] > v->high) v->high = v->rows.end[r];
    }
}

/* Writes the heads r, r + 1, ... of one row, rounded where the plan asks for it. */
static void finish_row(mt_engine *e, const mt_op *op, const item_view *v, int r, const float *o,
                       const float *l, float *scratch) {
    const int row = v->tile.first + r / v->group, dim = v->kv.value_dim;
    const int col = v->head * dim, is_float = e->buffers[op->out].kind == MT_BUF_F32;
    float *to = is_float ? mt_row_f32(e, op->out, row) + col : scratch;
    for (int h = 0; h < v->group; h++)
        e->kernels->attend_finish(o + h * v->kv.v_stride, l[h], dim, to + h * dim);
    if (!is_float)
        mt_store_blocks(e, op, row, col / MT_BLOCK, scratch, v->group * dim, MT_BLOCK_BYTES);
}

typedef struct {
    float m[MT_ATTN_MAX_ROWS], l[MT_ATTN_MAX_ROWS];
} sums;

/* Sums of nothing, or of the sinks: a sink is a score whose value is 0. */
static void clear(const mt_engine *e, const mt_op *op, const item_view *v, sums *all,
                  float *total) {
    const float *sinks = op->w[0] >= 0 ? e->weights[op->w[0]].values : NULL;
    for (int r = 0; r < v->rows.n; r++) {
        all->m[r] = sinks ? sinks[v->head + r % v->group] : -INFINITY;
        all->l[r] = sinks ? 1.0f : 0.0f;
    }
    memset(total, 0, (size_t)v->rows.n * (size_t)v->kv.v_stride * sizeof(float));
}

static void whole_item(mt_engine *e, const mt_op *op, int item, mt_scratch *s) {
    item_view v;
    view_item(e, op, item, s->q, &v);
    const int n = v.rows.n, stride = v.kv.v_stride;
    sums part, all;
    clear(e, op, &v, &all, s->total);
    for (int32_t split = v.low / MT_SPLIT; split * MT_SPLIT < v.high; split++) {
        e->kernels->attend_split(&v.kv, &v.rows, split, part.m, part.l, s->part, s->attn);
        e->kernels->attend_merge(n, part.m, part.l, s->part, stride, all.m, all.l, s->total);
    }
    for (int r = 0; r < n; r += v.group)
        finish_row(e, op, &v, r, s->total + r * stride, all.l + r, s->row);
}

/* Partial of query vector r of an item: | o[v_stride] | m | l |. */
static float *partial(const mt_engine *e, const mt_op *op, const item_view *v, int r,
                      int32_t split) {
    const size_t row = (size_t)(v->tile.first + r / v->group);
    const size_t head = (size_t)(v->head + r % v->group);
    const size_t index = (row * (size_t)op->i[0] + head) * (size_t)e->max_splits + (size_t)split;
    return e->partials + index * (size_t)(e->max_v_stride + 2);
}

static void split_item(mt_engine *e, const mt_op *op, int item, int32_t split, mt_scratch *s) {
    item_view v;
    view_item(e, op, item, s->q, &v);
    if (split < v.low / MT_SPLIT || split * MT_SPLIT >= v.high) return;
    const int stride = v.kv.v_stride;
    float m[MT_ATTN_MAX_ROWS], l[MT_ATTN_MAX_ROWS];
    e->kernels->attend_split(&v.kv, &v.rows, split, m, l, s->part, s->attn);
    for (int r = 0; r < v.rows.n; r++) {
        float *to = partial(e, op, &v, r, split);
        for (int i = 0; i < stride; i++) to[i] = s->part[r * stride + i];
        to[e->max_v_stride] = m[r];
        to[e->max_v_stride + 1] = l[r];
    }
}

static void merge_item(mt_engine *e, const mt_op *op, int item, mt_scratch *s) {
    item_view v;
    view_item(e, op, item, s->q, &v);
    const int n = v.rows.n, stride = v.kv.v_stride;
    sums all;
    clear(e, op, &v, &all, s->total);
    for (int r = 0; r < n; r++)
        for (int32_t split = v.low / MT_SPLIT; split * MT_SPLIT < v.high; split++) {
            const float *from = partial(e, op, &v, r, split);
            e->kernels->attend_merge(1, from + e->max_v_stride, from + e->max_v_stride + 1, from,
                                     stride, all.m + r, all.l + r, s->total + r * stride);
        }
    for (int r = 0; r < n; r += v.group)
        finish_row(e, op, &v, r, s->total + r * stride, all.l + r, s->row);
}

static int count_attend(const mt_engine *e, const mt_op *op) {
    return count_items(e, op) * (is_split(e, op) ? e->n_splits : 1);
}

static void run_attend(mt_engine *e, const mt_op *op, int item, mt_scratch *s) {
    if (is_split(e, op))
        split_item(e, op, item / e->n_splits, item % e->n_splits, s);
    else
        whole_item(e, op, item, s);
}

static int count_merge(const mt_engine *e, const mt_op *op) {
    return is_split(e, op) ? count_items(e, op) : 0;
}

const mt_phase mt_attention_phases[MT_PHASES] = {{count_attend, run_attend},
                                                 {count_merge, merge_item}};
