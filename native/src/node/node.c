#include "node/node.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "arena/arena.h"

void hr_node_bury(const struct hr_node *node, void *memory, void (*release)(void *memory)) {
    if (atomic_load(&node->mpi.stranded) == 0) {
        release(memory);
    }
}

char *hr_node_name_rank(const struct hr_node *node, int rank, char *out, size_t out_bytes) {
    if (rank < 0 || rank >= node->size) {
        (void)snprintf(out, out_bytes, "a rank");
    } else {
        (void)snprintf(out, out_bytes, "rank %d (%s)", rank, node->host_name_of_rank[rank]);
    }
    return out;
}

static void write_event(struct hr_node *node, int local_rank) {
    const uint64_t one = 1;
    const ssize_t written = write(node->wake_fds[local_rank], &one, sizeof one);
    (void)written; /* a full counter is readable all the same */
    atomic_fetch_add_explicit(&node->wakes, 1, memory_order_relaxed);
}

void hr_node_wake(struct hr_node *node, int local_rank) {
    _Atomic uint32_t *sleeping = &node->arena.blocks[local_rank].sleeping;
    /* Partner: the store in sleep_until_woken. The exchange lets only one of several wakers pay for the write. */
    if (atomic_load(sleeping) != 0 && atomic_exchange(sleeping, 0) != 0) {
        write_event(node, local_rank);
    }
}

void hr_node_wake_all(struct hr_node *node) {
    for (int i = 0; i < node->local_size; i++) {
        if (i != node->local_rank) {
            hr_node_wake(node, i);
        }
    }
}

/*
 * Every eventfd is written, whether its rank says that it sleeps or not, and whether or not this abort was the first:
 * who cleared a sleeper's mark, or aborted first, may have been killed before it wrote.
 */
void hr_node_pass_abort(struct hr_node *node, struct hr_abort end) {
    hr_arena_end_once(&node->arena.header->abort_word, end);
    for (int i = 0; i < node->local_size; i++) {
        write_event(node, i); /* my own too: the caller need not be the driver */
    }
}

void hr_node_abort(struct hr_node *node, int code, int rank, enum hr_abort_reason reason) {
    hr_node_pass_abort(node, (struct hr_abort){.code = code, .rank = rank, .by = node->rank, .reason = reason});
}

void hr_node_end(struct hr_node *node, int code, int rank, const char *words, size_t bytes) {
    hr_arena_keep_last_words(&node->arena, rank, words, bytes);
    hr_node_abort(node, code, rank, HR_REASON_ENDED);
}

/* By way of the lowest rank, which alone has life lines to all; it passes the call on. */
void hr_node_call(const struct hr_node *node, int local_rank) {
    const int direct = atomic_load_explicit(&node->life_fds[local_rank], memory_order_relaxed);
    const int fd = direct >= 0 ? direct : atomic_load_explicit(&node->life_fds[0], memory_order_relaxed);
    const uint16_t called = (uint16_t)local_rank;
    if (fd >= 0) {
        (void)send(fd, &called, sizeof called, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
}

size_t hr_node_life_fds(const struct hr_node *node, struct pollfd *fds) {
    size_t count = 0;
    for (int i = 0; i < node->local_size; i++) {
        const int fd = atomic_load_explicit(&node->life_fds[i], memory_order_relaxed);
        if (fd >= 0) {
            fds[count++] = (struct pollfd){.fd = fd, .events = POLLIN};
        }
    }
    return count;
}

/* All that is ever sent on a life line are calls to wake up (hr_node_call), which are taken out here. */
static int has_ended(const struct hr_node *node, int fd) {
    uint16_t called[32];
    ssize_t count;
    while ((count = recv(fd, called, sizeof called, MSG_DONTWAIT)) > 0) {
        for (size_t i = 0; i < (size_t)count / sizeof *called; i++) {
            if (called[i] != node->local_rank && called[i] < node->local_size) {
                hr_node_call(node, called[i]);
            }
        }
    }
    return count == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

static void close_life_line(struct hr_node *node, int local_rank, int fd) {
    int expected = fd;
    if (!atomic_compare_exchange_strong(&node->life_fds[local_rank], &expected, -1)) {
        return; /* the other thread was first */
    }
    const uint32_t state = atomic_load(&node->arena.blocks[local_rank].state);
    /* A leader is needed to the end: through it the others hear of deaths. */
    const int is_needed =
        local_rank == 0 || state == HR_MEMBER_ABSENT || !hr_arena_has_closed(&node->arena, local_rank);
    if (state != HR_MEMBER_LEFT && is_needed) {
        hr_node_abort(node, HORO_ERR_PEER_LOST, node->rank_of_local[local_rank], HR_REASON_EXITED);
    }
}

void hr_node_watch(struct hr_node *node, const struct pollfd *fds, size_t count) {
    for (size_t k = 0; k < count; k++) {
        if (fds[k].revents == 0 || !has_ended(node, fds[k].fd)) {
            continue;
        }
        for (int i = 0; i < node->local_size; i++) {
            if (atomic_load_explicit(&node->life_fds[i], memory_order_relaxed) == fds[k].fd) {
                close_life_line(node, i, fds[k].fd);
            }
        }
    }
}

void hr_node_supervise(struct hr_node *node, int enabled) {
    for (int i = 0; i < node->transport_count && node->watching != enabled; i++) {
        node->transports[i]->ops->watch(node->transports[i], enabled);
    }
    node->watching = enabled;
}

hr_status hr_sleep_reserve(struct hr_sleep *sleep, size_t count) {
    if (count > sleep->capacity) {
        struct pollfd *fds = realloc(sleep->fds, count * sizeof *fds);
        if (fds == NULL) {
            return HORO_ERR_RESOURCE;
        }
        sleep->fds = fds;
        sleep->capacity = count;
    }
    return HORO_OK;
}

/* The most descriptors that a transport to the hosts of a team may have to poll. */
static size_t fds_of(const struct hr_node *node, int host_count) {
    return (size_t)(1 + node->sockets_per_peer) * (size_t)host_count;
}

hr_status hr_node_add_transport(struct hr_node *node, struct hr_transport *transport, int host_count) {
    const size_t fds = node->poll_count + fds_of(node, host_count);
    const int reserved = hr_sleep_reserve(&node->sleep, fds);
    const size_t count = (size_t)node->transport_count + 1;
    struct hr_transport **transports = realloc((void *)node->transports, count * sizeof *transports);
    node->transports = transports == NULL ? node->transports : transports;
    if (reserved != HORO_OK || transports == NULL) {
        return HORO_ERR_RESOURCE;
    }
    node->poll_count = fds;
    node->transports[node->transport_count++] = transport;
    if (node->watching) {
        transport->ops->watch(transport, 1);
    }
    return HORO_OK;
}

void hr_node_drop_transport(struct hr_node *node, const struct hr_transport *transport, int host_count) {
    for (int i = 0; i < node->transport_count; i++) {
        if (node->transports[i] == transport) {
            node->transports[i] = node->transports[--node->transport_count];
            node->poll_count -= fds_of(node, host_count);
            return;
        }
    }
}
