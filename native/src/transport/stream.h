/*
 * One direction of data with one peer over MPI: the messages in their order, of which the first few have been handed to
 * MPI.
 */
#ifndef HR_TRANSPORT_LANE_H
#define HR_TRANSPORT_LANE_H

#include "mpi/mpi.h"
#include "transport/transport.h"

/*
 * Given to MPI at once, per stream: as many as an algorithm has ios in flight. Few, for all of them must be taken back
 * in the end.
 */
enum { HR_STREAM_STARTED_MAX = 8 };

/* A piece of an io, of at most one call of MPI. */
struct hr_message {
    struct hr_message *next;
    struct hr_io *io;
    char *data;
    size_t bytes;
    uint64_t request;
    int is_last; /* of its io */
    int is_over; /* given back by MPI while the stream is taken back */
};

struct hr_stream {
    struct hr_message *head, *tail;
    struct hr_message *next; /* the first that MPI has not got */
    int started;
    int64_t moved_ns; /* when it last went on, or began to wait */
};

/* Makes messages of the io and puts them in line. HORO_OK or HORO_ERR_RESOURCE, which changes nothing. */
hr_status hr_stream_push(struct hr_stream *stream, struct hr_message **spare, char *data, size_t bytes,
                         size_t message_bytes, struct hr_io *io);

/* Takes the head out, which becomes spare. */
void hr_stream_pop(struct hr_stream *stream, struct hr_message **spare, enum hr_io_state state);

/* Adds the head to what its io has got so far; the io is done with its last message. */
static inline void hr_stream_finish_head(struct hr_stream *stream, struct hr_message **spare) {
    stream->head->io->done_bytes += stream->head->bytes;
    hr_stream_pop(stream, spare, stream->head->is_last ? HR_IO_DONE : HR_IO_POSTED);
}

/* 1: there was something to fail. Nothing of it may be with MPI any more. */
int hr_stream_fail(struct hr_stream *stream, struct hr_message **spare);

void hr_messages_free(struct hr_message *first);

#endif
