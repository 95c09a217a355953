/*
 * The processor's own clock: a few nanoseconds to read where hr_now_ns takes some tens. It runs at a constant rate that
 * is not known beforehand, so its readings become times between two samples of both clocks. On processors whose
 * counters do not run alike on all cores, times read on different cores are off by as much.
 */
#ifndef HR_BASE_TICKS_H
#define HR_BASE_TICKS_H

#include "base/clock.h"

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
