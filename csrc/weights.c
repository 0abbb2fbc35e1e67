/* Places every weight in one huge-page buffer, where all threads pack matrices, and those of experts in
 * one that is taken little by little where they are packed when first used. Matrices that stay in the
 * file are only looked at. Owns the order of tiles and which bad value is told; what a tile looks like
 * is pack.c. */
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "engine.h"
#include "memory.h"
#include "pack.h"

/* Tiles that a thread packs between two looks at the others, and before it gives back what it read:
 * that stops all threads for a moment. */
enum { PACK_RUN = 16 };

typedef struct {
    mt_engine *e;
    const mt_tensor *tensors;
    uint8_t *spare; /* (n_threads, spare_bytes): tiles that are looked at and not kept */
    size_t spare_bytes;
    atomic_llong next; /* tiles of all matrices, in order */
    atomic_llong bad;  /* the first one found to hold a bad value, or n_tiles */
    int64_t n_tiles;
} pack_job;

/* Tiles [first, stop) of tensor t. Returns the first that does not hold only finite values, and in
 * `bad` where; else stop. */
static int64_t pack_part(const pack_job *job, int32_t t, int64_t first, int64_t stop, int thread,
                         mt_bad_value *bad) {
    const mt_weight *w = &job->e->weights[t];
    const mt_tensor *from = &job->tensors[t];
    const size_t packed = w->packed ? mt_tile_bytes(w->layout, w->cols) : 0;
    uint8_t *to = w->packed ? w->packed : job->spare + (size_t)thread * job->spare_bytes;
    int64_t i = first;
    *bad = (mt_bad_value){.tensor = t};
    while (i < stop &&
           mt_pack_tile(w->layout, from, i, to + (size_t)i * packed, &bad->row, &bad->col))
        i++;
    const size_t tile = (size_t)(from->n_bytes / w->rows) * MT_TILE_ROWS;
    const size_t at = (size_t)first * tile, end = (size_t)stop * tile, all = (size_t)from->n_bytes;
    if (from->flags & MT_TENSOR_MAPPED)
        mt_drop_pages((const uint8_t *)from->data + at, (end < all ? end : all) - at);
    return i;
}

/* The same for tiles of all. */
static int64_t pack_some(const pack_job *job, int64_t first, int64_t stop, int thread,
                         mt_bad_value *bad) {
    int64_t start = 0; /* of tensor t */
    for (int32_t t = 0; first < stop; start += job->e->weights[t++].n_tiles) {
        const int64_t end = start + job->e->weights[t].n_tiles, here = end < stop ? end : stop;
        if (first >= end) continue;
        if (job->e->weights[t].is_packed) { /* when it is used */
            first = here;
            continue;
        }
        const int64_t reached = start + pack_part(job, t, first - start, here - start, thread, bad);
        if (reached < here) return reached;
        first = here;
    }
    return stop;
}

static void pack_tiles(void *raw, int thread) {
    pack_job *job = raw;
    mt_bad_value where;
    for (long long i; (i = atomic_fetch_add(&job->next, PACK_RUN)) < job->n_tiles;) {
        const int64_t stop = i + PACK_RUN < job->n_tiles ? i + PACK_RUN : job->n_tiles;
        const int64_t reached = pack_some(job, i, stop, thread, &where);
        if (reached == stop) continue;
        long long first = atomic_load(&job->bad);
        while (reached < first && !atomic_compare_exchange_weak(&job->bad, &first, reached))
            continue;
    }
}

static int32_t pack_matrices(pack_job *job, mt_bad_value *bad, char *err) {
    atomic_store(&job->bad, job->n_tiles);
    const size_t n_bytes = (size_t)job->e->n_threads * job->spare_bytes;
    job->spare = mt_big_alloc(n_bytes);
    if (!job->spare)
        return mt_fail(err, "no memory for %zu bytes of tiles; take fewer threads", n_bytes);
    mt_pool_run(job->e->pool, pack_tiles, job);
    const int64_t first = atomic_load(&job->bad);
    if (first < job->n_tiles) pack_some(job, first, first + 1, 0, bad); /* again, for the place */
    mt_big_free(job->spare, n_bytes);
    if (first == job->n_tiles) return 0;
    return mt_fail(err, "tensor %d is not finite at row %lld, column %lld", bad->tensor,
                   (long long)bad->row, (long long)bad->col);
}

/* Whether the tensor is packed when it is used: nothing but experts' products reads it, of which every
 * tile is one thread's at a time. */
static int is_late(const mt_plan *p, int32_t tensor) {
    if (!(p->tensors[tensor].flags & MT_TENSOR_LATE)) return 0;
    for (int32_t i = 0; i < p->n_ops; i++) {
        const mt_op *op = &p->ops[i];
        const size_t n_stacks = op->kind == MT_OP_EXPERT_GLU   ? 2
                                : op->kind == MT_OP_EXPERT_SUM ? 1
                                                               : 0;
        for (size_t k = n_stacks; k < sizeof op->w / sizeof op->w[0]; k++)
            if (op->w[k] == tensor) return 0;
    }
    return 1;
}

void mt_pack_late(mt_engine *e, const mt_weight *w, int64_t tile) {
#if defined(__x86_64__) /* as at load, where denormals are not flushed */
    const unsigned saved = _mm_getcsr();
    _mm_setcsr(saved & ~0x8040u);
#endif
    mt_bad_value bad = {.tensor = (int32_t)(w - e->weights)};
    uint8_t *out = w->packed + (size_t)tile * mt_tile_bytes(w->layout, w->cols);
    const int is_finite = mt_pack_tile(w->layout, &w->late, tile, out, &bad.row, &bad.col);
#if defined(__x86_64__)
    _mm_setcsr(saved);
#endif
    if (w->late.flags & MT_TENSOR_MAPPED) {
        const size_t n = (size_t)(w->late.n_bytes / w->rows) * MT_TILE_ROWS;
        const size_t at = (size_t)tile * n, all = (size_t)w->late.n_bytes;
        mt_drop_pages_around((const uint8_t *)w->late.data + at, at + n < all ? n : all - at);
    }
    if (is_finite)
        w->is_packed[tile] = 1;
    else if (atomic_fetch_add(&e->n_bad, 1) == 0)
        e->bad = bad;
}

void mt_free_weights(mt_engine *e) {
    if (!e->weights_are_lent) mt_big_free(e->weight_memory, e->weight_bytes - e->late_bytes);
    mt_sparse_free(e->late_memory, e->late_bytes);
    free(e->late_flags);
}

int32_t mt_load_weights(mt_engine *e, const mt_plan *p, mt_weight_room room, mt_bad_value *bad,
                        char *err) {
    pack_job job = {.e = e, .tensors = p->tensors};
    size_t n_bytes = 0, late_bytes = 0, late_tiles = 0;
    for (int32_t i = 0; i < p->n_tensors; i++) {
        const mt_tensor *t = &p->tensors[i];
        mt_weight *w = &e->weights[i];
        *w = (mt_weight){.format = t->format, .rows = t->rows, .cols = t->cols};
        const mt_layout *layout = mt_layout_of(t->format);
        if ((t->flags & MT_TENSOR_STAYS) && layout) {
            w->layout = layout;
            w->stored = *t;
        } else if ((t->flags & MT_TENSOR_RAW) && mt_is_matrix(p, i)) {
            w->layout = layout;
            w->stored = *t;
            w->n_tiles = (t->rows + MT_TILE_ROWS - 1) / MT_TILE_ROWS;
            const size_t tile = mt_aligned(mt_tile_bytes(layout, t->cols));
            if (tile > job.spare_bytes) job.spare_bytes = tile;
        } else if (mt_is_matrix(p, i)) {
            w->layout = layout;
            w->n_tiles = (t->rows + MT_TILE_ROWS - 1) / MT_TILE_ROWS;
            const size_t packed = (size_t)w->n_tiles * mt_tile_bytes(w->layout, w->cols);
            if (is_late(p, i)) {
                w->late = *t;
                mt_place(NULL, &late_bytes, packed);
                late_tiles += (size_t)w->n_tiles;
            } else {
                mt_place(NULL, &n_bytes, packed);
            }
        } else {
            mt_place(NULL, &n_bytes, (size_t)t->n_bytes);
        }
        job.n_tiles += w->n_tiles;
    }
    e->weight_bytes = n_bytes + late_bytes;
    e->late_bytes = late_bytes;
    e->weights_are_lent = room.bytes != NULL;
    if (room.bytes && (late_bytes || n_bytes != room.n_bytes))
        return mt_fail(err, "weights take %zu bytes, and %zu that are packed late; room is for %zu",
                       n_bytes, late_bytes, room.n_bytes);
    e->weight_memory = room.bytes ? room.bytes : mt_big_alloc(n_bytes);
    if (!e->weight_memory) return mt_fail(err, "no memory for %zu bytes of weights", n_bytes);
    if (late_bytes) {
        e->late_memory = mt_sparse_alloc(late_bytes);
        e->late_flags = calloc(late_tiles, 1);
        if (!e->late_memory || !e->late_flags)
            return mt_fail(err, "no room for %zu bytes of experts", late_bytes);
    }
    uint8_t *flags = e->late_flags;
    size_t at = 0, late = 0; /* bytes taken so far */
    for (int32_t i = 0; i < p->n_tensors; i++) {
        mt_weight *w = &e->weights[i];
        if (w->stored.data) continue;
        const size_t packed =
            w->layout ? (size_t)w->n_tiles * mt_tile_bytes(w->layout, w->cols) : 0;
        if (w->late.data) {
            w->packed = e->late_memory + mt_place(e->late_memory, &late, packed);
            w->is_packed = flags;
            flags += w->n_tiles;
        } else if (w->layout) {
            w->packed = e->weight_memory + mt_place(e->weight_memory, &at, packed);
        } else {
            const size_t n = (size_t)p->tensors[i].n_bytes;
            uint8_t *to = e->weight_memory + mt_place(e->weight_memory, &at, n);
            w->values = room.is_packed ? to : memcpy(to, p->tensors[i].data, n);
        }
    }
    if (!room.is_packed && pack_matrices(&job, bad, err)) return -1;
    for (int by = 0; by < MT_N_EMBED_BYS; by++) e->n_embedded[by] = INT64_MAX;
    for (int32_t i = 0; i < p->n_ops; i++) {
        if (e->ops[i].kind != MT_OP_EMBED) continue;
        int64_t *least = &e->n_embedded[e->ops[i].i[0]];
        const int64_t rows = e->weights[e->ops[i].w[0]].rows;
        if (rows < *least) *least = rows;
    }
    return 0;
}
