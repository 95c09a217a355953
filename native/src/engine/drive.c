/* Driving the engine: one step after another until there is nothing to do, then one wait. */
#include <sched.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "engine/engine.h"

enum { LIFE_FDS_STACK = 64 };

#define TIMER_SLACK_NS 1000ul /* 50000 otherwise: too coarse for the looks that MPI needs (hr_transport_poll_within_ns) */

static int step(struct hr_engine *engine) {
    const int announced = hr_engine_announce(engine);
    HR_TRY(announced);
    const int flushed = hr_engine_flush_requests(engine);
    HR_TRY(flushed);
    const int led = engine->is_leader ? hr_engine_lead(engine) : 0;
    HR_TRY(led);
    const int executed = hr_engine_execute(engine);
    HR_TRY(executed);
    return announced > 0 || flushed || led || executed;
}

static int log_waits(const struct hr_engine *engine) {
    return atomic_load(&engine->group->arena.header->log.written) != engine->log_position; /* partner: hr_ring_write */
}

static int ring_has_room(const struct hr_engine *engine) {
    const struct hr_arena_block *block = &engine->group->arena.blocks[engine->group->local_rank];
    return hr_buffer_size(&engine->request_out) > 0 &&
           atomic_load(&block->requests.written) - atomic_load(&block->requests_read) < HR_REQUEST_RING_BYTES;
}

static int has_work(struct hr_group *group, void *arg) {
    struct hr_engine *engine = arg;
    return atomic_load(&engine->queued) > 0 || log_waits(engine) || ring_has_room(engine) ||
           (engine->is_leader && hr_engine_has_lead_work(engine)) || atomic_load(&engine->stop) ||
           (hr_group_left(group) != 0 && atomic_load(&engine->pending) > 0);
}

static int64_t earlier(int64_t a, int64_t b) {
    return a == 0 || (b != 0 && b < a) ? b : a;
}

/* Whether something is under way that a peer may hold up. */
static int expects_others(const struct hr_engine *engine) {
    return atomic_load(&engine->pending) > 0 || (engine->is_leader && engine->agree.active > 0);
}

/* When the wait must end by itself: a stall to look at, links to supervise, a batch that is due, the caller's deadline. */
static int64_t next_deadline(struct hr_engine *engine, int64_t deadline_ns) {
    struct hr_group *group = engine->group;
    const int expecting = expects_others(engine);
    deadline_ns = earlier(deadline_ns, hr_engine_check_stall(engine));
    if (engine->is_leader) {
        deadline_ns = earlier(deadline_ns, hr_engine_batch_due_ns(engine));
    }
    if (group->transport == NULL) {
        return deadline_ns;
    }
    if (!expecting) {
        hr_group_supervise(group, 0);
        engine->expecting_since_ns = 0;
        return deadline_ns;
    }
    if (engine->expecting_since_ns == 0) {
        engine->expecting_since_ns = hr_now_ns();
    }
    const int64_t supervise_ns = engine->expecting_since_ns + HR_SUPERVISE_AFTER_NS;
    if (hr_now_ns() >= supervise_ns) {
        hr_group_supervise(group, 1);
        return deadline_ns;
    }
    return earlier(deadline_ns, supervise_ns);
}

/* The state is not what it should be on this rank: nobody may wait for it. */
static void give_up(struct hr_engine *engine, int status) {
    const int code = status == HORO_ERR_RESOURCE ? HORO_ERR_ABORTED : HORO_ERR_INTERNAL;
    hr_log(&engine->group->log, HORO_LOG_ERROR, "the engine stops: %s error", horo_status_name(status));
    hr_group_abort(engine->group, code, engine->group->rank, HR_REASON_INTERNAL);
}

/* After the end of the group there is only the news to be passed on. */
static void wind_up(struct hr_engine *engine) {
    if (atomic_load(&engine->always_drives)) {
        hr_engine_flush_links(engine);
        atomic_store(&engine->always_drives, 0);
    }
}

static int may_return(const struct hr_engine *engine, const struct hr_request *until) {
    if (until != NULL && atomic_load(&until->status) != HORO_IN_PROGRESS) {
        return 1;
    }
    return until == NULL && (atomic_load(&engine->stop) || atomic_load(&engine->wanted) ||
                             (!hr_engine_thread_drives(engine) && atomic_load(&engine->pending) == 0));
}

void hr_engine_drive(struct hr_engine *engine, const struct hr_request *until, int64_t deadline_ns) {
    struct hr_group *group = engine->group;
    const int64_t spin_ns = until != NULL ? engine->caller_spin_ns : engine->thread_spin_ns;
    group->spin_ns = spin_ns;
    while (!may_return(engine, until)) {
        const int ended = hr_arena_aborted(&group->arena).code != 0;
        const int moved = ended ? 0 : step(engine);
        if (moved < 0) {
            give_up(engine, moved);
            continue;
        }
        if (moved > 0) {
            continue;
        }
        if (hr_arena_aborted(&group->arena).code != 0) {
            wind_up(engine); /* before the callers here hear of it: they may end at once, which others must not take for the cause */
        }
        if (hr_engine_fail_if_ended(engine)) {
            continue;
        }
        const int64_t until_ns = next_deadline(engine, deadline_ns);
        const int status = hr_group_wait(group, has_work, engine, spin_ns, until_ns);
        /* A signal, or the caller's time is up: back to Python. */
        if (status == HORO_IN_PROGRESS && deadline_ns != 0 && (hr_now_ns() >= deadline_ns || hr_now_ns() < until_ns)) {
            return;
        }
    }
}

/* Sleeps until kicked, until a life line ends, or for timeout_ms (-1: no matter how long). */
static void park(struct hr_engine *engine, int timeout_ms) {
    struct hr_group *group = engine->group;
    struct pollfd fds[1 + LIFE_FDS_STACK];
    fds[0] = (struct pollfd){.fd = engine->kick_fd, .events = POLLIN};
    /* Hosts of more ranks are watched by those ranks that wait. */
    const size_t life_count = group->local_size <= LIFE_FDS_STACK ? hr_group_life_fds(group, fds + 1) : 0;
    if (poll(fds, (nfds_t)(1 + life_count), timeout_ms) <= 0) {
        return;
    }
    uint64_t drained;
    const ssize_t got = read(engine->kick_fd, &drained, sizeof drained);
    (void)got; /* nonblocking */
    hr_group_watch(group, fds + 1, life_count);
}

/* The last acts: run what has been agreed on, fail the rest, say goodbye. */
static void leave(struct hr_engine *engine) {
    struct hr_group *group = engine->group;
    while (hr_arena_aborted(&group->arena).code == 0) {
        const int moved = step(engine);
        if (moved < 0) {
            give_up(engine, moved);
        }
        if (moved <= 0) {
            break;
        }
    }
    hr_engine_fail_all(engine, HORO_ERR_ABORTED, "horo was shut down on this rank before the operation finished");
    uint64_t none = 0;
    (void)atomic_compare_exchange_strong(&group->arena.header->left_rank, &none, (uint64_t)group->rank + 1);
    atomic_store(&group->arena.blocks[group->local_rank].state, HR_MEMBER_LEFT);
    hr_group_wake_all(group);
    if (engine->is_leader) {
        hr_engine_flush_links(engine);
    }
}

/* Looks for a while whether it is called; 1 if it is. With the lock held. */
static int linger(struct hr_engine *engine) {
    atomic_store(&engine->lingering, 1);
    (void)pthread_mutex_unlock(&engine->lock);
    const int64_t end_ns = hr_now_ns() + engine->thread_spin_ns;
    while (atomic_load(&engine->lingering) && hr_now_ns() < end_ns) {
        for (int i = 0; i < HR_LOOKS_PER_YIELD && atomic_load(&engine->lingering); i++) {
            hr_cpu_relax();
        }
        (void)sched_yield(); /* the caller may have been put on this very core */
    }
    (void)pthread_mutex_lock(&engine->lock);
    return !atomic_exchange(&engine->lingering, 0);
}

/*
 * Until called, with the lock held. Parking costs the caller a system call that wakes a thread, two microseconds and more, for each
 * request of a stream; lingering costs time of a core that nobody else wants. So it lingers only after it has been woken so soon
 * that lingering would have caught the call, and no longer than its waits spin.
 */
static void rest(struct hr_engine *engine) {
    if (engine->woken_soon && !engine->lent && linger(engine)) {
        return;
    }
    engine->parked = 1;
    (void)pthread_mutex_unlock(&engine->lock);
    const int64_t begin_ns = hr_now_ns();
    park(engine, engine->lent ? HR_LENT_MS : -1);
    const int64_t end_ns = hr_now_ns();
    engine->woken_soon = end_ns - begin_ns < engine->thread_spin_ns;
    (void)pthread_mutex_lock(&engine->lock);
    engine->parked = 0;
    if (engine->driver == HR_DRIVER_NONE && !hr_engine_called_lately(engine, end_ns)) {
        engine->lent = 0; /* not while a caller drives, who would leave nobody behind */
    }
}

void *hr_engine_main(void *arg) {
    struct hr_engine *engine = arg;
    (void)prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS); /* of this thread; it is horo's own */
    (void)pthread_mutex_lock(&engine->lock);
    while (!atomic_load(&engine->stop)) {
        if (engine->driver == HR_DRIVER_NONE && (atomic_load(&engine->pending) > 0 || hr_engine_thread_drives(engine))) {
            engine->driver = HR_DRIVER_THREAD;
            (void)pthread_mutex_unlock(&engine->lock);
            hr_engine_drive(engine, NULL, 0);
            (void)pthread_mutex_lock(&engine->lock);
            engine->driver = HR_DRIVER_NONE;
            engine->lent = engine->lent || atomic_load(&engine->wanted);
            atomic_store(&engine->wanted, 0);
            if (engine->waiters > 0) {
                (void)pthread_cond_broadcast(&engine->done);
            }
            continue;
        }
        rest(engine);
    }
    engine->driver = HR_DRIVER_THREAD;
    (void)pthread_mutex_unlock(&engine->lock);
    leave(engine);
    return NULL;
}
