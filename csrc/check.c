/* Refuses plans that would leave their buffers; check_ops.c looks at the operands of ops. Runs once
 * per plan, and check_step.c once per step, so the ops themselves check nothing. */
#include <stdarg.h>
#include <stdio.h>

#include "check.h"

int32_t mt_fail(char *err, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(err, MT_ERR_BYTES, format, args);
    va_end(args);
    return -1;
}

/* Also of buffers that no op uses any more: their widths size the scratch. */
static int check_shape(const mt_buffer *b) {
    if (b->width < 1 || b->width > MAX_WIDTH) return 0;
    if (b->rows < MT_ROWS_ALL || b->rows > MT_ROWS_HIDDEN) return 0;
    if (b->per_row < 1 || b->per_row > (b->rows == MT_ROWS_ALL ? MT_MAX_USED : 1)) return 0;
    if (b->is_logits && (b->is_logits != 1 || b->kind != MT_BUF_F32 || b->rows != MT_ROWS_OUT))
        return 0;
    if (b->kind == MT_BUF_F32) return b->row_bytes == 4 * (int64_t)b->width;
    return (b->kind == MT_BUF_Q8 || b->kind == MT_BUF_BF16) && b->width % MT_BLOCK == 0 &&
           b->row_bytes == (int64_t)mt_block_row_bytes(b->width);
}

static int check_place(const mt_plan *p, const mt_buffer *b) {
    return b->is_logits || (b->offset >= 0 && b->offset % 64 == 0 && b->offset <= p->arena_bytes &&
                            bytes_of(p, b) <= p->arena_bytes - b->offset);
}

static int buffer_is_used(const mt_plan *p, int32_t id) {
    for (int32_t i = 0; i < p->n_ops; i++) {
        const mt_op *op = &p->ops[i];
        if (op->out == id || op->out_rest == id) return 1;
        for (int in = 0; in < MT_N_INPUTS; in++)
            if (op->in[in] == id) return 1;
    }
    return 0;
}

static int check_tensor(const mt_tensor *t) {
    if (!t->data || t->rows < 1 || t->cols < 1) return 0;
    if (t->rows > MAX_TENSOR_ROWS || t->cols > MAX_WIDTH) return 0;
    if (t->format == MT_F64) return t->rows == 1 && t->n_bytes == t->cols * 8;
    const mt_layout *f = mt_layout_of(t->format);
    return f && t->cols % f->raw_block == 0 && (t->codebook || !mt_has_codebook(f)) &&
           t->n_bytes == t->rows * (t->cols / f->raw_block) * f->raw_bytes;
}

static int32_t check_options(const mt_options *o, char *err) {
    if (o->block_tokens < 16 || o->block_tokens % 16 || o->block_tokens > MAX_BLOCK_TOKENS ||
        o->n_blocks < 1)
        return mt_fail(err, "KV blocks of %d tokens (%d of them): use a multiple of 16",
                       o->block_tokens, o->n_blocks);
    if ((int64_t)o->block_tokens * o->n_blocks > MAX_POOL_TOKENS)
        return mt_fail(err, "a KV pool of %d blocks of %d tokens: use at most %d tokens",
                       o->n_blocks, o->block_tokens, MAX_POOL_TOKENS);
    if (o->n_window_blocks < 1 || o->n_window_blocks > o->n_blocks)
        return mt_fail(err, "%d window blocks: use 1 to %d, the blocks of the pool",
                       o->n_window_blocks, o->n_blocks);
    if (o->n_threads < 1 || o->n_threads > MAX_THREADS)
        return mt_fail(err, "%d threads: use 1 to %d", o->n_threads, MAX_THREADS);
    if (o->kv_type < MT_KV_F16 || o->kv_type > MT_KV_Q8_0)
        return mt_fail(err, "KV type %d is unknown", o->kv_type);
    return 0;
}

static int32_t check_kv_layers(const mt_plan *p, char *err) {
    int64_t n_values = 0;
    for (int32_t i = 0; i < p->n_kv_layers; i++) {
        const mt_kv_layer *k = &p->kv_layers[i];
        if (k->kv_heads < 1 || k->kv_heads > MAX_KV_HEADS || k->head_dim < 1 ||
            k->head_dim > MAX_HEAD_DIM || k->value_dim < 1 || k->value_dim > MAX_HEAD_DIM)
            return mt_fail(err, "KV layer %d has %d heads of %d and %d values", i, k->kv_heads,
                           k->head_dim, k->value_dim);
        if (k->is_windowed != 0 && k->is_windowed != 1)
            return mt_fail(err, "KV layer %d: is_windowed is %d", i, k->is_windowed);
        if (k->is_latent != 0 && k->is_latent != 1)
            return mt_fail(err, "KV layer %d: is_latent is %d", i, k->is_latent);
        if (k->is_latent && (k->value_dim % 16 || k->value_dim > k->head_dim))
            return mt_fail(err, "KV layer %d: %d of %d values of a key cannot be its values", i,
                           k->value_dim, k->head_dim);
        n_values += (int64_t)k->kv_heads * (k->head_dim + k->value_dim);
        if (n_values > MAX_TOKEN_VALUES)
            return mt_fail(err, "KV layers up to %d keep %lld values of a token: at most %d", i,
                           (long long)n_values, MAX_TOKEN_VALUES);
    }
    return 0;
}

static int32_t check_states(const mt_plan *p, const mt_options *o, char *err) {
    int64_t width = 0;
    for (int32_t i = 0; i < p->n_states; i++) {
        if (p->states[i] < 1 || p->inputs[i] < 1 || p->inputs[i] > MAX_WIDTH)
            return mt_fail(err, "state %d has %d values, and reads %d of a row", i, p->states[i],
                           p->inputs[i]);
        width += p->states[i];
        if (width > MAX_STATE)
            return mt_fail(err, "states up to %d keep %lld values of a sequence: at most %d", i,
                           (long long)width, MAX_STATE);
    }
    if (p->n_states && (o->n_states < 1 || o->n_states > MAX_STATES))
        return mt_fail(err, "states of %d sequences: use 1 to %d", o->n_states, MAX_STATES);
    if (o->n_guesses < 0 || o->n_guesses > MT_MOST_GUESSES)
        return mt_fail(err, "%d guessed rows of a sequence: use 0 to %d", o->n_guesses,
                       MT_MOST_GUESSES);
    return 0;
}

/* All buffers in mt_step.logits have one width, or nobody could know how large it must be. */
static int32_t check_buffers(const mt_plan *p, char *err) {
    const mt_buffer *logits = NULL;
    for (int32_t i = 0; i < p->n_buffers; i++) {
        const mt_buffer *b = &p->buffers[i];
        if (!check_shape(b) || (buffer_is_used(p, i) && !check_place(p, b)))
            return mt_fail(err, "buffer %d (width %d) does not fit the arena of %lld bytes", i,
                           b->width, (long long)p->arena_bytes);
        if (b->is_logits && logits && logits->width != b->width)
            return mt_fail(err, "logits of %d and of %d values", logits->width, b->width);
        if (b->is_logits) logits = b;
    }
    const mt_buffer *hidden = buffer_of(p, p->hidden, MT_BUF_F32);
    const int is_fit = hidden && hidden->rows == MT_ROWS_HIDDEN && buffer_is_used(p, p->hidden);
    if (p->hidden != -1 && !is_fit)
        return mt_fail(err, "buffer %d cannot hold hidden states", p->hidden);
    return 0;
}

int32_t mt_check_plan(const mt_plan *p, const mt_options *o, char *err) {
    if (p->n_ops < 1 || p->n_buffers < 1 || p->n_tensors < 1 || p->n_kv_layers < 0 ||
        p->n_states < 0 || p->n_adapters < 0 || p->given < 0 || p->max_rows < 1 ||
        p->arena_bytes < 0 || p->max_rows > MAX_ROWS)
        return mt_fail(err, "plan has %d ops, %d buffers, %d tensors, %d rows: not a plan",
                       p->n_ops, p->n_buffers, p->n_tensors, p->max_rows);
    if (!p->ops || !p->buffers || !p->tensors || (p->n_kv_layers && !p->kv_layers) ||
        (p->n_states && (!p->states || !p->inputs)))
        return mt_fail(err, "plan has no records");
    for (int32_t i = 0; i < p->n_ops; i++)
        if (p->ops[i].kind < 0 || p->ops[i].kind >= MT_N_OP_KINDS)
            return mt_fail(err, "op %d is of kind %d, which is unknown", i, p->ops[i].kind);
    if (check_options(o, err) || check_kv_layers(p, err) || check_states(p, o, err) ||
        check_buffers(p, err))
        return -1;
    for (int32_t i = 0; i < p->n_tensors; i++)
        if (!check_tensor(&p->tensors[i]))
            return mt_fail(err, "tensor %d (format %d, %lld x %lld, %lld bytes) is not usable", i,
                           p->tensors[i].format, (long long)p->tensors[i].rows,
                           (long long)p->tensors[i].cols, (long long)p->tensors[i].n_bytes);
    for (int32_t i = 0; i < p->n_ops; i++)
        if (!mt_check_op(p, &p->ops[i]))
            return mt_fail(err, "op %d of kind %d has operands that do not fit", i, p->ops[i].kind);
    return 0;
}
