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

/* ---- The processor's own clock ---- */

/*
 * The processor's own clock: a few nanoseconds to read where hr_now_ns takes some tens. It runs at a constant rate that
 * is not known beforehand, so its readings become times between two samples of both clocks. On processors whose
 * counters do not run alike on all cores, times read on different cores are off by as much.
 */

static inline uint64_t hr_ticks(void) {
#if defined(__x86_64__) || defined(__i386__)
    return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
    uint64_t ticks;
    __asm__ __volatile__("mrs %0, cntvct_el0" : "=r"(ticks));
    return ticks;
#else
    return (uint64_t)hr_now_ns();
#endif
}

/* Both clocks at one moment. */
struct hr_tick_sample {
    uint64_t ticks;
    int64_t ns;
};

/* Of a few tries the one that was interrupted least. */
static inline struct hr_tick_sample hr_tick_sample(void) {
    struct hr_tick_sample best = {0};
    uint64_t best_width = UINT64_MAX;
    for (int i = 0; i < 5; i++) {
        const uint64_t before = hr_ticks();
        const int64_t ns = hr_now_ns();
        const uint64_t width = hr_ticks() - before;
        if (width < best_width) {
            best_width = width;
            best = (struct hr_tick_sample){.ticks = before + width / 2, .ns = ns};
        }
    }
    return best;
}

/* The time of a reading taken between two samples, or shortly after the second. */
static inline int64_t hr_tick_ns(struct hr_tick_sample then, struct hr_tick_sample now, uint64_t ticks) {
    const double span_ticks = (double)(int64_t)(now.ticks - then.ticks);
    const double ns_per_tick = span_ticks > 0 ? (double)(now.ns - then.ns) / span_ticks : 0;
    return now.ns - (int64_t)((double)(int64_t)(now.ticks - ticks) * ns_per_tick);
}

#endif
