/*
 * Mail: messages from one rank to another, each behind the one before. On one host they go by a ring of these two ranks
 * in the arena; what finds no room there waits in memory of its sender. To another host they go by the ring to the own
 * leader, between leaders along the tree of hosts, and by the ring of the other leader. All is the driver's.
 */
#ifndef HR_ENGINE_PAIRS_MAIL_H
#define HR_ENGINE_PAIRS_MAIL_H

#include "base/buffer.h"
#include "engine/lead/leader.h"
#include "node/node.h"
#include "wire/wire.h"

/*
 * A send and its receive:
 *
 *     OFFER  sender    there is a tensor of this tag, dtype and count; it follows if it is small, else it stands there
 *     PULL   receiver  its memory cannot be read from here: send it, from this offset on
 *     DATA   sender    a piece, at this offset
 *     DONE   receiver  the send is over: HORO_OK, or what the receiver has instead: MISMATCH, dtype and count
 *
 * Either one asks by ASK where the program of the other one stands, on another host, whose leader passes that on.
 */
enum hr_mail_kind { HR_MAIL_OFFER = 1, HR_MAIL_PULL = 2, HR_MAIL_DATA = 3, HR_MAIL_DONE = 4, HR_MAIL_ASK = 5 };

struct hr_mail_message {
    uint64_t send;    /* the number that its rank has given to the send */
    uint64_t count;   /* of elements; PULL, DATA: the offset in bytes */
    uint64_t address; /* OFFER, on one host */
    int32_t from, to; /* ranks of the job */
    int32_t tag;      /* OFFER */
    int32_t dtype;
    int32_t status; /* DONE */
    uint16_t kind;
    uint16_t bytes; /* that follow, HR_WIRE_MAIL_MAX at most */
};

/* Of another rank, by local index. */
struct hr_mail_peer {
    uint64_t read;        /* bytes of its ring to this rank */
    struct hr_buffer out; /* to it */
};

struct hr_mail {
    struct hr_node *node;
    struct hr_leader *leader; /* of this host, which is this rank, in a job on several hosts; else NULL */
    struct hr_pair_rings rings;
    struct hr_mail_peer *peers; /* [local_size] */
    uint64_t rung;              /* the bell as it was when all rings were read */
    int unsent;                 /* peers with an `out` that is not empty; read with the lock held, too */
    uint64_t moves;             /* messages brought on their way */
};

/* HORO_OK, or a status with *error set and nothing left behind. Fini in any case. */
hr_status hr_mail_open(struct hr_mail *mail, struct hr_error *error);
void hr_mail_fini(struct hr_mail *mail);

/* The index of a rank on this host; -1: it is on another one. */
int hr_mail_local_of(const struct hr_mail *mail, int rank);
/*
 * Brings a message on its way to message->to, another rank. put: of this rank, which it names. HORO_OK or a status.
 * `data` has message->bytes.
 */
hr_status hr_mail_pass(struct hr_mail *mail, const struct hr_mail_message *message, const void *data);
hr_status hr_mail_put(struct hr_mail *mail, int rank, struct hr_mail_message message, const void *data);
/* A leader, whose link has brought a message. HORO_OK, or HORO_ERR_INTERNAL: no correct leader sends it here. */
hr_status hr_mail_of_link(const struct hr_mail *mail, int member, const struct hr_wire_message *wire,
                          struct hr_mail_message *message);
/* Whether nothing on that way waits here for room. */
int hr_mail_has_room(const struct hr_mail *mail, int rank);
/* Moves what waits for room: enum hr_progress. */
int hr_mail_flush(struct hr_mail *mail);
/* Whether something waits here for room, or for the leader to pass it on: this rank is woken when that is over. */
int hr_mail_is_left(struct hr_mail *mail);
/* Whether something may have come that take has not seen. */
int hr_mail_is_rung(const struct hr_mail *mail);
/*
 * Calls it with every message for this rank that has come, and passes others on: enum hr_progress, or the first status
 * that is no HORO_OK.
 */
typedef hr_status hr_mail_handler(void *owner, const struct hr_mail_message *message, const void *data);
int hr_mail_take(struct hr_mail *mail, hr_mail_handler *handle, void *owner);

#endif
