/* Between the files of the check for stalls: stall.c decides, stall_text.c says who has submitted what. */
#ifndef HR_ENGINE_STALL_H
#define HR_ENGINE_STALL_H

#include "engine/engine.h"

/* A name that some members of a team have submitted and others not. */
struct hr_stalled_name {
    const char *name;
    int is_excused; /* it holds nobody up: a JOIN, or refused by all that have submitted it */
    const uint64_t *announced; /* leader: see hr_agree_waiting */
    uint64_t pending_hash;     /* others */
};

/* The names that have waited too long for members of a team, as far as this rank knows: a leader all announced ones. */
struct hr_stalled {
    int total, count; /* names, and those that are kept here */
    struct hr_stalled_name names[HR_NAMES_IN_TEXT];
    int64_t oldest_ns;
    int64_t blocked_ns; /* since when one that is not excused has waited; the time of the report if none has */
    int culprit;      /* a rank that has not submitted one of them, of this host if there is one; -1: none */
    int is_elsewhere; /* it is on another host, where they may know better */
};

/*
 * Since when a request waits in vain: to join while something moves, in whatever team, is to wait for what the others
 * have left to do. They may also have to do what needs nobody, so a JOIN is reported, and never ends the job.
 */
static inline int64_t hr_stall_waits_since(const struct hr_lane *lane, const struct hr_request *request) {
    const int is_excused = request->call.op == HORO_JOIN && lane->stall.all_moved_ns > request->submit_ns;
    return is_excused ? lane->stall.all_moved_ns : request->submit_ns;
}

/* A refusal is reported, too, and ends no job: the program may have gone on, and others may never make the call. */
static inline int hr_stall_is_excused(const struct hr_request *request) {
    return request->call.op == HORO_JOIN || request->refused != 0;
}

/* Valid until the driver goes on. */
void hr_stall_find(struct hr_lane *lane, int64_t now_ns, struct hr_stalled *stalled);
/*
 * stall_ask.c. Asks those of whom this rank knows that they have not submitted something where they stand: they say it
 * in their own logs.
 */
void hr_stall_ask(struct hr_lane *lane, const struct hr_stalled *stalled, int64_t now_ns);
/* Names those that should have answered and have not. */
void hr_stall_check_answers(struct hr_lane *lane, int64_t now_ns);
/*
 * stall_text.c: whether a member, local or a host below, has not submitted all of it. What is excused does not count
 * beside other names, nor of a local rank that has submitted any: who has not joined may wait itself for a late rank.
 */
int hr_stall_is_waited_for(const struct hr_lane *lane, const struct hr_stalled *stalled, int member);
/* A line for each rank of this host, or for those that are alike: "\n  rank 1 (h1) has submitted 'a' and not 'b'". */
void hr_stall_describe(const struct hr_lane *lane, const struct hr_stalled *stalled, char *text, size_t text_bytes);

#endif
