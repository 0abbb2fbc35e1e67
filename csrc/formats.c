/* The table of packed layouts: adding a weight format is a row here and a case in pack.c. */
#include "formats.h"

#include "martlet.h"

static const mt_layout layouts[] = {
    /* format   codes            scales        n_sub bias signed lookup raw block, bytes */
    {MT_F32, MT_CODES_FLOAT, MT_SCALES_NONE, 1, 0, 0, 0, 1, 4},
    {MT_F16, MT_CODES_FLOAT, MT_SCALES_NONE, 1, 0, 0, 0, 1, 2},
    {MT_BF16, MT_CODES_FLOAT, MT_SCALES_NONE, 1, 0, 0, 0, 1, 2},
    {MT_Q4_0, MT_CODES_N4, MT_SCALES_D, 1, 8, 0, 0, 32, 18},
    {MT_Q4_1, MT_CODES_N4, MT_SCALES_DM, 1, 0, 0, 0, 32, 20},
    {MT_Q5_0, MT_CODES_N4H1, MT_SCALES_D, 1, 16, 0, 0, 32, 22},
    {MT_Q5_1, MT_CODES_N4H1, MT_SCALES_DM, 1, 0, 0, 0, 32, 24},
    {MT_Q8_0, MT_CODES_B8, MT_SCALES_D, 1, 128, 0, 0, 32, 34},
    {MT_IQ4_NL, MT_CODES_N4, MT_SCALES_D, 1, 128, 0, 1, 32, 18},
    {MT_IQ4_XS, MT_CODES_N4, MT_SCALES_S, 1, 128, 1, 1, 256, 136},
    {MT_Q2_K, MT_CODES_P2, MT_SCALES_SM, 2, 0, 0, 0, 256, 84},
    {MT_Q3_K, MT_CODES_P2H1, MT_SCALES_S, 2, 4, 1, 0, 256, 110},
    {MT_Q4_K, MT_CODES_N4, MT_SCALES_SM, 1, 0, 0, 0, 256, 144},
    {MT_Q5_K, MT_CODES_N4H1, MT_SCALES_SM, 1, 0, 0, 0, 256, 176},
    {MT_Q6_K, MT_CODES_N4P2, MT_SCALES_S, 2, 32, 1, 0, 256, 210},
};

/* -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113, each + 128 */
const uint8_t mt_iq4_values[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                   129, 141, 153, 166, 181, 197, 217, 241};

const mt_layout *mt_layout_of(int32_t format) {
    for (size_t i = 0; i < sizeof layouts / sizeof layouts[0]; i++)
        if (layouts[i].format == format) return &layouts[i];
    return NULL;
}
