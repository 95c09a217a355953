#include "node/core_choice.h"

enum { LOOK_EVERY_NS = 1000000, PAUSE_MIN_NS = 16000000, PAUSE_MAX_NS = 1000000000 };

int hr_core_choose(const int *core_of, int count, int me, const cpu_set_t *allowed) {
    int here = 0; /* besides me */
    for (int i = 0; i < count; i++) {
        if (i != me && core_of[i] == core_of[me]) {
            if (i > me) {
                return -1;
            }
            here++;
        }
    }
    if (here == 0) {
        return -1;
    }
    int crowd[CPU_SETSIZE] = {0};
    for (int i = 0; i < count; i++) {
        if (core_of[i] >= 0 && core_of[i] < CPU_SETSIZE) {
            crowd[core_of[i]]++;
        }
    }
    int best = -1;
    int fewest = here; /* there must be fewer than I leave behind */
    for (int step = 1; step < CPU_SETSIZE && fewest > 0; step++) {
        const int core = (core_of[me] + step) % CPU_SETSIZE;
        if (CPU_ISSET((size_t)core, allowed) && crowd[core] < fewest) {
            fewest = crowd[core];
            best = core;
        }
    }
    return best;
}

void hr_core_publish(const struct hr_core_choice *choice, const struct hr_arena *arena) {
    if (!choice->enabled) {
        return;
    }
    _Atomic int32_t *core = &arena->blocks[arena->local_rank].core;
    const int32_t now = (int32_t)sched_getcpu() + 1;
    if (atomic_load_explicit(core, memory_order_relaxed) != now) {
        atomic_store_explicit(core, now, memory_order_relaxed); /* a hint: a stale one costs a needless move at most */
    }
}

int hr_core_is_shared(const struct hr_arena *arena) {
    const int32_t mine = atomic_load_explicit(&arena->blocks[arena->local_rank].core, memory_order_relaxed);
    for (int i = 0; i < arena->local_size && mine != 0; i++) { /* 0: ranks do not tell */
        const struct hr_arena_block *block = &arena->blocks[i];
        if (i != arena->local_rank && atomic_load_explicit(&block->core, memory_order_relaxed) == mine &&
            atomic_load_explicit(&block->sleeping, memory_order_relaxed) == 0) {
            return 1;
        }
    }
    return 0;
}

void hr_core_look(struct hr_core_choice *choice, const struct hr_arena *arena, int64_t now_ns) {
    if (!choice->enabled || arena->local_size == 1 || now_ns < choice->next_ns) {
        return;
    }
    choice->next_ns = now_ns + LOOK_EVERY_NS;
    hr_core_publish(choice, arena);
    for (int i = 0; i < arena->local_size; i++) {
        const struct hr_arena_block *block = &arena->blocks[i];
        const int asleep = i != arena->local_rank && atomic_load_explicit(&block->sleeping, memory_order_relaxed) != 0;
        choice->core_of[i] = asleep ? -1 : (int)atomic_load_explicit(&block->core, memory_order_relaxed) - 1;
    }
    cpu_set_t allowed;
    int core = -1;
    if (choice->core_of[arena->local_rank] >= 0 && sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
        core = hr_core_choose(choice->core_of, arena->local_size, arena->local_rank, &allowed);
    }
    const int was_crowded = choice->crowded;
    choice->crowded = core >= 0;
    if (core < 0) {
        choice->pause_ns /= 2;
        return;
    }
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET((size_t)core, &only);
    if (was_crowded && sched_setaffinity(0, sizeof only, &only) == 0) { /* once may be chance */
        (void)sched_setaffinity(0, sizeof allowed, &allowed);
        hr_core_publish(choice, arena);
        atomic_fetch_add_explicit(&choice->moves, 1, memory_order_relaxed);
        const int64_t longer_ns = choice->pause_ns * 2;
        choice->pause_ns = longer_ns < PAUSE_MIN_NS   ? PAUSE_MIN_NS
                           : longer_ns > PAUSE_MAX_NS ? PAUSE_MAX_NS
                                                      : longer_ns;
        choice->next_ns = now_ns + choice->pause_ns;
        choice->crowded = 0;
    }
}
