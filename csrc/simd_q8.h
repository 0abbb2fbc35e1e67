/* A block of activations from its codes, in 256-bit registers. For the vector headers, which know how
 * codes become bytes; simd_scalar.h says what the record holds. */
#ifndef MT_SIMD_Q8_H
#define MT_SIMD_Q8_H

#include <immintrin.h>

#include "formats.h"

/* Two whole stores: the sums never leave the registers. */
static inline void mt_store_q8(mt_q8_block *to, __m256i q, float d) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), q);
    const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    const __m256i twos = _mm256_add_epi32(fours, _mm256_shuffle_epi32(fours, 0x4e));
    const __m256i own = _mm256_add_epi32(twos, _mm256_shuffle_epi32(twos, 0xb1)); /* h0 | h1 */
    const __m256i other = _mm256_permute2x128_si256(own, own, 1);                 /* h1 | h0 */
    const __m256i sum = _mm256_add_epi32(own, other);
    /* 1, sum, sum, h0, h1, h0, h1, 0 as fields d, ds, n8, nh8[2], dh[2], pad */
    __m256i parts = _mm256_blend_epi32(own, other, 1 << 5);
    parts = _mm256_blend_epi32(parts, sum, 1 << 1 | 1 << 2);
    parts = _mm256_blend_epi32(parts, _mm256_set1_epi32(1), 1 << 0);
    const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(parts), _mm256_set1_ps(d));
    const __m256i minus_8 = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32(parts, 3));
    __m256i fields = _mm256_blend_epi32(_mm256_castps_si256(scaled), minus_8, 7 << 2);
    fields = _mm256_blend_epi32(fields, _mm256_setzero_si256(), 1 << 7);
    _mm256_storeu_si256((__m256i *)(void *)to->q, q);
    _mm256_storeu_si256((__m256i *)(void *)&to->d, fields);
}

#endif
