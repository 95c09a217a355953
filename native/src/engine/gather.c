/* What a record says of the results of an allgather: how many rows each rank gives, so how much memory they need. */
#include <stdio.h>
#include <stdlib.h>

#include "backend/operands.h"
#include "engine/engine.h"

enum { TENSOR_TEXT_BYTES = 48 };

/* gathered[i].first_dims point into one allocation, that of the first tensor. */
static int allocate_rows(struct hr_request *request, size_t size) {
    const size_t count = (size_t)request->call.tensor_count;
    int64_t *first_dims = calloc(count * size, sizeof *first_dims);
    if (first_dims == NULL) {
        return HORO_ERR_RESOURCE;
    }
    for (size_t i = 0; i < count; i++) {
        request->gathered[i].first_dims = first_dims + i * size;
    }
    return HORO_OK;
}

/* The record has them host by host, as the announcements came together. */
static int read_rows(struct hr_request *request, const struct hr_team *team, struct hr_wire_rows rows) {
    const int count = request->call.tensor_count;
    const uint8_t *cursor = rows.data;
    for (int r = 0; r < team->size; r++) {
        for (int i = 0; i < count; i++) {
            request->gathered[i].first_dims[team->rank_by_host[r]] = hr_wire_next_row(&cursor);
        }
    }
    for (int i = 0; i < count; i++) { /* what is copied from here is as long as everybody believes */
        if (request->gathered[i].first_dims[team->rank] != request->call.tensors[i].shape[0]) {
            return HORO_ERR_INTERNAL;
        }
    }
    return HORO_OK;
}

/* Sets the bytes of a result, or says no: no memory, and no number here, is as large as that. */
static int measure(struct hr_gathered *result, const horo_tensor *tensor, int size) {
    int64_t rows = 0;
    int64_t row_bytes = 0;
    /* it was checked when it was submitted */
    (void)hr_wire_shape_bytes(tensor->shape + 1, tensor->ndim - 1, tensor->dtype, &row_bytes);
    for (int r = 0; r < size; r++) {
        if (__builtin_add_overflow(rows, result->first_dims[r], &rows)) {
            return 0;
        }
    }
    return !__builtin_mul_overflow(rows, row_bytes, &result->bytes);
}

/* " of tensor 3 of the group", or nothing where there is only one. */
static const char *which(const struct hr_request *request, int i, char *out, size_t out_bytes) {
    out[0] = '\0';
    if (request->call.tensor_count > 1) {
        (void)snprintf(out, out_bytes, " of tensor %d of the group", i);
    }
    return out;
}

/* Where a result goes. One that would not fit exactly goes elsewhere: the other ranks' work is not to suffer. */
static int place(struct hr_request *request, int i) {
    struct hr_gathered *result = &request->gathered[i];
    const horo_tensor *tensor = &request->call.tensors[i];
    if ((request->call.flags & HORO_SUBMIT_INTO) == 0) {
        return hr_gathered_allocate(result);
    }
    if (tensor->output_bytes != result->bytes) {
        request->misfit = request->misfit == 0 ? i + 1 : request->misfit;
        return hr_gathered_allocate(result);
    }
    result->data = tensor->output;
    result->is_given = 1;
    return HORO_OK;
}

int hr_gather_prepare(struct hr_request *request, const struct hr_team *team, struct hr_wire_rows rows, char *text,
                      size_t text_bytes) {
    const int count = request->call.tensor_count;
    if (rows.count != (uint64_t)team->size * (uint64_t)count) {
        return HORO_ERR_INTERNAL;
    }
    HR_TRY(allocate_rows(request, (size_t)team->size));
    HR_TRY(read_rows(request, team, rows));
    for (int i = 0; i < count; i++) {
        if (!measure(&request->gathered[i], &request->call.tensors[i], team->size)) {
            char tensor[TENSOR_TEXT_BYTES];
            (void)snprintf(text, text_bytes,
                           "allgather '%s': the rows of all %d ranks together make the result%s larger than %lld bytes",
                           request->call.name, team->size, which(request, i, tensor, sizeof tensor),
                           (long long)INT64_MAX);
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
    (void)snprintf(text, text_bytes, "allgather '%s': the result%s has %lld bytes, but its output has %lld",
                   request->call.name, which(request, i, tensor, sizeof tensor),
                   (long long)request->gathered[i].bytes, (long long)request->call.tensors[i].output_bytes);
    return HORO_ERR_USAGE;
}
