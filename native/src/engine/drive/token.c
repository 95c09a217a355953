/*
 * The token: the right to turn the parts of the engine (loop.c), which one thread at a time has.
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
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "engine/drive/drive.h"

/* A call within so long after another continues a stream of calls. */
#define STREAM_NS 1000000ll

#define TIMER_SLACK_NS                                                                                                 \
    1000ul /* 50000 otherwise: too coarse for the looks that MPI needs (hr_transport_poll_within_ns) */

/* ---- Callers, with the lock held ---- */

void hr_engine_kick(struct hr_engine *engine) {
    struct hr_driver *driver = &engine->driver;
    if (!hr_token_is_free(driver)) {
        hr_node_wake(engine->node, engine->node->local_rank); /* if it sleeps; else it will look at the queue anyway */
    } else if (!driver->is_kicked) {
        driver->is_kicked = 1;
        const uint64_t one = 1;
        const ssize_t written = write(driver->kick_fd, &one, sizeof one);
        (void)written;
        atomic_fetch_add_explicit(&engine->node->wakes, 1, memory_order_relaxed);
    }
}

void hr_token_wait(struct hr_engine *engine, int64_t deadline_ns) {
    const struct timespec until = {.tv_sec = deadline_ns / 1000000000, .tv_nsec = deadline_ns % 1000000000};
    engine->submission.waiters++;
    (void)pthread_cond_timedwait(&engine->submission.done, &engine->submission.lock, &until);
    engine->submission.waiters--;
}

static void set_free(struct hr_engine *engine) {
    engine->driver.owner = HR_TOKEN_FREE;
    if (engine->submission.waiters > 0) {
        (void)pthread_cond_broadcast(&engine->submission.done);
    }
}

void hr_token_drive(struct hr_engine *engine, const struct hr_request *request, int64_t now_ns, int64_t deadline_ns) {
    struct hr_driver *driver = &engine->driver;
    driver->owner = HR_TOKEN_CALLER;
    driver->since_ns = now_ns;
    (void)pthread_mutex_unlock(&engine->submission.lock);
    if (atomic_load(&driver->serves_hosts)) {
        hr_node_end_sleep(engine->node, NULL); /* the thread may sleep for whoever drives, and is not to be woken */
    }
    (void)hr_engine_drive(engine, request, deadline_ns);
    (void)pthread_mutex_lock(&engine->submission.lock);
    set_free(engine);
    const int serves_hosts = atomic_load(&driver->serves_hosts);
    driver->since_ns = serves_hosts ? hr_now_ns() : 0;
    if ((serves_hosts && !driver->looks_soon) || atomic_load(&driver->stop) || hr_drive_needs(engine)) {
        hr_engine_kick(engine);
    }
}

/* ---- The thread ---- */

/* To sleep on the kick and the life lines alone. */
static void prepare_to_park(struct hr_engine *engine, int64_t look_ns) {
    struct hr_sleep *sleep = &engine->driver.sleep;
    sleep->fds[0] = (struct pollfd){.fd = -1}; /* messages for the driver are not the thread's */
    sleep->life_count = hr_node_life_fds(engine->node, sleep->fds + 1);
    sleep->count = 1 + sleep->life_count;
    sleep->deadline_ns = 0;
    sleep->look_ns = look_ns;
}

/* Takes what has come, if anything has; but for the driver's eventfd, which is the next driver's. */
static void take_events(struct hr_engine *engine, int events) {
    struct hr_sleep *sleep = &engine->driver.sleep;
    if (events <= 0) {
        sleep->fds[0].revents = 0;
        return;
    }
    uint64_t drained;
    const ssize_t got = read(engine->driver.kick_fd, &drained, sizeof drained);
    (void)got; /* nonblocking */
    hr_node_watch(engine->node, sleep->fds + 1, sleep->life_count);
}

/* Sleeps on what has been prepared, and on the kick, with the lock held, which it lets go meanwhile. */
static void park(struct hr_engine *engine) {
    struct hr_driver *driver = &engine->driver;
    driver->sleep.fds[driver->sleep.count++] = (struct pollfd){.fd = driver->kick_fd, .events = POLLIN};
    (void)pthread_mutex_unlock(&engine->submission.lock);
    if (atomic_load(&driver->serves_hosts)) {
        atomic_fetch_add_explicit(&engine->node->sleeps, 1, memory_order_relaxed); /* of a driver, but for the name */
    }
    take_events(engine, hr_node_sleep(&driver->sleep));
    (void)pthread_mutex_lock(&engine->submission.lock);
}

static void drive(struct hr_engine *engine) {
    struct hr_driver *driver = &engine->driver;
    driver->owner = HR_TOKEN_THREAD;
    (void)pthread_mutex_unlock(&engine->submission.lock);
    const int watches = hr_engine_drive(engine, NULL, 0);
    (void)pthread_mutex_lock(&engine->submission.lock);
    set_free(engine);
    driver->since_ns = hr_now_ns();
    if (atomic_exchange(&driver->wanted, 0) && engine->submission.waiters > 0 && atomic_load(&driver->serves_hosts)) {
        return; /* it is left to that caller for a while */
    }
    driver->owner = watches ? HR_TOKEN_WATCH : HR_TOKEN_FREE;
    driver->is_kicked |= !watches && hr_drive_needs(engine); /* since its last look */
}

/* Sleeps on all that may come, but leaves the token to a caller that comes. */
static void watch(struct hr_engine *engine) {
    park(engine);
    if (engine->driver.owner == HR_TOKEN_WATCH) {
        hr_node_end_sleep(engine->node, &engine->driver.sleep);
        engine->driver.owner = HR_TOKEN_FREE;
        engine->driver.since_ns = 0; /* it has been so for long enough */
    }
}

static void rest(struct hr_engine *engine) {
    struct hr_driver *driver = &engine->driver;
    const int64_t left_ns = driver->since_ns + STREAM_NS - hr_now_ns();
    driver->looks_soon = atomic_load(&driver->serves_hosts) && (left_ns > 0 || driver->owner == HR_TOKEN_FREE);
    prepare_to_park(engine, !driver->looks_soon ? -1 : left_ns > 0 ? left_ns : 0);
    park(engine);
    driver->looks_soon = 0;
}

/* Whether it is to take the token: when it has been kicked, a rank here leaves, or it has been free for a while. */
static int may_drive(struct hr_engine *engine) {
    struct hr_driver *driver = &engine->driver;
    const int was_kicked = driver->is_kicked;
    driver->is_kicked = 0;
    if (driver->owner != HR_TOKEN_FREE) {
        return 0;
    }
    const int serves_hosts = atomic_load(&driver->serves_hosts);
    return (was_kicked && hr_drive_needs(engine)) || hr_part_end.needs(&driver->end) ||
           hr_part_stall.needs(&driver->stall) ||
           (serves_hosts && hr_now_ns() - driver->since_ns >= STREAM_NS);
}

void *hr_engine_main(void *arg) {
    struct hr_engine *engine = arg;
    struct hr_driver *driver = &engine->driver;
    struct hr_node *node = engine->node;
    (void)prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS); /* of this thread; it is horo's own */
    (void)pthread_mutex_lock(&engine->submission.lock);
    while (!atomic_load(&driver->stop)) {
        if (driver->owner == HR_TOKEN_WATCH) {
            watch(engine);
        } else if (may_drive(engine)) {
            drive(engine);
        } else {
            rest(engine);
        }
    }
    while (driver->owner == HR_TOKEN_CALLER) { /* a call that still waits */
        hr_token_wait(engine, INT64_MAX);
    }
    drive(engine); /* until it has left */
    (void)pthread_mutex_unlock(&engine->submission.lock);
    atomic_store(&node->arena.blocks[node->local_rank].state, HR_MEMBER_LEFT);
    hr_node_wake_all(node);
    return NULL;
}
