#include "backend/nccl_pack.h"

#include <stdlib.h>
#include <string.h>

#include "backend/operands.h"
#include "base/cut.h"
#include "base/op.h"
#include "collective/collective.h"

enum { ALIGNMENT = 256 }; /* where kernels like vectors to begin */

/* ---- Forms ---- */

static struct hr_nccl_form form_of(int dtype, int wire_dtype, int reduce_op, int is_scaled) {
    const int op = hr_operation_of(reduce_op);
    if (wire_dtype != 0) {
        return (struct hr_nccl_form){wire_dtype, op, 1};
    }
    if (dtype == HORO_BOOL) { /* a sum is a logical or */
        return (struct hr_nccl_form){HORO_UINT8, op == HORO_SUM || op == HORO_MAX ? HORO_MAX : HORO_MIN, 1};
    }
    if (dtype == HORO_INT16) { /* the low half of a wider sum or product is the sum or product */
        return (struct hr_nccl_form){HORO_INT32, op, 1};
    }
    /* NCCL multiplies the values of each rank before it sums floats, and nothing else */
    return (struct hr_nccl_form){dtype, op, is_scaled && (op != HORO_SUM || hr_dtype_is_integer(dtype))};
}

static int scales(int reduce_op, double prescale, double postscale) {
    return reduce_op == HORO_AVERAGE || prescale != 1.0 || postscale != 1.0;
}

struct hr_nccl_form hr_nccl_form_of(const struct hr_work *work, size_t i) {
    const struct hr_operand *operand = &work->operands[i];
    return form_of(operand->dtype, operand->wire_dtype, work->reduce_op,
                   scales(work->reduce_op, work->prescale, work->postscale));
}

int hr_nccl_needs_kernels(const horo_request *call) {
    const int is_scaled = scales(call->reduce_op, call->prescale, call->postscale);
    int needs = hr_op_reduces(call->op) && call->reduce_op == HORO_ADASUM;
    for (int i = 0; i < call->tensor_count && hr_op_reduces(call->op); i++) {
        const horo_tensor *tensor = &call->tensors[i];
        const int dtype = hr_dtype_worked_on(tensor->dtype, call->reduce_op);
        needs |= form_of(dtype, tensor->wire_dtype, call->reduce_op, is_scaled).is_packed;
    }
    return needs;
}

/* ---- The buffer: pieces of both kernels, then vectors ---- */

static int reserve(struct hr_nccl_pack *pack, size_t count) {
    if (count <= pack->capacity) {
        return HORO_OK;
    }
    hr_nccl_pack_fini(pack);
    pack->operands = calloc(count, sizeof *pack->operands);
    pack->row_bytes = calloc(count, sizeof *pack->row_bytes);
    pack->places = calloc(count, sizeof *pack->places);
    pack->pieces = calloc(2 * count, sizeof *pack->pieces);
    if (pack->operands == NULL || pack->row_bytes == NULL || pack->places == NULL || pack->pieces == NULL) {
        hr_nccl_pack_fini(pack);
        return HORO_ERR_RESOURCE;
    }
    pack->capacity = count;
    return HORO_OK;
}

/* Places those that travel alike side by side, but each of a reduce-scatter by itself. Returns how many are placed. */
static size_t place(struct hr_nccl_pack *pack, const struct hr_work *work) {
    struct hr_nccl_form before = {0};
    size_t at = 0;
    size_t count = 0;
    for (size_t i = 0; i < work->count; i++) {
        const struct hr_operand *from = &work->operands[i];
        const struct hr_nccl_form form = hr_nccl_form_of(work, i);
        pack->places[i] = (struct hr_packed_place){0};
        pack->operands[i] = (struct hr_operand){0};
        if (!form.is_packed || from->bytes == 0) {
            continue;
        }
        const int is_alike = form.dtype == before.dtype && form.reduce_op == before.reduce_op;
        if (work->op == HORO_REDUCESCATTER || !is_alike) {
            at = hr_round_up(at, ALIGNMENT);
        }
        const size_t width = hr_dtype_bytes(from->dtype);
        const size_t wire_width = hr_dtype_bytes(form.dtype);
        pack->places[i] = (struct hr_packed_place){at, from->bytes / width * wire_width};
        pack->operands[i].dtype = form.dtype;
        pack->row_bytes[i] = work->row_bytes[i] / width * wire_width;
        at += pack->places[i].bytes;
        before = form;
        count++;
    }
    pack->total = at;
    return count;
}

/* Settles what the round has of each tensor. Rounds end where elements do: both lie at multiples of their size. */
static void settle(struct hr_nccl_pack *pack, const struct hr_work *work, int rank, int size, char *buffer) {
    pack->in_count = 0;
    for (size_t i = 0; i < work->count; i++) {
        struct hr_operand *operand = &pack->operands[i];
        const struct hr_packed_place *all = &pack->places[i];
        const size_t begin = all->at > pack->begin ? all->at : pack->begin;
        const size_t end = all->at + all->bytes < pack->end ? all->at + all->bytes : pack->end;
        size_t first = 0;
        size_t rows;
        operand->bytes = begin < end && all->bytes > 0 ? end - begin : 0;
        if (operand->bytes == 0) {
            continue;
        }
        operand->input = buffer + (begin - pack->begin);
        if (work->op == HORO_REDUCESCATTER) {
            hr_part(operand->bytes / pack->row_bytes[i], (size_t)size, (size_t)rank, &first, &rows);
        }
        operand->output = buffer + (begin - pack->begin) + first * pack->row_bytes[i];
        pack->in_count++;
    }
}

/* The values of this rank that come out: of a reduce-scatter its rows. */
static size_t results_of(const struct hr_nccl_pack *pack, const struct hr_work *work, size_t i, int rank, int size) {
    const struct hr_operand *operand = &pack->operands[i];
    size_t first;
    size_t rows;
    if (work->op != HORO_REDUCESCATTER) {
        return operand->bytes / hr_dtype_bytes(operand->dtype);
    }
    hr_part(operand->bytes / pack->row_bytes[i], (size_t)size, (size_t)rank, &first, &rows);
    return rows * pack->row_bytes[i] / hr_dtype_bytes(operand->dtype);
}

/* Pieces of the kernel that packs, then of the other. */
static void describe(struct hr_nccl_pack *pack, const struct hr_work *work, int rank, int size) {
    struct hr_pack_piece *in = pack->pieces;
    struct hr_pack_piece *out = pack->pieces + pack->in_count;
    for (size_t i = 0; i < work->count; i++) {
        const struct hr_operand *from = &work->operands[i];
        const struct hr_operand *packed = &pack->operands[i];
        if (packed->bytes == 0) {
            continue;
        }
        const size_t before = (pack->begin > pack->places[i].at ? pack->begin - pack->places[i].at : 0) /
                              hr_dtype_bytes(packed->dtype) * hr_dtype_bytes(from->dtype);
        const int is_bool = from->dtype == HORO_BOOL; /* which nothing is multiplied by */
        const struct hr_scale post = is_bool ? hr_scale_by(1.0) : hr_postscale_of(work, from->dtype, size);
        const struct hr_codec *codec = hr_codec_find(from->dtype, from->wire_dtype);
        const double partial = hr_partial_scale(codec, hr_operation_of(work->reduce_op), post.factor);
        *in++ = (struct hr_pack_piece){.memory = (uintptr_t)from->input + before,
                                       .wire = (uintptr_t)packed->input,
                                       .count = packed->bytes / hr_dtype_bytes(packed->dtype),
                                       .factor = is_bool ? 1.0 : work->prescale,
                                       .partial = partial,
                                       .divisor = 1,
                                       .dtype = from->dtype,
                                       .wire_dtype = packed->dtype};
        *out = (struct hr_pack_piece){.memory = (uintptr_t)from->output + before,
                                      .wire = (uintptr_t)packed->output,
                                      .count = results_of(pack, work, i, rank, size),
                                      .factor = post.factor / partial,
                                      .partial = 1.0,
                                      .divisor = post.divisor,
                                      .dtype = from->dtype,
                                      .wire_dtype = packed->dtype};
        out += out->count > 0;
    }
    pack->out_count = (size_t)(out - pack->pieces) - pack->in_count;
}

/* With the device entered. */
static int launch(struct hr_nccl_pack *pack, void *stream, struct hr_error *error) {
    const unsigned blocks = hr_packer_number(pack->pieces, pack->in_count);
    struct hr_table *table = &pack->table;
    pack->out_blocks = hr_packer_number(pack->pieces + pack->in_count, pack->out_count);
    HR_TRY(hr_table_take(table, pack->room, (pack->in_count + pack->out_count) * sizeof *pack->pieces, error));
    memcpy(table->data, pack->pieces, table->bytes);
    HR_TRY(hr_table_send(table, stream, error));
    return hr_packer_launch(pack->packer, HR_PACKER_IN, table->at, pack->in_count, blocks, stream, error);
}

static int begin_round(struct hr_nccl_pack *pack, const struct hr_work *work, int rank, int size, void *stream,
                       struct hr_error *error) {
    struct hr_device_visit visit;
    pack->end = pack->total;
    if (work->op == HORO_ALLREDUCE && pack->total - pack->begin > HR_NCCL_PACK_BYTES) {
        pack->end = pack->begin + HR_NCCL_PACK_BYTES;
    }
    settle(pack, work, rank, size, pack->room->data + pack->head);
    describe(pack, work, rank, size);
    HR_TRY(hr_device_enter(pack->packer->device, &visit, error));
    const int status = launch(pack, stream, error);
    hr_device_leave(pack->packer->device, &visit);
    return status;
}

int hr_nccl_pack_begin(struct hr_nccl_pack *pack, const struct hr_work *work, int rank, int size, void *stream,
                       struct hr_error *error) {
    if (!hr_op_reduces(work->op)) {
        return HORO_OK;
    }
    if (reserve(pack, work->count) != HORO_OK) {
        return hr_fail(error, HORO_ERR_RESOURCE, "out of memory for NCCL");
    }
    const size_t count = place(pack, work);
    if (count == 0) {
        return HORO_OK;
    }
    if (pack->packer->device == NULL) {
        return hr_fail(error, HORO_ERR_INTERNAL, "a batch that needs kernels, and there are none");
    }
    const int is_cut = work->op == HORO_ALLREDUCE && pack->total > HR_NCCL_PACK_BYTES;
    pack->begin = 0;
    pack->head = hr_round_up(2 * count * sizeof *pack->pieces, ALIGNMENT);
    HR_TRY(hr_room_create(pack->stager, pack->packer->device, stream,
                          pack->head + (is_cut ? HR_NCCL_PACK_BYTES : pack->total), &pack->room, error));
    return begin_round(pack, work, rank, size, stream, error);
}

int hr_nccl_pack_go_on(struct hr_nccl_pack *pack, const struct hr_work *work, int rank, int size, void *stream,
                       struct hr_error *error) {
    pack->begin = pack->end;
    return begin_round(pack, work, rank, size, stream, error);
}

int hr_nccl_pack_end(struct hr_nccl_pack *pack, void *stream, struct hr_error *error) {
    struct hr_device_visit visit;
    if (pack->out_count > 0) {
        HR_TRY(hr_device_enter(pack->packer->device, &visit, error));
        const int status = hr_packer_launch(pack->packer, HR_PACKER_OUT,
                                            pack->table.at + pack->in_count * sizeof *pack->pieces, pack->out_count,
                                            pack->out_blocks, stream, error);
        hr_device_leave(pack->packer->device, &visit);
        HR_TRY(status);
    }
    hr_table_leave(&pack->table, stream);
    if (pack->end == pack->total) {
        hr_nccl_pack_leave(pack, stream);
    }
    return HORO_OK;
}

void hr_nccl_pack_leave(struct hr_nccl_pack *pack, void *stream) {
    hr_table_leave(&pack->table, stream);
    if (pack->room != NULL) {
        hr_room_leave(pack->room, stream);
        hr_room_drop(pack->room, NULL);
        pack->room = NULL;
    }
}

void hr_nccl_pack_fini(struct hr_nccl_pack *pack) {
    free(pack->operands);
    free(pack->row_bytes);
    free(pack->places);
    free(pack->pieces);
    pack->operands = NULL;
    pack->row_bytes = NULL;
    pack->places = NULL;
    pack->pieces = NULL;
    pack->capacity = 0;
}
