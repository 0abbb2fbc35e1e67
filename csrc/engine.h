/* The loaded model and the state of one running step, shared by engine.c, check.c and ops*.c. */
#ifndef MT_ENGINE_H
#define MT_ENGINE_H

#include <stdatomic.h>

#include "cpu.h"
#include "kernels.h"
#include "martlet.h"
#include "threads.h"

enum {
    MT_K_FLOATS = 128,    /* columns of float weights widened at a time */
    MT_FLOAT_ROWS = 24,   /* float rows multiplied at a time: 12 KB of 128 columns */
    MT_COL_CHUNK = 252,   /* activation rows of one work item: 42 passes of 6 */
    MT_GLU_CHUNK = 512,   /* values of one work item of an activation */
    MT_TILE_RUN = 4,      /* neighbouring tiles of weights that a thread reads in one go */
    MT_TILE_VECTORS = 24, /* query vectors of an attention item, at least, if there are so many */
    MT_PART_HEADS = 6,    /* the same of an item that takes a part of a row's heads alone */
    MT_SPLIT_ROWS = 16,   /* rows of a step up to which attention is split over positions */
    MT_PHASES = 2,        /* an op does its work items in one phase, or in two */
    MT_N_INPUTS = sizeof((mt_op *)0)->in / sizeof(int32_t),
    MT_MAX_EXPERTS = 1024,   /* of a layer */
    MT_SUM_VALUES = 1 << 16, /* sums of experts that a thread works on: 256 KB, of an L2 */
    MT_MAX_USED = 64,        /* that a row can choose */
    MT_SPIN_US = 20          /* a thread without work spins this long for the others, then sleeps */
};

typedef struct mt_weight {
    const mt_layout *layout; /* NULL for vectors and tables */
    int32_t format;
    int64_t rows, cols;
    int64_t n_tiles;
    uint8_t *packed;    /* matrices: tiles */
    mt_tensor stored;   /* those that stay in the file, as they stand there */
    mt_tensor late;     /* what tiles are packed from when first used */
    uint8_t *is_packed; /* (n_tiles) which are; NULL: all */
    const void *values; /* vectors (float) and tables (double): a copy in the arena of weights */
} mt_weight;

typedef struct mt_kv_region {
    mt_kv_layer shape;
    size_t offset;      /* bytes from the start of the pool */
    size_t block_bytes; /* all heads of one block */
    size_t head_bytes;
    size_t v_offset_bytes;
    size_t k_scales_bytes, v_scales_bytes; /* as in mt_kv_view */
    int32_t v_stride;
} mt_kv_region;

/* Scratch of one thread. */
typedef struct mt_scratch {
    mt_unpacked unpacked; /* MT_K_BLOCKS blocks */
    float *wide;          /* (MT_K_FLOATS, or keys of a state, 32) widened weights, or a state */
    float *acc;           /* (MT_COL_CHUNK, 32) */
    float *rows;          /* (MT_FLOAT_ROWS, MT_K_FLOATS) widened activations */
    float *row;           /* (widest buffer) */
    uint8_t *tile;        /* one of a matrix that stays in the file */
    float *sums;          /* see sums_bytes */
    uint8_t *gathered;    /* rows of an expert, see gathered_bytes */
    float *attn;          /* MT_ATTN_SCRATCH floats */
    float *q;             /* (MT_ATTN_MAX_ROWS, head_dim) query vectors of an item */
    float *part, *total;  /* (MT_ATTN_MAX_ROWS, v_stride) */
} mt_scratch;

/* A run of rows of one sequence that one attention item takes. */
typedef struct mt_row_tile {
    int32_t seq, first, n;
    int64_t cost; /* rows x positions before them, roughly what it takes */
} mt_row_tile;

/* The rows of a step and the experts that they have chosen, by expert and then by row. */
typedef struct mt_pairs {
    int32_t *start;  /* (experts + 1) first pair of each */
    int32_t *active; /* (n_active) experts that have pairs */
    int32_t *row;    /* (pairs) */
    float *weight;   /* (pairs) of this expert's result in that of the row */
    int32_t n_active;
} mt_pairs;

/* A thread's share of the items of a phase, of which others take what it has not begun. Of streams it
 * follows what the thread has lately done of all: a slow core begins with less. */
typedef struct mt_share {
    _Alignas(64) atomic_ullong taken; /* phase << 32 | items handed out in it */
    double part, begin;               /* of all items: how much, and how much lies before it */
    double done;                      /* sum of the parts that the thread did in this step */
} mt_share;

struct mt_engine {
    mt_plan plan; /* with ops, buffers and kv_layers copied; tensors = NULL */
    mt_op *ops;
    mt_buffer *buffers;
    mt_weight *weights;
    mt_kv_region *kv;
    const mt_kernels *kernels;
    mt_pool *pool;
    mt_scratch *scratch;   /* one per thread */
    float *state_memory;   /* (n_states, state_width) */
    size_t *state_offsets; /* (plan.n_states) floats before each recurrent layer's part of a slot */
    size_t state_width;
    float *guess_memory;   /* (n_states, guess_width): rows that may be taken back */
    size_t *guess_offsets; /* (plan.n_states) floats before each recurrent layer's part of that */
    size_t guess_width;
    uint8_t *weight_memory, *late_memory, *late_flags, *kv_memory, *arena, *scratch_memory;
    size_t late_bytes;        /* of weight_bytes, those in late_memory */
    int32_t weights_are_lent; /* weight_memory is the caller's */
    size_t weight_bytes, kv_bytes, state_bytes, guess_bytes, arena_bytes, scratch_bytes;
    int32_t block_tokens, n_blocks, n_window_blocks, n_states, n_guesses, kv_type, isa, n_threads;
    int32_t has_logits;
    int32_t window; /* positions that a row sees in windowed layers at most; 0: there are none */
    int32_t max_v_stride, max_heads;
    int32_t max_group, min_kv_heads;    /* of attention ops: query heads of an item, kv heads */
    int64_t n_embedded[MT_N_EMBED_BYS]; /* rows of the shortest table embedded by each */

    /* the step being run */
    const mt_step *step;
    atomic_int n_bad;   /* tiles packed in it that hold bad values */
    mt_bad_value bad;   /* where one of them does */
    int32_t *row_seq;   /* (max_rows) */
    mt_row_tile *tiles; /* (max_rows) */
    int32_t n_tiles;
    mt_pairs pairs;     /* of the op being run, if it is of experts */
    int32_t split_rows; /* rows up to which attention may be split */
    float *partials;    /* (split_rows * heads, splits, v_stride + 2) */
    int32_t max_splits;
    int32_t n_splits;     /* of the longest sequence of the step */
    double *slowed;       /* (n_threads) see mt_engine_slow_down; NULL: none is */
    mt_op_span *spans;    /* (n_threads, n_ops) of the caller, or NULL: see mt_engine_trace */
    mt_share *shares;     /* (n_threads) */
    mt_gate phases_done;  /* how many phases are complete, of this step and those before */
    unsigned first_phase; /* what that was when the step began */
    _Alignas(64) atomic_int n_finished; /* items of the phase being run */
};

/* Blocks of a sequence as this layer's keys and values are kept. */
static inline const int32_t *mt_blocks_of(const mt_engine *e, const mt_kv_region *kv, int32_t seq) {
    const int32_t *table = kv->shape.is_windowed ? e->step->window_table : e->step->block_table;
    return table + (size_t)seq * (size_t)e->step->table_width;
}
/* What a recurrent layer keeps of a sequence of the step. */
static inline float *mt_state_of(const mt_engine *e, int32_t seq, int32_t layer) {
    return e->state_memory + (size_t)e->step->states[seq] * e->state_width +
           e->state_offsets[layer];
}
/* What it has read of the guessed rows of the sequence's last step: (n_guesses, plan.inputs). */
static inline float *mt_guesses_of(const mt_engine *e, int32_t seq, int32_t layer) {
    return e->guess_memory + (size_t)e->step->states[seq] * e->guess_width +
           e->guess_offsets[layer];
}
static inline int mt_rows_of(const mt_engine *e, const mt_buffer *b) {
    switch (b->rows) {
    case MT_ROWS_OUT: return e->step->n_out;
    case MT_ROWS_HIDDEN: return e->step->n_hidden;
    default: return e->step->n_rows * b->per_row;
    }
}
/* Rows that an op writes, which is how many items it has where each is a row. */
static inline int mt_count_rows(const mt_engine *e, const mt_op *op) {
    return mt_rows_of(e, &e->buffers[op->out]);
}
static inline uint8_t *mt_row(const mt_engine *e, int32_t id, int row) {
    const mt_buffer *b = &e->buffers[id];
    if (b->is_logits) return (uint8_t *)(e->step->logits + (size_t)row * (size_t)b->width);
    return e->arena + b->offset + (int64_t)row * b->row_bytes;
}
static inline float *mt_row_f32(const mt_engine *e, int32_t id, int row) {
    return (float *)(void *)mt_row(e, id, row);
}
static inline mt_q8_block *mt_row_q8(const mt_engine *e, int32_t id, int row) {
    return (mt_q8_block *)(void *)mt_row(e, id, row);
}
/* Rounds n values, which become the blocks from `block` on of a row of the op's output; where the
 * plan wants what that leaves over, this too. */
static inline void mt_store_blocks(const mt_engine *e, const mt_op *op, int row, int block,
                                   const float *x, int n, size_t stride) {
    const size_t at = (size_t)block * MT_BLOCK_BYTES;
    e->kernels->round[e->buffers[op->out].kind](
        x, n, stride, mt_row(e, op->out, row) + at,
        op->out_rest >= 0 ? mt_row(e, op->out_rest, row) + at : NULL);
}

/* Whether an op of the plan multiplies by this tensor; no tensor is both matrix and vector. */
int mt_is_matrix(const mt_plan *plan, int32_t tensor);
/* Where the caller has room for packed weights, or all zeros. */
typedef struct {
    uint8_t *bytes;
    size_t n_bytes;
    int32_t is_packed;
} mt_weight_room;
/* Fills e->weights and e->n_tokens; e's pool is running. 0 on success. */
int32_t mt_load_weights(mt_engine *e, const mt_plan *p, mt_weight_room room, mt_bad_value *bad,
                        char *err);
void mt_free_weights(mt_engine *e);
int32_t mt_load_kv(mt_engine *e, const mt_plan *p, char *err);
int32_t mt_load_states(mt_engine *e, const mt_plan *p, char *err);
/* Weights and keys are loaded. */
int32_t mt_load_scratch(mt_engine *e, char *err);
/* Packs a tile of a weight that is packed late. No other thread has this tile's item. */
void mt_pack_late(mt_engine *e, const mt_weight *w, int64_t tile);
/* Refuses a plan or step that would read or write outside its buffers. 0 on success. */
int32_t mt_check_plan(const mt_plan *plan, const mt_options *options, char *err);
int32_t mt_check_step(const mt_engine *e, const mt_step *step, char *err);

/* One phase of an op: how many independent items it has in this step, and how to do one of them.
 * Every thread takes items until none is left; nobody waits for a thread that holds none. */
typedef struct mt_phase {
    int (*count)(const mt_engine *e, const mt_op *op);
    void (*run)(mt_engine *e, const mt_op *op, int item, mt_scratch *s);
} mt_phase;
/* Before a step, and what each thread of the pool then does. */
void mt_settle_shares(mt_engine *e);
void mt_walk(void *engine, int thread);
/* NULL where an op of this kind has no such phase. */
const mt_phase *mt_phase_of(int32_t kind, int phase);
extern const mt_phase mt_attention_phases[MT_PHASES];
extern const mt_phase mt_adapt_phases[MT_PHASES];
extern const mt_phase mt_linear_phase, mt_linear_glu_phase, mt_head_linear_phase, mt_gate_phase,
    mt_conv_phase, mt_router_phase;
extern const mt_phase mt_delta_phases[MT_PHASES], mt_scan_phases[MT_PHASES];
extern const mt_phase mt_expert_glu_phases[MT_PHASES], mt_expert_sum_phases[MT_PHASES];

#if defined(__MINGW32__) && !defined(__clang__)
#define MT_PRINTF gnu_printf /* printf is Microsoft's there */
#else
#define MT_PRINTF printf
#endif
int32_t mt_fail(char *err, const char *format, ...) __attribute__((format(MT_PRINTF, 2, 3)));

#endif
