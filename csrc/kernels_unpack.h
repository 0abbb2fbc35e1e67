/* From packed blocks to bytes and floats that products read. */
#include "formats.h"

#define ALWAYS static inline __attribute__((always_inline))

/* Column group g (4 columns) of one 16-row half of a block. */
ALWAYS vb load_codes(int kind, const uint8_t *codes, int half, int g) {
    const uint8_t *n4 = codes + half * 256;
    switch (kind) {
    case MT_CODES_B8: return vb_load(codes + half * 512 + g * 64);
    case MT_CODES_P2: return vb_pair(vb_load(codes + half * 128 + g / 4 * 64), g & 3, 0);
    case MT_CODES_P2H1: {
        vb low = vb_pair(vb_load(codes + half * 128 + g / 4 * 64), g & 3, 0);
        return vb_or_bit(low, vb_load(codes + 256 + half * 64), g, 4);
    }
    default: break;
    }
    vb packed = vb_load(n4 + (g & 3) * 64);
    vb low = g < 4 ? vb_low4(packed) : vb_high4(packed);
    if (kind == MT_CODES_N4H1) return vb_or_bit(low, vb_load(codes + 512 + half * 64), g, 16);
    if (kind == MT_CODES_N4P2)
        return vb_or(low, vb_pair(vb_load(codes + 512 + half * 128 + g / 4 * 64), g & 3, 4));
    return low;
}

#if defined(MT_NEON)
#include "kernels_neon_unpack.h"
#else
/* Unpacked codes lie as whole bytes do in packed blocks, which are read where they are. */
#define UNPACKED_LIKE_BYTES 1
ALWAYS void unpack_codes(int kind, const uint8_t *values, int bias, const uint8_t *block,
                         uint8_t *out) {
    (void)bias;
    for (int half = 0; half < 2; half++) {
        UNROLL(8)
        for (int g = 0; g < 8; g++) {
            vb v = load_codes(kind, block, half, g);
            if (values) v = vb_lookup16(v, values);
            vb_store(out + half * 512 + g * 64, v);
        }
    }
}
ALWAYS vb get_codes(const uint8_t *half, int g, int bias) {
    (void)bias;
    return vb_load(half + g * 64);
}
enum { SCALE_COPIES = 1 }; /* of every scale and minimum, side by side */
ALWAYS void put_scales(float *p, vf x) { vf_store(p, x); }
ALWAYS vf get_scales(const float *p) { return vf_load(p); }
#endif

ALWAYS void unpack_scales(const mt_layout *f, const uint8_t *scale, const uint8_t *header,
                          float *scales, float *mins) {
    const uint16_t *d = (const uint16_t *)(const void *)header;
    for (int half = 0; half < 2; half++) {
        const int at = half * 16, to = at * SCALE_COPIES;
        if (f->scales == MT_SCALES_D || f->scales == MT_SCALES_DM) {
            const uint16_t *legacy = (const uint16_t *)(const void *)scale;
            put_scales(scales + to, vf_load_f16(legacy + at));
            if (f->scales == MT_SCALES_DM) put_scales(mins + to, vf_load_f16(legacy + 32 + at));
            continue;
        }
        if (f->scales == MT_SCALES_E) {
            put_scales(scales + to, vf_load_exponents(scale + at));
            continue;
        }
        const vf super_d = vf_mul(vf_load_f16(d + at), vf_set1(f->unit));
        if (f->scales == MT_SCALES_SUPER) put_scales(scales + to, super_d);
        if (f->scales == MT_SCALES_SUPER) continue;
        for (int sub = 0; sub < f->n_sub; sub++) {
            const uint8_t *s = scale + sub * 32 + at;
            put_scales(scales + sub * 32 * SCALE_COPIES + to,
                       vf_mul(super_d, f->is_signed_s ? vf_load_i8(s) : vf_load_u8(s)));
            if (f->scales == MT_SCALES_SM) {
                vf m = vf_mul(vf_load_f16(d + 32 + at), vf_load_u8(s + f->n_sub * 32));
                put_scales(mins + sub * 32 * SCALE_COPIES + to, vf_sub(vf_set1(0.0f), m));
            }
        }
    }
}

/* Packed bytes that a pass fetches towards the core, some with every block: in one burst they would
 * fill the core's few line buffers, and it would wait for memory before it multiplies. */
typedef struct {
    const uint8_t *at, *stop;
    size_t per_block;
} mm_ahead;

/* The share of pass p. */
static inline mm_ahead share_of(const uint8_t *ahead, size_t n_bytes, int p, int passes,
                                int n_blocks) {
    const size_t lines = (n_bytes + 63) / 64, n = (size_t)passes;
    const size_t first = lines * (size_t)p / n, stop = lines * ((size_t)p + 1) / n;
    return (mm_ahead){ahead + first * 64, ahead + stop * 64,
                      (stop - first + (size_t)n_blocks - 1) / (size_t)n_blocks * 64};
}
ALWAYS void fetch_some(mm_ahead *a) {
    const uint8_t *stop = a->at + a->per_block < a->stop ? a->at + a->per_block : a->stop;
    for (; a->at < stop; a->at += 64) __builtin_prefetch(a->at, 0, 2);
}

#define UNPACK_CASE(kind, values)                                                                  \
    for (int i = 0; i < n_blocks; i++) {                                                           \
        fetch_some(&meanwhile);                                                                    \
        unpack_codes(kind, values, f->bias, tile + mt_block_offset(f, b + i),                      \
                     codes + (size_t)i * 1024);                                                    \
    }                                                                                              \
    break

/* Whole bytes are read where they lie, on levels that do without unpacking. */
static void unpack(const mt_layout *f, const uint8_t *tile, int64_t b, int n_blocks,
                   const uint8_t *ahead, size_t ahead_bytes, mt_unpacked *out) {
    mm_ahead meanwhile = share_of(ahead, ahead_bytes, 0, 1, n_blocks);
    const int is_bytes = f->codes == MT_CODES_B8 && UNPACKED_LIKE_BYTES;
    const uint8_t *values = mt_values[f->table];
    uint8_t *codes = out->buffer;
    out->codes = is_bytes ? tile + mt_block_offset(f, b) : codes;
    out->code_stride = is_bytes ? mt_block_bytes(f) : 1024;
    switch (f->codes) {
    case MT_CODES_N4:
        if (f->table) {
            UNPACK_CASE(MT_CODES_N4, values);
        }
        UNPACK_CASE(MT_CODES_N4, NULL);
    case MT_CODES_N4H1: UNPACK_CASE(MT_CODES_N4H1, NULL);
    case MT_CODES_N4P2: UNPACK_CASE(MT_CODES_N4P2, NULL);
    case MT_CODES_P2: UNPACK_CASE(MT_CODES_P2, NULL);
    case MT_CODES_P2H1:
        if (f->table) {
            UNPACK_CASE(MT_CODES_P2H1, values);
        }
        UNPACK_CASE(MT_CODES_P2H1, NULL);
    case MT_CODES_B8:
        if (!UNPACKED_LIKE_BYTES) {
            UNPACK_CASE(MT_CODES_B8, NULL);
        }
    default: break;
    }
    const size_t code_bytes = mt_code_bytes(f->codes);
    for (int i = 0; i < n_blocks; i++) {
        const uint8_t *scale = tile + mt_block_offset(f, b + i) + code_bytes;
        const size_t at = (size_t)i * (size_t)f->n_sub * 32 * SCALE_COPIES;
        if (is_bytes) fetch_some(&meanwhile);
        unpack_scales(f, scale, tile + mt_header_offset(f, b + i), out->scales + at,
                      out->mins + at);
    }
}
