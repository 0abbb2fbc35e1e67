/* Spoiled plans and steps through the public interface: each is refused with a message, or runs without
 * touching memory that is not its own.
 *
 * Sound ones are the cases of tests/runtime/record_cases.py in the folder MARTLET_FUZZ_CASES. An input
 * says which case, on which kernels, and how it is spoiled: edits of EDIT_BYTES each. Lengths of arrays
 * are the caller's word, so this caller keeps it: each array is as long as the counts say, in memory of
 * its own. */
#include <dirent.h>

#include "case_file.h"
#include "formats.h"

enum {
    MOST_CASES = 256,
    MOST_EDITS = 16,
    EDIT_BYTES = 8,
    MOST_ROWS = 1 << 12,   /* more in a step take long */
    MOST_VALUES = 1 << 18, /* in an array that a caller gives */
    MOST_TENSOR_BYTES = 1 << 20
};

static case_head *cases[MOST_CASES];
static int n_cases;

/* What an edit spoils; records and words beyond the last begin again at the first. */
enum target {
    OPS,
    BUFFERS,
    TENSORS,
    KV_LAYERS,
    STATES,
    INPUTS,
    SIZES, /* of the plan */
    OPTIONS,
    DATA,     /* bytes of a tensor */
    WIDTH,    /* of a buffer, which gets room of its own */
    SHAPE,    /* of a tensor, which gets as many bytes */
    APPEND,   /* one more op, a copy */
    COUNTS,   /* of a step */
    ROWS,     /* elements of its arrays */
    POINTERS, /* of the plan or a step: NULL */
    CALL,     /* another function of the engine afterwards */
    N_TARGETS
};

typedef struct {
    uint8_t target, record, word, how;
    int32_t value;
} edit;
_Static_assert(sizeof(edit) == EDIT_BYTES, "an edit is what the input says");

/* Where checks break: zero, off by one, counts that overflow when they are multiplied. */
static const int64_t NUMBERS[] = {
    0,         1,         2,         15,        16,        31,        32,        33,        64, 255,
    256,       1 << 12,   1 << 15,   1 << 16,   1 << 24,   1 << 26,   1 << 30,   INT32_MAX, -1, -2,
    INT32_MIN, 1LL << 31, 1LL << 32, 1LL << 40, 1LL << 62, INT64_MAX, INT64_MIN, UINT32_MAX};

static int64_t edited(const edit *e, int64_t old, int64_t other) {
    switch (e->how % 5) {
    case 0: return e->value;
    case 1: return NUMBERS[(uint32_t)e->value % (sizeof NUMBERS / sizeof NUMBERS[0])];
    case 2: return (int64_t)((uint64_t)old + (uint64_t)(int64_t)(int8_t)e->value);
    case 3: return other; /* what the same word of another record holds */
    default: return (int64_t)((uint64_t)old ^ 1ull << (e->value & 63));
    }
}

/* Records of `size` bytes, whose words are of 4 bytes, but for those of 8 from `wide` on. */
static void edit_word(const edit *e, void *records, int32_t n, size_t size, size_t wide,
                      size_t end) {
    if (n < 1) return;
    const size_t n_narrow = wide / 4, n_words = n_narrow + (end - wide) / 8;
    const size_t word = e->word % n_words, width = word < n_narrow ? 4 : 8;
    const size_t at = word < n_narrow ? 4 * word : wide + 8 * (word - n_narrow);
    uint8_t *to = (uint8_t *)records + (size_t)(e->record % n) * size + at;
    const uint8_t *from =
        (uint8_t *)records + (size_t)((uint32_t)e->value % (uint32_t)n) * size + at;
    int64_t old = 0, other = 0;
    memcpy(&old, to, width);
    memcpy(&other, from, width);
    const int64_t value = edited(e, old, other);
    memcpy(to, &value, width);
}

/* A copy of n bytes, of which so many are there to be copied, again and again. */
static void *filled(const void *from, size_t n_from, size_t n) {
    uint8_t *to = malloc(n ? n : 1);
    for (size_t at = 0; to && n_from && at < n; at += n_from)
        memcpy(to + at, from, n - at < n_from ? n - at : n_from);
    if (to && !n_from) memset(to, 0, n);
    return to;
}

/* -- the plan ---------------------------------------------------------------------------------- */

typedef struct {
    mt_plan plan; /* its arrays are this trial's own */
    mt_options options;
    mt_op *ops;
    mt_buffer *buffers;
    mt_tensor *tensors;
    mt_kv_layer *kv_layers;
    int32_t *states, *inputs;
} trial;

static void copy_plan(trial *t, const case_head *head, int n_more) {
    const uint8_t *base = (const uint8_t *)head;
    t->plan = *(const mt_plan *)(const void *)(base + head->plan);
    t->options = *(const mt_options *)(const void *)(base + head->options);
    t->options.n_threads = 1;
    const mt_plan *p = &t->plan;
    const size_t n = (size_t)p->n_ops, op = sizeof(mt_op);
    t->ops = filled(p->ops, n * op, (n + (size_t)n_more) * op);
    t->buffers = filled(p->buffers, (size_t)p->n_buffers * sizeof(mt_buffer),
                        (size_t)p->n_buffers * sizeof(mt_buffer));
    t->tensors = filled(p->tensors, (size_t)p->n_tensors * sizeof(mt_tensor),
                        (size_t)p->n_tensors * sizeof(mt_tensor));
    t->kv_layers = filled(p->kv_layers, (size_t)p->n_kv_layers * sizeof(mt_kv_layer),
                          (size_t)p->n_kv_layers * sizeof(mt_kv_layer));
    t->states = filled(p->states, (size_t)p->n_states * 4, (size_t)p->n_states * 4);
    t->inputs = filled(p->inputs, (size_t)p->n_states * 4, (size_t)p->n_states * 4);
}

static void widen(trial *t, const edit *e) {
    mt_buffer *b = &t->buffers[e->record % t->plan.n_buffers];
    b->width = 1 + (e->value & 1023);
    if (b->kind != MT_BUF_F32) b->width = (b->width + 31) / 32 * 32;
    b->row_bytes = b->kind == MT_BUF_F32 ? 4 * b->width : (int64_t)mt_block_row_bytes(b->width);
    b->offset = (t->plan.arena_bytes + 63) / 64 * 64;
    t->plan.arena_bytes =
        b->offset + b->row_bytes * (t->plan.max_rows & 0xffff) * (b->per_row & 63);
}

static void reshape(trial *t, const edit *e) {
    mt_tensor *tensor = &t->tensors[e->record % t->plan.n_tensors];
    const mt_layout *f = mt_layout_of(tensor->format);
    tensor->rows = e->word;
    tensor->cols = e->value & 1023;
    if (f) tensor->n_bytes = tensor->rows * (tensor->cols / f->raw_block) * f->raw_bytes;
}

static void append(trial *t, const edit *e) {
    const int32_t n = t->plan.n_ops++;
    mt_op *more = &t->ops[n], *place = &t->ops[e->word % (n + 1)];
    *more = t->ops[e->record % n];
    const mt_op op = *more; /* into its place, which another leaves to the end */
    *more = *place;
    *place = op;
}

static void spoil_plan(trial *t, const edit *e) {
    mt_plan *p = &t->plan;
    switch (e->target % N_TARGETS) {
    case OPS: edit_word(e, t->ops, p->n_ops, sizeof(mt_op), sizeof(mt_op), sizeof(mt_op)); break;
    case BUFFERS: edit_word(e, t->buffers, p->n_buffers, sizeof(mt_buffer), 24, 40); break;
    case TENSORS: edit_word(e, t->tensors, p->n_tensors, sizeof(mt_tensor), 8, 32); break;
    case KV_LAYERS: edit_word(e, t->kv_layers, p->n_kv_layers, sizeof(mt_kv_layer), 20, 20); break;
    case STATES: edit_word(e, t->states, p->n_states, 4, 4, 4); break;
    case INPUTS: edit_word(e, t->inputs, p->n_states, 4, 4, 4); break;
    case OPTIONS: edit_word(e, &t->options, 1, sizeof(mt_options), 32, 32); break;
    case WIDTH: widen(t, e); break;
    case SHAPE: reshape(t, e); break;
    case APPEND: append(t, e); break;
    default: break;
    }
}

static int32_t at_most(int32_t n, int32_t most) { return n < most ? n : most; }

/* Last, as everything else counts by them: they may say less than there is, or nonsense. */
static void spoil_sizes(trial *t, const edit *edits, int n) {
    const mt_plan real = t->plan;
    mt_plan *p = &t->plan;
    p->ops = t->ops, p->buffers = t->buffers, p->tensors = t->tensors, p->kv_layers = t->kv_layers;
    p->states = t->states, p->inputs = t->inputs;
    for (int i = 0; i < n; i++)
        if (edits[i].target % N_TARGETS == SIZES) edit_word(&edits[i], p, 1, sizeof *p, 40, 48);
    p->n_ops = at_most(p->n_ops, real.n_ops);
    p->n_buffers = at_most(p->n_buffers, real.n_buffers);
    p->n_tensors = at_most(p->n_tensors, real.n_tensors);
    p->n_kv_layers = at_most(p->n_kv_layers, real.n_kv_layers);
    p->n_states = at_most(p->n_states, real.n_states);
    for (int i = 0; i < n; i++) {
        if (edits[i].target % N_TARGETS != POINTERS || edits[i].record % 2) continue;
        const void **const pointers[] = {(const void **)&p->ops,     (const void **)&p->buffers,
                                         (const void **)&p->tensors, (const void **)&p->kv_layers,
                                         (const void **)&p->states,  (const void **)&p->inputs};
        if (edits[i].word % 8 < 6) *pointers[edits[i].word % 8] = NULL;
    }
}

static size_t n_vectors(int32_t format) {
    switch (format) {
    case MT_IQ2_XXS:
    case MT_IQ3_XXS: return 256;
    case MT_IQ2_XS:
    case MT_IQ3_S: return 512;
    case MT_IQ2_S: return 1024;
    default: return 2048; /* IQ1 */
    }
}

/* Memory of its own for each weight, as long as it says. 0 where that is too much. */
static int fill_tensors(trial *t, const edit *edits, int n, const mt_plan *sound) {
    int fits = 1;
    for (int32_t i = 0; i < sound->n_tensors; i++) {
        mt_tensor *tensor = &t->tensors[i];
        const size_t n_real = (size_t)sound->tensors[i].n_bytes;
        const int is_sane = tensor->n_bytes >= 0 && tensor->n_bytes <= MOST_TENSOR_BYTES;
        const size_t n_bytes = is_sane ? (size_t)tensor->n_bytes : 0;
        const mt_layout *f = mt_layout_of(tensor->format);
        uint8_t *data = filled(sound->tensors[i].data, n_real, n_bytes);
        for (int k = 0; k < n; k++)
            if (edits[k].target % N_TARGETS == DATA && edits[k].record % sound->n_tensors == i &&
                n_bytes)
                data[(uint32_t)edits[k].value % n_bytes] = edits[k].word;
        tensor->data = data;
        tensor->codebook = NULL;
        tensor->flags &= ~MT_TENSOR_MAPPED; /* the pages of this memory are not a file's */
        if (f && mt_has_codebook(f)) {
            const void *book = sound->tensors[i].codebook;
            const size_t n_book = n_vectors(sound->tensors[i].format) * 2;
            tensor->codebook =
                filled(book ? book : "\x1b\xe4", book ? n_book : 2, n_vectors(tensor->format) * 2);
        }
        for (int k = 0; k < n; k++) {
            const edit *e = &edits[k];
            if (e->target % N_TARGETS != POINTERS || e->record % 2 ||
                e->how % sound->n_tensors != i)
                continue;
            const void **const pointer =
                e->word % 8 == 6 ? &tensor->data : (const void **)&tensor->codebook;
            if (e->word % 8 < 6) continue;
            free((void *)*pointer);
            *pointer = NULL;
        }
        if (!is_sane && tensor->n_bytes > 0) fits = 0;
    }
    return fits;
}

static void free_plan(trial *t, int32_t n_tensors) {
    for (int32_t i = 0; i < n_tensors; i++) {
        free((void *)t->tensors[i].data);
        free((void *)t->tensors[i].codebook);
    }
    free(t->ops);
    free(t->buffers);
    free(t->tensors);
    free(t->kv_layers);
    free(t->states);
    free(t->inputs);
}

/* -- steps ------------------------------------------------------------------------------------- */

enum { N_STEP_ARRAYS = 15 };

typedef struct {
    void **slot;
    int64_t n_real, n; /* elements of 4 bytes: recorded, and as the counts now say */
    int is_result;
} step_array;

static int32_t hidden_width(const mt_plan *p) {
    return p->hidden >= 0 && p->hidden < p->n_buffers ? p->buffers[p->hidden].width : 0;
}

static void list_arrays(mt_step *s, const mt_step *r, const mt_plan *p, const mt_plan *sound,
                        step_array *out) {
    const int64_t rows = s->n_rows, seqs = s->n_seqs, table = seqs * s->table_width;
    const int64_t real_table = (int64_t)r->n_seqs * r->table_width;
    const step_array arrays[N_STEP_ARRAYS] = {
        {(void **)&s->tokens, r->n_rows, rows, 0},
        {(void **)&s->positions, r->n_rows, rows, 0},
        {(void **)&s->seq_start, r->n_seqs + 1, seqs + 1, 0},
        {(void **)&s->block_table, real_table, table, 0},
        {(void **)&s->window_table, real_table, table, 0},
        {(void **)&s->out_rows, r->n_out, s->n_out, 0},
        {(void **)&s->hidden_rows, r->n_hidden, s->n_hidden, 0},
        {(void **)&s->states, r->n_seqs, seqs, 0},
        {(void **)&s->segments, r->n_rows, rows, 0},
        {(void **)&s->guesses, r->n_seqs, seqs, 0},
        {(void **)&s->replays, r->n_seqs, seqs, 0},
        {(void **)&s->adapters, (int64_t)r->n_seqs * sound->n_adapters, seqs * p->n_adapters, 0},
        {(void **)&s->given, (int64_t)r->n_rows * sound->given, rows * p->given, 0},
        {(void **)&s->logits, 0, (int64_t)s->n_out * logits_width(p), 1},
        {(void **)&s->hidden, 0, (int64_t)s->n_hidden * hidden_width(p), 1}};
    memcpy(out, arrays, sizeof arrays);
}

static void run_step(mt_engine *engine, const trial *t, const mt_plan *sound, const mt_step *real,
                     int at, const edit *edits, int n) {
    mt_step s = *real;
    for (int i = 0; i < n; i++) {
        if (edits[i].target % N_TARGETS != COUNTS || edits[i].record % 4 != at) continue;
        int32_t *const counts[] = {&s.n_rows, &s.n_seqs, &s.n_out, &s.table_width, &s.n_hidden};
        *counts[edits[i].word % 5] = (int32_t)edited(&edits[i], *counts[edits[i].word % 5], 1);
    }
    if (s.n_rows > MOST_ROWS) return;
    step_array arrays[N_STEP_ARRAYS];
    list_arrays(&s, real, &t->plan, sound, arrays);
    for (int i = 0; i < N_STEP_ARRAYS; i++)
        if (arrays[i].n > MOST_VALUES) return;
    void *own[N_STEP_ARRAYS];
    for (int i = 0; i < N_STEP_ARRAYS; i++) {
        const size_t wanted = arrays[i].n > 0 ? (size_t)arrays[i].n : 0;
        own[i] =
            filled(*arrays[i].slot, *arrays[i].slot ? (size_t)arrays[i].n_real * 4 : 0, wanted * 4);
        *arrays[i].slot = own[i];
    }
    if (s.n_rows != real->n_rows ||
        s.n_seqs != real->n_seqs) { /* so that more than that is tried */
        int32_t *positions = own[1], *starts = own[2];
        for (int32_t i = 1; i < s.n_rows; i++) positions[i] = positions[i - 1] + 1;
        if (s.n_seqs >= 0) starts[s.n_seqs] = s.n_rows;
    }
    for (int i = 0; i < n; i++) {
        const edit *e = &edits[i];
        const int which = e->word % (N_STEP_ARRAYS - 2);
        if (e->target % N_TARGETS == ROWS && e->record % 4 == at && arrays[which].n > 0) {
            int32_t *values = own[which];
            const int64_t place = (e->how / 5) % arrays[which].n;
            values[place] = (int32_t)edited(e, values[place], values[0]);
        }
        if (e->target % N_TARGETS == POINTERS && e->record % 2)
            *arrays[e->word % N_STEP_ARRAYS].slot = NULL;
    }
    char err[MT_ERR_BYTES] = "";
    if (mt_engine_run(engine, &s, err) && !err[0]) abort(); /* refused without a word */
    for (int i = 0; i < N_STEP_ARRAYS; i++) free(own[i]);
}

/* -- the engine's other functions -------------------------------------------------------------- */

static void call(mt_engine *engine, const trial *t, const edit *e) {
    char err[MT_ERR_BYTES];
    const int64_t block = mt_engine_block_bytes(engine);
    const int32_t a = (int32_t)edited(e, 0, 1);
    if (block > MOST_TENSOR_BYTES) return;
    uint8_t *bytes = calloc((size_t)block + 1, 1);
    switch (e->word % 5) {
    case 0:
        mt_engine_copy_block(engine, (mt_block){a, e->record}, (mt_block){e->record, a}, err);
        break;
    case 1: mt_engine_copy_state(engine, a, e->record, err); break;
    case 2: mt_engine_read_block(engine, (mt_block){a, e->record}, bytes, err); break;
    case 3:
        memset(bytes, e->how, (size_t)block);
        mt_engine_write_block(engine, (mt_block){e->record, a}, bytes, err);
        break;
    default: {
        const int32_t which = e->record % (t->plan.n_buffers + 1), n = a & 63;
        const int32_t width = which < t->plan.n_buffers ? t->buffers[which].width : 0;
        float *rows = malloc((size_t)n * (size_t)width * 4 + 1);
        if (rows) mt_engine_read_rows(engine, which, n, rows, err);
        free(rows);
    }
    }
    free(bytes);
}

static void run(const trial *t, const case_head *head, const edit *edits, int n) {
    const uint8_t *base = (const uint8_t *)head;
    const mt_plan *sound = (const mt_plan *)(const void *)(base + head->plan);
    const mt_step *steps = (const mt_step *)(const void *)(base + head->steps);
    char err[MT_ERR_BYTES] = "";
    mt_bad_value bad;
    mt_engine *engine = mt_engine_create(&t->plan, &t->options, &bad, err);
    if (!engine && !err[0]) abort();
    if (!engine) return;
    const size_t n_spans = (size_t)t->options.n_threads * (size_t)t->plan.n_ops;
    mt_op_span *spans = malloc(n_spans * sizeof *spans);
    mt_engine_trace(engine, spans);
    for (int32_t i = 0; i < head->n_steps && i < 4; i++)
        run_step(engine, t, sound, &steps[i], i, edits, n);
    for (int i = 0; i < n; i++)
        if (edits[i].target % N_TARGETS == CALL) call(engine, t, &edits[i]);
    mt_engine_free(engine);
    free(spans);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 2 || !n_cases) return 0;
    const case_head *head = cases[data[0] % n_cases];
    const mt_plan *sound = (const mt_plan *)(const void *)((const uint8_t *)head + head->plan);
    edit edits[MOST_EDITS];
    int n = (int)((size - 2) / EDIT_BYTES), n_more = 0;
    if (n > MOST_EDITS) n = MOST_EDITS;
    memcpy(edits, data + 2, (size_t)n * EDIT_BYTES);
    for (int i = 0; i < n; i++) n_more += edits[i].target % N_TARGETS == APPEND;
    trial t;
    copy_plan(&t, head, n_more);
    t.options.isa = data[1] % 16 ? -1 : data[1] / 16 % mt_n_isas(); /* mostly the best */
    for (int i = 0; i < n; i++) spoil_plan(&t, &edits[i]);
    const int is_fit = fill_tensors(&t, edits, n, sound);
    spoil_sizes(&t, edits, n);
    if (t.options.n_threads > 2 && t.options.n_threads <= 512)
        t.options.n_threads = 2; /* each takes its time to begin */
    if (is_fit) run(&t, head, edits, n);
    free_plan(&t, sound->n_tensors);
    return 0;
}

static int is_case(const struct dirent *entry) { return strstr(entry->d_name, ".case") != NULL; }

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    const char *folder = getenv("MARTLET_FUZZ_CASES");
    struct dirent **entries = NULL;
    const int n = folder ? scandir(folder, &entries, is_case, alphasort) : 0;
    for (int i = 0; i < n; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", folder, entries[i]->d_name);
        if (n_cases < MOST_CASES && (cases[n_cases] = open_case(path, MT_ABI_VERSION))) n_cases++;
        free(entries[i]);
    }
    free(entries);
    if (n_cases) return 0;
    fprintf(stderr, "error: no cases in MARTLET_FUZZ_CASES; scripts/fuzz.py records them\n");
    exit(2);
}
