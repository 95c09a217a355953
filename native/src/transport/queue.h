/* The posted ios of one direction of one link, in order: what every transport keeps per (peer, channel). */
#ifndef HR_TRANSPORT_QUEUE_H
#define HR_TRANSPORT_QUEUE_H

#include <sys/uio.h>

#include "transport/transport.h"

struct hr_queue {
    struct hr_io *head;
    struct hr_io *tail;
};

/* The io becomes the queue's until it is done or failed. */
static inline void hr_queue_push(struct hr_queue *queue, char *data, size_t bytes, struct hr_io *io) {
    *io = (struct hr_io){.data = data, .bytes = bytes, .state = HR_IO_POSTED};
    if (queue->head == NULL) {
        queue->head = io;
    } else {
        queue->tail->next = io;
    }
    queue->tail = io;
}

/* Takes the head out. The state is written last: from then on the io is the caller's again. */
static inline void hr_queue_pop(struct hr_queue *queue, enum hr_io_state state) {
    struct hr_io *io = queue->head;
    queue->head = io->next;
    io->next = NULL;
    io->state = state;
}

/* `bytes` more have moved, in order: finishes what is complete, also empty ios, or takes some. 1: one is done. */
static inline int hr_queue_advance(struct hr_queue *queue, size_t bytes) {
    int popped = 0;
    while (queue->head != NULL) {
        struct hr_io *io = queue->head;
        const size_t missing = io->bytes - io->done_bytes;
        const size_t step = bytes < missing ? bytes : missing;
        io->done_bytes += step;
        bytes -= step;
        if (step < missing && !(io->takes_some && io->done_bytes > 0)) {
            break;
        }
        hr_queue_pop(queue, HR_IO_DONE);
        popped = 1;
    }
    return popped;
}

/* 1: there was something to fail. */
static inline int hr_queue_fail(struct hr_queue *queue) {
    const int any = queue->head != NULL;
    while (queue->head != NULL) {
        hr_queue_pop(queue, HR_IO_FAILED);
    }
    return any;
}

/* The unmoved memory of the first ios, up to one that takes some; returns how many entries, at most `capacity`. */
static inline size_t hr_queue_gather(const struct hr_queue *queue, struct iovec *iov, size_t capacity) {
    size_t used = 0;
    for (const struct hr_io *io = queue->head; io != NULL && used < capacity; io = io->next) {
        if (io->bytes > io->done_bytes) {
            iov[used++] = (struct iovec){io->data + io->done_bytes, io->bytes - io->done_bytes};
        }
        if (io->takes_some) {
            break;
        }
    }
    return used;
}

#endif
