/* Driving the engine: one turn after another until there is nothing to do, then one wait. The stages are in engine.h. */
#include <sched.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "engine/engine.h"

enum {
    FLUSH_MS = 500,       /* telling other hosts of the end is worth no longer wait */
    LEAVE_GRACE_MS = 2000, /* without anything moving: what others do not do may hold a shutdown up so long */
    CLOSE_GRACE_MS = 10000, /* the same once the log is closed: what moves on other hosts is not seen here */
    STAGES_PER_TURN = 3,
    LOOKS_PER_TURN = 2, /* at a task, while it waits */
    TURNS_PER_CLOCK = 16, /* while things move, the deadline is looked at once in so many turns */
};

#define TIMER_SLACK_NS 1000ul /* 50000 otherwise: too coarse for the looks that MPI needs (hr_transport_poll_within_ns) */

/* ---- RUNNING ---- */

static int is_aborted(const struct hr_engine *engine) {
    return hr_arena_aborted(&engine->node->arena).code != 0;
}

/* A number that changes whenever something has moved here: a record, a stage of a task, a piece between hosts. */
static uint64_t moves_of(const struct hr_engine *engine) {
    return engine->driver.moves + engine->team->pieces;
}

/* Up to STAGES_PER_TURN stages, as long as nothing has to be waited for: those of a small operation take less time than a whole turn. */
static int execute(struct hr_engine *engine) {
    int moved = engine->executor.outcome; /* of a look during the wait */
    engine->executor.outcome = 0;
    HR_TRY(moved);
    for (int i = moved; i < STAGES_PER_TURN; i++) {
        const int executed = hr_engine_execute(engine);
        HR_TRY(executed);
        if (executed == 0) {
            break;
        }
        moved = 1;
        if (engine->executor.state == HR_EXECUTION_IDLE) {
            break; /* a caller may have got what it waits for */
        }
        if (engine->node->transport != NULL) {
            (void)engine->node->transport->ops->progress(engine->node->transport); /* the links go on between two stages */
        }
    }
    return moved;
}

static int turn_running(struct hr_engine *engine) {
    const int announced = hr_engine_announce(engine);
    HR_TRY(announced);
    const int flushed = hr_engine_flush_requests(engine);
    HR_TRY(flushed);
    const int led = engine->is_leader ? hr_engine_lead(engine) : 0;
    HR_TRY(led);
    const int executed = execute(engine);
    HR_TRY(executed);
    return announced > 0 || flushed || led || executed;
}

/* ---- CLOSING, ENDING and ENDED ---- */

/* What must change within the grace while this rank waits to be able to leave. */
static uint64_t leave_moves_of(const struct hr_engine *engine) {
    const struct hr_arena_header *header = engine->node->arena.header;
    uint64_t moves = moves_of(engine);
    for (int i = 0; i < HR_PHASE_COUNT && engine->driver.stage == HR_ENGINE_CLOSING; i++) {
        moves += atomic_load_explicit(&header->phase[i].arrived, memory_order_relaxed); /* of other ranks here */
    }
    return moves;
}

static void wait_to_leave(struct hr_engine *engine, int64_t now_ns) {
    const int64_t grace_ms = engine->driver.stage == HR_ENGINE_CLOSING ? CLOSE_GRACE_MS : LEAVE_GRACE_MS;
    engine->driver.leave_ns = now_ns + grace_ms * 1000000;
    engine->driver.leave_moves = leave_moves_of(engine);
}

static void begin_ending(struct hr_engine *engine) {
    hr_engine_note_end(engine);
    hr_engine_cancel(engine);
    engine->executor.outcome = 0;
    engine->driver.stage = HR_ENGINE_ENDING;
    engine->driver.flush_ns = hr_now_ns() + FLUSH_MS * 1000000ll;
}

/* The callers here must not hear of the end before the neighbours: they may end at once, which others must not take for the cause. */
static int turn_closing(struct hr_engine *engine) {
    const int moved = engine->is_leader ? hr_leader_progress_links(engine) : 0;
    HR_TRY(moved);
    if ((!hr_leader_sends_left(engine) || hr_now_ns() >= engine->driver.flush_ns) && hr_engine_fail_all(engine)) {
        return 1;
    }
    if (!engine->is_leader || hr_leader_is_done(engine)) {
        begin_ending(engine);
        return 1;
    }
    return moved;
}

/* As in CLOSING. */
static int turn_ending(struct hr_engine *engine) {
    if (atomic_load(&engine->driver.always_drives)) {
        if (!is_aborted(engine)) {
            HR_TRY(hr_leader_tell_done(engine));
        }
        const int flushed = hr_engine_flush_links(engine);
        if (flushed == 0 && hr_now_ns() < engine->driver.flush_ns) {
            return 0;
        }
        atomic_store(&engine->driver.always_drives, 0);
    }
    engine->driver.stage = HR_ENGINE_ENDED;
    return 1;
}

static int turn(struct hr_engine *engine) {
    struct hr_driver *driver = &engine->driver;
    if (driver->stage <= HR_ENGINE_CLOSING && is_aborted(engine)) {
        begin_ending(engine);
    } else if (driver->stage == HR_ENGINE_RUNNING && engine->executor.has_left) {
        driver->stage = HR_ENGINE_CLOSING;
        driver->flush_ns = hr_now_ns() + FLUSH_MS * 1000000ll;
        if (driver->leave_ns != 0) {
            wait_to_leave(engine, hr_now_ns());
        }
    }
    switch (driver->stage) {
    case HR_ENGINE_RUNNING: return turn_running(engine);
    case HR_ENGINE_CLOSING: return turn_closing(engine);
    case HR_ENGINE_ENDING: return turn_ending(engine);
    default: return hr_engine_fail_all(engine);
    }
}

/* The state is not what it should be on this rank: nobody may wait for it. */
static void give_up(struct hr_engine *engine, int status) {
    const int code = status == HORO_ERR_RESOURCE ? HORO_ERR_ABORTED : HORO_ERR_INTERNAL;
    hr_log(&engine->node->log, HORO_LOG_ERROR, "the engine stops: %s error", horo_status_name(status));
    hr_node_abort(engine->node, code, engine->node->rank, HR_REASON_INTERNAL);
}

/* ---- Waiting ---- */

static int log_waits(const struct hr_engine *engine) {
    return engine->executor.state == HR_EXECUTION_IDLE &&
           atomic_load(&engine->node->arena.header->log.written) != engine->executor.log_position; /* partner: hr_ring_write */
}

static int ring_has_room(const struct hr_engine *engine) {
    const struct hr_arena_block *block = &engine->node->arena.blocks[engine->node->local_rank];
    return hr_buffer_size(&engine->announcer.request_out) > 0 &&
           atomic_load(&block->requests.written) - atomic_load(&block->requests_read) < HR_REQUEST_RING_BYTES;
}

/*
 * A task that can go on does so here already; what came of it is kept for the next turn. On one host it waits for a word in memory most of
 * the time, and is looked at more often than all else.
 */
static int task_moves(struct hr_engine *engine) {
    const int looks = engine->node->transport == NULL ? LOOKS_PER_TURN : 1;
    for (int i = 0; i < looks && engine->executor.state == HR_EXECUTION_RUNNING && engine->executor.outcome == 0; i++) {
        engine->executor.outcome = hr_engine_execute(engine);
    }
    return engine->executor.outcome != 0;
}

static int has_work(struct hr_node *node, void *arg) {
    (void)node;
    struct hr_engine *engine = arg;
    if (engine->driver.stage == HR_ENGINE_ENDING) {
        return hr_engine_may_flush(engine);
    }
    if (engine->driver.stage == HR_ENGINE_ENDED) {
        return atomic_load(&engine->submission.pending) > 0;
    }
    if (engine->driver.stage == HR_ENGINE_CLOSING) {
        const int may_fail = atomic_load(&engine->submission.pending) > 0 && !hr_leader_sends_left(engine);
        return is_aborted(engine) || may_fail || hr_leader_is_done(engine) ||
               hr_leader_has_messages(engine);
    }
    return is_aborted(engine) || engine->executor.has_left || task_moves(engine) ||
           atomic_load(&engine->submission.queued) > 0 || log_waits(engine) || ring_has_room(engine) ||
           (engine->is_leader && hr_engine_has_lead_work(engine)) ||
           (atomic_load(&engine->driver.stop) && !engine->announcer.has_asked_to_leave);
}

/* Of two times, of which 0 is none. */
static int64_t earlier(int64_t a, int64_t b) {
    return a == 0 || (b != 0 && b < a) ? b : a;
}

/* Whether something is under way that a peer may hold up. */
static int expects_others(const struct hr_engine *engine) {
    return atomic_load(&engine->submission.pending) > 0 || (engine->is_leader && engine->leader.agree.active > 0);
}

/* Nothing is under way: the links are silent. */
static void stop_expecting(struct hr_engine *engine) {
    if (engine->driver.expecting_since_ns != 0) {
        engine->driver.expecting_since_ns = 0;
        hr_node_supervise(engine->node, 0);
    }
}

/* When links are to be supervised, which this does if the time has come; 0: they are, or need not be. */
static int64_t supervise_due_ns(struct hr_engine *engine) {
    struct hr_node *node = engine->node;
    if (!expects_others(engine)) {
        stop_expecting(engine);
        return 0;
    }
    const int64_t now_ns = hr_now_ns();
    if (engine->driver.expecting_since_ns == 0) {
        engine->driver.expecting_since_ns = now_ns;
    }
    if (now_ns < engine->driver.expecting_since_ns + HR_SUPERVISE_AFTER_NS) {
        return engine->driver.expecting_since_ns + HR_SUPERVISE_AFTER_NS;
    }
    hr_node_supervise(node, 1);
    return 0;
}

/* When the wait must end by itself. */
static int64_t next_deadline(struct hr_engine *engine, int64_t deadline_ns) {
    if (engine->driver.stage == HR_ENGINE_ENDING) {
        return engine->driver.flush_ns;
    }
    if (engine->driver.stage == HR_ENGINE_ENDED) {
        return deadline_ns;
    }
    deadline_ns = earlier(deadline_ns, engine->driver.leave_ns);
    if (engine->driver.stage == HR_ENGINE_CLOSING) {
        return atomic_load(&engine->submission.pending) > 0 ? earlier(deadline_ns, engine->driver.flush_ns) : deadline_ns;
    }
    deadline_ns = earlier(deadline_ns, hr_engine_check_stall(engine, moves_of(engine)));
    if (engine->executor.state == HR_EXECUTION_LOST) {
        deadline_ns = earlier(deadline_ns, engine->executor.confirm_ns);
    }
    if (engine->is_leader) {
        deadline_ns = earlier(deadline_ns, hr_engine_batch_due_ns(engine));
    }
    return engine->node->transport == NULL ? deadline_ns : earlier(deadline_ns, supervise_due_ns(engine));
}

/* One wait for something to do. 1, or 0 if the caller should get back: its time is up, or a signal came. */
static int wait_for_work(struct hr_engine *engine, int64_t spin_ns, int64_t deadline_ns) {
    const int64_t until_ns = next_deadline(engine, deadline_ns);
    const int status = hr_node_wait(engine->node, has_work, engine, spin_ns, until_ns);
    return status != HORO_IN_PROGRESS || deadline_ns == 0 || (hr_now_ns() < deadline_ns && hr_now_ns() >= until_ns);
}

/* ---- Leaving ---- */

/* Part of each turn once the rank shuts down: asks for the LEAVE record, and waits for that and for CLOSING no longer than things move. */
static int turn_leaving(struct hr_engine *engine) {
    if (engine->driver.stage > HR_ENGINE_CLOSING || !atomic_load(&engine->driver.stop)) {
        return HORO_OK;
    }
    const int64_t now_ns = hr_now_ns();
    if (!engine->announcer.has_asked_to_leave) {
        const int announced = hr_engine_announce(engine); /* what was submitted before is announced before */
        HR_TRY(announced);
        HR_TRY(hr_engine_ask_to_leave(engine));
        wait_to_leave(engine, now_ns);
    } else if (now_ns >= engine->driver.leave_ns) {
        /* In CLOSING too: with this leader others would lose the way by which they hear of a death. */
        if (engine->driver.leave_moves == leave_moves_of(engine)) {
            hr_node_abort(engine->node, HORO_ERR_ABORTED, engine->node->rank, HR_REASON_LEFT);
        }
        wait_to_leave(engine, now_ns);
    }
    return HORO_OK;
}

/* ---- The loop ---- */

int hr_engine_is_called(const struct hr_engine *engine) {
    return engine->is_leader && engine->driver.stage == HR_ENGINE_RUNNING &&
           atomic_load(&engine->node->arena.header->wants_leave) != 0; /* partner: hr_engine_ask_to_leave */
}

static int may_return(const struct hr_engine *engine, const struct hr_request *until) {
    if (until != NULL) {
        return atomic_load(&until->status) != HORO_IN_PROGRESS;
    }
    if (atomic_load(&engine->driver.stop)) {
        return engine->driver.stage == HR_ENGINE_ENDED && atomic_load(&engine->submission.pending) == 0;
    }
    return atomic_load(&engine->driver.wanted) ||
           (!hr_engine_thread_drives(engine) && !hr_engine_is_called(engine) && atomic_load(&engine->submission.pending) == 0);
}

void hr_engine_drive(struct hr_engine *engine, const struct hr_request *until, int64_t deadline_ns) {
    const int64_t spin_ns = until != NULL ? engine->driver.caller_spin_ns : engine->driver.thread_spin_ns;
    for (unsigned turns = 1; !may_return(engine, until); turns++) {
        int moved = turn_leaving(engine);
        moved = moved < 0 ? moved : turn(engine);
        if (moved < 0) {
            give_up(engine, moved);
        } else if (moved > 0) {
            if (turns % TURNS_PER_CLOCK == 0 && deadline_ns != 0 && hr_now_ns() >= deadline_ns) {
                return;
            }
        } else if (!wait_for_work(engine, spin_ns, deadline_ns)) {
            return;
        }
    }
    if (!expects_others(engine)) {
        stop_expecting(engine); /* nobody may drive for a long time now */
    }
}

/* ---- The background thread ---- */

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
 * Until needed, with the lock held. Parking costs the caller a system call that wakes a thread, two microseconds and more, for each
 * request of a stream; lingering costs time of a core that nobody else wants. So it lingers only after it has been woken so soon
 * that lingering would have caught the call, and no longer than its waits spin.
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
    return atomic_load(&engine->submission.pending) > 0 || hr_engine_thread_drives(engine) || hr_engine_is_called(engine);
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
