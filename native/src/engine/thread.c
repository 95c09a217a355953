/* The background thread: it drives while it is needed, and is parked otherwise. */
#include <sys/prctl.h>
#include <unistd.h>

#include "engine/engine.h"
#include "engine/gpu.h"

#define TIMER_SLACK_NS                                                                                                 \
    1000ul /* 50000 otherwise: too coarse for the looks that MPI needs (hr_transport_poll_within_ns) */

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
    driver->is_parked = 1;
    (void)pthread_mutex_unlock(&engine->submission.lock);
    if (atomic_load(&driver->serves_hosts)) {
        atomic_fetch_add_explicit(&engine->node->sleeps, 1, memory_order_relaxed); /* of a driver, but for the name */
    }
    take_events(engine, hr_node_sleep(&driver->sleep));
    (void)pthread_mutex_lock(&engine->submission.lock);
    driver->is_parked = 0;
}

/*
 * Sleeps, where other hosts need it and nobody drives, on all that may come, but leaves the driving to a caller that
 * comes.
 */
static void rest_watching(struct hr_engine *engine) {
    struct hr_driver *driver = &engine->driver;
    park(engine);
    if (driver->who == HR_DRIVER_NONE) {
        hr_node_end_sleep(engine->node, &driver->sleep);
        driver->must_look = 1;
    }
}

/*
 * There, while callers drive, or one has let go a moment ago: what comes for them is not to wake it. It looks after
 * HR_STREAM_MS, unless a call lasts longer: then the caller wakes it.
 */
static void rest_from_callers(struct hr_engine *engine) {
    struct hr_driver *driver = &engine->driver;
    const int is_long = driver->who == HR_DRIVER_CALLER && driver->drives == driver->rested_at;
    driver->rested_at = driver->drives;
    driver->looks_soon = !is_long;
    prepare_to_park(engine, is_long ? -1 : HR_STREAM_MS * 1000000ll);
    park(engine);
    driver->looks_soon = 0;
    if (driver->who == HR_DRIVER_NONE && hr_now_ns() - driver->called_ns >= HR_STREAM_MS * 1000000ll) {
        driver->must_look = 1;
    }
}

static void rest(struct hr_engine *engine) {
    struct hr_driver *driver = &engine->driver;
    const int is_free = driver->who == HR_DRIVER_NONE && !driver->has_yielded;
    driver->has_yielded = 0;
    if (!atomic_load(&driver->serves_hosts)) {
        prepare_to_park(engine, -1); /* nothing but a call or a death concerns the thread */
        park(engine);
    } else if (is_free && driver->is_watching && driver->watching_since == driver->drives) {
        rest_watching(engine);
    } else {
        driver->is_watching = 0;
        rest_from_callers(engine);
    }
    driver->is_watching = 0;
}

static int must_drive(const struct hr_engine *engine) {
    const struct hr_driver *driver = &engine->driver;
    return driver->who == HR_DRIVER_NONE && !driver->has_yielded &&
           (driver->must_look || atomic_load(&engine->submission.pending) > 0 || hr_gpu_is_busy(engine) ||
            hr_engine_is_called(engine));
}

static void drive_as_thread(struct hr_engine *engine) {
    struct hr_driver *driver = &engine->driver;
    driver->who = HR_DRIVER_THREAD;
    driver->must_look = 0;
    (void)pthread_mutex_unlock(&engine->submission.lock);
    hr_engine_drive(engine, NULL, 0);
    (void)pthread_mutex_lock(&engine->submission.lock);
    driver->who = HR_DRIVER_NONE;
    driver->has_yielded = atomic_exchange(&driver->wanted, 0) && engine->submission.waiters > 0;
    if (engine->submission.waiters > 0) {
        (void)pthread_cond_broadcast(&engine->submission.done);
    }
}

void *hr_engine_main(void *arg) {
    struct hr_engine *engine = arg;
    struct hr_node *node = engine->node;
    (void)prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS); /* of this thread; it is horo's own */
    (void)pthread_mutex_lock(&engine->submission.lock);
    while (!atomic_load(&engine->driver.stop)) {
        if (must_drive(engine)) {
            drive_as_thread(engine);
        } else {
            rest(engine);
        }
    }
    while (engine->driver.who != HR_DRIVER_NONE) { /* a call that still waits */
        hr_engine_wait_for_driver(engine, INT64_MAX);
    }
    drive_as_thread(engine); /* until it has left */
    (void)pthread_mutex_unlock(&engine->submission.lock);
    atomic_store(&node->arena.blocks[node->local_rank].state, HR_MEMBER_LEFT);
    hr_node_wake_all(node);
    return NULL;
}
