/* The table of packed layouts, from the list in formats.h. */
#include "formats.h"

#define LAYOUT_ROW(name, ...) {MT_AT_##name, __VA_ARGS__},
static const mt_layout layouts[] = {
    MT_BLOCK_LAYOUTS(LAYOUT_ROW){-1, MT_F32, MT_CODES_FLOAT, MT_TABLE_NONE, MT_SCALES_NONE, 1, 0, 0,
                                 1, 1, 4},
    {-1, MT_F16, MT_CODES_FLOAT, MT_TABLE_NONE, MT_SCALES_NONE, 1, 0, 0, 1, 1, 2},
    {-1, MT_BF16, MT_CODES_FLOAT, MT_TABLE_NONE, MT_SCALES_NONE, 1, 0, 0, 1, 1, 2},
};

/* IQ4: -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113. FP4: twice 0 .5 1 1.5 2 3 4 6.
 * IQ1: eight times -1 0 1, plus and then minus one. IQ2: 8 25 43. IQ3_XXS: 4 12 ... 52 62.
 * IQ3_S: 1 3 ... 15. Codes that no block holds stand for 0. */
const uint8_t mt_values[MT_N_TABLES][16] = {
    [MT_TABLE_IQ4] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
    [MT_TABLE_FP4] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4},
    [MT_TABLE_IQ1] = {9, 17, 25, 16, 7, 15, 23, 16},
    [MT_TABLE_IQ2] = {72, 89, 107, 64, 56, 39, 21, 64},
    [MT_TABLE_IQ3_XXS] = {68, 76, 84, 92, 100, 108, 116, 126, 60, 52, 44, 36, 28, 20, 12, 2},
    [MT_TABLE_IQ3_S] = {17, 19, 21, 23, 25, 27, 29, 31, 15, 13, 11, 9, 7, 5, 3, 1},
};

const mt_layout *mt_layout_of(int32_t format) {
    for (size_t i = 0; i < sizeof layouts / sizeof layouts[0]; i++)
        if (layouts[i].format == format) return &layouts[i];
    return NULL;
}
