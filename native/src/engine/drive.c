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

/* Leaves the other teams as well, each at the end of its log, once the LEAVE record of all ranks has been executed. */
static int leave_other_teams(struct hr_engine *engine) {
    for (int i = 1; i < engine->lane_count && hr_engine_world(engine)->executor.has_executed_leave; i++) {
        engine->lanes[i]->is_due = 1;
        const int leaver = hr_arena_left(&engine->node->arena).rank;
        HR_TRY(hr_lane_ask_to_leave(engine->lanes[i], leaver, HORO_ERR_ABORTED, (struct hr_wire_text){0}));
    }
    return HORO_OK;
}

static int turn_running(struct hr_engine *engine) {
    const int told = hr_engine_has_blocked(engine) ? hr_engine_tell_blocked(engine) : 0;
    HR_TRY(told);
    const int announced = hr_engine_announce(engine);
    HR_TRY(announced);
    HR_TRY(leave_other_teams(engine));
    int moved = told > 0 || announced > 0;
    moved |= hr_engine_turn_nccl(engine);
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

int hr_drive_has_ended_logs(const struct hr_engine *engine) {
    for (int i = 0; i < engine->lane_count; i++) {
        if (!engine->lanes[i]->executor.has_executed_leave) {
            return 0;
        }
    }
    return 1;
}

/* ---- CLOSING, ENDING and ENDED ---- */

/* The count that must change within the grace while this rank waits to be able to leave. */
static uint64_t leave_moves_of(const struct hr_engine *engine) {
    const struct hr_node *node = engine->node;
    uint64_t moves = hr_drive_moves(engine) + engine->driver.held_moves;
    for (int i = 0; i < node->local_size; i++) {
        const struct hr_arena_block *block = &node->arena.blocks[i];
        if (i != node->local_rank) {
            /* partner: show_moves. Before CLOSING others may go on without this rank, unless a GPU keeps them */
            moves += atomic_load_explicit(
                engine->driver.stage == HR_ENGINE_CLOSING ? &block->moves : &block->held_moves, memory_order_relaxed);
        }
    }
    return moves;
}

static void wait_to_leave(struct hr_engine *engine, int64_t now_ns) {
    const int64_t grace_ms = engine->driver.stage == HR_ENGINE_CLOSING ? CLOSE_GRACE_MS : LEAVE_GRACE_MS;
    engine->driver.leave_ns = now_ns + grace_ms * 1000000;
    engine->driver.leave_moves = leave_moves_of(engine);
}

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
    hr_engine_leave_nccl(engine, has_failed(engine));
    engine->driver.stage = HR_ENGINE_ENDING;
    engine->driver.flush_ns = hr_now_ns() + FLUSH_MS * 1000000ll;
}

int hr_drive_any_leader(const struct hr_engine *engine, int (*holds)(const struct hr_lane *lane)) {
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

int hr_drive_may_end(const struct hr_engine *engine) {
    return !hr_drive_any_leader(engine, is_not_done) && !is_needed_here(engine);
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
    const int is_quiet = !has_failed(engine) || hr_engine_is_nccl_quiet(engine);
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
    } else if (driver->stage == HR_ENGINE_RUNNING && hr_drive_has_ended_logs(engine)) {
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
 * Part of each turn once the rank shuts down: asks for the LEAVE record, and waits for that and for CLOSING no longer
 * than things move.
 */
static int turn_leaving(struct hr_engine *engine) {
    if (engine->driver.stage > HR_ENGINE_CLOSING || !atomic_load(&engine->driver.stop)) {
        return HORO_OK;
    }
    if (hr_drive_is_aborted(engine)) {
        return HORO_OK; /* a LEAVE would overtake the reason of a rank that has ended the group itself */
    }
    const int64_t now_ns = hr_now_ns();
    if (!hr_engine_world(engine)->announcer.has_asked_to_leave) {
        const int announced = hr_engine_announce(engine); /* requests from before the call are announced before */
        HR_TRY(announced);
        HR_TRY(hr_lane_ask_to_leave(hr_engine_world(engine), engine->node->rank, engine->driver.leave_status,
                                    words_of(engine)));
        wait_to_leave(engine, now_ns);
    } else if (now_ns >= engine->driver.leave_ns) {
        /* In CLOSING too: with this leader others would lose the way by which they hear of a death. */
        if (engine->driver.leave_moves == leave_moves_of(engine)) {
            leave_at_once(engine);
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

/* A refusal is not pending once it is among the frames for the leader. */
static int has_told_all(const struct hr_engine *engine) {
    for (int i = 0; i < engine->lane_count; i++) {
        if (hr_buffer_size(&engine->lanes[i]->announcer.request_out) > 0) {
            return 0;
        }
    }
    return 1;
}

static int may_return(const struct hr_engine *engine, const struct hr_request *until) {
    if (until != NULL) {
        return atomic_load(&until->status) != HORO_IN_PROGRESS;
    }
    if (atomic_load(&engine->driver.stop)) {
        return engine->driver.stage == HR_ENGINE_ENDED && atomic_load(&engine->submission.pending) == 0;
    }
    return !atomic_load(&engine->driver.serves_hosts) && !hr_engine_is_called(engine) &&
           atomic_load(&engine->submission.pending) == 0 && !hr_engine_is_nccl_busy(engine) && has_told_all(engine);
}

/*
 * Whether a caller may take over from the thread, now that nothing moves: where it serves other hosts. What makes the
 * thread drive (must_drive) must be over, or it would do so again at once, without the sleep that notices a death.
 */
static int may_yield(const struct hr_engine *engine, const struct hr_request *until) {
    const struct hr_driver *driver = &engine->driver;
    const int is_at_work = atomic_load(&engine->submission.pending) > 0 || hr_engine_is_nccl_busy(engine);
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
