/* Ordered list of kernel tables, best last. A row is offered only where the CPU has the
 * instructions and the operating system saves the registers they use. */
#define _GNU_SOURCE /* syscall */
#include "cpu.h"

#include "martlet.h"

typedef struct {
    const char *name;
    const mt_kernels *kernels;
    int (*is_supported)(void);
} isa_row;

static int always(void) { return 1; }

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* XCR0: the register sets that the operating system saves on a context switch. */
static unsigned saved_registers(void) {
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return 0; /* OSXSAVE */
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}
static int leaf7(unsigned sub, unsigned *b, unsigned *c, unsigned *a) {
    unsigned d;
    return __get_cpuid_count(7, sub, a, b, c, &d);
}
/* Core 2 of 2008, Bulldozer, Jaguar and later: SSSE3 and SSE4.1 */
static int has_sse41(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 9 & 1) && (c >> 19 & 1);
}
/* Haswell, Zen and later */
static int has_avx2(void) {
    unsigned a, b, c, d, b7, c7, a7;
    if ((saved_registers() & 6) != 6 || !__get_cpuid(1, &a, &b, &c, &d)) return 0;
    const int fma = c >> 12 & 1, f16c = c >> 29 & 1;
    return fma && f16c && leaf7(0, &b7, &c7, &a7) && (b7 >> 5 & 1);
}
/* Alder Lake, Zen 5 and later */
static int has_avxvnni(void) {
    unsigned b, c, a;
    return has_avx2() && leaf7(1, &b, &c, &a) && (a >> 4 & 1);
}
/* Ice Lake server, Zen 4 and later: F, DQ, BW, VL and VNNI */
static int has_avx512(void) {
    unsigned b, c, a;
    if (!has_avx2() || (saved_registers() & 0xe6) != 0xe6 || !leaf7(0, &b, &c, &a)) return 0;
    return (b >> 16 & 1) && (b >> 17 & 1) && (b >> 30 & 1) && (b >> 31 & 1) && (c >> 11 & 1);
}
/* Sapphire Rapids and later. Linux keeps the tiles from a process until it asks for them. */
static int has_amx(void) {
    unsigned a, b, c, d;
    const unsigned tiles = 3u << 17;
    if (!has_avx512() || (saved_registers() & tiles) != tiles) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 24 & 1) || !(d >> 25 & 1)) return 0;
#if defined(__linux__)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
#else
    return 0;
#endif
}
#elif defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>
/* Bits of AT_HWCAP and AT_HWCAP2; older headers lack the names. */
static int has_dotprod(void) { return getauxval(AT_HWCAP) >> 20 & 1; } /* ASIMDDP */
static int has_i8mm(void) { return has_dotprod() && (getauxval(AT_HWCAP2) >> 13 & 1); }
#elif defined(__APPLE__)
#include <sys/sysctl.h>
static int has_feature(const char *name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, NULL, 0) == 0 && value;
}
static int has_dotprod(void) { return has_feature("hw.optional.arm.FEAT_DotProd"); }
static int has_i8mm(void) { return has_dotprod() && has_feature("hw.optional.arm.FEAT_I8MM"); }
#else /* no way to ask is known */
static int has_dotprod(void) { return 0; }
static int has_i8mm(void) { return 0; }
#endif
#endif

static const isa_row isas[] = {
    {"scalar", &mt_kernels_scalar, always},
#if defined(__x86_64__)
    {"sse41", &mt_kernels_sse41, has_sse41},
    {"avx2", &mt_kernels_avx2, has_avx2},
    {"avxvnni", &mt_kernels_avxvnni, has_avxvnni},
    {"avx512", &mt_kernels_avx512, has_avx512},
    {"amx", &mt_kernels_amx, has_amx},
#elif defined(__aarch64__)
    {"neon", &mt_kernels_neon, always}, /* every 64-bit ARM has it */
    {"dotprod", &mt_kernels_dotprod, has_dotprod},
    {"i8mm", &mt_kernels_i8mm, has_i8mm},
#endif
};
enum { N_ISAS = sizeof isas / sizeof isas[0] };

int32_t mt_n_isas(void) { return N_ISAS; }
const char *mt_isa_name(int32_t isa) { return isa >= 0 && isa < N_ISAS ? isas[isa].name : ""; }
int32_t mt_isa_supported(int32_t isa) {
    return isa >= 0 && isa < N_ISAS && isas[isa].is_supported();
}
int32_t mt_isa_best(void) {
    for (int i = N_ISAS - 1; i > 0; i--)
        if (isas[i].is_supported()) return i;
    return 0;
}
const mt_kernels *mt_isa_kernels(int isa) {
    return isa >= 0 && isa < N_ISAS ? isas[isa].kernels : NULL;
}
