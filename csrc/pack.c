/* Lays out blocks that raw_block.c has read as formats.h draws them. Plain C, run once at load. */
#include "pack.h"

#include <string.h>

#include "martlet.h"
#include "raw_block.h"

/* The four columns of a group in one row are a word, and rows are neighbours as in formats.h. */
typedef uint32_t code_words[2][8][16]; /* [half][column group][row] */

typedef uint32_t four_words __attribute__((vector_size(16)));

MT_ALWAYS four_words low_pairs(four_words a, four_words b) {
    return (four_words){a[0], b[0], a[1], b[1]};
}
MT_ALWAYS four_words high_pairs(four_words a, four_words b) {
    return (four_words){a[2], b[2], a[3], b[3]};
}

/* Four rows of four words become four words of each column. */
MT_ALWAYS void turn_words(const uint8_t *row, size_t stride, uint32_t *out, size_t out_stride) {
    four_words a, b, c, d;
    memcpy(&a, row, 16);
    memcpy(&b, row + stride, 16);
    memcpy(&c, row + 2 * stride, 16);
    memcpy(&d, row + 3 * stride, 16);
    const four_words ac = low_pairs(a, c), bd = low_pairs(b, d);
    const four_words ca = high_pairs(a, c), db = high_pairs(b, d);
    const four_words turned[] = {low_pairs(ac, bd), high_pairs(ac, bd), low_pairs(ca, db),
                                 high_pairs(ca, db)};
    for (int i = 0; i < 4; i++) memcpy(out + (size_t)i * out_stride, &turned[i], 16);
}

/* A plane of `width` bits of every code, from bit `from` on: so many vectors a half as bits. Returns
 * what follows it. */
MT_ALWAYS uint8_t *put_plane(code_words w, int width, int from, uint8_t *out) {
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

static void put_codes(int kind, const mt_raw_block *b, uint8_t *out) {
    code_words w;
    for (int r = 0; r < MT_TILE_ROWS; r += 4)
        for (int g = 0; g < 8; g += 4)
            turn_words(b->code[r] + 4 * g, MT_BLOCK, &w[r / 16][g][r % 16], 16);
    switch (kind) {
    case MT_CODES_N4: put_plane(w, 4, 0, out); break;
    case MT_CODES_N4H1: put_plane(w, 1, 4, put_plane(w, 4, 0, out)); break;
    case MT_CODES_N4P2: put_plane(w, 2, 4, put_plane(w, 4, 0, out)); break;
    case MT_CODES_P2: put_plane(w, 2, 0, out); break;
    case MT_CODES_P2H1: put_plane(w, 1, 2, put_plane(w, 2, 0, out)); break;
    default: put_plane(w, 8, 0, out);
    }
}

static void put_scales(const mt_layout *f, const mt_raw_block *b, uint8_t *scale, uint8_t *header) {
    const size_t n_small = (size_t)f->n_sub * MT_TILE_ROWS;
    uint8_t *d = mt_is_super(f) ? header : scale;
    if (f->scales == MT_SCALES_E) {
        memcpy(scale, b->s, n_small);
        return;
    }
    memcpy(d, b->d, sizeof b->d);
    if (mt_has_min(f)) memcpy(d + sizeof b->d, b->m, sizeof b->m);
    if (f->scales == MT_SCALES_S || f->scales == MT_SCALES_SM) memcpy(scale, b->s, n_small);
    if (f->scales == MT_SCALES_SM) memcpy(scale + n_small, b->t, n_small);
}

/* The first bad value of a tile so far, in order of rows. */
typedef struct {
    int row;
    int64_t col;
} tile_fault;

static void note_fault(tile_fault *fault, int row, int64_t col) {
    if (row < fault->row) *fault = (tile_fault){row, col};
}

/* A half is NaN or infinite where its exponent is all ones, an exponent alone where it is. */
static void check_scales(const mt_layout *f, const mt_raw_block *b, int64_t col,
                         tile_fault *fault) {
    int bad = 0; /* mostly none is, which takes no branch for each */
    for (int r = 0; r < MT_TILE_ROWS; r++)
        bad |= ((b->d[r] & 0x7c00) == 0x7c00) | ((b->m[r] & 0x7c00) == 0x7c00) |
               (b->s[0][r] == MT_BAD_EXPONENT);
    for (int r = 0; bad && r < MT_TILE_ROWS; r++)
        if ((b->d[r] & 0x7c00) == 0x7c00 || (b->m[r] & 0x7c00) == 0x7c00 ||
            (f->scales == MT_SCALES_E && b->s[0][r] == MT_BAD_EXPONENT))
            note_fault(fault, r, col);
}

/* Whether one of n values of 2 or 4 bytes, the two top ones of which hold the exponent, has all bits
 * of it set. */
MT_ALWAYS int has_bad_float(const uint8_t *p, int n, size_t width, uint16_t exponent) {
    int bad = 0;
    for (int k = 0; k < n; k++)
        bad |= (mt_load_u16(p + (size_t)(k + 1) * width - 2) & exponent) == exponent;
    return bad;
}

/* Columns in short runs: what they are written to stays in the first-level cache. */
MT_ALWAYS void pack_floats(size_t width, uint16_t exponent, const uint8_t *raw, int64_t cols,
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

static void pack_block_tile(const mt_layout *f, const uint16_t *codebook, const uint8_t *raw,
                            int64_t cols, int n_rows, uint8_t *out, tile_fault *fault) {
    const size_t row_bytes = (size_t)(cols / f->raw_block * f->raw_bytes);
    mt_raw_block values = {0};
    /* 32 rows are more streams than a core foresees: the next tile is fetched in order, in shares */
    const uint8_t *ahead = raw + (size_t)n_rows * row_bytes;
    const size_t share = (size_t)n_rows * row_bytes / (size_t)(cols / MT_BLOCK);
    for (int64_t b = 0; b < cols / MT_BLOCK; b++, ahead += share) {
        for (size_t i = 0; i < share; i += 64) __builtin_prefetch(ahead + i, 0, 2);
        uint8_t *block = out + mt_block_offset(f, b);
        mt_read_block(f, codebook, raw, row_bytes, n_rows, b, &values);
        put_codes(f->codes, &values, block);
        put_scales(f, &values, block + mt_code_bytes(f->codes), out + mt_header_offset(f, b));
        check_scales(f, &values, b * MT_BLOCK, fault);
    }
}

int mt_pack_tile(const mt_layout *f, const mt_tensor *t, int64_t tile, uint8_t *out, int64_t *row,
                 int64_t *col) {
    tile_fault fault = {MT_TILE_ROWS, 0};
    const int64_t first = tile * MT_TILE_ROWS, cols = t->cols;
    const int n_rows = (int)(t->rows - first < MT_TILE_ROWS ? t->rows - first : MT_TILE_ROWS);
    const uint8_t *raw = (const uint8_t *)t->data + first * (cols / f->raw_block * f->raw_bytes);
    if (f->codes == MT_CODES_FLOAT)
        pack_float_tile(f, raw, cols, n_rows, out, &fault);
    else
        pack_block_tile(f, t->codebook, raw, cols, n_rows, out, &fault);
    *row = first + fault.row;
    *col = fault.col;
    return fault.row == MT_TILE_ROWS;
}

static uint8_t get_code(int kind, const uint8_t *in, int row, int i) {
    const int half = row / 16, group = i / 4, byte = row % 16 * 4 + i % 4;
    const int pair = half * 128 + group / 4 * 64 + byte, shift = 2 * (group & 3);
    if (kind == MT_CODES_B8) return in[half * 512 + group * 64 + byte];
    if (kind == MT_CODES_P2 || kind == MT_CODES_P2H1) { /* blocks too small for nibbles */
        const uint8_t two = (uint8_t)(in[pair] >> shift & 3);
        if (kind == MT_CODES_P2) return two;
        return (uint8_t)(two | (in[256 + half * 64 + byte] >> group & 1) << 2);
    }
    const uint8_t nibbles = in[half * 256 + (group & 3) * 64 + byte];
    const uint8_t nibble = group < 4 ? nibbles & 15 : nibbles >> 4;
    if (kind == MT_CODES_N4H1)
        return (uint8_t)(nibble | (in[512 + half * 64 + byte] >> group & 1) << 4);
    if (kind == MT_CODES_N4P2) return (uint8_t)(nibble | (in[512 + pair] >> shift & 3) << 4);
    return nibble;
}

static float half_to_float(const uint8_t *p) {
    const uint16_t h = mt_load_u16(p);
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
            const uint32_t bits = (uint32_t)mt_load_u16(p) << 16;
            memcpy(out + k, &bits, 4);
        } else {
            memcpy(out + k, p, 4);
        }
    }
}

/* Scale and offset of sub-block `sub` of a row: those of weight i are scale * value + offset. */
static void scale_of(const mt_layout *f, const uint8_t *scale, const uint8_t *header, int lane,
                     int sub, float *d, float *m) {
    const uint8_t *halves = mt_is_super(f) ? header : scale;
    const uint8_t small = f->scales == MT_SCALES_SUPER ? 1 : scale[sub * 32 + lane];
    *m = mt_has_min(f) ? half_to_float(halves + 64 + 2 * lane) : 0.0f;
    if (f->scales == MT_SCALES_E) {
        const uint32_t bits = (uint32_t)small << 23;
        memcpy(d, &bits, 4);
        return;
    }
    *d = half_to_float(halves + 2 * lane) * f->unit;
    if (!mt_is_super(f)) return;
    *d *= f->is_signed_s ? (float)(int8_t)small : (float)small;
    if (mt_has_min(f)) *m *= -(float)scale[(f->n_sub + sub) * 32 + lane];
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
        const uint8_t *header = tile + mt_header_offset(f, b);
        float d[2], m[2];
        for (int sub = 0; sub < f->n_sub; sub++)
            scale_of(f, scale, header, lane, sub, &d[sub], &m[sub]);
        for (int i = 0; i < 32; i++) {
            const int sub = f->n_sub == 2 ? i / 16 : 0;
            const uint8_t code = get_code(f->codes, block, lane, i);
            const int value = (f->table ? mt_values[f->table][code] : code) - f->bias;
            out[b * 32 + i] = d[sub] * (float)value + m[sub];
        }
    }
}
