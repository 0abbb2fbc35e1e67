/* The whole public C interface of martlet: what Python hands over and what it gets back.
 *
 * Knows nothing of Python, files or models in motion. cffi reads the part between the two marker
 * lines below, so that part holds plain declarations only (no directives). The NumPy dtypes of
 * runtime/ops.py mirror the structs; sizes and version are compared at load.
 */
#ifndef MARTLET_H
#define MARTLET_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32) /* linkers of this system export all where nothing is said */
#define MT_API
#else
#define MT_API __attribute__((visibility("default")))
#endif

/* ---- cffi begins ---- */

enum {
    MT_ABI_VERSION = 25,
    MT_MOST_GUESSES = 64, /* rows of a sequence that may be taken back */
    MT_ERR_BYTES = 256    /* size of the message buffer that a failing call fills */
};

/* Weight formats carry ggml's type ids, as they stand in the file. */
enum mt_format {
    MT_F32 = 0,
    MT_F16 = 1,
    MT_Q4_0 = 2,
    MT_Q4_1 = 3,
    MT_Q5_0 = 6,
    MT_Q5_1 = 7,
    MT_Q8_0 = 8,
    MT_Q2_K = 10,
    MT_Q3_K = 11,
    MT_Q4_K = 12,
    MT_Q5_K = 13,
    MT_Q6_K = 14,
    MT_IQ2_XXS = 16,
    MT_IQ2_XS = 17,
    MT_IQ3_XXS = 18,
    MT_IQ1_S = 19,
    MT_IQ4_NL = 20,
    MT_IQ3_S = 21,
    MT_IQ2_S = 22,
    MT_IQ4_XS = 23,
    MT_F64 = 28, /* tables computed at load (rope frequencies), never a matmul operand */
    MT_IQ1_M = 29,
    MT_BF16 = 30,
    MT_TQ1_0 = 34,
    MT_TQ2_0 = 35,
    MT_MXFP4 = 39
};

enum mt_op_kind {
    MT_OP_EMBED = 0,
    MT_OP_NORM = 1,
    MT_OP_QUANTIZE = 2,
    MT_OP_LINEAR = 3,
    MT_OP_ROPE_TABLE = 4,
    MT_OP_ROPE_KV = 5,
    MT_OP_ATTENTION = 6,
    MT_OP_GLU = 7,
    MT_OP_ADD = 8,
    MT_OP_TAKE_ROWS = 9,
    MT_OP_LINEAR_GLU = 10,
    MT_OP_SCALE = 11,
    MT_OP_GATE = 12,
    MT_OP_CONV = 13,
    MT_OP_DELTA = 14,
    MT_OP_SCAN = 15,
    MT_OP_ROUTER = 16,
    MT_OP_EXPERT_GLU = 17,
    MT_OP_EXPERT_SUM = 18,
    MT_OP_HEAD_LINEAR = 19,
    MT_OP_ADAPT = 20,
    MT_OP_COPY = 21,
    MT_N_OP_KINDS = 22
};

enum mt_op_flag {
    MT_FLAG_ACCUMULATE = 1 /* out += result instead of out = result */
};

enum mt_buffer_kind { MT_BUF_F32 = 0, MT_BUF_Q8 = 1, MT_BUF_BF16 = 2, MT_N_BUFFER_KINDS = 3 };
/* rows of the step, of its logits, of its hidden states */
enum mt_row_kind { MT_ROWS_ALL = 0, MT_ROWS_OUT = 1, MT_ROWS_HIDDEN = 2 };
enum mt_rope_style { MT_ROPE_PAIR = 0, MT_ROPE_HALF = 1 };
/* which number of a row chooses its row of a table */
enum mt_embed_by { MT_BY_TOKEN = 0, MT_BY_POSITION = 1, MT_BY_SEGMENT = 2, MT_N_EMBED_BYS = 3 };
/* CLAMPED: min(g, 7) * sigmoid(1.702 g) * (clamp(u, -7, 7) + 1), see runtime/ops.py */
enum mt_activation {
    MT_ACT_SILU = 0,
    MT_ACT_GELU_TANH = 1,
    MT_ACT_SIGMOID = 2,
    MT_ACT_IDENTITY = 3,
    MT_ACT_CLAMPED = 4,
    MT_ACT_GELU_ERF = 5,
    MT_ACT_TANH = 6,
    MT_ACT_RELU2 = 7,
    MT_N_ACTIVATIONS = 8
};
/* of a router; CHOSEN: softmax of the chosen experts' logits alone */
enum mt_gating {
    MT_GATING_SOFTMAX = 0,
    MT_GATING_SIGMOID = 1,
    MT_GATING_CHOSEN = 2,
    MT_N_GATINGS = 3
};
/* Q8_0: int8 with one half-precision scale per 32 values of a head */
enum mt_kv_type { MT_KV_F16 = 0, MT_KV_F32 = 1, MT_KV_Q8_0 = 2 };

/* One recorded operation. Which fields an op reads is in runtime/ops.py; unused ids are -1. */
typedef struct mt_op {
    int32_t kind;
    int32_t flags;
    int32_t in[3];    /* buffer ids */
    int32_t out;      /* buffer id */
    int32_t out_rest; /* buffer id: what a Q8 out leaves over, or -1 */
    int32_t w[6];     /* tensor ids */
    int32_t i[10];    /* integer attributes */
    float f[4];       /* float attributes */
} mt_op;

/* A matrix at a fixed place in the arena, with per_row rows for every row of the step: one, or one
 * for each expert that a row has chosen. */
typedef struct mt_buffer {
    int32_t kind;      /* mt_buffer_kind */
    int32_t rows;      /* mt_row_kind */
    int32_t width;     /* values per row */
    int32_t is_logits; /* 1: lives in mt_step.logits, not in the arena */
    int32_t per_row;   /* at least 1; more: rows in the order of mt_pairs */
    int32_t pad;
    int64_t offset;    /* bytes from the start of the arena */
    int64_t row_bytes; /* stride between rows */
} mt_buffer;

enum mt_tensor_flag {
    MT_TENSOR_MAPPED = 1, /* data is a clean map of a file: its pages may go once they are packed */
    MT_TENSOR_STAYS = 2,  /* data outlives the engine, which reads rows of it to embed them */
    MT_TENSOR_LATE = 4,   /* data outlives the engine, which packs an expert's tile when a row first
                           * chooses that expert; not heeded where other ops read the tensor, too */
    MT_TENSOR_RAW = 8 /* data outlives the engine, which keeps no packed copy: a thread lays out a
                           * tile each time that it multiplies by it; heeded for matrices alone */
};

/* One weight as it stands in the file: rows x cols, blocks along cols. */
typedef struct mt_tensor {
    int32_t format;
    int32_t flags;
    int64_t rows;
    int64_t cols;
    int64_t n_bytes;
    const void *data;
    const uint16_t *codebook; /* of IQ1, IQ2 and IQ3: quant/codebooks.py */
} mt_tensor;

typedef struct mt_kv_layer {
    int32_t kv_heads;
    int32_t head_dim;
    int32_t value_dim;
    int32_t is_windowed; /* 1: no row sees beyond a window; its blocks are those of window_table */
    int32_t is_latent;   /* 1: values are the first value_dim values of the keys, kept once */
} mt_kv_layer;

typedef struct mt_plan {
    int32_t n_ops;
    int32_t n_buffers;
    int32_t n_tensors;
    int32_t n_kv_layers;
    int32_t max_rows; /* rows of a step at most */
    int32_t hidden;   /* buffer of hidden states that a step may ask for, or -1 */
    int32_t n_states; /* recurrent layers */
    int32_t n_adapters;
    int32_t given; /* values of each row that a step gives, or 0 */
    int32_t pad;
    int64_t arena_bytes;
    const mt_op *ops;
    const mt_buffer *buffers;
    const mt_tensor *tensors;
    const mt_kv_layer *kv_layers;
    const int32_t *states; /* (n_states) floats that a sequence has in each recurrent layer */
    const int32_t *inputs; /* (n_states) floats that such a layer reads of a row */
} mt_plan;

typedef struct mt_options {
    int32_t n_threads;
    int32_t isa;          /* index into mt_isa_name, or -1 for the best that this machine offers */
    int32_t block_tokens; /* tokens of one KV block, a multiple of 16 */
    int32_t n_blocks;     /* blocks of the KV pool */
    int32_t kv_type;      /* mt_kv_type */
    int32_t n_window_blocks; /* blocks of windowed layers: at most n_blocks */
    int32_t n_states;        /* sequences whose state recurrent layers have room for */
    int32_t n_guesses;       /* rows of each that may be taken back: 0 to MT_MOST_GUESSES */
} mt_options;

/* The flat arrays of one step. Rows of a sequence are contiguous, with ascending positions. */
typedef struct mt_step {
    int32_t n_rows;
    int32_t n_seqs;
    int32_t n_out;
    int32_t table_width;         /* columns of block_table and window_table */
    const int32_t *tokens;       /* (n_rows) */
    const int32_t *positions;    /* (n_rows) */
    const int32_t *seq_start;    /* (n_seqs + 1) first row of each sequence */
    const int32_t *block_table;  /* (n_seqs, table_width) */
    const int32_t *window_table; /* the same for windowed layers; read from the window's start on */
    const int32_t *out_rows;     /* (n_out) rows whose logits are wanted */
    float *logits;               /* (n_out, width of the logits buffer) */
    const int32_t *hidden_rows;  /* (n_hidden) rows whose hidden states are wanted */
    float *hidden;               /* (n_hidden, width of the hidden buffer) */
    const int32_t *states;       /* (n_seqs) slots of recurrent states, all different */
    const int32_t *segments;     /* (n_rows) rows of tables that are embedded by segment */
    const float *adapters;       /* (n_seqs, n_adapters of the plan) what each gets of them */
    const float *given;          /* (n_rows, given of the plan) */
    /* (n_seqs) Of its rows the last so many are guesses: what recurrent layers read of them is
     * kept, and their state left as it is before them. */
    const int32_t *guesses;
    /* (n_seqs) Of the guesses of its last step so many were right: they come before its rows. */
    const int32_t *replays;
    int32_t n_hidden;
    int32_t pad;
} mt_step;

typedef struct mt_info {
    int64_t weight_bytes; /* packed weights, with room for those that are not packed yet */
    int64_t late_bytes;   /* of them, room for weights that are packed when first used */
    int64_t kv_bytes;     /* KV pool */
    int64_t state_bytes;  /* recurrent states */
    int64_t guess_bytes;  /* what is kept of rows that may be taken back */
    int64_t arena_bytes;  /* activations and scratch */
    int32_t n_threads;
    int32_t isa;
} mt_info;

/* A weight that is NaN or infinite, as nobody means it: row and column in its tensor. Of a block it
 * is the first column. */
typedef struct mt_bad_value {
    int32_t tensor; /* -1: there is none */
    int32_t pad;
    int64_t row, col;
} mt_bad_value;

/* When one thread worked on one op of a step, by CLOCK_MONOTONIC: from when the op before it was
 * complete until this thread found nothing left to do. What follows until the next op is waiting. */
typedef struct mt_op_span {
    int64_t start_ns, end_ns;
} mt_op_span;

typedef struct mt_engine mt_engine;

/* Calls that can fail return 0 on success; otherwise they fill err (MT_ERR_BYTES) with one line. */
int32_t mt_abi_version(void);
/* sizeof of: 0 op, 1 buffer, 2 tensor, 3 kv_layer, 4 plan, 5 options, 6 step, 7 info, 8 bad_value,
 * 9 draw_terms, 10 op_span. */
int64_t mt_sizeof(int32_t which);
int32_t mt_n_isas(void);
const char *mt_isa_name(int32_t isa);
int32_t mt_isa_supported(int32_t isa); /* by this CPU and its operating system */
int32_t mt_isa_best(void);

/* Where matrices hold bad values, this fails and `bad` names the first one. */
mt_engine *mt_engine_create(const mt_plan *plan, const mt_options *options, mt_bad_value *bad,
                            char *err);
/* The same with weights in n_bytes of the caller's memory, which starts as zeros at a multiple of 64 and
 * outlives the engine; so many as mt_info tells. is_packed: they are there already, as an engine for
 * the same tensors left them, and are only read. No weight may be packed late. */
mt_engine *mt_engine_create_over(const mt_plan *plan, const mt_options *options, uint8_t *memory,
                                 int64_t n_bytes, int32_t is_packed, mt_bad_value *bad, char *err);
/* Where a weight that is packed late holds a bad value, this fails, and mt_engine_bad tells which. */
int32_t mt_engine_run(mt_engine *engine, const mt_step *step, char *err);
void mt_engine_bad(const mt_engine *engine, mt_bad_value *bad);
/* The first n_rows rows of a float buffer as the last step left them, out[n_rows][width]. What they
 * hold is defined where the plan gives the buffer memory that no other one shares. */
int32_t mt_engine_read_rows(const mt_engine *engine, int32_t buffer, int32_t n_rows, float *out,
                            char *err);
/* One block of tokens: where windowed layers keep it, and where the others do. */
typedef struct mt_block {
    int32_t id, window_id;
} mt_block;
int32_t mt_engine_copy_block(mt_engine *engine, mt_block src, mt_block dst, char *err);
int32_t mt_engine_copy_state(mt_engine *engine, int32_t src, int32_t dst, char *err);
/* Keys and values of one block in all layers, as this build lays them out: block_bytes bytes. */
int64_t mt_engine_block_bytes(const mt_engine *engine);
int32_t mt_engine_read_block(const mt_engine *engine, mt_block block, uint8_t *out, char *err);
int32_t mt_engine_write_block(mt_engine *engine, mt_block block, const uint8_t *in, char *err);
void mt_engine_info(const mt_engine *engine, mt_info *info);
/* From now on each step leaves in spans[n_threads][n_ops], which the caller keeps, when each thread
 * worked on each op; NULL ends that. */
void mt_engine_trace(mt_engine *engine, mt_op_span *spans);
/* For measurements of unequal cores: from now on this thread idles after its items, `times` as long
 * as they took; 0 ends that. */
int32_t mt_engine_slow_down(mt_engine *engine, int32_t thread, double times, char *err);
void mt_engine_free(mt_engine *engine);

/* How to draw a token: exp((logit - best) / temperature) of each are the weights. */
typedef struct mt_draw_terms {
    double top_p;   /* 1: off */
    double min_p;   /* 0: off */
    double uniform; /* in [0, 1): whose share of the cumulated weight holds it is drawn */
    float best;     /* the largest logit that may be, which is finite; none of them is NaN */
    float temperature;
    const uint32_t *allowed; /* NULL: all; else bit i % 32 of word i / 32: whether token i may be */
} mt_draw_terms;

/* Draws one of n tokens; scratch has mt_draw_bytes, is aligned to 8, and holds the sums of runs and
 * then the weights afterwards. -1 for an unknown isa or n < 1. */
int64_t mt_draw_bytes(int32_t n);
int64_t mt_draw(int32_t isa, const float *logits, int32_t n, const mt_draw_terms *terms,
                void *scratch);
/* The first of the best of n logits whose bits are set; -1 where none is above -INFINITY. out: NULL,
 * or n: the logits, -INFINITY where the bit is not set. */
int64_t mt_mask(const float *logits, int32_t n, const uint32_t *allowed, float *out);

/* Upper limits of this machine, per second and over all threads at once. */
enum mt_limit_kind {
    MT_LIMIT_INT8 = 0, /* multiply-adds of u8 x s8 by the ISA's own dot product */
    MT_LIMIT_F32 = 1,  /* fused multiply-adds of f32 */
    MT_LIMIT_READ = 2, /* bytes read in order from 2 MB pages, where the system gives them */
    MT_LIMIT_READ_SMALL_PAGES = 3
};
typedef struct mt_limits mt_limits;

/* isa as in mt_options. Takes two buffers of buffer_bytes, every page of them touched. */
mt_limits *mt_limits_create(int32_t isa, int32_t n_threads, int64_t buffer_bytes, char *err);
/* Reads go round and round the first span_bytes of the buffer; 0: all of it. */
double mt_limits_measure(mt_limits *limits, int32_t kind, int64_t span_bytes, double seconds);
void mt_limits_free(mt_limits *limits);

/* A read-only map of a file from now on reads as zeros where the system would end the process: the
 * file has become shorter, or its disk fails. -1: it is not watched. Nobody may unmap it meanwhile. */
int32_t mt_map_watch(const void *start, int64_t n_bytes);
int32_t mt_map_is_lost(int32_t map); /* whether that has happened */
void mt_map_unwatch(int32_t map);

/* ---- cffi ends ---- */

/* Declared once more with visibility for the library itself. */
MT_API int32_t mt_abi_version(void);
MT_API int64_t mt_sizeof(int32_t which);
MT_API int32_t mt_n_isas(void);
MT_API const char *mt_isa_name(int32_t isa);
MT_API int32_t mt_isa_supported(int32_t isa);
MT_API int32_t mt_isa_best(void);
MT_API mt_engine *mt_engine_create(const mt_plan *plan, const mt_options *options,
                                   mt_bad_value *bad, char *err);
MT_API mt_engine *mt_engine_create_over(const mt_plan *plan, const mt_options *options,
                                        uint8_t *memory, int64_t n_bytes, int32_t is_packed,
                                        mt_bad_value *bad, char *err);
MT_API int32_t mt_engine_run(mt_engine *engine, const mt_step *step, char *err);
MT_API void mt_engine_bad(const mt_engine *engine, mt_bad_value *bad);
MT_API int32_t mt_engine_read_rows(const mt_engine *engine, int32_t buffer, int32_t n_rows,
                                   float *out, char *err);
MT_API int32_t mt_engine_copy_block(mt_engine *engine, mt_block src, mt_block dst, char *err);
MT_API int32_t mt_engine_copy_state(mt_engine *engine, int32_t src, int32_t dst, char *err);
MT_API int64_t mt_engine_block_bytes(const mt_engine *engine);
MT_API int32_t mt_engine_read_block(const mt_engine *engine, mt_block block, uint8_t *out,
                                    char *err);
MT_API int32_t mt_engine_write_block(mt_engine *engine, mt_block block, const uint8_t *in,
                                     char *err);
MT_API void mt_engine_info(const mt_engine *engine, mt_info *info);
MT_API void mt_engine_trace(mt_engine *engine, mt_op_span *spans);
MT_API int32_t mt_engine_slow_down(mt_engine *engine, int32_t thread, double times, char *err);
MT_API void mt_engine_free(mt_engine *engine);
MT_API int64_t mt_draw_bytes(int32_t n);
MT_API int64_t mt_draw(int32_t isa, const float *logits, int32_t n, const mt_draw_terms *terms,
                       void *scratch);
MT_API int64_t mt_mask(const float *logits, int32_t n, const uint32_t *allowed, float *out);
MT_API mt_limits *mt_limits_create(int32_t isa, int32_t n_threads, int64_t buffer_bytes, char *err);
MT_API double mt_limits_measure(mt_limits *limits, int32_t kind, int64_t span_bytes,
                                double seconds);
MT_API void mt_limits_free(mt_limits *limits);
MT_API int32_t mt_map_watch(const void *start, int64_t n_bytes);
MT_API int32_t mt_map_is_lost(int32_t map);
MT_API void mt_map_unwatch(int32_t map);

#endif
