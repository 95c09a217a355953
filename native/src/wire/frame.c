#include "wire/frame.h"

#include "base/little_endian.h"

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
    const size_t before = hr_buffer_size(out);
    size_t mark;
    hr_status status = hr_frame_begin(out, &mark);
    status = status == HORO_OK ? hr_wire_put(out, message) : status;
    if (status == HORO_OK) {
        hr_frame_end(out, mark);
    } else {
        out->end = out->begin + before;
    }
    return status;
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
