/* How each row-wise op splits into work items. The loops themselves are in the kernel table. */
#include <math.h>
#include <string.h>

#include "engine.h"
#include "pack.h"

int mt_take(mt_engine *e, int at, int phase, int n_items, int *begin, int *end) {
    const int run = n_items / (8 * e->n_threads) + 1; /* small enough that a slow core takes less */
    const int first =
        atomic_fetch_add_explicit(&e->counters[at * 2 + phase], run, memory_order_relaxed);
    *begin = first;
    *end = first + run < n_items ? first + run : n_items;
    return first < n_items;
}

#define EACH_ITEM(i, n_items)                                                                      \
    for (int begin_, end_; mt_take(e, at, 0, (n_items), &begin_, &end_);)                          \
        for (int i = begin_; i < end_; i++)

static void run_embed(mt_engine *e, int at, int thread) {
    (void)thread;
    const mt_op *op = &e->ops[at];
    const mt_weight *w = &e->weights[op->w[0]];
    EACH_ITEM(r, e->step->n_rows) {
        float *out = mt_row_f32(e, op->out, r);
        mt_unpack_row(w->layout, w->packed, w->cols, e->step->tokens[r], out);
        for (int64_t i = 0; i < w->cols; i++) out[i] *= op->f[0];
    }
}

static void run_norm(mt_engine *e, int at, int thread) {
    const mt_op *op = &e->ops[at];
    const mt_buffer *out = &e->buffers[op->out];
    const mt_weight *w = op->w[0] >= 0 ? &e->weights[op->w[0]] : NULL;
    EACH_ITEM(r, mt_rows_of(e, out)) {
        float *to = out->kind == MT_BUF_Q8 ? e->scratch[thread].row : mt_row_f32(e, op->out, r);
        e->kernels->norm(mt_row_f32(e, op->in[0], r), w ? w->values : NULL, w ? (int)w->cols : 0,
                         out->width, op->i[0], op->f[0], op->flags & MT_FLAG_ACCUMULATE, to);
        if (out->kind == MT_BUF_Q8)
            e->kernels->quantize(to, NULL, out->width, mt_row_q8(e, op->out, r));
    }
}

static void run_quantize(mt_engine *e, int at, int thread) {
    (void)thread;
    const mt_op *op = &e->ops[at];
    const mt_buffer *out = &e->buffers[op->out];
    EACH_ITEM(r, mt_rows_of(e, out))
        e->kernels->quantize(mt_row_f32(e, op->in[0], r),
                             op->in[1] >= 0 ? mt_row_q8(e, op->in[1], r) : NULL, out->width,
                             mt_row_q8(e, op->out, r));
}

static void run_glu(mt_engine *e, int at, int thread) {
    const mt_op *op = &e->ops[at];
    const mt_buffer *out = &e->buffers[op->out];
    const int chunks = (out->width + MT_GLU_CHUNK - 1) / MT_GLU_CHUNK;
    EACH_ITEM(item, mt_rows_of(e, out) * chunks) {
        const int r = item / chunks, first = item % chunks * MT_GLU_CHUNK;
        const int n = out->width - first < MT_GLU_CHUNK ? out->width - first : MT_GLU_CHUNK;
        const float *gate = mt_row_f32(e, op->in[0], r) + first;
        float *to =
            out->kind == MT_BUF_Q8 ? e->scratch[thread].row : mt_row_f32(e, op->out, r) + first;
        e->kernels->glu(gate, gate + out->width, n, op->i[0], to);
        if (out->kind == MT_BUF_Q8)
            e->kernels->quantize(to, NULL, n, mt_row_q8(e, op->out, r) + first / MT_BLOCK);
    }
}

static void run_add(mt_engine *e, int at, int thread) {
    (void)thread;
    const mt_op *op = &e->ops[at];
    const mt_buffer *out = &e->buffers[op->out];
    EACH_ITEM(r, mt_rows_of(e, out))
        e->kernels->add(mt_row_f32(e, op->in[0], r), out->width, mt_row_f32(e, op->out, r));
}

static void run_take_rows(mt_engine *e, int at, int thread) {
    (void)thread;
    const mt_op *op = &e->ops[at];
    const size_t n_bytes = (size_t)e->buffers[op->out].row_bytes;
    EACH_ITEM(r, e->step->n_out)
        memcpy(mt_row(e, op->out, r), mt_row(e, op->in[0], e->step->out_rows[r]), n_bytes);
}

/* Angles in double: at position 100,000 a float angle would be off by 0.004. */
static void run_rope_table(mt_engine *e, int at, int thread) {
    (void)thread;
    const mt_op *op = &e->ops[at];
    const double *inv_freq = e->weights[op->w[0]].values;
    const int n = e->buffers[op->out].width / 2;
    EACH_ITEM(r, e->step->n_rows) {
        float *out = mt_row_f32(e, op->out, r);
        for (int i = 0; i < n; i++) {
            const double angle = (double)e->step->positions[r] * inv_freq[i];
            out[2 * i] = (float)(cos(angle) * (double)op->f[0]);
            out[2 * i + 1] = (float)(sin(angle) * (double)op->f[0]);
        }
    }
}

static void rotate(float *x, const float *trig, int n_rot, int style) {
    const int half = n_rot / 2;
    const int step = style == MT_ROPE_PAIR ? 2 : 1, apart = style == MT_ROPE_PAIR ? 1 : half;
    for (int i = 0; i < half; i++) {
        float *a = x + i * step, *b = a + apart;
        const float c = trig[2 * i], s = trig[2 * i + 1], a0 = *a, b0 = *b;
        *a = a0 * c - b0 * s;
        *b = a0 * s + b0 * c;
    }
}

static void store_row_kv(mt_engine *e, const mt_kv_region *kv, int r, const float *k,
                         const float *v) {
    const int32_t position = e->step->positions[r];
    const int32_t *blocks =
        e->step->block_table + (size_t)e->row_seq[r] * (size_t)e->step->table_width;
    const size_t in_block = (size_t)(position % e->block_tokens);
    const size_t width = e->kv_type == MT_KV_F16 ? 2 : 4;
    const size_t head_dim = (size_t)kv->shape.head_dim;
    uint8_t *head =
        e->kv_memory + kv->offset + (size_t)blocks[position / e->block_tokens] * kv->block_bytes;
    for (int h = 0; h < kv->shape.kv_heads; h++, head += kv->head_bytes) {
        uint8_t *key = head + (in_block / 16 * head_dim * 16 + in_block % 16) * width;
        uint8_t *value = head + kv->v_offset_bytes + in_block * (size_t)kv->v_stride * width;
        e->kernels->store_kv(k + (size_t)h * head_dim, kv->shape.head_dim, e->kv_type, 16, key);
        e->kernels->store_kv(v + h * kv->shape.value_dim, kv->shape.value_dim, e->kv_type, 1,
                             value);
    }
}

static void run_rope_kv(mt_engine *e, int at, int thread) {
    (void)thread;
    const mt_op *op = &e->ops[at];
    const int heads = op->i[0], kv_heads = op->i[1], head_dim = op->i[2], n_rot = op->i[4];
    const int q_width = heads * head_dim, k_width = kv_heads * head_dim;
    EACH_ITEM(r, e->step->n_rows) {
        float *q = mt_row_f32(e, op->out, r), *k = q + q_width;
        if (op->w[0] >= 0)
            e->kernels->norm(q, e->weights[op->w[0]].values, head_dim, q_width, head_dim, op->f[0],
                             0, q);
        if (op->w[1] >= 0)
            e->kernels->norm(k, e->weights[op->w[1]].values, head_dim, k_width, head_dim, op->f[0],
                             0, k);
        for (int h = 0; n_rot && h < heads + kv_heads; h++)
            rotate(q + h * head_dim, mt_row_f32(e, op->in[1], r), n_rot, op->i[5]);
        store_row_kv(e, &e->kv[op->i[6]], r, k, k + k_width);
    }
}

mt_op_fn *const mt_op_table[MT_N_OP_KINDS] = {
    [MT_OP_EMBED] = run_embed,
    [MT_OP_NORM] = run_norm,
    [MT_OP_QUANTIZE] = run_quantize,
    [MT_OP_LINEAR] = mt_run_linear,
    [MT_OP_ROPE_TABLE] = run_rope_table,
    [MT_OP_ROPE_KV] = run_rope_kv,
    [MT_OP_ATTENTION] = mt_run_attention,
    [MT_OP_GLU] = run_glu,
    [MT_OP_ADD] = run_add,
    [MT_OP_TAKE_ROWS] = run_take_rows,
};
