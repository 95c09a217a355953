#include "node/node.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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

static void wake_up(struct hr_node *node, int local_rank) {
    if (node->wake_fds == NULL) {
        hr_word_wake(&node->arena.blocks[local_rank].sleeping);
    } else {
        const uint64_t one = 1;
        const ssize_t written = write(node->wake_fds[local_rank], &one, sizeof one);
        (void)written; /* a full counter is readable all the same */
    }
    atomic_fetch_add_explicit(&node->wakes, 1, memory_order_relaxed);
}

void hr_node_wake(struct hr_node *node, int local_rank) {
    _Atomic uint32_t *sleeping = &node->arena.blocks[local_rank].sleeping;
    /* Partner: the store in set_mark. The exchange lets only one of several wakers pay for the system call. */
    if (atomic_load(sleeping) != 0 && atomic_exchange(sleeping, 0) != 0) {
        wake_up(node, local_rank);
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
 * Every rank is woken, whether it says that it sleeps or not, and whether or not this abort was the first: who cleared
 * a sleeper's mark, or aborted first, may have been killed before it woke anybody.
 */
void hr_node_pass_abort(struct hr_node *node, struct hr_abort end) {
    hr_arena_end_once(&node->arena.header->abort_word, end);
    for (int i = 0; i < node->local_size; i++) {
        atomic_store(&node->arena.blocks[i].sleeping, 0);
        wake_up(node, i); /* me too: the caller need not be the driver */
    }
}

void hr_node_abort(struct hr_node *node, int code, int rank, enum hr_abort_reason reason) {
    hr_node_pass_abort(node, (struct hr_abort){.code = code, .rank = rank, .by = node->rank, .reason = reason});
}

void hr_node_end(struct hr_node *node, int code, const char *format, ...) {
    char words[HR_LAST_WORDS_MAX + 1];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(words, sizeof words, format, arguments);
    va_end(arguments);
    hr_arena_keep_last_words(&node->arena, node->rank, words, strlen(words));
    hr_node_abort(node, code, node->rank, HR_REASON_ENDED);
}

void hr_node_call(struct hr_node *node, int local_rank) {
    _Atomic uint32_t *calls = &node->arena.blocks[local_rank].calls;
    (void)atomic_fetch_add(calls, 1);
    hr_word_wake(calls);
}

void hr_node_pass_questions(struct hr_node *node) {
    struct hr_arena_block *block = &node->arena.blocks[node->local_rank];
    const uint32_t asked = atomic_load(&block->asked); /* partner: hr_node_ask */
    if (atomic_load_explicit(&node->asked, memory_order_relaxed) != asked &&
        atomic_exchange(&node->asked, asked) != asked) {
        hr_log_ask(&node->log, &block->answered, asked);
    }
}

void hr_node_ask(struct hr_node *node, int local_rank) {
    (void)atomic_fetch_add(&node->arena.blocks[local_rank].asked, 1);
    if (local_rank == node->local_rank) {
        hr_node_pass_questions(node);
    } else {
        hr_node_wake(node, local_rank);
        hr_node_call(node, local_rank);
    }
}

void hr_node_lose(struct hr_node *node, int local_rank) {
    const uint32_t state = atomic_load(&node->arena.blocks[local_rank].state);
    /* A leader is needed to the end: through it the others hear of deaths. */
    const int is_needed =
        local_rank == 0 || state == HR_MEMBER_ABSENT || !hr_arena_has_closed(&node->arena, local_rank);
    if (state != HR_MEMBER_LEFT && is_needed) {
        hr_node_abort(node, HORO_ERR_PEER_LOST, node->rank_of_local[local_rank], HR_REASON_EXITED);
    } else if (state != HR_MEMBER_LEFT) { /* sends and receives with it end */
        atomic_store(&node->arena.blocks[local_rank].state, HR_MEMBER_LEFT);
        hr_node_wake_all(node);
        hr_node_wake(node, node->local_rank);
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

hr_status hr_node_add_transport(struct hr_node *node, struct hr_transport *transport) {
    const size_t count = (size_t)node->transport_count + 1;
    struct hr_transport **transports = realloc((void *)node->transports, count * sizeof *transports);
    if (transports == NULL) {
        return HORO_ERR_RESOURCE;
    }
    node->transports = transports;
    node->transports[node->transport_count++] = transport;
    if (node->watching) {
        transport->ops->watch(transport, 1);
    }
    return HORO_OK;
}

void hr_node_drop_transport(struct hr_node *node, const struct hr_transport *transport) {
    for (int i = 0; i < node->transport_count; i++) {
        if (node->transports[i] == transport) {
            node->transports[i] = node->transports[--node->transport_count];
            return;
        }
    }
}
