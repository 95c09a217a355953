/* What the ranks of this process launch, and what an abort waits for. For nccl.c, with its lock held. */
#ifndef NCCL_ORDER_H
#define NCCL_ORDER_H

#include <stdio.h>

#include "nccl_run.h"

/* A line for each launch, the calls of a group: GPU, stream, and a word that its collective has on all ranks. */
static FILE *launches;
static char *launches_text;
static size_t launches_bytes;

static void note_group(struct comm *comm) {
    launches = launches != NULL ? launches : open_memstream(&launches_text, &launches_bytes);
    if (comm->waiting != NULL) {
        fprintf(launches, "%d %p %s:%d\n", comm->clique->slots[comm->rank].device, comm->waiting->stream,
                comm->id.bytes, ++comm->groups);
    }
}

/* A job after that has other streams. */
static void note_end(void) {
    if (launches != NULL) {
        fprintf(launches, "over\n");
    }
}

/* ---- What an abort waits for ---- */

static struct work *launched_first;

static void note_work(struct work *work) {
    struct work **link = &launched_first;
    while (*link != NULL) {
        link = &(*link)->launched_next;
    }
    *link = work;
}

static void forget_work(const struct work *work) {
    struct work **link = &launched_first;
    while (*link != work) {
        link = &(*link)->launched_next;
    }
    *link = work->launched_next;
}

/* Whether a kernel of it stands behind one that runs, and goes on to, of a communicator that is not aborted. */
static int stands_behind_others(const struct comm *comm) {
    for (const struct work *work = launched_first; work != NULL; work = work->launched_next) {
        for (const struct work *before = launched_first; work->comm == comm && before != work;
             before = before->launched_next) {
            if (before->stream == work->stream && before->comm != comm && before->has_begun &&
                !atomic_load(&before->comm->is_aborted)) {
                return 1;
            }
        }
    }
    return 0;
}

#endif
