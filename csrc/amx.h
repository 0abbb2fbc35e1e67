/* The configuration of the tiles: rows of each and bytes of a row. */
#ifndef MT_AMX_H
#define MT_AMX_H

#include <immintrin.h>
#include <stdint.h>

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} amx_config;

/* gcc 12 takes the intrinsic to read 8 bytes of the configuration and drops the other stores. */
static inline void amx_configure(const amx_config *config) {
    __asm__ volatile("" : : "r"(config) : "memory");
    _tile_loadconfig(config);
}

#endif
