/* Large zeroed buffers, backed by huge pages where the system gives them. */
#ifndef MT_MEMORY_H
#define MT_MEMORY_H

#include <stddef.h>
#include <stdint.h>

/* To whole cache lines. */
static inline size_t mt_aligned(size_t n) { return (n + 63) / 64 * 64; }

/* Where a part of n bytes begins in memory that holds many, of which so many bytes are taken: at a cache
 * line. base: of the memory; NULL: it is only being measured. A build with MT_GUARD_PAGES lays a page that
 * may not be touched behind each part, and ends the part there; with MARTLET_GUARD=start in the
 * environment, parts begin behind such a page. */
size_t mt_place(uint8_t *base, size_t *taken, size_t n);

/* Small memory from the start of a cache line, as it comes. NULL when there is none. */
void *mt_line_alloc(size_t n_bytes);
void mt_line_free(void *p);

/* NULL when out of memory; aligned to 64 bytes at least, and between guard pages as above. */
void *mt_big_alloc(size_t n_bytes);
void mt_big_free(void *p, size_t n_bytes);
/* The same in small pages, so that little more is taken than what is written to. */
void *mt_sparse_alloc(size_t n_bytes);
void mt_sparse_free(void *p, size_t n_bytes);

/* Gives back the whole pages inside a clean file map. Anything else would lose its contents. */
void mt_drop_pages(const void *p, size_t n_bytes);
/* The same, with the pages at both ends. */
void mt_drop_pages_around(const void *p, size_t n_bytes);

#endif
