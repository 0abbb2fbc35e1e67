/* A persistent pool whose threads walk one function together and meet at barriers.
 *
 * Waiting spins briefly, then sleeps: an idle engine uses no CPU, and a thread that lost its core
 * to another program does not keep the others burning theirs. */
#ifndef MT_THREADS_H
#define MT_THREADS_H

typedef struct mt_pool mt_pool;

/* NULL when out of memory or threads. Thread 0 is the caller of mt_pool_run. */
mt_pool *mt_pool_create(int n_threads);
void mt_pool_free(mt_pool *pool);
int mt_pool_size(const mt_pool *pool);
/* Runs fn(arg, thread) on every thread and returns when all are done. */
void mt_pool_run(mt_pool *pool, void (*fn)(void *arg, int thread), void *arg);
/* Inside fn: returns when every thread has arrived. */
void mt_pool_barrier(mt_pool *pool);

#endif
