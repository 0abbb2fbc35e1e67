/* Unpacked codes and scales as the tiles of kernels_neon.h read them. Codes are signed, their bias
 * taken off, so that a sum begins at 0. With matrix products two column groups lie side by side, row by
 * row (a row's 8 columns, those of the next row: an operand of SMMLA), and every scale stands twice, as
 * do the rows of a product of two columns of activations. */
#define UNPACKED_LIKE_BYTES 0

/* Groups g and g + 1 of a half of a block, g even. */
ALWAYS void put_codes(uint8_t *out, vb a, vb b, int bias) {
    const uint8x16_t minus = vdupq_n_u8((uint8_t)bias);
    UNROLL(4)
    for (int i = 0; i < 4; i++) {
        const uint8x16_t x = vsubq_u8(a.v[i], minus), y = vsubq_u8(b.v[i], minus);
#if SIMD_HAS_MATMUL
        const uint32x4_t x4 = vreinterpretq_u32_u8(x), y4 = vreinterpretq_u32_u8(y);
        vst1q_u8(out + 32 * i, vreinterpretq_u8_u32(vzip1q_u32(x4, y4)));
        vst1q_u8(out + 32 * i + 16, vreinterpretq_u8_u32(vzip2q_u32(x4, y4)));
#else
        vst1q_u8(out + 16 * i, x);
        vst1q_u8(out + 64 + 16 * i, y);
#endif
    }
}
ALWAYS void unpack_codes(int kind, const uint8_t *values, int bias, const uint8_t *block,
                         uint8_t *out) {
    for (int half = 0; half < 2; half++) {
        UNROLL(8)
        for (int g = 0; g < 8; g += 2) {
            vb a = load_codes(kind, block, half, g), b = load_codes(kind, block, half, g + 1);
            if (values) {
                a = vb_lookup16(a, values);
                b = vb_lookup16(b, values);
            }
            put_codes(out + half * 512 + g * 64, a, b, bias);
        }
    }
}

/* Group g again, of a half of a block: the code as a format has it. */
ALWAYS vb get_codes(const uint8_t *half, int g, int bias) {
    vb r;
    UNROLL(4)
    for (int i = 0; i < 4; i++) {
#if SIMD_HAS_MATMUL
        const uint8_t *pair = half + g / 2 * 128 + 32 * i;
        const uint32x4_t x = vreinterpretq_u32_u8(vld1q_u8(pair));
        const uint32x4_t y = vreinterpretq_u32_u8(vld1q_u8(pair + 16));
        r.v[i] = vreinterpretq_u8_u32(g % 2 ? vuzp2q_u32(x, y) : vuzp1q_u32(x, y));
#else
        r.v[i] = vld1q_u8(half + g * 64 + 16 * i);
#endif
        r.v[i] = vaddq_u8(r.v[i], vdupq_n_u8((uint8_t)bias));
    }
    return r;
}

#if SIMD_HAS_MATMUL
enum { SCALE_COPIES = 2 };
ALWAYS void put_scales(float *p, vf x) {
    for (int i = 0; i < 4; i++) vst2q_f32(p + 8 * i, ((float32x4x2_t){{x.v[i], x.v[i]}}));
}
ALWAYS vf get_scales(const float *p) {
    vf r;
    for (int i = 0; i < 4; i++) r.v[i] = vld2q_f32(p + 8 * i).val[0];
    return r;
}
#else
enum { SCALE_COPIES = 1 };
ALWAYS void put_scales(float *p, vf x) { vf_store(p, x); }
ALWAYS vf get_scales(const float *p) { return vf_load(p); }
#endif
