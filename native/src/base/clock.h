#ifndef HR_BASE_CLOCK_H
#define HR_BASE_CLOCK_H

#include <stdint.h>
#include <stdio.h>
#include <time.h>

/* Monotonic nanoseconds. */
static inline int64_t hr_now_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Whole seconds, as "12"; of less than one, tenths, as "0.5". Returns text, which has HR_SECONDS_BYTES. */
enum { HR_SECONDS_BYTES = 24 };

static inline const char *hr_seconds(int64_t ns, char *text) {
    const int64_t second_ns = 1000000000;
    const int64_t tenths = ns < second_ns / 10 ? 1 : ns / (second_ns / 10);
    if (ns < second_ns) {
        (void)snprintf(text, HR_SECONDS_BYTES, "0.%lld", (long long)tenths);
    } else {
        (void)snprintf(text, HR_SECONDS_BYTES, "%lld", (long long)(ns / second_ns));
    }
    return text;
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
