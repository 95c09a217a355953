/*
 * Sends and receives: a request of one rank that another rank's request completes, outside all logs.
 *
 * The receiver matches. A sender tells it of each send, in order, and keeps the data in place; the receiver takes the
 * first receive that it was meant for, or keeps the offer until one comes. Then it copies what has come with the offer,
 * or reads the sender's memory, or, where it cannot, has it sent in pieces; from another host so many at a time.
 * Both ends are done when the receiver is.
 *
 * When the group has ended because a rank has left, those that stay go on, on one host: their rings are in the arena.
 * A send or receive fails then when its other rank leaves, too. Between hosts it fails at once, for its leaders go.
 *
 *     a send     OFFERED  -> done, by DONE
 *                         -> PULLED, by PULL: goes out in pieces -> done, by DONE
 *     a receive  POSTED   -> done, where the tensor came with the offer, or does not fit
 *                         -> READING -> done; PULLING where a read has failed
 *                         -> PULLING -> done, with the last piece
 */
#ifndef HR_ENGINE_PAIRS_PAIRS_H
#define HR_ENGINE_PAIRS_PAIRS_H

#include "engine/drive/drive.h"
#include "engine/pairs/mail.h"
#include "engine/requests/requests.h"

/* The other side of a send or receive: a rank of the job, -1: any; and the tag. */
struct hr_pair {
    int32_t peer, tag;
};

/* A send or receive; the luggage of its request. */
struct hr_move_of_pair;

enum hr_move_state {
    HR_MOVE_OFFERED, HR_MOVE_PULLED, HR_MOVE_POSTED, HR_MOVE_READING, HR_MOVE_PULLING, HR_MOVE_STATES
};

struct hr_offer;

/* The driver's, but for `is_open` and what opening makes. */
struct hr_pairs {
    struct hr_requests *requests;
    struct hr_part part;
    struct hr_mail mail;
    /* this rank has sent or received something, or passes it on; written under the lock, behind what opening makes */
    _Atomic int is_open;
    int reads; /* memory of others of this host is read */
    uint64_t last_send;
    int64_t reported_ns; /* the last report of those that do not move; 0: none */
    uint64_t moves, sent, received; /* the last two have ended */
    struct {
        struct hr_move_of_pair *first, *last;
    } moves_in[HR_MOVE_STATES]; /* a list for each state, in the order in which they came there */
    struct hr_offer *offers, **offers_tail; /* that no receive was meant for yet */
};

/*
 * Before anything drives. `leader`: this rank, where it passes on what others send between hosts; else NULL. HORO_OK,
 * or a status with *error set; fini in either case.
 */
hr_status hr_pairs_init(struct hr_pairs *pairs, struct hr_requests *requests, int reads, struct hr_leader *leader,
                        struct hr_error *error);
/* The leader, whose links have brought a MAIL message. HORO_OK or a status. */
hr_status hr_pairs_take_in(struct hr_pairs *pairs, int member, const struct hr_wire_message *wire);
/* As horo_send and horo_receive: op, tensor, flags and timeout_ms of `call` count. */
hr_status hr_pairs_submit(struct hr_pairs *pairs, const horo_request *call, struct hr_pair pair, int64_t *handle,
                          struct hr_error *error);
/* The driver: what a send or receive that is not done waits for: "rank 1 (h1) has not called send to rank 0, tag 7". */
void hr_pairs_describe(const struct hr_pairs *pairs, const struct hr_request *request, char *text, size_t text_bytes);
/* The driver: whether this rank has more to tell others; or, with sends, has sent what they have not received. */
int hr_pairs_has_left(struct hr_pairs *pairs, int with_sends);
/* The driver, with the lock held: appends the moves that are not done (wire.h). HORO_OK or a status. */
hr_status hr_pairs_put_pending(const struct hr_pairs *pairs, struct hr_buffer *out);
/* Behind the requests. */
void hr_pairs_fini(struct hr_pairs *pairs);

#endif
