/* Runs recorded steps on every kernel table that this machine offers, and compares what they give bit
 * by bit with what was recorded: `replay LIBRARY CASE...`. Where there is no Python (another libc,
 * another system, an emulated CPU) this is how the library is tested.
 *
 * A case is a file of case_file.h. Knows no plan: MARTLET_ISA names the one table to run. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(_WIN32)
#include <windows.h>
#else
#include <dlfcn.h>
#endif

#include "case_file.h"

/* What is called of the library. */
typedef struct {
    __typeof__(mt_abi_version) *abi_version;
    __typeof__(mt_n_isas) *n_isas;
    __typeof__(mt_isa_name) *isa_name;
    __typeof__(mt_isa_supported) *isa_supported;
    __typeof__(mt_engine_create) *create;
    __typeof__(mt_engine_run) *run;
    __typeof__(mt_engine_free) *free;
} library;

static void *open_library(const char *path) {
#if defined(_WIN32)
    return (void *)LoadLibraryA(path);
#else
    return dlopen(path, RTLD_NOW | RTLD_LOCAL);
#endif
}

static int find(void *handle, const char *name, void *out) {
#if defined(_WIN32)
    FARPROC found = GetProcAddress((HMODULE)handle, name);
#else
    void *found = dlsym(handle, name);
#endif
    memcpy(out, &found, sizeof found);
    if (!found) fprintf(stderr, "error: the library has no %s\n", name);
    return found != NULL;
}

static int load(const char *path, library *lib) {
    void *handle = open_library(path);
    if (!handle) {
        fprintf(stderr, "error: %s does not load\n", path);
        return 0;
    }
    return find(handle, "mt_abi_version", &lib->abi_version) &&
           find(handle, "mt_n_isas", &lib->n_isas) && find(handle, "mt_isa_name", &lib->isa_name) &&
           find(handle, "mt_isa_supported", &lib->isa_supported) &&
           find(handle, "mt_engine_create", &lib->create) &&
           find(handle, "mt_engine_run", &lib->run) && find(handle, "mt_engine_free", &lib->free);
}

/* The place of the first value that differs, or -1. */
static int64_t differs(const float *a, const float *b, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (memcmp(&a[i], &b[i], sizeof *a)) return i;
    return -1;
}

/* 0 where every step gives what was recorded. */
static int replay(const library *lib, const case_head *head, int32_t isa) {
    uint8_t *base = (uint8_t *)head;
    const mt_plan *plan = (const mt_plan *)(const void *)(base + head->plan);
    mt_options options = *(const mt_options *)(const void *)(base + head->options);
    options.isa = isa;
    char err[MT_ERR_BYTES] = "";
    mt_bad_value bad;
    mt_engine *engine = lib->create(plan, &options, &bad, err);
    int status = engine ? 0 : -1;
    const int32_t width = logits_width(plan);
    for (int32_t i = 0; i < head->n_steps && !status; i++) {
        mt_step step = ((const mt_step *)(const void *)(base + head->steps))[i];
        const float *expected = step.logits;
        const int64_t n = (int64_t)step.n_out * width;
        step.logits = malloc((size_t)n * sizeof(float) + 1);
        status = step.logits ? lib->run(engine, &step, err) : -1;
        const int64_t at = status ? -1 : differs(step.logits, expected, n);
        if (at >= 0) {
            snprintf(err, sizeof err, "step %d, row %d, column %d: %a, recorded was %a", (int)i,
                     (int)(at / width), (int)(at % width), (double)step.logits[at],
                     (double)expected[at]);
            status = 1;
        }
        free(step.logits);
    }
    if (engine) lib->free(engine);
    if (status) printf("%s: %s\n", lib->isa_name(isa), err);
    return status != 0;
}

int main(int argc, char **argv) {
    library lib;
    if (argc < 3) {
        fprintf(stderr, "usage: replay LIBRARY CASE...\n");
        return 2;
    }
    if (!load(argv[1], &lib)) return 2;
    const char *wanted = getenv("MARTLET_ISA");
    int n_run = 0, n_failed = 0;
    for (int i = 2; i < argc; i++) {
        case_head *head = open_case(argv[i], lib.abi_version());
        if (!head) return 2;
        for (int32_t isa = 0; isa < lib.n_isas(); isa++) {
            if (!lib.isa_supported(isa) || (wanted && strcmp(wanted, lib.isa_name(isa)))) continue;
            n_run++;
            if (replay(&lib, head, isa)) {
                printf("FAILED: %s\n", argv[i]);
                n_failed++;
            }
        }
        free(head);
    }
    printf("%d cases on", argc - 2);
    for (int32_t isa = 0; isa < lib.n_isas(); isa++)
        if (lib.isa_supported(isa) && (!wanted || !strcmp(wanted, lib.isa_name(isa))))
            printf(" %s", lib.isa_name(isa));
    printf(": %d of %d alike\n", n_run - n_failed, n_run);
    return n_failed || !n_run;
}
