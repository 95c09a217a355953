/*
 * The results of an allgather or alltoall, as a record tells them: how many rows come from each rank, so how much
 * memory they need.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/traits.h"
#include "collective/fused.h"
#include "engine/group/lane.h"

enum { TENSOR_TEXT_BYTES = 48 };

/* The rows of a tensor that a rank has for each, of an alltoall. */
static int64_t *splits_of(const struct hr_request *request, int size, int rank, int i) {
    return request->splits + ((size_t)rank * (size_t)request->call.tensor_count + (size_t)i) * (size_t)size;
}

/* Reads how many rows a rank has for all, or for each. */
static void read_tensor(struct hr_request *request, const struct hr_team *team, int rank, int i,
                        const uint8_t **cursor) {
    int64_t *given = &request->gathered[i].first_dims[rank];
    if (request->call.op == HORO_ALLGATHER) {
        *given = hr_wire_next_row(cursor);
        return;
    }
    int64_t *splits = splits_of(request, team->size, rank, i);
    for (int r = 0; r < team->size; r++) {
        splits[r] = hr_wire_next_row(cursor);
    }
    *given = splits[team->rank];
}

/* The record has them host by host, as the announcements came together. */
static int read_rows(struct hr_request *request, const struct hr_team *team, struct hr_wire_rows rows, int is_of_each) {
    const int count = request->call.tensor_count;
    const uint8_t *cursor = rows.data;
    for (int r = 0; r < team->size; r++) {
        cursor = is_of_each ? rows.data : cursor;
        for (int i = 0; i < count; i++) {
            read_tensor(request, team, team->rank_by_host[r], i, &cursor);
        }
    }
    for (int i = 0; i < count; i++) { /* whether what is copied from here is as long as everybody believes */
        const horo_tensor *tensor = &request->call.tensors[i];
        const int is_told = request->splits == NULL
                                ? request->gathered[i].first_dims[team->rank] == tensor->shape[0]
                                : memcmp(splits_of(request, team->size, team->rank, i), tensor->splits,
                                         (size_t)team->size * sizeof(int64_t)) == 0;
        HR_TRY(is_told ? HORO_OK : HORO_ERR_INTERNAL);
    }
    return HORO_OK;
}

/* Sets the bytes of a result, or says no: no memory, and no number here, is as large as that. */
static int measure(struct hr_request *request, int i, int size, int64_t *total) {
    struct hr_gathered *result = &request->gathered[i];
    const horo_tensor *tensor = &request->call.tensors[i];
    int64_t rows = 0, row_bytes = 0, bytes;
    int64_t all = 0; /* rows of all ranks for all */
    /* it was checked when it was submitted */
    (void)hr_shape_bytes(tensor->shape + 1, tensor->ndim - 1, tensor->dtype, &row_bytes);
    for (int r = 0; r < size; r++) {
        if (__builtin_add_overflow(rows, result->first_dims[r], &rows)) {
            return 0;
        }
        /* of an alltoall each rank has another result, and all must come to the same conclusion */
        for (int to = 0; to < size && request->splits != NULL; to++) {
            const int64_t given = splits_of(request, size, r, i)[to];
            if (__builtin_add_overflow(all, given, &all) || __builtin_mul_overflow(given, row_bytes, &bytes) ||
                __builtin_add_overflow(*total, bytes, total)) {
                return 0;
            }
        }
    }
    return !__builtin_mul_overflow(rows, row_bytes, &result->bytes);
}

/* " of tensor 3 of the group", or nothing where there is only one. Returns out, which has TENSOR_TEXT_BYTES. */
static const char *which(const struct hr_request *request, int i, char *out) {
    out[0] = '\0';
    if (request->call.tensor_count > 1) {
        (void)snprintf(out, TENSOR_TEXT_BYTES, " of tensor %d of the group", i);
    }
    return out;
}

/* Places a result. One that would not fit exactly goes elsewhere: the other ranks' work is not to suffer. */
static int place(struct hr_request *request, int i) {
    struct hr_gathered *result = &request->gathered[i];
    const horo_tensor *tensor = &request->call.tensors[i];
    const int insists = (request->call.flags & HORO_SUBMIT_INTO) != 0;
    const int is_given = insists || (request->call.flags & HORO_SUBMIT_OFFER) != 0;
    if (is_given && tensor->output_bytes == result->bytes) {
        result->data = tensor->output;
        result->is_given = 1;
        return HORO_OK;
    }
    request->misfit = insists && request->misfit == 0 ? i + 1 : request->misfit;
    result->data = hr_allocate_vector((size_t)result->bytes);
    return result->data == NULL ? HORO_ERR_RESOURCE : HORO_OK;
}

int hr_gather_prepare(struct hr_request *request, const struct hr_team *team, struct hr_wire_rows rows, int is_of_each,
                      struct hr_error *error) {
    const int count = request->call.tensor_count;
    const int is_alltoall = request->call.op == HORO_ALLTOALL;
    const size_t all = (size_t)count * (size_t)team->size; /* first extents */
    const size_t splits = is_alltoall ? all * (size_t)team->size : 0;
    int64_t total = 0;
    if (rows.count * (is_of_each ? (size_t)team->size : 1) != (is_alltoall ? splits : all)) {
        return HORO_ERR_INTERNAL;
    }
    int64_t *first_dims = calloc(all, sizeof *first_dims); /* of the first tensor; the others' point into it */
    HR_TRY(first_dims == NULL ? HORO_ERR_RESOURCE : HORO_OK);
    for (int i = 0; i < count; i++) {
        request->gathered[i].first_dims = first_dims + (size_t)i * (size_t)team->size;
    }
    if (is_alltoall && (request->splits = calloc(splits, sizeof *request->splits)) == NULL) {
        return HORO_ERR_RESOURCE;
    }
    HR_TRY(read_rows(request, team, rows, is_of_each));
    for (int i = 0; i < count; i++) {
        if (!measure(request, i, team->size, &total)) {
            char tensor[TENSOR_TEXT_BYTES];
            return hr_fail(error, HORO_ERR_USAGE,
                           "%s '%s': the rows of all %d ranks together make the result%s larger than %lld bytes",
                           hr_op_name(request->call.op), request->call.name, team->size, which(request, i, tensor),
                           (long long)INT64_MAX);
        }
    }
    for (int i = 0; i < count; i++) {
        HR_TRY(place(request, i));
    }
    return HORO_OK;
}

void hr_gather_refuse(const struct hr_request *request, struct hr_error *error) {
    char tensor[TENSOR_TEXT_BYTES];
    const int i = request->misfit - 1;
    (void)hr_fail(error, HORO_ERR_USAGE, "%s '%s': the result%s has %lld bytes, but its output has %lld",
                  hr_op_name(request->call.op), request->call.name, which(request, i, tensor),
                  (long long)request->gathered[i].bytes, (long long)request->call.tensors[i].output_bytes);
}
