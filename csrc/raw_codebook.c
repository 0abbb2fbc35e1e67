/* Reads blocks whose codes stand for vectors of eight (IQ1, IQ2) or four (IQ3) weights. The vectors
 * come from Python, as quant/codebooks.py packs them: indices of two bits, or of four.
 *
 * A sub-scale s counts as 2 s + 1. */
#include "raw_block.h"

static uint32_t load_u32(const uint8_t *p) {
    return mt_load_u16(p) | (uint32_t)mt_load_u16(p + 2) << 16;
}

/* Eight weights of two bits each and their signs. */
MT_ALWAYS void set_eight(uint16_t vector, uint8_t signs, uint8_t *code) {
    for (int k = 0; k < 8; k++) code[k] = (uint8_t)((vector >> 2 * k & 3) | (signs >> k & 1) << 2);
}
/* Eight weights, two vectors of four. */
MT_ALWAYS void set_two_fours(uint16_t first, uint16_t second, uint8_t signs, uint8_t *code) {
    const uint32_t both = first | (uint32_t)second << 16;
    for (int k = 0; k < 8; k++) code[k] = (uint8_t)((both >> 4 * k & 7) | (signs >> k & 1) << 3);
}
/* Seven stored signs; the eighth makes the number of minuses even. */
MT_ALWAYS uint8_t eight_signs(uint32_t seven) {
    seven &= 127;
    return (uint8_t)(seven | (uint32_t)__builtin_parity(seven) << 7);
}
MT_ALWAYS uint8_t odd(int s) { return (uint8_t)(2 * s + 1); }
MT_ALWAYS int nibble(const uint8_t *p, int i) { return p[i / 2] >> 4 * (i & 1) & 15; }

void mt_read_vectors(int format, const uint16_t *book, const uint8_t *p, int j, int row,
                     mt_raw_block *b) {
    uint8_t *code = b->code[row], *first = &b->s[0][row], *second = &b->s[1][row];
    b->d[row] = mt_load_u16(p);
    switch (format) {
    case MT_IQ2_XXS: { /* d | (codes[4] | signs and s u32)[8] */
        const uint8_t *codes = p + 2 + 8 * j;
        const uint32_t word = load_u32(codes + 4);
        for (int i = 0; i < 4; i++)
            set_eight(book[codes[i]], eight_signs(word >> 7 * i), code + 8 * i);
        *first = odd((int)(word >> 28));
        break;
    }
    case MT_IQ2_XS: /* d | (code and signs u16)[32] | s[8] */
        for (int i = 0; i < 4; i++) {
            const uint16_t word = mt_load_u16(p + 2 + 8 * j + 2 * i);
            set_eight(book[word & 511], eight_signs(word >> 9), code + 8 * i);
        }
        *first = odd(nibble(p + 66, 2 * j)), *second = odd(nibble(p + 66, 2 * j + 1));
        break;
    case MT_IQ2_S: /* d | codes[32] | signs[32] | high bits[8] | s[8] */
        for (int i = 0; i < 4; i++) {
            const int at = 4 * j + i, high = p[66 + j] >> 2 * i & 3;
            set_eight(book[p[2 + at] | high << 8], p[34 + at], code + 8 * i);
        }
        *first = odd(nibble(p + 74, 2 * j)), *second = odd(nibble(p + 74, 2 * j + 1));
        break;
    case MT_IQ3_XXS: { /* d | codes[64] | (signs and s u32)[8] */
        const uint8_t *codes = p + 2 + 8 * j;
        const uint32_t word = load_u32(p + 66 + 4 * j);
        for (int i = 0; i < 4; i++)
            set_two_fours(book[codes[2 * i]], book[codes[2 * i + 1]], eight_signs(word >> 7 * i),
                          code + 8 * i);
        *first = odd((int)(word >> 28));
        break;
    }
    case MT_IQ3_S: /* d | codes[64] | high bits[8] | signs[32] | s[4] */
        for (int i = 0; i < 4; i++) {
            const uint8_t *codes = p + 2 + 8 * j + 2 * i;
            const int high = p[66 + j] >> 2 * i;
            set_two_fours(book[codes[0] | (high & 1) << 8], book[codes[1] | (high & 2) << 7],
                          p[74 + 4 * j + i], code + 8 * i);
        }
        *first = odd(nibble(p + 106, j));
        break;
    case MT_IQ1_S: { /* d | codes[32] | (high bits, s and sign u16)[8] */
        const uint16_t word = mt_load_u16(p + 34 + 2 * j);
        for (int i = 0; i < 4; i++)
            set_eight(book[p[2 + 4 * j + i] | (word >> 3 * i & 7) << 8], word >> 15 ? 255 : 0,
                      code + 8 * i);
        *first = odd(word >> 12 & 7);
        break;
    }
    default: { /* IQ1_M: codes[32] | high bits and sign[16] | (four s and a nibble of d u16)[4] */
        for (int i = 0; i < 4; i++) {
            const int high = nibble(p + 32, 4 * j + i);
            set_eight(book[p[4 * j + i] | (high & 7) << 8], high & 8 ? 255 : 0, code + 8 * i);
        }
        const int s = mt_load_u16(p + 48 + 2 * (j / 2)) >> 6 * (j & 1);
        *first = odd(s & 7), *second = odd(s >> 3 & 7);
        b->d[row] =
            (uint16_t)(p[49] >> 4 | (p[51] & 0xf0) | (p[53] & 0xf0) << 4 | (p[55] & 0xf0) << 8);
    }
    }
}
