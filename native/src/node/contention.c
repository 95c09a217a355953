#include "node/contention.h"

#include "node/node.h"

/* A yield to ranks that wait never takes so long; one to a program that computes always does. */
#define SLICE_NS 300000ll
/* Two to four times what it takes to sleep and be woken. */
#define SPIN_NS 20000ll
/* So much lost within so long: a single one is chance, or a rank that has something to compute. */
#define LOST_NS 10000000ll
#define WITHIN_NS 50000000ll
#define WHILE_MIN_NS 100000000ll
#define WHILE_MAX_NS 1000000000ll

static int64_t next_while_ns(int64_t last_ns) {
    return last_ns < WHILE_MIN_NS / 2 ? WHILE_MIN_NS : last_ns > WHILE_MAX_NS / 2 ? WHILE_MAX_NS : 2 * last_ns;
}

/* Time for which waits do without yields from now on. Ranks in two time namespaces have two clocks: it may be hours. */
static int64_t left_ns(const struct hr_contention *contention, int64_t now_ns) {
    const int64_t until_ns = atomic_load_explicit(&contention->until_ns, memory_order_relaxed);
    return (int64_t)((uint64_t)until_ns - (uint64_t)now_ns); /* whatever stands there */
}

/* Nobody notes more than the longest while. */
static int is_while(int64_t ns) {
    return ns > 0 && ns <= WHILE_MAX_NS;
}

/* Whether it is enough now. */
static int lose(struct hr_losses *losses, int64_t yield_ns, int64_t now_ns) {
    if (now_ns - losses->since_ns > WITHIN_NS) {
        *losses = (struct hr_losses){.since_ns = now_ns - yield_ns};
    }
    losses->lost_ns += yield_ns;
    return losses->lost_ns >= LOST_NS;
}

/* One of both counts where two ranks note something at once. */
void hr_contention_note(struct hr_contention *contention, struct hr_losses *losses, int64_t yield_ns, int64_t now_ns) {
    const int64_t while_ns = atomic_load_explicit(&contention->while_ns, memory_order_relaxed);
    const int is_long = yield_ns >= SLICE_NS;
    if (!is_long && while_ns == 0) {
        return;
    }
    const int64_t left = left_ns(contention, now_ns);
    if (is_long && !is_while(left) && lose(losses, yield_ns, now_ns)) {
        *losses = (struct hr_losses){0};
        atomic_store_explicit(&contention->while_ns, next_while_ns(while_ns), memory_order_relaxed);
        atomic_store_explicit(&contention->until_ns, now_ns + next_while_ns(while_ns), memory_order_relaxed);
    } else if (!is_long && (!is_while(while_ns) || left <= -while_ns)) { /* for as long, too little was lost */
        atomic_store_explicit(&contention->while_ns, 0, memory_order_relaxed);
    }
}

int hr_contention_is_on(const struct hr_contention *contention, int64_t now_ns) {
    return is_while(left_ns(contention, now_ns));
}

int64_t hr_contention_spin_ns(struct hr_node *node, int64_t now_ns) {
    hr_core_look(node, now_ns);
    hr_core_publish(node);
    const struct hr_arena_block *blocks = node->arena.blocks;
    const int32_t mine = atomic_load_explicit(&blocks[node->local_rank].core, memory_order_relaxed);
    for (int i = 0; i < node->local_size && mine != 0; i++) { /* 0: ranks do not tell */
        const int is_here = atomic_load_explicit(&blocks[i].core, memory_order_relaxed) == mine;
        if (i != node->local_rank && is_here &&
            atomic_load_explicit(&blocks[i].sleeping, memory_order_relaxed) == 0) {
            return 0;
        }
    }
    return SPIN_NS;
}
