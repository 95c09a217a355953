/*
 * Launches of NCCL take turns, in one order on all ranks (docs/adr/0044-nccl-does-what-all-ranks-agree-on.md). Each
 * batch has a number, and what a rank launches, it launches in the order of these.
 *
 *     ORDERING   this rank proposes a number, higher than any that it knows, and the ranks of the team agree on the
 *                highest proposal: an allreduce of eight bytes in host memory, in the team's lane
 *     WAITING    until no other batch that this rank has begun has a lower number, or may get one
 *     HELD       its turn has come: until the stream has room. It goes there in steps, and nothing else of this rank
 *                does in between
 *     OUT        its calls are being put onto the stream
 *
 * A batch that this rank begins later gets a higher number than any that this rank knows to be agreed on by then, so
 * nothing comes in front of what has been launched. A batch waits for lower numbers only, and so do those that it waits
 * for, on whatever rank: there is no circle.
 */
#include <stdio.h>

#include "base/op.h"
#include "engine/by_nccl.h"

enum {
    MARKS_AT_ONCE = 64, /* that a step makes the stream wait for */
    BATCH_WEIGHT = 1,   /* the mark behind it */
};

static struct hr_nccl_turn *turn_of(struct hr_backend *backend) {
    return (struct hr_nccl_turn *)backend;
}

static struct hr_nccl_team *team_of(const struct hr_nccl_turn *turn) {
    return hr_nccl_team_of(turn->engine, turn->lane);
}

/* ---- The order ---- */

/*
 * Of a batch of the world: whether there is no other team. All ranks answer alike, for the world's log says which teams
 * there are at this record. What was launched without a number comes before the first record that adds a team.
 */
static int is_alone(const struct hr_nccl_turn *turn) {
    for (int i = 1; i < HR_TEAMS_MAX; i++) {
        if (turn->engine->teams[i].is_used) {
            return 0;
        }
    }
    return 1;
}

/* Equal numbers go by the number of the team. */
static int is_first(const struct hr_nccl_turn *turn) {
    const struct hr_engine *engine = turn->engine;
    const struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    const int mine = turn->lane->team->number;
    for (int i = 0; i < engine->lane_count; i++) {
        const int other = engine->lanes[i]->team->number;
        const struct hr_nccl_turn *next = &by->teams[other].turn;
        if (other != mine && next->lane != NULL &&
            (next->number < turn->number || (next->number == turn->number && other < mine))) {
            return 0;
        }
    }
    return 1;
}

static int propose(struct hr_nccl_turn *turn) {
    struct hr_by_nccl *by = atomic_load(&turn->engine->by_nccl);
    turn->number = ++by->clock;
    turn->operand = (struct hr_operand){
        .input = &turn->number, .output = &turn->agreed, .bytes = sizeof turn->number, .dtype = HORO_INT64};
    turn->row_bytes = sizeof turn->number;
    const struct hr_work exchange = {
        .op = HORO_ALLREDUCE,
        .reduce_op = HORO_MAX,
        .prescale = 1.0,
        .postscale = 1.0,
        .operands = &turn->operand,
        .count = 1,
        .row_bytes = &turn->row_bytes,
    };
    return turn->lane->backend->ops->begin(turn->lane->backend, &exchange);
}

static void agree(struct hr_nccl_turn *turn) {
    struct hr_by_nccl *by = atomic_load(&turn->engine->by_nccl);
    turn->number = turn->agreed;
    by->clock = turn->number > by->clock ? turn->number : by->clock;
    turn->phase = HR_NCCL_WAITING;
}

/* ---- The work ---- */

static int await_marks(struct hr_nccl_turn *turn, struct hr_nccl_comm *comm) {
    int count = 0;
    while (turn->awaited < turn->count && count < MARKS_AT_ONCE) {
        HR_TRY(hr_mark_await(turn->requests[turn->awaited++]->mark, comm->stream, &comm->failure));
        count++;
    }
    hr_backlog_add(comm->backlog, count);
    return hr_backlog_mark(comm->backlog, &comm->failure);
}

/* For messages about what does not end on a GPU, where the requests may be gone. */
static void note_last(struct hr_nccl_team *team, const horo_request *call) {
    team->last_op = call->op;
    (void)snprintf(team->last_name, sizeof team->last_name, "%.*s", (int)sizeof team->last_name - 1, call->name);
}

/* Launches the turn; the engine looks at what has failed, and ends the group. */
static int launch(struct hr_nccl_turn *turn) {
    struct hr_nccl_team *team = team_of(turn);
    turn->phase = HR_NCCL_OUT;
    note_last(team, &turn->requests[turn->count - 1]->call);
    turn->engine->node->nccl_within_ns = HR_NCCL_LOOK_SOON_NS;
    return hr_nccl_backend_begin(team->backend, &turn->work);
}

/*
 * A step of what is put onto the stream, if there is room: HR_TASK_MOVED, HR_TASK_BLOCKED or a status. What the GPU
 * must do before there is has been launched, or is launched elsewhere by then: it has lower numbers.
 */
static int go_out(struct hr_nccl_turn *turn) {
    struct hr_nccl_comm *comm = &team_of(turn)->comm;
    turn->phase = HR_NCCL_HELD;
    if (comm->state == HR_NCCL_IDLE && !hr_backlog_has_room(comm->backlog)) {
        turn->engine->node->nccl_within_ns = HR_NCCL_LOOK_SOON_NS;
        return HR_TASK_BLOCKED;
    }
    team_of(turn)->has_moved |= hr_nccl_poll(comm); /* an earlier failure is told as itself */
    if (comm->state == HR_NCCL_IDLE && await_marks(turn, comm) != HORO_OK) {
        comm->state = HR_NCCL_BROKEN;
    }
    if (comm->state != HR_NCCL_IDLE || turn->awaited == turn->count) {
        HR_TRY(launch(turn));
    }
    return HR_TASK_MOVED;
}

static int turn_begin(struct hr_backend *backend, const struct hr_work *work) {
    struct hr_nccl_turn *turn = turn_of(backend);
    turn->work = *work;
    if (turn->lane->team->number == 0 && is_alone(turn)) {
        const int moved = go_out(turn);
        return moved < 0 ? moved : HORO_OK;
    }
    turn->phase = HR_NCCL_ORDERING;
    return propose(turn);
}

static int progress(struct hr_nccl_turn *turn) {
    if (turn->phase == HR_NCCL_ORDERING) {
        const int moved = turn->lane->backend->ops->progress(turn->lane->backend);
        if (moved != HR_TASK_DONE) {
            return moved;
        }
        agree(turn);
        return HR_TASK_MOVED;
    }
    if (turn->phase == HR_NCCL_WAITING) {
        return is_first(turn) ? go_out(turn) : HR_TASK_BLOCKED;
    }
    if (turn->phase == HR_NCCL_HELD) {
        return go_out(turn);
    }
    return hr_nccl_backend_progress(team_of(turn)->backend);
}

/* A GPU that goes on moves what waits for it, however long it takes until there is room. */
static int turn_progress(struct hr_backend *backend) {
    struct hr_nccl_turn *turn = turn_of(backend);
    const struct hr_backlog *backlog = &atomic_load(&turn->engine->by_nccl)->backlog;
    const uint64_t passed = backlog->passed;
    const int moved = progress(turn);
    return moved == HR_TASK_BLOCKED && backlog->passed != passed ? HR_TASK_MOVED : moved;
}

/* Cancels the turn; what is on the stream is aborted with all that is there, when the group ends. */
static void turn_cancel(struct hr_backend *backend) {
    struct hr_nccl_turn *turn = turn_of(backend);
    if (turn->phase == HR_NCCL_ORDERING) {
        turn->lane->backend->ops->cancel(turn->lane->backend);
        atomic_load(&turn->engine->by_nccl)->is_stranded |= turn->engine->node->mpi.ops != NULL;
    }
}

static int turn_is_ending(const struct hr_backend *backend) {
    (void)backend;
    return 0;
}

static void turn_destroy(struct hr_backend *backend) {
    (void)backend; /* a part of its team */
}

static const struct hr_backend_ops turn_ops = {
    .name = "nccl",
    .begin = turn_begin,
    .progress = turn_progress,
    .cancel = turn_cancel,
    .is_ending = turn_is_ending,
    .destroy = turn_destroy,
};

struct hr_backend *hr_engine_nccl_backend(struct hr_engine *engine, struct hr_request *const *requests, size_t count) {
    const struct hr_lane *lane = requests[0]->lane;
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    struct hr_nccl_team *team = hr_nccl_team_of(engine, lane);
    int can = team != NULL && team->backend != NULL && atomic_load(&team->stage) == HR_BY_NCCL_READY;
    for (size_t i = 0; i < count && can; i++) {
        can = requests[i]->mark != NULL;
    }
    if (!can) {
        return NULL;
    }
    struct hr_nccl_turn *turn = &team->turn;
    atomic_store(&by->is_busy, 1); /* in front of all that it puts on the stream */
    *turn = (struct hr_nccl_turn){.base = {.ops = &turn_ops}, .engine = engine, .lane = lane, .requests = requests,
                                  .count = count};
    return &turn->base;
}

static int is_in(const struct hr_lane *lane, enum hr_nccl_phase phase) {
    const struct hr_nccl_team *team = hr_nccl_team_of(lane->engine, lane);
    return team != NULL && team->turn.lane == lane && team->turn.phase == phase;
}

int hr_engine_orders_turn(const struct hr_lane *lane) {
    return is_in(lane, HR_NCCL_ORDERING);
}

int hr_engine_awaits_turn(const struct hr_lane *lane) {
    return is_in(lane, HR_NCCL_WAITING);
}

int hr_engine_awaits_gpu(const struct hr_lane *lane) {
    return (is_in(lane, HR_NCCL_HELD) || is_in(lane, HR_NCCL_OUT)) &&
           atomic_load(&lane->engine->by_nccl)->backlog.is_awaited;
}

int hr_engine_is_beside_nccl(const struct hr_lane *lane) {
    const struct hr_nccl_team *team = hr_nccl_team_of(lane->engine, lane);
    return team != NULL && team->turn.lane == NULL && hr_engine_is_nccl_busy(lane->engine);
}

/* ---- Its end ---- */

/* One mark serves all requests of the batch: thousands of events, one for each, would fill the stream. */
static int move_marks(struct hr_nccl_team *team, struct hr_request *const *requests, size_t count) {
    struct hr_mark *mark = requests[0]->mark;
    hr_backlog_add(team->comm.backlog, BATCH_WEIGHT);
    HR_TRY(hr_mark_move(mark, team->comm.stream, &team->comm.failure));
    for (size_t i = 1; i < count; i++) {
        hr_mark_keep(mark);
        hr_mark_drop(requests[i]->mark);
        requests[i]->mark = mark;
    }
    return HORO_OK;
}

int hr_engine_end_nccl_batch(struct hr_engine *engine, struct hr_request *const *requests, size_t count) {
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    struct hr_nccl_team *team = hr_nccl_team_of(engine, requests[0]->lane);
    struct hr_device_visit visit;
    int status = hr_device_enter(team->comm.device, &visit, &team->comm.failure);
    if (status == HORO_OK) {
        status = move_marks(team, requests, count);
        hr_device_leave(team->comm.device, &visit);
    }
    if (status != HORO_OK) {
        team->comm.state = HR_NCCL_BROKEN; /* which ends the group: the driver's next turn looks at it */
    } else {
        team->turn.lane = NULL;
    }
    atomic_store(&by->is_busy, 1);
    return status == HORO_OK;
}
