/* How each row-wise op splits into work items: mostly one item a row. The loops themselves are in
 * the kernel table. */
#include <math.h>
#include <string.h>

#include "engine.h"
#include "pack.h"

static void run_embed(mt_engine *e, const mt_op *op, int r, mt_scratch *s) {
    const mt_weight *w = &e->weights[op->w[0]];
    const int32_t *by = op->i[0] == MT_BY_TOKEN      ? e->step->tokens
                        : op->i[0] == MT_BY_POSITION ? e->step->positions
                                                     : e->step->segments;
    const int adds = op->flags & MT_FLAG_ACCUMULATE;
    float *out = mt_row_f32(e, op->out, r), *to = adds ? s->row : out;
    if (w->stored.data) {
        mt_tensor one = w->stored;
        one.n_bytes /= one.rows;
        one.data = (const uint8_t *)one.data + by[r] * one.n_bytes;
        one.rows = 1;
        int64_t bad_row, bad_col;
        mt_pack_tile(w->layout, &one, 0, s->tile, &bad_row, &bad_col);
        mt_unpack_row(w->layout, s->tile, w->cols, 0, to);
    } else {
        mt_unpack_row(w->layout, w->packed, w->cols, by[r], to);
    }
    for (int64_t i = 0; i < w->cols; i++) to[i] *= op->f[0];
    if (adds) e->kernels->add(to, (int)w->cols, out);
}

static void run_norm(mt_engine *e, const mt_op *op, int r, mt_scratch *s) {
    const mt_buffer *out = &e->buffers[op->out];
    const mt_weight *w = op->w[0] >= 0 ? &e->weights[op->w[0]] : NULL;
    const mt_weight *b = op->w[1] >= 0 ? &e->weights[op->w[1]] : NULL;
    const mt_norm how = {
        .weight = w ? w->values : NULL,
        .bias = b ? b->values : NULL,
        .weight_len = w ? (int)w->cols : 0,
        .bias_len = b ? (int)b->cols : 0,
        .group = op->i[0],
        .is_centered = op->i[1],
        .accumulate = op->flags & MT_FLAG_ACCUMULATE,
        .eps = op->f[0],
    };
    float *to = out->kind == MT_BUF_F32 ? mt_row_f32(e, op->out, r) : s->row;
    e->kernels->norm(mt_row_f32(e, op->in[0], r), out->width, &how, to);
    if (to == s->row) mt_store_blocks(e, op, r, 0, to, out->width, MT_BLOCK_BYTES);
}

static void run_quantize(mt_engine *e, const mt_op *op, int r, mt_scratch *s) {
    (void)s;
    mt_store_blocks(e, op, r, 0, mt_row_f32(e, op->in[0], r), e->buffers[op->out].width,
                    MT_BLOCK_BYTES);
}

static int glu_chunks(const mt_buffer *out) {
    return (out->width + MT_GLU_CHUNK - 1) / MT_GLU_CHUNK;
}

static int count_glu(const mt_engine *e, const mt_op *op) {
    return mt_count_rows(e, op) * glu_chunks(&e->buffers[op->out]);
}

static void run_glu(mt_engine *e, const mt_op *op, int item, mt_scratch *s) {
    const mt_buffer *out = &e->buffers[op->out];
    const int r = item / glu_chunks(out), first = item % glu_chunks(out) * MT_GLU_CHUNK;
    const int n = out->width - first < MT_GLU_CHUNK ? out->width - first : MT_GLU_CHUNK;
    const float *gate = mt_row_f32(e, op->in[0], r) + first;
    float *to = out->kind == MT_BUF_F32 ? mt_row_f32(e, op->out, r) + first : s->row;
    e->kernels->glu(gate, op->i[1] ? NULL : gate + out->width, n, op->i[0], to);
    if (to == s->row) mt_store_blocks(e, op, r, first / MT_BLOCK, to, n, MT_BLOCK_BYTES);
}

/* Sixteen sums side by side, folded in halves: one order on every machine. */
static float dot(const float *x, const float *y, int n) {
    float lanes[16] = {0};
    for (int i = 0; i < n / 16 * 16; i += 16)
        for (int lane = 0; lane < 16; lane++) lanes[lane] += x[i + lane] * y[i + lane];
    for (int i = n / 16 * 16; i < n; i++) lanes[i % 16] += x[i] * y[i];
    for (int half = 8; half; half /= 2)
        for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

static void run_add(mt_engine *e, const mt_op *op, int r, mt_scratch *s) {
    (void)s;
    if (op->w[0] >= 0) {
        const mt_weight *gate = &e->weights[op->w[0]];
        const float by = dot(mt_row_f32(e, op->in[1], r), gate->values, (int)gate->cols);
        const float share = 1 / (1 + expf(-by)), *x = mt_row_f32(e, op->in[0], r);
        float *out = mt_row_f32(e, op->out, r);
        for (int i = 0; i < e->buffers[op->out].width; i++) out[i] += share * x[i];
        return;
    }
    e->kernels->add(mt_row_f32(e, op->in[0], r), e->buffers[op->out].width,
                    mt_row_f32(e, op->out, r));
}

static void run_scale(mt_engine *e, const mt_op *op, int r, mt_scratch *s) {
    (void)s;
    float *x = mt_row_f32(e, op->out, r);
    e->kernels->scale(x, e->buffers[op->out].width, op->f[0], op->f[1], x);
}

static void run_take_rows(mt_engine *e, const mt_op *op, int r, mt_scratch *s) {
    (void)s;
    const int is_hidden = e->buffers[op->out].rows == MT_ROWS_HIDDEN;
    const int32_t taken = (is_hidden ? e->step->hidden_rows : e->step->out_rows)[r];
    memcpy(mt_row(e, op->out, r), mt_row(e, op->in[0], taken),
           (size_t)e->buffers[op->out].row_bytes);
}

static void run_copy(mt_engine *e, const mt_op *op, int r, mt_scratch *s) {
    (void)s;
    const int width = e->buffers[op->in[0] < 0 ? op->out : op->in[0]].width;
    const float *from =
        op->in[0] < 0 ? e->step->given + (size_t)r * (size_t)width : mt_row_f32(e, op->in[0], r);
    memcpy(mt_row_f32(e, op->out, r) + op->i[0], from, (size_t)width * sizeof(float));
}

/* Angles in double: at position 100,000 a float angle would be off by 0.004. */
static void run_rope_table(mt_engine *e, const mt_op *op, int r, mt_scratch *s) {
    (void)s;
    const double *inv_freq = e->weights[op->w[0]].values;
    const int n = e->buffers[op->out].width / 2;
    float *out = mt_row_f32(e, op->out, r);
    for (int i = 0; i < n; i++) {
        const double angle = (double)e->step->positions[r] * inv_freq[i];
        out[2 * i] = (float)(cos(angle) * (double)op->f[0]);
        out[2 * i + 1] = (float)(sin(angle) * (double)op->f[0]);
    }
}

static void store_row_kv(mt_engine *e, const mt_kv_region *kv, int r, const float *k,
                         const float *v) {
    const int32_t position = e->step->positions[r];
    const int32_t *blocks = mt_blocks_of(e, kv, e->row_seq[r]);
    const size_t in_block = (size_t)(position % e->block_tokens);
    const size_t width = mt_kv_width(e->kv_type);
    const size_t head_dim = (size_t)kv->shape.head_dim;
    uint8_t *head =
        e->kv_memory + kv->offset + (size_t)blocks[position / e->block_tokens] * kv->block_bytes;
    for (int h = 0; h < kv->shape.kv_heads; h++, head += kv->head_bytes) {
        uint8_t *key = head + (in_block / 16 * head_dim * 16 + in_block % 16) * width;
        uint8_t *value = head + kv->v_offset_bytes + in_block * (size_t)kv->v_stride * width;
        const size_t k_scales = (size_t)mt_kv_scales(kv->shape.head_dim);
        const size_t v_scales = (size_t)mt_kv_scales(kv->shape.value_dim);
        uint16_t *k_scale = (uint16_t *)(void *)(head + kv->k_scales_bytes) +
                            in_block / 16 * k_scales * 16 + in_block % 16;
        uint16_t *v_scale = (uint16_t *)(void *)(head + kv->v_scales_bytes) + in_block * v_scales;
        e->kernels->store_kv(k + (size_t)h * head_dim, kv->shape.head_dim, e->kv_type, 16, key, 16,
                             k_scale);
        if (kv->shape.is_latent) continue;
        e->kernels->store_kv(v + h * kv->shape.value_dim, kv->shape.value_dim, e->kv_type, 1, value,
                             1, v_scale);
    }
}

/* Norms of q and k are over as many values as their weights have: a head, or all of them; of a
 * latent k over its values, so what turns is left as it is. */
static void norm_heads(const mt_engine *e, const mt_op *op, float *q) {
    const int heads = op->i[0], kv_heads = op->i[1], head_dim = op->i[2];
    const int is_latent = e->kv[op->i[6]].shape.is_latent;
    for (int part = 0; part < 2; part++) {
        if (op->w[part] < 0) continue;
        const mt_weight *w = &e->weights[op->w[part]];
        const int n = (int)w->cols;
        const mt_norm how = {.weight = w->values, .weight_len = n, .group = n, .eps = op->f[0]};
        float *x = part ? q + heads * head_dim : q;
        if (part && is_latent)
            for (int h = 0; h < kv_heads; h++)
                e->kernels->norm(x + h * head_dim, n, &how, x + h * head_dim);
        else
            e->kernels->norm(x, (part ? kv_heads : heads) * head_dim, &how, x);
    }
}

static void run_rope_kv(mt_engine *e, const mt_op *op, int r, mt_scratch *s) {
    (void)s;
    const int heads = op->i[0], kv_heads = op->i[1], head_dim = op->i[2], n_rot = op->i[4];
    const int norm_after = op->i[7], span = op->i[8], value_dim = op->i[3];
    const int writes = e->buffers[op->out].width > heads * head_dim;
    const int turns_from = e->kv[op->i[6]].shape.is_latent ? op->i[3] : 0;
    float *q = mt_row_f32(e, op->out, r), *k = q + heads * head_dim;
    if (!norm_after) norm_heads(e, op, q);
    if (n_rot)
        e->kernels->rotate(q + turns_from, heads + (writes ? kv_heads : 0), head_dim, n_rot,
                           op->i[5], mt_row_f32(e, op->in[1], r));
    if (norm_after) norm_heads(e, op, q);
    if (span) {
        const double grown = log(1.0 + e->step->positions[r] / span);
        e->kernels->scale(q, heads * head_dim, (float)(1.0 + (double)op->f[1] * grown), 0.0f, q);
    }
    if (!writes) return;
    float *v = k + kv_heads * head_dim;
    if (op->i[9]) {
        const mt_norm how = {.group = value_dim, .eps = op->f[0]};
        e->kernels->norm(v, kv_heads * value_dim, &how, v);
    }
    store_row_kv(e, &e->kv[op->i[6]], r, k, v);
}

static const mt_phase row_phases[MT_N_OP_KINDS] = {
    [MT_OP_EMBED] = {mt_count_rows, run_embed},
    [MT_OP_NORM] = {mt_count_rows, run_norm},
    [MT_OP_QUANTIZE] = {mt_count_rows, run_quantize},
    [MT_OP_ROPE_TABLE] = {mt_count_rows, run_rope_table},
    [MT_OP_ROPE_KV] = {mt_count_rows, run_rope_kv},
    [MT_OP_GLU] = {count_glu, run_glu},
    [MT_OP_ADD] = {mt_count_rows, run_add},
    [MT_OP_SCALE] = {mt_count_rows, run_scale},
    [MT_OP_TAKE_ROWS] = {mt_count_rows, run_take_rows},
    [MT_OP_COPY] = {mt_count_rows, run_copy},
};

const mt_phase *mt_phase_of(int32_t kind, int phase) {
    switch (kind) {
    case MT_OP_ATTENTION: return &mt_attention_phases[phase];
    case MT_OP_EXPERT_GLU: return &mt_expert_glu_phases[phase];
    case MT_OP_EXPERT_SUM: return &mt_expert_sum_phases[phase];
    case MT_OP_ADAPT: return &mt_adapt_phases[phase];
    case MT_OP_ROUTER: return phase == 0 ? &mt_router_phase : NULL;
    case MT_OP_LINEAR: return phase == 0 ? &mt_linear_phase : NULL;
    case MT_OP_LINEAR_GLU: return phase == 0 ? &mt_linear_glu_phase : NULL;
    case MT_OP_HEAD_LINEAR: return phase == 0 ? &mt_head_linear_phase : NULL;
    case MT_OP_GATE: return phase == 0 ? &mt_gate_phase : NULL;
    case MT_OP_CONV: return phase == 0 ? &mt_conv_phase : NULL;
    case MT_OP_DELTA: return &mt_delta_phases[phase];
    case MT_OP_SCAN: return &mt_scan_phases[phase];
    default: return phase == 0 ? &row_phases[kind] : NULL;
    }
}
