/* What the file's blocks hold, apart from how they hold it and from how it will be packed. */
#ifndef MT_RAW_BLOCK_H
#define MT_RAW_BLOCK_H

#include "formats.h"

#define MT_ALWAYS static inline __attribute__((always_inline))

/* 32 columns of all rows of a tile, in no particular packing. */
typedef struct mt_raw_block {
    uint8_t code[MT_TILE_ROWS][MT_BLOCK];
    uint16_t d[MT_TILE_ROWS], m[MT_TILE_ROWS]; /* halves: scale, minimum (of super-blocks or not) */
    uint8_t s[2][MT_TILE_ROWS], t[2][MT_TILE_ROWS]; /* of the sub-blocks, eight bits each */
} mt_raw_block;

/* In place of an exponent: no number. */
enum { MT_BAD_EXPONENT = 255 };

static inline uint16_t mt_load_u16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

/* Block `block` of n_rows rows; what b holds of others stays. */
void mt_read_block(const mt_layout *f, const uint16_t *codebook, const uint8_t *rows,
                   size_t row_bytes, int n_rows, int64_t block, mt_raw_block *b);
/* Sub-block j (0..7) of a super-block of codes into `codebook`. */
void mt_read_vectors(int format, const uint16_t *codebook, const uint8_t *p, int j, int row,
                     mt_raw_block *b);

#endif
