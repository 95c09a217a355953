#include "shim_wire.h"

#include <stdlib.h>
#include <string.h>

#include "wire/wire.h"
#include "wire_walk.h"

static struct hr_wire_text to_core(shim_text text) {
    return (struct hr_wire_text){text.data, text.bytes};
}

static shim_text from_core(struct hr_wire_text text) {
    return (shim_text){text.data, text.bytes};
}

/* Starts with unread bytes and one byte consumed, as a send buffer would. */
static struct hr_buffer used_buffer(void) {
    struct hr_buffer buffer = {0};
    if (hr_buffer_append(&buffer, "xy", 2) == HORO_OK) {
        hr_buffer_consume(&buffer, 1);
    }
    return buffer;
}

static int64_t finish(struct hr_buffer *buffer, int status, void *out, size_t out_bytes) {
    const size_t bytes = hr_buffer_size(buffer) - 1;
    int64_t result = status;
    if (status == HORO_OK && bytes <= out_bytes) {
        memcpy(out, hr_buffer_front(buffer) + 1, bytes);
        result = (int64_t)bytes;
    } else if (status == HORO_OK || bytes != 0) { /* no room here; or a failure that appended something */
        result = HORO_ERR_USAGE;
    }
    hr_buffer_fini(buffer);
    return result;
}

int64_t shim_wire_encode_request(const horo_request *request, void *out, size_t out_bytes) {
    struct hr_buffer buffer = used_buffer();
    return finish(&buffer, hr_wire_encode_request(&buffer, request), out, out_bytes);
}

int64_t shim_wire_put_ids(const uint32_t *ids, uint32_t count, void *out, size_t out_bytes) {
    struct hr_buffer buffer = used_buffer();
    return finish(&buffer, hr_wire_put_ids(&buffer, ids, count), out, out_bytes);
}

/* Encoded by the core, as those of an allgather with a tensor for each. */
struct encoded {
    uint8_t *room;
    struct hr_wire_rows rows;
};

static struct encoded encode_rows(const int64_t *rows, uint32_t count) {
    horo_tensor *tensors = calloc(count + 1u, sizeof *tensors);
    if (tensors == NULL) {
        return (struct encoded){0};
    }
    for (uint32_t i = 0; i < count; i++) {
        tensors[i] = (horo_tensor){.shape = &rows[i], .ndim = 1};
    }
    const horo_request call = {.op = HORO_ALLGATHER, .tensors = tensors, .tensor_count = (int32_t)count};
    struct encoded result = {.room = malloc(hr_wire_rows_bytes(&call) + 1)};
    if (result.room != NULL) {
        result.rows = hr_wire_encode_rows(&call, result.room);
    }
    free(tensors);
    return result;
}

int64_t shim_wire_put_rows(uint32_t id, const int64_t *rows, uint32_t row_count, void *out, size_t out_bytes) {
    struct hr_buffer buffer = used_buffer();
    const struct encoded encoded = encode_rows(rows, row_count);
    const int result =
        hr_wire_put(&buffer, &(struct hr_wire_message){.type = HR_WIRE_ROWS, .id = id, .rows = encoded.rows});
    free(encoded.room);
    return finish(&buffer, result, out, out_bytes);
}

int64_t shim_wire_put_request(int origin, int status, shim_text text, const int64_t *rows, uint32_t row_count,
                              const void *request, size_t request_bytes, void *out, size_t out_bytes) {
    struct hr_buffer buffer = used_buffer();
    const struct encoded encoded = encode_rows(rows, row_count);
    const int result =
        hr_wire_put(&buffer, &(struct hr_wire_message){.type = HR_WIRE_REQUEST,
                                                       .rank = origin,
                                                       .status = status,
                                                       .text = to_core(text),
                                                       .rows = encoded.rows,
                                                       .request = {.bytes = request, .byte_count = request_bytes}});
    free(encoded.room);
    return finish(&buffer, result, out, out_bytes);
}

int64_t shim_wire_put_lost(int rank, int status, int reason, int by, void *out, size_t out_bytes) {
    struct hr_buffer buffer = used_buffer();
    return finish(&buffer,
                  hr_wire_put(&buffer, &(struct hr_wire_message){.type = HR_WIRE_LOST,
                                                                 .rank = rank,
                                                                 .status = status,
                                                                 .reason = (enum hr_abort_reason)reason,
                                                                 .by = by}),
                  out, out_bytes);
}

int64_t shim_wire_put_ended(int rank, int status, shim_text text, void *out, size_t out_bytes) {
    struct hr_buffer buffer = used_buffer();
    return finish(&buffer,
                  hr_wire_put(&buffer,
                              &(struct hr_wire_message){
                                  .type = HR_WIRE_ENDED, .rank = rank, .status = status, .text = to_core(text)}),
                  out, out_bytes);
}

int64_t shim_wire_put_blocked(int rank, uint32_t question, shim_text text, shim_text others, uint32_t lanes,
                              uint32_t hashes, void *out, size_t out_bytes) {
    struct hr_buffer buffer = used_buffer();
    int result = hr_wire_put(&buffer, &(struct hr_wire_message){.type = HR_WIRE_BLOCKED,
                                                                .rank = rank,
                                                                .question = question,
                                                                .text = to_core(text),
                                                                .others = to_core(others),
                                                                .count = lanes});
    for (uint32_t i = 0; i < lanes && result == HORO_OK; i++) {
        const struct hr_wire_lane lane = {
            .team = 2 * i, .members = i + 1, .executed = (uint64_t)i << 40, .count = hashes};
        result = hr_wire_put_lane(&buffer, &lane);
        for (uint32_t k = 0; k < hashes && result == HORO_OK; k++) {
            result = hr_wire_put_hash(&buffer, ~(uint64_t)(i + k));
        }
    }
    return finish(&buffer, result, out, out_bytes);
}

int64_t shim_wire_put_ask(int rank, void *out, size_t out_bytes) {
    struct hr_buffer buffer = used_buffer();
    return finish(&buffer, hr_wire_put(&buffer, &(struct hr_wire_message){.type = HR_WIRE_ASK, .rank = rank}), out,
                  out_bytes);
}

int64_t shim_wire_put_query(uint32_t question, void *out, size_t out_bytes) {
    struct hr_buffer buffer = used_buffer();
    return finish(&buffer, hr_wire_put(&buffer, &(struct hr_wire_message){.type = HR_WIRE_QUERY, .question = question}),
                  out, out_bytes);
}

int64_t shim_wire_put_tune(int is_final, const uint64_t *values, uint32_t count, void *out, size_t out_bytes) {
    struct hr_buffer buffer = used_buffer();
    return finish(&buffer, hr_wire_put_tune(&buffer, is_final, values, count), out, out_bytes);
}

int64_t shim_wire_put_leave(int rank, int status, shim_text text, void *out, size_t out_bytes) {
    struct hr_buffer buffer = used_buffer();
    return finish(&buffer,
                  hr_wire_put(&buffer,
                              &(struct hr_wire_message){
                                  .type = HR_WIRE_LEAVE, .rank = rank, .status = status, .text = to_core(text)}),
                  out, out_bytes);
}

int64_t shim_wire_put_done(int rank, void *out, size_t out_bytes) {
    struct hr_buffer buffer = used_buffer();
    return finish(&buffer, hr_wire_put(&buffer, &(struct hr_wire_message){.type = HR_WIRE_DONE, .rank = rank}), out,
                  out_bytes);
}

int64_t shim_wire_put_fail(int status, shim_text name, shim_text text, void *out, size_t out_bytes) {
    struct hr_buffer buffer = used_buffer();
    return finish(&buffer,
                  hr_wire_put(&buffer, &(struct hr_wire_message){.type = HR_WIRE_FAIL,
                                                                 .status = status,
                                                                 .name = to_core(name),
                                                                 .text = to_core(text)}),
                  out, out_bytes);
}

int64_t shim_wire_put_batch(uint32_t claimed_count, uint32_t count, const uint32_t *ids, const shim_text *names,
                            const int64_t *rows, uint32_t row_count, void *out, size_t out_bytes) {
    struct hr_buffer buffer = used_buffer();
    int status = hr_wire_put(&buffer, &(struct hr_wire_message){.type = HR_WIRE_BATCH, .count = claimed_count});
    for (uint32_t i = 0; i < count && status == HORO_OK; i++) {
        status = hr_wire_put_ref(&buffer, ids[i], to_core(names[i]));
    }
    const struct encoded encoded = encode_rows(rows, row_count);
    status = status == HORO_OK ? hr_wire_end_batch(&buffer, encoded.rows) : status;
    free(encoded.room);
    return finish(&buffer, status, out, out_bytes);
}

static shim_wire_request request_from_core(const struct hr_wire_request *request) {
    return (shim_wire_request){
        .op = request->op,
        .reduce_op = request->reduce_op,
        .transient = request->transient,
        .on_gpu = request->on_gpu,
        .root_rank = request->root_rank,
        .prescale = request->prescale,
        .postscale = request->postscale,
        .name = from_core(request->name),
        .tensor_count = request->tensor_count,
        .bytes = request->bytes,
        .byte_count = request->byte_count,
        .tensors = request->tensors,
    };
}

int shim_wire_decode(const void *data, size_t bytes, shim_wire_message *message) {
    struct hr_wire_message decoded;
    const int status = hr_wire_decode(data, bytes, &decoded);
    *message = (shim_wire_message){
        .type = (int)decoded.type,
        .rank = decoded.rank,
        .status = decoded.status,
        .reason = (int)decoded.reason,
        .name = from_core(decoded.name),
        .text = from_core(decoded.text),
        .count = decoded.count,
        .items = decoded.items,
        .id = decoded.id,
        .question = decoded.question,
        .rows = decoded.rows.data,
        .row_count = decoded.rows.count,
        .request = request_from_core(&decoded.request),
    };
    return status;
}

int shim_wire_decode_request(const void *data, size_t bytes, shim_wire_request *request) {
    struct hr_wire_request decoded;
    const int status = hr_wire_decode_request(data, bytes, &decoded);
    *request = request_from_core(&decoded);
    return status;
}

void shim_wire_ids(const shim_wire_message *message, uint32_t *ids) {
    for (uint32_t i = 0; i < message->count; i++) {
        ids[i] = hr_wire_u32(message->items, i);
    }
}

void shim_wire_rows(const shim_wire_message *message, int64_t *rows) {
    const uint8_t *cursor = message->rows;
    for (uint32_t i = 0; i < message->row_count; i++) {
        rows[i] = hr_wire_next_row(&cursor);
    }
}

void shim_wire_refs(const shim_wire_message *message, uint32_t *ids, shim_text *names) {
    const uint8_t *cursor = message->items;
    for (uint32_t i = 0; i < message->count; i++) {
        struct hr_wire_ref ref;
        hr_wire_next_ref(&cursor, &ref);
        ids[i] = ref.id;
        names[i] = from_core(ref.name);
    }
}

void shim_wire_tensors(const shim_wire_request *request, int *dtypes, int *wire_dtypes, int *ndims, int64_t *shapes) {
    const uint8_t *cursor = request->tensors;
    for (uint32_t i = 0; i < request->tensor_count; i++) {
        struct hr_wire_tensor tensor;
        hr_wire_next_tensor(&cursor, &tensor);
        dtypes[i] = tensor.dtype;
        wire_dtypes[i] = tensor.wire_dtype;
        ndims[i] = tensor.ndim;
        memcpy(shapes + (size_t)i * HORO_DIMS_MAX, tensor.shape, (size_t)tensor.ndim * sizeof *shapes);
    }
}

void shim_wire_describe(int dtype, int wire_dtype, int ndim, const int64_t *shape, char *out, size_t out_bytes) {
    struct hr_wire_tensor tensor = {.dtype = dtype, .wire_dtype = wire_dtype, .ndim = ndim};
    memcpy(tensor.shape, shape, (size_t)ndim * sizeof *shape);
    (void)hr_wire_describe_tensor(&tensor, out, out_bytes);
}

int shim_wire_tensor_bytes(int op, const int64_t *shape, int ndim, int dtype, int64_t *bytes) {
    return hr_wire_tensor_bytes(op, shape, ndim, dtype, bytes);
}

int shim_wire_probe(const void *data, size_t bytes) {
    uint8_t *copy = malloc(bytes == 0 ? 1 : bytes);
    if (copy == NULL) {
        return HORO_ERR_RESOURCE;
    }
    memcpy(copy, data, bytes);
    const int status = wire_walk(copy, bytes);
    free(copy);
    return status;
}

static int count_outcome(int status, uint64_t *accepted, uint64_t *rejected) {
    *accepted += status == HORO_OK;
    *rejected += status == HORO_ERR_INTERNAL;
    return status == HORO_OK || status == HORO_ERR_INTERNAL ? HORO_OK : status;
}

int shim_wire_probe_mutants(const void *data, size_t bytes, uint64_t *accepted, uint64_t *rejected) {
    *accepted = 0;
    *rejected = 0;
    for (size_t length = 0; length < bytes; length++) {
        HR_TRY(count_outcome(shim_wire_probe(data, length), accepted, rejected));
    }
    uint8_t *mutant = malloc(bytes);
    if (mutant == NULL) {
        return HORO_ERR_RESOURCE;
    }
    int status = HORO_OK;
    for (size_t i = 0; i < bytes && status == HORO_OK; i++) {
        memcpy(mutant, data, bytes);
        for (int value = 0; value < 256 && status == HORO_OK; value++) {
            mutant[i] = (uint8_t)value;
            status = count_outcome(shim_wire_probe(mutant, bytes), accepted, rejected);
        }
    }
    free(mutant);
    return status;
}
