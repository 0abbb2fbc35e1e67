/* Which kernel tables this build holds, and which of them this machine can run. */
#ifndef MT_CPU_H
#define MT_CPU_H

#include "kernels.h"

/* NULL where the index is out of range. */
const mt_kernels *mt_isa_kernels(int isa);

#endif
