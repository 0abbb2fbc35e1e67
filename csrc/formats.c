/* The table of packed layouts, from the list in formats.h. */
#include "formats.h"

#define LAYOUT_ROW(name, ...) {MT_AT_##name, __VA_ARGS__},
static const mt_layout layouts[] = {
    MT_BLOCK_LAYOUTS(LAYOUT_ROW){-1, MT_F32, MT_CODES_FLOAT, MT_SCALES_NONE, 1, 0, 0, 0, 1, 4},
    {-1, MT_F16, MT_CODES_FLOAT, MT_SCALES_NONE, 1, 0, 0, 0, 1, 2},
    {-1, MT_BF16, MT_CODES_FLOAT, MT_SCALES_NONE, 1, 0, 0, 0, 1, 2},
};

/* -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113, each + 128 */
const uint8_t mt_iq4_values[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                   129, 141, 153, 166, 181, 197, 217, 241};

const mt_layout *mt_layout_of(int32_t format) {
    for (size_t i = 0; i < sizeof layouts / sizeof layouts[0]; i++)
        if (layouts[i].format == format) return &layouts[i];
    return NULL;
}
