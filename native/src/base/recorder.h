/*
 * The flight recorder: what one rank did last, in a ring of records that are written all the time and read when
 * something is wrong.
 *
 * Any thread writes, any thread reads, nobody waits. A writer takes the next place by one addition and claims the
 * record there by one exchange; what it finds being written, or written by one who came later, it leaves alone, and its
 * own event is lost: the ring is then a whole turn behind it. A reader skips a record that changes while it reads.
 */
#ifndef HR_BASE_RECORDER_H
#define HR_BASE_RECORDER_H

#include <stdatomic.h>
#include <stddef.h>

#include "base/status.h"
#include "base/clock.h"
#include "horo.h"

enum {
    HR_RECORDER_RECORDS = HORO_EVENTS_MAX, /* a power of two */
    HR_RECORDER_TRACED_RECORDS = 1 << 16, /* while it is traced; what lies between takes no memory before */
    HR_RECORDER_NAME_BYTES = 32,
    HR_RECORDER_NAME_WORDS = HR_RECORDER_NAME_BYTES / 8,
};

/*
 * For timelines alone, behind those of enum horo_event_kind; horo/timeline/rows.py has both in this order. Requests are
 * told apart by the lower half of a hash.
 */
enum hr_traced_kind {
    /* coordinator: a rank, in bytes, is ready for a request; number: hash */
    HR_EVENT_ANNOUNCED = HORO_EVENT_LOST + 1,
    /* part of a text about a request; bytes: offset, and from bit 32 on the length of all; number: hash */
    HR_EVENT_TEXT,
    /* of the batch whose AGREED come next; bytes: where its record ends in the log of the team; number: enum hr_via */
    HR_EVENT_RECORD,
    /* of the batch of a team that moves data: its next phase begins; number: enum hr_adasum_phase */
    HR_EVENT_PHASE,
    /* in a timeline's file alone; bytes: so many events are missing, which came faster than they could be written */
    HR_EVENT_GAP,
    /* likewise: the end of a timeline that was stopped */
    HR_EVENT_STOPPED,
};

/* Of an Adasum, see collective/adasum.c. */
enum hr_adasum_phase {
    HR_ADASUM_PACK,
    HR_ADASUM_SCATTER, /* alltoall */
    HR_ADASUM_MULTIPLY,
    HR_ADASUM_SUM, /* allreduce of the products */
    HR_ADASUM_COMBINE,
    HR_ADASUM_GATHER, /* allgather */
    HR_ADASUM_UNPACK,
};

/* The means by which the data of a batch moves. */
enum hr_via { HR_VIA_NONE, HR_VIA_SHM, HR_VIA_TCP, HR_VIA_MPI, HR_VIA_GPU };

/* An event as it is written; see horo_event. */
struct hr_event {
    uint64_t ticks; /* when; 0: now */
    int32_t event; /* enum horo_event_kind, hr_traced_kind */
    int32_t op;    /* enum horo_op; -1: none */
    int32_t status;
    int32_t team;
    int32_t number;
    int64_t bytes;
    const char *name;
    size_t name_bytes; /* 0: none */
};

/* One cache line. Every word is atomic, so that reading beside a writer is no race. */
struct hr_record {
    _Alignas(64) _Atomic uint64_t mark; /* 0: never written; 2n + 1: place n is being written; 2n + 2: it stands */
    _Atomic uint64_t ticks;
    _Atomic uint64_t bytes;
    _Atomic uint64_t what; /* number, team, status, op, event, from the upper bits down: 32, 16, 8, 4, 4 */
    _Atomic uint64_t name[HR_RECORDER_NAME_WORDS];
};

struct hr_recorder {
    struct hr_record *records; /* [HR_RECORDER_TRACED_RECORDS] */
    _Atomic uint64_t mask;     /* a place and this: the index of its record; one less than a number of records */
    struct hr_tick_sample created;
    _Atomic uint64_t next;            /* place; their sequence does not end */
    _Atomic uint64_t dropped;         /* 1 + the last place whose writer found its record taken; 0: none */
    _Atomic uint64_t described;       /* places that hr_recorder_describe has looked at */
    _Atomic int end_noted, end_shown; /* the end of the group: by whoever sets them first */
};

/* HORO_OK or HORO_ERR_RESOURCE. Fini takes also what is all zero. */
hr_status hr_recorder_init(struct hr_recorder *recorder);
void hr_recorder_fini(struct hr_recorder *recorder);

/* Of a name that is too long the end is kept. Any thread. */
void hr_recorder_add(struct hr_recorder *recorder, const struct hr_event *event);

/* A text that belongs to a request, in parts; for timelines. Any thread. */
void hr_recorder_add_text(struct hr_recorder *recorder, uint32_t hash, const char *text, size_t text_bytes);

/* Whether a timeline is written: events of hr_traced_kind are wanted, and requests' hashes in `number`. */
static inline int hr_recorder_is_traced(const struct hr_recorder *recorder) {
    return atomic_load_explicit(&recorder->mask, memory_order_relaxed) != HR_RECORDER_RECORDS - 1;
}
void hr_recorder_trace(struct hr_recorder *recorder, int is_traced);

/* A reader of all events from a place on, in their order. One thread at a time. */
struct hr_recorder_tail {
    uint64_t place;    /* of the next one */
    uint64_t given_up; /* before this place, events that are not written are lost; all others are waited for */
    struct hr_tick_sample now;
};
/* 1 with the next event; 0: there is none, or it is being written. *lost grows by those that were missed. */
int hr_recorder_next(const struct hr_recorder *recorder, struct hr_recorder_tail *tail, horo_event *event,
                     uint64_t *lost);

/* The last records of horo_event_kind, at most `capacity`, the oldest first; returns how many. Any thread. */
size_t hr_recorder_read(const struct hr_recorder *recorder, horo_event *events, size_t capacity);

/*
 * The last records as lines "\n    1.234 s ago  submitted  allreduce 'x', 4.0 MiB", the oldest first; what follows one
 * another and is alike shares a line. At most `lines` (and HR_RECORDER_LINES_MAX) of them, the older ones left out
 * where text_bytes are not enough. Returns whether there is anything that no earlier call has described. Any thread.
 */
enum { HR_RECORDER_LINES_MAX = 32 };
int hr_recorder_describe(struct hr_recorder *recorder, int lines, char *text, size_t text_bytes);

/* The event at a place: 1, or 0 if it cannot be had (any more). */
int hr_recorder_look(const struct hr_recorder *recorder, struct hr_tick_sample now, uint64_t place, horo_event *event);

#endif
