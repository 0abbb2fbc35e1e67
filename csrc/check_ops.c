/* Which operands each kind of op accepts: sizes, kinds and rows of buffers, formats of weights. */
#include "check.h"

/* How many weights of an op, from the first on, are matrices. All others are vectors. */
static const int8_t n_matrices[MT_N_OP_KINDS] = {
    [MT_OP_EMBED] = 1,      [MT_OP_LINEAR] = 3,      [MT_OP_LINEAR_GLU] = 2, [MT_OP_EXPERT_GLU] = 2,
    [MT_OP_EXPERT_SUM] = 1, [MT_OP_HEAD_LINEAR] = 1, [MT_OP_ADAPT] = 2};

int mt_is_matrix(const mt_plan *p, int32_t tensor) {
    for (int32_t i = 0; i < p->n_ops; i++)
        for (int w = 0; w < n_matrices[p->ops[i].kind]; w++)
            if (p->ops[i].w[w] == tensor) return 1;
    return 0;
}

static int is_activation(int32_t i) { return i >= 0 && i < MT_N_ACTIVATIONS; }

/* Also one that stays in the file, where rows are only embedded. */
static const mt_tensor *table_of(const mt_plan *p, int32_t id, int64_t cols) {
    if (id < 0 || id >= p->n_tensors) return NULL;
    const mt_tensor *t = &p->tensors[id];
    const mt_layout *f = mt_layout_of(t->format);
    if (!f || t->rows < 1 || t->cols != cols || cols % f->raw_block) return NULL;
    return t;
}
static const mt_tensor *matrix_of(const mt_plan *p, int32_t id, int64_t cols) {
    const mt_tensor *t = table_of(p, id, cols);
    return t && !(t->flags & MT_TENSOR_STAYS) ? t : NULL;
}
static int is_vector(const mt_plan *p, int32_t id, int32_t format, int64_t n) {
    if (id < 0 || id >= p->n_tensors) return 0;
    const mt_tensor *t = &p->tensors[id];
    return t->format == format && t->rows == 1 && t->cols == n && !mt_is_matrix(p, id) &&
           !(t->flags & MT_TENSOR_STAYS);
}
static int is_norm_weight(const mt_plan *p, int32_t id, int64_t group, int64_t width) {
    return id < 0 || is_vector(p, id, MT_F32, group) || is_vector(p, id, MT_F32, width);
}

static int as_many_rows(const mt_buffer *a, const mt_buffer *b) {
    return a->rows == b->rows && a->per_row == b->per_row;
}
static int is_row_of_step(const mt_buffer *b) {
    return b && b->rows == MT_ROWS_ALL && b->per_row == 1;
}

/* Rows of in and out agree, and in has this width. */
static int same_rows(const mt_buffer *in, const mt_buffer *out, int64_t in_width) {
    return in && out && as_many_rows(in, out) && !in->is_logits && in->width == in_width;
}

/* Whether buffer `id` can be the second plane of x. */
static int is_rest(const mt_plan *p, int32_t id, const mt_buffer *x) {
    return x->kind == MT_BUF_Q8 && same_rows(buffer_of(p, id, MT_BUF_Q8), x, x->width);
}

static int check_linear(const mt_plan *p, const mt_op *op, const mt_buffer *out) {
    if (!out || out->kind != MT_BUF_F32 || op->in[0] < 0 || op->in[0] >= p->n_buffers) return 0;
    const mt_buffer *in = &p->buffers[op->in[0]];
    int64_t width = op->i[0];
    if (width < 0 || !as_many_rows(in, out) || in->is_logits || op->w[0] < 0) return 0;
    if (op->in[1] >= 0 && !is_rest(p, op->in[1], in)) return 0;
    for (int s = 0; s < 3 && op->w[s] >= 0; s++) {
        const mt_tensor *w = matrix_of(p, op->w[s], in->width);
        if (!w) return 0;
        const int is_float = mt_layout_of(w->format)->codes == MT_CODES_FLOAT;
        if (is_float && in->kind == MT_BUF_Q8) return 0;
        if (op->w[3 + s] >= 0 && !is_vector(p, op->w[3 + s], MT_F32, w->rows)) return 0;
        width += w->rows;
    }
    if (op->w[1] < 0 && op->w[2] >= 0) return 0; /* a gap among the stacked weights */
    return width <= out->width;
}

static int check_linear_glu(const mt_plan *p, const mt_op *op, const mt_buffer *out) {
    if (op->in[0] < 0 || op->in[0] >= p->n_buffers || out->is_logits) return 0;
    const mt_buffer *in = &p->buffers[op->in[0]];
    const mt_tensor *gate = matrix_of(p, op->w[0], in->width);
    const mt_tensor *up = op->w[1] < 0 ? gate : matrix_of(p, op->w[1], in->width);
    if (!gate || !up || gate->rows != up->rows || out->width != gate->rows) return 0;
    if (op->w[1] < 0 && op->w[3] >= 0) return 0; /* a bias of nothing */
    if (in->is_logits || !as_many_rows(in, out) || !is_activation(op->i[0])) return 0;
    if (op->flags || (op->in[1] >= 0 && !is_rest(p, op->in[1], in))) return 0;
    for (int w = 0; w < 2 && op->w[w] >= 0; w++) {
        const mt_layout *f = mt_layout_of(p->tensors[op->w[w]].format);
        if (f->codes == MT_CODES_FLOAT && in->kind == MT_BUF_Q8) return 0;
        if (op->w[2 + w] >= 0 && !is_vector(p, op->w[2 + w], MT_F32, gate->rows)) return 0;
    }
    return 1;
}

/* The weight's columns meet the first values of every head of x. What is behind those, out has too,
 * behind the products. */
static int check_head_linear(const mt_plan *p, const mt_op *op, const mt_buffer *out) {
    const int64_t heads = op->i[0];
    if (!out || out->is_logits || op->flags || heads < 1 || heads > MAX_HEADS) return 0;
    if (op->in[0] < 0 || op->in[0] >= p->n_buffers || op->w[0] < 0 || op->w[0] >= p->n_tensors)
        return 0;
    const mt_buffer *in = &p->buffers[op->in[0]];
    const mt_tensor *w = &p->tensors[op->w[0]];
    if (!matrix_of(p, op->w[0], w->cols) || in->width % heads || w->rows % heads) return 0;
    if (in->is_logits || !as_many_rows(in, out)) return 0;
    if (op->in[1] >= 0 && !is_rest(p, op->in[1], in)) return 0;
    const int64_t width = in->width / heads, rows = w->rows / heads, tail = width - w->cols;
    if (tail < 0 || rows % MT_TILE_ROWS || (in->kind != MT_BUF_F32 && width % MT_BLOCK)) return 0;
    if (mt_layout_of(w->format)->codes == MT_CODES_FLOAT && in->kind == MT_BUF_Q8) return 0;
    if (tail && !same_rows(buffer_of(p, op->in[2], MT_BUF_F32), out, in->width)) return 0;
    return heads * (rows + tail) <= out->width;
}

static int check_router(const mt_plan *p, const mt_op *op, const mt_buffer *out) {
    const mt_buffer *logits = buffer_of(p, op->in[0], MT_BUF_F32);
    const int32_t used = op->i[1], groups = op->i[2], kept = op->i[3];
    if (!is_row_of_step(out) || !logits || !same_rows(logits, out, logits->width)) return 0;
    const int32_t n = logits->width;
    if (n > MT_MAX_EXPERTS || used < 1 || used > MT_MAX_USED || out->width != 2 * used) return 0;
    if (groups < 1 || groups > n || n % groups || kept < 1 || kept > groups) return 0;
    if (used > n / groups * kept || op->i[0] < 0 || op->i[0] >= MT_N_GATINGS) return 0;
    return (op->w[0] < 0 || is_vector(p, op->w[0], MT_F32, n)) &&
           (op->w[1] < 0 || is_vector(p, op->w[1], MT_F32, n));
}

/* The rows x of experts (in[0], in[1]), the chosen ones (in[2]), their numbers (i[0], i[1]), and a
 * weight of so many rows. */
static int check_experts(const mt_plan *p, const mt_op *op, int per_row, int64_t rows_of_expert) {
    if (op->in[0] < 0 || op->in[0] >= p->n_buffers) return 0;
    const mt_buffer *x = &p->buffers[op->in[0]], *chosen = buffer_of(p, op->in[2], MT_BUF_F32);
    const int32_t n = op->i[0], used = op->i[1];
    if (n < 1 || n > MT_MAX_EXPERTS || used < 1 || used > MT_MAX_USED || used > n) return 0;
    if (!is_row_of_step(chosen) || chosen->width != 2 * used) return 0;
    if (x->rows != MT_ROWS_ALL || x->per_row != per_row) return 0;
    if (op->in[1] >= 0 && !is_rest(p, op->in[1], x)) return 0;
    const mt_tensor *w = matrix_of(p, op->w[0], x->width);
    if (!w || rows_of_expert % MT_TILE_ROWS || w->rows != n * rows_of_expert) return 0;
    return x->kind != MT_BUF_Q8 || mt_layout_of(w->format)->codes != MT_CODES_FLOAT;
}

static int is_expert_bias(const mt_plan *p, int32_t id, int64_t n) {
    return id < 0 || is_vector(p, id, MT_F32, n);
}

static int check_expert_glu(const mt_plan *p, const mt_op *op, const mt_buffer *out) {
    const int64_t width = out->width, n = op->i[0];
    if (out->rows != MT_ROWS_ALL || out->per_row != op->i[1] || op->flags) return 0;
    const int is_fused = op->w[1] < 0 && check_experts(p, op, 1, 2 * width);
    if (!is_fused && !check_experts(p, op, 1, width)) return 0;
    if (!is_fused && op->w[1] < 0 && op->w[3] >= 0) return 0; /* a bias of nothing */
    if (op->w[1] >= 0) {
        const mt_tensor *up = matrix_of(p, op->w[1], p->buffers[op->in[0]].width);
        if (!up || up->rows != n * width || width % MT_TILE_ROWS) return 0;
        const int is_float = mt_layout_of(up->format)->codes == MT_CODES_FLOAT;
        if (is_float && p->buffers[op->in[0]].kind == MT_BUF_Q8) return 0;
    }
    return width % MT_TILE_ROWS == 0 && is_activation(op->i[2]) &&
           is_expert_bias(p, op->w[2], n * width) && is_expert_bias(p, op->w[3], n * width);
}

static int check_expert_sum(const mt_plan *p, const mt_op *op, const mt_buffer *out) {
    return is_row_of_step(out) && !out->is_logits && check_experts(p, op, op->i[1], out->width) &&
           is_expert_bias(p, op->w[1], (int64_t)op->i[0] * out->width);
}

static int check_kv(const mt_plan *p, const mt_op *op, int32_t layer, const mt_buffer *qkv) {
    const int64_t heads = op->i[0], kv_heads = op->i[1], head_dim = op->i[2], value_dim = op->i[3];
    if (layer < 0 || layer >= p->n_kv_layers || !qkv || heads < 1 || kv_heads < 1) return 0;
    const mt_kv_layer *kv = &p->kv_layers[layer]; /* whose sizes are known to be sane */
    const int64_t values = kv->is_latent ? 0 : kv_heads * value_dim;
    return kv->kv_heads == kv_heads && kv->head_dim == head_dim && kv->value_dim == value_dim &&
           heads % kv_heads == 0 && heads <= MAX_HEADS &&
           (heads * head_dim == qkv->width || /* keys and values are another op's */
            (heads + kv_heads) * head_dim + values == qkv->width);
}

static int check_rope_kv(const mt_plan *p, const mt_op *op, const mt_buffer *out) {
    const int n_rot = op->i[4];
    if (!out || op->in[0] != op->out || !check_kv(p, op, op->i[6], out)) return 0;
    const int is_latent = p->kv_layers[op->i[6]].is_latent;
    const int turns_from = is_latent ? op->i[3] : 0;
    if (n_rot < 0 || n_rot % 2 || n_rot > op->i[2] - turns_from) return 0;
    if (op->i[5] != 0 && op->i[5] != 1) return 0;
    if (n_rot && !same_rows(buffer_of(p, op->in[1], MT_BUF_F32), out, n_rot)) return 0;
    if ((op->i[7] != 0 && op->i[7] != 1) || op->i[8] < 0) return 0;
    if (op->i[9] != 0 && (op->i[9] != 1 || is_latent)) return 0;
    if (op->w[1] >= 0 && out->width == op->i[0] * op->i[2]) return 0; /* there are no keys */
    const int64_t k_norm = is_latent ? op->i[3] : op->i[2];
    const int64_t k_width = is_latent ? op->i[3] : (int64_t)op->i[1] * op->i[2];
    return is_norm_weight(p, op->w[0], op->i[2], (int64_t)op->i[0] * op->i[2]) &&
           is_norm_weight(p, op->w[1], k_norm, k_width);
}

static int check_attention(const mt_plan *p, const mt_op *op, const mt_buffer *any) {
    const mt_buffer *qkv = buffer_of(p, op->in[0], MT_BUF_F32);
    if (op->i[5] < 0 || !(op->f[1] >= 0.0f) || !check_kv(p, op, op->i[4], qkv) ||
        !same_rows(qkv, any, qkv->width))
        return 0;
    if (op->i[6] != 0 && op->i[6] != 1) return 0;
    if (p->kv_layers[op->i[4]].is_windowed && (!op->i[5] || op->i[6])) return 0;
    if (op->w[0] >= 0 && !is_vector(p, op->w[0], MT_F32, op->i[0])) return 0;
    return any->width == op->i[0] * op->i[3] && (any->kind == MT_BUF_F32 || op->i[3] % 32 == 0);
}

/* `width` columns of buffer `id` from column `first` on, in runs of `group` columns that begin
 * `stride` apart. */
static int has_columns(const mt_plan *p, int32_t id, const mt_buffer *out, int64_t first,
                       int64_t group, int64_t stride) {
    const mt_buffer *in = buffer_of(p, id, MT_BUF_F32);
    if (!in || in->is_logits || !as_many_rows(in, out) || first < 0) return 0;
    return first + (out->width / group - 1) * stride + group <= in->width;
}

static int check_gate(const mt_plan *p, const mt_op *op, const mt_buffer *any) {
    const int32_t group = op->i[2], stride = op->i[3];
    if (group < 1 || any->width % group || stride < group || any->is_logits || op->flags) return 0;
    return is_activation(op->i[4]) && has_columns(p, op->in[0], any, op->i[0], any->width, 0) &&
           has_columns(p, op->in[1], any, op->i[1], group, stride);
}

static int has_state(const mt_plan *p, int32_t layer, int64_t width, int64_t inputs) {
    return layer >= 0 && layer < p->n_states && p->states[layer] == width &&
           p->inputs[layer] == inputs;
}

static int check_conv(const mt_plan *p, const mt_op *op, const mt_buffer *out) {
    const int64_t taps = op->i[1];
    if (!is_row_of_step(out) || out->is_logits || op->flags) return 0;
    if (taps < 2 || taps > MAX_TAPS || !is_activation(op->i[2])) return 0;
    return has_columns(p, op->in[0], out, op->i[0], out->width, 0) &&
           is_vector(p, op->w[0], MT_F32, taps * out->width) &&
           (op->w[1] < 0 || is_vector(p, op->w[1], MT_F32, out->width)) &&
           has_state(p, op->i[3], (taps - 1) * out->width, out->width);
}

static int check_delta(const mt_plan *p, const mt_op *op, const mt_buffer *out) {
    const int64_t k_heads = op->i[0], v_heads = op->i[1], d = op->i[2];
    if (!is_row_of_step(out) || out->is_logits || op->flags || k_heads < 1) return 0;
    if (v_heads < 1 || v_heads > MAX_HEADS || v_heads % k_heads || d < 1 || d > MAX_HEAD_DIM)
        return 0;
    const mt_buffer *qkv = buffer_of(p, op->in[0], MT_BUF_F32);
    const mt_buffer *rates = buffer_of(p, op->in[1], MT_BUF_F32);
    return same_rows(qkv, out, (2 * k_heads + v_heads) * d) && same_rows(rates, out, 2 * v_heads) &&
           out->width == v_heads * d && is_vector(p, op->w[0], MT_F32, v_heads) &&
           is_vector(p, op->w[1], MT_F32, v_heads) &&
           has_state(p, op->i[4], v_heads * d * d, qkv->width + rates->width);
}

static int check_scan(const mt_plan *p, const mt_op *op, const mt_buffer *out) {
    const int64_t heads = op->i[0], d = op->i[1], groups = op->i[2], keys = op->i[3];
    if (!is_row_of_step(out) || out->is_logits || op->flags || groups < 1) return 0;
    if (heads < 1 || heads > MAX_HEADS || heads % groups || d < 1 || d > MAX_HEAD_DIM || keys < 1 ||
        keys > MAX_HEAD_DIM)
        return 0;
    const mt_buffer *xbc = buffer_of(p, op->in[0], MT_BUF_F32);
    const mt_buffer *dt = buffer_of(p, op->in[1], MT_BUF_F32);
    if (!dt || dt->is_logits || !as_many_rows(dt, out) || op->i[4] < 0) return 0;
    for (int w = 0; w < 3; w++)
        if (!is_vector(p, op->w[w], MT_F32, heads)) return 0;
    return same_rows(xbc, out, heads * d + 2 * groups * keys) && out->width == heads * d &&
           op->i[4] + heads <= dt->width &&
           has_state(p, op->i[5], heads * keys * d, xbc->width + heads);
}

static int check_share(const mt_plan *p, const mt_op *op, const mt_buffer *out) {
    const mt_buffer *by = buffer_of(p, op->in[1], MT_BUF_F32);
    return op->w[0] < 0 ||
           (by && same_rows(by, out, by->width) && is_vector(p, op->w[0], MT_F32, by->width));
}

static int overlap(const mt_plan *p, const mt_buffer *a, const mt_buffer *b) {
    return !a->is_logits && !b->is_logits && a->offset < b->offset + bytes_of(p, b) &&
           b->offset < a->offset + bytes_of(p, a);
}

/* Whether the op may write what its output leaves over to buffer out_rest. */
static int check_out_rest(const mt_plan *p, const mt_op *op) {
    const mt_buffer *out = &p->buffers[op->out];
    return op->out_rest < 0 ||
           (is_rest(p, op->out_rest, out) && !overlap(p, out, &p->buffers[op->out_rest]));
}

/* Items of an op run side by side, so none may write what another one reads. In place work those
 * whose items are whole rows. */
static int check_apart(const mt_plan *p, const mt_op *op) {
    const int in_place = op->kind == MT_OP_NORM || op->kind == MT_OP_ADD ||
                         op->kind == MT_OP_ROPE_KV || op->kind == MT_OP_SCALE;
    for (int i = 0; i < MT_N_INPUTS; i++) {
        const int32_t in = op->in[i];
        if (in < 0 || in >= p->n_buffers || (in_place && in == op->out)) continue;
        if (overlap(p, &p->buffers[in], &p->buffers[op->out])) return 0;
        if (op->out_rest >= 0 && overlap(p, &p->buffers[in], &p->buffers[op->out_rest])) return 0;
    }
    return 1;
}

/* Both factors are floats, and `low`, which the op writes as well, is apart from what it reads. */
static int check_adapt(const mt_plan *p, const mt_op *op, const mt_buffer *out) {
    const mt_buffer *x = buffer_of(p, op->in[0], MT_BUF_F32);
    const mt_buffer *low = buffer_of(p, op->in[1], MT_BUF_F32);
    if (out->per_row != 1 || op->i[0] < 0) return 0;
    if (!x || !same_rows(x, out, x->width) || !low || !same_rows(low, out, low->width)) return 0;
    const mt_tensor *a = matrix_of(p, op->w[0], x->width), *b = matrix_of(p, op->w[1], low->width);
    if (!a || !b || a->rows != low->width || op->i[0] + b->rows > out->width) return 0;
    for (int w = 0; w < 2; w++)
        if (mt_layout_of(p->tensors[op->w[w]].format)->codes != MT_CODES_FLOAT) return 0;
    return op->i[1] >= 0 && op->i[1] < p->n_adapters && !overlap(p, x, low);
}

/* Without an input, the rows that a step gives fill those of out. */
static int check_copy(const mt_plan *p, const mt_op *op, const mt_buffer *out) {
    const mt_buffer *x = buffer_of(p, op->in[0], MT_BUF_F32);
    if (!out || out->is_logits || op->flags || op->out_rest >= 0 || op->i[0] < 0) return 0;
    if (op->in[0] < 0) return is_row_of_step(out) && op->i[0] == 0 && out->width == p->given;
    return x && same_rows(x, out, x->width) && op->i[0] <= out->width - x->width;
}

int mt_check_op(const mt_plan *p, const mt_op *op) {
    if (op->out < 0 || op->out >= p->n_buffers) return 0;
    if (!check_out_rest(p, op) || !check_apart(p, op)) return 0;
    const mt_buffer *any = &p->buffers[op->out], *out = buffer_of(p, op->out, MT_BUF_F32);
    const mt_buffer *in = buffer_of(p, op->in[0], MT_BUF_F32);
    switch (op->kind) {
    case MT_OP_EMBED:
        return is_row_of_step(out) && table_of(p, op->w[0], out->width) && op->i[0] >= 0 &&
               op->i[0] < MT_N_EMBED_BYS;
    case MT_OP_NORM:
        return same_rows(in, any, any->width) && op->i[0] > 0 && any->width % op->i[0] == 0 &&
               is_norm_weight(p, op->w[0], op->i[0], any->width) &&
               is_norm_weight(p, op->w[1], op->i[0], any->width) &&
               (op->i[1] == 0 || op->i[1] == 1) && (out || !(op->flags & MT_FLAG_ACCUMULATE));
    case MT_OP_QUANTIZE: return any->kind != MT_BUF_F32 && same_rows(in, any, any->width);
    case MT_OP_LINEAR: return check_linear(p, op, any);
    case MT_OP_LINEAR_GLU: return check_linear_glu(p, op, any);
    case MT_OP_HEAD_LINEAR: return check_head_linear(p, op, out);
    case MT_OP_ROUTER: return check_router(p, op, out);
    case MT_OP_EXPERT_GLU: return check_expert_glu(p, op, any);
    case MT_OP_EXPERT_SUM: return out && check_expert_sum(p, op, out);
    case MT_OP_ADAPT: return out && check_adapt(p, op, out);
    case MT_OP_ROPE_TABLE:
        return is_row_of_step(out) && out->width % 2 == 0 &&
               is_vector(p, op->w[0], MT_F64, out->width / 2);
    case MT_OP_ROPE_KV: return is_row_of_step(out) && check_rope_kv(p, op, out);
    case MT_OP_ATTENTION: return is_row_of_step(any) && check_attention(p, op, any);
    case MT_OP_GLU:
        return (op->i[1] == 0 || op->i[1] == 1) && is_activation(op->i[0]) &&
               same_rows(in, any, (2 - op->i[1]) * (int64_t)any->width);
    case MT_OP_GATE: return check_gate(p, op, any);
    case MT_OP_CONV: return check_conv(p, op, out);
    case MT_OP_DELTA: return check_delta(p, op, out);
    case MT_OP_SCAN: return check_scan(p, op, out);
    case MT_OP_ADD: return same_rows(in, out, any->width) && check_share(p, op, out);
    case MT_OP_COPY: return check_copy(p, op, out);
    case MT_OP_SCALE: return out && op->in[0] == op->out && op->f[1] >= 0.0f;
    case MT_OP_TAKE_ROWS:
        return is_row_of_step(in) && out && out->rows != MT_ROWS_ALL && in->width == out->width &&
               !in->is_logits;
    default: return 0;
    }
}
