#include <stdlib.h>

#include "backend/carried.h"
#include "base/traits.h"
#include "engine/group/lane.h"

/* ---- The values that operations run with where they may change; see engine.c ---- */

enum { SEGMENT_UNIT = 4096, PIECE_MIN = 4096, CYCLE_MAX_US = 1000000, OVERLAP_LAST = 2 };

int hr_lane_fits(const struct hr_lane *lane, const uint64_t *values) {
    const uint64_t segment = values[HORO_KNOB_SEGMENT];
    const uint64_t sockets = values[HORO_KNOB_SOCKETS];
    for (int k = 0; k < HORO_KNOB_COUNT; k++) {
        if (values[k] > HORO_KNOB_LIMIT) {
            return 0;
        }
    }
    return segment > 0 && segment % SEGMENT_UNIT == 0 && segment <= lane->node->arena.segment_bytes && sockets > 0 &&
           sockets <= (uint64_t)lane->node->sockets_per_peer && values[HORO_KNOB_PIECE] >= PIECE_MIN &&
           values[HORO_KNOB_CARRIED] <= HR_CARRIED_MAX && values[HORO_KNOB_CYCLE] <= CYCLE_MAX_US &&
           values[HORO_KNOB_OVERLAP] <= OVERLAP_LAST;
}

int hr_lane_tune(struct hr_lane *lane, const uint64_t *values) {
    struct hr_team *team = lane->team;
    struct hr_transport *transport = team->transport;
    if (!hr_lane_fits(lane, values)) {
        return HORO_ERR_INTERNAL;
    }
    team->tuning.segment = (size_t)values[HORO_KNOB_SEGMENT];
    team->tuning.piece = (size_t)values[HORO_KNOB_PIECE];
    team->tuning.doubling = (size_t)values[HORO_KNOB_DOUBLING];
    team->tuning.carried = (size_t)values[HORO_KNOB_CARRIED];
    if (transport != NULL && transport->ops->use_sockets != NULL) {
        transport->ops->use_sockets(transport, (int)values[HORO_KNOB_SOCKETS]);
    }
    if (lane->is_leader) {
        lane->leader.agree.config.fusion_bytes = values[HORO_KNOB_FUSION];
        lane->leader.cycle_ns = (int64_t)values[HORO_KNOB_CYCLE] * 1000;
    }
    return HORO_OK;
}

void hr_lane_destroy(struct hr_lane *lane) {
    hr_team_close_links(lane->team); /* which lets go of posted receives before their memory is freed */
    if (lane->is_leader) {
        hr_leader_fini(&lane->leader);
    }
    hr_announcer_fini(&lane->announcer);
    hr_buffer_fini(&lane->round.out);
    hr_buffer_fini(&lane->round.rows);
    free((void *)lane->executor.batch.requests);
    free(lane->executor.batch.operands);
    hr_buffer_fini(&lane->executor.log_in);
    hr_map_fini(&lane->port.names);
    hr_host_backend_destroy(lane->backend);
    hr_team_destroy(lane->team);
    free(lane);
}

int hr_lane_create(const struct hr_lane_setup *setup, struct hr_team *team, struct hr_lane **lane,
                   struct hr_error *error) {
    struct hr_lane *created = calloc(1, sizeof *created);
    struct hr_backend *backend = created == NULL ? NULL : hr_host_backend_create(team);
    if (backend == NULL) {
        (void)hr_fail(error, HORO_ERR_RESOURCE, "out of memory for a process set of %d ranks", team->size);
        free(created);
        hr_team_destroy(team);
        return HORO_ERR_RESOURCE;
    }
    *created = (struct hr_lane){
        .engine = setup->engine, .node = team->node, .team = team, .backend = backend,
        .is_leader = team->local_rank == 0, .round.team = team, .executor.ops = setup->executor_ops,
        .may_count = setup->may_count && hr_round_is_for(team), .lane_count = setup->lane_count,
        .port = {.requests = setup->requests, .team = team, .lane = created},
    };
    int status = hr_announcer_init(&created->announcer, team, setup->cache_capacity);
    if (status != HORO_OK) {
        (void)hr_fail(error, status, "out of memory for a cache of %u tensors", setup->cache_capacity);
    } else if (created->is_leader) {
        status = hr_leader_init(&created->leader, &setup->leader, &created->announcer, &created->round, created, error);
    }
    if (status != HORO_OK) {
        hr_lane_destroy(created);
        return status;
    }
    *lane = created;
    return HORO_OK;
}

int hr_lane_open(struct hr_lane *lane, int32_t id, const uint64_t *values, struct hr_error *error) {
    struct hr_node *node = lane->node;
    struct hr_team *team = lane->team;
    team->id = id;
    team->number = hr_team_number(id);
    HR_TRY(hr_partition_map(&node->arena, team->number, &team->partition, error));
    if (team->transport != NULL && hr_node_add_transport(node, team->transport) != HORO_OK) {
        return hr_fail(error, HORO_ERR_RESOURCE, "out of memory for links to %d hosts", team->host_count);
    }
    hr_partition_enter(&node->arena, team->number);
    if (values != NULL && hr_lane_tune(lane, values) != HORO_OK) {
        return hr_fail(error, HORO_ERR_INTERNAL, "its ranks cannot run with what all ranks run with");
    }
    return HORO_OK;
}

void hr_lane_close(struct hr_lane *lane) {
    if (lane->team->transport != NULL) {
        hr_node_drop_transport(lane->node, lane->team->transport);
    }
    if (hr_partition_leave(&lane->node->arena, lane->team->number, &lane->team->partition)) {
        hr_node_wake_all(lane->node); /* one that adds a team of this number may have waited for it */
    }
}

/* ---- Announcing, and rounds ---- */

/* From how many bytes on what is announced goes to the leader before all of it is. */
enum { FLUSH_BYTES = 1024 };

static int may_count(const struct hr_lane *lane, const struct hr_request *request) {
    const horo_request *call = &request->call;
    const struct hr_executor *executor = &lane->executor;
    return lane->may_count && (call->flags & HORO_SUBMIT_SYNC) != 0 &&
           (hr_op_is(call->op, HR_OP_WITH_TENSORS) || call->op == HORO_BARRIER) && call->reduce_op != HORO_ADASUM &&
           call->device == 0 && !hr_recorder_is_traced(&lane->node->recorder) &&
           /* nothing but the request has been announced and not been agreed on, and all of the log is executed */
           atomic_load(&lane->port.pending) == 1 && executor->state == HR_EXECUTION_IDLE &&
           hr_buffer_size(&executor->log_in) == 0 && !executor->has_executed_leave &&
           hr_announcer_is_idle(&lane->announcer) && !lane->has_asked_to_leave &&
           (!lane->is_leader || hr_leader_is_idle(&lane->leader)) &&
           /* partner: hr_ring_write */
           atomic_load(&lane->team->partition.header->log.written) == executor->log_executed &&
           !hr_node_is_contended(lane->node, request->submit_ns) &&
           hr_round_may_enter(&lane->round, executor->log_executed, request->announced_id);
}

/* Counts this rank in: 1, or 0 where the request is to be announced. */
static int count_in(struct hr_lane *lane, struct hr_request *request) {
    const int op = request->call.op;
    if (!may_count(lane, request)) {
        return 0;
    }
    /* puts what the other ranks read in the round where they do, if that is possible */
    const int is_ahead = hr_op_is(op, HR_OP_BEGUN_AHEAD) && hr_batch_begin_ahead(lane, request);
    const int is_prepared = hr_op_is(op, HR_OP_TELLING_ROWS) ? hr_round_show_rows(&lane->round, request, is_ahead)
                                                             : is_ahead || !hr_op_is(op, HR_OP_BEGUN_AHEAD);
    if (!is_prepared || !hr_round_enter(&lane->round, request, lane->executor.log_executed)) {
        hr_batch_take_back(lane, request);
        return 0;
    }
    hr_part_expect(&lane->part, request->submit_ns + HR_ROUND_LIMIT_NS);
    return 1;
}

/* Small data goes with it where the request is alone. */
static int announce_id(struct hr_lane *lane, const struct hr_request *request) {
    const int is_alone = atomic_load(&lane->port.pending) == 1;
    const size_t bytes = is_alone ? hr_carried_bytes(lane->team, &request->call) : 0;
    return hr_announcer_put_id(&lane->announcer, request, hr_carried_pays(lane->team, bytes) ? bytes : 0);
}

int hr_lane_announce(struct hr_lane *lane, struct hr_request *request) {
    if (!hr_announcer_knows(&lane->announcer, request)) {
        HR_TRY(hr_announcer_put_full(&lane->announcer, request));
    } else {
        atomic_fetch_add_explicit(&lane->node->counts.cache_hits, 1, memory_order_relaxed);
        HR_TRY(count_in(lane, request) ? HORO_OK : announce_id(lane, request));
    }
    if (lane->is_leader || hr_buffer_size(&lane->announcer.out) < FLUSH_BYTES) {
        return HORO_OK;
    }
    HR_TRY(hr_announcer_flush(&lane->announcer));
    return HORO_OK;
}

/* The round has been closed, so its request is announced. */
static int announce_counted(struct hr_lane *lane) {
    struct hr_request *request = hr_round_leave(&lane->round, 0);
    hr_batch_take_back(lane, request);
    return announce_id(lane, request);
}

int hr_lane_end_round(struct hr_lane *lane) {
    const int is_closed = lane->round.request != NULL && hr_round_close_mine(&lane->round) == HR_ROUND_CLOSED;
    return is_closed ? announce_counted(lane) : HORO_OK;
}

/* They execute the batch when all are counted in. */
static int turn_round(struct hr_lane *lane) {
    const enum hr_round_end end = hr_round_look(&lane->round);
    if (end == HR_ROUND_OPEN) {
        return HR_STILL;
    }
    if (end == HR_ROUND_CLOSED) {
        HR_TRY(announce_counted(lane));
        return HR_MOVED;
    }
    struct hr_wire_rows rows = {0};
    if (hr_op_is(lane->round.request->call.op, HR_OP_TELLING_ROWS) && !hr_round_is_ahead(&lane->round)) {
        hr_batch_take_back(lane, lane->round.request);
        HR_TRY(hr_round_collect_rows(&lane->round, &rows));
    }
    if (lane->is_leader && hr_round_take_up(&lane->round)) {
        hr_agree_skip_call(&lane->leader.agree);
    }
    struct hr_request *request = hr_round_leave(&lane->round, 1);
    atomic_fetch_add_explicit(&lane->node->counts.counted, 1, memory_order_relaxed);
    if (lane->is_leader) {
        hr_agree_note_use(&lane->leader.agree, request->announced_id);
    }
    HR_TRY(hr_lane_execute_lone(lane, request, rows));
    return HR_MOVED;
}

/* ---- The lane as a part ---- */

enum {
    STAGES_PER_TURN = 3, /* at most, as long as nothing has to be waited for: small ones take less than a whole turn */
    LOOKS_PER_TURN = 2,  /* at a task that waits for a word in memory, as it does on one host most of the time */
};

static int execute(struct hr_lane *lane) {
    int moved = HR_STILL;
    int looks = lane->team->transport == NULL ? LOOKS_PER_TURN : 1;
    for (int stages = 0; stages < STAGES_PER_TURN && looks > 0;) {
        const int executed = lane->round.request != NULL ? turn_round(lane) : hr_lane_execute(lane);
        HR_TRY(executed);
        if (executed == HR_STILL) {
            const enum hr_execution state = lane->executor.state;
            const int is_at_task = state == HR_EXECUTION_RUNNING || state == HR_EXECUTION_CHANGING;
            looks = moved || !is_at_task ? 0 : looks - 1;
            continue;
        }
        moved = HR_MOVED;
        stages++;
        if (lane->executor.state == HR_EXECUTION_IDLE) {
            break; /* a caller may have got what it waits for */
        }
        (void)hr_node_progress(lane->node); /* the links go on between two stages */
    }
    return moved;
}

/*
 * A batch that all are counted in for comes before any record, and so is executed before the leader agrees on anything.
 */
static int lead(struct hr_lane *lane) {
    struct hr_leader *leader = &lane->leader;
    const int collected = hr_leader_collect(leader);
    HR_TRY(collected);
    /* before a sleep it does not rely on that */
    if (!leader->has_news && !lane->node->looks_at_all && !HR_CHECK_QUIET) {
        return collected;
    }
    if (lane->team->host_count == 1 && !hr_leader_is_idle(leader)) {
        HR_TRY(hr_lane_end_round(lane));
        if (lane->round.request != NULL) {
            return collected;
        }
        hr_round_close(&lane->round);
    }
    const int agreed = hr_leader_agree(leader, lane->executor.place);
    HR_TRY(agreed);
    if (leader->batch_due_ns != HR_NEVER) {
        hr_part_expect(&lane->part, leader->batch_due_ns);
    }
    return collected | agreed;
}

static int turn(struct hr_part *part) {
    struct hr_lane *lane = part->owner;
    const int led = lane->is_leader ? lead(lane) : hr_announcer_flush(&lane->announcer);
    HR_TRY(led);
    const int executed = execute(lane);
    HR_TRY(executed);
    /* whether this rank has nothing under way in the team; others may, and then a message comes on a link */
    const int quiet = *lane->lane_count > 1 && atomic_load(&lane->port.pending) == 0 &&
                      lane->executor.state == HR_EXECUTION_IDLE && hr_announcer_is_idle(&lane->announcer) &&
                      (!lane->is_leader || (lane->leader.agree.active == 0 && !hr_leader_sends_left(&lane->leader)));
    lane->part.is_quiet = quiet && lane->team->number != 0;
    if (lane->team->transport != NULL) {
        lane->team->transport->is_quiet = quiet;
    }
    return led | executed;
}

/* Times that have come are a matter of the next turn. */
static int64_t due(struct hr_part *part, int64_t now_ns) {
    struct hr_lane *lane = part->owner;
    const int64_t times_ns[] = {
        hr_round_due_ns(&lane->round, now_ns),
        lane->is_leader ? lane->leader.batch_due_ns : HR_NEVER,
        lane->executor.state == HR_EXECUTION_LOST ? lane->executor.confirm_ns : HR_NEVER,
    };
    int64_t next_ns = HR_NEVER;
    for (size_t i = 0; i < sizeof times_ns / sizeof *times_ns; i++) {
        next_ns = times_ns[i] > now_ns && times_ns[i] < next_ns ? times_ns[i] : next_ns;
    }
    return next_ns;
}

static int needs(const struct hr_part *part) {
    const struct hr_lane *lane = part->owner;
    return !hr_announcer_is_idle(&lane->announcer) ||
           (lane->leader.link_count > 0 && hr_leader_sends_left(&lane->leader));
}

static void end(struct hr_part *part, int has_failed) {
    struct hr_lane *lane = part->owner;
    (void)has_failed;
    hr_executor_cancel(lane);
    if (lane->round.request != NULL) {
        hr_batch_take_back(lane, hr_round_leave(&lane->round, 0));
    }
    hr_announcer_drop(&lane->announcer, NULL); /* links may still bring messages about these requests */
}

/* Of a leader: whether members have announced what others have not. */
static int expects(const struct hr_part *part) {
    const struct hr_lane *lane = part->owner;
    return lane->is_leader && lane->leader.agree.active > 0;
}

static uint64_t moves(const struct hr_part *part) {
    const struct hr_lane *lane = part->owner;
    return lane->executor.moves + lane->team->pieces;
}

const struct hr_part_ops hr_part_lane = {
    .rank = HR_PART_LANE, .turn = turn, .due = due, .needs = needs, .expects = expects, .moves = moves, .end = end};
