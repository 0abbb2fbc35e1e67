/* Maps of files that lose their pages under a reader: the file was cut short, or its disk fails. The
 * system says so by SIGBUS, which ends a process. In a watched map the reader goes on with zeros
 * instead, and whoever started it asks afterwards whether that has happened. Owns the handler of the
 * signal, which leaves every other address to the handler before it. */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include "martlet.h"

#if defined(_WIN32)
int32_t mt_map_watch(const void *start, int64_t n_bytes) {
    (void)start;
    (void)n_bytes;
    return -1; /* a file that is mapped cannot be cut short there */
}
int32_t mt_map_is_lost(int32_t map) {
    (void)map;
    return 0;
}
void mt_map_unwatch(int32_t map) { (void)map; }
#else
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST_MAPS = 1024 };

/* The handler may run at any moment, so a map is there from when its end is set until it is 0. */
static struct {
    atomic_int is_taken, is_lost;
    _Atomic uintptr_t start, end;
} maps[MOST_MAPS];
static struct sigaction before;
static _Atomic uintptr_t page_bytes;

/* From this page to the end of a map that holds it: what is left of the file nobody will trust. A map
 * may be watched for several readers, and each is told. mmap is a system call alone on the systems
 * that have this signal. */
static int read_as_zeros(uintptr_t at) {
    const uintptr_t page = at & ~(atomic_load(&page_bytes) - 1);
    uintptr_t end = 0;
    for (int i = 0; i < MOST_MAPS; i++) {
        const uintptr_t stop = atomic_load(&maps[i].end);
        if (at >= stop || at < atomic_load(&maps[i].start)) continue;
        atomic_store(&maps[i].is_lost, 1);
        end = stop;
    }
    return end && mmap((void *)page, end - page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED,
                       -1, 0) != MAP_FAILED;
}

static void on_bus_error(int number, siginfo_t *info, void *context) {
    if (read_as_zeros((uintptr_t)info->si_addr)) return;
    if (before.sa_flags & SA_SIGINFO)
        before.sa_sigaction(number, info, context);
    else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN)
        before.sa_handler(number);
    else
        signal(number, SIG_DFL); /* the read is tried again, and ends the process */
}

/* Each time, as others may have taken the signal meanwhile. */
static int take_signal(void) {
    struct sigaction now, ours;
    if (sigaction(SIGBUS, NULL, &now)) return 0;
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_bus_error) return 1;
    before = now;
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = on_bus_error;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    return !sigaction(SIGBUS, &ours, NULL);
}

int32_t mt_map_watch(const void *start, int64_t n_bytes) {
    atomic_store(&page_bytes, (uintptr_t)sysconf(_SC_PAGESIZE));
    if (n_bytes < 1 || !take_signal()) return -1;
    for (int32_t i = 0; i < MOST_MAPS; i++) {
        int is_taken = 0;
        if (!atomic_compare_exchange_strong(&maps[i].is_taken, &is_taken, 1)) continue;
        atomic_store(&maps[i].is_lost, 0);
        atomic_store(&maps[i].start, (uintptr_t)start);
        atomic_store(&maps[i].end, (uintptr_t)start + (uintptr_t)n_bytes);
        return i;
    }
    return -1;
}

int32_t mt_map_is_lost(int32_t map) {
    return map >= 0 && map < MOST_MAPS && atomic_load(&maps[map].is_lost);
}

void mt_map_unwatch(int32_t map) {
    if (map < 0 || map >= MOST_MAPS) return;
    atomic_store(&maps[map].end, 0);
    atomic_store(&maps[map].is_taken, 0);
}
#endif
