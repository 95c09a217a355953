/*
 * In which order the ranks of this process launch, on one GPU each: if those orders contradict one another, kernels may
 * wait for one another for ever, whether these have or not. For nccl.c alone, with its lock held.
 *
 * A launch is a node, and behind each is the next one of the same GPU: orders that agree have no circle.
 */
#ifndef NCCL_ORDER_H
#define NCCL_ORDER_H

#include <stdlib.h>
#include <string.h>

#include "nccl_run.h"

enum { NODES_MAX = 1 << 14, DEVICES_MAX = 16 };

static struct node {
    unique_id id;
    int number;
    int next[DEVICES_MAX]; /* 1 + the node behind it on a GPU; 0: none */
    int is_seen;
} *nodes;
static int node_count, last_on[DEVICES_MAX], wrong_orders;
static const void *stream_on[DEVICES_MAX]; /* of the last launch */

static int node_of(const unique_id *id, int number) {
    for (int i = 0; i < node_count; i++) {
        if (nodes[i].number == number && memcmp(&nodes[i].id, id, sizeof *id) == 0) {
            return i + 1;
        }
    }
    nodes[node_count] = (struct node){.id = *id, .number = number};
    return ++node_count;
}

/* Whether `to` comes behind `from`. */
static int is_behind(int from, int to) {
    if (from == to) {
        return 1;
    }
    if (nodes[from - 1].is_seen) {
        return 0;
    }
    nodes[from - 1].is_seen = 1;
    for (int device = 0; device < DEVICES_MAX; device++) {
        const int next = nodes[from - 1].next[device];
        if (next != 0 && is_behind(next, to)) {
            return 1;
        }
    }
    return 0;
}

/* 0: it contradicts another. Two streams of a GPU have no order between them. */
static int note_launch(const struct comm *comm, const void *stream, int number) {
    const int device = comm->clique->slots[comm->rank].device;
    nodes = nodes == NULL ? calloc(NODES_MAX, sizeof *nodes) : nodes;
    if (device >= DEVICES_MAX || node_count == NODES_MAX) {
        return 1;
    }
    const int node = node_of(&comm->id, number);
    const int last = last_on[device];
    int is_right = last == 0 || stream_on[device] == stream;
    if (last != 0) {
        for (int i = 0; i < node_count; i++) {
            nodes[i].is_seen = 0;
        }
        is_right = is_right && !is_behind(node, last);
        nodes[last - 1].next[device] = node;
    }
    last_on[device] = node;
    stream_on[device] = stream;
    wrong_orders += !is_right;
    return is_right;
}

/* Of what is launched as one. Sends and recvs are not launched by all ranks. */
static void note_group(struct comm *comm) {
    if (comm->waiting != NULL && comm->waiting->kind < SEND) {
        const int is_right = note_launch(comm, comm->waiting->stream, ++comm->groups);
        atomic_fetch_or(&comm->clique->is_wrong, !is_right);
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

/* A job after that has other streams. */
static void forget_if_over(int comms) {
    if (comms == 0) {
        memset(last_on, 0, sizeof last_on);
    }
}

#endif
