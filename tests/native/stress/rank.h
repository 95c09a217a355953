/* One rank: a thread that does its part of a schedule and judges what it gets. */
#ifndef STRESS_RANK_H
#define STRESS_RANK_H

#include <pthread.h>
#include <stdatomic.h>

#include "fabric.h"
#include "oracle.h"

enum phase { PHASE_BEGIN, PHASE_SUBMIT, PHASE_RUN, PHASE_WAIT, PHASE_GONE, PHASE_DESTROY, PHASE_OVER };

struct run {
    const struct schedule *schedule;
    struct fabric fabric;
    struct oracle oracle;
    struct rank *ranks;
    pthread_barrier_t settled; /* of a schedule with a death: all survivors know of it */
    atomic_int failed;         /* the first rank that finds a fault prints it */
    atomic_int over;           /* ranks that are done */
    char replay[160];
};

struct rank {
    struct run *run;
    int number;
    horo_context *context;
    pthread_t thread;
    int team_numbers[TEAMS_MAX]; /* as this rank got them; -1: it is not there */
    int64_t joins[JOINS_MAX];    /* their handles, where this rank has joined before the last bunch */
    /* for the watchdog: */
    _Atomic int phase;
    _Atomic size_t operation, finished;
};

/* Says what all ranks are at. */
void run_describe(const struct run *run);
/* Prints the fault of an operation, and ends the process. */
__attribute__((format(printf, 3, 4))) void rank_fail(struct rank *rank, size_t operation, const char *format, ...);
/* The thread of a rank whose context exists. A fault is printed and ends the process. */
void *rank_main(void *rank);

#endif
