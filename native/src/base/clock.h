#ifndef HR_BASE_CLOCK_H
#define HR_BASE_CLOCK_H

#include <stdint.h>
#include <time.h>

/* Monotonic nanoseconds. */
static inline int64_t hr_now_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* The time until the next look at what nobody can wait for otherwise: the rarer, the longer it has taken already. */
static inline int64_t hr_next_look_ns(int64_t taken_ns, int64_t least_ns, int64_t most_ns) {
    const int64_t part_ns = taken_ns / 32;
    return part_ns < least_ns ? least_ns : part_ns > most_ns ? most_ns : part_ns;
}

/* Tells the core that this is a spin loop. */
static inline void hr_cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

#endif
