/* mm_tile of kernels_matmul.h on 64-bit ARM: the same sums in the same order, eight rows at a time, so
 * that sums, products, codes and activations of a tile all have a register.
 *
 * The vector pipes are what a core has least of, so nothing is left to them that can be had otherwise. A
 * scale or a group of four activations is a lane of a register, where a broadcast would take a turn of
 * theirs. Sums of integers begin at the bits of 1.5 * 2^23, which are loaded: sums below 2^22 move the
 * last bits of that float, and a subtraction makes them floats, as exactly as a conversion would, which
 * takes two turns of one pipe. */
enum { ARM_ROWS = 8 };

/* Volatile: every sum loads its start, where the compiler would copy a register. */
static const volatile int32x4_t arm_start = {0x4b400000, 0x4b400000, 0x4b400000, 0x4b400000};
ALWAYS float32x4_t arm_float(int32x4_t dot) {
    return vsubq_f32(vreinterpretq_f32_s32(dot), vdupq_n_f32(0x1.8p23f));
}

#if SIMD_HAS_MATMUL
enum { MM_STEP = 2 };

/* Two columns of a block of activations: column by column 8 codes, then the next 8; their scales side
 * by side, twice. */
typedef struct {
    int8x16_t q[4];
    float32x4_t d, ds[2];
} arm_pair;

ALWAYS float32x4_t arm_twice(float a, float b) {
    const float32x2_t pair = vset_lane_f32(b, vdup_n_f32(a), 1);
    return vcombine_f32(pair, pair);
}

static void pair_columns(int n_sub, const mt_q8_block *a, const mt_q8_block *b, int n_blocks,
                         int step, arm_pair *out) {
    for (int i = 0; i < n_blocks; i++, a++, b++, out += step) {
        for (int k = 0; k < 2; k++) {
            const int64x2_t x = vreinterpretq_s64_s8(vld1q_s8(a->q + 16 * k));
            const int64x2_t y = vreinterpretq_s64_s8(vld1q_s8(b->q + 16 * k));
            out->q[2 * k] = vreinterpretq_s8_s64(vzip1q_s64(x, y));
            out->q[2 * k + 1] = vreinterpretq_s8_s64(vzip2q_s64(x, y));
        }
        out->d = arm_twice(a->d, b->d);
        out->ds[0] = n_sub == 1 ? arm_twice(a->ds, b->ds) : arm_twice(a->dh[0], b->dh[0]);
        out->ds[1] = arm_twice(a->dh[1], b->dh[1]);
    }
}

/* Eight rows of 2 * pairs columns. A register of a sum: row r of both columns, row r + 1. */
ALWAYS void arm_rows(int pairs, int n_sub, int has_min, const uint8_t *w, size_t w_stride,
                     const float *scales, const float *mins, const arm_pair *x, int n_blocks,
                     mm_ahead *ahead, float32x4_t sum[MM_COLS / 2][4]) {
    for (int b = 0; b < n_blocks; b++, w += w_stride, x += pairs) {
        fetch_some(ahead);
        UNROLL(2)
        for (int sub = 0; sub < n_sub; sub++, scales += 64, mins += 64) {
            int32x4_t dot[MM_COLS / 2][4];
            UNROLL(2)
            for (int p = 0; p < pairs; p++)
                dot[p][0] = arm_start, dot[p][1] = arm_start, dot[p][2] = arm_start,
                dot[p][3] = arm_start;
            UNROLL(4)
            for (int k = sub * 2; k < (sub + 1) * 4 / n_sub; k++) {
                UNROLL(4)
                for (int r = 0; r < 4; r++) {
                    const int8x16_t codes = mt_signed(vld1q_u8(w + k * 128 + 16 * r));
                    UNROLL(2)
                    for (int p = 0; p < pairs; p++)
                        dot[p][r] = vmmlaq_s32(dot[p][r], codes, x[p].q[k]);
                }
            }
            UNROLL(4)
            for (int r = 0; r < 4; r++) {
                const float32x4_t dw = vld1q_f32(scales + 4 * r), mw = vld1q_f32(mins + 4 * r);
                UNROLL(2)
                for (int p = 0; p < pairs; p++) {
                    const float32x4_t d = vmulq_f32(dw, x[p].d);
                    sum[p][r] = vfmaq_f32(sum[p][r], d, arm_float(dot[p][r]));
                    if (has_min) sum[p][r] = vfmaq_f32(sum[p][r], mw, x[p].ds[sub]);
                }
            }
        }
    }
}

ALWAYS void mm_tile(int cols, int halves, int n_sub, int has_min, int bias, int most,
                    const mt_unpacked *w, int first_half, int n_blocks, const mt_q8_block *x,
                    size_t x_stride, int is_first, mm_ahead ahead, float *acc) {
    const int pairs = (cols + 1) / 2;
    arm_pair columns[MT_K_BLOCKS * MM_COLS / 2];
    (void)bias, (void)most, (void)halves, (void)first_half;
    for (int p = 0; p < pairs; p++) { /* an odd column stands in for its neighbour */
        const mt_q8_block *a = column(x, x_stride, 2 * p);
        pair_columns(n_sub, a, 2 * p + 1 < cols ? column(x, x_stride, 2 * p + 1) : a, n_blocks,
                     pairs, columns + p);
    }
    for (int rows = 0; rows < MT_TILE_ROWS; rows += ARM_ROWS) {
        float32x4_t sum[MM_COLS / 2][4];
        for (int p = 0; p < pairs; p++)
            for (int i = 0; i < 2; i++) {
                const float *a = acc + 2 * p * 32 + rows + 4 * i;
                const float32x4_t v = is_first ? vdupq_n_f32(0.0f) : vld1q_f32(a);
                const float32x4_t u = is_first || 2 * p + 1 == cols ? v : vld1q_f32(a + 32);
                sum[p][2 * i] = vzip1q_f32(v, u);
                sum[p][2 * i + 1] = vzip2q_f32(v, u);
            }
        arm_rows(pairs, n_sub, has_min, w->codes + rows / 16 * 512 + rows % 16 * 8, w->code_stride,
                 w->scales + 2 * rows, w->mins + 2 * rows, columns, n_blocks, &ahead, sum);
        for (int p = 0; p < pairs; p++)
            for (int i = 0; i < 2; i++) {
                float *a = acc + 2 * p * 32 + rows + 4 * i;
                vst1q_f32(a, vuzp1q_f32(sum[p][2 * i], sum[p][2 * i + 1]));
                if (2 * p + 1 < cols)
                    vst1q_f32(a + 32, vuzp2q_f32(sum[p][2 * i], sum[p][2 * i + 1]));
            }
    }
}
#else /* a register of a sum: four rows of one column */
enum { MM_STEP = 1 };

#if SIMD_HAS_DOT
/* Products of `groups` groups of columns, a multiple of four. */
ALWAYS void arm_dots(int cols, int groups, int room, const uint8_t *w, const int8_t *const *q,
                     int32x4_t dot[MM_COLS][2]) {
    (void)room;
    UNROLL(4)
    for (int c = 0; c < cols; c++) dot[c][0] = arm_start, dot[c][1] = arm_start;
    UNROLL(2)
    for (int k = 0; k < groups; k += 4) {
        int8x16_t x[MM_COLS];
        UNROLL(4)
        for (int c = 0; c < cols; c++) x[c] = vld1q_s8(q[c] + 4 * k);
        UNROLL(4)
        for (int g = 0; g < 4; g++) {
            UNROLL(2)
            for (int r = 0; r < 2; r++) {
                const int8x16_t codes = mt_signed(vld1q_u8(w + (k + g) * 64 + 16 * r));
                UNROLL(4)
                for (int c = 0; c < cols; c++) dot[c][r] = mt_dot_lane(dot[c][r], codes, x[c], g);
            }
        }
    }
}
#else
/* The same by products of 16 bits, `room` of which, and their neighbours, add up to no more. */
ALWAYS void arm_dots(int cols, int groups, int room, const uint8_t *w, const int8_t *const *q,
                     int32x4_t dot[MM_COLS][2]) {
    int16x8_t low[MM_COLS][2], high[MM_COLS][2];
    UNROLL(8)
    for (int g = 0; g < groups; g++) {
        const int8x16_t codes[2] = {mt_signed(vld1q_u8(w + g * 64)),
                                    mt_signed(vld1q_u8(w + g * 64 + 16))};
        UNROLL(4)
        for (int c = 0; c < cols; c++) {
            const int8x16_t x4 = mt_broadcast(q[c] + 4 * g);
            UNROLL(2)
            for (int r = 0; r < 2; r++) {
                if (g % room) {
                    low[c][r] = vmlal_s8(low[c][r], vget_low_s8(codes[r]), vget_low_s8(x4));
                    high[c][r] = vmlal_high_s8(high[c][r], codes[r], x4);
                } else {
                    low[c][r] = vmull_s8(vget_low_s8(codes[r]), vget_low_s8(x4));
                    high[c][r] = vmull_high_s8(codes[r], x4);
                }
                if (g % room != room - 1 && g != groups - 1) continue;
                const int16x8_t both = vpaddq_s16(low[c][r], high[c][r]);
                dot[c][r] = vpadalq_s16(g < room ? arm_start : dot[c][r], both);
            }
        }
    }
}
#endif

ALWAYS void arm_rows(int cols, int n_sub, int has_min, int room, const uint8_t *w, size_t w_stride,
                     const float *scales, const float *mins, const mt_q8_block *x, size_t x_stride,
                     int n_blocks, mm_ahead *ahead, float32x4_t sum[MM_COLS][2]) {
    for (int b = 0; b < n_blocks; b++, w += w_stride) {
        fetch_some(ahead);
        UNROLL(2)
        for (int sub = 0; sub < n_sub; sub++, scales += 32, mins += 32) {
            int32x4_t dot[MM_COLS][2];
            const int8_t *q[MM_COLS];
            UNROLL(4)
            for (int c = 0; c < cols; c++) q[c] = column(x, x_stride, c)[b].q + sub * 16;
            arm_dots(cols, 8 / n_sub, room, w + sub * 256, q, dot);
            UNROLL(2)
            for (int r = 0; r < 2; r++) {
                const float32x4_t dw = vld1q_f32(scales + 4 * r), mw = vld1q_f32(mins + 4 * r);
                UNROLL(4)
                for (int c = 0; c < cols; c++) {
                    const mt_q8_block *xb = column(x, x_stride, c) + b;
                    const float32x4_t d = vmulq_n_f32(dw, xb->d);
                    sum[c][r] = vfmaq_f32(sum[c][r], d, arm_float(dot[c][r]));
                    if (has_min)
                        sum[c][r] = vfmaq_n_f32(sum[c][r], mw, n_sub == 1 ? xb->ds : xb->dh[sub]);
                }
            }
        }
    }
}

ALWAYS void mm_tile(int cols, int halves, int n_sub, int has_min, int bias, int most,
                    const mt_unpacked *w, int first_half, int n_blocks, const mt_q8_block *x,
                    size_t x_stride, int is_first, mm_ahead ahead, float *acc) {
    const int largest = bias > most - bias ? bias : most - bias;
    const int room = pair_room(largest);
    (void)halves, (void)first_half;
    for (int rows = 0; rows < MT_TILE_ROWS; rows += ARM_ROWS) {
        float32x4_t sum[MM_COLS][2];
        for (int c = 0; c < cols; c++)
            for (int r = 0; r < 2; r++)
                sum[c][r] = is_first ? vdupq_n_f32(0.0f) : vld1q_f32(acc + c * 32 + rows + 4 * r);
        arm_rows(cols, n_sub, has_min, room, w->codes + rows / 16 * 512 + rows % 16 * 4,
                 w->code_stride, w->scales + rows, w->mins + rows, x, x_stride, n_blocks, &ahead,
                 sum);
        for (int c = 0; c < cols; c++)
            for (int r = 0; r < 2; r++) vst1q_f32(acc + c * 32 + rows + 4 * r, sum[c][r]);
    }
}
#endif
