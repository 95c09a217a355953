#include "node/contention.h"

/* A yield to ranks that wait never takes so long; one to a program that computes always does. */
#define SLICE_NS 300000ll
/* So much lost within so long: a single one is chance, or a rank that has something to compute. */
#define LOST_NS 10000000ll
#define WITHIN_NS 50000000ll
#define WHILE_MIN_NS 100000000ll
#define WHILE_MAX_NS 1000000000ll

/* Time for which waits do without yields from now on. Ranks in two time namespaces have two clocks: it may be hours. */
static int64_t left_ns(const struct hr_contention *contention, int64_t now_ns) {
    const int64_t until_ns = atomic_load_explicit(&contention->until_ns, memory_order_relaxed);
    return (int64_t)((uint64_t)until_ns - (uint64_t)now_ns); /* whatever stands there */
}

/* Nobody notes more than the longest while. */
static int is_while(int64_t ns) {
    return ns > 0 && ns <= WHILE_MAX_NS;
}

/* One of both counts where two ranks note something at once. */
void hr_contention_note(struct hr_contention *contention, struct hr_losses *losses, int64_t yield_ns, int64_t now_ns) {
    const int64_t while_ns = atomic_load_explicit(&contention->while_ns, memory_order_relaxed);
    const int is_long = yield_ns >= SLICE_NS;
    if (!is_long && while_ns == 0) {
        return;
    }
    const int64_t left = left_ns(contention, now_ns);
    if (is_long && !is_while(left)) {
        if (now_ns - losses->since_ns > WITHIN_NS) {
            *losses = (struct hr_losses){.since_ns = now_ns - yield_ns};
        }
        losses->lost_ns += yield_ns;
        if (losses->lost_ns >= LOST_NS) {
            const int64_t more_ns = while_ns > WHILE_MAX_NS / 2 ? WHILE_MAX_NS : 2 * while_ns;
            const int64_t next_ns = while_ns < WHILE_MIN_NS / 2 ? WHILE_MIN_NS : more_ns;
            *losses = (struct hr_losses){0};
            atomic_store_explicit(&contention->while_ns, next_ns, memory_order_relaxed);
            atomic_store_explicit(&contention->until_ns, now_ns + next_ns, memory_order_relaxed);
        }
    } else if (!is_long && (!is_while(while_ns) || left <= -while_ns)) { /* for as long, too little was lost */
        atomic_store_explicit(&contention->while_ns, 0, memory_order_relaxed);
    }
}

int hr_contention_is_on(const struct hr_contention *contention, int64_t now_ns) {
    return is_while(left_ns(contention, now_ns));
}
