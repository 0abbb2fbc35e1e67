/* Refuses steps that would leave their arrays or the engine's memory, with the numbers. Lengths of
 * the arrays themselves are the caller's word. */
#include "engine.h"

/* Blocks of a sequence from position `first` to `last`. */
static int32_t check_table(const mt_engine *e, const mt_step *s, const int32_t *table,
                           const char *name, int32_t seq, int32_t first, int32_t last, int32_t n,
                           char *err) {
    for (int32_t b = first / e->block_tokens; b <= last / e->block_tokens; b++) {
        const int32_t id = table[(int64_t)seq * s->table_width + b];
        if (id < 0 || id >= n)
            return mt_fail(err, "%s %d of sequence %d is %d, the pool has %d", name, b, seq, id, n);
    }
    return 0;
}

static int32_t check_rows(const mt_engine *e, const mt_step *s, int32_t seq, char *err) {
    /* a table may name a block twice, but scratch is sized for the positions of the pool */
    const int64_t width = s->table_width < e->n_blocks ? s->table_width : e->n_blocks;
    const int64_t reach = width * e->block_tokens;
    const int has_segments = e->n_embedded[MT_BY_SEGMENT] < INT64_MAX;
    for (int32_t r = s->seq_start[seq]; r < s->seq_start[seq + 1]; r++) {
        if (s->tokens[r] < 0 || s->tokens[r] >= e->n_embedded[MT_BY_TOKEN])
            return mt_fail(err, "token %d of row %d is outside the vocabulary of %lld",
                           s->tokens[r], r, (long long)e->n_embedded[MT_BY_TOKEN]);
        if (s->positions[r] < 0 || s->positions[r] >= reach)
            return mt_fail(err, "position %d of row %d is outside its block table of %lld slots",
                           s->positions[r], r, (long long)reach);
        if (s->positions[r] >= e->n_embedded[MT_BY_POSITION])
            return mt_fail(err, "position %d of row %d is outside the table of %lld positions",
                           s->positions[r], r, (long long)e->n_embedded[MT_BY_POSITION]);
        if (has_segments && (s->segments[r] < 0 || s->segments[r] >= e->n_embedded[MT_BY_SEGMENT]))
            return mt_fail(err, "segment %d of row %d is outside the table of %lld segments",
                           s->segments[r], r, (long long)e->n_embedded[MT_BY_SEGMENT]);
        if (r > s->seq_start[seq] && s->positions[r] != s->positions[r - 1] + 1)
            return mt_fail(err, "rows %d and %d of one sequence are not neighbours", r - 1, r);
    }
    const int32_t first = s->positions[s->seq_start[seq]];
    const int32_t last = s->positions[s->seq_start[seq + 1] - 1];
    if (check_table(e, s, s->block_table, "block", seq, 0, last, e->n_blocks, err)) return -1;
    if (!e->window) return 0;
    return check_table(e, s, s->window_table, "window block", seq,
                       first >= e->window ? first - e->window + 1 : 0, last, e->n_window_blocks,
                       err);
}

/* Two sequences in one slot would write it side by side. */
static int32_t check_states(const mt_engine *e, const mt_step *s, char *err) {
    if (!e->n_states) return 0;
    if (!s->states || !s->guesses || !s->replays) return mt_fail(err, "the step has no states");
    for (int32_t i = 0; i < s->n_seqs; i++) {
        const int32_t first = s->seq_start[i], n_rows = s->seq_start[i + 1] - first;
        if (s->guesses[i] < 0 || s->guesses[i] > e->n_guesses || s->guesses[i] >= n_rows)
            return mt_fail(err, "%d of %d rows of sequence %d are guesses: at most %d, not all",
                           s->guesses[i], n_rows, i, e->n_guesses);
        if (s->replays[i] < 0 || s->replays[i] > e->n_guesses ||
            (s->replays[i] && s->replays[i] >= s->positions[first]))
            return mt_fail(err,
                           "%d guesses were right before position %d of sequence %d: at most %d",
                           s->replays[i], s->positions[first], i, e->n_guesses);
        if (s->states[i] < 0 || s->states[i] >= e->n_states)
            return mt_fail(err, "the state of sequence %d is %d, there are %d", i, s->states[i],
                           e->n_states);
        for (int32_t j = 0; j < i; j++)
            if (s->states[i] == s->states[j])
                return mt_fail(err, "sequences %d and %d share state %d", j, i, s->states[i]);
    }
    return 0;
}

int32_t mt_check_step(const mt_engine *e, const mt_step *s, char *err) {
    if (s->n_rows < 1 || s->n_rows > e->plan.max_rows || s->n_seqs < 1 || s->n_seqs > s->n_rows ||
        s->n_out < 0 || s->n_out > s->n_rows || s->table_width < 1 || (s->n_out && !s->logits))
        return mt_fail(err, "step of %d rows, %d sequences, %d outputs; at most %d rows fit",
                       s->n_rows, s->n_seqs, s->n_out, e->plan.max_rows);
    if (!s->tokens || !s->positions || !s->seq_start || !s->block_table ||
        (s->n_out && !s->out_rows))
        return mt_fail(err, "the step has no rows");
    if (s->n_out && !e->has_logits)
        return mt_fail(err, "%d rows of logits are wanted, the plan has none", s->n_out);
    if (e->n_embedded[MT_BY_SEGMENT] < INT64_MAX && !s->segments)
        return mt_fail(err, "the step has no segments");
    if (e->window && !s->window_table) return mt_fail(err, "the step has no window table");
    if (s->seq_start[0] != 0 || s->seq_start[s->n_seqs] != s->n_rows)
        return mt_fail(err, "sequences cover rows %d to %d of %d", s->seq_start[0],
                       s->seq_start[s->n_seqs], s->n_rows);
    for (int32_t seq = 0; seq < s->n_seqs; seq++) {
        if (s->seq_start[seq] < 0 || s->seq_start[seq + 1] > s->n_rows ||
            s->seq_start[seq] >= s->seq_start[seq + 1])
            return mt_fail(err, "sequence %d covers no rows", seq);
        if (check_rows(e, s, seq, err)) return -1;
    }
    if (check_states(e, s, err)) return -1;
    if (e->plan.n_adapters && !s->adapters) return mt_fail(err, "the step has no adapters");
    if (e->plan.given && !s->given)
        return mt_fail(err, "the step gives no rows, the plan takes %d values of each",
                       e->plan.given);
    if (s->n_hidden < 0 || s->n_hidden > s->n_rows ||
        (s->n_hidden && (!s->hidden || !s->hidden_rows || e->plan.hidden < 0)))
        return mt_fail(err, "%d hidden states of %d rows; the plan keeps them in buffer %d",
                       s->n_hidden, s->n_rows, e->plan.hidden);
    for (int32_t i = 0; i < s->n_hidden; i++)
        if (s->hidden_rows[i] < 0 || s->hidden_rows[i] >= s->n_rows)
            return mt_fail(err, "hidden state %d is of row %d of %d", i, s->hidden_rows[i],
                           s->n_rows);
    for (int32_t i = 0; i < s->n_out; i++)
        if (s->out_rows[i] < 0 || s->out_rows[i] >= s->n_rows)
            return mt_fail(err, "output %d wants row %d of %d", i, s->out_rows[i], s->n_rows);
    return 0;
}
