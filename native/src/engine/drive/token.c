/*
 * The token: the right to turn the parts (loop.c), which one thread at a time has.
 *
 *     owner  | who turns the parts | taken by                                 | left when
 *     -------+---------------------+------------------------------------------+----------------------------------------
 *     FREE   | nobody              |                                          |
 *     CALLER | a thread that waits | FREE or WATCH, under the lock that it    | its request is done, its time is up, or
 *            | for a request       | has anyway                               | a signal came
 *     THREAD | the background      | FREE, when it is kicked and needed, a    | nothing needs it; between hosts, a
 *            | thread              | life line tells of a leaver, or after    | caller wants it and nothing moves
 *            |                     | STREAM_NS; WATCH, by an event            |
 *     WATCH  | nobody: the thread  | THREAD, between hosts, when nothing      | an event (THREAD), or a caller, who
 *            | sleeps for whoever  | needs it                                 | clears the mark that this rank sleeps
 *            | comes, on all that  |                                          | and wakes nobody
 *            | may come            |                                          |
 *
 * Otherwise the thread sleeps on its kick and the life lines, so that nothing which comes for a caller wakes it. Where
 * other hosts need this rank it ends that sleep after STREAM_NS, so a stream of calls wakes it once in so long, and
 * takes the token if that has been free all the time. While one call lasts longer it sleeps on: then the caller kicks
 * it. Whoever leaves the token FREE wakes the callers that wait for it, and kicks the thread if something needs it.
 */
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "base/descriptor.h"
#include "base/thread.h"
#include "engine/drive/private.h"

/* A call within so long after another continues a stream of calls. */
#define STREAM_NS 1000000ll

#define TIMER_SLACK_NS                                                                                                 \
    1000ul /* 50000 otherwise: too coarse for the looks that MPI needs (hr_transport_poll_within_ns) */

/* ---- Callers, with the lock held ---- */

void hr_drive_kick(struct hr_drive *drive) {
    if (!hr_drive_is_free(drive)) {
        hr_node_wake(drive->node, drive->node->local_rank); /* if it sleeps; else it will look at the queue anyway */
    } else if (!drive->is_kicked) {
        drive->is_kicked = 1;
        const uint64_t one = 1;
        const ssize_t written = write(drive->kick_fd, &one, sizeof one);
        (void)written;
        atomic_fetch_add_explicit(&drive->node->wakes, 1, memory_order_relaxed);
    }
}

void hr_drive_wait(struct hr_drive *drive, int64_t deadline_ns) {
    drive->waiters++;
    hr_condition_wait(&drive->done, &drive->lock, deadline_ns);
    drive->waiters--;
}

static void set_free(struct hr_drive *drive) {
    drive->owner = HR_TOKEN_FREE;
    hr_drive_wake_waiters(drive);
}

void hr_drive_until(struct hr_drive *drive, const _Atomic int *word, int value, int64_t now_ns, int64_t deadline_ns) {
    drive->owner = HR_TOKEN_CALLER;
    drive->since_ns = now_ns;
    hr_drive_unlock(drive);
    if (atomic_load(&drive->serves_hosts)) {
        hr_node_end_sleep(drive->node, NULL); /* the thread may sleep for whoever drives, and is not to be woken */
    }
    (void)hr_drive_run(drive, word, value, deadline_ns);
    hr_drive_lock(drive);
    set_free(drive);
    const int serves_hosts = atomic_load(&drive->serves_hosts);
    drive->since_ns = serves_hosts ? hr_now_ns() : 0;
    if ((serves_hosts && !drive->looks_soon) || atomic_load(&drive->stop) || hr_drive_needs(drive)) {
        hr_drive_kick(drive);
    }
}

/* ---- The thread ---- */

/* To sleep on the kick and the life lines alone. */
static void prepare_to_park(struct hr_drive *drive, int64_t look_ns) {
    struct hr_sleep *sleep = &drive->sleep;
    sleep->fds[0] = (struct pollfd){.fd = -1}; /* messages for the driver are not the thread's */
    sleep->life_count = hr_node_life_fds(drive->node, sleep->fds + 1);
    sleep->count = 1 + sleep->life_count;
    sleep->deadline_ns = 0;
    sleep->look_ns = look_ns;
}

/* Takes what has come, if anything has; but for the driver's eventfd, which is the next driver's. */
static void take_events(struct hr_drive *drive, int events) {
    struct hr_sleep *sleep = &drive->sleep;
    if (events <= 0) {
        sleep->fds[0].revents = 0;
        return;
    }
    uint64_t drained;
    const ssize_t got = read(drive->kick_fd, &drained, sizeof drained);
    (void)got; /* nonblocking */
    hr_node_watch(drive->node, sleep->fds + 1, sleep->life_count);
}

/* Sleeps on what has been prepared, and on the kick, with the lock held, which it lets go meanwhile. */
static void park(struct hr_drive *drive) {
    drive->sleep.fds[drive->sleep.count++] = (struct pollfd){.fd = drive->kick_fd, .events = POLLIN};
    hr_drive_unlock(drive);
    if (atomic_load(&drive->serves_hosts)) {
        atomic_fetch_add_explicit(&drive->node->sleeps, 1, memory_order_relaxed); /* of a driver, but for the name */
    }
    take_events(drive, hr_node_sleep(&drive->sleep));
    hr_drive_lock(drive);
}

static void run(struct hr_drive *drive) {
    drive->owner = HR_TOKEN_THREAD;
    hr_drive_unlock(drive);
    const int watches = hr_drive_run(drive, NULL, 0, 0);
    hr_drive_lock(drive);
    set_free(drive);
    drive->since_ns = hr_now_ns();
    if (atomic_exchange(&drive->wanted, 0) && drive->waiters > 0 && atomic_load(&drive->serves_hosts)) {
        return; /* it is left to that caller for a while */
    }
    drive->owner = watches ? HR_TOKEN_WATCH : HR_TOKEN_FREE;
    drive->is_kicked |= !watches && hr_drive_needs(drive); /* since its last look */
}

/* Sleeps on all that may come, but leaves the token to a caller that comes. */
static void watch(struct hr_drive *drive) {
    park(drive);
    if (drive->owner == HR_TOKEN_WATCH) {
        hr_node_end_sleep(drive->node, &drive->sleep);
        drive->owner = HR_TOKEN_FREE;
        drive->since_ns = 0; /* it has been so for long enough */
    }
}

static void rest(struct hr_drive *drive) {
    const int64_t left_ns = drive->since_ns + STREAM_NS - hr_now_ns();
    drive->looks_soon = atomic_load(&drive->serves_hosts) && (left_ns > 0 || drive->owner == HR_TOKEN_FREE);
    prepare_to_park(drive, !drive->looks_soon ? -1 : left_ns > 0 ? left_ns : 0);
    park(drive);
    drive->looks_soon = 0;
}

/* Whether a rank of this host has called it. */
static int is_called(const struct hr_drive *drive) {
    int needs = 0;
    for (const struct hr_part *part = drive->parts; part != NULL && !needs; part = part->next) {
        needs = part->ops->is_called && part->ops->needs(part);
    }
    return needs;
}

/* Whether it is to take the token: when it has been kicked or called, or the token has been free for a while. */
static int may_drive(struct hr_drive *drive) {
    const int was_kicked = drive->is_kicked;
    drive->is_kicked = 0;
    if (drive->owner != HR_TOKEN_FREE) {
        return 0;
    }
    const int serves_hosts = atomic_load(&drive->serves_hosts);
    return (was_kicked && hr_drive_needs(drive)) || is_called(drive) ||
           (serves_hosts && hr_now_ns() - drive->since_ns >= STREAM_NS);
}

static void *thread_main(void *arg) {
    struct hr_drive *drive = arg;
    struct hr_node *node = drive->node;
    (void)prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS); /* of this thread; it is horo's own */
    hr_drive_lock(drive);
    while (!atomic_load(&drive->stop)) {
        if (drive->owner == HR_TOKEN_WATCH) {
            watch(drive);
        } else if (may_drive(drive)) {
            run(drive);
        } else {
            rest(drive);
        }
    }
    while (drive->owner == HR_TOKEN_CALLER) { /* a call that still waits */
        hr_drive_wait(drive, INT64_MAX);
    }
    run(drive); /* until it has left */
    hr_drive_unlock(drive);
    atomic_store(&node->arena.blocks[node->local_rank].state, HR_MEMBER_LEFT);
    hr_node_wake_all(node);
    return NULL;
}

/* ---- The beginning and the end ---- */

enum {
    THREAD_SPIN_DIVISOR = 20, /* the background thread shares its core with the training: it spins less than a caller */
};

hr_status hr_drive_init(struct hr_drive *drive, struct hr_node *node, int64_t spin_ns, struct hr_error *error) {
    *drive = (struct hr_drive){.node = node,
                               .kick_fd = -1,
                               .caller_spin_ns = spin_ns,
                               .thread_spin_ns = spin_ns / THREAD_SPIN_DIVISOR};
    hr_condition_init(&drive->done);
    (void)pthread_mutex_init(&drive->lock, NULL);
    (void)pthread_mutex_init(&drive->end_lock, NULL);
    hr_drive_add(drive, &drive->links, &hr_part_links, node);
    hr_status status = hr_descriptor_event(&drive->kick_fd, error);
    if (status == HORO_OK && hr_sleep_reserve(&drive->sleep, (size_t)node->local_size + 2) != HORO_OK) {
        status = hr_fail(error, HORO_ERR_RESOURCE, "out of memory for the engine");
    }
    if (status != HORO_OK) {
        hr_drive_fini(drive);
    }
    return status;
}

hr_status hr_drive_start(struct hr_drive *drive, struct hr_error *error) {
    return hr_thread_start(&drive->thread, thread_main, drive, "the background thread", error);
}

void hr_drive_end_thread(struct hr_drive *drive) {
    (void)pthread_mutex_lock(&drive->end_lock);
    if (!drive->has_ended) {
        hr_node_wake(drive->node, drive->node->local_rank);
        (void)pthread_join(drive->thread, NULL);
        drive->has_ended = 1;
    }
    (void)pthread_mutex_unlock(&drive->end_lock);
}

void hr_drive_close_fd(struct hr_drive *drive) {
    /* else this child's own parent was forked too: the number is another file's by now */
    if (drive->kick_fd >= 0) {
        (void)close(drive->kick_fd);
        drive->kick_fd = -1;
    }
}

void hr_drive_fini(struct hr_drive *drive) {
    free(drive->sleep.fds);
    hr_drive_close_fd(drive);
    (void)pthread_cond_destroy(&drive->done);
    (void)pthread_mutex_destroy(&drive->end_lock);
    (void)pthread_mutex_destroy(&drive->lock);
}
