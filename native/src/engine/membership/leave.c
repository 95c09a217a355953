/*
 * Leaving, and the end of the group: the first part of the engine. It asks for the LEAVE record when this rank shuts
 * down, and has all turns from CLOSING on; the stages are in engine.h.
 */
#include <string.h>

#include "engine/gpu/gpu.h"
#include "engine/membership/membership.h"

enum {
    FLUSH_MS = 500,       /* telling other hosts of the end is worth no longer wait */
    LEAVE_GRACE_MS = 2000, /* without anything moving: what others do not do may hold a shutdown up so long */
    CLOSE_GRACE_MS = 10000, /* the same once the log is closed: what moves on other hosts is not seen here; of sends */
};

static int is_aborted(const struct hr_engine *engine) {
    return hr_arena_aborted(&engine->node->arena).code != 0;
}

/* ---- The grace: the time that a rank waits for others in which nothing moves ---- */

static uint64_t count_moves(const struct hr_engine *engine) {
    const struct hr_node *node = engine->node;
    uint64_t moves = hr_drive_moves(&engine->drive);
    for (int i = 0; i < node->local_size; i++) {
        if (i != node->local_rank) {
            /* partner: begin_wait */
            moves += atomic_load_explicit(&node->arena.blocks[i].moves, memory_order_relaxed);
        }
    }
    return moves;
}

static void begin_grace(struct hr_engine *engine, int64_t now_ns) {
    struct hr_leaving *leaving = &engine->leaving;
    const int64_t grace_ms = engine->drive.stage == HR_STAGE_CLOSING ? CLOSE_GRACE_MS : LEAVE_GRACE_MS;
    leaving->grace_ns = now_ns + grace_ms * 1000000;
    leaving->moves = count_moves(engine);
    hr_part_expect(&leaving->part, leaving->grace_ns);
}

/* If something has moved, the grace begins anew. */
static int64_t due(struct hr_part *part, int64_t now_ns) {
    struct hr_engine *engine = part->owner;
    struct hr_leaving *leaving = &engine->leaving;
    const enum hr_stage stage = engine->drive.stage;
    const int waits = leaving->grace_ns != 0 && stage <= HR_STAGE_CLOSING && !is_aborted(engine);
    if (waits && now_ns >= leaving->grace_ns) {
        const int is_over = leaving->moves == count_moves(engine);
        begin_grace(engine, now_ns);
        if (is_over) {
            leaving->is_late = engine->lanes[0]->executor.has_executed_leave && stage == HR_STAGE_RUNNING;
        }
        /* in CLOSING too: with this leader others would lose the way by which they hear of a death */
        const int ends = is_over && atomic_load(&engine->drive.stop) && !leaving->is_late;
        if (ends && leaving->words[0] != '\0') {
            hr_node_end(engine->node, leaving->status, "%s", leaving->words);
        } else if (ends) {
            hr_node_abort(engine->node, leaving->status, engine->node->rank, HR_REASON_LEFT);
        }
    }
    int64_t next_ns = waits ? leaving->grace_ns : HR_NEVER;
    const int flushes = stage == HR_STAGE_CLOSING || stage == HR_STAGE_ENDING;
    next_ns = flushes && leaving->flush_ns > now_ns && leaving->flush_ns < next_ns ? leaving->flush_ns : next_ns;
    return leaving->mail_ns > now_ns && leaving->mail_ns < next_ns ? leaving->mail_ns : next_ns;
}

/* ---- RUNNING ---- */

/* Behind all that has been announced in the world. */
static int ask_to_leave(struct hr_engine *engine) {
    struct hr_lane *world = engine->lanes[0];
    const char *words = engine->leaving.words;
    HR_TRY(hr_lane_end_round(world));
    HR_TRY(hr_announcer_put(&world->announcer, &(struct hr_wire_message){.type = HR_WIRE_LEAVE,
                                                                         .rank = engine->node->rank,
                                                                         .status = engine->leaving.status,
                                                                         .text = {words, strlen(words)}}));
    world->has_asked_to_leave = 1;
    if (!world->is_leader) {
        /* The leader may be parked: its program computes, and nobody there waits for anything. */
        atomic_store(&world->node->arena.header->wants_leave, 1); /* partner: needs */
        HR_TRY(hr_announcer_flush(&world->announcer));
        hr_node_call(world->node, 0);
    }
    begin_grace(engine, hr_now_ns());
    return HR_MOVED;
}

/* CLOSING or ENDING: from now on every message counts. */
static void begin_stage(struct hr_engine *engine, enum hr_stage stage) {
    for (int i = 0; i < engine->lane_count; i++) {
        if (engine->lanes[i]->team->transport != NULL) {
            engine->lanes[i]->team->transport->is_quiet = 0;
        }
    }
    engine->drive.stage = stage;
    engine->leaving.flush_ns = hr_now_ns() + FLUSH_MS * 1000000ll;
    hr_part_expect(&engine->leaving.part, engine->leaving.flush_ns);
}

/*
 * Ranks that this one has received from are told so before: the record may overtake what waits on its way. And what it
 * has sent may still be received, unless it fails: then nobody is to wait for that.
 */
static int has_mail_left(struct hr_engine *engine) {
    struct hr_leaving *leaving = &engine->leaving;
    const int has_failed = leaving->status == HORO_ERR_PEER_LOST;
    if (!hr_pairs_has_left(&engine->pairs, !has_failed)) {
        return 0;
    }
    if (leaving->mail_ns == 0) {
        leaving->mail_ns = hr_now_ns() + (has_failed ? LEAVE_GRACE_MS : CLOSE_GRACE_MS) * 1000000ll;
        hr_part_expect(&leaving->part, leaving->mail_ns);
    }
    return hr_now_ns() < leaving->mail_ns;
}

static int turn_running(struct hr_engine *engine) {
    const struct hr_lane *world = engine->lanes[0];
    /* requests from before the call are announced before, by a part behind this one */
    if (atomic_load(&engine->drive.stop) && !world->has_asked_to_leave && atomic_load(&engine->requests.queued) == 0 &&
        !has_mail_left(engine)) {
        return ask_to_leave(engine);
    }
    if (!world->executor.has_executed_leave) {
        return HR_STILL;
    }
    if (engine->leaving.grace_ns == 0) {
        begin_grace(engine, hr_now_ns());
    }
    int may_close = 1; /* operations of other teams are over, or not waited for any longer */
    for (int i = 1; i < engine->lane_count && !engine->leaving.is_late; i++) {
        const struct hr_lane *lane = engine->lanes[i];
        const struct hr_executor *executor = &lane->executor;
        /* partner: hr_ring_write */
        const uint64_t written = atomic_load(&lane->team->partition.header->log.written);
        may_close &= (executor->state == HR_EXECUTION_IDLE || executor->state == HR_EXECUTION_LOST) &&
                     lane->round.request == NULL && hr_buffer_size(&lane->leader.log_out) == 0 &&
                     written == executor->log_position && hr_buffer_size(&executor->log_in) == 0;
    }
    if (!may_close) {
        return HR_STILL;
    }
    for (int i = 1; i < engine->lane_count; i++) {
        hr_part_lane.end(&engine->lanes[i]->part, 0); /* ends operations that are not done by now */
    }
    begin_stage(engine, HR_STAGE_CLOSING);
    begin_grace(engine, hr_now_ns());
    return HR_MOVED;
}

/* ---- CLOSING, ENDING and ENDED ---- */

int hr_leave_has_failed(const struct hr_engine *engine) {
    return is_aborted(engine) || hr_end_find(engine->node).code == HORO_ERR_PEER_LOST;
}

static int begin_ending(struct hr_engine *engine) {
    hr_end_note(engine->node);
    /* one answer for all parts: another rank may tell of a loss meanwhile */
    const int failed = hr_leave_has_failed(engine);
    for (struct hr_part *part = engine->drive.parts; part != NULL; part = part->next) {
        if (part->ops->end != NULL) {
            part->ops->end(part, failed);
        }
    }
    begin_stage(engine, HR_STAGE_ENDING);
    return HR_MOVED;
}

/*
 * The callers here must not hear of the end before the neighbours: they may end at once, which others must not take for
 * the cause.
 */
static int turn_closing(struct hr_engine *engine) {
    int moved = HR_STILL;
    int sends_left = 0;
    for (int i = 0; i < engine->lane_count; i++) {
        struct hr_lane *lane = engine->lanes[i];
        const int led = lane->is_leader ? hr_leader_progress_links(&lane->leader, 0) : HR_STILL;
        HR_TRY(led);
        moved |= led;
        sends_left |= lane->is_leader && hr_leader_sends_left(&lane->leader);
    }
    if ((!sends_left || hr_now_ns() >= engine->leaving.flush_ns) && hr_requests_fail_all(&engine->requests)) {
        return HR_MOVED;
    }
    const struct hr_lane *world = engine->lanes[0];
    return world->is_leader && !hr_leader_is_done(&world->leader) ? moved : begin_ending(engine);
}

/* As in CLOSING. */
static int turn_ending(struct hr_engine *engine) {
    int flushed = 1;
    for (int i = 0; i < engine->lane_count && atomic_load(&engine->drive.serves_hosts); i++) {
        struct hr_lane *lane = engine->lanes[i];
        flushed &= !lane->is_leader || hr_leader_flush_links(&lane->leader) != 0;
    }
    /* tensors of failed requests may be freed by the program: first, the GPU lets go of them */
    const int is_quiet = !hr_leave_has_failed(engine) || hr_gpu_is_quiet(engine);
    if ((!flushed || !is_quiet) && hr_now_ns() < engine->leaving.flush_ns) {
        return HR_STILL;
    }
    atomic_store(&engine->drive.serves_hosts, 0);
    engine->drive.stage = HR_STAGE_ENDED;
    return HR_MOVED;
}

static int turn(struct hr_part *part) {
    struct hr_engine *engine = part->owner;
    struct hr_arena *arena = &engine->node->arena;
    const enum hr_stage stage = engine->drive.stage;
    const uint32_t roll_call = atomic_load(&arena->header->roll_call); /* partner: due, in late.c */
    struct hr_arena_block *own = &arena->blocks[arena->local_rank];
    if (atomic_load_explicit(&own->present, memory_order_relaxed) != roll_call) {
        atomic_store(&own->present, roll_call);
    }
    /* before leaving: a LEAVE would overtake the reason of a rank that has ended the group itself */
    if (stage <= HR_STAGE_CLOSING && is_aborted(engine)) {
        return begin_ending(engine);
    }
    switch (stage) {
    case HR_STAGE_RUNNING: return turn_running(engine);
    case HR_STAGE_CLOSING: return turn_closing(engine);
    case HR_STAGE_ENDING: return turn_ending(engine);
    default:
        if (atomic_load(&engine->drive.stop) && atomic_load(&own->state) != HR_MEMBER_LEFT &&
            (is_aborted(engine) || !has_mail_left(engine))) {
            /* before a send fails here, whose memory nobody may read any more: partner: hr_moves_read_some */
            atomic_store(&own->state, HR_MEMBER_LEFT);
            return HR_MOVED;
        }
        return hr_requests_fail_all(&engine->requests);
    }
}

/* Whether a rank of this host wants to leave: its leader may compute. */
static int needs(const struct hr_part *part) {
    const struct hr_engine *engine = part->owner;
    /* partner: ask_to_leave */
    return engine->drive.stage == HR_STAGE_RUNNING && engine->lanes[0]->is_leader &&
           atomic_load(&engine->node->arena.header->wants_leave) != 0;
}

const struct hr_part_ops hr_part_end = {.rank = HR_PART_END, .turn = turn, .due = due, .needs = needs, .is_called = 1};
