/*
 * The knowledge of rank 0 of ranks that are blocked, and whether that is a deadlock. Pure bookkeeping: no socket, no
 * lock.
 *
 * Each rank whose threads all wait for requests says so in a BLOCKED message: what is submitted there and not done, in
 * each team, and how far it has executed that team's log. It is a deadlock when all ranks are blocked, the members of
 * each team have executed equally much of its log, and no name of a team is submitted by all of its members. For
 * suppose that any record came about after these reports: take the first one. All members had submitted its name. None
 * of them did so after its report, since it waited, and no record had ended its wait yet; so the name stands in all
 * reports, or was executed by somebody before its report, who was then further in the log. So no message that is still
 * on its way can make this a false alarm, however late it is. A member that has joined counts as one that has submitted
 * every name: it stays joined until a record of that team comes about.
 *
 * There may still be a signal handler that runs on top of a wait, and then submits something or raises. So rank 0
 * asks all ranks once more (QUERY), and each answers with a report of what it does now, which it cannot while a handler
 * runs in its only thread, and which names the handler's thread where there are others. When all have answered as
 * before, then at the moment of the question every rank was blocked, and a handler that ran at that moment has ended
 * and has changed nothing. A report that says something else ends the question.
 *
 * A send and a receive that are both reported may finish. While one has ended at one end alone, the receiver's, reports
 * of one moment, as those of the question, have more receives that ended than sends.
 */
#ifndef HR_ENGINE_DEADLOCK_H
#define HR_ENGINE_DEADLOCK_H

#include "base/buffer.h"
#include "wire/wire.h"

struct hr_report {
    struct hr_buffer message; /* the last one of a rank; empty: it is not blocked */
    uint32_t answered;        /* the last question that it has answered */
};

struct hr_deadlock {
    int size;                  /* ranks of the job */
    struct hr_report *reports; /* [size] */
    int count;                 /* ranks that are blocked */
    int is_judged;             /* nothing has changed since the last verdict */
    int is_open;               /* which was OPEN, for the first time */
    int64_t changed_ns;        /* when a message came last that said something new */
    uint32_t question;         /* that was asked about these reports; 0: none was */
    uint32_t last_question;    /* that was asked at all */
    int answers;               /* to this question */
};

enum hr_verdict {
    HR_VERDICT_NONE,     /* something may finish, or not all have answered the question yet */
    HR_VERDICT_OPEN,     /* nothing can finish, unless a thread submits something that may */
    HR_VERDICT_ASK,      /* nothing can finish if all ranks say so again: all are to be asked `question` */
    HR_VERDICT_DEADLOCK, /* nothing can finish, and all have said so again */
};

void hr_deadlock_fini(struct hr_deadlock *deadlock);
/* Takes in a BLOCKED message. HORO_OK, HORO_ERR_RESOURCE, or HORO_ERR_INTERNAL for a rank that there is none. */
int hr_deadlock_note(struct hr_deadlock *deadlock, int size, const struct hr_wire_message *message, int64_t now_ns);
/* The time when there is something to judge, if nothing more comes; 0: not now. */
int64_t hr_deadlock_due_ns(const struct hr_deadlock *deadlock, int64_t open_ns);
/*
 * The verdict, and a sentence for OPEN and DEADLOCK: "rank 0 waits for 'a' (train.py:12), rank 1 for ...". OPEN
 * comes twice, and then not again until something changes: what may go on is left open_ns before anybody speaks of it.
 */
enum hr_verdict hr_deadlock_judge(struct hr_deadlock *deadlock, char *text, size_t text_bytes);

#endif
