/* File blocks -> packed tiles, and one row back to floats (embedding rows of tied weights). */
#ifndef MT_PACK_H
#define MT_PACK_H

#include "formats.h"

/* Packs rows [32 * tile, 32 * tile + 32) of a weight; rows past the last become zeros. Returns
 * whether all values, in blocks their scales, are finite; else row and col tell the first that is
 * not. */
int mt_pack_tile(const mt_layout *f, const mt_tensor *t, int64_t tile, uint8_t *out, int64_t *row,
                 int64_t *col);
/* Row `row` of packed tiles, as cols floats: exactly the value that the file's format
 * defines, but that powers of two below the normal numbers are taken for 0. */
void mt_unpack_row(const mt_layout *f, const uint8_t *packed, int64_t cols, int64_t row,
                   float *out);

#endif
