#include <string.h>

#include "base/little_endian.h"
#include "base/op.h"
#include "horo_gpu.h"
#include "wire/wire.h"

enum {
    REQUEST_FIXED_BYTES = 3 + 4 + 8 + 8 + 2 + 4, /* everything of a request but its name and tensors */
    TENSOR_FIXED_BYTES = 3,
};

static uint8_t *write_i32(uint8_t *at, int32_t value) {
    return hr_store_u32(at, (uint32_t)value);
}

static uint8_t *write_f64(uint8_t *at, double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return hr_store_u64(at, bits);
}

/* A text that does not fit the length field is cut: it can only be the end of a sentence, names are far shorter. */
static size_t str16_bytes(struct hr_wire_text text) {
    return text.bytes < HR_WIRE_TEXT_MAX ? text.bytes : HR_WIRE_TEXT_MAX;
}

static uint8_t *write_str16(uint8_t *at, struct hr_wire_text text) {
    const size_t bytes = str16_bytes(text);
    at = hr_store_u16(at, (uint16_t)bytes);
    if (bytes > 0) {
        memcpy(at, text.data, bytes);
    }
    return at + bytes;
}

static size_t var_bytes(uint64_t value) {
    size_t bytes = 1;
    while ((value >>= 7) != 0) {
        bytes++;
    }
    return bytes;
}

static uint8_t *write_var(uint8_t *at, uint64_t value) {
    for (; value >= 0x80; value >>= 7) {
        *at++ = (uint8_t)(value | 0x80);
    }
    *at++ = (uint8_t)value;
    return at;
}

static size_t counted_bytes(struct hr_wire_rows rows) {
    return var_bytes(rows.count) + rows.bytes;
}

static uint8_t *write_rows(uint8_t *at, struct hr_wire_rows rows) {
    at = write_var(at, rows.count);
    if (rows.bytes > 0) {
        memcpy(at, rows.data, rows.bytes);
    }
    return at + rows.bytes;
}

/* Room for a message of `bytes`, or NULL where memory or the limit on messages does not allow it. */
static uint8_t *begin(struct hr_buffer *out, size_t bytes) {
    if (bytes > HR_WIRE_MESSAGE_MAX || hr_buffer_reserve(out, bytes) != HORO_OK) {
        return NULL;
    }
    return out->data + out->end;
}

static int finish(struct hr_buffer *out, const uint8_t *at) {
    out->end = (size_t)(at - out->data);
    return HORO_OK;
}

size_t hr_wire_request_bytes(const horo_request *request) {
    const struct hr_wire_text name = {request->name, strlen(request->name)};
    size_t bytes = REQUEST_FIXED_BYTES + str16_bytes(name);
    for (int32_t i = 0; i < request->tensor_count; i++) {
        bytes += TENSOR_FIXED_BYTES + sizeof(int64_t) * (size_t)request->tensors[i].ndim;
    }
    return hr_op_is_of_teams(request->op) ? bytes + sizeof(int32_t) * (size_t)request->tensors[0].shape[0] : bytes;
}

static uint8_t *write_values(uint8_t *at, const horo_tensor *tensor) {
    const int32_t *values = tensor->input;
    for (int64_t i = 0; i < tensor->shape[0]; i++) {
        at = write_i32(at, values[i]);
    }
    return at;
}

static uint8_t *write_tensor(uint8_t *at, const horo_tensor *tensor, int op) {
    *at++ = (uint8_t)tensor->dtype;
    *at++ = (uint8_t)(hr_op_reduces(op) ? tensor->wire_dtype : 0);
    *at++ = (uint8_t)tensor->ndim;
    for (int32_t i = 0; i < tensor->ndim; i++) {
        const int free_extent = hr_op_tells_rows(op) && i == 0;
        at = hr_store_u64(at, free_extent ? 0 : (uint64_t)tensor->shape[i]);
    }
    return at;
}

int hr_wire_encode_request(struct hr_buffer *out, const horo_request *request) {
    const struct hr_wire_text name = {request->name, strlen(request->name)};
    const size_t bytes = hr_wire_request_bytes(request);
    uint8_t *at = bytes > HR_WIRE_REQUEST_MAX ? NULL : begin(out, bytes);
    if (at == NULL) {
        return HORO_ERR_RESOURCE;
    }
    /*
     * A field that means nothing for this operation gets one fixed value, so that it cannot make two requests differ.
     */
    const int reduces = hr_op_reduces(request->op);
    *at++ = (uint8_t)request->op;
    *at++ = (uint8_t)(reduces ? request->reduce_op : 0);
    const int on_gpu = hr_op_moves_data(request->op) && (request->flags & HORO_SUBMIT_ON_GPU) != 0;
    *at++ = (uint8_t)(((request->flags & HORO_SUBMIT_TRANSIENT) != 0) | (on_gpu ? HR_WIRE_ON_GPU : 0));
    at = write_i32(at, request->op == HORO_BROADCAST ? request->root_rank : 0);
    at = write_f64(at, reduces ? request->prescale : 1.0);
    at = write_f64(at, reduces ? request->postscale : 1.0);
    at = write_str16(at, name);
    at = hr_store_u32(at, (uint32_t)request->tensor_count);
    for (int32_t i = 0; i < request->tensor_count; i++) {
        at = write_tensor(at, &request->tensors[i], request->op);
    }
    if (hr_op_is_of_teams(request->op)) {
        at = write_values(at, &request->tensors[0]);
    }
    return finish(out, at);
}

/* The numbers that a rank tells of a tensor: of its rows, or of its rows for each rank. */
static const int64_t *rows_of(const horo_request *request, int32_t i, int32_t *count) {
    const horo_tensor *tensor = &request->tensors[i];
    *count = request->op == HORO_ALLTOALL ? tensor->split_count : 1;
    return request->op == HORO_ALLTOALL ? tensor->splits : tensor->shape;
}

size_t hr_wire_rows_bytes(const horo_request *request) {
    size_t bytes = 0;
    for (int32_t i = 0; i < request->tensor_count && hr_op_tells_rows(request->op); i++) {
        int32_t count;
        const int64_t *rows = rows_of(request, i, &count);
        for (int32_t r = 0; r < count; r++) {
            bytes += var_bytes((uint64_t)rows[r]);
        }
    }
    return bytes;
}

struct hr_wire_rows hr_wire_encode_row(int64_t row, uint8_t *room) {
    return (struct hr_wire_rows){.data = room, .bytes = (size_t)(write_var(room, (uint64_t)row) - room), .count = 1};
}

struct hr_wire_rows hr_wire_encode_rows(const horo_request *request, uint8_t *room) {
    uint8_t *at = room;
    struct hr_wire_rows written = {.data = room};
    if (!hr_op_tells_rows(request->op)) {
        return (struct hr_wire_rows){0};
    }
    for (int32_t i = 0; i < request->tensor_count; i++) {
        int32_t count;
        const int64_t *rows = rows_of(request, i, &count);
        for (int32_t r = 0; r < count; r++) {
            at = write_var(at, (uint64_t)rows[r]);
        }
        written.count += (uint32_t)count;
    }
    written.bytes = (size_t)(at - room);
    return written;
}

int hr_wire_put_ids(struct hr_buffer *out, const uint32_t *ids, uint32_t count) {
    uint8_t *at = count > HR_WIRE_TENSORS_MAX ? NULL : begin(out, 1 + 4 + sizeof *ids * (size_t)count);
    if (at == NULL) {
        return HORO_ERR_RESOURCE;
    }
    *at++ = HR_WIRE_IDS;
    at = hr_store_u32(at, count);
    for (uint32_t i = 0; i < count; i++) {
        at = hr_store_u32(at, ids[i]);
    }
    return finish(out, at);
}

/* Whether one of them is longer than any message: the sums below must not wrap. */
static int is_too_long(size_t one, size_t other) {
    return one > HR_WIRE_MESSAGE_MAX || other > HR_WIRE_MESSAGE_MAX;
}

int hr_wire_put_rows(struct hr_buffer *out, uint32_t id, struct hr_wire_rows rows) {
    uint8_t *at = is_too_long(rows.bytes, 0) ? NULL : begin(out, 1 + 4 + counted_bytes(rows));
    if (at == NULL) {
        return HORO_ERR_RESOURCE;
    }
    *at++ = HR_WIRE_ROWS;
    return finish(out, write_rows(hr_store_u32(at, id), rows));
}

int hr_wire_put_request(struct hr_buffer *out, int origin, int status, struct hr_wire_text text,
                        struct hr_wire_rows rows, const void *request, size_t request_bytes) {
    if (is_too_long(rows.bytes, request_bytes)) {
        return HORO_ERR_RESOURCE;
    }
    uint8_t *at = begin(out, 1 + 4 + 4 + 2 + str16_bytes(text) + counted_bytes(rows) + request_bytes);
    if (at == NULL) {
        return HORO_ERR_RESOURCE;
    }
    *at++ = HR_WIRE_REQUEST;
    at = write_i32(at, origin);
    at = write_i32(at, status);
    at = write_rows(write_str16(at, text), rows);
    memcpy(at, request, request_bytes);
    return finish(out, at + request_bytes);
}

int hr_wire_put_lost(struct hr_buffer *out, int rank, int status, enum hr_abort_reason reason, int by) {
    uint8_t *at = begin(out, 1 + 4 + 4 + 1 + 4);
    if (at == NULL) {
        return HORO_ERR_RESOURCE;
    }
    *at++ = HR_WIRE_LOST;
    at = write_i32(at, rank);
    at = write_i32(at, status);
    *at++ = (uint8_t)reason;
    return finish(out, write_i32(at, by));
}

static int put_words(struct hr_buffer *out, enum hr_wire_type type, int rank, int status, struct hr_wire_text text) {
    uint8_t *at = begin(out, 1 + 4 + 4 + 2 + str16_bytes(text));
    if (at == NULL) {
        return HORO_ERR_RESOURCE;
    }
    *at++ = (uint8_t)type;
    return finish(out, write_str16(write_i32(write_i32(at, rank), status), text));
}

int hr_wire_put_ended(struct hr_buffer *out, int rank, int status, struct hr_wire_text text) {
    return put_words(out, HR_WIRE_ENDED, rank, status, text);
}

int hr_wire_put_leave(struct hr_buffer *out, int rank, int status, struct hr_wire_text text) {
    return put_words(out, HR_WIRE_LEAVE, rank, status, text);
}

int hr_wire_begin_blocked(struct hr_buffer *out, int rank, uint32_t question, struct hr_wire_text text,
                          struct hr_wire_text others, uint32_t count) {
    uint8_t *at = begin(out, 1 + 4 + 4 + 2 + str16_bytes(text) + 2 + str16_bytes(others) + 4);
    if (at == NULL) {
        return HORO_ERR_RESOURCE;
    }
    *at++ = HR_WIRE_BLOCKED;
    at = hr_store_u32(write_i32(at, rank), question);
    at = write_str16(write_str16(at, text), others);
    return finish(out, hr_store_u32(at, count));
}

int hr_wire_put_lane(struct hr_buffer *out, const struct hr_wire_lane *lane) {
    uint8_t *at = begin(out, 4 + 4 + 8 + 4);
    if (at == NULL) {
        return HORO_ERR_RESOURCE;
    }
    at = hr_store_u32(hr_store_u32(at, lane->team), lane->members);
    return finish(out, hr_store_u32(hr_store_u64(at, lane->executed), lane->count));
}

int hr_wire_put_hash(struct hr_buffer *out, uint64_t hash) {
    uint8_t *at = begin(out, 8);
    return at == NULL ? HORO_ERR_RESOURCE : finish(out, hr_store_u64(at, hash));
}

int hr_wire_put_data(struct hr_buffer *out, enum hr_wire_type type, uint32_t id, const void *data, size_t bytes) {
    uint8_t *end = bytes > HR_WIRE_DATA_MAX ? NULL : begin(out, 1 + 4 + 4 + bytes);
    if (end == NULL) {
        return HORO_ERR_RESOURCE;
    }
    *end++ = (uint8_t)type;
    end = hr_store_u32(hr_store_u32(end, id), (uint32_t)bytes);
    memcpy(end, data, bytes);
    return finish(out, end + bytes);
}

static int put_rank(struct hr_buffer *out, enum hr_wire_type type, int rank) {
    uint8_t *at = begin(out, 1 + 4);
    if (at == NULL) {
        return HORO_ERR_RESOURCE;
    }
    *at++ = (uint8_t)type;
    return finish(out, write_i32(at, rank));
}

int hr_wire_put_done(struct hr_buffer *out, int rank) {
    return put_rank(out, HR_WIRE_DONE, rank);
}

int hr_wire_put_joined(struct hr_buffer *out, int rank, uint64_t at) {
    uint8_t *cursor = begin(out, 1 + 4 + 8);
    if (cursor == NULL) {
        return HORO_ERR_RESOURCE;
    }
    *cursor++ = HR_WIRE_JOINED;
    return finish(out, hr_store_u64(write_i32(cursor, rank), at));
}

int hr_wire_put_query(struct hr_buffer *out, uint32_t question) {
    uint8_t *at = begin(out, 1 + 4);
    if (at == NULL) {
        return HORO_ERR_RESOURCE;
    }
    *at++ = HR_WIRE_QUERY;
    return finish(out, hr_store_u32(at, question));
}

int hr_wire_put_tune(struct hr_buffer *out, int is_final, const uint64_t *values, uint32_t count) {
    uint8_t *at = count == 0 || count > HR_WIRE_KNOBS_MAX ? NULL : begin(out, 1 + 1 + 4 + 8 * (size_t)count);
    if (at == NULL) {
        return HORO_ERR_RESOURCE;
    }
    *at++ = HR_WIRE_TUNE;
    *at++ = is_final != 0;
    at = hr_store_u32(at, count);
    for (uint32_t i = 0; i < count; i++) {
        at = hr_store_u64(at, values[i]);
    }
    return finish(out, at);
}

int hr_wire_put_fail(struct hr_buffer *out, int status, struct hr_wire_text name, struct hr_wire_text text) {
    uint8_t *at = begin(out, 1 + 4 + 2 + str16_bytes(name) + 2 + str16_bytes(text));
    if (at == NULL) {
        return HORO_ERR_RESOURCE;
    }
    *at++ = HR_WIRE_FAIL;
    at = write_i32(at, status);
    return finish(out, write_str16(write_str16(at, name), text));
}

int hr_wire_begin_batch(struct hr_buffer *out, uint32_t count) {
    uint8_t *at = count > HR_WIRE_TENSORS_MAX ? NULL : begin(out, 1 + 4);
    if (at == NULL) {
        return HORO_ERR_RESOURCE;
    }
    *at++ = HR_WIRE_BATCH;
    return finish(out, hr_store_u32(at, count));
}

int hr_wire_put_ref(struct hr_buffer *out, uint32_t id, struct hr_wire_text name) {
    uint8_t *at = begin(out, 4 + 2 + str16_bytes(name));
    if (at == NULL) {
        return HORO_ERR_RESOURCE;
    }
    return finish(out, write_str16(hr_store_u32(at, id), name));
}

int hr_wire_end_batch(struct hr_buffer *out, struct hr_wire_rows rows) {
    uint8_t *at = is_too_long(rows.bytes, 0) ? NULL : begin(out, counted_bytes(rows));
    if (at == NULL) {
        return HORO_ERR_RESOURCE;
    }
    return finish(out, write_rows(at, rows));
}

int hr_wire_put_ask(struct hr_buffer *out, int rank) {
    return put_rank(out, HR_WIRE_ASK, rank);
}
