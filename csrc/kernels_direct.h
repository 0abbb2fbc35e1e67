/* Products for a few columns, straight from packed memory: nothing is unpacked to memory. */
/* Scale and minimum of one half of a block, as unpack_scales. */
ALWAYS void load_scales(const mt_layout *f, const uint8_t *scale, const uint8_t *header, int sub,
                        int half, vf *dw, vf *mw) {
    const int at = half * 16;
    const uint16_t *legacy = (const uint16_t *)(const void *)scale;
    const uint16_t *d = (const uint16_t *)(const void *)header;
    if (f->scales == MT_SCALES_E) {
        *dw = *mw = vf_load_exponents(scale + at);
        return;
    }
    if (!mt_is_super(f)) {
        *dw = vf_load_f16(legacy + at);
        *mw = f->scales == MT_SCALES_DM ? vf_load_f16(legacy + 32 + at) : *dw;
        return;
    }
    const uint8_t *s = scale + sub * 32 + at;
    *dw = vf_load_f16(d + at);
    if (f->unit != 1.0f) *dw = vf_mul(*dw, vf_set1(f->unit));
    if (f->scales != MT_SCALES_SUPER)
        *dw = vf_mul(*dw, f->is_signed_s ? vf_load_i8(s) : vf_load_u8(s));
    *mw = *dw;
    if (f->scales == MT_SCALES_SM) {
        vf m = vf_mul(vf_load_f16(d + 32 + at), vf_load_u8(s + f->n_sub * 32));
        *mw = vf_sub(vf_set1(0.0f), m);
    }
}

/* Share `at` of n of the lines of a block: in one burst they would fill the core's few line buffers. */
ALWAYS void fetch_share(const uint8_t *block, size_t n_bytes, int at, int n) {
    const int lines = (int)((n_bytes + 63) / 64), each = (lines + n - 1) / n;
    for (int line = at * each; line < (at + 1) * each && line < lines; line++)
        __builtin_prefetch(block + line * 64, 0, 2);
}

ALWAYS void direct_tile(const mt_layout *f, int cols, int halves, int first_half, int is_first,
                        const uint8_t *tile, int n_blocks, const mt_q8_block *const *x,
                        float *acc) {
    enum { AHEAD = 4096 }; /* bytes: the hardware's own prefetch ends at every page */
    const size_t block_bytes = mt_block_bytes(f), code_bytes = mt_code_bytes(f->codes);
    vf sum[2][MM_COLS];
    for (int h = 0; h < halves; h++)
        for (int c = 0; c < cols; c++) sum[h][c] = vf_set1(0.0f);
    const uint8_t *header = tile, *block = tile + mt_header_bytes(f);
    for (int b = 0; b < n_blocks; b++, block += block_bytes) {
        if (mt_is_super(f) && b && b % 8 == 0) {
            header = block;
            block += mt_header_bytes(f);
        }
        UNROLL(2)
        for (int sub = 0; sub < f->n_sub; sub++) {
            UNROLL(2)
            for (int h = 0; h < halves; h++) {
                const int half = first_half + h;
                vi dot[MM_COLS];
                vp pairs[MM_COLS];
                UNROLL(6)
                for (int c = 0; c < cols; c++) {
                    const int32_t n8 = f->n_sub == 1 ? x[c][b].n8 : x[c][b].nh8[sub];
                    dot[c] = vi_start(n8, f->bias);
                }
                UNROLL(8)
                for (int g = sub * 4; g < (sub + 1) * 8 / f->n_sub; g++) {
                    const int at = (sub * halves + h) * 8 / f->n_sub + g - sub * 4;
                    if (is_first) fetch_share(block + AHEAD, block_bytes, at, 8 * halves);
                    vb w = load_codes(f->codes, block, half, g);
                    if (f->table) w = vb_lookup16(w, mt_values[f->table]);
                    UNROLL(6)
                    for (int c = 0; c < cols; c++)
                        dot_group(&dot[c], &pairs[c], w, x[c][b].q + sub * 16, g - sub * 4,
                                  8 / f->n_sub - 1, mt_most_code(f));
                }
                vf dw, mw;
                load_scales(f, block + code_bytes, header, sub, half, &dw, &mw);
                for (int c = 0; c < cols; c++) {
                    const mt_q8_block *xb = x[c] + b;
                    sum[h][c] = vf_fma(vf_mul(dw, vf_set1(xb->d)), vf_from_i32(dot[c]), sum[h][c]);
                    if (mt_has_min(f))
                        sum[h][c] =
                            vf_fma(mw, vf_set1(f->n_sub == 1 ? xb->ds : xb->dh[sub]), sum[h][c]);
                }
            }
        }
    }
    for (int h = 0; h < halves; h++)
        for (int c = 0; c < cols; c++) vf_store(acc + c * 32 + (first_half + h) * 16, sum[h][c]);
}

#define DIRECT_CASE(cols, f)                                                                       \
    case cols:                                                                                     \
        direct_tile(f, cols, DIRECT_HALVES, h, is_first &&h == 0, tile, n_blocks, x, acc);         \
        break;
#define DIRECT_FUNCTION(name, ...)                                                                 \
    static void direct_##name(int n_cols, int is_first, const uint8_t *tile, int n_blocks,         \
                              const mt_q8_block *const *x, float *acc) {                           \
        static const mt_layout f = {MT_AT_##name, __VA_ARGS__};                                    \
        for (int h = 0; h < 2; h += DIRECT_HALVES) switch (n_cols) {                               \
                MM_EACH_COLS(DIRECT_CASE, &f)                                                      \
            }                                                                                      \
    }
MT_BLOCK_LAYOUTS(DIRECT_FUNCTION)

#define DIRECT_ROW(name, ...) direct_##name,
typedef void direct_fn(int, int, const uint8_t *, int, const mt_q8_block *const *, float *);

static void mm_direct(const mt_layout *f, const uint8_t *tile, int n_blocks,
                      const mt_q8_block *const *x, int n_cols, float *acc) {
    static direct_fn *const by_layout[] = {MT_BLOCK_LAYOUTS(DIRECT_ROW)};
    const int passes = (n_cols + MM_COLS - 1) / MM_COLS;
    for (int p = 0, c = 0; p < passes; p++) {
        const int cols = (n_cols - c + passes - p - 1) / (passes - p);
        by_layout[f->index](cols, p == 0, tile, n_blocks, x + c, acc + c * 32);
        c += cols;
    }
}
