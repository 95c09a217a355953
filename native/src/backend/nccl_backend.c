#include "backend/nccl_backend.h"

#include <stdlib.h>
#include <string.h>

#include "backend/nccl_adasum.h"
#include "backend/operands.h"
#include "base/cut.h"
#include "base/op.h"

struct hr_nccl_backend {
    struct hr_team *team;
    struct hr_nccl_comm *comm;
    struct hr_nccl_call *calls; /* [capacity] of the batch */
    size_t count, capacity;
    size_t tensors_each; /* of a part of the calls: with as many, all ranks cut alike, whatever each of them sends */
    struct hr_nccl_pack pack;
    int is_unpacked; /* the results of this round are on their way out of the buffer */
    struct hr_nccl_adasum adasum;
    struct hr_work work; /* of the batch under way */
};

/* ---- What NCCL can do ---- */

/* -1: NCCL has none. */
int hr_nccl_dtype_of(int dtype) {
    switch (dtype) {
    case HORO_UINT8: return HR_NCCL_UINT8;
    case HORO_INT8: return HR_NCCL_INT8;
    case HORO_INT32: return HR_NCCL_INT32;
    case HORO_INT64: return HR_NCCL_INT64;
    case HORO_FLOAT16: return HR_NCCL_FLOAT16;
    case HORO_BFLOAT16: return HR_NCCL_BFLOAT16;
    case HORO_FLOAT32: return HR_NCCL_FLOAT32;
    case HORO_FLOAT64: return HR_NCCL_FLOAT64;
    default: return -1;
    }
}

int hr_nccl_op_of(int reduce_op) {
    switch (reduce_op) {
    case HORO_MIN: return HR_NCCL_MIN;
    case HORO_MAX: return HR_NCCL_MAX;
    case HORO_PRODUCT: return HR_NCCL_PRODUCT;
    default: return HR_NCCL_SUM;
    }
}

int hr_nccl_can(const horo_request *call) {
    if (call->op == HORO_BROADCAST || hr_op_tells_rows(call->op)) {
        return (call->flags & HORO_SUBMIT_INTO) == 0;
    }
    int can = hr_op_reduces(call->op);
    for (int i = 0; i < call->tensor_count && can; i++) {
        const int dtype = call->tensors[i].dtype;
        /* it has no complex numbers: their parts will do, except for a product */
        can = hr_dtype_reducible(dtype, call->reduce_op) &&
              !hr_dtype_is_complex(hr_dtype_worked_on(dtype, call->reduce_op));
    }
    return can;
}

/* ---- A batch as calls ---- */

static int reserve(struct hr_nccl_backend *self, size_t count) {
    if (count > self->capacity) {
        struct hr_nccl_call *larger = realloc(self->calls, count * sizeof *larger);
        if (larger == NULL) {
            return HORO_ERR_RESOURCE;
        }
        self->calls = larger;
        self->capacity = count;
    }
    self->count = 0;
    return HORO_OK;
}

static void add(struct hr_nccl_backend *self, const struct hr_nccl_call *call) {
    if (call->count > 0) {
        self->calls[self->count++] = *call;
    }
}

/* The rows of each rank where they are equally many; else a reduction for each rank. */
static void add_scatter(struct hr_nccl_backend *self, const struct hr_operand *operand, size_t row_bytes,
                        struct hr_nccl_call call) {
    const size_t width = hr_dtype_bytes(operand->dtype);
    const size_t size = (size_t)self->team->size;
    const size_t all = operand->bytes == 0 ? 0 : operand->bytes / row_bytes;
    if (all % size == 0) {
        call.kind = HR_NCCL_REDUCE_SCATTER;
        call.count = all / size * row_bytes / width;
        add(self, &call);
        return;
    }
    call.kind = HR_NCCL_REDUCE;
    for (int r = 0; r < self->team->size; r++) {
        size_t first;
        size_t rows;
        hr_part(all, size, (size_t)r, &first, &rows);
        call.input = (const char *)operand->input + first * row_bytes;
        call.count = rows * row_bytes / width;
        call.root = r;
        add(self, &call);
    }
}

/* The rows of each rank where they are equally many; else a broadcast by each rank: nothing is sent but rows. */
static void add_gather(struct hr_nccl_backend *self, const struct hr_work *work, size_t i, struct hr_nccl_call call) {
    const struct hr_gathered *result = &work->results[i];
    int are_equal = 1;
    for (int r = 1; r < self->team->size; r++) {
        are_equal &= result->first_dims[r] == result->first_dims[0];
    }
    call.output = result->data;
    if (are_equal) {
        call.kind = HR_NCCL_ALL_GATHER;
        call.count = work->operands[i].bytes;
        add(self, &call);
        return;
    }
    call.kind = HR_NCCL_BROADCAST;
    for (int r = 0; r < self->team->size; r++) {
        call.root = r;
        call.input = r == self->team->rank ? work->operands[i].input : call.output; /* others' is not looked at */
        call.count = (size_t)result->first_dims[r] * work->row_bytes[i];
        add(self, &call);
        call.output = (char *)call.output + call.count;
    }
}

/* Adds what this rank has for each, and gets from each, itself among them. */
static void add_exchange(struct hr_nccl_backend *self, const struct hr_work *work, size_t i, struct hr_nccl_call call) {
    const size_t size = (size_t)self->team->size;
    const size_t mine = (size_t)self->team->rank;
    const int64_t *given = &work->splits[(mine * work->count + i) * size];
    call.output = work->results[i].data;
    for (size_t r = 0; r < size; r++) {
        call.root = (int)r;
        call.kind = HR_NCCL_SEND;
        call.count = (size_t)given[r] * work->row_bytes[i];
        add(self, &call);
        call.input = (const char *)call.input + call.count;
        call.kind = HR_NCCL_RECV;
        call.count = (size_t)work->splits[(r * work->count + i) * size + mine] * work->row_bytes[i];
        add(self, &call);
        call.output = (char *)call.output + call.count;
    }
}

static void add_move(struct hr_nccl_backend *self, const struct hr_work *work, size_t i, struct hr_nccl_call call) {
    call.dtype = HR_NCCL_UINT8;
    if (work->op == HORO_ALLGATHER) {
        add_gather(self, work, i, call);
    } else if (work->op == HORO_ALLTOALL) {
        add_exchange(self, work, i, call);
    } else {
        call.kind = HR_NCCL_BROADCAST;
        call.count = work->operands[i].bytes;
        add(self, &call);
    }
}

/* Whether a call goes on where the last one ends, so that it is one. */
static int extends(const struct hr_nccl_backend *self, const struct hr_nccl_call *call, size_t width) {
    if (self->count == 0 || !call->is_packed) {
        return 0;
    }
    const struct hr_nccl_call *last = &self->calls[self->count - 1];
    return last->is_packed && last->part == call->part && last->dtype == call->dtype && last->op == call->op &&
           (const char *)last->input + last->count * width == (const char *)call->input;
}

static void add_operand(struct hr_nccl_backend *self, const struct hr_work *work, size_t i) {
    const struct hr_nccl_form form = hr_nccl_form_of(work, i);
    const int is_packed = hr_op_reduces(work->op) && form.is_packed;
    const struct hr_operand *operand = is_packed ? &self->pack.operands[i] : &work->operands[i];
    struct hr_nccl_call call = {.input = operand->input,
                                .output = operand->output,
                                .root = work->root_rank,
                                .part = (int)(i / self->tensors_each)};
    if (!hr_op_reduces(work->op)) {
        add_move(self, work, i, call);
        return;
    }
    call.kind = HR_NCCL_ALL_REDUCE;
    call.count = operand->bytes / hr_dtype_bytes(operand->dtype);
    call.dtype = hr_nccl_dtype_of(operand->dtype);
    call.op = hr_nccl_op_of(form.reduce_op);
    call.is_packed = is_packed;
    if (work->op == HORO_REDUCESCATTER) {
        add_scatter(self, operand, is_packed ? self->pack.row_bytes[i] : work->row_bytes[i], call);
    } else if (extends(self, &call, hr_dtype_bytes(operand->dtype))) {
        self->calls[self->count - 1].count += call.count;
    } else {
        add(self, &call);
    }
}

/* The most calls that a tensor takes. */
static size_t calls_each(const struct hr_nccl_backend *self, int op) {
    switch (op) {
    case HORO_ALLGATHER:
    case HORO_REDUCESCATTER: return (size_t)self->team->size;
    case HORO_ALLTOALL: return 2 * (size_t)self->team->size;
    default: return 1;
    }
}

int hr_nccl_write_factors(const struct hr_team *team, const struct hr_work *work, uint64_t *factors) {
    const struct hr_kernel *kernel = team->node->kernel;
    const double post = work->reduce_op == HORO_AVERAGE ? work->postscale / team->size : work->postscale;
    const double factor = work->prescale * post;
    const float single = (float)factor;
    memset(factors, 0, HR_NCCL_DTYPES * sizeof *factors);
    memcpy(&factors[HR_NCCL_FLOAT64], &factor, sizeof factor);
    memcpy(&factors[HR_NCCL_FLOAT32], &single, sizeof single);
    kernel->convert(HORO_FLOAT16, &factors[HR_NCCL_FLOAT16], HORO_FLOAT32, &single, 1, 1.0, HR_STORE_ORDINARY);
    kernel->convert(HORO_BFLOAT16, &factors[HR_NCCL_BFLOAT16], HORO_FLOAT32, &single, 1, 1.0, HR_STORE_ORDINARY);
    return hr_op_reduces(work->op) && factor != 1.0;
}

/* ---- The work ---- */

static int is_adasum(const struct hr_nccl_backend *self) {
    return self->work.op == HORO_ALLREDUCE && self->work.reduce_op == HORO_ADASUM;
}

static int begin_calls(struct hr_nccl_backend *self) {
    const struct hr_work *work = &self->work;
    const size_t each = calls_each(self, work->op);
    uint64_t factors[HR_NCCL_DTYPES];
    HR_TRY(reserve(self, each * work->count));
    self->tensors_each = each < HR_NCCL_PART_CALLS ? HR_NCCL_PART_CALLS / each : 1;
    self->is_unpacked = 0;
    if (hr_nccl_pack_begin(&self->pack, work, self->team->rank, self->team->size, self->comm->stream,
                           &self->comm->failure) != HORO_OK) {
        self->comm->state = HR_NCCL_BROKEN;
        return HORO_OK;
    }
    hr_backlog_add(self->comm->backlog, self->pack.room == NULL ? 0 : HR_NCCL_PACK_WEIGHT);
    for (size_t i = 0; i < work->count; i++) {
        add_operand(self, work, i);
    }
    if (self->count > 0) {
        const int is_scaled = hr_nccl_write_factors(self->team, work, factors);
        (void)hr_nccl_launch(self->comm, self->calls, self->count, is_scaled ? factors : NULL);
    }
    return HORO_OK;
}

int hr_nccl_backend_begin(struct hr_nccl_backend *self, const struct hr_work *work) {
    self->work = *work;
    if (is_adasum(self) && self->team->size == 1) {
        self->work.reduce_op = HORO_SUM; /* of one rank: its own, scaled */
    }
    if (self->comm->state != HR_NCCL_IDLE) {
        return HORO_OK; /* it is broken, which ends the group: the engine looks at it */
    }
    return is_adasum(self) ? hr_nccl_adasum_begin(&self->adasum, &self->work) : begin_calls(self);
}

/* Launches what the buffer had no room for; the rest of the batch is on the stream already. */
static int launch_next_round(struct hr_nccl_backend *self) {
    const struct hr_work *work = &self->work;
    HR_TRY(hr_nccl_pack_go_on(&self->pack, work, self->team->rank, self->team->size, self->comm->stream,
                              &self->comm->failure));
    hr_backlog_add(self->comm->backlog, HR_NCCL_PACK_WEIGHT);
    self->is_unpacked = 0;
    self->count = 0;
    for (size_t i = 0; i < work->count; i++) {
        if (self->pack.places[i].bytes > 0) {
            add_operand(self, work, i);
        }
    }
    return hr_nccl_launch(self->comm, self->calls, self->count, NULL);
}

/* NCCL's calls are on the stream. */
static void unpack(struct hr_nccl_backend *self) {
    int status = hr_nccl_pack_end(&self->pack, self->comm->stream, &self->comm->failure);
    self->is_unpacked = 1;
    if (status == HORO_OK && self->pack.room == NULL) {
        status = hr_nccl_extend(self->comm);
    }
    if (status != HORO_OK) {
        self->comm->state = HR_NCCL_BROKEN;
    }
}

/* The launch of a round is on the stream. */
static void go_on_packing(struct hr_nccl_backend *self) {
    if (!self->is_unpacked) {
        unpack(self);
    }
    if (self->comm->state == HR_NCCL_IDLE && self->pack.room != NULL && hr_backlog_has_room(self->comm->backlog) &&
        launch_next_round(self) != HORO_OK) {
        self->comm->state = HR_NCCL_BROKEN;
    }
}

int hr_nccl_backend_progress(struct hr_nccl_backend *self) {
    struct hr_nccl_comm *comm = self->comm;
    if (is_adasum(self)) {
        return hr_nccl_adasum_progress(&self->adasum);
    }
    if (comm->state == HR_NCCL_LAUNCHING) {
        (void)hr_nccl_poll(comm);
    }
    if (comm->state == HR_NCCL_IDLE && self->pack.room != NULL) {
        go_on_packing(self);
    }
    return comm->state == HR_NCCL_IDLE && self->pack.room == NULL ? HR_TASK_DONE : HR_TASK_BLOCKED;
}

struct hr_nccl_backend *hr_nccl_backend_create(struct hr_team *team, struct hr_nccl_comm *comm,
                                               struct hr_stager *stager, const struct hr_packer *packer) {
    struct hr_nccl_backend *self = calloc(1, sizeof *self);
    if (self != NULL) {
        self->team = team;
        self->comm = comm;
        self->pack = (struct hr_nccl_pack){.stager = stager, .packer = packer};
        self->adasum = (struct hr_nccl_adasum){.team = team, .comm = comm, .stager = stager, .packer = packer};
    }
    return self;
}

void hr_nccl_backend_leave(struct hr_nccl_backend *self) {
    if (self != NULL) {
        hr_nccl_pack_leave(&self->pack, self->comm->stream);
        hr_nccl_adasum_leave(&self->adasum);
    }
}

void hr_nccl_backend_destroy(struct hr_nccl_backend *self) {
    if (self != NULL) {
        hr_nccl_pack_fini(&self->pack);
        hr_nccl_adasum_fini(&self->adasum);
        free(self->calls);
        free(self);
    }
}
