/* Denormals cost a hundred cycles each and mean nothing here; every thread flushes them alike. */
#ifndef MT_FLOAT_MODE_H
#define MT_FLOAT_MODE_H

#include <stdint.h>

#if defined(__x86_64__)
#include <xmmintrin.h>

/* Returns what mt_restore_float_mode takes. */
static inline uint64_t mt_flush_denormals(void) {
    const unsigned saved = _mm_getcsr();
    _mm_setcsr(saved | 0x8040); /* FTZ, DAZ */
    return saved;
}
static inline void mt_restore_float_mode(uint64_t saved) { _mm_setcsr((unsigned)saved); }
#elif defined(__aarch64__)
static inline void mt_restore_float_mode(uint64_t saved) {
    __asm__ volatile("msr fpcr, %0" : : "r"(saved));
}
static inline uint64_t mt_flush_denormals(void) {
    uint64_t saved;
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    mt_restore_float_mode(saved | 1u << 24); /* FZ */
    return saved;
}
#else
static inline uint64_t mt_flush_denormals(void) { return 0; }
static inline void mt_restore_float_mode(uint64_t saved) { (void)saved; }
#endif

#endif
