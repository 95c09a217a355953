#include "collective/group.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

char *hr_group_name_rank(const struct hr_group *group, int rank, char *out, size_t out_bytes) {
    if (rank < 0 || rank >= group->size) {
        (void)snprintf(out, out_bytes, "a rank");
    } else {
        (void)snprintf(out, out_bytes, "rank %d (%s)", rank, group->host_name_of_rank[rank]);
    }
    return out;
}

void hr_group_wake(struct hr_group *group, int local_rank) {
    _Atomic uint32_t *sleeping = &group->arena.blocks[local_rank].sleeping;
    /* Partner: the store in sleep_until_woken. The exchange lets only one of several wakers pay for the write. */
    if (atomic_load(sleeping) == 0 || atomic_exchange(sleeping, 0) == 0) {
        return;
    }
    const uint64_t one = 1;
    const ssize_t written = write(group->wake_fds[local_rank], &one, sizeof one);
    (void)written; /* a full counter is readable all the same */
    atomic_fetch_add_explicit(&group->wakes, 1, memory_order_relaxed);
}

void hr_group_wake_all(struct hr_group *group) {
    for (int i = 0; i < group->local_size; i++) {
        if (i != group->local_rank) {
            hr_group_wake(group, i);
        }
    }
}

void hr_group_abort(struct hr_group *group, int code, int rank, enum hr_abort_reason reason) {
    if (hr_arena_abort(&group->arena, code, rank, reason)) {
        hr_group_wake_all(group);
        hr_group_wake(group, group->local_rank); /* called by another thread than the driver */
    }
}

void hr_group_suspect_link(struct hr_group *group) {
    enum hr_loss how = HR_LOSS_CLOSED;
    const int host = group->transport->ops->lost_peer(group->transport, &how);
    int rank = -1;
    int seen = 0;
    for (int r = 0; r < group->size && rank < 0; r++) {
        if (group->host_of_rank[r] == host && seen++ == group->local_rank) {
            rank = r; /* links join ranks of equal local index */
        }
    }
    group->suspect = (struct hr_abort){.code = HORO_ERR_PEER_LOST,
                                       .rank = rank,
                                       .reason = how == HR_LOSS_SILENT ? HR_REASON_SILENT : HR_REASON_LINK};
}

void hr_group_abandon_data(struct hr_group *group) {
    if (group->transport != NULL) {
        group->transport->ops->abandon(group->transport, HR_CHANNEL_DATA);
    }
}

int hr_group_left(const struct hr_group *group) {
    return (int)atomic_load(&group->arena.header->left_rank);
}

size_t hr_group_life_fds(const struct hr_group *group, struct pollfd *fds) {
    size_t count = 0;
    for (int i = 0; i < group->local_size; i++) {
        const int fd = atomic_load_explicit(&group->life_fds[i], memory_order_relaxed);
        if (fd >= 0) {
            fds[count++] = (struct pollfd){.fd = fd, .events = POLLIN};
        }
    }
    return count;
}

/* Nothing is ever sent on a life line, so anything readable is its end. */
static int has_ended(int fd) {
    char byte;
    const ssize_t count = recv(fd, &byte, 1, MSG_DONTWAIT | MSG_PEEK);
    return count == 0 || (count < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

static void close_life_line(struct hr_group *group, int local_rank, int fd) {
    int expected = fd;
    if (!atomic_compare_exchange_strong(&group->life_fds[local_rank], &expected, -1)) {
        return; /* the other thread was first */
    }
    const uint32_t state = atomic_load(&group->arena.blocks[local_rank].state);
    if (state != HR_MEMBER_LEFT) {
        hr_group_abort(group, HORO_ERR_PEER_LOST, group->rank_of_local[local_rank], HR_REASON_EXITED);
    }
}

void hr_group_watch(struct hr_group *group, const struct pollfd *fds, size_t count) {
    for (size_t k = 0; k < count; k++) {
        if (fds[k].revents == 0 || !has_ended(fds[k].fd)) {
            continue;
        }
        for (int i = 0; i < group->local_size; i++) {
            if (atomic_load_explicit(&group->life_fds[i], memory_order_relaxed) == fds[k].fd) {
                close_life_line(group, i, fds[k].fd);
            }
        }
    }
}

/* A rank that said goodbye before doing its part of the running batch will never do it. */
static void check_leavers(struct hr_group *group) {
    if (!group->in_batch || hr_group_left(group) == 0) {
        return;
    }
    for (int i = 0; i < group->local_size; i++) {
        const struct hr_arena_block *block = &group->arena.blocks[i];
        if (atomic_load(&block->state) == HR_MEMBER_LEFT && atomic_load(&block->log_done) < group->batch_end) {
            hr_group_abort(group, HORO_ERR_ABORTED, group->rank_of_local[i], HR_REASON_LEFT);
        }
    }
}

static int64_t earlier(int64_t a_ns, int64_t b_ns) {
    return a_ns < 0 || (b_ns >= 0 && b_ns < a_ns) ? b_ns : a_ns;
}

/* How long to sleep at most while MPI is at work for this rank; -1: it is not. */
static int64_t poll_within_ns(const struct hr_group *group) {
    const int64_t posted_ns = group->transport == NULL ? -1 : hr_transport_poll_within_ns(group->transport);
    return earlier(posted_ns, group->poll_within_ns > 0 ? group->poll_within_ns : -1);
}

static int64_t until_ns(int64_t deadline_ns) {
    if (deadline_ns == 0) {
        return -1;
    }
    const int64_t left_ns = deadline_ns - hr_now_ns();
    return left_ns < 0 ? 0 : left_ns;
}

enum awoken { AWOKEN_BY_EVENT, AWOKEN_BY_SIGNAL, AWOKEN_TO_LOOK };

/* Sleeps once. */
static enum awoken sleep_until_woken(struct hr_group *group, hr_ready ready, void *arg, int64_t deadline_ns) {
    _Atomic uint32_t *sleeping = &group->arena.blocks[group->local_rank].sleeping;
    atomic_store(sleeping, 1); /* partner: hr_group_wake */
    if (ready(group, arg) || hr_arena_aborted(&group->arena).code != 0) {
        atomic_store(sleeping, 0);
        return AWOKEN_BY_EVENT;
    }
    struct pollfd *fds = group->poll_fds;
    fds[0] = (struct pollfd){.fd = group->wake_fds[group->local_rank], .events = POLLIN};
    const size_t life_count = hr_group_life_fds(group, fds + 1);
    size_t count = 1 + life_count;
    if (group->transport != NULL) {
        count += group->transport->ops->sleep_fds(group->transport, fds + count, group->poll_capacity - count);
    }
    atomic_fetch_add_explicit(&group->sleeps, 1, memory_order_relaxed);
    const int64_t look_ns = poll_within_ns(group);
    const int64_t timeout_ns = earlier(until_ns(deadline_ns), look_ns);
    const struct timespec timeout = {.tv_sec = timeout_ns / 1000000000, .tv_nsec = timeout_ns % 1000000000};
    const int events = ppoll(fds, (nfds_t)count, timeout_ns < 0 ? NULL : &timeout, NULL);
    const int interrupted = events < 0 && errno == EINTR;
    atomic_store(sleeping, 0);
    if (events > 0 && fds[0].revents != 0) {
        uint64_t drained;
        const ssize_t got = read(fds[0].fd, &drained, sizeof drained);
        (void)got; /* nonblocking; whatever it says, the caller looks at its condition next */
    }
    if (events > 0) {
        hr_group_watch(group, fds + 1, life_count);
    }
    if (interrupted) {
        return AWOKEN_BY_SIGNAL;
    }
    return events == 0 && look_ns >= 0 ? AWOKEN_TO_LOOK : AWOKEN_BY_EVENT;
}

/* Spins until ready, aborted or spin_ns are over: 1, or 0 for over. */
static int spin(struct hr_group *group, hr_ready ready, void *arg, int64_t spin_ns) {
    const int64_t end_ns = spin_ns > 0 ? hr_now_ns() + spin_ns : 0;
    for (;;) {
        for (int i = 0; i < HR_LOOKS_PER_YIELD; i++) {
            int moved;
            do { /* what has come is worth more than a poll() that would say so */
                moved = group->transport != NULL && group->transport->ops->progress(group->transport) > 0;
                if (ready(group, arg)) {
                    return 1;
                }
            } while (moved);
            if (spin_ns <= 0) {
                return 0;
            }
            hr_cpu_relax();
        }
        if (hr_arena_aborted(&group->arena).code != 0) {
            return 1;
        }
        const int64_t now_ns = hr_now_ns();
        if (now_ns >= end_ns) {
            return 0;
        }
        hr_seat_look(group, now_ns);
        (void)sched_yield(); /* the one waited for may have been put on this very core */
    }
}

int hr_group_wait(struct hr_group *group, hr_ready ready, void *arg, int64_t spin_ns, int64_t deadline_ns) {
    for (int64_t next_spin_ns = spin_ns;;) {
        if (spin(group, ready, arg, next_spin_ns) && ready(group, arg)) {
            return HORO_OK;
        }
        check_leavers(group);
        const int code = hr_arena_aborted(&group->arena).code;
        if (code != 0) {
            return code;
        }
        if (deadline_ns != 0 && hr_now_ns() >= deadline_ns) {
            return HORO_IN_PROGRESS;
        }
        const enum awoken awoken = sleep_until_woken(group, ready, arg, deadline_ns);
        if (awoken == AWOKEN_BY_SIGNAL) {
            return HORO_IN_PROGRESS;
        }
        next_spin_ns = awoken == AWOKEN_TO_LOOK ? 0 : spin_ns; /* one look: spinning has been tried */
    }
}

void hr_group_arrive(struct hr_group *group, enum hr_phase phase, unsigned parity) {
    const unsigned index = (unsigned)phase + parity;
    group->arrivals[index]++;
    struct hr_arena_block *block = &group->arena.blocks[group->local_rank];
    atomic_store_explicit(&block->progress, atomic_load_explicit(&block->progress, memory_order_relaxed) + 1,
                          memory_order_relaxed);
    hr_seat_show(group); /* in the same line */
    /* seq_cst: releases what was written before, and is the first half of the handshake with sleepers. */
    const uint64_t arrived = atomic_fetch_add(&group->arena.header->phase[index].arrived, 1) + 1;
    if (arrived % (uint64_t)group->local_size == 0) {
        hr_group_wake_all(group); /* only the last one to arrive completes anybody's wait */
    }
}

int hr_group_reached(const struct hr_group *group, enum hr_phase phase, unsigned parity) {
    const unsigned index = (unsigned)phase + parity;
    const uint64_t wanted = group->arrivals[index] * (uint64_t)group->local_size;
    return atomic_load(&group->arena.header->phase[index].arrived) >= wanted; /* partner: hr_group_arrive */
}

struct phase_wait {
    enum hr_phase phase;
    unsigned parity;
};

static int phase_complete(struct hr_group *group, void *arg) {
    const struct phase_wait *wait = arg;
    return hr_group_reached(group, wait->phase, wait->parity);
}

void hr_group_supervise(struct hr_group *group, int enabled) {
    if (group->watching != enabled && group->transport != NULL) {
        group->transport->ops->watch(group->transport, enabled);
    }
    group->watching = enabled;
}

/* The local rank that has passed the fewest phases, if fewer than I have; else -1. */
static int find_late(const struct hr_group *group) {
    uint64_t least = atomic_load_explicit(&group->arena.blocks[group->local_rank].progress, memory_order_relaxed);
    int late = -1;
    for (int i = 0; i < group->local_size; i++) {
        const uint64_t progress = atomic_load_explicit(&group->arena.blocks[i].progress, memory_order_relaxed);
        if (progress < least) {
            least = progress;
            late = group->rank_of_local[i];
        }
    }
    return late;
}

/* A wait inside a batch has lasted waited_ns. */
static void report_late(struct hr_group *group, int64_t waited_ns) {
    const int late = find_late(group);
    char name[HORO_MESSAGE_MAX / 4];
    if (late >= 0) {
        (void)hr_group_name_rank(group, late, name, sizeof name);
    } else {
        (void)snprintf(name, sizeof name, group->host_count > 1 ? "another host" : "another rank");
    }
    hr_log(&group->log, HORO_LOG_WARNING, "waiting for %s in the middle of an operation for %lld s", name,
           (long long)(waited_ns / 1000000000));
    if (group->stall_shutdown_ns > 0 && waited_ns >= group->stall_shutdown_ns) {
        hr_group_abort(group, HORO_ERR_STALLED, late, HR_REASON_STALLED);
    }
}

int hr_group_finish(struct hr_group *group, hr_ready ready, void *arg) {
    if (ready(group, arg)) {
        return HORO_OK; /* no clock on the fast path */
    }
    const int64_t begin_ns = hr_now_ns();
    int64_t report_ns = group->stall_warning_ns > 0 ? begin_ns + group->stall_warning_ns : 0;
    for (int64_t spin_ns = group->spin_ns;; spin_ns = 0) {
        const int64_t supervise_ns = group->watching ? 0 : begin_ns + HR_SUPERVISE_AFTER_NS;
        const int64_t deadline_ns =
            supervise_ns != 0 && (report_ns == 0 || supervise_ns < report_ns) ? supervise_ns : report_ns;
        const int status = hr_group_wait(group, ready, arg, spin_ns, deadline_ns);
        if (status != HORO_IN_PROGRESS) {
            return status;
        }
        if (group->interrupted != NULL && group->interrupted()) {
            hr_group_abort(group, HORO_ERR_ABORTED, group->rank, HR_REASON_INTERRUPTED);
        }
        const int64_t waited_ns = hr_now_ns() - begin_ns;
        if (waited_ns >= HR_SUPERVISE_AFTER_NS) {
            hr_group_supervise(group, 1);
        }
        if (report_ns != 0 && begin_ns + waited_ns >= report_ns) {
            report_late(group, waited_ns);
            report_ns += group->stall_warning_ns;
        }
    }
}

int hr_group_await(struct hr_group *group, enum hr_phase phase, unsigned parity) {
    struct phase_wait wait = {phase, parity};
    return group->local_size == 1 ? HORO_OK : hr_group_finish(group, phase_complete, &wait);
}
