#include <string.h>

#include "base/little_endian.h"
#include "base/traits.h"
#include "horo_gpu.h"
#include "wire/frame.h"
#include "wire/wire.h"

enum {
    REQUEST_FIXED_BYTES = 3 + 4 + 8 + 8 + 2 + 4, /* everything of a request but its name and tensors */
    TENSOR_FIXED_BYTES = 3,
    NUMBERS_MAX = 64 + 8 * HR_WIRE_KNOBS_MAX, /* bytes of a message that belong to no text, rows, data or request */
};

_Static_assert((int)HORO_KNOB_COUNT <= (int)HR_WIRE_KNOBS_MAX, "there is room for the knobs");

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

/* NULL: the caller of put writes them. */
static uint8_t *write_bytes(uint8_t *at, const void *data, size_t bytes) {
    if (bytes > 0 && data != NULL) {
        memcpy(at, data, bytes);
    }
    return at + bytes;
}

static uint8_t *write_str16(uint8_t *at, struct hr_wire_text text) {
    return write_bytes(hr_store_u16(at, (uint16_t)str16_bytes(text)), text.data, str16_bytes(text));
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

static uint8_t *write_rows(uint8_t *at, struct hr_wire_rows rows) {
    return write_bytes(write_var(at, rows.count), rows.data, rows.bytes);
}

/* Room for a message of `bytes`, or NULL where memory or the limit on messages does not allow it. */
static uint8_t *begin(struct hr_buffer *out, size_t bytes) {
    if (bytes > HR_WIRE_MESSAGE_MAX || hr_buffer_reserve(out, bytes) != HORO_OK) {
        return NULL;
    }
    return out->data + out->end;
}

static hr_status finish(struct hr_buffer *out, const uint8_t *at) {
    out->end = (size_t)(at - out->data);
    return HORO_OK;
}

static struct hr_wire_text name_of(const horo_request *request) {
    const int is_call = (request->flags & HORO_SUBMIT_ORDERED) != 0;
    return is_call ? (struct hr_wire_text){"", 1} : (struct hr_wire_text){request->name, strlen(request->name)};
}

size_t hr_wire_request_bytes(const horo_request *request) {
    const struct hr_wire_text name = name_of(request);
    size_t bytes = REQUEST_FIXED_BYTES + str16_bytes(name);
    for (int32_t i = 0; i < request->tensor_count; i++) {
        bytes += TENSOR_FIXED_BYTES + sizeof(int64_t) * (size_t)request->tensors[i].ndim;
    }
    return hr_op_is(request->op, HR_OP_OF_TEAMS) ? bytes + sizeof(int32_t) * (size_t)request->tensors[0].shape[0]
                                                 : bytes;
}

hr_status hr_wire_encode_request(struct hr_buffer *out, const horo_request *request) {
    const struct hr_wire_text name = name_of(request);
    const size_t bytes = hr_wire_request_bytes(request);
    uint8_t *at = bytes > HR_WIRE_REQUEST_MAX ? NULL : begin(out, bytes);
    if (at == NULL) {
        return HORO_ERR_RESOURCE;
    }
    /* A field that means nothing for this operation gets one fixed value: it cannot make two requests differ. */
    const int reduces = hr_op_is(request->op, HR_OP_REDUCTION);
    *at++ = (uint8_t)request->op;
    *at++ = (uint8_t)(reduces ? request->reduce_op : 0);
    const int on_gpu = hr_op_is(request->op, HR_OP_MOVING_DATA) && (request->flags & HORO_SUBMIT_ON_GPU) != 0;
    *at++ = (uint8_t)(((request->flags & HORO_SUBMIT_TRANSIENT) != 0) | (on_gpu ? HR_WIRE_ON_GPU : 0));
    at = write_i32(at, hr_op_is(request->op, HR_OP_ROOTED) ? request->root_rank : 0);
    at = write_f64(at, reduces ? request->prescale : 1.0);
    at = write_f64(at, reduces ? request->postscale : 1.0);
    at = write_str16(at, name);
    at = hr_store_u32(at, (uint32_t)request->tensor_count);
    for (int32_t i = 0; i < request->tensor_count; i++) {
        const horo_tensor *tensor = &request->tensors[i];
        *at++ = (uint8_t)tensor->dtype;
        *at++ = (uint8_t)(reduces ? tensor->wire_dtype : 0);
        *at++ = (uint8_t)tensor->ndim;
        for (int32_t d = 0; d < tensor->ndim; d++) {
            const int is_free = hr_op_is(request->op, HR_OP_TELLING_ROWS) && d == 0;
            at = hr_store_u64(at, is_free ? 0 : (uint64_t)tensor->shape[d]);
        }
    }
    for (int64_t i = 0; hr_op_is(request->op, HR_OP_OF_TEAMS) && i < request->tensors[0].shape[0]; i++) {
        at = write_i32(at, ((const int32_t *)request->tensors[0].input)[i]);
    }
    return finish(out, at);
}

struct hr_wire_rows hr_wire_encode_row(int64_t row, uint8_t *room) {
    return (struct hr_wire_rows){.data = room, .bytes = (size_t)(write_var(room, (uint64_t)row) - room), .count = 1};
}

struct hr_wire_rows hr_wire_encode_rows(const horo_request *request, uint8_t *room) {
    struct hr_wire_rows written = {.data = room};
    for (int32_t i = 0; i < request->tensor_count && hr_op_is(request->op, HR_OP_TELLING_ROWS); i++) {
        const horo_tensor *tensor = &request->tensors[i];
        const int is_split = request->op == HORO_ALLTOALL; /* else each tensor has one number of rows for all ranks */
        const int64_t *rows = is_split ? tensor->splits : tensor->shape;
        const int32_t count = is_split ? tensor->split_count : 1;
        for (int32_t r = 0; r < count; r++) {
            if (room != NULL) {
                (void)write_var(room + written.bytes, (uint64_t)rows[r]);
            }
            written.bytes += var_bytes((uint64_t)rows[r]);
        }
        written.count += (uint32_t)count;
    }
    return written;
}

hr_status hr_wire_put_ids(struct hr_buffer *out, const uint32_t *ids, uint32_t count) {
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

int hr_wire_put(struct hr_buffer *out, const struct hr_wire_message *message) {
    const size_t most = NUMBERS_MAX + str16_bytes(message->name) + str16_bytes(message->text) +
                        str16_bytes(message->others) + message->rows.bytes + message->data_bytes +
                        message->request.byte_count;
    if (message->rows.bytes > HR_WIRE_MESSAGE_MAX || message->request.byte_count > HR_WIRE_MESSAGE_MAX ||
        message->data_bytes > HR_WIRE_DATA_MAX ||
        (message->type == HR_WIRE_BATCH && message->count > HR_WIRE_TENSORS_MAX) ||
        hr_buffer_reserve(out, most) != HORO_OK) {
        return HORO_ERR_RESOURCE;
    }
    uint8_t *const begun = out->data + out->end;
    uint8_t *at = begun;
    *at++ = (uint8_t)message->type;
    switch (message->type) {
    case HR_WIRE_REQUEST:
    case HR_WIRE_LEAVE:
        at = write_str16(write_i32(write_i32(at, message->rank), message->status), message->text);
        if (message->type == HR_WIRE_REQUEST) {
            at = write_bytes(write_rows(at, message->rows), message->request.bytes, message->request.byte_count);
        }
        break;
    case HR_WIRE_ROWS: at = write_rows(hr_store_u32(at, message->id), message->rows); break;
    case HR_WIRE_DATA:
    case HR_WIRE_RESULT:
        at = hr_store_u32(hr_store_u32(at, message->id), (uint32_t)message->data_bytes);
        at = write_bytes(at, message->data, message->data_bytes);
        break;
    case HR_WIRE_TUNE:
        *at++ = message->is_final != 0;
        at = write_bytes(hr_store_u32(at, message->count), message->items, 8 * (size_t)message->count);
        break;
    case HR_WIRE_LOST:
        at = write_i32(write_i32(at, message->rank), message->status);
        *at++ = (uint8_t)message->reason;
        at = write_str16(write_i32(at, message->by), message->text);
        break;
    case HR_WIRE_BLOCKED:
        at = write_str16(hr_store_u32(write_i32(at, message->rank), message->question), message->text);
        at = hr_store_u64(hr_store_u64(write_str16(at, message->others), message->sent), message->received);
        at = write_bytes(hr_store_u32(at, (uint32_t)message->data_bytes), message->data, message->data_bytes);
        at = hr_store_u32(at, message->count);
        break;
    case HR_WIRE_QUERY: at = hr_store_u32(at, message->question); break;
    case HR_WIRE_ASK:
    case HR_WIRE_DONE:
    case HR_WIRE_JOINED:
        at = write_i32(at, message->rank);
        at = message->type == HR_WIRE_JOINED ? hr_store_u64(at, message->at) : at;
        break;
    case HR_WIRE_MAIL:
        at = write_i32(write_i32(at, message->rank), message->mail.to);
        *at++ = (uint8_t)message->mail.kind;
        *at++ = (uint8_t)message->mail.dtype;
        at = write_i32(write_i32(at, message->mail.tag), message->status);
        at = hr_store_u64(hr_store_u64(at, message->mail.send), message->mail.count);
        at = write_bytes(hr_store_u32(at, (uint32_t)message->data_bytes), message->data, message->data_bytes);
        break;
    case HR_WIRE_FAIL:
    case HR_WIRE_LATE:
        at = write_i32(at, message->type == HR_WIRE_FAIL ? message->status : message->rank);
        at = write_str16(write_str16(at, message->name), message->text);
        break;
    case HR_WIRE_BATCH: at = hr_store_u32(at, message->count); break;
    default: return HORO_ERR_INTERNAL; /* IDS have a function of their own */
    }
    return at - begun > HR_WIRE_MESSAGE_MAX ? HORO_ERR_RESOURCE : finish(out, at);
}

int hr_wire_put_ref(struct hr_buffer *out, uint32_t id, struct hr_wire_text name) {
    uint8_t *at = begin(out, 4 + 2 + str16_bytes(name));
    return at == NULL ? HORO_ERR_RESOURCE : finish(out, write_str16(hr_store_u32(at, id), name));
}

int hr_wire_end_batch(struct hr_buffer *out, struct hr_wire_rows rows) {
    uint8_t *at = rows.bytes > HR_WIRE_MESSAGE_MAX ? NULL : begin(out, var_bytes(rows.count) + rows.bytes);
    return at == NULL ? HORO_ERR_RESOURCE : finish(out, write_rows(at, rows));
}

hr_status hr_wire_put_lane(struct hr_buffer *out, const struct hr_wire_lane *lane) {
    uint8_t bytes[4 + 4 + 8 + 4];
    uint8_t *at = hr_store_u32(hr_store_u32(bytes, lane->team), lane->members);
    (void)hr_store_u32(hr_store_u64(at, lane->executed), lane->count);
    return hr_buffer_append(out, bytes, sizeof bytes);
}

hr_status hr_wire_put_move(struct hr_buffer *out, struct hr_wire_move move) {
    uint8_t bytes[HR_WIRE_MOVE_BYTES];
    *write_i32(write_i32(bytes, move.peer), move.tag) = move.sends != 0;
    return hr_buffer_append(out, bytes, sizeof bytes);
}

int hr_wire_put_hash(struct hr_buffer *out, uint64_t hash) {
    uint8_t bytes[8];
    (void)hr_store_u64(bytes, hash);
    return hr_buffer_append(out, bytes, sizeof bytes);
}

/* ---- Frames ---- */

hr_status hr_frame_begin(struct hr_buffer *out, size_t *mark) {
    const uint8_t length[4] = {0};
    HR_TRY(hr_buffer_append(out, length, sizeof length));
    *mark = hr_buffer_size(out);
    return HORO_OK;
}

void hr_frame_end(struct hr_buffer *out, size_t mark) {
    (void)hr_store_u32(out->data + out->begin + mark - 4, (uint32_t)(hr_buffer_size(out) - mark));
}

hr_status hr_frame_put(struct hr_buffer *out, const struct hr_wire_message *message) {
    size_t mark;
    HR_TRY(hr_frame_begin(out, &mark));
    const hr_status status = hr_wire_put(out, message);
    if (status == HORO_OK) {
        hr_frame_end(out, mark);
    } else {
        out->end -= 4;
    }
    return status;
}

hr_status hr_frame_put_ids(struct hr_buffer *out, const uint32_t *ids, uint32_t *count) {
    size_t mark;
    if (*count > 0) {
        HR_TRY(hr_frame_begin(out, &mark));
        HR_TRY(hr_wire_put_ids(out, ids, *count));
        hr_frame_end(out, mark);
        *count = 0;
    }
    return HORO_OK;
}

hr_status hr_frame_pass(struct hr_buffer *out, const struct hr_wire_message *message) {
    uint8_t length[4];
    (void)hr_store_u32(length, (uint32_t)message->byte_count);
    HR_TRY(hr_buffer_reserve(out, sizeof length + message->byte_count)); /* both parts, or nothing */
    HR_TRY(hr_buffer_append(out, length, sizeof length));
    return hr_buffer_append(out, message->bytes, message->byte_count);
}

int hr_frame_peek(const struct hr_buffer *in, struct hr_wire_message *message, size_t *bytes) {
    const size_t available = hr_buffer_size(in);
    const uint8_t *front = hr_buffer_front(in);
    if (available < 4) {
        return HORO_IN_PROGRESS;
    }
    const uint32_t length = hr_load_u32(front);
    if (length > HR_WIRE_MESSAGE_MAX) {
        return HORO_ERR_INTERNAL;
    }
    if (available - 4 < length) {
        return HORO_IN_PROGRESS;
    }
    *bytes = 4 + (size_t)length;
    return hr_wire_decode(front + 4, length, message);
}
