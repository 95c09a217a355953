/* A bounded stream of bytes in memory, one direction of a loopback link. The caller locks. */
#ifndef PIPE_H
#define PIPE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Small enough that large transfers meet a full pipe, as they meet a full socket. */
enum { PIPE_BYTES = 1 << 16, PIPE_RANGES = 64 };

/* The bytes before position `end` may be read from the receiver's progress call number `due_poll` on. */
struct pipe_range {
    uint64_t end;
    uint64_t due_poll;
};

/* Positions count bytes and ranges since the beginning. */
struct pipe {
    uint64_t read, written;
    uint64_t ranges_read, ranges_written;
    struct pipe_range ranges[PIPE_RANGES];
    char bytes[PIPE_BYTES];
};

static inline int pipe_is_empty(const struct pipe *pipe) {
    return pipe->read == pipe->written;
}

/* Bytes that pipe_push would take now. */
static inline size_t pipe_room(const struct pipe *pipe) {
    const int full = pipe->ranges_written - pipe->ranges_read == PIPE_RANGES;
    return full ? 0 : PIPE_BYTES - (size_t)(pipe->written - pipe->read);
}

/* Adds one range of at most pipe_room bytes. */
static inline void pipe_push(struct pipe *pipe, const char *data, size_t bytes, uint64_t due_poll) {
    const size_t at = pipe->written % PIPE_BYTES;
    const size_t first = bytes < PIPE_BYTES - at ? bytes : PIPE_BYTES - at;
    memcpy(pipe->bytes + at, data, first);
    memcpy(pipe->bytes, data + first, bytes - first);
    pipe->written += bytes;
    pipe->ranges[pipe->ranges_written++ % PIPE_RANGES] = (struct pipe_range){pipe->written, due_poll};
}

/* Takes up to `capacity` bytes out of the first range, if it is due at `poll`; returns how many. */
static inline size_t pipe_pull(struct pipe *pipe, char *data, size_t capacity, uint64_t poll) {
    const struct pipe_range *range = &pipe->ranges[pipe->ranges_read % PIPE_RANGES];
    if (pipe->ranges_read == pipe->ranges_written || range->due_poll > poll) {
        return 0;
    }
    const size_t ready = (size_t)(range->end - pipe->read);
    const size_t bytes = capacity < ready ? capacity : ready;
    const size_t at = pipe->read % PIPE_BYTES;
    const size_t first = bytes < PIPE_BYTES - at ? bytes : PIPE_BYTES - at;
    memcpy(data, pipe->bytes + at, first);
    memcpy(data + first, pipe->bytes, bytes - first);
    pipe->read += bytes;
    if (pipe->read == range->end) {
        pipe->ranges_read++;
    }
    return bytes;
}

#endif
