/* Products with float weights, or with blocks as the floats that their format defines. */
static void unpack_float(int32_t format, const uint8_t *tile, int64_t k, int n, float *w) {
    for (int i = 0; i < n * 32; i += 16) {
        const int64_t at = k * 32 + i;
        if (format == 0)
            vf_store(w + i, vf_load((const float *)(const void *)tile + at));
        else if (format == 1)
            vf_store(w + i, vf_load_f16((const uint16_t *)(const void *)tile + at));
        else
            vf_store(w + i, vf_load_bf16((const uint16_t *)(const void *)tile + at));
    }
}

static void widen_blocks(const mt_layout *f, const mt_unpacked *from, int n_blocks, float *w) {
    const float *scales = from->scales, *mins = from->mins;
    const vf bias = vf_set1((float)f->bias);
    const size_t sub_blocks = (size_t)f->n_sub;
    for (int b = 0; b < n_blocks; b++)
        for (int g = 0; g < 8; g++)
            for (int half = 0; half < 2; half++) {
                const size_t sub = (size_t)b * sub_blocks + (size_t)(g / 4) * (sub_blocks - 1);
                const size_t at = (sub * 32 + (size_t)half * 16) * SCALE_COPIES;
                const vf dw = get_scales(scales + at);
                const vb four =
                    get_codes(from->codes + (size_t)b * from->code_stride + half * 512, g, f->bias);
                for (int j = 0; j < 4; j++) {
                    vf value = vf_mul(dw, vf_sub(vb_column(four, j), bias));
                    if (mt_has_min(f)) value = vf_add(value, get_scales(mins + at));
                    vf_store(w + (size_t)(b * 32 + g * 4 + j) * 32 + half * 16, value);
                }
            }
}

/* Sixteen registers hold four columns of one half of a tile, or three of both. */
enum { MM_F32_HALVES = MM_COLS == 4 ? 1 : 2 };

ALWAYS void mm_f32_tile(int cols, const float *w, int n, const float *x, size_t x_stride,
                        float *acc) {
    vf sum[MM_F32_HALVES][MM_COLS];
    for (int h = 0; h < MM_F32_HALVES; h++)
        for (int c = 0; c < cols; c++) sum[h][c] = vf_load(acc + c * 32 + h * 16);
    for (int k = 0; k < n; k++)
        for (int h = 0; h < MM_F32_HALVES; h++) {
            const vf wk = vf_load(w + k * 32 + h * 16);
            UNROLL(6)
            for (int c = 0; c < cols; c++)
                sum[h][c] = vf_fma(wk, vf_set1(x[(size_t)c * x_stride + (size_t)k]), sum[h][c]);
        }
    for (int h = 0; h < MM_F32_HALVES; h++)
        for (int c = 0; c < cols; c++) vf_store(acc + c * 32 + h * 16, sum[h][c]);
}

#define MM_F32_CASE(cols, unused)                                                                  \
    case cols:                                                                                     \
        for (int h = 0; h < 2; h += MM_F32_HALVES)                                                 \
            mm_f32_tile(cols, w + h * 16, n, x + (size_t)c * x_stride, x_stride,                   \
                        acc + c * 32 + h * 16);                                                    \
        break;

static void mm_f32(const float *w, int n, const float *x, size_t x_stride, int n_cols, float *acc) {
    const int passes = (n_cols + MM_COLS - 1) / MM_COLS;
    for (int p = 0, c = 0; p < passes; p++) {
        const int cols = (n_cols - c + passes - p - 1) / (passes - p);
        switch (cols) { MM_EACH_COLS(MM_F32_CASE, 0) }
        c += cols;
    }
}
