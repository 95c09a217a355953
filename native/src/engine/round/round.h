/*
 * A round: an operation that is alone, agreed on in one exchange. Every rank of the team has nothing else under way
 * there, and a caller that waits for it. Among the ranks of one host no leader needs to hear of it, and what carries
 * the agreement is one word of the partition; between hosts it is the leaders' messages, and the operation's small data
 * goes with them (docs/adr/0025-small-data-travels-with-the-agreement.md).
 *
 * The word. Each rank prepares the batch as far as it can without the others, and counts itself in. When all have, that
 * is the record: they execute the batch at this place of the log, which grows by nothing. So an operation takes one
 * exchange between the ranks where the leader's agreement takes two, and what has been prepared spares another one.
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
 *
 * All of it is the driver's.
 */
#ifndef HR_ENGINE_ROUND_ROUND_H
#define HR_ENGINE_ROUND_ROUND_H

#include "base/buffer.h"
#include "engine/requests/request.h"
#include "node/team.h"

/* ---- The word: on one host ---- */

/* The leader is to hear of a request that has waited so long. */
enum { HR_ROUND_LIMIT_NS = 10000000 };

enum hr_round_end { HR_ROUND_OPEN, HR_ROUND_COMPLETE, HR_ROUND_CLOSED };

struct hr_round {
    struct hr_team *team;
    struct hr_request *request; /* that this rank is counted in for; NULL: none */
    uint64_t place;             /* that the log has until the request is over */
    uint64_t rounds;            /* completed in the team; this rank executes the last one, or has */
    int is_taken_up;            /* its ordered call has been counted */
    struct hr_buffer out, rows; /* scratch */
};

/* Whether ranks of this team can count themselves in. */
int hr_round_is_for(const struct hr_team *team);
/* Whether this rank can do so for a request of this id, at this place of the log, as far as a look tells. */
int hr_round_may_enter(const struct hr_round *round, uint64_t place, uint32_t id);
/*
 * Before: writes the rows that this rank tells: 1, or 0 where there is no room for them. is_ahead: it has begun as
 * though all told the same.
 */
int hr_round_show_rows(struct hr_round *round, const struct hr_request *request, int is_ahead);
/* Counts this rank in: 1, or 0 where the request is to be announced. */
int hr_round_enter(struct hr_round *round, struct hr_request *request, uint64_t place);
/* The state of the round of this rank, which is closed where this rank is about to sleep. */
enum hr_round_end hr_round_look(const struct hr_round *round);
/* Whether it is complete with an ordered call, which the leader is to count: once. */
int hr_round_take_up(struct hr_round *round);
/* Closes it, unless it is complete. */
enum hr_round_end hr_round_close_mine(const struct hr_round *round);
/* The time when it has lasted too long, from which on this closes it; HR_NEVER: there is none, or it has come. */
int64_t hr_round_due_ns(const struct hr_round *round, int64_t now_ns);
/* It is complete: whether all ranks have begun ahead, and tell the same rows. */
int hr_round_is_ahead(const struct hr_round *round);
/* It is complete: the rows of all ranks, in their order. HORO_OK or a status. */
int hr_round_collect_rows(struct hr_round *round, struct hr_wire_rows *rows);
/* It is over, or dropped. Returns its request. */
struct hr_request *hr_round_leave(struct hr_round *round, int is_complete);

/* The leader, before a record is made, and when all that it has made is in the log. */
void hr_round_close(const struct hr_round *round);
void hr_round_reopen(const struct hr_round *round);

/* ---- Carried data: between hosts; leaders only ---- */

/*
 * The data that members have carried with their announcements of one tensor, to be reduced when all have. It holds for
 * one round of agreement: a record of the log, whatever it says, ends it, and so does a report to the parent. Then the
 * data has done its part or is not needed, and the next ordered call may have the same id. To carry costs bytes, and
 * never decides anything: where any member announces without data, or several operations are under way, a batch does
 * what it always does.
 */
struct hr_carry {
    int members;
    uint32_t id;   /* of the tensor; 0: there is no data */
    size_t bytes;  /* of each member */
    int count;     /* members whose data is there */
    const void **contributions; /* [members] of the data; scratch. Malloc'ed, with the arrays below; NULL: not yet */
    uint8_t *data;              /* [members][HR_CARRIED_MAX] */
    uint8_t *has;               /* [members] */
};

/* Data of a member. Dropped where another tensor's is there already, or there is no memory for it. */
void hr_carry_add(struct hr_carry *carry, int member, uint32_t id, const void *data, size_t bytes);
/*
 * The sum of this host and of all below it, in the order of the members, in the place of the first one's data; at the
 * root it is the result. HORO_ERR_INTERNAL for data that is not the request's.
 */
int hr_carry_reduce(const struct hr_carry *carry, const struct hr_team *team, const struct hr_request *request);
/* A record has come or been made, or a report. */
void hr_carry_clear(struct hr_carry *carry);

#endif
