/* One translation unit, compiled once per ISA with other flags: -DMT_ISA=scalar, avx2, ... */
#include <math.h>
#include <stddef.h>
#include <string.h>

#if defined(__AVX512VNNI__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#elif defined(__SSE4_1__)
#include "simd_sse41.h"
#elif defined(MT_NEON)
#include "simd_neon.h"
#else
#include "simd_scalar.h"
#endif

#include "kernels.h"
#include "kernels_unpack.h"
#include "kernels_matmul.h"
#if defined(__AMX_INT8__)
#include "kernels_amx.h"
#define MM_Q8 mm_q8_amx
#else
#define MM_Q8 mm_q8
#endif
#include "kernels_direct.h"
#include "kernels_floats.h"
#include "kernels_rows.h"
#include "kernels_attention_tile.h"
#include "kernels_attention.h"

#define MT_TABLE_NAME2(isa) mt_kernels_##isa
#define MT_TABLE_NAME(isa) MT_TABLE_NAME2(isa)

const mt_kernels MT_TABLE_NAME(MT_ISA) = {
    .unpack = unpack,
    .mm_q8 = MM_Q8,
    .mm_direct = mm_direct,
    .direct_cols = DIRECT_COLS,
    .unpack_float = unpack_float,
    .widen = widen_blocks,
    .mm_f32 = mm_f32,
    .round = {[MT_BUF_Q8] = quantize, [MT_BUF_BF16] = round_bf16},
    .norm = norm,
    .glu = glu,
    .recur = recur,
    .rotate = rotate,
    .add = add,
    .scale = scale,
    .emit = emit,
    .store_kv = store_kv,
    .attend_split = attend_split,
    .attend_merge = attend_merge,
    .attend_finish = attend_finish,
    .weigh = weigh,
};
