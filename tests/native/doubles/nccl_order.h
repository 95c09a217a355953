/*
 * In which order the ranks of this process launch, on one GPU each: if those orders contradict one another, kernels may
 * wait for one another for ever, whether these have or not. For nccl.c alone, with its lock held.
 *
 * A node is a set of launches that wait for one another: those of all ranks for a collective. Behind each is the next
 * one of the same GPU: orders that agree have no circle.
 */
#ifndef NCCL_ORDER_H
#define NCCL_ORDER_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nccl_run.h"

enum { DEVICES_MAX = 16, KEY_LISTS = 1 << 12 };

static struct node {
    int same_as; /* 1 + another one that it has been found to wait for; 0: none */
    int next[DEVICES_MAX]; /* 1 + the node behind it on a GPU; 0: none */
    int is_seen;
} *nodes;
static int node_count, node_capacity, last_on[DEVICES_MAX], wrong_orders;
static const void *stream_on[DEVICES_MAX]; /* of the last launch */

/* What a launch has in common with another rank's: a collective of a number. */
static struct key {
    struct key *next;
    unique_id id;
    int number;
    int node;
} *keys[KEY_LISTS];

static int make_node(void) {
    if (node_count == node_capacity) {
        node_capacity = 2 * node_capacity + 1024;
        nodes = realloc(nodes, (size_t)node_capacity * sizeof *nodes);
        if (nodes == NULL) {
            fprintf(stderr, "the double of NCCL: no memory to note a launch\n");
            abort();
        }
    }
    nodes[node_count] = (struct node){0};
    return ++node_count;
}

static int resolve(int node) {
    while (nodes[node - 1].same_as != 0) {
        node = nodes[node - 1].same_as;
    }
    return node;
}

/* Whether `to` comes behind `from`. */
static int is_behind_unseen(int from, int to) {
    if (from == to) {
        return 1;
    }
    if (nodes[from - 1].is_seen) {
        return 0;
    }
    nodes[from - 1].is_seen = 1;
    for (int device = 0; device < DEVICES_MAX; device++) {
        const int next = nodes[from - 1].next[device];
        if (next != 0 && is_behind_unseen(resolve(next), to)) {
            return 1;
        }
    }
    return 0;
}

static int is_behind(int from, int to) {
    for (int i = 0; i < node_count; i++) {
        nodes[i].is_seen = 0;
    }
    return is_behind_unseen(from, to);
}

/* Two that wait for one another are one. 0: one of them is behind the other. */
static int merge(int a, int b) {
    if (a == b) {
        return 1;
    }
    if (is_behind(a, b) || is_behind(b, a)) {
        return 0;
    }
    for (int device = 0; device < DEVICES_MAX; device++) {
        int *next = &nodes[a - 1].next[device];
        *next = *next != 0 ? *next : nodes[b - 1].next[device];
        last_on[device] = last_on[device] == b ? a : last_on[device];
    }
    nodes[b - 1].same_as = a;
    return 1;
}

/* Says that a launch has this in common with others. 0: that contradicts the order of others. */
static int note_key(const unique_id *id, int number, int node) {
    const unsigned char last = (unsigned char)id->bytes[strnlen(id->bytes, sizeof id->bytes) - 1];
    const unsigned hash = (unsigned)number * 31u + last * 17u;
    struct key **list = &keys[hash % KEY_LISTS];
    for (struct key *key = *list; key != NULL; key = key->next) {
        if (key->number == number && memcmp(&key->id, id, sizeof *id) == 0) {
            return merge(resolve(key->node), resolve(node));
        }
    }
    struct key *key = malloc(sizeof *key);
    *key = (struct key){.next = *list, .id = *id, .number = number, .node = node};
    *list = key;
    return 1;
}

/* 0: there is another stream of this GPU, which has no order with this one. */
static int note_launch(const struct comm *comm, const void *stream, int node) {
    const int device = comm->clique->slots[comm->rank].device;
    if (device >= DEVICES_MAX) {
        fprintf(stderr, "the double of NCCL: launches on GPU %d are not looked at\n", device);
        abort();
    }
    const int last = last_on[device];
    const int is_right = last == 0 || stream_on[device] == stream;
    if (last != 0) {
        nodes[last - 1].next[device] = node;
    }
    last_on[device] = node;
    stream_on[device] = stream;
    return is_right;
}

/* Of what is launched as one, by all ranks. */
static void note_group(struct comm *comm) {
    if (comm->waiting == NULL) {
        return;
    }
    const int node = make_node();
    int is_right = note_launch(comm, comm->waiting->stream, node);
    is_right &= note_key(&comm->id, ++comm->groups, node);
    wrong_orders += !is_right;
    atomic_fetch_or(&comm->clique->is_wrong, !is_right);
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
        node_count = 0;
        for (int i = 0; i < KEY_LISTS; i++) {
            for (struct key *key = keys[i], *next; key != NULL; key = next) {
                next = key->next;
                free(key);
            }
            keys[i] = NULL;
        }
    }
}

#endif
