/*
 * The time for which callers of one rank were blocked, and that for which the data of a batch moved meanwhile; for the
 * rest they have waited for other ranks. In ticks of the processor's clock.
 */
#ifndef HR_BASE_METER_H
#define HR_BASE_METER_H

#include <stdatomic.h>
#include <stdint.h>

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
