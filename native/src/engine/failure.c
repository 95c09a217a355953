/* The end of the group: its cause, and what pending requests are told. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "arena/last_words.h"
#include "engine/engine.h"

struct hr_abort hr_engine_end(const struct hr_engine *engine) {
    const struct hr_abort aborted = hr_arena_aborted(&engine->node->arena);
    const struct hr_abort left = hr_arena_left(&engine->node->arena);
    /*
     * To a rank that has nothing open before the LEAVE record an abort is a consequence: ranks that were told of the
     * end have ended.
     */
    if (left.code == 0 || (aborted.code != 0 && !hr_arena_has_closed(&engine->node->arena, engine->node->local_rank))) {
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
static void describe_early_end(const struct hr_engine *engine, const char *who, const char *words, char *text,
                               size_t text_bytes) {
    /* the caller's, who writes it at any time */
    const int64_t *shown = atomic_load(&engine->step);
    const long long step = shown == NULL ? 0 : (long long)__atomic_load_n(shown, __ATOMIC_RELAXED);
    if (step == 0) {
        (void)snprintf(text, text_bytes, "%s %s, without a call that others wait for", who, words);
        return;
    }
    (void)snprintf(text, text_bytes,
                   "%s %s, while rank %d is in step %lld: uneven data or an early stop; use drop_last, "
                   "DistributedSampler or hvd.join()",
                   who, words, engine->node->rank, step);
}

void hr_engine_describe_end(const struct hr_engine *engine, struct hr_abort end, char *text, size_t text_bytes) {
    const struct hr_node *node = engine->node;
    char who[HR_NAME_TEXT_BYTES];
    (void)hr_node_name_rank(node, end.rank, who, sizeof who);
    switch (end.reason) {
    case HR_REASON_EXITED:
        (void)snprintf(text, text_bytes, "%s is gone: its process ended without shutting horo down", who);
        return;
    case HR_REASON_LINK:
    case HR_REASON_SILENT: describe_broken_link(node, end, who, text, text_bytes); return;
    case HR_REASON_STALLED:
        (void)snprintf(text, text_bytes, "%s has not submitted what others wait for, or not gone on with it, for %g s",
                       end.rank == node->rank ? "this rank" : who, (double)node->stall_shutdown_ns / 1e9);
        return;
    case HR_REASON_ENDED: {
        const char *words = hr_arena_last_words(&node->arena, end.rank);
        if (end.code == HORO_ERR_DEADLOCK && words != NULL) {
            (void)snprintf(text, text_bytes, "%s", words);
            return;
        }
        if (end.code == HORO_ERR_ABORTED && end.rank != node->rank && words != NULL) {
            describe_early_end(engine, who, words, text, text_bytes);
            return;
        }
        if (end.code == HORO_ERR_ABORTED) {
            break;
        }
        (void)snprintf(text, text_bytes, "%s ended with %s", end.rank == node->rank ? "this rank" : who,
                       words != NULL ? words : "an error");
        return;
    }
    case HR_REASON_LEFT: break;
    case HR_REASON_NONE:
    case HR_REASON_INTERNAL:
        (void)snprintf(text, text_bytes, "%s has given up after an internal error; see its log", who);
        return;
    }
    if (end.rank == node->rank) {
        (void)snprintf(text, text_bytes, "horo was shut down on this rank before the operation finished");
    } else {
        (void)snprintf(text, text_bytes, "%s has shut horo down", who);
    }
}

/* Behind the cause, which is whole: of the names as many as there is room for. */
static void append_pending(struct hr_engine *engine, char *text, size_t text_bytes) {
    size_t used = strlen(text);
    size_t count = 0;
    used += (size_t)snprintf(text + used, text_bytes - used, "; pending here: ");
    for (const struct hr_request *request = engine->submission.oldest; request != NULL; request = request->newer) {
        if (count++ < HR_NAMES_IN_TEXT && used < text_bytes) {
            char where[32] = "";
            if (request->call.team != 0) {
                (void)snprintf(where, sizeof where, " (process set %d)", request->call.team % HORO_TEAM_ID_STEP);
            }
            used += (size_t)snprintf(text + used, text_bytes - used, "%s'%s'%s", count == 1 ? "" : ", ",
                                     request->call.name, where);
        }
    }
    if (count > HR_NAMES_IN_TEXT && used < text_bytes) {
        (void)snprintf(text + used, text_bytes - used, " and %zu more", count - HR_NAMES_IN_TEXT);
    }
}

int hr_engine_fail_all(struct hr_engine *engine) {
    if (atomic_load(&engine->drive.pending) == 0) {
        return 0;
    }
    char text[HORO_MESSAGE_MAX];
    const struct hr_abort end = hr_engine_end(engine);
    hr_engine_describe_end(engine, end, text, sizeof text);
    hr_engine_show_end(engine);
    hr_drive_lock(&engine->drive);
    if (end.code != HORO_ERR_DEADLOCK) { /* which says what is waited for, of all ranks */
        append_pending(engine, text, sizeof text);
    }
    while (engine->submission.oldest != NULL) {
        hr_engine_complete_locked(engine, engine->submission.oldest, end.code, text);
    }
    engine->submission.queue_head = NULL;
    engine->submission.queue_tail = &engine->submission.queue_head;
    atomic_store(&engine->submission.queued, 0);
    hr_drive_wake_waiters(&engine->drive);
    hr_drive_unlock(&engine->drive);
    return 1;
}
