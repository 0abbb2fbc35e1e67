/* Ops of recurrent layers. A sequence's rows are walked in order, so the state behind a row is the
 * same however its prompt was cut; work items are runs of channels, which know nothing of each other.
 *
 * The state of a sequence in all layers is one stretch of floats in its slot. Before position 0 it is
 * zeros, whatever the slot holds.
 *
 * Rows of guessed tokens may have to be taken back, which a state cannot. So it is written as it is
 * before them, and what the layer read of them is kept beside it. The next step says how many were
 * right: these are walked once more, by the same arithmetic, before its own rows. */
#include <math.h>
#include <string.h>

#include "engine.h"

/* Channels of one item: as many as have room for their weights in a thread's scratch. */
static int run_channels(const mt_op *op) {
    const int most = MT_K_FLOATS * MT_TILE_ROWS / op->i[1];
    return most < 512 ? most : 512;
}

static int n_runs(const mt_engine *e, const mt_op *op) {
    return (e->buffers[op->out].width + run_channels(op) - 1) / run_channels(op);
}

/* The rows of a sequence: those to be walked once more, then `kept` ones, then guesses. */
typedef struct {
    int first, n_replays, n_kept, n_rows; /* n_rows: of the step */
} walk;

static walk walk_of(const mt_engine *e, int seq) {
    const int first = e->step->seq_start[seq], n_rows = e->step->seq_start[seq + 1] - first;
    return (walk){first, e->step->replays[seq], n_rows - e->step->guesses[seq], n_rows};
}

/* A sequence, and channels [first, stop) of its rows. */
typedef struct {
    walk rows;
    int first, stop;
    float *state, *guesses;
} channel_run;

static channel_run run_of(const mt_engine *e, const mt_op *op, int item, int32_t layer) {
    const int width = e->buffers[op->out].width, seq = item / n_runs(e, op);
    const int channels = run_channels(op), first = item % n_runs(e, op) * channels;
    return (channel_run){.rows = walk_of(e, seq),
                         .first = first,
                         .stop = width - first < channels ? width : first + channels,
                         .state = mt_state_of(e, seq, layer),
                         .guesses = mt_guesses_of(e, seq, layer)};
}

/* -- gate -------------------------------------------------------------------------------------- */

static void run_gate(mt_engine *e, const mt_op *op, int r, mt_scratch *s) {
    const mt_buffer *out = &e->buffers[op->out];
    const float *x = mt_row_f32(e, op->in[0], r) + op->i[0];
    const float *gate = mt_row_f32(e, op->in[1], r) + op->i[1];
    float *to = out->kind == MT_BUF_F32 ? mt_row_f32(e, op->out, r) : s->row;
    for (int at = 0; at < out->width; at += op->i[2], gate += op->i[3])
        e->kernels->glu(gate, x + at, op->i[2], op->i[4], to + at);
    if (to == s->row) mt_store_blocks(e, op, r, 0, to, out->width, MT_BLOCK_BYTES);
}

const mt_phase mt_gate_phase = {mt_count_rows, run_gate};

/* -- convolution ------------------------------------------------------------------------------- */

static int count_conv(const mt_engine *e, const mt_op *op) {
    return e->step->n_seqs * n_runs(e, op);
}

/* Row `at` of the sequence's rows in this step; before them are right guesses, and before those the
 * rows of the state, oldest first. */
static const float *seen_row(const mt_engine *e, const mt_op *op, const channel_run *c, int at) {
    const int width = e->buffers[op->out].width, guess = c->rows.n_replays + at;
    if (at >= 0) return mt_row_f32(e, op->in[0], c->rows.first + at) + op->i[0];
    if (guess >= 0) return c->guesses + (size_t)guess * (size_t)width;
    return c->state + (size_t)(op->i[1] - 1 + guess) * (size_t)width;
}

static void run_conv(mt_engine *e, const mt_op *op, int item, mt_scratch *s) {
    const channel_run c = run_of(e, op, item, op->i[3]);
    const int taps = op->i[1], width = e->buffers[op->out].width, n = c.stop - c.first;
    const size_t n_bytes = (size_t)n * sizeof(float);
    const float *kernel = e->weights[op->w[0]].values;
    const float *bias = op->w[1] >= 0 ? e->weights[op->w[1]].values : NULL;
    float *sum = s->row;
    float *by_tap = s->wide; /* (taps, n): the channels' weights for a tap side by side */
    for (int j = 0; j < taps; j++)
        for (int i = 0; i < n; i++) by_tap[j * n + i] = kernel[(c.first + i) * taps + j];
    if (e->step->positions[c.rows.first] == 0)
        for (int j = 0; j < taps - 1; j++)
            memset(c.state + (size_t)j * (size_t)width + c.first, 0, n_bytes);
    for (int r = 0; r < c.rows.n_rows; r++) {
        if (bias)
            memcpy(sum, bias + c.first, n_bytes);
        else
            memset(sum, 0, n_bytes);
        for (int j = 0; j < taps; j++) {
            const float *x = seen_row(e, op, &c, r - taps + 1 + j) + c.first;
            for (int i = 0; i < n; i++) sum[i] += by_tap[j * n + i] * x[i];
        }
        float *to = mt_row_f32(e, op->out, c.rows.first + r) + c.first;
        e->kernels->glu(sum, NULL, n, op->i[2], to);
    }
    for (int j = 0; j < taps - 1;
         j++) /* ascending: what is read lies at or behind what is written */
        memmove(c.state + (size_t)j * (size_t)width + c.first,
                seen_row(e, op, &c, c.rows.n_kept - taps + 1 + j) + c.first, n_bytes);
    for (int r = c.rows.n_kept; r < c.rows.n_rows; r++)
        memcpy(c.guesses + (size_t)(r - c.rows.n_kept) * (size_t)width + c.first,
               seen_row(e, op, &c, r) + c.first, n_bytes);
}

const mt_phase mt_conv_phase = {count_conv, run_conv};

/* -- recurrences: gated delta rule, Mamba-2 scan ----------------------------------------------- */

enum {
    VALUES = 32 /* columns of a head's state that one item takes: 16 KB of 128 keys, of an L1 */
};

/* log(1 + exp(x)), which is x where exp(x) alone counts. */
static float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/* Value columns [first, first + n) of one head of one sequence. */
typedef struct {
    int seq, head, first, n;
} head_run;

static int runs_of_head(int head_dim) { return (head_dim + VALUES - 1) / VALUES; }

static head_run head_run_of(int item, int heads, int head_dim) {
    const int runs = runs_of_head(head_dim), first = item % runs * VALUES;
    return (head_run){.seq = item / runs / heads,
                      .head = item / runs % heads,
                      .first = first,
                      .n = head_dim - first < VALUES ? head_dim - first : VALUES};
}

/* The part of a head's state that an item works on: where it lies, or a copy. */
typedef struct {
    float *kept, *values; /* rows of `width` and of `stride` floats */
    int keys, width, stride, n;
} head_state;

static void copy_state(const head_state *s, const float *from, int from_stride, float *to,
                       int to_stride) {
    for (int k = 0; k < s->keys; k++)
        memcpy(to + (size_t)k * (size_t)to_stride, from + (size_t)k * (size_t)from_stride,
               (size_t)s->n * sizeof(float));
}

/* Zeros before the sequence's first row. Where guesses follow a copy, which goes on with them when
 * the state is written. For many rows a copy as well: where the state lies its rows are a power of
 * two apart, and would fight for the same cache lines. */
static head_state begin_state(const mt_engine *e, const head_run *h, int32_t layer, int keys,
                              int width, mt_scratch *scratch) {
    const walk rows = walk_of(e, h->seq);
    const int is_new = e->step->positions[rows.first] == 0, has_guesses = rows.n_kept < rows.n_rows;
    float *kept = mt_state_of(e, h->seq, layer) + (size_t)h->head * (size_t)keys * (size_t)width;
    head_state s = {.kept = kept + h->first, .keys = keys, .width = width, .n = h->n};
    const int is_long = keys <= MT_K_FLOATS && rows.n_replays + rows.n_rows > 4;
    const int is_copied = has_guesses || is_long;
    s.values = is_copied ? scratch->wide : s.kept;
    s.stride = is_copied ? VALUES : width;
    for (int k = 0; k < keys && is_new; k++)
        memset(s.values + (size_t)k * (size_t)s.stride, 0, (size_t)h->n * sizeof(float));
    if (is_copied && !is_new) copy_state(&s, s.kept, width, s.values, VALUES);
    return s;
}

static void end_state(const head_state *s) {
    if (s->values != s->kept) copy_state(s, s->values, s->stride, s->kept, s->width);
}

/* What a recurrence reads of a row of a sequence: of the step, or before it of a right guess. */
typedef struct {
    const float *x, *rates;
} row_inputs;

/* Rates are the last inputs of a row: of a delta rule all that its second buffer has, of a scan a
 * column for each head. */
static int first_rate(const mt_op *op) { return op->kind == MT_OP_SCAN ? op->i[4] : 0; }

static int n_rates(const mt_op *op) { return op->kind == MT_OP_SCAN ? op->i[0] : 2 * op->i[1]; }

static row_inputs inputs_of(const mt_engine *e, const mt_op *op, int seq, int layer, int r) {
    const walk rows = walk_of(e, seq);
    if (r >= 0)
        return (row_inputs){mt_row_f32(e, op->in[0], rows.first + r),
                            mt_row_f32(e, op->in[1], rows.first + r) + first_rate(op)};
    const size_t width = (size_t)e->buffers[op->in[0]].width;
    const size_t at = (size_t)(rows.n_replays + r) * (width + (size_t)n_rates(op));
    const float *x = mt_guesses_of(e, seq, layer) + at;
    return (row_inputs){x, x + width};
}

static int count_guesses(const mt_engine *e, const mt_op *op) {
    (void)op;
    for (int seq = 0; seq < e->step->n_seqs; seq++)
        if (e->step->guesses[seq]) return e->step->n_rows;
    return 0;
}

/* Once every head has read the guesses of the last step: row `item` of this one, if it is a guess. */
static void keep_inputs(mt_engine *e, const mt_op *op, int item, int layer) {
    const int seq = e->row_seq[item];
    const walk rows = walk_of(e, seq);
    const int guess = item - rows.first - rows.n_kept;
    if (guess < 0) return;
    const row_inputs in = inputs_of(e, op, seq, layer, item - rows.first);
    const size_t width = (size_t)e->buffers[op->in[0]].width, rates = (size_t)n_rates(op);
    float *to = mt_guesses_of(e, seq, layer) + (size_t)guess * (width + rates);
    memcpy(to, in.x, width * sizeof(float));
    memcpy(to + width, in.rates, rates * sizeof(float));
}

static void keep_delta(mt_engine *e, const mt_op *op, int item, mt_scratch *s) {
    (void)s;
    keep_inputs(e, op, item, op->i[4]);
}

static void keep_scan(mt_engine *e, const mt_op *op, int item, mt_scratch *s) {
    (void)s;
    keep_inputs(e, op, item, op->i[5]);
}

static int count_delta(const mt_engine *e, const mt_op *op) {
    return e->step->n_seqs * op->i[1] * runs_of_head(op->i[2]);
}

/* x / sqrt(sum of squares + 1e-6) * scale, from the norm that takes the mean of squares. */
static void unit(const mt_engine *e, const float *x, int d, float scale, float *to) {
    const mt_norm how = {.group = d, .eps = 1e-6f / (float)d};
    e->kernels->norm(x, d, &how, to);
    for (int i = 0; i < d; i++) to[i] *= scale;
}

static void run_delta(mt_engine *e, const mt_op *op, int item, mt_scratch *s) {
    const int k_heads = op->i[0], v_heads = op->i[1], d = op->i[2];
    const head_run h = head_run_of(item, v_heads, d);
    const int from = op->i[3] ? h.head / (v_heads / k_heads) : h.head % k_heads;
    const float a = ((const float *)e->weights[op->w[0]].values)[h.head];
    const float dt_bias = ((const float *)e->weights[op->w[1]].values)[h.head];
    const float root = 1.0f / sqrtf((float)d);
    const head_state state = begin_state(e, &h, op->i[4], d, d, s);
    const int at = h.head * d + h.first;
    float *q = s->row, *k = q + d, *unread = k + d;
    const walk rows = walk_of(e, h.seq);
    for (int r = -rows.n_replays; r < rows.n_rows; r++) {
        if (r == rows.n_kept) end_state(&state);
        const row_inputs in = inputs_of(e, op, h.seq, op->i[4], r);
        const float rate = 1.0f / (1.0f + expf(-in.rates[h.head]));
        const float decay = expf(a * softplus(in.rates[v_heads + h.head] + dt_bias));
        unit(e, in.x + from * d, d, root * root, q);
        unit(e, in.x + (k_heads + from) * d, d, root, k);
        e->kernels->recur(state.values, d, state.stride, decay, rate, 1, k, q,
                          in.x + 2 * k_heads * d + at, h.n,
                          r < 0 ? unread : mt_row_f32(e, op->out, rows.first + r) + at);
    }
    if (rows.n_kept == rows.n_rows) end_state(&state);
}

const mt_phase mt_delta_phases[MT_PHASES] = {{count_delta, run_delta}, {count_guesses, keep_delta}};

static int count_scan(const mt_engine *e, const mt_op *op) {
    return e->step->n_seqs * op->i[0] * runs_of_head(op->i[1]);
}

static void run_scan(mt_engine *e, const mt_op *op, int item, mt_scratch *s) {
    const int heads = op->i[0], d = op->i[1], groups = op->i[2], keys = op->i[3];
    const head_run h = head_run_of(item, heads, d);
    const int at = h.head * d + h.first, from = h.head / (heads / groups) * keys;
    const float a = ((const float *)e->weights[op->w[0]].values)[h.head];
    const float dt_bias = ((const float *)e->weights[op->w[1]].values)[h.head];
    const float skip = ((const float *)e->weights[op->w[2]].values)[h.head];
    const head_state state = begin_state(e, &h, op->i[5], keys, d, s);
    const walk rows = walk_of(e, h.seq);
    for (int r = -rows.n_replays; r < rows.n_rows; r++) {
        if (r == rows.n_kept) end_state(&state);
        const row_inputs in = inputs_of(e, op, h.seq, op->i[5], r);
        const float *x = in.x, *b = x + heads * d + from;
        const float dt = softplus(in.rates[h.head] + dt_bias);
        float *out = r < 0 ? s->row : mt_row_f32(e, op->out, rows.first + r) + at;
        e->kernels->recur(state.values, keys, state.stride, expf(dt * a), dt, 0, b,
                          b + groups * keys, x + at, h.n, out);
        for (int i = 0; i < h.n; i++) out[i] += skip * x[at + i];
    }
    if (rows.n_kept == rows.n_rows) end_state(&state);
}

const mt_phase mt_scan_phases[MT_PHASES] = {{count_scan, run_scan}, {count_guesses, keep_scan}};
