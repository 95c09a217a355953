#include <errno.h>
#include <unistd.h>

#include "node/node.h"

/* ---- Contention ---- */

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

int hr_node_is_contended(const struct hr_node *node, int64_t now_ns) {
    return node->sleeps_under_contention && is_while(left_ns(&node->arena.header->contention, now_ns));
}

/* ---- The choice of a core ---- */

enum { LOOK_AROUND_NS = 1000000, PAUSE_MIN_NS = 16000000, PAUSE_MAX_NS = 1000000000 };

int hr_core_choose(const int *core_of, int count, int me, const cpu_set_t *allowed) {
    int crowd[CPU_SETSIZE] = {0};
    int best = -1;
    int fewest = 0; /* here, besides me: there must be fewer than I leave behind */
    for (int i = 0; i < count; i++) {
        if (i > me && core_of[i] == core_of[me]) {
            return -1;
        }
        fewest += i != me && core_of[i] == core_of[me];
        if (core_of[i] >= 0 && core_of[i] < CPU_SETSIZE) {
            crowd[core_of[i]]++;
        }
    }
    for (int step = 1; step < CPU_SETSIZE && fewest > 0; step++) {
        const int core = (core_of[me] + step) % CPU_SETSIZE;
        if (CPU_ISSET((size_t)core, allowed) && crowd[core] < fewest) {
            fewest = crowd[core];
            best = core;
        }
    }
    return best;
}

void hr_core_publish(const struct hr_arena *arena) {
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

/* Looks around if it is time to, and moves the calling thread if that helps. Its affinity is afterwards what it was. */
static void look_around(struct hr_core_choice *choice, const struct hr_arena *arena, int64_t now_ns) {
    if (!choice->enabled || arena->local_size == 1 || now_ns < choice->next_ns) {
        return;
    }
    choice->next_ns = now_ns + LOOK_AROUND_NS;
    hr_core_publish(arena);
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
        hr_core_publish(arena);
        atomic_fetch_add_explicit(&choice->moves, 1, memory_order_relaxed);
        const int64_t longer_ns = choice->pause_ns < PAUSE_MIN_NS / 2 ? PAUSE_MIN_NS : choice->pause_ns * 2;
        choice->pause_ns = longer_ns < PAUSE_MAX_NS ? longer_ns : PAUSE_MAX_NS;
        choice->next_ns = now_ns + choice->pause_ns;
        choice->crowded = 0;
    }
}

/* ---- Sleeping ---- */

/*
 * Most waits for a rank beside this one end within so many looks where nobody else wants the core, and a yield would
 * take as long as ten of them. A yield that took longer than so long has let somebody run.
 */
enum { FIRST_LOOKS = 16, LOOKS_PER_YIELD = 2, YIELD_ALONE_NS = 1000 };
#define LOOK_AT_UNNAMED_NS 1000000ll
#define CONTENDED_SPIN_NS 20000ll /* two to four times what it takes to sleep and be woken */

/* Of two spans of time, of which a negative one has no end. */
static int64_t shorter(int64_t a_ns, int64_t b_ns) {
    return a_ns < 0 || (b_ns >= 0 && b_ns < a_ns) ? b_ns : a_ns;
}

/*
 * With the mark set that this rank sleeps, so that whoever changes something from here on wakes it. Leaves room for so
 * many descriptors behind those of the links.
 */
static void name_events(const struct hr_node *node, struct hr_sleep *sleep, size_t spare) {
    sleep->look_ns = node->poll_within_ns > 0 ? node->poll_within_ns : -1; /* the longest sleep; -1: any */
    if (node->wake_fds == NULL) {
        sleep->word = &node->arena.blocks[node->local_rank].sleeping;
        sleep->value = 1;
        return;
    }
    sleep->fds[0] = (struct pollfd){.fd = node->wake_fds[node->local_rank], .events = POLLIN};
    sleep->word = NULL;
    sleep->count = 1;
    for (int i = 0; i < node->transport_count; i++) {
        struct hr_transport *transport = node->transports[i];
        size_t room = sleep->capacity - spare - sleep->count;
        const size_t links = transport->ops->sleep_fds(transport, sleep->fds + sleep->count, room);
        sleep->look_ns = shorter(sleep->look_ns, hr_transport_poll_within_ns(transport));
        if (links > room && hr_sleep_reserve(sleep, sleep->count + links + spare) == HORO_OK) {
            room = transport->ops->sleep_fds(transport, sleep->fds + sleep->count, links);
        }
        if (links > room) { /* there is no memory for them all */
            sleep->look_ns = shorter(sleep->look_ns, LOOK_AT_UNNAMED_NS);
        }
        sleep->count += links < room ? links : room;
    }
}

/* 1: this rank sleeps, to be woken by what the sleep names, which leaves room as above; 0: something is ready. */
static int set_mark(struct hr_node *node, hr_ready ready, void *arg, struct hr_sleep *sleep, size_t spare,
                    int64_t deadline_ns) {
    _Atomic uint32_t *sleeping = &node->arena.blocks[node->local_rank].sleeping;
    atomic_store(sleeping, 1); /* partner: hr_node_wake */
    hr_node_pass_questions(node);
    node->looks_at_all = 1;
    const int is_ready = ready(node, arg);
    node->looks_at_all = 0;
    if (is_ready) {
        atomic_store(sleeping, 0);
        return 0;
    }
    name_events(node, sleep, spare);
    sleep->deadline_ns = deadline_ns;
    return 1;
}

int hr_node_sleep(const struct hr_sleep *sleep) {
    int64_t timeout_ns = sleep->look_ns;
    if (sleep->deadline_ns != 0) {
        const int64_t left_ns = sleep->deadline_ns - hr_now_ns();
        timeout_ns = shorter(timeout_ns, left_ns < 0 ? 0 : left_ns);
    }
    const struct timespec timeout = {.tv_sec = timeout_ns / 1000000000, .tv_nsec = timeout_ns % 1000000000};
    const struct timespec *longest = timeout_ns < 0 ? NULL : &timeout;
    return sleep->word != NULL ? hr_word_sleep(sleep->word, sleep->value, longest)
                               : ppoll(sleep->fds, (nfds_t)sleep->count, longest, NULL);
}

void hr_node_end_sleep(struct hr_node *node, const struct hr_sleep *sleep) {
    atomic_store(&node->arena.blocks[node->local_rank].sleeping, 0);
    if (sleep != NULL && sleep->word == NULL && sleep->fds[0].revents != 0) {
        uint64_t drained;
        const ssize_t got = read(sleep->fds[0].fd, &drained, sizeof drained);
        (void)got; /* nonblocking; whatever it says, the driver looks at its condition next */
    }
}

int hr_node_progress(struct hr_node *node) {
    int moved = 0;
    node->looks++;
    for (int i = 0; i < node->transport_count; i++) {
        struct hr_transport *transport = node->transports[i];
        if (!transport->is_quiet || hr_node_looks_at_quiet(node, i)) {
            moved |= transport->ops->progress(transport);
        }
    }
    return moved;
}

/*
 * Spins until ready, 1, or until end_ns, 0; looks once where that is 0. It gives way after every few looks; under
 * contention it does not, and ends soon.
 */
static int spin(struct hr_node *node, hr_ready ready, void *arg, int64_t now_ns, int64_t end_ns) {
    const int gives_way = end_ns == 0 || !hr_node_is_contended(node, now_ns);
    if (!gives_way) {
        look_around(&node->core_choice, &node->arena, now_ns);
        if (node->core_choice.enabled) {
            hr_core_publish(&node->arena);
        }
        const int64_t soon_ns = now_ns + (hr_core_is_shared(&node->arena) ? 0 : CONTENDED_SPIN_NS);
        end_ns = soon_ns < end_ns ? soon_ns : end_ns;
    }
    for (int looks = node->is_core_wanted ? LOOKS_PER_YIELD : FIRST_LOOKS;; looks = LOOKS_PER_YIELD) {
        for (int i = 0; i < looks; i++) {
            int moved;
            do { /* a message that has come spares the poll() that would say so */
                moved = hr_node_progress(node);
                if (ready(node, arg)) {
                    return 1;
                }
            } while (moved);
            if (end_ns == 0) {
                return 0;
            }
            hr_cpu_relax();
        }
        now_ns = hr_now_ns();
        if (now_ns >= end_ns || (gives_way && hr_node_is_contended(node, now_ns))) {
            return 0;
        }
        if (gives_way) {
            look_around(&node->core_choice, &node->arena, now_ns);
            /* Gives way to whoever wants this core: the rank waited for may have been put on it. */
            (void)sched_yield();
            const int64_t back_ns = hr_now_ns();
            node->is_core_wanted = back_ns - now_ns > YIELD_ALONE_NS;
            if (node->sleeps_under_contention) {
                hr_contention_note(&node->arena.header->contention, &node->losses, back_ns - now_ns, back_ns);
            }
        }
    }
}

/* The time until which a wait spins, which is not behind its deadline; 0: it looks once. */
static int64_t end_of_spin(int64_t now_ns, int64_t spin_ns, int64_t deadline_ns) {
    if (spin_ns <= 0) {
        return 0;
    }
    const int64_t end_ns = now_ns + spin_ns;
    return deadline_ns != 0 && deadline_ns < end_ns ? deadline_ns : end_ns;
}

int hr_node_wait(struct hr_node *node, hr_ready ready, void *arg, int64_t now_ns, int64_t spin_ns,
                 int64_t deadline_ns) {
    struct hr_sleep *sleep = &node->sleep;
    for (int64_t end_ns = end_of_spin(now_ns, spin_ns, deadline_ns);;) {
        if (spin(node, ready, arg, now_ns, end_ns)) {
            return HORO_OK;
        }
        if (deadline_ns != 0 && hr_now_ns() >= deadline_ns) {
            return HORO_IN_PROGRESS;
        }
        if (!set_mark(node, ready, arg, sleep, 0, deadline_ns)) {
            return HORO_OK;
        }
        atomic_fetch_add_explicit(&node->sleeps, 1, memory_order_relaxed);
        const int events = hr_node_sleep(sleep);
        const int is_interrupted = events < 0 && errno == EINTR;
        hr_node_end_sleep(node, events > 0 ? sleep : NULL);
        if (is_interrupted) {
            return HORO_IN_PROGRESS;
        }
        now_ns = hr_now_ns();
        /* one look where it is time for that: spinning has been tried */
        const int looks_once = events == 0 && sleep->look_ns >= 0;
        end_ns = looks_once ? 0 : end_of_spin(now_ns, spin_ns, deadline_ns);
    }
}

int hr_node_prepare_sleep(struct hr_node *node, hr_ready ready, void *arg, struct hr_sleep *sleep,
                          int64_t deadline_ns) {
    return spin(node, ready, arg, 0, 0) || !set_mark(node, ready, arg, sleep, 1, deadline_ns);
}
