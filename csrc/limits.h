/* The multiply loops behind mt_limits, once per ISA: they keep that unit as busy as it gets.
 * They compute nothing of use; limits.c counts and times them. */
#ifndef MT_LIMITS_H
#define MT_LIMITS_H

#include <stdint.h>

enum { MT_LIMIT_OPERANDS = 32 };

typedef struct mt_limit_loops {
    /* n_rounds rounds of independent multiply-adds on MT_LIMIT_OPERANDS small values; returns how
     * many multiply-adds that were. */
    int64_t (*multiply_int8)(int n_rounds, const int32_t *operands, int32_t *sink);
    int64_t (*multiply_f32)(int n_rounds, const float *operands, float *sink);
} mt_limit_loops;

extern const mt_limit_loops mt_limit_loops_scalar;
#if defined(__x86_64__) || defined(_M_X64)
extern const mt_limit_loops mt_limit_loops_sse41;
extern const mt_limit_loops mt_limit_loops_avx2;
extern const mt_limit_loops mt_limit_loops_avxvnni;
extern const mt_limit_loops mt_limit_loops_avx512;
extern const mt_limit_loops mt_limit_loops_amx;
#elif defined(__aarch64__) || defined(_M_ARM64)
extern const mt_limit_loops mt_limit_loops_neon;
extern const mt_limit_loops mt_limit_loops_dotprod;
extern const mt_limit_loops mt_limit_loops_i8mm;
#endif

#endif
