/* Draws one token from a row of logits: what runtime/sampling.py does with NumPy, in one call.
 *
 * No sort: values in 0 ... 1 are ordered as their 30 bits are, so the edge of a nucleus is found in
 * three rounds of 1024 sums. All sums are doubles in one fixed order. */
#include "cpu.h"
#include "martlet.h"

#include <math.h>
#include <string.h>

enum { KEYS = 1024, GROUP = 16, WORD = 32 };

typedef struct {
    const float *weights;
    int32_t *ids; /* (n) ascending: whose weights count */
    int64_t n;
} candidates;

static int32_t n_runs_of(int32_t n) { return (n + MT_WEIGHT_RUN - 1) / MT_WEIGHT_RUN; }

int64_t mt_draw_bytes(int32_t n) {
    return (int64_t)n_runs_of(n) * 8 + (int64_t)n * (int64_t)(sizeof(float) + sizeof(int32_t));
}

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static int32_t run_end(int32_t start, int32_t n) {
    return n - start < MT_WEIGHT_RUN ? n : start + MT_WEIGHT_RUN;
}

/* Without a branch, as bits: a mask that is hard to foretell would cost five times the time. */
static void keep_word(uint32_t word, float *kept) {
    static const uint32_t lane[WORD] = {
        1u << 0,  1u << 1,  1u << 2,  1u << 3,  1u << 4,  1u << 5,  1u << 6,  1u << 7,
        1u << 8,  1u << 9,  1u << 10, 1u << 11, 1u << 12, 1u << 13, 1u << 14, 1u << 15,
        1u << 16, 1u << 17, 1u << 18, 1u << 19, 1u << 20, 1u << 21, 1u << 22, 1u << 23,
        1u << 24, 1u << 25, 1u << 26, 1u << 27, 1u << 28, 1u << 29, 1u << 30, 1u << 31};
    const uint32_t removed = bits_of(-INFINITY);
    uint32_t bits[WORD];
    memcpy(bits, kept, sizeof bits);
    for (int i = 0; i < WORD; i++) {
        const uint32_t gone = word & lane[i] ? 0u : ~0u;
        bits[i] = (bits[i] & ~gone) | (removed & gone);
    }
    memcpy(kept, bits, sizeof bits);
}

/* A run of logits with -INFINITY where a token may not be: in kept, of
 * MT_WEIGHT_RUN values, unless all may. NULL: none may. */
static const float *left_of(const float *logits, int32_t n, const uint32_t *allowed, float *kept) {
    uint32_t any = 0, gone = 0;
    for (int32_t at = 0; at < n; at += WORD) {
        const uint32_t inside = n - at < WORD ? (1u << (n - at)) - 1 : ~0u;
        any |= allowed[at / WORD] & inside;
        gone |= ~allowed[at / WORD] & inside;
    }
    if (!any) return NULL;
    if (!gone) return logits;
    memcpy(kept, logits, (size_t)n * sizeof *kept);
    for (int32_t at = 0; at < n; at += WORD) keep_word(allowed[at / WORD], kept + at);
    return kept;
}

static int64_t best_of(const float *x, int32_t n, float least) {
    float best[GROUP];
    int32_t i = 0;
    for (int k = 0; k < GROUP; k++) best[k] = least;
    for (; i + GROUP <= n; i += GROUP)
        for (int k = 0; k < GROUP; k++) best[k] = x[i + k] > best[k] ? x[i + k] : best[k];
    for (; i < n; i++) best[0] = x[i] > best[0] ? x[i] : best[0];
    for (int k = 1; k < GROUP; k++) best[0] = best[k] > best[0] ? best[k] : best[0];
    if (!(best[0] > least)) return -1;
    for (i = 0; x[i] != best[0];) i++;
    return i;
}

int64_t mt_mask(const float *logits, int32_t n, const uint32_t *allowed, float *out) {
    float kept[MT_WEIGHT_RUN] = {0}, best = -INFINITY;
    int64_t best_id = -1;
    for (int32_t start = 0; start < n; start += MT_WEIGHT_RUN) {
        const int32_t count = run_end(start, n) - start;
        const float *left = left_of(logits + start, count, allowed + start / WORD, kept);
        if (out)
            for (int32_t i = 0; i < count; i++) out[start + i] = left ? left[i] : -INFINITY;
        const int64_t place = left ? best_of(left, count, best) : -1;
        if (place < 0) continue;
        best = left[place];
        best_id = start + place;
    }
    return best_id;
}

/* All weights, and their sums by runs: 0 of what may not be. */
static void weigh(const mt_kernels *kernels, const float *logits, int32_t n,
                  const mt_draw_terms *terms, float *weights, double *sums) {
    const float best = terms->best, temperature = terms->temperature;
    if (!terms->allowed) {
        kernels->weigh(logits, n, best, temperature, weights, sums);
        return;
    }
    float kept[MT_WEIGHT_RUN] = {0};
    for (int32_t run = 0, start = 0; start < n; run++, start += MT_WEIGHT_RUN) {
        const int32_t count = run_end(start, n) - start;
        const uint32_t *allowed = terms->allowed + start / WORD;
        const float *left = left_of(logits + start, count, allowed, kept);
        if (left) {
            kernels->weigh(left, count, best, temperature, weights + start, sums + run);
        } else {
            memset(weights + start, 0, (size_t)count * sizeof *weights);
            sums[run] = 0.0;
        }
    }
}

/* Weights are ordered as their bits are, and differences of bits fill whole vectors. */
static int any_from(const float *w, int32_t bound) {
    int32_t bits[GROUP], any = 0;
    memcpy(bits, w, sizeof bits);
    for (int i = 0; i < GROUP; i++) any |= bound - 1 - bits[i];
    return any < 0;
}

/* Those of at least `bound`. A run whose sum is below it has none, as no weight is negative. */
static candidates from_bound(const float *w, int32_t n, const double *sums, float bound,
                             int32_t *ids) {
    int64_t m = 0;
    const int32_t bits = (int32_t)bits_of(bound);
    for (int32_t run = 0; run < n_runs_of(n); run++) {
        const int32_t end = run_end(run * MT_WEIGHT_RUN, n);
        if (sums[run] < bound) continue;
        for (int32_t i = run * MT_WEIGHT_RUN; i < end; i += GROUP) {
            if (i + GROUP <= end && !any_from(w + i, bits)) continue;
            for (int32_t k = i; k < i + GROUP && k < end; k++) {
                ids[m] = k;
                m += w[k] >= bound;
            }
        }
    }
    return (candidates){w, ids, m};
}

/* The least of the fewest best values that sum to `needed`; how many equal to it belong. */
static float edge_of(candidates c, double needed, int64_t *n_equal) {
    double masses[KEYS], above = 0.0;
    uint32_t prefix = 0;
    for (int shift = 20; shift >= 0; shift -= 10) {
        memset(masses, 0, sizeof masses);
        for (int64_t i = 0; i < c.n; i++) {
            const float w = c.weights[c.ids[i]];
            const uint32_t bits = bits_of(w);
            if (bits >> (shift + 10) == prefix) masses[(bits >> shift) & (KEYS - 1)] += w;
        }
        /* Rounding may leave the last sum short of what is needed: then the least value it is. */
        int key = KEYS - 1, least = key;
        double mass = above;
        for (; key >= 0; key--) {
            if (masses[key] > 0.0) least = key;
            if (mass + masses[key] >= needed) break;
            mass += masses[key];
        }
        if (key < 0) mass -= masses[key = least];
        above = mass;
        prefix = prefix << 10 | (uint32_t)key;
    }
    float edge;
    memcpy(&edge, &prefix, sizeof edge);
    const double missing = (needed - above) / edge;
    *n_equal = missing > 1.0 ? (int64_t)missing + (missing > (double)(int64_t)missing) : 1;
    return edge;
}

/* Drops what lies below the edge, and equals of it beyond the first n_equal. */
static candidates above_edge(candidates c, float edge, int64_t n_equal) {
    int64_t m = 0;
    for (int64_t i = 0; i < c.n; i++) {
        const int32_t id = c.ids[i];
        const int is_equal = c.weights[id] == edge;
        c.ids[m] = id;
        m += (c.weights[id] > edge) | (is_equal & (n_equal > 0));
        n_equal -= is_equal;
    }
    c.n = m;
    return c;
}

static double mass_of(candidates c) {
    double mass = 0.0;
    for (int64_t i = 0; i < c.n; i++) mass += c.weights[c.ids[i]];
    return mass;
}

static int64_t among(candidates c, double uniform) {
    const double total = mass_of(c);
    double share = 0.0;
    for (int64_t i = 0; i < c.n; i++) {
        share += c.weights[c.ids[i]];
        if (share > uniform * total) return c.ids[i];
    }
    return c.n ? c.ids[c.n - 1] : -1;
}

/* Among all: the run that holds the share, then the place inside it. */
static int64_t among_all(const float *w, int32_t n, const double *sums, double total,
                         double uniform) {
    const double target = uniform * total;
    int32_t run = 0, last = 0;
    double share = 0.0;
    for (; run < n_runs_of(n); run++) {
        if (sums[run] > 0.0) last = run;
        if (share + sums[run] > target) break;
        share += sums[run];
    }
    if (run == n_runs_of(n)) share -= sums[run = last];
    int64_t place = -1;
    for (int32_t i = run * MT_WEIGHT_RUN; i < n && i < (run + 1) * MT_WEIGHT_RUN; i++) {
        share += w[i];
        if (w[i] > 0.0f) place = i;
        if (share > target) break;
    }
    return place;
}

int64_t mt_draw(int32_t isa, const float *logits, int32_t n, const mt_draw_terms *terms,
                void *scratch) {
    const mt_kernels *kernels = mt_isa_kernels(isa);
    if (!kernels || n < 1) return -1;
    double *sums = scratch;
    float *weights = (float *)(sums + n_runs_of(n));
    int32_t *ids = (int32_t *)(weights + n);
    weigh(kernels, logits, n, terms, weights, sums);
    double total = 0.0;
    for (int32_t run = 0; run < n_runs_of(n); run++) total += sums[run];
    const float min_p = (float)terms->min_p;
    if (terms->top_p >= 1.0 && min_p == 0.0f)
        return among_all(weights, n, sums, total, terms->uniform);
    if (terms->top_p >= 1.0) return among(from_bound(weights, n, sums, min_p, ids), terms->uniform);
    /* top_p 0 asks for one token as well */
    const double needed = terms->top_p > 0.0 ? terms->top_p * total : 1e-300;
    /* All that are lighter than this hold less than 1 - top_p together, so the others suffice.
     * Mostly far fewer hold enough. */
    const double bound = (1.0 - terms->top_p) * total / n * (1.0 - 1e-6);
    candidates kept = from_bound(weights, n, sums, (float)(16.0 * bound), ids);
    if (mass_of(kept) < needed) kept = from_bound(weights, n, sums, (float)bound, ids);
    int64_t n_equal;
    const float edge = edge_of(kept, needed, &n_equal);
    if (edge < min_p) return among(from_bound(weights, n, sums, min_p, ids), terms->uniform);
    return among(above_edge(kept, edge, n_equal), terms->uniform);
}
