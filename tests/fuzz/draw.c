/* Logits and terms of any bits that sampling.py may hand over: a draw is a token that may be and has
 * weight, the same one by every kernel table. Scratch and logits end where they are said to. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cpu.h"
#include "martlet.h"

/* Logits: mostly few, which take less time. */
enum { FEW = 40, MOST = 700, MOST_ISAS = 16 };

/* Asked once: the instruction that tells is slow in a virtual machine. */
static int32_t is_supported[MOST_ISAS];

typedef struct {
    uint16_t n, top_p, min_p, temperature;
    uint32_t uniform;
    uint8_t has_mask, exponent, pad[2];
} head;

/* Between 0 and 1, both of which come up. */
static double share(uint16_t bits) { return bits == 0xffff ? 1.0 : bits / 65536.0; }

static void check(int64_t id, int32_t n, const float *logits, const uint32_t *allowed) {
    if (id < 0 || id >= n || !(logits[id] > -INFINITY)) abort();
    if (allowed && !(allowed[id / 32] >> id % 32 & 1)) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    head h;
    if (size < sizeof h + 4) return 0;
    memcpy(&h, data, sizeof h);
    const uint8_t *values = data + sizeof h;
    const size_t n_values = size - sizeof h;
    const int32_t n = 1 + h.n / 8 % (h.n % 8 ? FEW : MOST), n_words = (n + 31) / 32;
    float *logits = malloc((size_t)n * sizeof *logits);
    uint32_t *mask = malloc((size_t)n_words * sizeof *mask);
    for (size_t i = 0; i < (size_t)n * sizeof *logits; i++)
        ((uint8_t *)logits)[i] = values[i % n_values];
    for (size_t i = 0; i < (size_t)n_words * sizeof *mask; i++)
        ((uint8_t *)mask)[i] = (uint8_t)(values[(7 * i) % n_values] | (h.has_mask & 2 ? 0x11 : 0));
    /* sampling.py refuses a row with NaN, and one whose best is not finite */
    for (int32_t i = 0; i < n; i++)
        if (isnan(logits[i]) || logits[i] == INFINITY) logits[i] = -INFINITY;
    float *kept = malloc((size_t)n * sizeof *kept);
    const uint32_t *allowed = h.has_mask & 1 ? mask : NULL;
    int64_t best_id = -1;
    if (allowed) {
        best_id = mt_mask(logits, n, allowed, kept);
    } else {
        for (int32_t i = 0; i < n; i++)
            if (logits[i] > (best_id < 0 ? -INFINITY : logits[best_id])) best_id = i;
    }
    if (best_id >= 0) {
        check(best_id, n, logits, allowed);
        const mt_draw_terms terms = {
            .top_p = share(h.top_p),
            .min_p = share(h.min_p),
            .uniform = h.uniform / 4294967296.0,
            .best = logits[best_id],
            .temperature = ldexpf(1.0f + h.temperature / 65536.0f, (int)(h.exponent % 40) - 20),
            .allowed = allowed};
        int64_t first = -1;
        for (int32_t isa = 0; isa < mt_n_isas(); isa++) {
            if (!is_supported[isa]) continue;
            void *scratch = malloc((size_t)mt_draw_bytes(n));
            const int64_t id = mt_draw(isa, logits, n, &terms, scratch);
            free(scratch);
            check(id, n, logits, allowed);
            if (first >= 0 && id != first) abort();
            first = id;
        }
    }
    free(kept);
    free(mask);
    free(logits);
    return 0;
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    if (mt_n_isas() > MOST_ISAS) abort();
    for (int32_t isa = 0; isa < mt_n_isas(); isa++) is_supported[isa] = mt_isa_supported(isa);
    return 0;
}
