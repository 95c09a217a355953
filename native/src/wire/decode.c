#include <stdio.h>
#include <string.h>

#include "base/traits.h"
#include "wire/wire.h"

/*
 * Reads past the end give zeros and set `failed`, which is looked at once at the end and in every loop: no reading
 * function needs a check of its own, and none can be forgotten.
 */
struct reader {
    const uint8_t *at;
    size_t left;
    int failed;
};

static const uint8_t zeros[8];

/* The next `bytes` bytes; valid memory even on failure, if at most sizeof zeros are asked for. */
static const uint8_t *take(struct reader *reader, size_t bytes) {
    if (bytes > reader->left) {
        reader->failed = 1;
        reader->left = 0;
        return zeros;
    }
    const uint8_t *at = reader->at;
    reader->at += bytes;
    reader->left -= bytes;
    return at;
}

static void require(struct reader *reader, int condition) {
    if (!condition) {
        reader->failed = 1;
    }
}

static int read_u8(struct reader *reader) {
    return *take(reader, 1);
}

static uint32_t read_u32(struct reader *reader) {
    return hr_load_u32(take(reader, 4));
}

static uint64_t read_u64(struct reader *reader) {
    return hr_load_u64(take(reader, 8));
}

static int32_t read_i32(struct reader *reader) {
    return (int32_t)read_u32(reader);
}

static double read_f64(struct reader *reader) {
    const uint64_t bits = read_u64(reader);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static struct hr_wire_text read_str16(struct reader *reader) {
    struct hr_wire_text text = {.bytes = hr_load_u16(take(reader, 2))};
    text.data = (const char *)take(reader, text.bytes);
    if (reader->failed) {
        return (struct hr_wire_text){0};
    }
    return text;
}

static struct hr_wire_text read_name(struct reader *reader) {
    const struct hr_wire_text name = read_str16(reader);
    require(reader, name.bytes <= HORO_NAME_MAX &&
                        (name.bytes == 0 || hr_wire_is_call(name) || memchr(name.data, 0, name.bytes) == NULL));
    return name;
}

/* Not longer than it needs to be: a value has one form. */
static int64_t read_var(struct reader *reader) {
    uint64_t value = 0;
    int byte = 0x80;
    for (int bits = 0; bits < 7 * HR_WIRE_VAR_MAX && byte >= 0x80; bits += 7) {
        byte = read_u8(reader);
        value |= (uint64_t)(byte & 0x7f) << bits;
        require(reader, byte != 0 || bits == 0);
    }
    require(reader, byte < 0x80);
    return (int64_t)value;
}

static struct hr_wire_rows read_rows(struct reader *reader) {
    const int64_t count = read_var(reader);
    require(reader, count <= HR_WIRE_MESSAGE_MAX); /* each is a byte at least */
    struct hr_wire_rows rows = {.data = reader->at};
    for (; (int64_t)rows.count < count && !reader->failed; rows.count++) {
        (void)read_var(reader);
    }
    rows.bytes = (size_t)(reader->at - rows.data);
    return rows;
}

static uint32_t read_count(struct reader *reader) {
    const uint32_t count = read_u32(reader);
    require(reader, count <= HR_WIRE_TENSORS_MAX);
    return count;
}

int hr_wire_tensor_bytes(int op, const int64_t *shape, int ndim, int dtype, int64_t *bytes) {
    if (hr_op_is(op, HR_OP_TELLING_ROWS) && ndim > 0) {
        int64_t row_bytes;
        HR_TRY(hr_shape_bytes(shape + 1, ndim - 1, dtype, &row_bytes));
    }
    return hr_shape_bytes(shape, ndim, dtype, bytes);
}

/* A field that means nothing for the operation has its one canonical value, and no other has a meaning it lacks. */
static int is_canonical(const struct hr_wire_request *request) {
    const double one = 1.0;
    const int reduces = hr_op_is(request->op, HR_OP_REDUCTION);
    return (reduces || (request->reduce_op == 0 && memcmp(&request->prescale, &one, sizeof one) == 0 &&
                        memcmp(&request->postscale, &one, sizeof one) == 0)) &&
           (!request->on_gpu || hr_op_is(request->op, HR_OP_MOVING_DATA)) &&
           (request->op == HORO_ALLREDUCE || request->reduce_op != HORO_ADASUM) &&
           (hr_op_is(request->op, HR_OP_ROOTED) || request->root_rank == 0);
}

/* Takes all that is left. */
static void read_request(struct reader *reader, struct hr_wire_request *request) {
    request->bytes = reader->at;
    request->byte_count = reader->left;
    request->op = read_u8(reader);
    request->reduce_op = read_u8(reader);
    const int flags = read_u8(reader);
    request->transient = flags & 1;
    request->on_gpu = (flags & HR_WIRE_ON_GPU) != 0;
    request->root_rank = read_i32(reader);
    request->prescale = read_f64(reader);
    request->postscale = read_f64(reader);
    request->name = read_name(reader);
    require(reader, request->name.bytes > 0);
    request->tensor_count = read_count(reader);
    require(reader, request->reduce_op >= HORO_AVERAGE && request->reduce_op <= HORO_BXOR);
    require(reader, request->op < HORO_OP_COUNT && flags <= (1 | HR_WIRE_ON_GPU) && request->root_rank >= 0 &&
                        is_canonical(request));
    request->tensors = reader->at;
    struct hr_wire_tensor tensor = {0};
    for (uint32_t i = 0; i < request->tensor_count && !reader->failed; i++) {
        tensor.dtype = read_u8(reader);
        tensor.wire_dtype = read_u8(reader);
        tensor.ndim = read_u8(reader);
        require(reader, tensor.dtype < HORO_ANY_DTYPE_COUNT && tensor.ndim <= HORO_DIMS_MAX);
        require(reader, tensor.wire_dtype == 0 || (hr_op_is(request->op, HR_OP_REDUCTION) &&
                                                   hr_dtype_narrows(tensor.dtype, tensor.wire_dtype)));
        for (int d = 0; d < tensor.ndim && !reader->failed; d++) {
            tensor.shape[d] = (int64_t)read_u64(reader);
        }
        int64_t bytes;
        if (!reader->failed) {
            require(reader, hr_wire_tensor_bytes(request->op, tensor.shape, tensor.ndim, tensor.dtype, &bytes) == 0);
            require(reader, !hr_op_is(request->op, HR_OP_TELLING_ROWS) || tensor.ndim == 0 || tensor.shape[0] == 0);
        }
    }
    if (!reader->failed && hr_op_is(request->op, HR_OP_OF_TEAMS)) {
        /* of teams: the tensor that was read last is the only one, and its values follow */
        require(reader, request->tensor_count == 1 && tensor.dtype == HORO_INT32 && tensor.ndim == 1 &&
                            tensor.shape[0] >= 1 && tensor.shape[0] <= HR_WIRE_TENSORS_MAX);
        request->value_count = reader->failed ? 0 : (uint32_t)tensor.shape[0];
        request->values = reader->at;
        for (uint32_t i = 0; i < request->value_count && !reader->failed; i++) {
            require(reader, read_i32(reader) >= 0);
        }
    }
}

static void read_batch(struct reader *reader, struct hr_wire_message *message) {
    message->count = read_count(reader);
    message->items = reader->at;
    for (uint32_t i = 0; i < message->count && !reader->failed; i++) {
        const uint32_t id = read_u32(reader);
        const struct hr_wire_text name = read_name(reader);
        require(reader, id != 0 || name.bytes > 0);
    }
    message->rows = read_rows(reader);
}

static void read_data(struct reader *reader, struct hr_wire_message *message, uint32_t most) {
    const uint32_t bytes = read_u32(reader);
    require(reader, bytes <= most);
    message->data_bytes = reader->failed ? 0 : bytes;
    message->data = take(reader, message->data_bytes);
}

/* Each team once, in their order. */
static void read_blocked(struct reader *reader, struct hr_wire_message *message) {
    message->rank = read_i32(reader);
    message->question = read_u32(reader);
    message->text = read_str16(reader);
    message->others = read_str16(reader);
    message->sent = read_u64(reader);
    message->received = read_u64(reader);
    read_data(reader, message, HR_WIRE_DATA_MAX);
    require(reader, message->data_bytes % HR_WIRE_MOVE_BYTES == 0);
    for (const uint8_t *at = message->data; !reader->failed && at != message->data + message->data_bytes;) {
        struct hr_wire_move move;
        hr_wire_next_move(&at, &move);
        require(reader, move.peer >= (move.sends ? 0 : -1) && move.tag >= 0 && move.sends <= 1);
    }
    message->count = read_u32(reader);
    message->items = reader->at;
    require(reader, message->rank >= 0 && message->count <= HORO_TEAMS_MAX);
    for (uint32_t i = 0, next_team = 0; i < message->count && !reader->failed; i++) {
        const uint32_t team = read_u32(reader);
        const uint32_t members = read_u32(reader);
        (void)take(reader, 8);
        const uint32_t hashes = read_count(reader);
        require(reader, team >= next_team && team < HORO_TEAMS_MAX && members > 0);
        next_team = team + 1;
        if (!reader->failed && reader->left / 8 >= hashes) {
            (void)take(reader, 8 * (size_t)hashes);
        } else {
            reader->failed = 1;
        }
    }
}

static void read_tune(struct reader *reader, struct hr_wire_message *message) {
    message->is_final = read_u8(reader);
    message->count = read_u32(reader);
    message->items = reader->at;
    require(reader, message->is_final <= 1 && message->count > 0 && message->count <= HR_WIRE_KNOBS_MAX);
    (void)take(reader, reader->failed ? 0 : 8 * (size_t)message->count);
}

static void read_mail(struct reader *reader, struct hr_wire_message *message) {
    struct hr_wire_mail *mail = &message->mail;
    message->rank = read_i32(reader);
    mail->to = read_i32(reader);
    mail->kind = read_u8(reader);
    mail->dtype = read_u8(reader);
    mail->tag = read_i32(reader);
    message->status = read_i32(reader);
    mail->send = read_u64(reader);
    mail->count = read_u64(reader);
    read_data(reader, message, HR_WIRE_MAIL_MAX);
    require(reader, message->rank >= 0 && mail->to >= 0 && mail->dtype < HORO_ANY_DTYPE_COUNT && mail->tag >= 0 &&
                        (message->status == HORO_OK || hr_is_error(message->status)));
}

/* FAIL and LATE. */
static void read_named(struct reader *reader, struct hr_wire_message *message) {
    *(message->type == HR_WIRE_FAIL ? &message->status : &message->rank) = read_i32(reader);
    message->name = read_name(reader);
    message->text = read_str16(reader);
    require(reader, message->type == HR_WIRE_FAIL ? hr_is_error(message->status) : message->rank >= 0);
}

static void read_body(struct reader *reader, struct hr_wire_message *message) {
    switch (message->type) {
    case HR_WIRE_IDS:
        message->count = read_count(reader);
        message->items = reader->at;
        for (uint32_t i = 0; i < message->count && !reader->failed; i++) {
            require(reader, read_u32(reader) != 0);
        }
        break;
    case HR_WIRE_REQUEST:
    case HR_WIRE_LEAVE:
        message->rank = read_i32(reader);
        message->status = read_i32(reader);
        message->text = read_str16(reader);
        require(reader, message->rank >= 0 && (hr_is_error(message->status) ||
                                               (message->status == HORO_OK && message->type == HR_WIRE_REQUEST)));
        if (message->type == HR_WIRE_REQUEST) {
            message->rows = read_rows(reader);
            read_request(reader, &message->request);
            require(reader, message->rows.count == 0 || hr_op_is(message->request.op, HR_OP_TELLING_ROWS));
        }
        break;
    case HR_WIRE_ROWS:
        message->id = read_u32(reader);
        message->rows = read_rows(reader);
        require(reader, message->id != 0 && message->rows.count > 0);
        break;
    case HR_WIRE_LOST:
        message->rank = read_i32(reader);
        message->status = read_i32(reader);
        message->reason = (enum hr_abort_reason)read_u8(reader);
        message->by = read_i32(reader);
        message->text = read_str16(reader);
        require(reader, message->rank >= (message->text.bytes > 0 ? 0 : -1) && message->by >= -1 &&
                            hr_is_error(message->status) && message->reason > HR_REASON_NONE &&
                            message->reason <= HR_REASON_ABORTED);
        break;
    case HR_WIRE_BLOCKED: read_blocked(reader, message); break;
    case HR_WIRE_QUERY:
        message->question = read_u32(reader);
        require(reader, message->question != 0);
        break;
    case HR_WIRE_ASK:
    case HR_WIRE_DONE:
    case HR_WIRE_JOINED:
        message->rank = read_i32(reader);
        message->at = message->type == HR_WIRE_JOINED ? read_u64(reader) : 0;
        require(reader, message->rank >= 0);
        break;
    case HR_WIRE_DATA:
    case HR_WIRE_RESULT:
        message->id = read_u32(reader);
        read_data(reader, message, HR_WIRE_DATA_MAX);
        require(reader, message->id != 0 && message->data_bytes > 0);
        break;
    case HR_WIRE_BATCH: read_batch(reader, message); break;
    case HR_WIRE_TUNE: read_tune(reader, message); break;
    case HR_WIRE_MAIL: read_mail(reader, message); break;
    case HR_WIRE_FAIL:
    case HR_WIRE_LATE: read_named(reader, message); break;
    default: require(reader, 0);
    }
}

hr_status hr_wire_decode(const void *data, size_t bytes, struct hr_wire_message *message) {
    struct reader reader = {.at = data, .left = bytes};
    *message = (struct hr_wire_message){.bytes = data, .byte_count = bytes};
    message->type = (enum hr_wire_type)read_u8(&reader);
    read_body(&reader, message);
    return reader.failed || reader.left > 0 ? HORO_ERR_INTERNAL : HORO_OK;
}

hr_status hr_wire_decode_request(const void *data, size_t bytes, struct hr_wire_request *request) {
    struct reader reader = {.at = data, .left = bytes};
    *request = (struct hr_wire_request){0};
    read_request(&reader, request);
    return reader.failed || reader.left > 0 ? HORO_ERR_INTERNAL : HORO_OK;
}

void hr_wire_next_move(const uint8_t **cursor, struct hr_wire_move *move) {
    const uint8_t *at = *cursor;
    *move = (struct hr_wire_move){(int32_t)hr_load_u32(at), (int32_t)hr_load_u32(at + 4), at[8]};
    *cursor = at + HR_WIRE_MOVE_BYTES;
}

void hr_wire_next_lane(const uint8_t **cursor, struct hr_wire_lane *lane) {
    const uint8_t *at = *cursor;
    lane->team = hr_load_u32(at);
    lane->members = hr_load_u32(at + 4);
    lane->executed = hr_load_u64(at + 8);
    lane->count = hr_load_u32(at + 16);
    lane->hashes = at + 20;
    *cursor = lane->hashes + 8 * (size_t)lane->count;
}

void hr_wire_next_ref(const uint8_t **cursor, struct hr_wire_ref *ref) {
    const uint8_t *at = *cursor;
    ref->id = hr_load_u32(at);
    ref->name.bytes = hr_load_u16(at + 4);
    ref->name.data = (const char *)at + 6;
    *cursor = at + 6 + ref->name.bytes;
}

void hr_wire_next_tensor(const uint8_t **cursor, struct hr_wire_tensor *tensor) {
    const uint8_t *at = *cursor;
    tensor->dtype = at[0];
    tensor->wire_dtype = at[1];
    tensor->ndim = at[2];
    at += 3;
    for (int i = 0; i < tensor->ndim; i++, at += 8) {
        tensor->shape[i] = (int64_t)hr_load_u64(at);
    }
    *cursor = at;
}

int64_t hr_wire_next_row(const uint8_t **cursor) {
    const uint8_t *at = *cursor;
    uint64_t value = 0;
    int bits = 0;
    for (; *at >= 0x80; bits += 7) {
        value |= (uint64_t)(*at++ & 0x7f) << bits;
    }
    *cursor = at + 1;
    return (int64_t)(value | (uint64_t)*at << bits);
}

char *hr_wire_describe_tensor(const struct hr_wire_tensor *tensor, char *out, size_t out_bytes) {
    size_t used = (size_t)snprintf(out, out_bytes, "%s [", hr_dtype_name(tensor->dtype));
    for (int i = 0; i < tensor->ndim && used < out_bytes; i++) { /* else it is cut: snprintf has terminated it */
        const long long extent = (long long)tensor->shape[i];
        used += (size_t)snprintf(out + used, out_bytes - used, i == 0 ? "%lld" : ", %lld", extent);
    }
    if (used < out_bytes) {
        (void)snprintf(out + used, out_bytes - used, tensor->wire_dtype == 0 ? "]" : "] as %s",
                       hr_dtype_name(tensor->wire_dtype));
    }
    return out;
}
