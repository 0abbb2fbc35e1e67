/* Anonymous maps aligned to 2 MB with MADV_HUGEPAGE: one TLB entry then covers what 512 did. Memory that
 * is to be taken little by little has small pages. */
#if defined(__linux__)
#define _GNU_SOURCE
#endif
#include "memory.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__linux__)
#include <sys/mman.h>
#elif defined(_WIN32)
#include <malloc.h>
#endif

#if defined(_WIN32)
void *mt_line_alloc(size_t n_bytes) { return _aligned_malloc(n_bytes, 64); }
void mt_line_free(void *p) { _aligned_free(p); }
#else
void *mt_line_alloc(size_t n_bytes) {
    void *p = NULL;
    return posix_memalign(&p, 64, n_bytes) ? NULL : p;
}
void mt_line_free(void *p) { free(p); }
#endif

#if !defined(MT_GUARD_PAGES)
size_t mt_place(uint8_t *base, size_t *taken, size_t n) {
    (void)base;
    const size_t start = *taken;
    *taken += mt_aligned(n);
    return start;
}
#endif

#if defined(MT_GUARD_PAGES)

enum { PAGE = 4096 };

static size_t whole_pages(size_t n) { return (n + PAGE - 1) / PAGE * PAGE; }

/* From the first page of a part of n bytes on. */
static size_t before_part(size_t n) {
    const char *which = getenv("MARTLET_GUARD");
    return which && !strcmp(which, "start") ? 0 : whole_pages(n) - mt_aligned(n);
}

size_t mt_place(uint8_t *base, size_t *taken, size_t n) {
    const size_t start = whole_pages(*taken) + before_part(n);
    const size_t end = whole_pages(*taken) + whole_pages(n);
    if (base) mprotect(base + end, PAGE, PROT_NONE);
    *taken = end + PAGE;
    return start;
}

void *mt_big_alloc(size_t n_bytes) {
    const size_t total = whole_pages(n_bytes) + 2 * PAGE;
    if (total < n_bytes) return NULL;
    uint8_t *map = mmap(NULL, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) return NULL;
    if (n_bytes && mprotect(map + PAGE, whole_pages(n_bytes), PROT_READ | PROT_WRITE)) {
        munmap(map, total);
        return NULL;
    }
    return map + PAGE + before_part(n_bytes);
}

void mt_big_free(void *p, size_t n_bytes) {
    uint8_t *map = (uint8_t *)((uintptr_t)p / PAGE * PAGE) - PAGE;
    if (p) munmap(map, whole_pages(n_bytes) + 2 * PAGE);
}

void *mt_sparse_alloc(size_t n_bytes) { return mt_big_alloc(n_bytes); }
void mt_sparse_free(void *p, size_t n_bytes) { mt_big_free(p, n_bytes); }

#elif defined(__linux__) && !defined(MT_PLAIN_MEMORY)

enum { HUGE_PAGE = 2 << 20 };

static size_t mapped_bytes(size_t n_bytes) {
    return (n_bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
}

void *mt_big_alloc(size_t n_bytes) {
    const size_t wanted = mapped_bytes(n_bytes ? n_bytes : 1), total = wanted + HUGE_PAGE;
    if (wanted < n_bytes || total < wanted) return NULL;
    uint8_t *map = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) return NULL;
    uint8_t *start = (uint8_t *)(((uintptr_t)map + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    if (start > map) munmap(map, (size_t)(start - map));
    munmap(start + wanted, total - wanted - (size_t)(start - map));
    madvise(start, wanted, MADV_HUGEPAGE); /* a wish: small pages work as well */
    return start;
}

void mt_big_free(void *p, size_t n_bytes) {
    if (p) munmap(p, mapped_bytes(n_bytes ? n_bytes : 1));
}

void *mt_sparse_alloc(size_t n_bytes) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *p = mmap(NULL, n_bytes ? n_bytes : 1, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (p == MAP_FAILED) return NULL;
    madvise(p, n_bytes ? n_bytes : 1, MADV_NOHUGEPAGE);
    return p;
}

void mt_sparse_free(void *p, size_t n_bytes) {
    if (p) munmap(p, n_bytes ? n_bytes : 1);
}
#else
void *mt_big_alloc(size_t n_bytes) {
    void *p = mt_line_alloc(n_bytes ? n_bytes : 64);
    return p ? memset(p, 0, n_bytes) : NULL;
}

void mt_big_free(void *p, size_t n_bytes) {
    (void)n_bytes;
    mt_line_free(p);
}

void *mt_sparse_alloc(size_t n_bytes) { return mt_big_alloc(n_bytes); }
void mt_sparse_free(void *p, size_t n_bytes) { mt_big_free(p, n_bytes); }
#endif

#if defined(__linux__)
#include <unistd.h>

void mt_drop_pages(const void *p, size_t n_bytes) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t start = ((uintptr_t)p + page - 1) / page * page;
    const uintptr_t end = ((uintptr_t)p + n_bytes) / page * page;
    if (start < end) madvise((void *)start, end - start, MADV_DONTNEED);
}

void mt_drop_pages_around(const void *p, size_t n_bytes) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), start = (uintptr_t)p / page * page;
    const uintptr_t end = ((uintptr_t)p + n_bytes + page - 1) / page * page;
    madvise((void *)start, end - start, MADV_DONTNEED);
}
#else
void mt_drop_pages(const void *p, size_t n_bytes) {
    (void)p; /* the system takes clean pages back on its own */
    (void)n_bytes;
}
void mt_drop_pages_around(const void *p, size_t n_bytes) { mt_drop_pages(p, n_bytes); }
#endif
