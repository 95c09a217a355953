/*
 * Driving the engine: one turn after another until there is nothing to do, then one wait. The stages are in engine.h.
 */
#include "engine/engine.h"

enum {
    FLUSH_MS = 500,       /* telling other hosts of the end is worth no longer wait */
    LEAVE_GRACE_MS = 2000, /* without anything moving: what others do not do may hold a shutdown up so long */
    CLOSE_GRACE_MS = 10000, /* the same once the log is closed: what moves on other hosts is not seen here */
    STAGES_PER_TURN = 3,
    LOOKS_PER_TURN = 2, /* at a task, while it waits */
    TURNS_PER_CLOCK = 16, /* while things move, the deadline is looked at once in so many turns */
};

/* ---- RUNNING ---- */

static int is_aborted(const struct hr_engine *engine) {
    return hr_arena_aborted(&engine->node->arena).code != 0;
}

/* A number that changes whenever something has moved here, in any lane. */
static uint64_t moves_of(const struct hr_engine *engine) {
    uint64_t moves = engine->driver.lane_moves;
    for (int i = 0; i < engine->lane_count; i++) {
        moves += hr_lane_moves(engine->lanes[i]);
    }
    return moves;
}

/*
 * Up to STAGES_PER_TURN stages, as long as nothing has to be waited for: those of a small operation take less time than
 * a whole turn.
 */
static int execute(struct hr_lane *lane) {
    int moved = lane->executor.outcome; /* of a look during the wait */
    lane->executor.outcome = 0;
    HR_TRY(moved);
    for (int i = moved; i < STAGES_PER_TURN; i++) {
        const int executed = hr_lane_execute(lane);
        HR_TRY(executed);
        if (executed == 0) {
            break;
        }
        moved = 1;
        if (lane->executor.state == HR_EXECUTION_IDLE) {
            break; /* a caller may have got what it waits for */
        }
        (void)hr_node_progress(lane->node); /* the links go on between two stages */
    }
    return moved;
}

/* Whether this rank has nothing under way in the team; others may, and then a message comes on a link. */
static int is_quiet(const struct hr_lane *lane) {
    return atomic_load_explicit(&lane->pending, memory_order_relaxed) == 0 &&
           lane->executor.state == HR_EXECUTION_IDLE && hr_buffer_size(&lane->announcer.request_out) == 0 &&
           (!lane->is_leader || (lane->leader.agree.active == 0 && !hr_leader_sends_left(lane)));
}

static int turn_lane(struct hr_lane *lane) {
    const int flushed = hr_lane_flush_requests(lane);
    HR_TRY(flushed);
    const int led = lane->is_leader ? hr_lane_lead(lane) : 0;
    HR_TRY(led);
    const int executed = execute(lane);
    HR_TRY(executed);
    if (lane->team->transport != NULL) {
        lane->team->transport->is_quiet = lane->engine->lane_count > 1 && is_quiet(lane);
    }
    return flushed || led || executed;
}

/* From CLOSING on every message counts. */
static void end_quiet(struct hr_engine *engine) {
    for (int i = 0; i < engine->lane_count; i++) {
        if (engine->lanes[i]->team->transport != NULL) {
            engine->lanes[i]->team->transport->is_quiet = 0;
        }
    }
}

/* Who has executed the LEAVE record of all ranks leaves its other teams as well, each at the end of its own log. */
static int leave_other_teams(struct hr_engine *engine) {
    for (int i = 1; i < engine->lane_count && hr_engine_world(engine)->executor.has_left; i++) {
        HR_TRY(hr_lane_ask_to_leave(engine->lanes[i], hr_node_left(engine->node) - 1));
    }
    return HORO_OK;
}

static int turn_running(struct hr_engine *engine) {
    const int announced = hr_engine_announce(engine);
    HR_TRY(announced);
    HR_TRY(leave_other_teams(engine));
    int moved = announced > 0;
    for (int i = 0; i < engine->lane_count; i++) { /* the world's may add and remove others behind it */
        const int turned = turn_lane(engine->lanes[i]);
        HR_TRY(turned);
        moved |= turned;
    }
    return moved;
}

/* The logs of all lanes have ended. */
static int has_left(const struct hr_engine *engine) {
    for (int i = 0; i < engine->lane_count; i++) {
        if (!engine->lanes[i]->executor.has_left) {
            return 0;
        }
    }
    return 1;
}

/* ---- CLOSING, ENDING and ENDED ---- */

/* What must change within the grace while this rank waits to be able to leave. */
static uint64_t leave_moves_of(const struct hr_engine *engine) {
    const struct hr_node *node = engine->node;
    uint64_t moves = moves_of(engine);
    for (int i = 0; i < node->local_size && engine->driver.stage == HR_ENGINE_CLOSING; i++) {
        if (i != node->local_rank) {
            /* partner: wait_for_work */
            moves += atomic_load_explicit(&node->arena.blocks[i].moves, memory_order_relaxed);
        }
    }
    return moves;
}

static void wait_to_leave(struct hr_engine *engine, int64_t now_ns) {
    const int64_t grace_ms = engine->driver.stage == HR_ENGINE_CLOSING ? CLOSE_GRACE_MS : LEAVE_GRACE_MS;
    engine->driver.leave_ns = now_ns + grace_ms * 1000000;
    engine->driver.leave_moves = leave_moves_of(engine);
}

static void begin_ending(struct hr_engine *engine) {
    end_quiet(engine);
    hr_engine_note_end(engine);
    for (int i = 0; i < engine->lane_count; i++) {
        hr_lane_cancel(engine->lanes[i]);
        engine->lanes[i]->executor.outcome = 0;
    }
    engine->driver.stage = HR_ENGINE_ENDING;
    engine->driver.flush_ns = hr_now_ns() + FLUSH_MS * 1000000ll;
}

/*
 * What a question about leaders comes to over all lanes that this rank leads: whether it holds for any of them, or for
 * all.
 */
static int any_leader(const struct hr_engine *engine, int (*holds)(const struct hr_lane *lane)) {
    for (int i = 0; i < engine->lane_count; i++) {
        if (engine->lanes[i]->is_leader && holds(engine->lanes[i])) {
            return 1;
        }
    }
    return 0;
}

static int is_not_done(const struct hr_lane *lane) {
    return !hr_leader_is_done(lane);
}

/* Through the lowest rank of a host the others hear of deaths there, in teams that it is no member of too. */
static int is_needed_here(const struct hr_engine *engine) {
    const struct hr_arena *arena = &engine->node->arena;
    for (int i = 1; i < arena->local_size && arena->local_rank == 0; i++) {
        /* partner: end_record */
        if (atomic_load(&arena->blocks[i].state) == HR_MEMBER_PRESENT && !hr_arena_has_closed(arena, i)) {
            return 1;
        }
    }
    return 0;
}

static int may_end(const struct hr_engine *engine) {
    return !any_leader(engine, is_not_done) && !is_needed_here(engine);
}

/*
 * The callers here must not hear of the end before the neighbours: they may end at once, which others must not take for
 * the cause.
 */
static int turn_closing(struct hr_engine *engine) {
    int moved = 0;
    for (int i = 0; i < engine->lane_count; i++) {
        const int led = engine->lanes[i]->is_leader ? hr_leader_progress_links(engine->lanes[i]) : 0;
        HR_TRY(led);
        moved |= led;
    }
    const int told = !any_leader(engine, hr_leader_sends_left) || hr_now_ns() >= engine->driver.flush_ns;
    if (told && hr_engine_fail_all(engine)) {
        return 1;
    }
    if (may_end(engine)) {
        begin_ending(engine);
        return 1;
    }
    return moved;
}

/* As in CLOSING. */
static int turn_ending(struct hr_engine *engine) {
    int flushed = 1;
    for (int i = 0; i < engine->lane_count && atomic_load(&engine->driver.serves_hosts); i++) {
        struct hr_lane *lane = engine->lanes[i];
        if (lane->is_leader) {
            HR_TRY(is_aborted(engine) ? HORO_OK : hr_leader_tell_done(lane));
            const int all = hr_leader_flush_links(lane);
            flushed = all < 0 ? flushed : flushed && all;
        }
    }
    if (!flushed && hr_now_ns() < engine->driver.flush_ns) {
        return 0;
    }
    atomic_store(&engine->driver.serves_hosts, 0);
    engine->driver.stage = HR_ENGINE_ENDED;
    return 1;
}

static int turn(struct hr_engine *engine) {
    struct hr_driver *driver = &engine->driver;
    if (driver->stage <= HR_ENGINE_CLOSING && is_aborted(engine)) {
        begin_ending(engine);
    } else if (driver->stage == HR_ENGINE_RUNNING && has_left(engine)) {
        driver->stage = HR_ENGINE_CLOSING;
        end_quiet(engine);
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

static int log_waits(const struct hr_lane *lane) {
    return lane->executor.state == HR_EXECUTION_IDLE &&
           /* partner: hr_ring_write */
           atomic_load(&lane->team->partition.header->log.written) != lane->executor.log_position;
}

static int ring_has_room(const struct hr_lane *lane) {
    const struct hr_partition_block *block = &lane->team->partition.blocks[lane->node->local_rank];
    return hr_buffer_size(&lane->announcer.request_out) > 0 &&
           atomic_load(&block->requests.written) - atomic_load(&block->requests_read) < HR_REQUEST_RING_BYTES;
}

/*
 * A task that can go on does so here already; what came of it is kept for the next turn. On one host it waits for a
 * word in memory most of the time, and is looked at more often than all else.
 */
static int task_moves(struct hr_lane *lane) {
    struct hr_executor *executor = &lane->executor;
    const int looks = lane->team->transport == NULL ? LOOKS_PER_TURN : 1;
    for (int i = 0; i < looks && executor->outcome == 0 &&
                    (executor->state == HR_EXECUTION_RUNNING || executor->state == HR_EXECUTION_CHANGING); i++) {
        executor->outcome = hr_lane_execute(lane);
    }
    return executor->outcome != 0;
}

static int lane_has_work(struct hr_lane *lane) {
    return task_moves(lane) || log_waits(lane) || ring_has_room(lane) ||
           (lane->is_leader && hr_lane_has_lead_work(lane));
}

static int has_work_closing(struct hr_engine *engine) {
    const int may_fail = atomic_load(&engine->submission.pending) > 0 && !any_leader(engine, hr_leader_sends_left);
    return is_aborted(engine) || may_fail || may_end(engine) || any_leader(engine, hr_leader_has_messages);
}

static int has_work(struct hr_node *node, void *arg) {
    (void)node;
    struct hr_engine *engine = arg;
    switch (engine->driver.stage) {
    case HR_ENGINE_CLOSING: return has_work_closing(engine);
    case HR_ENGINE_ENDING:
        return any_leader(engine, hr_leader_has_messages) || !any_leader(engine, hr_leader_sends_left);
    case HR_ENGINE_ENDED: return atomic_load(&engine->submission.pending) > 0;
    case HR_ENGINE_RUNNING: break;
    }
    if (is_aborted(engine) || has_left(engine) || atomic_load(&engine->submission.queued) > 0 ||
        (atomic_load(&engine->driver.stop) && !hr_engine_world(engine)->announcer.has_asked_to_leave)) {
        return 1;
    }
    for (int i = 0; i < engine->lane_count; i++) {
        if (lane_has_work(engine->lanes[i])) {
            return 1;
        }
    }
    return 0;
}

/* Of two times, of which 0 is none. */
static int64_t earlier(int64_t a, int64_t b) {
    return a == 0 || (b != 0 && b < a) ? b : a;
}

static int is_agreeing(const struct hr_lane *lane) {
    return lane->leader.agree.active > 0;
}

/* Whether something is under way that a peer may hold up. */
static int expects_others(const struct hr_engine *engine) {
    return atomic_load(&engine->submission.pending) > 0 || any_leader(engine, is_agreeing);
}

/* Nothing is under way: the links are silent. */
static void stop_expecting(struct hr_engine *engine) {
    if (engine->driver.expecting_since_ns != 0) {
        engine->driver.expecting_since_ns = 0;
        hr_node_supervise(engine->node, 0);
    }
}

/* When links are to be supervised, which this does if the time has come; 0: they are, or need not be. */
static int64_t supervise_due_ns(struct hr_engine *engine, int64_t now_ns) {
    struct hr_node *node = engine->node;
    if (!expects_others(engine)) {
        stop_expecting(engine);
        return 0;
    }
    if (engine->driver.expecting_since_ns == 0) {
        engine->driver.expecting_since_ns = now_ns;
    }
    if (now_ns < engine->driver.expecting_since_ns + HR_SUPERVISE_AFTER_NS) {
        return engine->driver.expecting_since_ns + HR_SUPERVISE_AFTER_NS;
    }
    hr_node_supervise(node, 1);
    return 0;
}

static int64_t lane_deadline(struct hr_lane *lane, int64_t now_ns) {
    int64_t deadline_ns = hr_lane_check_stall(lane, now_ns);
    if (lane->executor.state == HR_EXECUTION_LOST) {
        deadline_ns = earlier(deadline_ns, lane->executor.confirm_ns);
    }
    return lane->is_leader ? earlier(deadline_ns, hr_lane_batch_due_ns(lane)) : deadline_ns;
}

/* When the wait must end by itself. */
static int64_t next_deadline(struct hr_engine *engine, int64_t deadline_ns, int64_t now_ns) {
    if (engine->driver.stage == HR_ENGINE_ENDING) {
        return engine->driver.flush_ns;
    }
    if (engine->driver.stage == HR_ENGINE_ENDED) {
        return deadline_ns;
    }
    deadline_ns = earlier(deadline_ns, engine->driver.leave_ns);
    if (engine->driver.stage == HR_ENGINE_CLOSING) {
        return atomic_load(&engine->submission.pending) > 0 ? earlier(deadline_ns, engine->driver.flush_ns)
                                                            : deadline_ns;
    }
    for (int i = 0; i < engine->lane_count; i++) {
        deadline_ns = earlier(deadline_ns, lane_deadline(engine->lanes[i], now_ns));
    }
    return engine->node->transport_count == 0 ? deadline_ns : earlier(deadline_ns, supervise_due_ns(engine, now_ns));
}

static void show_moves(struct hr_engine *engine) {
    _Atomic uint64_t *moves = &engine->node->arena.blocks[engine->node->local_rank].moves;
    atomic_store_explicit(moves, moves_of(engine), memory_order_relaxed); /* partner: leave_moves_of */
}

/* One wait for something to do. 1, or 0 if the caller should get back: its time is up, or a signal came. */
static int wait_for_work(struct hr_engine *engine, int64_t spin_ns, int64_t deadline_ns) {
    /* one look at the clock serves all: it costs as much as a small operation can do in between */
    const int64_t now_ns = hr_now_ns();
    const int64_t until_ns = next_deadline(engine, deadline_ns, now_ns);
    show_moves(engine);
    const int status = hr_node_wait(engine->node, has_work, engine, now_ns, spin_ns, until_ns);
    return status != HORO_IN_PROGRESS || deadline_ns == 0 || (hr_now_ns() < deadline_ns && hr_now_ns() >= until_ns);
}

/* The thread prepares to wait while callers may drive. 0: there is something to do. */
static int watch(struct hr_engine *engine) {
    struct hr_driver *driver = &engine->driver;
    const int64_t now_ns = hr_now_ns();
    const int64_t until_ns = next_deadline(engine, 0, now_ns);
    show_moves(engine);
    if ((until_ns != 0 && now_ns >= until_ns) ||
        hr_node_prepare_sleep(engine->node, has_work, engine, &driver->sleep, until_ns)) {
        return 0;
    }
    driver->is_watching = 1;
    driver->watching_since = driver->drives;
    return 1;
}

/* ---- Leaving ---- */

/*
 * Part of each turn once the rank shuts down: asks for the LEAVE record, and waits for that and for CLOSING no longer
 * than things move.
 */
static int turn_leaving(struct hr_engine *engine) {
    if (engine->driver.stage > HR_ENGINE_CLOSING || !atomic_load(&engine->driver.stop)) {
        return HORO_OK;
    }
    const int64_t now_ns = hr_now_ns();
    if (!hr_engine_world(engine)->announcer.has_asked_to_leave) {
        const int announced = hr_engine_announce(engine); /* what was submitted before is announced before */
        HR_TRY(announced);
        HR_TRY(hr_lane_ask_to_leave(hr_engine_world(engine), engine->node->rank));
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
    const struct hr_arena_header *header = engine->node->arena.header;
    if (engine->driver.stage != HR_ENGINE_RUNNING) {
        return 0;
    }
    if (engine->lane_count > 1 && atomic_load(&header->leave_at[0]) != 0) { /* partner: hr_leader_close_log */
        return 1;
    }
    const uint64_t wants_leave = atomic_load(&header->wants_leave); /* partner: hr_lane_ask_to_leave */
    for (int i = 0; i < engine->lane_count && wants_leave != 0; i++) {
        if (engine->lanes[i]->is_leader && (wants_leave >> engine->lanes[i]->team->number & 1) != 0) {
            return 1;
        }
    }
    return 0;
}

static int may_return(const struct hr_engine *engine, const struct hr_request *until) {
    if (until != NULL) {
        return atomic_load(&until->status) != HORO_IN_PROGRESS;
    }
    if (atomic_load(&engine->driver.stop)) {
        return engine->driver.stage == HR_ENGINE_ENDED && atomic_load(&engine->submission.pending) == 0;
    }
    return !atomic_load(&engine->driver.serves_hosts) && !hr_engine_is_called(engine) &&
           atomic_load(&engine->submission.pending) == 0;
}

/* Whether a caller may take over from the thread, now that nothing moves: where it serves other hosts. */
static int may_yield(const struct hr_engine *engine, const struct hr_request *until) {
    const struct hr_driver *driver = &engine->driver;
    return until == NULL && driver->stage == HR_ENGINE_RUNNING && atomic_load(&driver->serves_hosts) &&
           !atomic_load(&driver->stop) && !hr_engine_is_called(engine) &&
           (atomic_load(&driver->wanted) || atomic_load(&engine->submission.pending) == 0);
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
        } else if (may_yield(engine, until)) {
            if (watch(engine)) {
                break;
            }
        } else if (!wait_for_work(engine, spin_ns, deadline_ns)) {
            return;
        }
    }
    if (!expects_others(engine)) {
        stop_expecting(engine); /* nobody may drive for a long time now */
    }
}
