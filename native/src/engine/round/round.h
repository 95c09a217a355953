/*
 * An operation that is alone: every rank of the team has nothing else under way there, and a caller that waits for it.
 * Among the ranks of one host no leader needs to hear of it. Each prepares the batch as far as it can without the
 * others, and counts itself in, in one word of the partition. When all have, that is the record: they execute the batch
 * at this place of the log, which grows by nothing. So an operation takes one exchange between the ranks where the
 * leader's agreement takes two, and what has been prepared spares another one.
 *
 *     the word          | who        | when
 *     ------------------+------------+------------------------------------------------------------------------------
 *     open, count 0     | the leader | behind the records that it has written (and 0 is what a partition begins with)
 *     open, count k + 1 | a rank     | counts itself in, if the tensor is that of those who have
 *     open, count 1     | a rank     | likewise, in the round behind one in which all have
 *     closed            | a rank     | it has another tensor, is about to sleep or leave, or has waited 10 ms
 *     closed            | the leader | before it agrees on anything, and so before it writes any record
 *
 * A round that all have counted themselves in for is never closed, and the leader, which is one of them, executes its
 * batch before it writes a record: so records and such batches have one order. What was counted in a round that was
 * closed, its ranks announce. That is why nobody sleeps in an open round: the leader knows who waits for whom, and
 * whoever must be woken is woken, as ever.
 *
 * A rank that looks late may find the word at a later round. That one cannot have been completed without this rank, so
 * the number of completed rounds tells how its own one has ended. The place in the log does not go far from it either:
 * what the leader writes waits in the ring for the slowest reader.
 */
#ifndef HR_ENGINE_LONE_H
#define HR_ENGINE_LONE_H

#include <stdint.h>

#include "base/buffer.h"

struct hr_lane;
struct hr_request;

/* The driver's. */
struct hr_lone {
    struct hr_request *request; /* that this rank is counted in for; NULL: none */
    uint64_t rounds;            /* completed in the team; this rank executes the last one, or has */
    int is_given_up;            /* the round is to be closed */
    struct hr_buffer out, rows; /* scratch */
};

/* Counts this rank in for a request that is known by this id: 1, or 0 where it is to be announced. */
int hr_lone_enter(struct hr_lane *lane, struct hr_request *request, uint32_t id);
/* Executes it, or announces it, if the round has ended. HR_STILL, HR_MOVED or a status. */
int hr_lone_go_on(struct hr_lane *lane);
/* Before what must come behind the request: announces it, unless all are counted in. HORO_OK or a status. */
int hr_lone_give_up(struct hr_lane *lane);
/* Returns the time when this rank gives it up, and does that if it has come; HR_NEVER: it is counted in for none. */
int64_t hr_lone_due_ns(struct hr_lane *lane, int64_t now_ns);
/* The group has ended, or the lane: nothing comes of it. */
void hr_lone_drop(struct hr_lane *lane);
void hr_lone_fini(struct hr_lane *lane);

/* The leader, before a record is made: 1; 0 where a batch that all are counted in for comes first; a status. */
int hr_lone_close(struct hr_lane *lane);
/* The leader, when all that it has made is in the log. */
void hr_lone_reopen(struct hr_lane *lane);

#endif
