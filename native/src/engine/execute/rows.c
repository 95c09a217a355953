/*
 * The results of an allgather or alltoall, as a record tells them: how many rows come from each rank, so how much
 * memory they need.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/operands.h"
#include "base/traits.h"
#include "engine/engine.h"

enum { TENSOR_TEXT_BYTES = 48 };

/* gathered[i].first_dims point into one allocation, that of the first tensor. */
static int allocate_rows(struct hr_request *request, size_t size) {
    const size_t count = (size_t)request->call.tensor_count;
    int64_t *first_dims = calloc(count * size, sizeof *first_dims);
    if (first_dims == NULL) {
        return HORO_ERR_RESOURCE;
    }
    if (request->call.op == HORO_ALLTOALL) {
        request->splits = calloc(count * size * size, sizeof *request->splits);
    }
    for (size_t i = 0; i < count; i++) {
        request->gathered[i].first_dims = first_dims + i * size;
    }
    return request->call.op == HORO_ALLTOALL && request->splits == NULL ? HORO_ERR_RESOURCE : HORO_OK;
}

/* Reads how many rows a rank has for all, or for each. */
static void read_tensor(struct hr_request *request, const struct hr_team *team, int rank, int i,
                        const uint8_t **cursor) {
    int64_t *given = &request->gathered[i].first_dims[rank];
    if (request->call.op == HORO_ALLGATHER) {
        *given = hr_wire_next_row(cursor);
        return;
    }
    const size_t place = (size_t)rank * (size_t)request->call.tensor_count + (size_t)i;
    int64_t *splits = request->splits + place * (size_t)team->size;
    for (int r = 0; r < team->size; r++) {
        splits[r] = hr_wire_next_row(cursor);
    }
    *given = splits[team->rank];
}

/* Whether what is copied from here is as long as everybody believes. */
static int is_what_i_told(const struct hr_request *request, const struct hr_team *team, int i) {
    const horo_tensor *tensor = &request->call.tensors[i];
    if (request->call.op == HORO_ALLGATHER) {
        return request->gathered[i].first_dims[team->rank] == tensor->shape[0];
    }
    const size_t place = (size_t)team->rank * (size_t)request->call.tensor_count + (size_t)i;
    const size_t bytes = (size_t)team->size * sizeof(int64_t);
    return memcmp(request->splits + place * (size_t)team->size, tensor->splits, bytes) == 0;
}

/* The record has them host by host, as the announcements came together. */
static int read_rows(struct hr_request *request, const struct hr_team *team, struct hr_wire_rows rows) {
    const int count = request->call.tensor_count;
    const uint8_t *cursor = rows.data;
    for (int r = 0; r < team->size; r++) {
        for (int i = 0; i < count; i++) {
            read_tensor(request, team, team->rank_by_host[r], i, &cursor);
        }
    }
    for (int i = 0; i < count; i++) {
        if (!is_what_i_told(request, team, i)) {
            return HORO_ERR_INTERNAL;
        }
    }
    return HORO_OK;
}

/* Adds the bytes that all ranks have for all ranks; 0 where they are more than a number here holds. */
static int add_splits(const struct hr_request *request, int i, int size, int64_t row_bytes, int64_t *total) {
    const size_t count = (size_t)request->call.tensor_count;
    for (size_t r = 0; r < (size_t)size; r++) {
        for (size_t to = 0; to < (size_t)size; to++) {
            int64_t bytes;
            if (__builtin_mul_overflow(request->splits[(r * count + (size_t)i) * (size_t)size + to], row_bytes,
                                       &bytes) ||
                __builtin_add_overflow(*total, bytes, total)) {
                return 0;
            }
        }
    }
    return 1;
}

/* Sets the bytes of a result, or says no: no memory, and no number here, is as large as that. */
static int measure(struct hr_request *request, int i, int size, int64_t *total) {
    struct hr_gathered *result = &request->gathered[i];
    const horo_tensor *tensor = &request->call.tensors[i];
    int64_t rows = 0;
    int64_t row_bytes = 0;
    /* it was checked when it was submitted */
    (void)hr_shape_bytes(tensor->shape + 1, tensor->ndim - 1, tensor->dtype, &row_bytes);
    for (int r = 0; r < size; r++) {
        if (__builtin_add_overflow(rows, result->first_dims[r], &rows)) {
            return 0;
        }
    }
    /* of an alltoall each rank has another result, and all must come to the same conclusion */
    return !__builtin_mul_overflow(rows, row_bytes, &result->bytes) &&
           (request->splits == NULL || add_splits(request, i, size, row_bytes, total));
}

/* " of tensor 3 of the group", or nothing where there is only one. */
static const char *which(const struct hr_request *request, int i, char *out, size_t out_bytes) {
    out[0] = '\0';
    if (request->call.tensor_count > 1) {
        (void)snprintf(out, out_bytes, " of tensor %d of the group", i);
    }
    return out;
}

/* Places a result. One that would not fit exactly goes elsewhere: the other ranks' work is not to suffer. */
static int place(struct hr_request *request, int i) {
    struct hr_gathered *result = &request->gathered[i];
    const horo_tensor *tensor = &request->call.tensors[i];
    const int insists = (request->call.flags & HORO_SUBMIT_INTO) != 0;
    if (!insists && (request->call.flags & HORO_SUBMIT_OFFER) == 0) {
        return hr_gathered_allocate(result);
    }
    if (tensor->output_bytes != result->bytes) {
        request->misfit = insists && request->misfit == 0 ? i + 1 : request->misfit;
        return hr_gathered_allocate(result);
    }
    result->data = tensor->output;
    result->is_given = 1;
    return HORO_OK;
}

int hr_gather_prepare(struct hr_request *request, const struct hr_team *team, struct hr_wire_rows rows, char *text,
                      size_t text_bytes) {
    const int count = request->call.tensor_count;
    const uint64_t told = request->call.op == HORO_ALLTOALL ? (uint64_t)team->size : 1;
    int64_t total = 0;
    if (rows.count != (uint64_t)team->size * (uint64_t)count * told) {
        return HORO_ERR_INTERNAL;
    }
    HR_TRY(allocate_rows(request, (size_t)team->size));
    HR_TRY(read_rows(request, team, rows));
    for (int i = 0; i < count; i++) {
        if (!measure(request, i, team->size, &total)) {
            char tensor[TENSOR_TEXT_BYTES];
            (void)snprintf(text, text_bytes,
                           "%s '%s': the rows of all %d ranks together make the result%s larger than %lld bytes",
                           hr_op_name(request->call.op), request->call.name, team->size,
                           which(request, i, tensor, sizeof tensor), (long long)INT64_MAX);
            return HORO_ERR_USAGE;
        }
    }
    for (int i = 0; i < count; i++) {
        HR_TRY(place(request, i));
    }
    return HORO_OK;
}

int hr_gather_outcome(const struct hr_request *request, char *text, size_t text_bytes) {
    if (request->misfit == 0) {
        return HORO_OK;
    }
    char tensor[TENSOR_TEXT_BYTES];
    const int i = request->misfit - 1;
    (void)snprintf(text, text_bytes, "%s '%s': the result%s has %lld bytes, but its output has %lld",
                   hr_op_name(request->call.op), request->call.name, which(request, i, tensor, sizeof tensor),
                   (long long)request->gathered[i].bytes, (long long)request->call.tensors[i].output_bytes);
    return HORO_ERR_USAGE;
}
