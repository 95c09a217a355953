/*
 * Mail: messages from one rank of a host to another, each behind the one before, by a ring of their own in the arena.
 * What finds no room there waits in memory of its sender. All are the driver's.
 */
#ifndef HR_ENGINE_PAIRS_MAIL_H
#define HR_ENGINE_PAIRS_MAIL_H

#include "base/buffer.h"
#include "node/node.h"

/*
 * A send and its receive:
 *
 *     OFFER  sender    there is a tensor of this tag, dtype and count; it follows if it is small, else it stands there
 *     PULL   receiver  its memory cannot be read from here: send it, from this offset on
 *     DATA   sender    a piece, at this offset
 *     DONE   receiver  the send is over: HORO_OK, or what the receiver has instead: MISMATCH, dtype and count
 */
enum hr_mail_kind { HR_MAIL_OFFER = 1, HR_MAIL_PULL = 2, HR_MAIL_DATA = 3, HR_MAIL_DONE = 4 };

enum {
    HR_MAIL_BYTES_MAX = 1 << 13, /* behind one message */
};

struct hr_mail_message {
    uint64_t send;    /* the number that its rank has given to the send */
    uint64_t count;   /* of elements; PULL, DATA: the offset in bytes */
    uint64_t address; /* OFFER */
    int32_t tag;      /* OFFER */
    int32_t dtype;
    int32_t status; /* DONE */
    uint16_t kind;
    uint16_t bytes; /* that follow */
};

/* Of another rank, by local index. */
struct hr_mail_peer {
    uint64_t read;        /* bytes of its ring to this rank */
    struct hr_buffer out; /* to it */
};

struct hr_mail {
    struct hr_node *node;
    struct hr_pair_rings rings;
    struct hr_mail_peer *peers; /* [local_size] */
    uint64_t rung;              /* the bell as it was when all rings were read */
    int unsent;                 /* peers with an `out` that is not empty; read with the lock held, too */
};

/* HORO_OK, or a status with *error set and nothing left behind. */
hr_status hr_mail_open(struct hr_mail *mail, struct hr_node *node, struct hr_error *error);
void hr_mail_close(struct hr_mail *mail);

/* HORO_OK or HORO_ERR_RESOURCE. `data` has message->bytes. */
hr_status hr_mail_put(struct hr_mail *mail, int peer, const struct hr_mail_message *message, const void *data);
/* Whether nothing to this rank waits for room. */
int hr_mail_has_room(const struct hr_mail *mail, int peer);
/* Moves what waits for room: enum hr_progress. */
int hr_mail_flush(struct hr_mail *mail);
/* Calls it with every message that has come: enum hr_progress, or the first status that is no HORO_OK. */
typedef hr_status hr_mail_handler(void *owner, int peer, const struct hr_mail_message *message, const void *data);
int hr_mail_take(struct hr_mail *mail, hr_mail_handler *handle, void *owner);

#endif
