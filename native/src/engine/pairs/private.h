/* Between the files of this room. */
#ifndef HR_ENGINE_PAIRS_PRIVATE_H
#define HR_ENGINE_PAIRS_PRIVATE_H

#include "engine/pairs/pairs.h"

struct hr_move_of_pair {
    struct hr_move_of_pair *previous, *next; /* in the list of its state */
    enum hr_move_state state;
    struct hr_pairs *pairs;
    struct hr_request *request;
    struct hr_pair pair; /* of a receive the rank that sends, once it is known */
    int dtype;
    uint64_t count;
    char *data;
    size_t bytes, moved, seen; /* the last: so far it had moved when it was last looked at, for the report, */
    int64_t since_ns;          /* and since when it had not moved on; 0: it has not been looked at */
    size_t limit;     /* so far it has been pulled; 0: not yet */
    uint64_t send;    /* the sender's number for it */
    uint64_t address; /* in the sender's memory */
};

/* A send that no receive was meant for yet. */
struct hr_offer {
    struct hr_offer *next;
    struct hr_mail_message message;
    char data[];
};

/* A send, and a receive, that has just been submitted. HORO_OK or a status. */
hr_status hr_move_offer(struct hr_pairs *pairs, struct hr_move_of_pair *move);
hr_status hr_move_post(struct hr_pairs *pairs, struct hr_move_of_pair *move);
/* Takes in a message for this rank: an hr_mail_handler, of which the owner is `pairs`. */
hr_status hr_moves_handle(void *pairs, const struct hr_mail_message *message, const void *data);
/* Receives: reads a part of the first one. Sends: sends what has been pulled. HR_STILL, HR_MOVED or a status. */
int hr_moves_read_some(struct hr_pairs *pairs);
int hr_moves_send_pieces(struct hr_pairs *pairs);
/* The group has ended: fails those whose other rank has left, or all. HR_STILL or HR_MOVED. */
int hr_moves_end(struct hr_pairs *pairs, int all);

#endif
