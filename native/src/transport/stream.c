#include "transport/stream.h"

#include <stdlib.h>

#include "horo.h"

/* The messages of one io, the first of them; NULL for lack of memory. */
static struct hr_message *cut(struct hr_message **spare, char *data, size_t bytes, size_t message_bytes,
                              struct hr_io *io, struct hr_message **last) {
    struct hr_message *first = NULL;
    struct hr_message **link = &first;
    do {
        struct hr_message *message = *spare;
        if (message != NULL) {
            *spare = message->next;
        } else if ((message = malloc(sizeof *message)) == NULL) {
            hr_messages_free(first);
            return NULL;
        }
        const size_t step = bytes < message_bytes ? bytes : message_bytes;
        *message = (struct hr_message){.io = io, .data = data, .bytes = step, .is_last = step == bytes};
        *link = message;
        link = &message->next;
        *last = message;
        data += step;
        bytes -= step;
    } while (bytes > 0);
    return first;
}

hr_status hr_stream_push(struct hr_stream *stream, struct hr_message **spare, char *data, size_t bytes,
                         size_t message_bytes, struct hr_io *io) {
    struct hr_message *last = NULL;
    struct hr_message *first = cut(spare, data, bytes, message_bytes, io, &last);
    if (first == NULL) {
        return HORO_ERR_RESOURCE;
    }
    *io = (struct hr_io){.data = data, .bytes = bytes, .state = HR_IO_POSTED};
    if (stream->head == NULL) {
        stream->head = first;
    } else {
        stream->tail->next = first;
    }
    stream->tail = last;
    if (stream->next == NULL) {
        stream->next = first;
    }
    return HORO_OK;
}

void hr_stream_pop(struct hr_stream *stream, struct hr_message **spare, enum hr_io_state state) {
    struct hr_message *message = stream->head;
    stream->head = message->next;
    if (stream->next == message) {
        stream->next = message->next;
    } else {
        stream->started--;
    }
    if (state != HR_IO_POSTED) {
        message->io->state = state; /* from here on the io is the caller's */
    }
    message->next = *spare;
    *spare = message;
}

int hr_stream_fail(struct hr_stream *stream, struct hr_message **spare) {
    const int any = stream->head != NULL;
    while (stream->head != NULL) {
        hr_stream_pop(stream, spare, stream->head->is_last ? HR_IO_FAILED : HR_IO_POSTED);
    }
    return any;
}

void hr_messages_free(struct hr_message *first) {
    while (first != NULL) {
        struct hr_message *next = first->next;
        free(first);
        first = next;
    }
}
