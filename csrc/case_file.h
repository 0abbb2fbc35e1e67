/* Files of tests/runtime/record_cases.py: a head, then the structs of martlet.h as this machine lays them
 * out, whose pointers are offsets from the start of the file. Read by replay.c and tests/fuzz. */
#ifndef MT_CASE_FILE_H
#define MT_CASE_FILE_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "martlet.h"

typedef struct {
    char magic[8];
    int32_t abi_version, n_steps;
    int64_t n_bytes, plan, options, steps; /* steps: mt_step, whose results were recorded */
} case_head;

static inline uint8_t *read_file(const char *path, size_t *n_bytes) {
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END)) return NULL;
    *n_bytes = (size_t)ftell(file);
    rewind(file);
    uint8_t *data = malloc(*n_bytes + 1);
    if (data && fread(data, 1, *n_bytes, file) != *n_bytes) data = NULL;
    fclose(file);
    return data;
}

/* An offset, as it was recorded, becomes a pointer; 0 is NULL. */
#define PLACE(pointer)                                                                             \
    do {                                                                                           \
        const uintptr_t at = (uintptr_t)(pointer);                                                 \
        (pointer) = at ? (void *)(base + at) : NULL;                                               \
    } while (0)

static inline void place_plan(uint8_t *base, mt_plan *p) {
    PLACE(p->ops);
    PLACE(p->buffers);
    PLACE(p->tensors);
    PLACE(p->kv_layers);
    PLACE(p->states);
    PLACE(p->inputs);
    for (int32_t t = 0; t < p->n_tensors; t++) {
        mt_tensor *tensor = (mt_tensor *)&p->tensors[t];
        PLACE(tensor->data);
        PLACE(tensor->codebook);
    }
}

static inline void place_step(uint8_t *base, mt_step *s) {
    PLACE(s->tokens);
    PLACE(s->positions);
    PLACE(s->seq_start);
    PLACE(s->block_table);
    PLACE(s->window_table);
    PLACE(s->out_rows);
    PLACE(s->logits);
    PLACE(s->hidden_rows);
    PLACE(s->hidden);
    PLACE(s->states);
    PLACE(s->segments);
    PLACE(s->adapters);
    PLACE(s->given);
    PLACE(s->guesses);
    PLACE(s->replays);
}

static inline int32_t logits_width(const mt_plan *p) {
    for (int32_t b = 0; b < p->n_buffers; b++)
        if (p->buffers[b].is_logits) return p->buffers[b].width;
    return 0;
}

/* The places of one case, for free(); NULL where it is not of this version of the interface. */
static inline case_head *open_case(const char *path, int32_t abi_version) {
    size_t n_bytes = 0;
    uint8_t *base = read_file(path, &n_bytes);
    case_head *head = (case_head *)(void *)base;
    if (!base || n_bytes < sizeof *head || memcmp(head->magic, "mtcase1", 8) ||
        (size_t)head->n_bytes != n_bytes) {
        fprintf(stderr, "error: %s is not a whole case\n", path);
        return NULL;
    }
    if (head->abi_version != abi_version) {
        fprintf(stderr, "error: %s has interface %d, the library %d: record it again\n", path,
                (int)head->abi_version, (int)abi_version);
        return NULL;
    }
    place_plan(base, (mt_plan *)(void *)(base + head->plan));
    mt_step *steps = (mt_step *)(void *)(base + head->steps);
    for (int32_t i = 0; i < head->n_steps; i++) place_step(base, &steps[i]);
    return head;
}

#endif
