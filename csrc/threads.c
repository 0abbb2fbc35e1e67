/* The pool of threads.h. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include "threads.h"

#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#include "memory.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define relax() _mm_pause()
#elif defined(__aarch64__)
#define relax() __asm__ __volatile__("isb" ::: "memory")
#else
#define relax() ((void)0)
#endif

enum {
    SPIN_STEP_US = 50, /* workers between steps: the next token mostly comes within a sampling */
    SPIN_END_US = 50   /* the caller at the end of a step */
};

struct mt_pool {
    mt_gate start, done;
    unsigned n_runs; /* so far; `done` then stands at n_runs * (n_threads - 1) */
    int n_threads, n_started;
    int is_stopping;
    void (*fn)(void *, int);
    void *arg;
    pthread_t *handles;
};

typedef struct {
    mt_pool *pool;
    int thread;
} worker_arg;

void mt_gate_init(mt_gate *g) {
    atomic_init(&g->value, 0);
    atomic_init(&g->sleepers, 0);
    pthread_mutex_init(&g->mutex, NULL);
    pthread_cond_init(&g->changed, NULL);
}

void mt_gate_destroy(mt_gate *g) {
    pthread_mutex_destroy(&g->mutex);
    pthread_cond_destroy(&g->changed);
}

static int has_reached(mt_gate *g, unsigned value, memory_order order) {
    return (int)(atomic_load_explicit(&g->value, order) - value) >= 0;
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* A pause takes 5 ns on one CPU and 50 ns on another, so the clock ends the spinning. */
static int spin(mt_gate *g, unsigned value, int spin_us) {
    const int64_t end = now_ns() + (int64_t)spin_us * 1000;
    do {
        for (int i = 0; i < 16; i++) {
            if (has_reached(g, value, memory_order_acquire)) return 1;
            relax();
        }
    } while (now_ns() < end);
    return 0;
}

void mt_gate_wait(mt_gate *g, unsigned value, int spin_us) {
    if (has_reached(g, value, memory_order_acquire) || spin(g, value, spin_us)) return;
    pthread_mutex_lock(&g->mutex);
    atomic_fetch_add(&g->sleepers, 1);
    while (!has_reached(g, value, memory_order_seq_cst)) pthread_cond_wait(&g->changed, &g->mutex);
    atomic_fetch_sub(&g->sleepers, 1);
    pthread_mutex_unlock(&g->mutex);
}

void mt_gate_advance(mt_gate *g) {
    atomic_fetch_add(&g->value, 1); /* sequentially consistent: ordered against `sleepers` */
    if (atomic_load(&g->sleepers) == 0) return;
    pthread_mutex_lock(&g->mutex);
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->mutex);
}

static void *worker(void *raw) {
    const worker_arg arg = *(worker_arg *)raw;
    free(raw);
    for (unsigned run = 1;; run++) {
        mt_gate_wait(&arg.pool->start, run, SPIN_STEP_US);
        if (arg.pool->is_stopping) return NULL;
        arg.pool->fn(arg.pool->arg, arg.thread);
        mt_gate_advance(&arg.pool->done);
    }
}

static int start_worker(mt_pool *pool, int thread) {
    worker_arg *arg = malloc(sizeof *arg);
    if (!arg) return 0;
    *arg = (worker_arg){pool, thread};
    if (!pthread_create(&pool->handles[thread], NULL, worker, arg)) return 1;
    free(arg);
    return 0;
}

mt_pool *mt_pool_create(int n_threads) {
    mt_pool *pool = mt_line_alloc(sizeof *pool);
    if (!pool) return NULL;
    *pool = (mt_pool){.n_threads = n_threads};
    mt_gate_init(&pool->start);
    mt_gate_init(&pool->done);
    pool->handles = calloc((size_t)n_threads, sizeof *pool->handles);
    while (pool->handles && pool->n_started < n_threads - 1 &&
           start_worker(pool, pool->n_started + 1))
        pool->n_started++;
    if (pool->n_started == n_threads - 1 && pool->handles) return pool;
    mt_pool_free(pool);
    return NULL;
}

void mt_pool_free(mt_pool *pool) {
    if (!pool) return;
    pool->is_stopping = 1;
    mt_gate_advance(&pool->start);
    for (int t = 1; t <= pool->n_started; t++) pthread_join(pool->handles[t], NULL);
    mt_gate_destroy(&pool->start);
    mt_gate_destroy(&pool->done);
    free(pool->handles);
    mt_line_free(pool);
}

void mt_pool_run(mt_pool *pool, void (*fn)(void *, int), void *arg) {
    pool->fn = fn;
    pool->arg = arg;
    pool->n_runs++;
    if (pool->n_threads > 1) mt_gate_advance(&pool->start);
    fn(arg, 0);
    if (pool->n_threads > 1)
        mt_gate_wait(&pool->done, pool->n_runs * (unsigned)(pool->n_threads - 1), SPIN_END_US);
}
