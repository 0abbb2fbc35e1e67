/* Reads the file's blocks and lays them out as formats.h draws them. Plain C, run once at load. */
#include "pack.h"

#include <string.h>

#include "martlet.h"

/* 32 columns of one row, in no particular packing. */
typedef struct {
    uint8_t code[32];
    uint16_t d, m;      /* half-precision scale and minimum (of the super-block for K formats) */
    uint8_t s[2], t[2]; /* 8-bit scales and minima of the sub-blocks */
} raw_block;

static uint16_t load_u16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

/* Q4_K and Q5_K: eight 6-bit scales and minima in 12 bytes. Bytes 0-3 hold the scales 0-3 and
 * bytes 4-7 the minima 0-3 in their low 6 bits; bytes 8-11 hold the low nibbles of scale and
 * minimum 4-7, whose two top bits sit in bits 6-7 of bytes 0-3 and 4-7. */
static void six_bit_pair(const uint8_t *p, int j, uint8_t *scale, uint8_t *min) {
    if (j < 4) {
        *scale = p[j] & 63;
        *min = p[j + 4] & 63;
    } else {
        *scale = (uint8_t)((p[j + 4] & 15) | (p[j - 4] >> 6) << 4);
        *min = (uint8_t)((p[j + 4] >> 4) | (p[j] >> 6) << 4);
    }
}

static void nibbles(const uint8_t *q, uint8_t *code) {
    for (int i = 0; i < 16; i++) {
        code[i] = q[i] & 15;
        code[i + 16] = q[i] >> 4;
    }
}

static void fifth_bits(const uint8_t *mask, uint8_t *code) {
    for (int i = 0; i < 32; i++) code[i] |= (uint8_t)((mask[i / 8] >> (i & 7) & 1) << 4);
}

/* Legacy formats: one block of 32 behind its own scale. */
static void read_legacy(int format, const uint8_t *p, raw_block *b) {
    b->d = load_u16(p);
    b->m = format == MT_Q4_1 || format == MT_Q5_1 ? load_u16(p + 2) : 0;
    switch (format) {
    case MT_Q4_0:
    case MT_IQ4_NL: nibbles(p + 2, b->code); break;
    case MT_Q4_1: nibbles(p + 4, b->code); break;
    case MT_Q5_0: nibbles(p + 6, b->code), fifth_bits(p + 2, b->code); break;
    case MT_Q5_1: nibbles(p + 8, b->code), fifth_bits(p + 4, b->code); break;
    default: /* Q8_0 */
        for (int i = 0; i < 32; i++) b->code[i] = (uint8_t)(p[2 + i] ^ 0x80);
    }
}

/* Sub-block j (0..7) of a super-block of 256. */
static void read_super(int format, const uint8_t *p, int j, raw_block *b) {
    const int run = j / 4, pair = j & 3; /* 128 columns share 32 bytes of 2-bit codes */
    switch (format) {
    case MT_Q2_K: /* scales[16] | qs[64] | d | dmin */
        for (int i = 0; i < 32; i++) b->code[i] = p[16 + run * 32 + i] >> 2 * pair & 3;
        for (int k = 0; k < 2; k++) {
            b->s[k] = p[2 * j + k] & 15;
            b->t[k] = p[2 * j + k] >> 4;
        }
        b->d = load_u16(p + 80), b->m = load_u16(p + 82);
        break;
    case MT_Q3_K: /* hmask[32] | qs[64] | scales[12] | d */
        for (int i = 0; i < 32; i++)
            b->code[i] = (uint8_t)((p[32 + run * 32 + i] >> 2 * pair & 3) | (p[i] >> j & 1) << 2);
        for (int k = 0; k < 2; k++) { /* low nibbles in bytes 0-7, high bits in bytes 8-11 */
            const int n = 2 * j + k;
            const uint8_t *s = p + 96;
            const int low = n < 8 ? s[n] & 15 : s[n - 8] >> 4;
            b->s[k] = (uint8_t)((low | (s[8 + n % 4] >> 2 * (n / 4) & 3) << 4) - 32);
        }
        b->d = load_u16(p + 108);
        break;
    case MT_Q4_K:   /* d | dmin | scales[12] | qs[128] */
    case MT_Q5_K: { /* d | dmin | scales[12] | qh[32] | qs[128] */
        const uint8_t *qs = p + (format == MT_Q4_K ? 16 : 48) + j / 2 * 32;
        for (int i = 0; i < 32; i++) {
            b->code[i] = j & 1 ? qs[i] >> 4 : qs[i] & 15;
            if (format == MT_Q5_K) b->code[i] |= (uint8_t)((p[16 + i] >> j & 1) << 4);
        }
        six_bit_pair(p + 4, j, &b->s[0], &b->t[0]);
        b->d = load_u16(p), b->m = load_u16(p + 2);
        break;
    }
    case MT_Q6_K: /* ql[128] | qh[64] | scales[16] | d */
        for (int i = 0; i < 32; i++) {
            const uint8_t low = p[run * 64 + (pair & 1) * 32 + i];
            const uint8_t high = p[128 + run * 32 + i] >> 2 * pair & 3;
            b->code[i] = (uint8_t)((pair < 2 ? low & 15 : low >> 4) | high << 4);
        }
        b->s[0] = p[192 + 2 * j], b->s[1] = p[192 + 2 * j + 1];
        b->d = load_u16(p + 208);
        break;
    default: { /* IQ4_XS: d | scales_h u16 | scales_l[4] | qs[128] */
        nibbles(p + 8 + j * 16, b->code);
        const int low = p[4 + j / 2] >> 4 * (j & 1) & 15;
        b->s[0] = (uint8_t)((low | (load_u16(p + 2) >> 2 * j & 3) << 4) - 32);
        b->d = load_u16(p);
    }
    }
}

static void read_block(const mt_layout *f, const uint8_t *row, int64_t block, raw_block *b) {
    memset(b, 0, sizeof *b);
    if (f->raw_block == MT_BLOCK)
        read_legacy(f->format, row + block * f->raw_bytes, b);
    else
        read_super(f->format, row + block / 8 * f->raw_bytes, (int)(block & 7), b);
}

static void put_word(uint8_t *out, int row, uint32_t word) { memcpy(out + row % 16 * 4, &word, 4); }

/* The 32 codes of a row go to its lane of the vectors that formats.h draws. One word holds the four
 * columns of a group, so every group takes one shift and one mask. */
static void put_codes(int kind, const uint8_t *code, int row, uint8_t *out) {
    const int half = row / 16;
    uint32_t w[8], bits = 0, pairs[2] = {0, 0};
    memcpy(w, code, sizeof w);
    const int pair_bit = kind == MT_CODES_N4P2 ? 4 : 0; /* where the two bits of P2 stand */
    const int high_bit = kind == MT_CODES_N4H1 ? 4 : 2; /* and the one of H1 */
    for (int g = 0; g < 8; g++) {
        bits |= (w[g] >> high_bit & 0x01010101u) << g;
        pairs[g / 4] |= (w[g] >> pair_bit & 0x03030303u) << 2 * (g & 3);
    }
    if (kind == MT_CODES_B8)
        for (int g = 0; g < 8; g++) put_word(out + half * 512 + g * 64, row, w[g]);
    if (kind == MT_CODES_N4 || kind == MT_CODES_N4H1 || kind == MT_CODES_N4P2)
        for (int g = 0; g < 4; g++)
            put_word(out + half * 256 + g * 64, row,
                     (w[g] & 0x0f0f0f0fu) | (w[g + 4] & 0x0f0f0f0fu) << 4);
    uint8_t *planes = kind == MT_CODES_N4P2 ? out + 512 : out;
    if (kind == MT_CODES_N4P2 || kind == MT_CODES_P2 || kind == MT_CODES_P2H1)
        for (int p = 0; p < 2; p++) put_word(planes + half * 128 + p * 64, row, pairs[p]);
    if (kind == MT_CODES_N4H1) put_word(out + 512 + half * 64, row, bits);
    if (kind == MT_CODES_P2H1) put_word(out + 256 + half * 64, row, bits);
}

static void put_scales(const mt_layout *f, const raw_block *b, int row, uint8_t *scale,
                       uint8_t *header) {
    uint8_t *d = mt_is_super(f) ? header : scale;
    memcpy(d + 2 * row, &b->d, 2);
    if (mt_has_min(f)) memcpy(d + 64 + 2 * row, &b->m, 2);
    if (!mt_is_super(f)) return;
    for (int sub = 0; sub < f->n_sub; sub++) {
        scale[sub * 32 + row] = b->s[sub];
        if (mt_has_min(f)) scale[(f->n_sub + sub) * 32 + row] = b->t[sub];
    }
}

/* A half is NaN or infinite where its exponent is all ones. */
static int is_bad_half(uint16_t h) { return (h & 0x7c00) == 0x7c00; }

/* The first bad value of a tile so far, in order of rows. */
typedef struct {
    int row;
    int64_t col;
} tile_fault;

static void note_fault(tile_fault *fault, int row, int64_t col) {
    if (row < fault->row) *fault = (tile_fault){row, col};
}

static void pack_float_tile(const mt_layout *f, const uint8_t *raw, int64_t cols, int n_rows,
                            uint8_t *out, tile_fault *fault) {
    const size_t width = (size_t)f->raw_bytes;
    const uint16_t exponent = f->format == MT_F16 ? 0x7c00 : 0x7f80; /* in the two top bytes */
    for (int r = 0; r < n_rows; r++)
        for (int64_t k = 0; k < cols; k++) {
            const uint8_t *value = raw + (size_t)(r * cols + k) * width;
            memcpy(out + (size_t)(k * 32 + r) * width, value, width);
            if ((load_u16(value + width - 2) & exponent) == exponent) note_fault(fault, r, k);
        }
}

int mt_pack_tile(const mt_layout *f, const uint8_t *raw, int64_t rows, int64_t cols, int64_t tile,
                 uint8_t *out, int64_t *row, int64_t *col) {
    tile_fault fault = {MT_TILE_ROWS, 0};
    const int64_t first = tile * MT_TILE_ROWS;
    const int n_rows = (int)(rows - first < MT_TILE_ROWS ? rows - first : MT_TILE_ROWS);
    const int64_t row_bytes = cols / f->raw_block * f->raw_bytes;
    memset(out, 0, mt_tile_bytes(f, cols));
    raw += first * row_bytes;
    if (f->codes == MT_CODES_FLOAT) pack_float_tile(f, raw, cols, n_rows, out, &fault);
    for (int64_t b = 0; f->codes != MT_CODES_FLOAT && b < cols / MT_BLOCK; b++) {
        uint8_t *block = out + mt_block_offset(f, b);
        for (int r = 0; r < n_rows; r++) {
            raw_block values;
            read_block(f, raw + r * row_bytes, b, &values);
            put_codes(f->codes, values.code, r, block);
            put_scales(f, &values, r, block + mt_code_bytes(f->codes),
                       out + mt_header_offset(f, b));
            if (is_bad_half(values.d) || is_bad_half(values.m)) note_fault(&fault, r, b * MT_BLOCK);
        }
    }
    *row = first + fault.row;
    *col = fault.col;
    return fault.row == MT_TILE_ROWS;
}

static uint8_t get_code(int kind, const uint8_t *in, int row, int i) {
    const int half = row / 16, group = i / 4, byte = row % 16 * 4 + i % 4;
    const int pair = half * 128 + group / 4 * 64 + byte, shift = 2 * (group & 3);
    const uint8_t nibbles = in[half * 256 + (group & 3) * 64 + byte];
    const uint8_t nibble = group < 4 ? nibbles & 15 : nibbles >> 4;
    const uint8_t two = (uint8_t)(in[pair] >> shift & 3);
    switch (kind) {
    case MT_CODES_B8: return in[half * 512 + group * 64 + byte];
    case MT_CODES_P2: return two;
    case MT_CODES_P2H1: return (uint8_t)(two | (in[256 + half * 64 + byte] >> group & 1) << 2);
    case MT_CODES_N4H1: return (uint8_t)(nibble | (in[512 + half * 64 + byte] >> group & 1) << 4);
    case MT_CODES_N4P2: return (uint8_t)(nibble | (in[512 + pair] >> shift & 3) << 4);
    default: return nibble;
    }
}

static float half_to_float(const uint8_t *p) {
    const uint16_t h = load_u16(p);
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = h >> 10 & 31, man = h & 0x3ff;
    uint32_t bits = sign | (exp + 112) << 23 | man << 13;
    float f = (float)man * 0x1p-24f;
    if (exp == 0) return sign ? -f : f;
    if (exp == 31) bits = sign | 0x7f800000u | man << 13;
    memcpy(&f, &bits, 4);
    return f;
}

static void unpack_float_row(const mt_layout *f, const uint8_t *tile, int64_t cols, int lane,
                             float *out) {
    for (int64_t k = 0; k < cols; k++) {
        const uint8_t *p = tile + (size_t)(k * 32 + lane) * (size_t)f->raw_bytes;
        if (f->format == MT_F16) {
            out[k] = half_to_float(p);
        } else if (f->format == MT_BF16) {
            const uint32_t bits = (uint32_t)load_u16(p) << 16;
            memcpy(out + k, &bits, 4);
        } else {
            memcpy(out + k, p, 4);
        }
    }
}

void mt_unpack_row(const mt_layout *f, const uint8_t *packed, int64_t cols, int64_t row,
                   float *out) {
    const uint8_t *tile = packed + (size_t)(row / MT_TILE_ROWS) * mt_tile_bytes(f, cols);
    const int lane = (int)(row % MT_TILE_ROWS);
    if (f->codes == MT_CODES_FLOAT) {
        unpack_float_row(f, tile, cols, lane, out);
        return;
    }
    for (int64_t b = 0; b < cols / MT_BLOCK; b++) {
        const uint8_t *block = tile + mt_block_offset(f, b);
        const uint8_t *scale = block + mt_code_bytes(f->codes);
        const uint8_t *d_at = mt_is_super(f) ? tile + mt_header_offset(f, b) : scale;
        const float d = half_to_float(d_at + 2 * lane);
        const float m = mt_has_min(f) ? half_to_float(d_at + 64 + 2 * lane) : 0.0f;
        for (int i = 0; i < 32; i++) {
            const int sub = f->n_sub == 2 ? i / 16 : 0;
            const uint8_t code = get_code(f->codes, block, lane, i);
            const int value = (f->is_lookup ? mt_iq4_values[code] : code) - f->bias;
            float w = d, low = m;
            if (mt_is_super(f)) {
                const uint8_t s = scale[sub * 32 + lane];
                w *= f->is_signed_s ? (float)(int8_t)s : (float)s;
                if (mt_has_min(f)) low = -m * (float)scale[(f->n_sub + sub) * 32 + lane];
            }
            out[b * 32 + i] = w * (float)value + low;
        }
    }
}
