/* The pool of threads.h: generation counters that waiters first watch, then sleep on. */
#include "threads.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define relax() _mm_pause()
#elif defined(__aarch64__)
#define relax() __asm__ __volatile__("isb" ::: "memory")
#else
#define relax() ((void)0)
#endif

enum {
    SPINS_BARRIER = 20000, /* about a quarter of a millisecond: longer than a balanced op */
    SPINS_IDLE = 4000
};

/* A counter that only grows; waiters wait for it to differ from what they saw. */
typedef struct {
    _Alignas(64) atomic_uint value;
    _Alignas(64) atomic_int sleepers;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
} gate;

struct mt_pool {
    gate start, meet;
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_int stopping;
    int n_threads, n_started;
    void (*fn)(void *, int);
    void *arg;
    pthread_t *handles;
};

typedef struct {
    mt_pool *pool;
    int thread;
} worker_arg;

static void gate_init(gate *g) {
    atomic_init(&g->value, 0);
    atomic_init(&g->sleepers, 0);
    pthread_mutex_init(&g->mutex, NULL);
    pthread_cond_init(&g->changed, NULL);
}

static void gate_destroy(gate *g) {
    pthread_mutex_destroy(&g->mutex);
    pthread_cond_destroy(&g->changed);
}

static void gate_wait(gate *g, unsigned seen, int spins) {
    for (int i = 0; i < spins; i++) {
        if (atomic_load_explicit(&g->value, memory_order_acquire) != seen) return;
        relax();
    }
    pthread_mutex_lock(&g->mutex);
    atomic_fetch_add(&g->sleepers, 1);
    while (atomic_load(&g->value) == seen) pthread_cond_wait(&g->changed, &g->mutex);
    atomic_fetch_sub(&g->sleepers, 1);
    pthread_mutex_unlock(&g->mutex);
}

static void gate_open(gate *g) {
    atomic_fetch_add(&g->value, 1); /* sequentially consistent: ordered against `sleepers` */
    if (atomic_load(&g->sleepers) == 0) return;
    pthread_mutex_lock(&g->mutex);
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->mutex);
}

void mt_pool_barrier(mt_pool *pool) {
    if (pool->n_threads == 1) return;
    const unsigned seen = atomic_load_explicit(&pool->meet.value, memory_order_acquire);
    if (atomic_fetch_add(&pool->arrived, 1) == pool->n_threads - 1) {
        atomic_store(&pool->arrived, 0);
        gate_open(&pool->meet);
    } else {
        gate_wait(&pool->meet, seen, SPINS_BARRIER);
    }
}

static void *worker(void *raw) {
    worker_arg arg = *(worker_arg *)raw;
    free(raw);
    unsigned seen = 0;
    for (;;) {
        gate_wait(&arg.pool->start, seen, SPINS_IDLE);
        seen++;
        if (atomic_load(&arg.pool->stopping)) return NULL;
        arg.pool->fn(arg.pool->arg, arg.thread);
        mt_pool_barrier(arg.pool);
    }
}

mt_pool *mt_pool_create(int n_threads) {
    mt_pool *pool = NULL;
    if (posix_memalign((void **)&pool, 64, sizeof *pool)) return NULL;
    gate_init(&pool->start);
    gate_init(&pool->meet);
    atomic_init(&pool->arrived, 0);
    atomic_init(&pool->stopping, 0);
    pool->n_threads = n_threads;
    pool->n_started = 0;
    pool->handles = calloc((size_t)n_threads, sizeof *pool->handles);
    for (int t = 1; pool->handles && t < n_threads; t++) {
        worker_arg *arg = malloc(sizeof *arg);
        if (!arg) break;
        *arg = (worker_arg){pool, t};
        if (pthread_create(&pool->handles[t], NULL, worker, arg)) {
            free(arg);
            break;
        }
        pool->n_started = t;
    }
    if (pool->n_started != n_threads - 1) {
        mt_pool_free(pool);
        return NULL;
    }
    return pool;
}

void mt_pool_free(mt_pool *pool) {
    if (!pool) return;
    atomic_store(&pool->stopping, 1);
    gate_open(&pool->start);
    for (int t = 1; t <= pool->n_started; t++) pthread_join(pool->handles[t], NULL);
    gate_destroy(&pool->start);
    gate_destroy(&pool->meet);
    free(pool->handles);
    free(pool);
}

int mt_pool_size(const mt_pool *pool) { return pool->n_threads; }

void mt_pool_run(mt_pool *pool, void (*fn)(void *, int), void *arg) {
    pool->fn = fn;
    pool->arg = arg;
    if (pool->n_threads > 1) gate_open(&pool->start);
    fn(arg, 0);
    mt_pool_barrier(pool);
}
