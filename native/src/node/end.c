#include "node/end.h"

#include <stdio.h>

#include "arena/arena.h"

enum { LINES = 16, TEXT_BYTES = 2 * HORO_MESSAGE_MAX - 128 }; /* of a line of the log, less its head */

struct hr_abort hr_end_find(const struct hr_node *node) {
    const struct hr_abort aborted = hr_arena_aborted(&node->arena);
    const struct hr_abort left = hr_arena_end_of(&node->arena.header->left_word);
    /* To a rank with nothing open before the LEAVE record an abort is a consequence: others have heard and ended. */
    if (left.code == 0 || (aborted.code != 0 && !hr_arena_has_closed(&node->arena, node->local_rank))) {
        return aborted;
    }
    return left;
}

/* A connection between two ranks, of which either may be the one that others cannot reach. */
static void describe_broken_link(const struct hr_node *node, struct hr_abort end, const char *who, char *text,
                                 size_t text_bytes) {
    const double timeout_s = (double)node->peer_timeout_ns / 1e9;
    char by[HR_NAME_TEXT_BYTES];
    (void)hr_node_name_rank(node, end.by, by, sizeof by);
    if (end.reason == HR_REASON_SILENT && end.rank == node->rank) {
        (void)snprintf(text, text_bytes, "this rank is out of reach of %s: no answer for %g s", by, timeout_s);
    } else if (end.reason == HR_REASON_SILENT) {
        (void)snprintf(text, text_bytes, "%s is out of reach: no answer for %g s, seen from %s", who, timeout_s, by);
    } else if (end.rank == node->rank) {
        (void)snprintf(text, text_bytes, "the connection of %s to this rank was closed", by);
    } else {
        (void)snprintf(text, text_bytes, "%s is gone: the connection to it was closed, seen from %s", who, by);
    }
}

/* A rank that has come to its end in order, with words about that: it will not do what others wait for. */
static void describe_early_end(const struct hr_node *node, const char *who, const char *words, char *text,
                               size_t text_bytes) {
    /* the caller's, who writes it at any time */
    const int64_t *shown = atomic_load(&node->step);
    const long long step = shown == NULL ? 0 : (long long)__atomic_load_n(shown, __ATOMIC_RELAXED);
    if (step == 0) {
        (void)snprintf(text, text_bytes, "%s %s, without a call that others wait for", who, words);
    } else {
        (void)snprintf(text, text_bytes,
                       "%s %s, while rank %d is in step %lld: uneven data or an early stop; use drop_last, "
                       "DistributedSampler or hvd.join()",
                       who, words, node->rank, step);
    }
}

void hr_end_describe(const struct hr_node *node, struct hr_abort end, char *text, size_t text_bytes) {
    char name[HR_NAME_TEXT_BYTES];
    const int is_mine = end.rank == node->rank;
    const char *other = hr_node_name_rank(node, end.rank, name, sizeof name);
    const char *who = is_mine ? "this rank" : other;
    const char *words = hr_arena_last_words(&node->arena, end.rank);
    switch (end.reason) {
    case HR_REASON_EXITED:
        (void)snprintf(text, text_bytes, "%s is gone: its process ended without shutting horo down", other);
        return;
    case HR_REASON_LINK:
    case HR_REASON_SILENT: describe_broken_link(node, end, other, text, text_bytes); return;
    case HR_REASON_STALLED:
        (void)snprintf(text, text_bytes, "%s has not submitted what others wait for, or not gone on with it, for %g s",
                       who, (double)node->stall_shutdown_ns / 1e9);
        return;
    case HR_REASON_ENDED:
        if ((end.code == HORO_ERR_DEADLOCK || end.code == HORO_ERR_TIMEOUT) && words != NULL) {
            (void)snprintf(text, text_bytes, "%s", words);
        } else if (end.code != HORO_ERR_ABORTED) {
            (void)snprintf(text, text_bytes, "%s ended with %s", who, words != NULL ? words : "an error");
        } else if (!is_mine && words != NULL) {
            describe_early_end(node, other, words, text, text_bytes);
        } else {
            break;
        }
        return;
    case HR_REASON_ABORTED:
        (void)snprintf(text, text_bytes, "%s has aborted the group: %s", who,
                       words != NULL ? words : "it has given no reason");
        return;
    case HR_REASON_LEFT: break;
    case HR_REASON_NONE:
    case HR_REASON_INTERNAL:
        (void)snprintf(text, text_bytes, "%s has given up after an internal error; see its log", other);
        return;
    }
    if (is_mine) {
        (void)snprintf(text, text_bytes, "horo was shut down on this rank before the operation finished");
    } else {
        (void)snprintf(text, text_bytes, "%s has shut horo down", other);
    }
}

hr_status hr_end_check(const struct hr_node *node, struct hr_error *error) {
    const struct hr_abort end = hr_end_find(node);
    if (end.code == 0) {
        return HORO_OK;
    }
    char text[HORO_MESSAGE_MAX];
    hr_end_describe(node, end, text, sizeof text);
    return hr_fail(error, end.code, "%s", text);
}

void hr_end_note(struct hr_node *node) {
    const struct hr_abort end = hr_end_find(node);
    if (end.code == 0 || atomic_exchange(&node->recorder.end_noted, 1)) {
        return;
    }
    const int has_left =
        end.reason == HR_REASON_LEFT || (end.reason == HR_REASON_ENDED && end.code == HORO_ERR_ABORTED);
    const struct hr_event event = {.event = has_left ? HORO_EVENT_LEFT : HORO_EVENT_LOST,
                                   .op = -1,
                                   .status = has_left ? HORO_OK : end.code,
                                   .number = end.rank};
    hr_recorder_add(&node->recorder, &event);
}

void hr_end_show_events(struct hr_node *node, int level) {
    char text[TEXT_BYTES];
    if (hr_recorder_describe(&node->recorder, LINES, text, sizeof text)) {
        hr_log(&node->log, level, "the last events on this rank, the oldest first:%s", text);
    }
}

void hr_end_show(struct hr_node *node) {
    hr_end_note(node); /* nobody need have driven since */
    const enum hr_abort_reason reason = hr_end_find(node).reason;
    const int is_explained = reason == HR_REASON_LEFT || reason == HR_REASON_ENDED || reason == HR_REASON_ABORTED;
    if (!is_explained && !atomic_exchange(&node->recorder.end_shown, 1)) {
        hr_end_show_events(node, HORO_LOG_ERROR);
    }
}
