/* The one way to wait: spin for a while, then sleep. See node.h. */
#include <errno.h>
#include <sched.h>
#include <unistd.h>

#include "node/node.h"

/*
 * Most waits for a rank beside this one end within so many looks where nobody else wants the core, and a yield would
 * take as long as ten of them. A yield that took longer than so long has let somebody run.
 */
enum { FIRST_LOOKS = 16, YIELD_ALONE_NS = 1000 };
#define LOOK_AT_UNNAMED_NS 1000000ll
#define CONTENDED_SPIN_NS 20000ll /* two to four times what it takes to sleep and be woken */

/* Of two spans of time, of which a negative one has no end. */
static int64_t shorter(int64_t a_ns, int64_t b_ns) {
    return a_ns < 0 || (b_ns >= 0 && b_ns < a_ns) ? b_ns : a_ns;
}

/* With the mark set that this rank sleeps, so that whoever changes something from here on writes its eventfd. */
static void name_fds(const struct hr_node *node, struct hr_sleep *sleep, size_t room) {
    struct pollfd *fds = sleep->fds;
    fds[0] = (struct pollfd){.fd = node->wake_fds[node->local_rank], .events = POLLIN};
    sleep->life_count = hr_node_life_fds(node, fds + 1);
    sleep->count = 1 + sleep->life_count;
    sleep->look_ns = node->poll_within_ns > 0 ? node->poll_within_ns : -1; /* the longest sleep; -1: any */
    for (int i = 0; i < node->transport_count; i++) {
        sleep->look_ns = shorter(sleep->look_ns, hr_transport_poll_within_ns(node->transports[i]));
        const size_t left = room - sleep->count;
        const size_t links = node->transports[i]->ops->sleep_fds(node->transports[i], fds + sleep->count, left);
        if (links > left) { /* there was no memory for them all */
            sleep->look_ns = shorter(sleep->look_ns, LOOK_AT_UNNAMED_NS);
        }
        sleep->count += links < left ? links : left;
    }
}

static int set_mark(struct hr_node *node, hr_ready ready, void *arg) {
    _Atomic uint32_t *sleeping = &node->arena.blocks[node->local_rank].sleeping;
    atomic_store(sleeping, 1); /* partner: hr_node_wake */
    node->looks_at_all = 1;
    const int is_ready = ready(node, arg);
    node->looks_at_all = 0;
    if (is_ready) {
        atomic_store(sleeping, 0);
    }
    return !is_ready;
}

int hr_node_sleep(const struct hr_sleep *sleep) {
    int64_t timeout_ns = sleep->look_ns;
    if (sleep->deadline_ns != 0) {
        const int64_t left_ns = sleep->deadline_ns - hr_now_ns();
        timeout_ns = shorter(timeout_ns, left_ns < 0 ? 0 : left_ns);
    }
    const struct timespec timeout = {.tv_sec = timeout_ns / 1000000000, .tv_nsec = timeout_ns % 1000000000};
    return ppoll(sleep->fds, (nfds_t)sleep->count, timeout_ns < 0 ? NULL : &timeout, NULL);
}

void hr_node_end_sleep(struct hr_node *node, const struct hr_sleep *sleep) {
    atomic_store(&node->arena.blocks[node->local_rank].sleeping, 0);
    if (sleep != NULL && sleep->fds[0].revents != 0) {
        uint64_t drained;
        const ssize_t got = read(sleep->fds[0].fd, &drained, sizeof drained);
        (void)got; /* nonblocking; whatever it says, the driver looks at its condition next */
    }
}

enum awoken { AWOKEN_BY_EVENT, AWOKEN_BY_SIGNAL, AWOKEN_TO_LOOK, NOT_ASLEEP };

/* Sleeps once, unless it is ready. */
static enum awoken sleep_until_woken(struct hr_node *node, hr_ready ready, void *arg, int64_t deadline_ns) {
    if (!set_mark(node, ready, arg)) {
        return NOT_ASLEEP;
    }
    struct hr_sleep *sleep = &node->sleep;
    name_fds(node, sleep, sleep->capacity);
    sleep->deadline_ns = deadline_ns;
    atomic_fetch_add_explicit(&node->sleeps, 1, memory_order_relaxed);
    const int events = hr_node_sleep(sleep);
    const int interrupted = events < 0 && errno == EINTR;
    if (events <= 0) {
        sleep->fds[0].revents = 0;
    }
    hr_node_end_sleep(node, sleep);
    if (events > 0) {
        hr_node_watch(node, sleep->fds + 1, sleep->life_count);
    }
    if (interrupted) {
        return AWOKEN_BY_SIGNAL;
    }
    return events == 0 && sleep->look_ns >= 0 ? AWOKEN_TO_LOOK : AWOKEN_BY_EVENT;
}

/*
 * Spins until ready, 1, or until end_ns, 0; looks once where that is 0. It gives way after every few looks; under
 * contention it does not, and ends soon.
 */
static int spin(struct hr_node *node, hr_ready ready, void *arg, int64_t now_ns, int64_t end_ns) {
    const int gives_way = end_ns == 0 || !hr_node_is_contended(node, now_ns);
    if (!gives_way) {
        hr_core_look(&node->core_choice, &node->arena, now_ns);
        hr_core_publish(&node->core_choice, &node->arena);
        const int64_t soon_ns = now_ns + (hr_core_is_shared(&node->arena) ? 0 : CONTENDED_SPIN_NS);
        end_ns = soon_ns < end_ns ? soon_ns : end_ns;
    }
    for (int looks = node->is_core_wanted ? HR_LOOKS_PER_YIELD : FIRST_LOOKS;; looks = HR_LOOKS_PER_YIELD) {
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
            hr_core_look(&node->core_choice, &node->arena, now_ns);
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
    for (int64_t end_ns = end_of_spin(now_ns, spin_ns, deadline_ns);;) {
        if (spin(node, ready, arg, now_ns, end_ns)) {
            return HORO_OK;
        }
        if (deadline_ns != 0 && hr_now_ns() >= deadline_ns) {
            return HORO_IN_PROGRESS;
        }
        const enum awoken awoken = sleep_until_woken(node, ready, arg, deadline_ns);
        if (awoken == AWOKEN_BY_SIGNAL) {
            return HORO_IN_PROGRESS;
        }
        if (awoken == NOT_ASLEEP) {
            return HORO_OK;
        }
        /* one look: spinning has been tried */
        now_ns = hr_now_ns();
        end_ns = awoken == AWOKEN_TO_LOOK ? 0 : end_of_spin(now_ns, spin_ns, deadline_ns);
    }
}

int hr_node_prepare_sleep(struct hr_node *node, hr_ready ready, void *arg, struct hr_sleep *sleep,
                          int64_t deadline_ns) {
    if (spin(node, ready, arg, 0, 0) || !set_mark(node, ready, arg)) {
        return 1;
    }
    (void)hr_sleep_reserve(sleep, node->poll_count + 1);
    name_fds(node, sleep, sleep->capacity - 1);
    sleep->deadline_ns = deadline_ns;
    return 0;
}
