/* Ops of recurrent layers. A sequence's rows are walked in order, so the state behind a row is the
 * same however its prompt was cut; work items are runs of channels, which know nothing of each other.
 *
 * The state of a sequence in all layers is one stretch of floats in its slot. Before position 0 it is
 * zeros, whatever the slot holds. */
#include <string.h>

#include "engine.h"

enum { CHANNELS = 512 /* of one item */ };

static int n_runs(const mt_engine *e, const mt_op *op) {
    return (e->buffers[op->out].width + CHANNELS - 1) / CHANNELS;
}

/* The rows of a sequence, and channels [first, stop). */
typedef struct {
    int seq, row, n_rows, first, stop;
    float *state;
} channel_run;

static channel_run run_of(const mt_engine *e, const mt_op *op, int item, int32_t layer) {
    const int width = e->buffers[op->out].width, seq = item / n_runs(e, op);
    const int first = item % n_runs(e, op) * CHANNELS, row = e->step->seq_start[seq];
    return (channel_run){.seq = seq,
                         .row = row,
                         .n_rows = e->step->seq_start[seq + 1] - row,
                         .first = first,
                         .stop = width - first < CHANNELS ? width : first + CHANNELS,
                         .state = mt_state_of(e, seq, layer)};
}

/* -- gate -------------------------------------------------------------------------------------- */

static int count_gate(const mt_engine *e, const mt_op *op) {
    return mt_rows_of(e, &e->buffers[op->out]);
}

static void run_gate(mt_engine *e, const mt_op *op, int r, mt_scratch *s) {
    const mt_buffer *out = &e->buffers[op->out];
    const float *x = mt_row_f32(e, op->in[0], r) + op->i[0];
    const float *gate = mt_row_f32(e, op->in[1], r) + op->i[1];
    float *to = out->kind == MT_BUF_F32 ? mt_row_f32(e, op->out, r) : s->row;
    for (int at = 0; at < out->width; at += op->i[2], gate += op->i[3])
        e->kernels->glu(gate, x + at, op->i[2], op->i[4], to + at);
    if (to == s->row) mt_store_blocks(e, op, r, 0, to, out->width, MT_BLOCK_BYTES);
}

const mt_phase mt_gate_phase = {count_gate, run_gate};

/* -- convolution ------------------------------------------------------------------------------- */

static int count_conv(const mt_engine *e, const mt_op *op) {
    return e->step->n_seqs * n_runs(e, op);
}

/* Row `at` of the sequence's rows in this step; rows before them are in the state, oldest first. */
static const float *seen_row(const mt_engine *e, const mt_op *op, const channel_run *c, int at) {
    const int before = op->i[1] - 1, width = e->buffers[op->out].width;
    return at < 0 ? c->state + (size_t)(before + at) * (size_t)width
                  : mt_row_f32(e, op->in[0], c->row + at) + op->i[0];
}

static void run_conv(mt_engine *e, const mt_op *op, int item, mt_scratch *s) {
    const channel_run c = run_of(e, op, item, op->i[3]);
    const int taps = op->i[1], width = e->buffers[op->out].width, n = c.stop - c.first;
    const size_t n_bytes = (size_t)n * sizeof(float);
    const float *kernel = e->weights[op->w[0]].values;
    const float *bias = op->w[1] >= 0 ? e->weights[op->w[1]].values : NULL;
    float *sum = s->row, ones[CHANNELS];
    for (int i = 0; i < n; i++) ones[i] = 1.0f;
    if (e->step->positions[c.row] == 0)
        for (int j = 0; j < taps - 1; j++)
            memset(c.state + (size_t)j * (size_t)width + c.first, 0, n_bytes);
    for (int r = 0; r < c.n_rows; r++) {
        if (bias)
            memcpy(sum, bias + c.first, n_bytes);
        else
            memset(sum, 0, n_bytes);
        for (int j = 0; j < taps; j++) {
            const float *x = seen_row(e, op, &c, r - taps + 1 + j) + c.first;
            for (int i = 0; i < n; i++) sum[i] += kernel[(c.first + i) * taps + j] * x[i];
        }
        float *to = mt_row_f32(e, op->out, c.row + r) + c.first;
        e->kernels->glu(sum, ones, n, op->i[2], to);
    }
    for (int j = 0; j < taps - 1;
         j++) /* ascending: what is read lies at or behind what is written */
        memmove(c.state + (size_t)j * (size_t)width + c.first,
                seen_row(e, op, &c, c.n_rows - taps + 1 + j) + c.first, n_bytes);
}

const mt_phase mt_conv_phase = {count_conv, run_conv};
