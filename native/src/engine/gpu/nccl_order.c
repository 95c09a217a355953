/*
 * Batches that NCCL does, from their record to the stream. Kernels of two communicators that are launched in different
 * orders on two ranks may wait for one another for ever. So each batch has a number, and what a rank launches, it
 * launches in the order of these.
 *
 *     ORDERING   this rank proposes a number, higher than any that it knows, and the ranks of the team agree on the
 *                highest proposal: an allreduce of eight bytes in host memory, in the team's lane
 *     WAITING    until no other batch that this rank has begun has a lower number, or may get one
 *     HELD       its turn has come: until the stream has room
 *     OUT        its calls are being put onto the stream
 *
 * A batch that this rank begins later gets a higher number than any that this rank knows to be agreed on by then, so
 * nothing comes in front of what has been launched. A batch waits for lower numbers only, and so do those that it waits
 * for, on whatever rank: there is no circle.
 *
 * A driver makes a thread wait that puts something on a stream with about a thousand pieces of work that have not run;
 * behind a kernel that waits for a rank that is gone it would wait for ever. So what is in flight has a bound.
 */
#include "engine/gpu/nccl.h"

enum {
    MOST = 512,            /* pieces on the stream */
    LAUNCH_WEIGHT = 8,     /* the kernel, what NCCL orders it by, the fence and the mark */
    CALLS_PER_LAUNCH = 32, /* NCCL takes more of them into one kernel */
};

static struct hr_gpu_team *team_of(struct hr_backend *backend) {
    return (struct hr_gpu_team *)backend;
}

static struct hr_on_gpu *gpu_of(const struct hr_gpu_team *team) {
    return atomic_load(&team->engine->on_gpu);
}

void hr_gpu_become_busy(struct hr_engine *engine) {
    struct hr_on_gpu *gpu = atomic_load(&engine->on_gpu);
    if (engine->gpu.ops == NULL) {
        hr_drive_lock(&engine->drive);
        hr_drive_add(&engine->drive, &engine->gpu, &hr_part_gpu, engine);
        hr_drive_unlock(&engine->drive);
    }
    atomic_store(&gpu->is_busy, 1);
}

/* ---- The order ---- */

/* Equal numbers go by the number of the team. */
static int is_first(const struct hr_gpu_team *team) {
    const int64_t mine = team->batch.number;
    for (const struct hr_gpu_team *other = atomic_load(&gpu_of(team)->teams); other != NULL; other = other->next) {
        const int64_t number = other->batch.number;
        if (other != team && other->batch.phase != HR_NCCL_NO_BATCH &&
            (number < mine || (number == mine && other->lane->team->number < team->lane->team->number))) {
            return 0;
        }
    }
    return 1;
}

static int agree(struct hr_gpu_team *team) {
    const int moved = team->lane->backend->ops->progress(team->lane->backend);
    if (moved != HR_DONE) {
        return moved;
    }
    struct hr_on_gpu *gpu = gpu_of(team);
    team->batch.number = team->batch.agreed;
    gpu->clock = team->batch.number > gpu->clock ? team->batch.number : gpu->clock;
    team->batch.phase = HR_NCCL_WAITING;
    return HR_MOVED;
}

/* ---- Room on the stream ---- */

static void pop_mark(struct hr_nccl_in_flight *in_flight) {
    const unsigned oldest = in_flight->first++ % HR_NCCL_BATCHES_MAX;
    in_flight->count--;
    in_flight->weight -= in_flight->weights[oldest];
    hr_mark_drop(in_flight->marks[oldest]);
}

void hr_nccl_drop_marks(struct hr_nccl_in_flight *in_flight) {
    while (in_flight->count > 0) {
        pop_mark(in_flight);
    }
}

/* The marks of a batch are in front of it, so they are reached without it; what is in flight ends without it, too. */
static int has_room(struct hr_gpu_team *team) {
    struct hr_nccl_batch *batch = &team->batch;
    struct hr_nccl_in_flight *in_flight = &gpu_of(team)->in_flight;
    while (in_flight->count > 0 && hr_mark_is_reached(in_flight->marks[in_flight->first % HR_NCCL_BATCHES_MAX])) {
        pop_mark(in_flight);
    }
    int awaited = 0; /* marks that the stream must wait for */
    for (size_t i = 0; i < batch->count; i++) {
        awaited += !hr_mark_is_reached(batch->requests[i]->cargo.data);
    }
    const size_t per_tensor = batch->work.op == HORO_REDUCESCATTER ? (size_t)team->lane->team->size : 1;
    const size_t calls = batch->work.count * per_tensor;
    batch->weight = awaited + LAUNCH_WEIGHT + (int)(calls / CALLS_PER_LAUNCH);
    return in_flight->count == 0 ? awaited <= MOST
                                 : in_flight->count < HR_NCCL_BATCHES_MAX && in_flight->weight + batch->weight <= MOST;
}

/* ---- The work ---- */

/* Puts the batch on the stream, if there is room. What fails there is the communicator's, which ends the group. */
static int go_out(struct hr_gpu_team *team) {
    struct hr_nccl_comm *comm = &team->comm;
    struct hr_nccl_in_flight *in_flight = &gpu_of(team)->in_flight;
    const unsigned before = in_flight->first;
    team->engine->node->poll_within_ns = HR_NCCL_LOOK_SOON_NS;
    team->has_moved |= hr_nccl_poll(comm); /* an earlier failure is told as itself */
    if (comm->state == HR_NCCL_IDLE && !has_room(team)) {
        team->batch.phase = HR_NCCL_HELD;
        return in_flight->first != before ? HR_MOVED : HR_STILL; /* a GPU that goes on will have room */
    }
    team->batch.phase = HR_NCCL_OUT;
    if (comm->state != HR_NCCL_IDLE) {
        return HR_MOVED;
    }
    for (size_t i = 0; i < team->batch.count; i++) {
        const struct hr_mark *mark = team->batch.requests[i]->cargo.data;
        if (!hr_mark_is_reached(mark) && hr_mark_await(mark, comm->stream, &comm->failure) != HORO_OK) {
            comm->state = HR_NCCL_BROKEN;
            return HR_MOVED;
        }
    }
    hr_nccl_launch(comm, team->lane->team, &team->batch.work);
    return HR_MOVED;
}

static int begin(struct hr_backend *backend, const struct hr_work *work) {
    struct hr_gpu_team *team = team_of(backend);
    const struct hr_batch *whole = &team->lane->executor.batch;
    struct hr_nccl_batch *batch = &team->batch;
    hr_gpu_become_busy(team->engine); /* in front of all that it puts on the stream */
    *batch = (struct hr_nccl_batch){.requests = whole->requests, .count = whole->request_count, .work = *work};
    /*
     * All ranks answer alike whether there is another team, for the world's log says which there are at this record.
     * What was launched without a number comes before the first record that adds a team.
     */
    int is_alone = team->lane->team->number == 0;
    for (int i = 1; i < HR_TEAMS_MAX; i++) {
        is_alone &= !team->engine->requests.places[i].is_used;
    }
    if (is_alone) {
        const int moved = go_out(team);
        return moved < 0 ? moved : HORO_OK;
    }
    batch->number = ++gpu_of(team)->clock;
    batch->operand = (struct hr_operand){
        .input = &batch->number, .output = &batch->agreed, .bytes = sizeof batch->number, .dtype = HORO_INT64};
    const struct hr_work exchange = {.op = HORO_ALLREDUCE, .reduce_op = HORO_MAX, .prescale = 1.0, .postscale = 1.0,
                                     .operands = &batch->operand, .count = 1};
    batch->phase = HR_NCCL_ORDERING;
    return team->lane->backend->ops->begin(team->lane->backend, &exchange);
}

/* It is all on the stream: one mark is behind it, for all its requests. One event for each would fill the stream. */
static int end_batch(struct hr_gpu_team *team) {
    const struct hr_nccl_batch *batch = &team->batch;
    struct hr_nccl_in_flight *in_flight = &gpu_of(team)->in_flight;
    struct hr_mark *mark = batch->requests[0]->cargo.data;
    struct hr_device_visit visit;
    hr_gpu_become_busy(team->engine);
    int status = hr_device_enter(team->comm.device, &visit, &team->comm.failure);
    if (status == HORO_OK) {
        status = hr_mark_move(mark, team->comm.stream, &team->comm.failure);
        hr_device_leave(team->comm.device, &visit);
    }
    if (status != HORO_OK) {
        team->comm.state = HR_NCCL_BROKEN; /* which ends the group: the driver's next turn looks at it */
        return HR_STILL;
    }
    hr_mark_keep(mark);
    const unsigned last = (in_flight->first + in_flight->count++) % HR_NCCL_BATCHES_MAX;
    in_flight->marks[last] = mark;
    in_flight->weights[last] = batch->weight;
    in_flight->weight += batch->weight;
    for (size_t i = 1; i < batch->count; i++) {
        hr_mark_keep(mark);
        hr_mark_drop(batch->requests[i]->cargo.data);
        batch->requests[i]->cargo.data = mark;
    }
    team->batch.phase = HR_NCCL_NO_BATCH;
    return HR_DONE;
}

static int progress(struct hr_backend *backend) {
    struct hr_gpu_team *team = team_of(backend);
    switch (team->batch.phase) {
    case HR_NCCL_ORDERING: return agree(team);
    case HR_NCCL_WAITING: return is_first(team) ? go_out(team) : HR_STILL;
    case HR_NCCL_HELD: return go_out(team);
    default: break;
    }
    (void)(team->comm.state == HR_NCCL_LAUNCHING && hr_nccl_poll(&team->comm));
    return team->comm.state == HR_NCCL_IDLE ? end_batch(team) : HR_STILL;
}

/* Cancels the batch; what is on the stream is aborted with all that is there, when the group ends. */
static void cancel(struct hr_backend *backend) {
    struct hr_gpu_team *team = team_of(backend);
    if (team->batch.phase == HR_NCCL_ORDERING) {
        team->lane->backend->ops->cancel(team->lane->backend);
    }
}

const struct hr_backend_ops hr_nccl_ops = {.begin = begin, .progress = progress, .cancel = cancel};

enum hr_gpu_wait hr_gpu_awaits(const struct hr_lane *lane) {
    const struct hr_gpu_team *team = team_of(atomic_load(&lane->on_gpu));
    switch (team == NULL ? HR_NCCL_OUT : team->batch.phase) {
    case HR_NCCL_ORDERING: return HR_GPU_OTHER_RANKS;
    case HR_NCCL_WAITING: return HR_GPU_OTHER_LANES;
    case HR_NCCL_HELD: return HR_GPU_ITSELF;
    case HR_NCCL_NO_BATCH: return atomic_load(&gpu_of(team)->is_busy) ? HR_GPU_BESIDE : HR_GPU_NOTHING;
    default: return HR_GPU_NOTHING;
    }
}
