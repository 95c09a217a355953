/*
 * Driving the engine: one turn after another until there is nothing to do, then one wait. The stages are in engine.h.
 */
#include "engine/drive.h"

#include <string.h>

enum {
    FLUSH_MS = 500,       /* telling other hosts of the end is worth no longer wait */
    LEAVE_GRACE_MS = 2000, /* without anything moving: what others do not do may hold a shutdown up so long */
    CLOSE_GRACE_MS = 10000, /* the same once the log is closed: what moves on other hosts is not seen here */
    STAGES_PER_TURN = 3,
    TURNS_PER_CLOCK = 16, /* while things move, the deadline is looked at once in so many turns */
};

/* ---- RUNNING ---- */

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
    lane->is_due = 0;
    const int joined = hr_lane_go_on_joining(lane);
    HR_TRY(joined);
    const int flushed = hr_lane_flush_requests(lane);
    HR_TRY(flushed);
    const int led = lane->is_leader ? hr_lane_lead(lane) : 0;
    HR_TRY(led);
    const int executed = execute(lane);
    HR_TRY(executed);
    lane->is_quiet = lane->engine->lane_count > 1 && is_quiet(lane);
    if (lane->team->transport != NULL) {
        lane->team->transport->is_quiet = lane->is_quiet;
    }
    return joined || flushed || led || executed;
}

/* From CLOSING on every message counts. */
static void end_quiet(struct hr_engine *engine) {
    for (int i = 0; i < engine->lane_count; i++) {
        engine->lanes[i]->is_quiet = 0;
        if (engine->lanes[i]->team->transport != NULL) {
            engine->lanes[i]->team->transport->is_quiet = 0;
        }
    }
}

static int turn_running(struct hr_engine *engine) {
    const int told = hr_engine_has_blocked(engine) ? hr_engine_tell_blocked(engine) : 0;
    HR_TRY(told);
    const int announced = hr_engine_announce(engine);
    HR_TRY(announced);
    int moved = told > 0 || announced > 0;
    moved |= hr_gpu_turn(engine);
    for (int i = 0; i < engine->lane_count; i++) { /* the world's may add and remove others behind it */
        if (hr_drive_skips(engine, i)) {
            continue;
        }
        const int turned = turn_lane(engine->lanes[i]);
        HR_TRY(turned);
        moved |= turned;
    }
    return moved;
}

/* Whether this rank has nothing more to do in a batch of the lane that some members may have begun. */
static int has_run_out(const struct hr_lane *lane) {
    /* partner: hr_ring_write */
    const uint64_t written = atomic_load(&lane->team->partition.header->log.written);
    return (lane->executor.state == HR_EXECUTION_IDLE || lane->executor.state == HR_EXECUTION_LOST) &&
           lane->lone.request == NULL && hr_buffer_size(&lane->leader.log_out) == 0 &&
           written == lane->executor.log_position && hr_buffer_size(&lane->executor.log_in) == 0;
}

int hr_drive_may_close(const struct hr_engine *engine) {
    if (!hr_engine_world(engine)->executor.has_executed_leave) {
        return 0;
    }
    for (int i = 1; i < engine->lane_count; i++) {
        if (!has_run_out(engine->lanes[i])) {
            return engine->driver.is_late;
        }
    }
    return 1;
}

/* ---- The grace: the time that a rank waits for others in which nothing moves ---- */

static uint64_t count_moves(const struct hr_engine *engine) {
    const struct hr_node *node = engine->node;
    uint64_t moves = hr_drive_moves(engine);
    for (int i = 0; i < node->local_size; i++) {
        if (i != node->local_rank) {
            /* partner: show_moves */
            moves += atomic_load_explicit(&node->arena.blocks[i].moves, memory_order_relaxed);
        }
    }
    return moves;
}

static void begin_grace(struct hr_engine *engine, int64_t now_ns) {
    const int64_t grace_ms = engine->driver.stage == HR_ENGINE_CLOSING ? CLOSE_GRACE_MS : LEAVE_GRACE_MS;
    engine->driver.leave_ns = now_ns + grace_ms * 1000000;
    engine->driver.leave_moves = count_moves(engine);
}

/* Whether it is over; if something has moved, it begins anew. */
static int has_no_grace(struct hr_engine *engine, int64_t now_ns) {
    if (now_ns < engine->driver.leave_ns) {
        return 0;
    }
    const int is_over = engine->driver.leave_moves == count_moves(engine);
    begin_grace(engine, now_ns);
    return is_over;
}

/* ---- CLOSING, ENDING and ENDED ---- */

/* Whether a rank is lost or its program has failed: what it has left undone on GPUs never comes. */
static int has_failed(const struct hr_engine *engine) {
    return hr_drive_is_aborted(engine) || hr_engine_end(engine).code == HORO_ERR_PEER_LOST;
}

static void begin_ending(struct hr_engine *engine) {
    end_quiet(engine);
    hr_engine_note_end(engine);
    for (int i = 0; i < engine->lane_count; i++) {
        hr_lane_cancel(engine->lanes[i]);
        engine->lanes[i]->executor.outcome = 0;
    }
    hr_gpu_leave(engine, has_failed(engine));
    engine->driver.stage = HR_ENGINE_ENDING;
    engine->driver.flush_ns = hr_now_ns() + FLUSH_MS * 1000000ll;
}

/* Operations of other teams that are not done by now end here. */
static void begin_closing(struct hr_engine *engine) {
    const int64_t now_ns = hr_now_ns();
    end_quiet(engine);
    for (int i = 1; i < engine->lane_count; i++) {
        hr_lane_cancel(engine->lanes[i]);
        engine->lanes[i]->executor.outcome = 0;
    }
    engine->driver.stage = HR_ENGINE_CLOSING;
    engine->driver.flush_ns = now_ns + FLUSH_MS * 1000000ll;
    begin_grace(engine, now_ns);
}

int hr_drive_any_leader(const struct hr_engine *engine, int (*holds)(const struct hr_lane *lane)) {
    for (int i = 0; i < engine->lane_count; i++) {
        if (engine->lanes[i]->is_leader && holds(engine->lanes[i])) {
            return 1;
        }
    }
    return 0;
}

int hr_drive_may_end(const struct hr_engine *engine) {
    const struct hr_lane *world = hr_engine_world(engine);
    return !world->is_leader || hr_leader_is_done(world);
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
    const int told = !hr_drive_any_leader(engine, hr_leader_sends_left) || hr_now_ns() >= engine->driver.flush_ns;
    if (told && hr_engine_fail_all(engine)) {
        return 1;
    }
    if (hr_drive_may_end(engine)) {
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
            HR_TRY(hr_drive_is_aborted(engine) ? HORO_OK : hr_leader_tell_done(lane));
            const int all = hr_leader_flush_links(lane);
            flushed = all < 0 ? flushed : flushed && all;
        }
    }
    /* tensors of failed requests may be freed by the program: first, the GPU lets go of them */
    const int is_quiet = !has_failed(engine) || hr_gpu_is_quiet(engine);
    if ((!flushed || !is_quiet) && hr_now_ns() < engine->driver.flush_ns) {
        return 0;
    }
    atomic_store(&engine->driver.serves_hosts, 0);
    engine->driver.stage = HR_ENGINE_ENDED;
    return 1;
}

static int turn(struct hr_engine *engine) {
    struct hr_driver *driver = &engine->driver;
    if (driver->stage <= HR_ENGINE_CLOSING && hr_drive_is_aborted(engine)) {
        begin_ending(engine);
    } else if (driver->stage == HR_ENGINE_RUNNING && hr_drive_may_close(engine)) {
        begin_closing(engine);
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

/* ---- Leaving ---- */

static struct hr_wire_text words_of(struct hr_engine *engine) {
    (void)pthread_mutex_lock(&engine->submission.lock); /* under which they were written */
    const char *words = engine->driver.leave_words;
    const struct hr_wire_text text = {.data = words, .bytes = strlen(words)};
    (void)pthread_mutex_unlock(&engine->submission.lock);
    return text;
}

static void leave_at_once(struct hr_engine *engine) {
    const struct hr_wire_text words = words_of(engine);
    const int status = engine->driver.leave_status;
    if (words.bytes > 0) {
        hr_node_end(engine->node, status, engine->node->rank, words.data, words.bytes);
    } else {
        hr_node_abort(engine->node, status, engine->node->rank, HR_REASON_LEFT);
    }
}

/*
 * Part of each turn once the rank shuts down, or the LEAVE record has been executed: asks for that record, and waits
 * for it, for CLOSING and for ENDING no longer than things move.
 */
static int turn_leaving(struct hr_engine *engine) {
    struct hr_lane *world = hr_engine_world(engine);
    const int leaves = atomic_load(&engine->driver.stop);
    if (engine->driver.stage > HR_ENGINE_CLOSING || (!leaves && !world->executor.has_executed_leave)) {
        return HORO_OK;
    }
    if (hr_drive_is_aborted(engine)) {
        return HORO_OK; /* a LEAVE would overtake the reason of a rank that has ended the group itself */
    }
    const int64_t now_ns = hr_now_ns();
    if (leaves && !world->announcer.has_asked_to_leave) {
        const int announced = hr_engine_announce(engine); /* requests from before the call are announced before */
        HR_TRY(announced);
        HR_TRY(hr_lane_ask_to_leave(world, engine->node->rank, engine->driver.leave_status, words_of(engine)));
        begin_grace(engine, now_ns);
    } else if (engine->driver.leave_ns == 0) {
        begin_grace(engine, now_ns);
    } else if (has_no_grace(engine, now_ns)) {
        /* In CLOSING too: with this leader others would lose the way by which they hear of a death. */
        engine->driver.is_late = world->executor.has_executed_leave && engine->driver.stage == HR_ENGINE_RUNNING;
        if (leaves && !engine->driver.is_late) {
            leave_at_once(engine);
        }
    }
    return HORO_OK;
}

/* ---- The loop ---- */

int hr_engine_is_called(const struct hr_engine *engine) {
    const struct hr_arena_header *header = engine->node->arena.header;
    if (engine->driver.stage != HR_ENGINE_RUNNING) {
        return 0;
    }
    /* partner: hr_lane_ask_to_leave */
    return hr_engine_world(engine)->is_leader && atomic_load(&header->wants_leave) != 0;
}

static int may_return(const struct hr_engine *engine, const struct hr_request *until) {
    if (until != NULL) {
        return atomic_load(&until->status) != HORO_IN_PROGRESS;
    }
    if (atomic_load(&engine->driver.stop)) {
        return engine->driver.stage == HR_ENGINE_ENDED && atomic_load(&engine->submission.pending) == 0;
    }
    return !atomic_load(&engine->driver.serves_hosts) && !hr_engine_is_called(engine) &&
           atomic_load(&engine->submission.pending) == 0 && !hr_gpu_is_busy(engine);
}

/*
 * Whether a caller may take over from the thread, now that nothing moves: where it serves other hosts. What makes the
 * thread drive (must_drive) must be over, or it would do so again at once, without the sleep that notices a death.
 */
static int may_yield(const struct hr_engine *engine, const struct hr_request *until) {
    const struct hr_driver *driver = &engine->driver;
    const int is_at_work = atomic_load(&engine->submission.pending) > 0 || hr_gpu_is_busy(engine);
    return until == NULL && driver->stage == HR_ENGINE_RUNNING && atomic_load(&driver->serves_hosts) &&
           !atomic_load(&driver->stop) && !hr_engine_is_called(engine) &&
           (atomic_load(&driver->wanted) || !is_at_work);
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
            if (hr_drive_watch(engine)) {
                break;
            }
        } else if (!hr_drive_wait_for_work(engine, spin_ns, deadline_ns)) {
            return;
        }
    }
    if (!hr_drive_expects_others(engine)) {
        hr_drive_stop_expecting(engine); /* nobody may drive for a long time now */
    }
}
