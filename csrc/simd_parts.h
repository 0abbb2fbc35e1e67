/* Vectors of four registers, v[0] to v[3]: what is done to every one of them is said once. For
 * simd_neon.h and simd_sse41.h. */
#ifndef MT_SIMD_PARTS_H
#define MT_SIMD_PARTS_H

#include "simd_unroll.h"

#define PARTS for (int i = 0; i < 4; i++)
/* The function whose result has `part` as register i. */
#define PARTWISE(type, name, args, part)                                                           \
    static inline type name args {                                                                 \
        type r;                                                                                    \
        UNROLL(4)                                                                                  \
        PARTS r.v[i] = part;                                                                       \
        return r;                                                                                  \
    }
/* The function that does something with every register i. */
#define EACH_PART(name, args, part)                                                                \
    static inline void name args {                                                                 \
        UNROLL(4)                                                                                  \
        PARTS part;                                                                                \
    }

#endif
