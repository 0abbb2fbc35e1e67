#define _POSIX_C_SOURCE 200809L /* clock_gettime */
/* Walks the ops of a step with all threads: deals the items of each phase out to them, so that cores of
 * any speed end together. Must not know what an item is. Results do not depend on who does which. */
#include <time.h>

#include "engine.h"
#include "float_mode.h"

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void idle(double ns) {
    const int64_t began = now_ns();
    while ((double)(now_ns() - began) < ns) continue;
}

/* Takes up to `run` of a share's n items: returns the first, or n if not `least` are left. A share
 * tells the phase it was last used in, so that nobody has to reset it: in a later phase all are there
 * again, in an earlier one, where this thread comes too late, none. */
static int take(atomic_ullong *share, unsigned phase, int n, int run, int least) {
    unsigned long long seen = atomic_load_explicit(share, memory_order_relaxed);
    for (;;) {
        const int behind = (int)(phase - (unsigned)(seen >> 32));
        const int first = behind > 0 ? 0 : (int)(unsigned)seen;
        if (behind < 0 || n - first < least) return n;
        const unsigned long long next =
            (unsigned long long)phase << 32 | (unsigned)(first + run < n ? first + run : n);
        if (atomic_compare_exchange_weak_explicit(share, &seen, next, memory_order_relaxed,
                                                  memory_order_relaxed))
            return first;
    }
}

/* Whether neighbouring items read neighbouring memory, so that a thread best takes what follows. */
static int is_stream(int32_t kind) {
    return kind == MT_OP_LINEAR || kind == MT_OP_LINEAR_GLU || kind == MT_OP_HEAD_LINEAR;
}

/* Sizes the shares of streams before a step, by what each thread did of them in the last one. None
 * becomes so small that its thread could not show that it has become faster. */
void mt_settle_shares(mt_engine *e) {
    const double least = 0.25 / e->n_threads;
    double all = 0, sum = 0;
    for (int32_t t = 0; t < e->n_threads; t++) all += e->shares[t].done;
    for (int32_t t = 0; t < e->n_threads; t++) {
        mt_share *s = &e->shares[t];
        if (all > 0) s->part = (s->part + s->done / all) / 2;
        if (s->part < least) s->part = least;
        s->done = 0;
        sum += s->part;
    }
    double begin = 0;
    for (int32_t t = 0; t < e->n_threads; t++) {
        e->shares[t].part /= sum;
        e->shares[t].begin = begin;
        begin += e->shares[t].part;
    }
}

/* The first of a phase's items in a thread's share, or behind the last. */
static int share_begin(const mt_engine *e, int share, int n_items) {
    if (share == e->n_threads) return n_items;
    const int begin = (int)(e->shares[share].begin * n_items + 0.5);
    return begin < n_items ? begin : n_items;
}

/* Items that must be left in a share for another thread to take one of them: it would have to be done
 * no later than its owner would be done with all. */
static int least_left(const mt_engine *e, int share, int thread) {
    const double slower = e->shares[share].part / e->shares[thread].part;
    return slower > 1.25 ? (int)(slower + 0.999) : 1;
}

/* Does items of a phase until none is left, small runs so that a slow core takes fewer. Whoever
 * reports the last item lets everyone go on. */
static void run_phase(mt_engine *e, const mt_op *op, const mt_phase *phase, unsigned serial,
                      int n_items, int thread) {
    const int n_shares = is_stream(op->kind) ? e->n_threads : 1;
    const int run = n_shares > 1 ? 1 : n_items / (8 * e->n_threads) + 1;
    for (int i = 0; i < n_shares; i++) { /* one's own, then those of others */
        const int share = n_shares > 1 ? (thread + i) % n_shares : 0;
        const int start = n_shares > 1 ? share_begin(e, share, n_items) : 0;
        const int n = n_shares > 1 ? share_begin(e, share + 1, n_items) - start : n_items;
        const int least = i ? least_left(e, share, thread) : 1;
        int n_done = 0;
        for (int first; (first = take(&e->shares[share].taken, serial, n, run, least)) < n;) {
            const int end = first + run < n ? first + run : n;
            const int64_t began = e->slowed ? now_ns() : 0;
            for (int item = first; item < end; item++)
                phase->run(e, op, start + item, &e->scratch[thread]);
            if (e->slowed) idle(e->slowed[thread] * (double)(now_ns() - began));
            n_done += end - first;
        }
        if (n_shares > 1 && n_items >= 4 * n_shares)
            e->shares[thread].done += (double)n_done / n_items;
        if (!n_done || atomic_fetch_add(&e->n_finished, n_done) + n_done < n_items) continue;
        atomic_store(&e->n_finished, 0); /* before anyone can begin the next phase */
        mt_gate_advance(&e->phases_done);
    }
}

void mt_walk(void *raw, int thread) {
    mt_engine *e = raw;
    const uint64_t saved = mt_flush_denormals();
    mt_op_span *spans = e->spans ? e->spans + (size_t)thread * (size_t)e->plan.n_ops : NULL;
    unsigned serial = e->first_phase;
    for (int32_t i = 0; i < e->plan.n_ops; i++) {
        if (spans) spans[i].start_ns = spans[i].end_ns = now_ns();
        for (int p = 0; p < MT_PHASES; p++) {
            const mt_phase *phase = mt_phase_of(e->ops[i].kind, p);
            const int n_items = phase ? phase->count(e, &e->ops[i]) : 0;
            if (!n_items) continue;
            run_phase(e, &e->ops[i], phase, ++serial, n_items, thread);
            if (spans) spans[i].end_ns = now_ns();
            mt_gate_wait(&e->phases_done, serial, MT_SPIN_US);
        }
    }
    mt_restore_float_mode(saved);
}
