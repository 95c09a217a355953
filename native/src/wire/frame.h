/* Frames: messages one behind another in a stream of bytes, a u32 length before each. */
#ifndef HR_WIRE_FRAME_H
#define HR_WIRE_FRAME_H

#include <stddef.h>
#include <stdint.h>

#include "wire/wire.h"

/* Appends one message: HORO_OK, or a status and nothing of it. */
hr_status hr_frame_put(struct hr_buffer *out, const struct hr_wire_message *message);
/* An IDS message of so many, if there are any; *count is 0 afterwards. */
hr_status hr_frame_put_ids(struct hr_buffer *out, const uint32_t *ids, uint32_t *count);
/* As hr_frame_put, of one that has been decoded, as it came. */
hr_status hr_frame_pass(struct hr_buffer *out, const struct hr_wire_message *message);
/* begin gives the position that end takes; what is appended in between is the message. */
hr_status hr_frame_begin(struct hr_buffer *out, size_t *mark);
void hr_frame_end(struct hr_buffer *out, size_t mark);
/*
 * The message in the first frame at the front of `in`, which it points into: HORO_OK with the *bytes of the frame, to
 * be consumed afterwards, HORO_IN_PROGRESS if it is not all there, HORO_ERR_INTERNAL if its length is past
 * HR_WIRE_MESSAGE_MAX or it is no message.
 */
int hr_frame_peek(const struct hr_buffer *in, struct hr_wire_message *message, size_t *bytes);

/* Whether a message that comes down the tree is a record of the log. */
static inline int hr_wire_is_record(enum hr_wire_type type) {
    const uint32_t records = 1u << HR_WIRE_BATCH | 1u << HR_WIRE_RESULT | 1u << HR_WIRE_FAIL | 1u << HR_WIRE_REQUEST |
                             1u << HR_WIRE_JOINED | 1u << HR_WIRE_TUNE | 1u << HR_WIRE_LEAVE;
    return (records >> type & 1) != 0;
}

#endif
