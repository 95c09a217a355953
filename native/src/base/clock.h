#ifndef HR_BASE_CLOCK_H
#define HR_BASE_CLOCK_H

#include <stdatomic.h>
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
    const int is_part = ns < 1000000000;
    const int64_t number = ns / (is_part ? 100000000 : 1000000000);
    (void)snprintf(text, HR_SECONDS_BYTES, is_part ? "0.%lld" : "%lld", (long long)(number < 1 ? 1 : number));
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

/* ---- The meter ---- */

/*
 * The time for which callers of one rank were blocked, and that for which the data of a batch moved meanwhile; for the
 * rest they have waited for other ranks. In ticks of the processor's clock.
 */
struct hr_meter {
    /*
     * Twice the ticks for which any batch has run; while one runs, those before it less the ticks of its begin, and 1
     * more. So a reader in any thread needs one load. All of it holds for the lower 63 bits of a number of ticks.
     */
    _Atomic uint64_t moving;
    int batches; /* the driver's: that run, each in another team */
    int blocked; /* under the lock: threads that wait */
    uint64_t since, moved_before; /* the first of them, and what hr_meter_moved was then */
    _Atomic uint64_t blocked_ticks, moved_ticks; /* in all */
};

static inline uint64_t hr_meter_moved(const struct hr_meter *meter, uint64_t now) {
    const uint64_t word = atomic_load_explicit(&meter->moving, memory_order_relaxed);
    return ((word >> 1) + ((word & 1) != 0 ? now : 0)) << 1 >> 1;
}
/* The driver: a batch begins to run, or has. */
static inline void hr_meter_move(struct hr_meter *meter, int begins, uint64_t now) {
    const uint64_t moved = hr_meter_moved(meter, now);
    const int others = begins ? meter->batches++ : --meter->batches;
    if (others == 0) {
        atomic_store_explicit(&meter->moving, begins ? (moved - now) << 1 | 1 : moved << 1, memory_order_relaxed);
    }
}
/* With the lock: a thread begins to wait, or has. A batch that began after `now` seems to have moved less than 0. */
static inline void hr_meter_block(struct hr_meter *meter, int begins, uint64_t now) {
    const int others = begins ? meter->blocked++ : --meter->blocked;
    const uint64_t moved = hr_meter_moved(meter, now), more = (moved - meter->moved_before) << 1;
    if (others == 0 && begins) {
        meter->since = now;
        meter->moved_before = moved;
    } else if (others == 0) {
        atomic_fetch_add_explicit(&meter->blocked_ticks, now - meter->since, memory_order_relaxed);
        atomic_fetch_add_explicit(&meter->moved_ticks, (int64_t)more > 0 ? more >> 1 : 0, memory_order_relaxed);
    }
}

#endif
