#include "backend/nccl_adasum.h"

#include <stdlib.h>
#include <string.h>

#include "backend/nccl_backend.h"
#include "base/cut.h"

enum {
    ALIGNMENT = 256,  /* where kernels like vectors to begin */
    BATCH_WEIGHT = 8, /* on the stream beside NCCL's: memory, the table, both kernels, and events */
    LEVEL_WEIGHT = 4, /* likewise: the kernels of a level */
};

/* ---- Where things go ---- */

static size_t place(size_t *at, size_t bytes) {
    const size_t here = *at;
    *at += hr_round_up(bytes, ALIGNMENT);
    return here;
}

static size_t values_of(const struct hr_operand *operand) {
    return operand->bytes / hr_dtype_bytes(operand->dtype);
}

/* Of the tensors that travel in this dtype. */
static void lay_out_row(struct hr_nccl_adasum *self, const struct hr_work *work, int dtype) {
    const size_t size = (size_t)self->team->size;
    struct hr_nccl_adasum_row *row = &self->rows[self->row_count];
    *row = (struct hr_nccl_adasum_row){.dtype = dtype, .width = hr_dtype_bytes(dtype)};
    for (size_t i = 0; i < work->count; i++) {
        const struct hr_operand *operand = &work->operands[i];
        if (hr_nccl_form_of(work, i).dtype != dtype) {
            continue;
        }
        self->places[i] = (struct hr_nccl_adasum_place){.row = self->row_count, .at = row->count};
        if (operand->bytes > 0) {
            row->count += values_of(operand);
            row->tensor_count++;
            row->is_packed |= operand->dtype != dtype;
            row->sent = operand->input;
            row->received = operand->output;
        }
    }
    row->is_packed |= row->tensor_count > 1 || work->prescale != 1.0 || work->postscale != 1.0;
    row->each = row->count / size;
    row->rest = row->count % size;
    row->own = row->each + (self->team->rank == self->team->size - 1 ? row->rest : 0);
    row->stride = hr_round_up(row->own * row->width, ALIGNMENT);
    self->row_count++;
}

/* The piece of a tensor in this rank's share. */
static void lay_out_piece(struct hr_nccl_adasum *self, size_t i, size_t values) {
    const struct hr_nccl_adasum_row *row = &self->rows[self->places[i].row];
    const size_t at = self->places[i].at;
    const size_t first = (size_t)self->team->rank * row->each;
    const size_t begin = at > first ? at : first;
    const size_t end = hr_smaller(at + values, first + row->own);
    const size_t count = begin < end ? end - begin : 0;
    const size_t threads = hr_smaller(hr_divide_up(count, HR_ADASUM_THREAD_ELEMENTS), HR_ADASUM_THREADS_MAX);
    self->pieces[i] = (struct hr_adasum_piece){.values = count == 0 ? 0 : row->shares + (begin - first) * row->width,
                                               .stride = row->stride,
                                               .count = count,
                                               .first_partial = self->batch.partial_count,
                                               .first_block = self->batch.block_count,
                                               .threads = (unsigned)threads,
                                               .dtype = row->dtype};
    self->batch.partial_count += (unsigned)threads;
    self->batch.block_count += (unsigned)hr_divide_up(threads, HR_PACK_THREADS);
    self->has_folds |= threads > HR_PACK_THREADS;
}

/* The pieces of the kernels that pack and unpack. */
static void lay_out_packing(struct hr_nccl_adasum *self, const struct hr_work *work) {
    self->in_count = 0;
    for (size_t i = 0; i < work->count; i++) {
        const struct hr_operand *operand = &work->operands[i];
        const struct hr_nccl_adasum_row *row = &self->rows[self->places[i].row];
        if (!row->is_packed || operand->bytes == 0) {
            continue;
        }
        struct hr_pack_piece piece = {.memory = (uintptr_t)operand->input,
                                      .wire = row->packed + self->places[i].at * row->width,
                                      .count = values_of(operand),
                                      .factor = work->prescale,
                                      .partial = 1.0,
                                      .divisor = 1,
                                      .dtype = operand->dtype,
                                      .wire_dtype = row->dtype};
        self->in[self->in_count] = piece;
        piece.memory = (uintptr_t)operand->output;
        piece.factor = work->postscale;
        self->out[self->in_count] = piece;
        self->in_count++;
    }
    self->out_count = self->in_count;
    self->in_blocks = hr_packer_number(self->in, self->in_count);
    self->out_blocks = hr_packer_number(self->out, self->out_count);
}

static size_t pairs_of(const struct hr_nccl_adasum *self, int distance) {
    return hr_divide_up((size_t)(self->team->size - distance), 2 * (size_t)distance);
}

/* The table comes first: see device/table.h. Returns how many values there are. */
static size_t lay_out(struct hr_nccl_adasum *self, const struct hr_work *work) {
    const size_t size = (size_t)self->team->size;
    const size_t product_bytes = HR_ADASUM_PRODUCTS * sizeof(double);
    const size_t table = work->count * (sizeof *self->pieces + 2 * sizeof *self->in);
    size_t values = 0;
    size_t at = 0;
    self->row_count = 0;
    self->has_folds = 0;
    self->batch = (struct hr_adasum_batch){.count = (unsigned)work->count, .size = (unsigned)size};
    (void)place(&at, sizeof self->batch + table);
    for (int dtype = 0; dtype < HORO_DTYPE_COUNT; dtype++) {
        lay_out_row(self, work, dtype);
        struct hr_nccl_adasum_row *row = &self->rows[self->row_count - 1];
        row->packed = place(&at, row->is_packed ? row->count * row->width : 0);
        row->shares = place(&at, size * row->stride);
        values += row->count;
        self->row_count -= row->count == 0; /* empty tensors are nowhere: their place is not looked at */
    }
    for (size_t i = 0; i < work->count && values > 0; i++) {
        lay_out_piece(self, i, values_of(&work->operands[i]));
    }
    lay_out_packing(self, work);
    self->sums = place(&at, pairs_of(self, 1) * work->count * product_bytes);
    self->partials = place(&at, pairs_of(self, 1) * self->batch.partial_count * product_bytes);
    self->bytes = at;
    return values;
}

/* ---- Memory ---- */

static int reserve(struct hr_nccl_adasum *self, size_t count) {
    if (self->calls == NULL) { /* a send and a recv for each rank, of each dtype */
        self->calls = calloc(2 * (size_t)self->team->size * HORO_DTYPE_COUNT, sizeof *self->calls);
    }
    if (count > self->capacity) {
        free(self->places);
        free(self->pieces);
        free(self->in);
        free(self->out);
        self->places = calloc(count, sizeof *self->places);
        self->pieces = calloc(count, sizeof *self->pieces);
        self->in = calloc(count, sizeof *self->in);
        self->out = calloc(count, sizeof *self->out);
        self->capacity = count;
    }
    if (self->calls == NULL || self->places == NULL || self->pieces == NULL || self->in == NULL || self->out == NULL) {
        hr_nccl_adasum_fini(self);
        return HORO_ERR_RESOURCE;
    }
    return HORO_OK;
}

void hr_nccl_adasum_leave(struct hr_nccl_adasum *self) {
    hr_table_leave(&self->table, self->comm->stream);
    if (self->room != NULL) {
        hr_room_leave(self->room, self->comm->stream);
        hr_room_drop(self->room, NULL);
        self->room = NULL;
    }
}

void hr_nccl_adasum_fini(struct hr_nccl_adasum *self) {
    free(self->calls);
    free(self->places);
    free(self->pieces);
    free(self->in);
    free(self->out);
    self->calls = NULL;
    self->places = NULL;
    self->pieces = NULL;
    self->in = NULL;
    self->out = NULL;
    self->capacity = 0;
}

/* ---- Kernels, with the device entered ---- */

static uint64_t address_of(const struct hr_nccl_adasum *self, size_t at) {
    return (uint64_t)(uintptr_t)self->room->data + at;
}

/* Now that the room has a place. Empty pieces keep no address. */
static void set_addresses(struct hr_nccl_adasum *self) {
    for (size_t i = 0; i < self->tensor_count; i++) {
        self->pieces[i].values += self->pieces[i].count == 0 ? 0 : address_of(self, 0);
    }
    for (size_t i = 0; i < self->in_count; i++) {
        self->in[i].wire += address_of(self, 0);
        self->out[i].wire += address_of(self, 0);
    }
    for (size_t i = 0; i < self->row_count; i++) {
        struct hr_nccl_adasum_row *row = &self->rows[i];
        row->sent = row->is_packed ? self->room->data + row->packed : row->sent;
        row->received = row->is_packed ? self->room->data + row->packed : row->received;
    }
}

static int send_table(struct hr_nccl_adasum *self, struct hr_error *error) {
    struct hr_table *table = &self->table;
    self->in_table = sizeof self->batch + self->tensor_count * sizeof *self->pieces;
    self->out_table = self->in_table + self->in_count * sizeof *self->in;
    HR_TRY(hr_table_take(table, self->room, self->out_table + self->out_count * sizeof *self->out, error));
    self->batch.pieces = table->at + sizeof self->batch;
    self->batch.partials = address_of(self, self->partials);
    self->batch.sums = address_of(self, self->sums);
    memcpy(table->data, &self->batch, sizeof self->batch);
    memcpy(table->data + sizeof self->batch, self->pieces, self->tensor_count * sizeof *self->pieces);
    memcpy(table->data + self->in_table, self->in, self->in_count * sizeof *self->in);
    memcpy(table->data + self->out_table, self->out, self->out_count * sizeof *self->out);
    return hr_table_send(table, self->comm->stream, error);
}

/* Of the batch; no blocks: nothing. */
static int run(const struct hr_nccl_adasum *self, enum hr_packer_kernel kernel, size_t blocks, struct hr_error *error) {
    return blocks == 0 ? HORO_OK
                       : hr_packer_launch(self->packer, kernel, self->table.at, (size_t)self->distance,
                                          (unsigned)blocks, self->comm->stream, error);
}

static int pack(struct hr_nccl_adasum *self, struct hr_error *error) {
    HR_TRY(send_table(self, error));
    return self->in_count == 0 ? HORO_OK
                               : hr_packer_launch(self->packer, HR_PACKER_IN, self->table.at + self->in_table,
                                                  self->in_count, self->in_blocks, self->comm->stream, error);
}

static int multiply(struct hr_nccl_adasum *self, struct hr_error *error) {
    const size_t pairs = pairs_of(self, self->distance);
    HR_TRY(run(self, HR_PACKER_MULTIPLY, pairs * self->batch.block_count, error));
    HR_TRY(run(self, HR_PACKER_FOLD, self->has_folds ? pairs * self->tensor_count : 0, error));
    const size_t sums = pairs * self->tensor_count * HR_ADASUM_PRODUCTS;
    return run(self, HR_PACKER_TOTAL, hr_divide_up(sums, HR_PACK_THREADS), error);
}

static int combine(struct hr_nccl_adasum *self, struct hr_error *error) {
    return run(self, HR_PACKER_COMBINE, pairs_of(self, self->distance) * self->batch.block_count, error);
}

static int unpack(struct hr_nccl_adasum *self, struct hr_error *error) {
    return self->out_count == 0 ? HORO_OK
                                : hr_packer_launch(self->packer, HR_PACKER_OUT, self->table.at + self->out_table,
                                                   self->out_count, self->out_blocks, self->comm->stream, error);
}

/* A failure is the communicator's. */
static int on_gpu(struct hr_nccl_adasum *self, int (*step)(struct hr_nccl_adasum *, struct hr_error *)) {
    struct hr_error *error = &self->comm->failure;
    struct hr_device_visit visit;
    int status = hr_device_enter(self->packer->device, &visit, error);
    if (status == HORO_OK) {
        status = step(self, error);
        hr_device_leave(self->packer->device, &visit);
    }
    if (status != HORO_OK) {
        self->comm->state = HR_NCCL_BROKEN;
    }
    return status;
}

/* ---- Calls of NCCL ---- */

static void add(struct hr_nccl_adasum *self, struct hr_nccl_call call, size_t count) {
    call.count = count;
    if (count > 0) {
        self->calls[self->call_count++] = call;
    }
}

/* Each rank's share of what this rank has, and this rank's of what each has; itself among them. */
static void add_exchange(struct hr_nccl_adasum *self, const struct hr_nccl_adasum_row *row) {
    const int size = self->team->size;
    struct hr_nccl_call call = {.dtype = hr_nccl_dtype_of(row->dtype)};
    for (int r = 0; r < size; r++) {
        call.root = r;
        call.kind = HR_NCCL_SEND;
        call.input = row->sent + (size_t)r * row->each * row->width;
        add(self, call, row->each + (r == size - 1 ? row->rest : 0));
        call.kind = HR_NCCL_RECV;
        call.output = self->room->data + row->shares + (size_t)r * row->stride;
        add(self, call, row->own);
    }
}

/* The root of the tree is in the place of rank 0. */
static void add_gathering(struct hr_nccl_adasum *self, const struct hr_nccl_adasum_row *row) {
    const size_t size = (size_t)self->team->size;
    const char *share = self->room->data + row->shares;
    struct hr_nccl_call call = {.kind = HR_NCCL_ALL_GATHER,
                                .input = share,
                                .output = row->received,
                                .dtype = hr_nccl_dtype_of(row->dtype)};
    add(self, call, row->each);
    call.kind = HR_NCCL_BROADCAST;
    call.root = self->team->size - 1;
    call.output = row->received + size * row->each * row->width;
    call.input = self->team->rank == call.root ? share + row->each * row->width : call.output; /* not looked at */
    add(self, call, row->rest);
}

static void launch_rows(struct hr_nccl_adasum *self, enum hr_nccl_adasum_phase phase,
                        void (*add_calls)(struct hr_nccl_adasum *, const struct hr_nccl_adasum_row *)) {
    self->phase = phase;
    self->call_count = 0;
    for (size_t i = 0; i < self->row_count; i++) {
        add_calls(self, &self->rows[i]);
    }
    (void)hr_nccl_launch(self->comm, self->calls, self->call_count, NULL);
}

/* ---- The phases ---- */

/* The sums of a level. */
static void begin_level(struct hr_nccl_adasum *self) {
    hr_backlog_add(self->comm->backlog, LEVEL_WEIGHT);
    if (on_gpu(self, multiply) != HORO_OK) {
        return;
    }
    char *sums = self->room->data + self->sums;
    const struct hr_nccl_call call = {.kind = HR_NCCL_ALL_REDUCE,
                                      .input = sums,
                                      .output = sums,
                                      .count = pairs_of(self, self->distance) * self->tensor_count * HR_ADASUM_PRODUCTS,
                                      .dtype = HR_NCCL_FLOAT64,
                                      .op = HR_NCCL_SUM};
    self->phase = HR_NCCL_ADASUM_SUM;
    (void)hr_nccl_launch(self->comm, &call, 1, NULL);
}

static void end_level(struct hr_nccl_adasum *self) {
    if (on_gpu(self, combine) != HORO_OK) {
        return;
    }
    self->distance *= 2;
    if (self->distance < self->team->size) {
        begin_level(self);
    } else {
        launch_rows(self, HR_NCCL_ADASUM_GATHER, add_gathering);
    }
}

static void end(struct hr_nccl_adasum *self) {
    if (on_gpu(self, unpack) == HORO_OK && hr_nccl_extend(self->comm) == HORO_OK) {
        hr_nccl_adasum_leave(self);
        self->phase = HR_NCCL_ADASUM_OVER;
    }
}

int hr_nccl_adasum_begin(struct hr_nccl_adasum *self, const struct hr_work *work) {
    HR_TRY(reserve(self, work->count));
    self->distance = 1;
    self->tensor_count = work->count;
    self->phase = HR_NCCL_ADASUM_OVER;
    if (lay_out(self, work) == 0) {
        return HORO_OK;
    }
    struct hr_error *error = &self->comm->failure;
    if (self->packer->device == NULL) {
        (void)hr_fail(error, HORO_ERR_INTERNAL, "an Adasum that needs kernels, and there are none");
        self->comm->state = HR_NCCL_BROKEN;
        return HORO_OK;
    }
    if (hr_room_create(self->stager, self->packer->device, self->comm->stream, self->bytes, &self->room, error) !=
        HORO_OK) {
        self->comm->state = HR_NCCL_BROKEN;
        return HORO_OK;
    }
    hr_backlog_add(self->comm->backlog, BATCH_WEIGHT);
    set_addresses(self);
    if (on_gpu(self, pack) == HORO_OK) {
        launch_rows(self, HR_NCCL_ADASUM_SCATTER, add_exchange);
    }
    return HORO_OK;
}

int hr_nccl_adasum_progress(struct hr_nccl_adasum *self) {
    if (self->comm->state == HR_NCCL_LAUNCHING) {
        (void)hr_nccl_poll(self->comm);
    }
    const int launches = self->phase == HR_NCCL_ADASUM_SCATTER || self->phase == HR_NCCL_ADASUM_SUM;
    if (self->comm->state != HR_NCCL_IDLE || (launches && !hr_backlog_has_room(self->comm->backlog))) {
        return HR_TASK_BLOCKED;
    }
    switch (self->phase) {
    case HR_NCCL_ADASUM_SCATTER: begin_level(self); break;
    case HR_NCCL_ADASUM_SUM: end_level(self); break;
    case HR_NCCL_ADASUM_GATHER: end(self); break;
    case HR_NCCL_ADASUM_OVER: return HR_TASK_DONE;
    }
    return self->phase == HR_NCCL_ADASUM_OVER ? HR_TASK_DONE : HR_TASK_MOVED;
}
