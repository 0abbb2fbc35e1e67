/* Attention of a group of query vectors over one split of cached positions.
 *
 * A row's arithmetic depends on its own visible range alone: scores are sums over head_dim in
 * ascending order, one lane a position; maxima and sums reduce over 16-lane groups in order;
 * values are added position by position. A position that a row does not see weighs exactly 0, and
 * adding 0 * value changes no sum: so a tile of rows may skip what none of them sees, and compute
 * what only some of them see. */

/* The split as `n` rows see it; positions are absolute. */
typedef struct {
    const mt_kv_view *kv;
    const mt_attn_rows *rows;
    int32_t start;                                          /* of the split */
    int32_t begin[MT_ATTN_MAX_ROWS], end[MT_ATTN_MAX_ROWS]; /* empty: begin >= end */
    float *scores;                                          /* [row][MT_SPLIT], then weights */
    float *wide;                                            /* [MT_ATTN_BLOCK][MT_ATTN_BLOCK] */
} split_view;

typedef struct {
    int32_t low, high; /* positions that any row sees, empty: low >= high */
} seen;

static seen seen_by(const split_view *s, int first, int n) {
    seen all = {INT32_MAX, 0};
    for (int r = first; r < first + n; r++) {
        if (s->begin[r] >= s->end[r]) continue;
        if (s->begin[r] < all.low) all.low = s->begin[r];
        if (s->end[r] > all.high) all.high = s->end[r];
    }
    return all;
}

static inline int32_t at_most(int32_t a, int32_t b) { return a < b ? a : b; }
static inline int32_t at_least(int32_t a, int32_t b) { return a > b ? a : b; }
static inline int32_t down16(int32_t a) { return a / 16 * 16; }
static inline int32_t up16(int32_t a) { return (a + 15) / 16 * 16; }

/* -- few rows: keys and values are read as they lie in the cache ------------------------------- */

/* Meanwhile the keys of 64 positions on are fetched, at the end the first values. */
static void direct_scores(const split_view *s, seen all) {
    const mt_kv_view *kv = s->kv;
    const int32_t first = down16(all.low), stop = up16(all.high);
    attn_tile t = {.a = s->rows->q,
                   .a_stride = (size_t)kv->head_dim,
                   .w_stride = 16,
                   .count = kv->head_dim,
                   .is_first = 1,
                   .out_stride = MT_SPLIT};
    for (int32_t at = first, vecs; at < stop; at += 16 * vecs) {
        vecs = tile_vecs((stop - at) / 16);
        for (int v = 0; v < vecs; v++) {
            const int32_t position = at + 16 * v, next = position + MT_ATTN_BLOCK;
            t.w[v] = keys_at(kv, position);
            t.scales[v] = key_scales_at(kv, position);
            t.ahead[v] = next < stop ? keys_at(kv, next)
                                     : values_at(kv, at_most(first + next - stop, stop - 16));
        }
        t.out = s->scores + (at - s->start);
        cache_tiles[kv->type](s->rows->n, vecs, &t);
    }
}

static void direct_values(const split_view *s, seen all, float *o) {
    const mt_kv_view *kv = s->kv;
    attn_tile t = {.a_stride = MT_SPLIT,
                   .w_stride = (size_t)kv->v_stride,
                   .scale_stride = (size_t)mt_kv_scales(kv->value_dim),
                   .out_stride = (size_t)kv->v_stride};
    const int kind = kv->type == MT_KV_Q8_0 ? TILE_Q8_VALUES : kv->type;
    for (int32_t at = all.low, run; at < all.high; at += run) { /* runs within a block */
        run = at_most(kv->block_tokens - at % kv->block_tokens, all.high - at);
        const uint8_t *values = values_at(kv, at);
        const uint8_t *ahead = values_at(kv, at_most(at + MT_ATTN_BLOCK, down16(all.high - 1)));
        const uint16_t *scales = value_scales_at(kv, at);
        t.a = s->scores + (at - s->start);
        t.count = run;
        t.is_first = at == all.low;
        for (int d = 0, vecs; d < kv->v_stride; d += 16 * vecs) {
            vecs = tile_vecs((kv->v_stride - d) / 16);
            for (int v = 0; v < vecs; v++) {
                const size_t from = (size_t)(d + 16 * v) * mt_kv_width(kv->type);
                t.w[v] = values + from;
                t.ahead[v] = ahead + from;
                t.scales[v] = scales + (d + 16 * v) / 32;
            }
            t.out = o + d;
            cache_tiles[kind](s->rows->n, vecs, &t);
        }
    }
}

/* -- many rows: a block of keys or values is made floats once, for all of them ----------------- */

static void wide_scores(const split_view *s, seen all) {
    const mt_kv_view *kv = s->kv;
    const int n_rows = s->rows->n, dim = kv->head_dim;
    const int32_t stop = up16(all.high);
    for (int32_t at = down16(all.low); at < stop; at += MT_ATTN_BLOCK)
        for (int d = 0; d < dim; d += MT_ATTN_BLOCK) {
            const int32_t end = at_most(at + MT_ATTN_BLOCK, stop);
            const int count = at_most(dim - d, MT_ATTN_BLOCK);
            widen_keys(kv, at, stop, (end - at) / 16, d, count, s->wide);
            for (int r = 0; r < n_rows; r += ATTN_ROWS) {
                const int n = at_most(n_rows - r, ATTN_ROWS);
                const seen mine = seen_by(s, r, n);
                const int32_t from = at_least(down16(mine.low), at);
                const int32_t to = at_most(up16(mine.high), end);
                attn_tile t = {.a = s->rows->q + (size_t)r * (size_t)dim + d,
                               .a_stride = (size_t)dim,
                               .count = count,
                               .is_first = d == 0,
                               .out = s->scores + (size_t)r * MT_SPLIT + (from - s->start),
                               .out_stride = MT_SPLIT};
                if (from < to) wide_tiles(&t, n, s->wide + (from - at), (to - from) / 16);
            }
        }
}

static void wide_values(const split_view *s, seen all, float *o) {
    const mt_kv_view *kv = s->kv;
    const int n_rows = s->rows->n, dim = kv->v_stride;
    const int32_t first = kv->is_latent ? down16(all.low) : all.low;
    for (int32_t at = first; at < all.high; at += MT_ATTN_BLOCK)
        for (int d = 0; d < dim; d += MT_ATTN_BLOCK) {
            const int32_t end = at_most(at + MT_ATTN_BLOCK, all.high);
            const int vecs = at_most(dim - d, MT_ATTN_BLOCK) / 16;
            (kv->is_latent ? widen_latent : widen_values)(kv, at, end, all.high - 1, d, vecs,
                                                          s->wide);
            for (int r = 0; r < n_rows; r += ATTN_ROWS) {
                const int n = at_most(n_rows - r, ATTN_ROWS);
                const seen mine = seen_by(s, r, n);
                const int32_t from = at_least(mine.low, at), to = at_most(mine.high, end);
                attn_tile t = {.a = s->scores + (size_t)r * MT_SPLIT + (from - s->start),
                               .a_stride = MT_SPLIT,
                               .count = to - from,
                               .is_first = from == mine.low,
                               .out = o + (size_t)r * (size_t)dim + d,
                               .out_stride = (size_t)dim};
                if (from < to) wide_tiles(&t, n, s->wide + (from - at) * MT_ATTN_BLOCK, vecs);
            }
        }
}

/* -- weights ----------------------------------------------------------------------------------- */

/* vf_exp without its upper limit: scores less their maximum are not above 0. */
static inline vf exp_below(vf x) {
    const vf low = vf_set1(-87.0f);
    const vf a = vf_max(x, low);
    const vi n = vf_round_i32(vf_mul(a, vf_set1(1.44269504f)));
    const vf nf = vf_from_i32(n);
    vf r = vf_fma(nf, vf_set1(-0.693145752f), a);
    r = vf_fma(nf, vf_set1(-1.42860677e-6f), r);
    vf p = vf_set1(1.0f / 5040);
    p = vf_fma(p, r, vf_set1(1.0f / 720));
    p = vf_fma(p, r, vf_set1(1.0f / 120));
    p = vf_fma(p, r, vf_set1(1.0f / 24));
    p = vf_fma(p, r, vf_set1(1.0f / 6));
    p = vf_fma(p, r, vf_set1(0.5f));
    p = vf_fma(p, r, vf_set1(1.0f));
    p = vf_fma(p, r, vf_set1(1.0f));
    return vf_select_lt(x, low, vf_set1(0.0f), vf_scale2(p, n));
}

/* Scales, and where asked for caps, the scores of a row that sees [begin, end), counted from s, and returns their maximum;
 * what it does not see of its first and last 16 becomes -infinity. */
static inline float scale_row(float *s, int32_t begin, int32_t end, vf scale, float cap) {
    static const float lanes[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vf never = vf_set1(-INFINITY), lane = vf_load(lanes);
    vf top = never;
    for (int32_t t = down16(begin); t < end; t += 16) {
        vf x = vf_mul(vf_load(s + t), scale);
        if (cap > 0.0f) x = soft_cap(x, cap);
        if (t < begin) x = vf_select_lt(lane, vf_set1((float)(begin - t)), never, x);
        if (t + 16 > end) x = vf_select_lt(lane, vf_set1((float)(end - t)), x, never);
        vf_store(s + t, x);
        top = vf_max(x, top);
    }
    return vf_hmax(top);
}

/* exp(score - most) of [first, stop), and their sum. */
static inline float weigh_row(float *s, int32_t first, int32_t stop, vf most) {
    vf sum = vf_set1(0.0f);
    for (int32_t t = first; t < stop; t += 16) {
        const vf p = exp_below(vf_sub(vf_load(s + t), most));
        vf_store(s + t, p);
        sum = vf_add(sum, p);
    }
    return vf_hsum(sum);
}

/* Scores become weights for the rows of one tile; 0 where a row does not see what others see. Row
 * after row in two passes: the end of one row's chain of sums then hides behind the next row. */
static void weigh_tile(const split_view *s, int first, int n, float *m, float *l) {
    const seen tile = seen_by(s, first, n);
    if (tile.low >= tile.high) return;
    const vf scale = vf_set1(s->rows->scale);
    for (int r = first; r < first + n; r++)
        if (s->begin[r] < s->end[r])
            m[r] = scale_row(s->scores + (size_t)r * MT_SPLIT, s->begin[r] - s->start,
                             s->end[r] - s->start, scale, s->rows->cap);
    const int32_t low = down16(tile.low) - s->start, high = up16(tile.high) - s->start;
    for (int r = first; r < first + n; r++) {
        float *row = s->scores + (size_t)r * MT_SPLIT;
        const int is_seen = s->begin[r] < s->end[r];
        const int32_t from = is_seen ? down16(s->begin[r]) - s->start : high;
        const int32_t to = is_seen ? up16(s->end[r]) - s->start : high;
        if (is_seen) l[r] = weigh_row(row, from, to, vf_set1(m[r]));
        for (int32_t t = low; t < from; t += 16) vf_store(row + t, vf_set1(0.0f));
        for (int32_t t = to; t < high; t += 16) vf_store(row + t, vf_set1(0.0f));
    }
}

static void attend_split(const mt_kv_view *kv, const mt_attn_rows *rows, int32_t split, float *m,
                         float *l, float *o, float *scratch) {
    split_view s = {.kv = kv,
                    .rows = rows,
                    .start = split * MT_SPLIT,
                    .scores = scratch,
                    .wide = scratch + (size_t)MT_ATTN_MAX_ROWS * MT_SPLIT};
    for (int r = 0; r < rows->n; r++) {
        s.begin[r] = at_least(rows->begin[r], s.start);
        s.end[r] = at_most(rows->end[r], s.start + MT_SPLIT);
        m[r] = -INFINITY;
        l[r] = 0.0f;
    }
    const seen all = seen_by(&s, 0, rows->n);
    const int is_wide = rows->n > ATTN_ROWS || kv->is_latent; /* which mixes as it turns around */
    if (all.low >= all.high) return;
    if (is_wide)
        wide_scores(&s, all);
    else
        direct_scores(&s, all);
    for (int r = 0; r < rows->n; r += ATTN_ROWS)
        weigh_tile(&s, r, at_most(rows->n - r, ATTN_ROWS), m, l);
    if (is_wide)
        wide_values(&s, all, o);
    else
        direct_values(&s, all, o);
}

/* Rows in lanes: the two weights of each row, then its values. */
static void attend_merge(int n_rows, const float *m, const float *l, const float *o, int stride,
                         float *big_m, float *big_l, float *big_o) {
    for (int first = 0; first < n_rows; first += 16) {
        const int n = at_most(n_rows - first, 16);
        const vf now = load_part(m + first, n), before = load_part(big_m + first, n);
        const vf top = vf_max(before, now);
        float old[16], new[16];
        vf_store(old, vf_exp(vf_sub(before, top)));
        vf_store(new, vf_exp(vf_sub(now, top)));
        for (int i = 0; i < n; i++) {
            const int r = first + i;
            if (l[r] == 0.0f) continue;
            const float *from = o + (size_t)r * (size_t)stride;
            float *to = big_o + (size_t)r * (size_t)stride;
            const vf w_old = vf_set1(old[i]), w_new = vf_set1(new[i]);
            for (int d = 0; d < stride; d += 16)
                vf_store(to + d, vf_fma(vf_load(from + d), w_new, vf_mul(vf_load(to + d), w_old)));
            big_l[r] = fmaf(l[r], new[i], big_l[r] * old[i]);
            big_m[r] = big_m[r] > m[r] ? big_m[r] : m[r];
        }
    }
}

static void attend_finish(const float *o, float l, int n, float *out) {
    const vf inverse = vf_set1(1.0f / l);
    for (int i = 0; i < n; i += 16)
        store_part(out + i, vf_mul(load_part(o + i, 16), inverse), n - i);
}
