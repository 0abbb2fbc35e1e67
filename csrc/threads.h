/* A persistent pool whose threads run one function together, and gates for them to wait at.
 *
 * Waiting spins briefly, then sleeps: an idle engine uses no CPU, and a thread that lost its core
 * to another program does not keep the others burning theirs. */
#ifndef MT_THREADS_H
#define MT_THREADS_H

#include <pthread.h>
#include <stdatomic.h>

typedef struct mt_pool mt_pool;

/* A counter that only grows, for threads to wait on. */
typedef struct mt_gate {
    _Alignas(64) atomic_uint value;
    _Alignas(64) atomic_int sleepers;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
} mt_gate;

void mt_gate_init(mt_gate *gate);
void mt_gate_destroy(mt_gate *gate);
void mt_gate_advance(mt_gate *gate);
/* Returns once the counter has reached `value`; spins for about spin_us before it sleeps. */
void mt_gate_wait(mt_gate *gate, unsigned value, int spin_us);

/* NULL when out of memory or threads. Thread 0 is the caller of mt_pool_run. */
mt_pool *mt_pool_create(int n_threads);
void mt_pool_free(mt_pool *pool);
/* Runs fn(arg, thread) on every thread and returns when all are done. */
void mt_pool_run(mt_pool *pool, void (*fn)(void *arg, int thread), void *arg);

#endif
