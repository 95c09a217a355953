/*
 * A batch of NCCL on this rank: the memory on the GPU that it needs besides the program's, and the marks behind it.
 * A rank that has joined gives memory of horo's in place of tensors, too, filled with values that change no result.
 * Such memory comes and goes in the order of NCCL's stream, where the next batch gets the same again. Driver only.
 */
#include "base/cut.h"
#include "base/dtype.h"
#include "base/op.h"
#include "device/stager.h"
#include "engine/by_nccl.h"

enum {
    WIDE_FILL_WEIGHT = 40, /* the most that hr_device_fill puts on a stream, for elements of 8 bytes: it doubles them */
    BATCH_WEIGHT = 4,      /* memory that comes and goes, an event behind it, and the mark */
};

/* A failure ends the group, which the driver's next turn sees to. */
static void break_off(struct hr_nccl_team *team) {
    team->comm.state = HR_NCCL_BROKEN;
}

/* ---- Results of an allgather or alltoall ---- */

/* Each result where kernels like to begin. */
static size_t divide(struct hr_request *request, char *data) {
    size_t at = 0;
    for (int i = 0; i < request->call.tensor_count; i++) {
        struct hr_gathered *result = &request->gathered[i];
        result->data = data == NULL ? NULL : data + at;
        result->is_given = 1;
        at += hr_round_up((size_t)result->bytes, HR_STAGED_ALIGNMENT);
    }
    return at;
}

int hr_engine_make_room(struct hr_engine *engine, struct hr_request *request) {
    struct hr_nccl_team *team = hr_nccl_team_of(engine, request->lane);
    const size_t bytes = divide(request, NULL);
    struct hr_room *room = NULL;
    if (team == NULL || team->backend == NULL) {
        return HORO_ERR_INTERNAL;
    }
    if (team->comm.state != HR_NCCL_IDLE || bytes == 0) {
        return HORO_OK; /* nothing will be written */
    }
    if (hr_room_create(atomic_load(&engine->stager), team->comm.device, team->comm.stream, bytes, &room,
                       &team->comm.failure) != HORO_OK) {
        break_off(team);
        return HORO_OK;
    }
    (void)divide(request, room->data);
    team->room = room;
    team->owns_room = request->is_stand_in;
    request->room = request->is_stand_in ? NULL : room;
    return HORO_OK;
}

/* ---- Tensors of a rank that has joined ---- */

static int is_placed_here(const struct hr_request *request) {
    return request->is_stand_in && hr_request_is_by_nccl(request) && !hr_op_tells_rows(request->call.op);
}

/* Whether it has a place among those of a dtype, which lie beside each other: so a batch takes few fills. */
static int has_place(const struct hr_request *request, int tensor, int dtype) {
    return is_placed_here(request) && hr_dtype_real(request->call.tensors[tensor].dtype) == dtype;
}

static size_t bytes_of(const horo_tensor *tensor) {
    int64_t bytes = 0; /* it was checked when it was decoded */
    (void)hr_wire_shape_bytes(tensor->shape, tensor->ndim, tensor->dtype, &bytes);
    return (size_t)bytes;
}

/* A piece of memory whose elements are all alike. */
struct run {
    char *data;
    size_t bytes, width;
    uint64_t bits;
};

static int fill(const struct hr_nccl_team *team, const struct run *run, struct hr_error *error) {
    hr_backlog_add(team->comm.backlog, run->width == 8 ? WIDE_FILL_WEIGHT : 1);
    return hr_room_fill(team->room, run->data, run->bytes, run->width, run->bits, team->comm.stream, error);
}

/* Tensors of a dtype have the same neutral element, and are filled as one. */
static int fill_dtype(const struct hr_nccl_team *team, struct hr_request *const *requests, size_t count, int dtype,
                      struct hr_error *error) {
    struct run run = {.width = hr_dtype_bytes(dtype),
                      .bits = hr_neutral_element(dtype, requests[0]->call.reduce_op)};
    for (size_t r = 0; r < count; r++) {
        const horo_request *call = &requests[r]->call;
        for (int i = 0; i < call->tensor_count; i++) {
            if (has_place(requests[r], i, dtype)) {
                run.data = run.data == NULL ? call->tensors[i].output : run.data;
                run.bytes += hr_round_up(bytes_of(&call->tensors[i]), HR_STAGED_ALIGNMENT);
            }
        }
    }
    return run.bytes == 0 ? HORO_OK : fill(team, &run, error);
}

static size_t place_dtype(struct hr_request *const *requests, size_t count, int dtype, char *data, size_t at) {
    for (size_t r = 0; r < count; r++) {
        horo_tensor *tensors = (horo_tensor *)(void *)(requests[r] + 1); /* those of its call, see request.c */
        for (int i = 0; i < requests[r]->call.tensor_count; i++) {
            if (has_place(requests[r], i, dtype)) {
                tensors[i].input = data == NULL ? NULL : data + at;
                tensors[i].output = data == NULL ? NULL : data + at;
                at += hr_round_up(bytes_of(&tensors[i]), HR_STAGED_ALIGNMENT);
            }
        }
    }
    return at;
}

static size_t place_all(struct hr_request *const *requests, size_t count, char *data) {
    size_t at = 0;
    for (int dtype = 0; dtype < HORO_DTYPE_COUNT; dtype++) {
        at = place_dtype(requests, count, dtype, data, at);
    }
    return at;
}

static int make_values(struct hr_engine *engine, struct hr_nccl_team *team, struct hr_request *const *requests,
                       size_t count, size_t bytes) {
    HR_TRY(hr_room_create(atomic_load(&engine->stager), team->comm.device, team->comm.stream, bytes, &team->room,
                          &team->comm.failure));
    team->owns_room = 1;
    (void)place_all(requests, count, team->room->data);
    return HORO_OK;
}

int hr_nccl_fill_stand_ins(struct hr_nccl_team *team, struct hr_request *const *requests, size_t count) {
    struct hr_error *error = &team->comm.failure;
    struct hr_device_visit visit;
    int status = HORO_OK;
    if (!team->owns_room || !hr_op_reduces(requests[0]->call.op)) {
        return HORO_OK; /* it is written over */
    }
    HR_TRY(hr_device_enter(team->comm.device, &visit, error));
    for (int dtype = 0; dtype < HORO_DTYPE_COUNT && status == HORO_OK; dtype++) {
        status = fill_dtype(team, requests, count, dtype, error);
    }
    hr_device_leave(team->comm.device, &visit);
    return status;
}

int hr_engine_place_stand_ins(struct hr_engine *engine, struct hr_request *const *requests, size_t count) {
    const size_t bytes = place_all(requests, count, NULL);
    if (bytes == 0) {
        return HORO_OK;
    }
    struct hr_nccl_team *team = hr_nccl_team_of(engine, requests[0]->lane);
    if (team == NULL || team->backend == NULL) {
        return HORO_ERR_INTERNAL;
    }
    if (team->comm.state == HR_NCCL_IDLE && make_values(engine, team, requests, count, bytes) != HORO_OK) {
        break_off(team);
    }
    return HORO_OK;
}

/* ---- The batch ---- */

struct hr_backend *hr_engine_nccl_backend(struct hr_engine *engine, struct hr_request *const *requests, size_t count) {
    struct hr_nccl_team *team = hr_nccl_team_of(engine, requests[0]->lane);
    int can = team != NULL && team->backend != NULL;
    for (size_t i = 0; i < count && can; i++) {
        can = requests[i]->is_stand_in || (requests[i]->mark != NULL && atomic_load(&team->stage) == HR_BY_NCCL_READY);
    }
    return can ? hr_nccl_take_turn(engine, requests, count) : NULL;
}

void hr_nccl_leave_room(struct hr_nccl_team *team, int is_over) {
    hr_nccl_two_level_leave(team->two_level);
    if (team->room != NULL && (team->owns_room || !is_over)) {
        hr_room_leave(team->room, team->comm.stream);
    }
    if (team->owns_room) {
        hr_room_drop(team->room, NULL);
    }
    team->room = NULL; /* a request's goes behind its mark, at any time */
    team->owns_room = 0;
}

/* One mark serves all requests of the batch: thousands of events, one for each, would fill the stream. */
static int move_marks(struct hr_nccl_team *team, struct hr_request *const *requests, size_t count) {
    struct hr_mark *mark = NULL;
    hr_backlog_add(team->comm.backlog, BATCH_WEIGHT);
    for (size_t i = 0; i < count; i++) {
        if (requests[i]->is_stand_in) {
            continue;
        }
        if (mark == NULL) {
            mark = requests[i]->mark;
            HR_TRY(hr_mark_move(mark, team->comm.stream, &team->comm.failure));
            continue;
        }
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
        break_off(team);
    } else {
        hr_nccl_leave_room(team, 1);
        hr_nccl_end_turn(team);
    }
    atomic_store(&by->is_busy, 1);
    return status == HORO_OK;
}
