/* The background thread: it drives while it is needed, and rests otherwise. Its states are in engine.h. */
#include <sched.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "engine/engine.h"

#define TIMER_SLACK_NS                                                                                                 \
    1000ul /* 50000 otherwise: too coarse for the looks that MPI needs (hr_transport_poll_within_ns) */

/* Sleeps until kicked, until something comes on a life line, or for timeout_ms (-1: no matter how long). */
static void park(struct hr_engine *engine, int timeout_ms) {
    struct hr_node *node = engine->node;
    struct pollfd *fds = engine->driver.park_fds;
    fds[0] = (struct pollfd){.fd = engine->driver.kick_fd, .events = POLLIN};
    const size_t life_count = hr_node_life_fds(node, fds + 1);
    if (poll(fds, (nfds_t)(1 + life_count), timeout_ms) <= 0) {
        return;
    }
    uint64_t drained;
    const ssize_t got = read(engine->driver.kick_fd, &drained, sizeof drained);
    (void)got; /* nonblocking */
    hr_node_watch(node, fds + 1, life_count);
}

/* Looks for a while whether it is needed; 1 if it is. With the lock held. */
static int linger(struct hr_engine *engine) {
    _Atomic int *state = &engine->driver.thread_state;
    atomic_store(state, HR_THREAD_LINGERING);
    (void)pthread_mutex_unlock(&engine->submission.lock);
    const int64_t end_ns = hr_now_ns() + engine->driver.thread_spin_ns;
    while (atomic_load(state) == HR_THREAD_LINGERING && hr_now_ns() < end_ns) {
        for (int i = 0; i < HR_LOOKS_PER_YIELD && atomic_load(state) == HR_THREAD_LINGERING; i++) {
            hr_cpu_relax();
        }
        (void)sched_yield(); /* the caller may have been put on this very core */
    }
    (void)pthread_mutex_lock(&engine->submission.lock);
    return atomic_exchange(state, HR_THREAD_AWAKE) != HR_THREAD_LINGERING;
}

/*
 * Until needed, with the lock held. Parking costs the caller a system call that wakes a thread, two microseconds and
 * more, for each request of a stream; lingering costs time of a core that nobody else wants. So it lingers only after
 * it has been woken so soon that lingering would have caught the call, and no longer than its waits spin.
 */
static void rest(struct hr_engine *engine) {
    struct hr_driver *driver = &engine->driver;
    if (driver->woken_soon && !driver->ceded && linger(engine)) {
        return;
    }
    atomic_store(&driver->thread_state, HR_THREAD_PARKED);
    (void)pthread_mutex_unlock(&engine->submission.lock);
    const int64_t begin_ns = hr_now_ns();
    park(engine, driver->ceded ? HR_CEDED_MS : -1);
    const int64_t end_ns = hr_now_ns();
    driver->woken_soon = end_ns - begin_ns < driver->thread_spin_ns;
    (void)pthread_mutex_lock(&engine->submission.lock);
    atomic_store(&driver->thread_state, HR_THREAD_AWAKE);
    if (driver->who == HR_DRIVER_NONE && !hr_engine_called_lately(engine, end_ns)) {
        driver->ceded = 0; /* not while a caller drives, who would leave nobody behind */
    }
}

static int must_drive(const struct hr_engine *engine) {
    return atomic_load(&engine->submission.pending) > 0 || hr_engine_thread_drives(engine) ||
           hr_engine_is_called(engine);
}

static void drive_as_thread(struct hr_engine *engine) {
    engine->driver.who = HR_DRIVER_THREAD;
    (void)pthread_mutex_unlock(&engine->submission.lock);
    hr_engine_drive(engine, NULL, 0);
    (void)pthread_mutex_lock(&engine->submission.lock);
    engine->driver.who = HR_DRIVER_NONE;
    engine->driver.ceded = engine->driver.ceded || atomic_load(&engine->driver.wanted);
    atomic_store(&engine->driver.wanted, 0);
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
        if (engine->driver.who == HR_DRIVER_NONE && must_drive(engine)) {
            drive_as_thread(engine);
        } else {
            rest(engine);
        }
    }
    drive_as_thread(engine); /* until it has left */
    (void)pthread_mutex_unlock(&engine->submission.lock);
    atomic_store(&node->arena.blocks[node->local_rank].state, HR_MEMBER_LEFT);
    hr_node_wake_all(node);
    return NULL;
}
