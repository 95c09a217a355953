#include "kernel/kernel.h"

#include <string.h>

#include "kernel/level.h"

#if defined(__x86_64__)
/*
 * __builtin_cpu_supports reads a table that was filled in when the library was loaded. Not every compiler's knows
 * "f16c"; asking the processor itself costs microseconds in a virtual machine, where each cpuid is a trap. That of avx2
 * has checked the operating system.
 */
#if !defined(__clang__) && __GNUC__ >= 11
static int has_f16c(void) {
    return __builtin_cpu_supports("f16c");
}
#else
#include <cpuid.h>

static int has_f16c(void) {
    unsigned a;
    unsigned b;
    unsigned c;
    unsigned d;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

#endif

const struct hr_kernel *hr_kernel_find(const char *name) {
#if defined(__x86_64__)
    const int has_avx2 = __builtin_cpu_supports("avx2") && has_f16c();
    const int has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if ((name == NULL || strcmp(name, "avx512") == 0) && has_avx512) {
        return &hr_kernel_avx512;
    }
    if ((name == NULL || strcmp(name, "avx2") == 0) && has_avx2) {
        return &hr_kernel_avx2;
    }
#elif defined(__aarch64__)
    if (name == NULL || strcmp(name, "neon") == 0) {
        return &hr_kernel_neon; /* part of the base architecture */
    }
#endif
    return name == NULL || strcmp(name, "scalar") == 0 ? &hr_kernel_scalar : NULL;
}

HORO_API const char *horo_simd_name(void) {
    return hr_kernel_find(NULL)->name;
}
