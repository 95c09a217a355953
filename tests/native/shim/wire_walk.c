#include "wire_walk.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "horo_gpu.h"
#include "wire/wire.h"

#define REQUIRE(condition)                                                                                             \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "wire_walk: %s does not hold (line %d)\n", #condition, __LINE__);                          \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

/* Reads each byte, in a way that the compiler must keep. */
static void touch(struct hr_wire_text text) {
    volatile uint8_t sum = 0;
    for (size_t i = 0; i < text.bytes; i++) {
        sum = (uint8_t)(sum + (uint8_t)text.data[i]);
    }
}

static void walk_tensors(const struct hr_wire_request *request, horo_tensor *tensors, int64_t *shapes) {
    const uint8_t *cursor = request->tensors;
    for (uint32_t i = 0; i < request->tensor_count; i++) {
        struct hr_wire_tensor tensor;
        hr_wire_next_tensor(&cursor, &tensor);
        REQUIRE(tensor.ndim <= HORO_DIMS_MAX);
        memcpy(shapes, tensor.shape, (size_t)tensor.ndim * sizeof *shapes);
        tensors[i] = (horo_tensor){
            .shape = shapes, .ndim = tensor.ndim, .dtype = tensor.dtype, .wire_dtype = tensor.wire_dtype};
        shapes += tensor.ndim;
        char text[40];
        REQUIRE(strlen(hr_wire_describe_tensor(&tensor, text, sizeof text)) < sizeof text);
    }
    REQUIRE(cursor + 4 * (size_t)request->value_count == request->bytes + request->byte_count);
}

/* Accepted bytes are canonical: the request they describe encodes to them. */
static void walk_request(const struct hr_wire_request *request) {
    touch(request->name);
    touch((struct hr_wire_text){(const char *)request->bytes, request->byte_count});
    char name[HORO_NAME_MAX + 1] = {0};
    REQUIRE(request->name.bytes <= HORO_NAME_MAX);
    memcpy(name, request->name.data, request->name.bytes);
    horo_tensor *tensors = calloc(request->tensor_count + 1u, sizeof *tensors);
    int64_t *shapes = malloc(request->byte_count); /* the extents are a part of those bytes */
    REQUIRE(tensors != NULL && shapes != NULL);
    walk_tensors(request, tensors, shapes);
    int32_t *values = malloc(request->byte_count);
    REQUIRE(values != NULL);
    for (uint32_t i = 0; i < request->value_count; i++) {
        values[i] = (int32_t)hr_wire_u32(request->values, i);
        REQUIRE(values[i] >= 0);
        tensors[0].input = values;
    }
    const horo_request again = {
        .name = name,
        .op = request->op,
        .reduce_op = request->reduce_op,
        .root_rank = request->root_rank,
        .flags =
            (request->transient ? HORO_SUBMIT_TRANSIENT : 0) | (request->on_gpu ? HORO_SUBMIT_ON_GPU : 0) |
            (hr_wire_is_call(request->name) ? HORO_SUBMIT_ORDERED : 0),
        .prescale = request->prescale,
        .postscale = request->postscale,
        .tensors = tensors,
        .tensor_count = (int32_t)request->tensor_count,
    };
    struct hr_buffer buffer = {0};
    REQUIRE(hr_wire_encode_request(&buffer, &again) == HORO_OK);
    REQUIRE(hr_buffer_size(&buffer) == request->byte_count);
    REQUIRE(memcmp(hr_buffer_front(&buffer), request->bytes, request->byte_count) == 0);
    hr_buffer_fini(&buffer);
    free(values);
    free(shapes);
    free(tensors);
}

static int encode_ids(const struct hr_wire_message *message, struct hr_buffer *out) {
    uint32_t *ids = malloc((message->count + 1u) * sizeof *ids);
    REQUIRE(ids != NULL);
    for (uint32_t i = 0; i < message->count; i++) {
        ids[i] = hr_wire_u32(message->items, i);
        REQUIRE(ids[i] != 0);
    }
    const int status = hr_wire_put_ids(out, ids, message->count);
    free(ids);
    return status;
}

/* As many as they say, in as many bytes, and none below 0. */
static struct hr_wire_rows walk_rows(struct hr_wire_rows rows) {
    const uint8_t *cursor = rows.data;
    for (uint32_t i = 0; i < rows.count; i++) {
        REQUIRE(hr_wire_next_row(&cursor) >= 0);
    }
    REQUIRE(rows.count == 0 || cursor == rows.data + rows.bytes);
    return rows;
}

static int encode_batch(const struct hr_wire_message *message, struct hr_buffer *out) {
    HR_TRY(hr_wire_put(out, message));
    const uint8_t *cursor = message->items;
    for (uint32_t i = 0; i < message->count; i++) {
        struct hr_wire_ref ref;
        hr_wire_next_ref(&cursor, &ref);
        touch(ref.name);
        REQUIRE(ref.id != 0 || ref.name.bytes > 0);
        HR_TRY(hr_wire_put_ref(out, ref.id, ref.name));
    }
    return hr_wire_end_batch(out, walk_rows(message->rows));
}

static int encode_blocked(const struct hr_wire_message *message, struct hr_buffer *out) {
    touch(message->text);
    touch(message->others);
    HR_TRY(hr_wire_put(out, message));
    const uint8_t *cursor = message->items;
    for (uint32_t i = 0; i < message->count; i++) {
        struct hr_wire_lane lane;
        hr_wire_next_lane(&cursor, &lane);
        REQUIRE(lane.team < HORO_TEAMS_MAX && lane.members > 0);
        HR_TRY(hr_wire_put_lane(out, &lane));
        for (uint32_t k = 0; k < lane.count; k++) {
            HR_TRY(hr_wire_put_hash(out, hr_wire_u64(lane.hashes, k)));
        }
    }
    return HORO_OK;
}

static int encode_again(const struct hr_wire_message *message, struct hr_buffer *out) {
    switch (message->type) {
    case HR_WIRE_IDS: return encode_ids(message, out);
    case HR_WIRE_BATCH: return encode_batch(message, out);
    case HR_WIRE_REQUEST:
        walk_request(&message->request);
        break;
    case HR_WIRE_BLOCKED: return encode_blocked(message, out);
    default:
        break;
    }
    (void)walk_rows(message->rows);
    touch(message->text);
    touch((struct hr_wire_text){(const char *)message->data, message->data_bytes});
    return hr_wire_put(out, message);
}

int wire_walk(const uint8_t *data, size_t bytes) {
    struct hr_wire_request request;
    const int request_status = hr_wire_decode_request(data, bytes, &request);
    REQUIRE(request_status == HORO_OK || request_status == HORO_ERR_INTERNAL);
    if (request_status == HORO_OK) {
        walk_request(&request);
    }
    struct hr_wire_message message;
    const int status = hr_wire_decode(data, bytes, &message);
    REQUIRE(status == HORO_OK || status == HORO_ERR_INTERNAL);
    if (status == HORO_OK) {
        touch(message.text);
        touch(message.name);
        struct hr_buffer buffer = {0};
        REQUIRE(encode_again(&message, &buffer) == HORO_OK);
        REQUIRE(hr_buffer_size(&buffer) == bytes);
        REQUIRE(memcmp(hr_buffer_front(&buffer), data, bytes) == 0);
        hr_buffer_fini(&buffer);
    }
    return status;
}
