#include "backend/nccl_two_level.h"

#include <stdlib.h>

#include "backend/nccl_backend.h"
#include "backend/operands.h"
#include "collective/across.h"
#include "device/stager.h"

enum {
    SLOTS = 8,             /* of pinned memory, each for a piece: one is copied there while others travel */
    SLOT_BYTES_MAX = 1 << 22,
    ALIGNMENT = 16,        /* where kernels like values to begin */
    /*
     * The most that it puts on the stream at once, beside NCCL's: memory, and for each slot a copy, an event and a copy
     * back, of pieces one after the other, since each waits for the copy of another one.
     */
    WEIGHT = 8 + 4 * SLOTS,
};

enum phase { PHASE_REDUCING, PHASE_TRAVELLING, PHASE_GATHERING };

/* The parts of one tensor that owners have, in values; the last one also has what is left over. */
struct portion {
    size_t each, rest;
    size_t at; /* where the part of this rank begins in its room, in bytes */
};

/* The parts of the tensors of one dtype, side by side in the room; they end with a whole ALIGNMENT. */
struct row {
    const struct hr_codec *codec;
    size_t begin, end;
};

struct hr_nccl_two_level {
    struct hr_team *team;
    struct hr_nccl_comm *comm;
    struct hr_stager *stager;
    struct hr_device *device;
    struct hr_nccl_call *calls; /* [call_capacity] of a launch */
    size_t call_count, call_capacity;
    int part; /* of what is added to them */
    struct portion *portions; /* [portion_capacity] */
    size_t portion_capacity;
    void *copied[SLOTS]; /* an event for each slot; the first one NULL: there are none yet */

    /* Of the work begun last. */
    struct hr_work work;
    enum phase phase;
    struct hr_room *room;   /* on the GPU, for the part of this rank; NULL: it has none */
    struct hr_block *block; /* the slots; NULL likewise, and where pinned memory stands in for the room */
    size_t slot_bytes;
    struct row rows[HORO_DTYPE_COUNT];
    int row_count;
    size_t piece_count;
    size_t asked, arrived; /* pieces whose copy to the host has begun, and has come; those that are back: across */
    struct hr_across across;
};

static int is_owner(const struct hr_team *team) {
    return team->local_rank < team->owner_count;
}

int hr_nccl_two_level_can(const struct hr_work *work) {
    int can = work->op == HORO_ALLREDUCE && work->reduce_op != HORO_ADASUM;
    for (size_t i = 0; i < work->count && can; i++) {
        can = !hr_nccl_form_of(work, i).is_packed;
    }
    return can;
}

/* ---- The parts ---- */

/* The part of a tensor that this rank has, in values. */
static size_t own_count(const struct hr_team *team, const struct portion *portion) {
    const int is_last = team->local_rank == team->owner_count - 1;
    return is_owner(team) ? portion->each + (is_last ? portion->rest : 0) : 0;
}

/* Of one dtype, behind what is in the room already. */
static size_t lay_out_row(struct hr_nccl_two_level *self, int dtype, size_t begin) {
    const struct hr_work *work = &self->work;
    const size_t width = hr_dtype_bytes(dtype);
    const size_t owners = (size_t)self->team->owner_count;
    size_t end = begin;
    for (size_t i = 0; i < work->count; i++) {
        if (work->operands[i].dtype == dtype) {
            const size_t count = work->operands[i].bytes / width;
            struct portion *portion = &self->portions[i];
            *portion = (struct portion){.each = count / owners, .rest = count % owners, .at = end};
            end += hr_round_up(own_count(self->team, portion) * width, ALIGNMENT);
        }
    }
    if (end > begin) {
        self->rows[self->row_count++] = (struct row){hr_codec_find(dtype, 0), begin, end};
        self->piece_count += hr_divide_up(end - begin, self->slot_bytes);
    }
    return end;
}

/* Bytes of the room. */
static size_t lay_out(struct hr_nccl_two_level *self) {
    size_t bytes = 0;
    size_t longest = 0;
    self->row_count = 0;
    self->piece_count = 0;
    self->slot_bytes = hr_smaller(self->team->tuning.segment, SLOT_BYTES_MAX);
    for (int dtype = 0; dtype < HORO_DTYPE_COUNT; dtype++) {
        const size_t end = lay_out_row(self, dtype, bytes);
        longest = end - bytes > longest ? end - bytes : longest;
        bytes = end;
    }
    self->slot_bytes = hr_smaller(self->slot_bytes, longest); /* which changes no piece */
    return bytes;
}

/* A piece of a row. */
struct piece {
    const struct hr_codec *codec;
    char *on_gpu;
    size_t bytes;
};

static struct piece piece_of(const struct hr_nccl_two_level *self, size_t k) {
    const struct row *row = self->rows;
    size_t count;
    while (k >= (count = hr_divide_up(row->end - row->begin, self->slot_bytes))) {
        k -= count;
        row++;
    }
    const size_t at = row->begin + k * self->slot_bytes;
    return (struct piece){row->codec, self->room->data + at, hr_smaller(self->slot_bytes, row->end - at)};
}

/*
 * Whether pinned memory stands in for the room: then a piece travels from and to there. CUDA would copy from host
 * memory to host memory by making this thread wait for all that is on the stream, which may wait for a rank that is
 * gone.
 */
static int is_on_host(const struct hr_nccl_two_level *self) {
    return hr_room_is_on_host(self->room);
}

/* The place that it travels from and to. */
static char *at_slot(const struct hr_nccl_two_level *self, size_t k) {
    return is_on_host(self) ? piece_of(self, k).on_gpu : self->block->data + k % SLOTS * self->slot_bytes;
}

/* ---- Memory ---- */

static int grow(void **array, size_t *capacity, size_t count, size_t element_bytes) {
    if (count > *capacity) {
        void *larger = realloc(*array, count * element_bytes);
        if (larger == NULL) {
            return HORO_ERR_RESOURCE;
        }
        *array = larger;
        *capacity = count;
    }
    return HORO_OK;
}

/* With the device entered. */
static int create_events(struct hr_nccl_two_level *self, struct hr_error *error) {
    const struct hr_cuda *cuda = self->device->cuda;
    for (int i = 0; i < SLOTS && self->copied[SLOTS - 1] == NULL; i++) {
        if (self->copied[i] == NULL) {
            HR_TRY(hr_cuda_check(cuda, cuda->event_create(&self->copied[i], HR_CUDA_EVENT_DISABLE_TIMING),
                                 "cuEventCreate", error));
        }
    }
    return HORO_OK;
}

/* With the device entered. Between the parts of tensors there are zeros, which other hosts may see. */
static int take_slots(struct hr_nccl_two_level *self, size_t room_bytes, struct hr_error *error) {
    const size_t slots = hr_smaller(self->piece_count, SLOTS);
    HR_TRY(create_events(self, error));
    if (!is_on_host(self)) {
        HR_TRY(hr_stager_take_block(self->stager, self->device, slots * self->slot_bytes, &self->block, error));
    }
    return hr_room_fill(self->room, self->room->data, room_bytes, 1, 0, self->comm->stream, error);
}

static int take_memory(struct hr_nccl_two_level *self, size_t room_bytes, struct hr_error *error) {
    struct hr_device_visit visit;
    HR_TRY(hr_room_create(self->stager, self->device, self->comm->stream, room_bytes, &self->room, error));
    HR_TRY(hr_device_enter(self->device, &visit, error));
    const int status = take_slots(self, room_bytes, error);
    hr_device_leave(self->device, &visit);
    return status;
}

/* Whether memory on the host that has travelled is nobody's from now on. */
static int is_with_mpi(const struct hr_nccl_two_level *self) {
    return atomic_load(&self->team->node->mpi.stranded) != 0;
}

/* A block that MPI may still write to is nobody's from now on, and one that no event is behind is not used again. */
static void give_back_block(struct hr_nccl_two_level *self) {
    struct hr_error ignored = {0};
    struct hr_device_visit visit;
    if (!is_with_mpi(self) && hr_device_enter(self->device, &visit, &ignored) == HORO_OK) {
        (void)hr_stager_give_block_behind(self->stager, self->block, self->comm->stream, &ignored);
        hr_device_leave(self->device, &visit);
    }
    self->block = NULL;
}

void hr_nccl_two_level_leave(struct hr_nccl_two_level *self) {
    if (self != NULL && self->block != NULL) {
        give_back_block(self);
    }
    if (self != NULL && self->room != NULL) {
        if (!is_on_host(self) || !is_with_mpi(self)) {
            hr_room_leave(self->room, self->comm->stream);
        }
        hr_room_drop(self->room, NULL);
        self->room = NULL;
    }
}

/* ---- The launches ---- */

/* The most calls that a tensor takes. */
static size_t calls_each(const struct hr_nccl_two_level *self) {
    return (size_t)self->team->owner_count + 1;
}

static void add(struct hr_nccl_two_level *self, struct hr_nccl_call call, size_t count) {
    call.is_on_host = 1;
    call.part = self->part;
    call.count = count;
    if (count > 0) {
        self->calls[self->call_count++] = call;
    }
}

/* Adds what each owner gets of a tensor: in one call where all ranks of the host are owners. */
static void add_reduction(struct hr_nccl_two_level *self, size_t i) {
    const struct hr_team *team = self->team;
    const struct hr_operand *operand = &self->work.operands[i];
    const struct portion *portion = &self->portions[i];
    const size_t width = hr_dtype_bytes(operand->dtype);
    struct hr_nccl_call call = {.kind = HR_NCCL_REDUCE_SCATTER,
                                .input = operand->input,
                                .output = self->room == NULL ? operand->output : self->room->data + portion->at,
                                .dtype = hr_nccl_dtype_of(operand->dtype),
                                .op = hr_nccl_op_of(self->work.reduce_op)};
    if (team->local_size == team->owner_count) {
        add(self, call, portion->each);
        call.input = (const char *)call.input + (size_t)team->owner_count * portion->each * width;
    }
    call.kind = HR_NCCL_REDUCE;
    for (int owner = 0; owner < team->owner_count && team->local_size != team->owner_count; owner++) {
        call.root = owner;
        add(self, call, portion->each);
        call.input = (const char *)call.input + portion->each * width;
    }
    call.root = team->owner_count - 1;
    call.output = (char *)call.output + (team->local_rank == call.root ? portion->each * width : 0);
    add(self, call, portion->rest);
}

/* The parts of all owners of a tensor. */
static void add_gathering(struct hr_nccl_two_level *self, size_t i) {
    const struct hr_team *team = self->team;
    const struct hr_operand *operand = &self->work.operands[i];
    const struct portion *portion = &self->portions[i];
    const size_t width = hr_dtype_bytes(operand->dtype);
    char *part = self->room == NULL ? operand->output : self->room->data + portion->at; /* others' is not looked at */
    struct hr_nccl_call call = {.kind = HR_NCCL_ALL_GATHER,
                                .input = part,
                                .output = operand->output,
                                .dtype = hr_nccl_dtype_of(operand->dtype)};
    if (team->local_size == team->owner_count) {
        add(self, call, portion->each);
        call.output = (char *)call.output + (size_t)team->owner_count * portion->each * width;
    }
    call.kind = HR_NCCL_BROADCAST;
    for (int owner = 0; owner < team->owner_count && team->local_size != team->owner_count; owner++) {
        call.root = owner;
        add(self, call, portion->each);
        call.output = (char *)call.output + portion->each * width;
    }
    call.root = team->owner_count - 1;
    call.input = part + (team->local_rank == call.root ? portion->each * width : 0);
    add(self, call, portion->rest);
}

static void launch(struct hr_nccl_two_level *self, void (*add_calls)(struct hr_nccl_two_level *, size_t),
                   const uint64_t *factors) {
    self->call_count = 0;
    for (size_t i = 0; i < self->work.count; i++) {
        self->part = (int)(i * calls_each(self) / HR_NCCL_PART_CALLS);
        add_calls(self, i);
    }
    if (self->call_count > 0) {
        (void)hr_nccl_launch(self->comm, self->calls, self->call_count, factors);
    }
}

/* ---- Between hosts ---- */

/* With the device entered. */
static int ask_for(struct hr_nccl_two_level *self, size_t k, struct hr_error *error) {
    const struct hr_cuda *cuda = self->device->cuda;
    const struct piece piece = piece_of(self, k);
    if (!is_on_host(self)) {
        HR_TRY(hr_cuda_check(cuda,
                             cuda->copy((uint64_t)(uintptr_t)at_slot(self, k), (uint64_t)(uintptr_t)piece.on_gpu,
                                        piece.bytes, self->comm->stream),
                             "cuMemcpyAsync", error));
    }
    return hr_cuda_check(cuda, cuda->event_record(self->copied[k % SLOTS], self->comm->stream), "cuEventRecord", error);
}

/* With the device entered. The next piece in this slot is copied there behind it, in the order of the stream. */
static int bring_back(struct hr_nccl_two_level *self, size_t k, struct hr_error *error) {
    const struct hr_cuda *cuda = self->device->cuda;
    const struct piece piece = piece_of(self, k);
    if (is_on_host(self)) {
        return HORO_OK;
    }
    return hr_cuda_check(cuda,
                         cuda->copy((uint64_t)(uintptr_t)piece.on_gpu, (uint64_t)(uintptr_t)at_slot(self, k),
                                    piece.bytes, self->comm->stream),
                         "cuMemcpyAsync", error);
}

/* With the device entered: 1 if the next copy to the host has come, 0, or a status. */
static int look_at_copy(struct hr_nccl_two_level *self, struct hr_error *error) {
    const struct hr_cuda *cuda = self->device->cuda;
    const int code = cuda->event_query(self->copied[self->arrived % SLOTS]);
    if (code == HR_CUDA_NOT_READY) {
        return 0;
    }
    HR_TRY(hr_cuda_check(cuda, code, "the copy from the GPU", error));
    self->arrived++;
    return 1;
}

/* With the device entered: copies to the host. 1 if one has begun or come, 0, or a status. */
static int fetch(struct hr_nccl_two_level *self, struct hr_error *error) {
    int moved = 0;
    while (self->asked < self->piece_count && self->asked < self->across.finished + SLOTS) {
        HR_TRY(ask_for(self, self->asked, error));
        self->asked++;
        moved = 1;
    }
    const int has_come = self->arrived < self->asked ? look_at_copy(self, error) : 0;
    return has_come < 0 ? has_come : moved | has_come;
}

/* Moves what is between the hosts: 1 if something moved, which *is_finished says of a piece, 0, or a status. */
static int move_pieces(struct hr_nccl_two_level *self, int *is_finished) {
    *is_finished = hr_across_progress(&self->across);
    HR_TRY(*is_finished);
    const size_t k = self->across.begun;
    if (k == self->arrived || !hr_across_may_add(&self->across)) {
        return *is_finished;
    }
    const struct piece piece = piece_of(self, k);
    HR_TRY(hr_across_add(&self->across, piece.codec, at_slot(self, k), piece.bytes));
    return 1;
}

/* The GPU's part of a turn. A failure is the communicator's, which ends the group. */
static int serve_gpu(struct hr_nccl_two_level *self, int is_finished) {
    struct hr_error *error = &self->comm->failure;
    struct hr_device_visit visit;
    int moved = hr_device_enter(self->device, &visit, error);
    if (moved == HORO_OK) {
        moved = is_finished ? bring_back(self, self->across.finished - 1, error) : HORO_OK;
        moved = moved == HORO_OK ? fetch(self, error) : moved;
        hr_device_leave(self->device, &visit);
    }
    if (moved < 0) {
        self->comm->state = HR_NCCL_BROKEN;
    }
    return moved > 0;
}

static int travel(struct hr_nccl_two_level *self) {
    int is_finished = 0;
    if (self->across.finished < self->piece_count) {
        int moved = move_pieces(self, &is_finished);
        HR_TRY(moved);
        if (is_finished || self->arrived < self->piece_count) {
            moved |= serve_gpu(self, is_finished);
        }
        if (self->across.finished < self->piece_count || self->comm->state != HR_NCCL_IDLE) {
            return moved ? HR_TASK_MOVED : HR_TASK_BLOCKED;
        }
    }
    if (!hr_backlog_has_room(self->comm->backlog)) {
        return HR_TASK_BLOCKED;
    }
    self->phase = PHASE_GATHERING;
    launch(self, add_gathering, NULL);
    return HR_TASK_MOVED;
}

/* ---- The work ---- */

static int reserve(struct hr_nccl_two_level *self, size_t count) {
    HR_TRY(grow((void **)&self->portions, &self->portion_capacity, count, sizeof *self->portions));
    return grow((void **)&self->calls, &self->call_capacity, count * calls_each(self), sizeof *self->calls);
}

int hr_nccl_two_level_begin(struct hr_nccl_two_level *self, const struct hr_work *work) {
    uint64_t factors[HR_NCCL_DTYPES];
    self->phase = PHASE_REDUCING;
    self->work = *work;
    if (self->comm->state != HR_NCCL_IDLE) {
        return HORO_OK; /* it is broken, which ends the group: the engine looks at it */
    }
    HR_TRY(reserve(self, work->count));
    const size_t room_bytes = lay_out(self);
    self->asked = 0;
    self->arrived = 0;
    hr_backlog_add(self->comm->backlog, WEIGHT);
    if (room_bytes > 0) {
        HR_TRY(hr_across_begin(&self->across, self->team, hr_operation_of(work->reduce_op), self->slot_bytes));
    }
    if (room_bytes > 0 && take_memory(self, room_bytes, &self->comm->failure) != HORO_OK) {
        self->comm->state = HR_NCCL_BROKEN;
        return HORO_OK;
    }
    launch(self, add_reduction, hr_nccl_write_factors(self->team, work, factors) ? factors : NULL);
    return HORO_OK;
}

int hr_nccl_two_level_progress(struct hr_nccl_two_level *self) {
    if (self->comm->state == HR_NCCL_LAUNCHING) {
        (void)hr_nccl_poll(self->comm);
    }
    if (self->comm->state != HR_NCCL_IDLE) {
        return HR_TASK_BLOCKED;
    }
    if (self->phase == PHASE_GATHERING) {
        return HR_TASK_DONE;
    }
    self->phase = PHASE_TRAVELLING;
    return travel(self);
}

void hr_nccl_two_level_cancel(struct hr_nccl_two_level *self) {
    if (self->phase == PHASE_TRAVELLING) {
        hr_across_cancel(&self->across);
    }
}

int hr_nccl_two_level_awaits_gpu(const struct hr_nccl_two_level *self) {
    return self != NULL && self->room != NULL && self->phase == PHASE_TRAVELLING && self->arrived < self->asked;
}

struct hr_nccl_two_level *hr_nccl_two_level_create(struct hr_team *team, struct hr_nccl_comm *comm,
                                                   struct hr_stager *stager, struct hr_device *device) {
    struct hr_nccl_two_level *self = calloc(1, sizeof *self);
    if (self != NULL) {
        self->team = team;
        self->comm = comm;
        self->stager = stager;
        self->device = device;
    }
    return self;
}

void hr_nccl_two_level_destroy(struct hr_nccl_two_level *self) {
    struct hr_error ignored = {0};
    struct hr_device_visit visit;
    if (self == NULL) {
        return;
    }
    if (self->copied[0] != NULL && hr_device_enter(self->device, &visit, &ignored) == HORO_OK) {
        for (int i = 0; i < SLOTS && self->copied[i] != NULL; i++) {
            (void)self->device->cuda->event_destroy(self->copied[i]);
        }
        hr_device_leave(self->device, &visit);
    }
    free(self->portions);
    free(self->calls);
    free(self);
}
