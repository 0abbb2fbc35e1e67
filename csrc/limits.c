/* What this machine can do at best, measured: the yardstick that benchmarks print beside their
 * figures. Owns threads and buffers of its own; knows no model and no engine. */
#define _GNU_SOURCE /* clock_gettime, MADV_NOHUGEPAGE */
#include "limits.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine.h"
#include "memory.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

enum {
    ROUNDS = 1024,     /* of a multiply loop between two looks at the clock: microseconds */
    PIECE = 256 << 10, /* bytes read between two looks at the clock */
    AHEAD = 4096,      /* bytes from a read to its prefetch */
    MAX_THREADS = 1024
};

typedef struct {
    _Alignas(64) double rate; /* a cache line each: threads write at the same time */
    union {
        uint64_t words;
        int32_t i;
        float f;
    } sink; /* where results go, so that they are computed */
} thread_result;

struct mt_limits {
    const mt_limit_loops *loops;
    mt_pool *pool;
    thread_result *results;
    uint8_t *huge, *small; /* buffers in 2 MB and in 4 KB pages */
    size_t n_bytes;        /* of each */
    int n_threads;

    /* the measurement being taken */
    int32_t kind;
    uint8_t *buffer;
    int64_t span_bytes; /* of each thread */
    atomic_int n_ready;
    double seconds;
};

static const struct {
    const char *isa;
    const mt_limit_loops *loops;
} loops_by_isa[] = {
    {"scalar", &mt_limit_loops_scalar},
#if defined(__x86_64__)
    {"sse41", &mt_limit_loops_sse41},     {"avx2", &mt_limit_loops_avx2},
    {"avxvnni", &mt_limit_loops_avxvnni}, {"avx512", &mt_limit_loops_avx512},
    {"amx", &mt_limit_loops_amx},
#elif defined(__aarch64__)
    {"neon", &mt_limit_loops_neon},
    {"dotprod", &mt_limit_loops_dotprod},
    {"i8mm", &mt_limit_loops_i8mm},
#endif
};

static const mt_limit_loops *find_loops(int32_t isa) {
    for (size_t i = 0; i < sizeof loops_by_isa / sizeof loops_by_isa[0]; i++)
        if (!strcmp(loops_by_isa[i].isa, mt_isa_name(isa))) return loops_by_isa[i].loops;
    return NULL;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Pages of 4 KB even where the system would give large ones unasked. */
static uint8_t *small_alloc(size_t n_bytes) {
#if defined(__linux__)
    void *p = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    madvise(p, n_bytes, MADV_NOHUGEPAGE);
    return p;
#else
    return mt_big_alloc(n_bytes);
#endif
}

static void small_free(uint8_t *p, size_t n_bytes) {
#if defined(__linux__)
    if (p) munmap(p, n_bytes);
#else
    mt_big_free(p, n_bytes);
#endif
}

/* Every page is written once, by the thread that will read it: unwritten ones are all the same. */
static void touch(void *raw, int thread) {
    mt_limits *l = raw;
    memset(l->buffer + thread * l->span_bytes, 1, (size_t)l->span_bytes);
}

/* Wide enough for the compiler's baseline vectors, in ascending order as weights are read. */
static int64_t read_bytes(const uint8_t *p, int64_t n_bytes, uint64_t *sink) {
    const uint64_t *words = (const uint64_t *)(const void *)p;
    uint64_t seen[16] = {0};
    for (int64_t at = 0; at < n_bytes / 8; at += 16) {
        /* Hardware prefetchers stop at the end of a 4 KB page; this reaches over it. */
        __builtin_prefetch(words + at + AHEAD / 8);
        __builtin_prefetch(words + at + AHEAD / 8 + 8);
        for (int i = 0; i < 16; i++) seen[i] |= words[at + i];
    }
    for (int i = 0; i < 16; i++) *sink |= seen[i];
    return n_bytes;
}

static int64_t do_some(const mt_limits *l, int thread, int64_t *at) {
    static const int32_t ints[MT_LIMIT_OPERANDS] = {1};
    static const float floats[MT_LIMIT_OPERANDS] = {0};
    thread_result *result = &l->results[thread];
    if (l->kind == MT_LIMIT_INT8) return l->loops->multiply_int8(ROUNDS, ints, &result->sink.i);
    if (l->kind == MT_LIMIT_F32) return l->loops->multiply_f32(ROUNDS, floats, &result->sink.f);
    if (*at >= l->span_bytes) *at = 0;
    const int64_t left = l->span_bytes - *at, n = left < PIECE ? left : PIECE;
    const uint8_t *p = l->buffer + thread * l->span_bytes + *at;
    *at += n;
    return read_bytes(p, n, &result->sink.words);
}

static void measure(void *raw, int thread) {
    mt_limits *l = raw;
    int64_t at = 0, done = 0;
    double elapsed;
    /* All at once: threads share the memory, and sometimes a core. */
    atomic_fetch_add(&l->n_ready, 1);
    while (atomic_load(&l->n_ready) < l->n_threads) sched_yield();
    const double start = now();
    do {
        done += do_some(l, thread, &at);
        elapsed = now() - start;
    } while (elapsed < l->seconds);
    l->results[thread].rate = (double)done / elapsed;
}

double mt_limits_measure(mt_limits *l, int32_t kind, int64_t span_bytes, double seconds) {
    const int64_t whole = (int64_t)(l->n_bytes / (size_t)l->n_threads) / PIECE * PIECE;
    const int64_t wanted = (span_bytes / l->n_threads + PIECE - 1) / PIECE * PIECE;
    l->kind = kind;
    l->buffer = kind == MT_LIMIT_READ_SMALL_PAGES ? l->small : l->huge;
    l->span_bytes = wanted > 0 && wanted < whole ? wanted : whole;
    l->seconds = seconds;
    atomic_store(&l->n_ready, 0);
    mt_pool_run(l->pool, measure, l);
    double sum = 0;
    for (int t = 0; t < l->n_threads; t++) sum += l->results[t].rate;
    return sum;
}

void mt_limits_free(mt_limits *l) {
    if (!l) return;
    mt_pool_free(l->pool);
    mt_big_free(l->huge, l->n_bytes);
    small_free(l->small, l->n_bytes);
    mt_line_free(l->results);
    free(l);
}

static int prepare(mt_limits *l, int32_t n_threads) {
    l->n_threads = n_threads;
    l->results = mt_line_alloc((size_t)n_threads * sizeof *l->results);
    if (!l->results) return -1;
    memset(l->results, 0, (size_t)n_threads * sizeof *l->results);
    l->pool = mt_pool_create(n_threads);
    l->huge = mt_big_alloc(l->n_bytes);
    l->small = small_alloc(l->n_bytes);
    if (!l->pool || !l->huge || !l->small) return -1;
    l->span_bytes = (int64_t)l->n_bytes / n_threads;
    l->buffer = l->huge;
    mt_pool_run(l->pool, touch, l);
    l->buffer = l->small;
    mt_pool_run(l->pool, touch, l);
    return 0;
}

mt_limits *mt_limits_create(int32_t isa, int32_t n_threads, int64_t buffer_bytes, char *err) {
    isa = isa < 0 ? mt_isa_best() : isa;
    const mt_limit_loops *loops = mt_isa_supported(isa) ? find_loops(isa) : NULL;
    if (!loops) {
        mt_fail(err, "this machine cannot run ISA %d, its best is %s", isa,
                mt_isa_name(mt_isa_best()));
        return NULL;
    }
    if (n_threads < 1 || n_threads > MAX_THREADS || buffer_bytes < (int64_t)n_threads * PIECE) {
        mt_fail(err, "%d threads and %lld bytes: expected 1 to %d threads, %d bytes for each",
                n_threads, (long long)buffer_bytes, MAX_THREADS, PIECE);
        return NULL;
    }
    mt_limits *l = calloc(1, sizeof *l);
    if (l) {
        l->loops = loops;
        l->n_bytes = (size_t)buffer_bytes;
    }
    if (!l || prepare(l, n_threads)) {
        mt_fail(err, "no memory for two buffers of %lld bytes and %d threads",
                (long long)buffer_bytes, n_threads);
        mt_limits_free(l);
        return NULL;
    }
    return l;
}
