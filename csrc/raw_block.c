/* Reads the blocks of all formats but those with codebooks, which are in raw_codebook.c. */
#include "raw_block.h"

#include <string.h>

#define EACH_BYTE 0x0101010101010101u

/* Q4_K and Q5_K: eight 6-bit scales and minima in 12 bytes. Bytes 0-3 hold the scales 0-3 and
 * bytes 4-7 the minima 0-3 in their low 6 bits; bytes 8-11 hold the low nibbles of scale and
 * minimum 4-7, whose two top bits sit in bits 6-7 of bytes 0-3 and 4-7. */
MT_ALWAYS void six_bit_pair(const uint8_t *p, int j, uint8_t *scale, uint8_t *min) {
    if (j < 4) {
        *scale = p[j] & 63;
        *min = p[j + 4] & 63;
    } else {
        *scale = (uint8_t)((p[j + 4] & 15) | (p[j - 4] >> 6) << 4);
        *min = (uint8_t)((p[j + 4] >> 4) | (p[j] >> 6) << 4);
    }
}

/* Eight bytes in one word, each shifted by itself: what crosses from byte to byte is masked off. */
MT_ALWAYS uint64_t bits_of(const uint8_t *p, int shift, uint8_t mask) {
    uint64_t bits;
    memcpy(&bits, p, 8);
    return bits >> shift & EACH_BYTE * mask;
}

/* code = p >> shift & mask for n bytes. */
MT_ALWAYS void set_codes(const uint8_t *p, int n, int shift, uint8_t mask, uint8_t *code) {
    for (int i = 0; i < n; i += 8) {
        const uint64_t bits = bits_of(p + i, shift, mask);
        memcpy(code + i, &bits, 8);
    }
}

/* code = (p >> shift & mask) | (high >> high_shift & high_mask) << to for 32 bytes. */
MT_ALWAYS void set_split_codes(const uint8_t *p, int shift, uint8_t mask, const uint8_t *high,
                               int high_shift, uint8_t high_mask, int to, uint8_t *code) {
    for (int i = 0; i < 32; i += 8) {
        const uint64_t bits = bits_of(p + i, shift, mask) | bits_of(high + i, high_shift, high_mask)
                                                                << to;
        memcpy(code + i, &bits, 8);
    }
}

MT_ALWAYS void nibbles(const uint8_t *q, uint8_t *code) {
    set_codes(q, 16, 0, 15, code);
    set_codes(q, 16, 4, 15, code + 16);
}

/* Bit i of the mask counts 16 in code i: eight copies of a byte keep a bit each, and adding 127
 * carries what is left to their top. */
MT_ALWAYS void add_fifth_bits(const uint8_t *mask, uint8_t *code) {
    for (int i = 0; i < 4; i++) {
        const uint64_t own = EACH_BYTE * mask[i] & 0x8040201008040201u;
        const uint64_t bits =
            bits_of(code + 8 * i, 0, 255) | ((own + EACH_BYTE * 127) >> 3 & EACH_BYTE * 16);
        memcpy(code + 8 * i, &bits, 8);
    }
}

/* Blocks of 32 behind their own scale. */
MT_ALWAYS void read_small(int format, const uint8_t *p, int row, mt_raw_block *b) {
    uint8_t *code = b->code[row];
    if (format == MT_MXFP4) { /* values are twice as large; the least two exponents become 0 */
        nibbles(p + 1, code);
        b->s[0][row] = p[0] == MT_BAD_EXPONENT ? p[0] : (uint8_t)(p[0] ? p[0] - 1 : 0);
        return;
    }
    b->d[row] = mt_load_u16(p);
    if (format == MT_Q4_1 || format == MT_Q5_1) b->m[row] = mt_load_u16(p + 2);
    switch (format) {
    case MT_Q4_0:
    case MT_IQ4_NL: nibbles(p + 2, code); break;
    case MT_Q4_1: nibbles(p + 4, code); break;
    case MT_Q5_0: nibbles(p + 6, code), add_fifth_bits(p + 2, code); break;
    case MT_Q5_1: nibbles(p + 8, code), add_fifth_bits(p + 4, code); break;
    default: /* Q8_0 */
        for (int i = 0; i < 32; i += 8) {
            const uint64_t bits = bits_of(p + 2 + i, 0, 255) ^ EACH_BYTE * 0x80;
            memcpy(code + i, &bits, 8);
        }
    }
}

/* Weights 32 j and on of TQ1_0. A byte is a fraction of base three in 256ths: what overflows from its
 * product with three is the next digit. Digit i of byte k of a run of n bytes is weight n i + k. */
static void read_digits(const uint8_t *p, int j, uint8_t *code) {
    static const uint8_t powers[] = {1, 3, 9, 27, 81};
    for (int i = 0; i < 32; i++) {
        const int at = 32 * j + i;
        const int digit = at < 160 ? at / 32 : at < 240 ? (at - 160) / 16 : (at - 240) / 4;
        const int byte = at < 160 ? at % 32 : at < 240 ? 32 + at % 16 : 48 + at % 4;
        code[i] = (uint8_t)((uint8_t)(p[byte] * powers[digit]) * 3 >> 8);
    }
}

/* Sub-block j (0..7) of a super-block of 256. */
MT_ALWAYS void read_super(int format, const uint8_t *p, int j, int row, mt_raw_block *b) {
    uint8_t *code = b->code[row];
    const int run = j / 4, pair = j & 3; /* 128 columns share 32 bytes of 2-bit codes */
    switch (format) {
    case MT_Q2_K: /* scales[16] | qs[64] | d | dmin */
        set_codes(p + 16 + run * 32, 32, 2 * pair, 3, code);
        for (int k = 0; k < 2; k++) {
            b->s[k][row] = p[2 * j + k] & 15;
            b->t[k][row] = p[2 * j + k] >> 4;
        }
        b->d[row] = mt_load_u16(p + 80), b->m[row] = mt_load_u16(p + 82);
        break;
    case MT_Q3_K: /* hmask[32] | qs[64] | scales[12] | d */
        set_split_codes(p + 32 + run * 32, 2 * pair, 3, p, j, 1, 2, code);
        for (int k = 0; k < 2; k++) { /* low nibbles in bytes 0-7, high bits in bytes 8-11 */
            const int n = 2 * j + k;
            const uint8_t *s = p + 96;
            const int low = n < 8 ? s[n] & 15 : s[n - 8] >> 4;
            b->s[k][row] = (uint8_t)((low | (s[8 + n % 4] >> 2 * (n / 4) & 3) << 4) - 32);
        }
        b->d[row] = mt_load_u16(p + 108);
        break;
    case MT_Q4_K: /* d | dmin | scales[12] | qs[128] */
    case MT_Q5_K: /* d | dmin | scales[12] | qh[32] | qs[128] */
        if (format == MT_Q4_K)
            set_codes(p + 16 + j / 2 * 32, 32, (j & 1) * 4, 15, code);
        else
            set_split_codes(p + 48 + j / 2 * 32, (j & 1) * 4, 15, p + 16, j, 1, 4, code);
        six_bit_pair(p + 4, j, &b->s[0][row], &b->t[0][row]);
        b->d[row] = mt_load_u16(p), b->m[row] = mt_load_u16(p + 2);
        break;
    case MT_Q6_K: /* ql[128] | qh[64] | scales[16] | d */
        set_split_codes(p + run * 64 + (pair & 1) * 32, pair / 2 * 4, 15, p + 128 + run * 32,
                        2 * pair, 3, 4, code);
        b->s[0][row] = p[192 + 2 * j], b->s[1][row] = p[192 + 2 * j + 1];
        b->d[row] = mt_load_u16(p + 208);
        break;
    case MT_TQ1_0: /* five digits a byte[32] | the same[16] | four digits a byte[4] | d */
        read_digits(p, j, code);
        b->d[row] = mt_load_u16(p + 52);
        break;
    case MT_TQ2_0: /* qs[64] | d */
        set_codes(p + run * 32, 32, 2 * pair, 3, code);
        b->d[row] = mt_load_u16(p + 64);
        break;
    default: { /* IQ4_XS: d | scales_h u16 | scales_l[4] | qs[128] */
        nibbles(p + 8 + j * 16, code);
        const int low = p[4 + j / 2] >> 4 * (j & 1) & 15;
        b->s[0][row] = (uint8_t)((low | (mt_load_u16(p + 2) >> 2 * j & 3) << 4) - 32);
        b->d[row] = mt_load_u16(p);
    }
    }
}

/* A loop of its own for each format, which is then known inside it. */
#define EACH_ROW(read)                                                                             \
    for (int r = 0; r < n_rows; r++, p += row_bytes) read;                                         \
    break
#define SMALL(format)                                                                              \
    case format: EACH_ROW(read_small(format, p, r, b))
#define SUPER(format)                                                                              \
    case format: EACH_ROW(read_super(format, p, j, r, b))

void mt_read_block(const mt_layout *f, const uint16_t *codebook, const uint8_t *rows,
                   size_t row_bytes, int n_rows, int64_t block, mt_raw_block *b) {
    const uint8_t *p = rows + block / (f->raw_block / MT_BLOCK) * f->raw_bytes;
    const int j = (int)(block & 7);
    switch (f->format) {
        SMALL(MT_Q4_0);
        SMALL(MT_Q4_1);
        SMALL(MT_Q5_0);
        SMALL(MT_Q5_1);
        SMALL(MT_Q8_0);
        SMALL(MT_IQ4_NL);
        SMALL(MT_MXFP4);
        SUPER(MT_Q2_K);
        SUPER(MT_Q3_K);
        SUPER(MT_Q4_K);
        SUPER(MT_Q5_K);
        SUPER(MT_Q6_K);
        SUPER(MT_TQ1_0);
        SUPER(MT_TQ2_0);
        SUPER(MT_IQ4_XS);
    default: EACH_ROW(mt_read_vectors(f->format, codebook, p, j, r, b));
    }
}
