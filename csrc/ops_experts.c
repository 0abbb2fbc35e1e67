/* Mixture of experts: which experts a row chooses, and the products of rows with their experts.
 *
 * A step's pairs of row and expert are sorted by expert, then by row: buffers with a row per pair
 * have that order, so the rows of an expert lie behind each other, and its weights are read once.
 * The results of a row are added in ascending order of experts, whoever else is in the step. */
#include <math.h>
#include <string.h>

#include "products.h"

/* -- router ------------------------------------------------------------------------------------ */

/* The best of n values that is not yet taken, the first among equals. Values that are NaN compare as
 * smaller than none, so there always is one. */
static int best_of(const float *values, const uint8_t *taken, int n) {
    int best = -1;
    for (int i = 0; i < n; i++)
        if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
    return best;
}

static void softmax(float *x, int n) {
    float most = x[0], sum = 0;
    for (int i = 1; i < n; i++)
        if (x[i] > most) most = x[i];
    for (int i = 0; i < n; i++) sum += x[i] = expf(x[i] - most);
    for (int i = 0; i < n; i++) x[i] /= sum;
}

/* Marks the experts of all groups but the best `used` as taken. A group is worth as much as its two
 * best experts together. */
static void drop_groups(const float *scores, int n, int groups, int used, uint8_t *taken) {
    const int size = n / groups;
    float worth[MT_MAX_EXPERTS];
    uint8_t is_kept[MT_MAX_EXPERTS] = {0};
    for (int g = 0; g < groups; g++) {
        uint8_t seen[MT_MAX_EXPERTS] = {0};
        const float *of_group = scores + g * size;
        const int first = best_of(of_group, seen, size);
        seen[first] = 1;
        const int second = size > 1 ? best_of(of_group, seen, size) : -1;
        worth[g] = of_group[first] + (second < 0 ? 0 : of_group[second]);
    }
    for (int i = 0; i < used; i++) is_kept[best_of(worth, is_kept, groups)] = 1;
    for (int i = 0; i < n; i++) taken[i] = !is_kept[i / size];
}

static void run_router(mt_engine *e, const mt_op *op, int r, mt_scratch *s) {
    (void)s;
    const int n = e->buffers[op->in[0]].width, gating = op->i[0], used = op->i[1];
    const float *bias = op->w[0] >= 0 ? e->weights[op->w[0]].values : NULL;
    float p[MT_MAX_EXPERTS], scores[MT_MAX_EXPERTS], chosen[MT_MAX_USED], sum = 0;
    uint8_t taken[MT_MAX_EXPERTS] = {0}, is_chosen[MT_MAX_EXPERTS] = {0};
    memcpy(p, mt_row_f32(e, op->in[0], r), (size_t)n * sizeof *p);
    if (gating == MT_GATING_SOFTMAX) softmax(p, n);
    for (int i = 0; i < n && gating == MT_GATING_SIGMOID; i++) p[i] = 1 / (1 + expf(-p[i]));
    for (int i = 0; i < n; i++) scores[i] = bias ? p[i] + bias[i] : p[i];
    if (op->i[2] > 1) drop_groups(scores, n, op->i[2], op->i[3], taken);
    for (int i = 0; i < used; i++) {
        const int best = best_of(scores, taken, n);
        taken[best] = is_chosen[best] = 1;
    }
    float *ids = mt_row_f32(e, op->out, r), *weights = ids + used;
    for (int i = 0, at = 0; i < n; i++) {
        if (!is_chosen[i]) continue;
        ids[at] = (float)i;
        chosen[at++] = p[i];
    }
    if (gating == MT_GATING_CHOSEN) softmax(chosen, used);
    for (int i = 0; i < used; i++) sum += chosen[i];
    for (int i = 0; i < used; i++)
        weights[i] = (op->i[4] ? chosen[i] / (sum + 1e-20f) : chosen[i]) * op->f[0];
    const float *shares = op->w[1] >= 0 ? e->weights[op->w[1]].values : NULL;
    for (int i = 0; shares && i < used; i++) weights[i] *= shares[(int)ids[i]];
}

const mt_phase mt_router_phase = {mt_count_rows, run_router};

/* -- the pairs of a step ----------------------------------------------------------------------- */

/* Once for expert_glu and the expert_sum right behind it, which have the same pairs. */
static int count_sort(const mt_engine *e, const mt_op *op) {
    if (op->kind != MT_OP_EXPERT_SUM || op == e->ops) return 1;
    const mt_op *before = op - 1;
    return before->kind != MT_OP_EXPERT_GLU || before->in[2] != op->in[2] ||
           before->i[0] != op->i[0] || before->i[1] != op->i[1];
}

/* An expert's number, whatever the buffer holds: a plan might have written something else there. */
static int expert_of(float id, int n_experts) {
    return id >= 0 && id < (float)n_experts ? (int)id : 0;
}

/* Counting sort of (row, expert), and which experts have rows: those with the most come first, so
 * that no thread begins a long item when the others have finished. */
static void run_sort(mt_engine *e, const mt_op *op, int item, mt_scratch *s) {
    (void)item, (void)s;
    mt_pairs *p = &e->pairs;
    const int n_experts = op->i[0], used = op->i[1], n_rows = e->step->n_rows;
    memset(p->start, 0, ((size_t)n_experts + 1) * sizeof *p->start);
    for (int r = 0; r < n_rows; r++)
        for (int i = 0; i < used; i++)
            p->start[expert_of(mt_row_f32(e, op->in[2], r)[i], n_experts) + 1]++;
    p->n_active = 0;
    for (int x = 0; x < n_experts; x++) {
        const int n = p->start[x + 1];
        p->start[x + 1] += p->start[x];
        if (!n) continue;
        int at = p->n_active++;
        for (; at > 0 && n > p->start[p->active[at - 1] + 1] - p->start[p->active[at - 1]]; at--)
            p->active[at] = p->active[at - 1];
        p->active[at] = x;
    }
    for (int r = 0; r < n_rows; r++) {
        const float *ids = mt_row_f32(e, op->in[2], r);
        for (int i = 0; i < used; i++) {
            const int to = p->start[expert_of(ids[i], n_experts)]++;
            p->row[to] = r;
            p->weight[to] = ids[used + i];
        }
    }
    for (int x = n_experts; x > 0; x--) p->start[x] = p->start[x - 1];
    p->start[0] = 0;
}

/* The rows of `in` that pairs [first, first + n) need, behind each other. */
static mt_operand gathered(mt_engine *e, const mt_op *op, int first, int n, mt_scratch *s) {
    const mt_buffer *in = &e->buffers[op->in[0]];
    const size_t row_bytes = (size_t)in->row_bytes;
    const int32_t *rows = e->pairs.row + first;
    mt_operand x = {.stride = row_bytes, .kind = in->kind, .n = n};
    const uint8_t *planes[2] = {NULL, NULL};
    for (int p = 0; p < mt_planes(op); p++) {
        uint8_t *to = s->gathered + (size_t)(p * n) * row_bytes;
        planes[p] = n == 1 ? mt_row(e, op->in[p], rows[0]) : to;
        for (int i = 0; i < n && n > 1; i++)
            memcpy(to + (size_t)i * row_bytes, mt_row(e, op->in[p], rows[i]), row_bytes);
    }
    x.x = planes[0], x.rest = planes[1];
    return x;
}

/* -- expert_glu: an item is a run of tiles of one expert, for all its rows --------------------- */

/* Runs that each expert's tiles are cut into: whoever reads a row's activations uses them for as
 * many tiles as there are, if enough items are left for all threads. */
static int runs_of_expert(const mt_engine *e, int n_tiles) {
    const int runs = (16 * e->n_threads + e->pairs.n_active - 1) / e->pairs.n_active;
    return runs < n_tiles ? runs : n_tiles;
}

static int count_expert_glu(const mt_engine *e, const mt_op *op) {
    return e->pairs.n_active * runs_of_expert(e, e->buffers[op->out].width / MT_TILE_ROWS);
}

static void run_expert_glu(mt_engine *e, const mt_op *op, int item, mt_scratch *s) {
    const int n_tiles = e->buffers[op->out].width / MT_TILE_ROWS;
    const int is_fused = op->w[1] < 0 && e->weights[op->w[0]].n_tiles > (int64_t)op->i[0] * n_tiles;
    const int is_alone = op->w[1] < 0 && !is_fused;
    const int runs = runs_of_expert(e, n_tiles), run = item % runs, planes = mt_planes(op);
    const int expert = e->pairs.active[item / runs];
    const int64_t tiles = (int64_t)expert * n_tiles; /* before those of this expert */
    const mt_weight *gate = &e->weights[op->w[0]],
                    *up = op->w[1] < 0 ? gate : &e->weights[op->w[1]];
    const float *gate_bias = op->w[2] >= 0 ? e->weights[op->w[2]].values : NULL;
    const float *up_bias = op->w[3] >= 0 ? e->weights[op->w[3]].values : NULL;
    const int stop = e->pairs.start[expert + 1], fits = MT_COL_CHUNK / (2 * planes);
    for (int first = e->pairs.start[expert], n; first < stop; first += n) {
        n = stop - first < fits ? stop - first : fits;
        const mt_operand x = gathered(e, op, first, n, s);
        float *gates = s->acc, *ups = is_alone ? NULL : s->acc + n * planes * MT_TILE_ROWS;
        for (int t = n_tiles * run / runs; t < n_tiles * (run + 1) / runs; t++) {
            const int64_t at = is_fused ? 2 * tiles + t : tiles + t;
            mt_multiply_tile(e, gate, at, &x, s, gates);
            if (ups) mt_multiply_tile(e, up, is_fused ? at + n_tiles : at, &x, s, ups);
            const float *const bias[2] = {gate_bias ? gate_bias + (tiles + t) * MT_TILE_ROWS : NULL,
                                          up_bias ? up_bias + (tiles + t) * MT_TILE_ROWS : NULL};
            mt_glu_tile(e, op, op->i[2], bias, MT_TILE_ROWS, first, n, t, gates, ups);
        }
    }
}

const mt_phase mt_expert_glu_phases[MT_PHASES] = {{count_sort, run_sort},
                                                  {count_expert_glu, run_expert_glu}};

/* -- expert_sum: an item is a run of columns of the output, for all rows and experts ------------ */

/* Every item reads the activations of all pairs, so long runs use them while they are near; but the
 * sums of all rows have to stay near, too. */
static mt_work sum_work(const mt_engine *e, const mt_op *op) {
    mt_work w = {.chunks = 1, .n_tiles = e->buffers[op->out].width / MT_TILE_ROWS};
    mt_set_runs(e, &w);
    const int near = MT_SUM_VALUES / (e->step->n_rows * MT_TILE_ROWS);
    const int most = w.n_tiles / (4 * e->n_threads), run = near < most ? near : most;
    if (run > w.run) w.run = run;
    if (w.run * e->step->n_rows * MT_TILE_ROWS > MT_SUM_VALUES) w.run = near > 1 ? near : 1;
    w.runs = w.n_tiles * 3 / 4 / w.run;
    return w;
}

static int count_expert_sum(const mt_engine *e, const mt_op *op) {
    const mt_work w = sum_work(e, op);
    return mt_items_of_chunk(&w);
}

static void add_weighted(float weight, const float *x, int n, float *out) {
    for (int i = 0; i < n; i++) out[i] += weight * x[i];
}

/* Pairs [first, first + n), which are all of one expert: one tile of their results goes to sums,
 * `stride` floats from row to row. */
static void add_pairs(mt_engine *e, const mt_op *op, int expert, int first, int n, int tile,
                      mt_scratch *s, float *sums, int stride) {
    const mt_buffer *in = &e->buffers[op->in[0]];
    const int planes = mt_planes(op);
    const int64_t at = (int64_t)expert * (e->buffers[op->out].width / MT_TILE_ROWS) + tile;
    const mt_operand x = {.x = mt_row(e, op->in[0], first),
                          .rest = planes == 2 ? mt_row(e, op->in[1], first) : NULL,
                          .stride = (size_t)in->row_bytes,
                          .kind = in->kind,
                          .n = n};
    const float *bias = op->w[1] >= 0 ? e->weights[op->w[1]].values : NULL;
    mt_multiply_tile(e, &e->weights[op->w[0]], at, &x, s, s->acc);
    if (planes == 2 || bias)
        mt_emit_tile(e, bias ? bias + at * MT_TILE_ROWS : NULL, MT_TILE_ROWS, n, planes, s->acc, 0,
                     MT_TILE_ROWS, s->acc);
    for (int i = 0; i < n; i++)
        add_weighted(e->pairs.weight[first + i], s->acc + i * MT_TILE_ROWS, MT_TILE_ROWS,
                     sums + (size_t)e->pairs.row[first + i] * (size_t)stride);
}

/* The sums grow in memory of the thread's own: rows of the output lie far apart and fight for the
 * same cache lines, and every row comes as often as it has experts. */
static void run_expert_sum(mt_engine *e, const mt_op *op, int item, mt_scratch *s) {
    const mt_work work = sum_work(e, op);
    const int fits = MT_COL_CHUNK / mt_planes(op), n_rows = e->step->n_rows;
    int begin, end;
    mt_tiles_of(&work, item, &begin, &end);
    const int width = (end - begin) * MT_TILE_ROWS;
    memset(s->sums, 0, (size_t)n_rows * (size_t)width * sizeof(float));
    for (int x = 0; x < op->i[0]; x++) {
        const int stop = e->pairs.start[x + 1];
        for (int first = e->pairs.start[x], n; first < stop; first += n) {
            n = stop - first < fits ? stop - first : fits;
            for (int tile = begin; tile < end; tile++)
                add_pairs(e, op, x, first, n, tile, s, s->sums + (tile - begin) * MT_TILE_ROWS,
                          width);
        }
    }
    for (int r = 0; r < n_rows; r++) {
        float *out = mt_row_f32(e, op->out, r) + begin * MT_TILE_ROWS;
        const float *sums = s->sums + (size_t)r * (size_t)width;
        if (op->flags & MT_FLAG_ACCUMULATE)
            e->kernels->add(sums, width, out);
        else
            memcpy(out, sums, (size_t)width * sizeof(float));
    }
}

const mt_phase mt_expert_sum_phases[MT_PHASES] = {{count_sort, run_sort},
                                                  {count_expert_sum, run_expert_sum}};
