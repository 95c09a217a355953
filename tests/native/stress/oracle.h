/*
 * How an operation may end. Where all leave together, each ends as it must; where one leaves early, each ends alike on
 * all members of its team: done, refused, or not begun; where one dies, it may be lost unless it came before something
 * that the dead rank has waited for.
 */
#ifndef STRESS_ORACLE_H
#define STRESS_ORACLE_H

#include <stdatomic.h>

#include "schedule.h"

struct oracle {
    const struct schedule *schedule;
    atomic_int *decided;             /* [operations] members, but for the victim, for which it was done or refused */
    atomic_int *ends;                /* [operations] how it was decided, 1: not yet */
    size_t safe[RANKS_MAX];          /* by rank: what it does in a bunch before this one cannot fail */
    atomic_int numbers[TEAMS_MAX];   /* that teams have got; 0: none yet */
    atomic_int joined[JOINS_MAX];    /* 1 + the rank that was told to be the last one; 0: none yet */
};

enum verdict { GOES_ON, HAS_ENDED, IS_WRONG };

/* 0, or -1 without memory. */
int oracle_init(struct oracle *oracle, const struct schedule *schedule);
void oracle_free(struct oracle *oracle);
/* Whether an operation may end so on a rank, and what that means. Every end is to be reported once. */
enum verdict oracle_judge(struct oracle *oracle, int rank, size_t operation, size_t bunch, int status);
/* 1 if all ranks have got the same number for a team so far. */
int oracle_number_is_right(struct oracle *oracle, int team, int number);
/* 1 if all members have been told of the same rank so far, which is one of them. */
int oracle_last_is_right(struct oracle *oracle, int join, int rank);
/* When all ranks are over: the first operation that was decided on some members only; -1: there is none. */
int64_t oracle_find_torn(struct oracle *oracle);

#endif
