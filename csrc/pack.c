/* Reads the file's blocks and lays them out as formats.h draws them. Plain C, run once at load. */
#include "pack.h"

#include <string.h>

#include "martlet.h"

#define ALWAYS static inline __attribute__((always_inline))
#define EACH_BYTE 0x0101010101010101u

/* 32 columns of all rows of a tile, in no particular packing. */
typedef struct {
    uint8_t code[MT_TILE_ROWS][MT_BLOCK];
    uint16_t d[MT_TILE_ROWS], m[MT_TILE_ROWS]; /* halves: scale, minimum (K: of super-blocks) */
    uint8_t s[2][MT_TILE_ROWS], t[2][MT_TILE_ROWS]; /* of the sub-blocks, eight bits each */
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

/* Eight bytes in one word, each shifted by itself: what crosses from byte to byte is masked off. */
ALWAYS uint64_t bits_of(const uint8_t *p, int shift, uint8_t mask) {
    uint64_t bits;
    memcpy(&bits, p, 8);
    return bits >> shift & EACH_BYTE * mask;
}

/* code = p >> shift & mask for n bytes. */
ALWAYS void set_codes(const uint8_t *p, int n, int shift, uint8_t mask, uint8_t *code) {
    for (int i = 0; i < n; i += 8) {
        const uint64_t bits = bits_of(p + i, shift, mask);
        memcpy(code + i, &bits, 8);
    }
}

/* code = (p >> shift & mask) | (high >> high_shift & high_mask) << to for 32 bytes. */
ALWAYS void set_split_codes(const uint8_t *p, int shift, uint8_t mask, const uint8_t *high,
                            int high_shift, uint8_t high_mask, int to, uint8_t *code) {
    for (int i = 0; i < 32; i += 8) {
        const uint64_t bits = bits_of(p + i, shift, mask) | bits_of(high + i, high_shift, high_mask)
                                                                << to;
        memcpy(code + i, &bits, 8);
    }
}

static void nibbles(const uint8_t *q, uint8_t *code) {
    set_codes(q, 16, 0, 15, code);
    set_codes(q, 16, 4, 15, code + 16);
}

/* Bit i of the mask counts 16 in code i: eight copies of a byte keep a bit each, and adding 127
 * carries what is left to their top. */
static void add_fifth_bits(const uint8_t *mask, uint8_t *code) {
    for (int i = 0; i < 4; i++) {
        const uint64_t own = EACH_BYTE * mask[i] & 0x8040201008040201u;
        const uint64_t bits =
            bits_of(code + 8 * i, 0, 255) | ((own + EACH_BYTE * 127) >> 3 & EACH_BYTE * 16);
        memcpy(code + 8 * i, &bits, 8);
    }
}

/* Legacy formats: one block of 32 behind its own scale. */
static void read_legacy(int format, const uint8_t *p, int row, raw_block *b) {
    uint8_t *code = b->code[row];
    b->d[row] = load_u16(p);
    if (format == MT_Q4_1 || format == MT_Q5_1) b->m[row] = load_u16(p + 2);
    switch (format) {
    case MT_Q4_0:
    case MT_IQ4_NL: nibbles(p + 2, code); break;
    case MT_Q4_1: nibbles(p + 4, code); break;
    case MT_Q5_0: nibbles(p + 6, code), add_fifth_bits(p + 2, code); break;
    case MT_Q5_1: nibbles(p + 8, code), add_fifth_bits(p + 4, code); break;
    default: /* Q8_0 */
        for (int i = 0; i < 32; i++) code[i] = (uint8_t)(p[2 + i] ^ 0x80);
    }
}

/* Sub-block j (0..7) of a super-block of 256. */
static void read_super(int format, const uint8_t *p, int j, int row, raw_block *b) {
    uint8_t *code = b->code[row];
    const int run = j / 4, pair = j & 3; /* 128 columns share 32 bytes of 2-bit codes */
    switch (format) {
    case MT_Q2_K: /* scales[16] | qs[64] | d | dmin */
        set_codes(p + 16 + run * 32, 32, 2 * pair, 3, code);
        for (int k = 0; k < 2; k++) {
            b->s[k][row] = p[2 * j + k] & 15;
            b->t[k][row] = p[2 * j + k] >> 4;
        }
        b->d[row] = load_u16(p + 80), b->m[row] = load_u16(p + 82);
        break;
    case MT_Q3_K: /* hmask[32] | qs[64] | scales[12] | d */
        set_split_codes(p + 32 + run * 32, 2 * pair, 3, p, j, 1, 2, code);
        for (int k = 0; k < 2; k++) { /* low nibbles in bytes 0-7, high bits in bytes 8-11 */
            const int n = 2 * j + k;
            const uint8_t *s = p + 96;
            const int low = n < 8 ? s[n] & 15 : s[n - 8] >> 4;
            b->s[k][row] = (uint8_t)((low | (s[8 + n % 4] >> 2 * (n / 4) & 3) << 4) - 32);
        }
        b->d[row] = load_u16(p + 108);
        break;
    case MT_Q4_K: /* d | dmin | scales[12] | qs[128] */
    case MT_Q5_K: /* d | dmin | scales[12] | qh[32] | qs[128] */
        if (format == MT_Q4_K)
            set_codes(p + 16 + j / 2 * 32, 32, (j & 1) * 4, 15, code);
        else
            set_split_codes(p + 48 + j / 2 * 32, (j & 1) * 4, 15, p + 16, j, 1, 4, code);
        six_bit_pair(p + 4, j, &b->s[0][row], &b->t[0][row]);
        b->d[row] = load_u16(p), b->m[row] = load_u16(p + 2);
        break;
    case MT_Q6_K: /* ql[128] | qh[64] | scales[16] | d */
        set_split_codes(p + run * 64 + (pair & 1) * 32, pair / 2 * 4, 15, p + 128 + run * 32,
                        2 * pair, 3, 4, code);
        b->s[0][row] = p[192 + 2 * j], b->s[1][row] = p[192 + 2 * j + 1];
        b->d[row] = load_u16(p + 208);
        break;
    default: { /* IQ4_XS: d | scales_h u16 | scales_l[4] | qs[128] */
        nibbles(p + 8 + j * 16, code);
        const int low = p[4 + j / 2] >> 4 * (j & 1) & 15;
        b->s[0][row] = (uint8_t)((low | (load_u16(p + 2) >> 2 * j & 3) << 4) - 32);
        b->d[row] = load_u16(p);
    }
    }
}

/* Block `block` of n_rows rows; what b holds of others stays. */
static void read_block(const mt_layout *f, const uint8_t *rows, size_t row_bytes, int n_rows,
                       int64_t block, raw_block *b) {
    for (int r = 0; r < n_rows; r++, rows += row_bytes)
        if (f->raw_block == MT_BLOCK)
            read_legacy(f->format, rows + block * f->raw_bytes, r, b);
        else
            read_super(f->format, rows + block / 8 * f->raw_bytes, (int)(block & 7), r, b);
}

/* The four columns of a group in one row are a word, and rows are neighbours as in formats.h. */
typedef uint32_t code_words[2][8][16]; /* [half][column group][row] */

/* A plane of `width` bits of every code, from bit `from` on: so many vectors a half as bits. Returns
 * what follows it. */
ALWAYS uint8_t *put_plane(code_words w, int width, int from, uint8_t *out) {
    const uint32_t mask = 0x01010101u * ((1u << width) - 1);
    for (int half = 0; half < 2; half++)
        for (int v = 0; v < width; v++, out += 64) {
            uint32_t sum[16] = {0};
            for (int i = 0; i < 8 / width; i++) {
                const uint32_t *group = w[half][width == 2 ? 4 * v + i : width * i + v];
                for (int r = 0; r < 16; r++) sum[r] |= (group[r] >> from & mask) << width * i;
            }
            memcpy(out, sum, 64);
        }
    return out;
}

static void put_codes(int kind, const raw_block *b, uint8_t *out) {
    code_words w;
    for (int r = 0; r < MT_TILE_ROWS; r++)
        for (int g = 0; g < 8; g++) memcpy(&w[r / 16][g][r % 16], b->code[r] + 4 * g, 4);
    switch (kind) {
    case MT_CODES_N4: put_plane(w, 4, 0, out); break;
    case MT_CODES_N4H1: put_plane(w, 1, 4, put_plane(w, 4, 0, out)); break;
    case MT_CODES_N4P2: put_plane(w, 2, 4, put_plane(w, 4, 0, out)); break;
    case MT_CODES_P2: put_plane(w, 2, 0, out); break;
    case MT_CODES_P2H1: put_plane(w, 1, 2, put_plane(w, 2, 0, out)); break;
    default: put_plane(w, 8, 0, out);
    }
}

static void put_scales(const mt_layout *f, const raw_block *b, uint8_t *scale, uint8_t *header) {
    uint8_t *d = mt_is_super(f) ? header : scale;
    memcpy(d, b->d, sizeof b->d);
    if (mt_has_min(f)) memcpy(d + sizeof b->d, b->m, sizeof b->m);
    if (!mt_is_super(f)) return;
    memcpy(scale, b->s, (size_t)f->n_sub * MT_TILE_ROWS);
    if (mt_has_min(f))
        memcpy(scale + f->n_sub * MT_TILE_ROWS, b->t, (size_t)f->n_sub * MT_TILE_ROWS);
}

/* The first bad value of a tile so far, in order of rows. */
typedef struct {
    int row;
    int64_t col;
} tile_fault;

static void note_fault(tile_fault *fault, int row, int64_t col) {
    if (row < fault->row) *fault = (tile_fault){row, col};
}

/* A half is NaN or infinite where its exponent is all ones. */
static void check_scales(const raw_block *b, int64_t col, tile_fault *fault) {
    for (int r = 0; r < MT_TILE_ROWS; r++)
        if ((b->d[r] & 0x7c00) == 0x7c00 || (b->m[r] & 0x7c00) == 0x7c00) note_fault(fault, r, col);
}

/* Whether one of n values of 2 or 4 bytes, the two top ones of which hold the exponent, has all bits
 * of it set. */
ALWAYS int has_bad_float(const uint8_t *p, int n, size_t width, uint16_t exponent) {
    int bad = 0;
    for (int k = 0; k < n; k++)
        bad |= (load_u16(p + (size_t)(k + 1) * width - 2) & exponent) == exponent;
    return bad;
}

/* Columns in short runs: what they are written to stays in the first-level cache. */
ALWAYS void pack_floats(size_t width, uint16_t exponent, const uint8_t *raw, int64_t cols,
                        int n_rows, uint8_t *out, tile_fault *fault) {
    for (int64_t first = 0; first < cols; first += MT_BLOCK) {
        const int n = (int)(cols - first < MT_BLOCK ? cols - first : MT_BLOCK);
        for (int r = 0; r < n_rows; r++) {
            const uint8_t *from = raw + (size_t)(r * cols + first) * width;
            uint8_t *to = out + (size_t)(first * MT_TILE_ROWS + r) * width;
            for (int k = 0; k < n; k++)
                memcpy(to + (size_t)(k * MT_TILE_ROWS) * width, from + (size_t)k * width, width);
            for (int k = 0; has_bad_float(from, n, width, exponent) && k < n; k++)
                if (has_bad_float(from + (size_t)k * width, 1, width, exponent))
                    note_fault(fault, r, first + k);
        }
    }
}

static void pack_float_tile(const mt_layout *f, const uint8_t *raw, int64_t cols, int n_rows,
                            uint8_t *out, tile_fault *fault) {
    if (n_rows < MT_TILE_ROWS) memset(out, 0, mt_tile_bytes(f, cols));
    switch (f->format) {
    case MT_F16: pack_floats(2, 0x7c00, raw, cols, n_rows, out, fault); break;
    case MT_BF16: pack_floats(2, 0x7f80, raw, cols, n_rows, out, fault); break;
    default: pack_floats(4, 0x7f80, raw, cols, n_rows, out, fault);
    }
}

static void pack_block_tile(const mt_layout *f, const uint8_t *raw, int64_t cols, int n_rows,
                            uint8_t *out, tile_fault *fault) {
    const size_t row_bytes = (size_t)(cols / f->raw_block * f->raw_bytes);
    raw_block values = {0};
    for (int64_t b = 0; b < cols / MT_BLOCK; b++) {
        uint8_t *block = out + mt_block_offset(f, b);
        read_block(f, raw, row_bytes, n_rows, b, &values);
        put_codes(f->codes, &values, block);
        put_scales(f, &values, block + mt_code_bytes(f->codes), out + mt_header_offset(f, b));
        check_scales(&values, b * MT_BLOCK, fault);
    }
}

int mt_pack_tile(const mt_layout *f, const uint8_t *raw, int64_t rows, int64_t cols, int64_t tile,
                 uint8_t *out, int64_t *row, int64_t *col) {
    tile_fault fault = {MT_TILE_ROWS, 0};
    const int64_t first = tile * MT_TILE_ROWS;
    const int n_rows = (int)(rows - first < MT_TILE_ROWS ? rows - first : MT_TILE_ROWS);
    raw += first * (cols / f->raw_block * f->raw_bytes);
    if (f->codes == MT_CODES_FLOAT)
        pack_float_tile(f, raw, cols, n_rows, out, &fault);
    else
        pack_block_tile(f, raw, cols, n_rows, out, &fault);
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
