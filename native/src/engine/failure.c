/* The end of the group and what leads to it: what pending requests are told, and who is reported as late. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"

enum { NAMES_IN_TEXT = 6, NAME_TEXT_BYTES = 256 };

void hr_engine_describe_end(const struct hr_engine *engine, struct hr_abort end, char *text, size_t text_bytes) {
    const struct hr_group *group = engine->group;
    char who[NAME_TEXT_BYTES];
    (void)hr_group_name_rank(group, end.rank, who, sizeof who);
    switch (end.reason) {
    case HR_REASON_EXITED:
        (void)snprintf(text, text_bytes, "%s is gone: its process ended without shutting horo down", who);
        return;
    case HR_REASON_LINK:
        (void)snprintf(text, text_bytes, "%s is gone: the connection to it was closed", who);
        return;
    case HR_REASON_SILENT:
        (void)snprintf(text, text_bytes, "%s is out of reach: no answer for %lld s", who,
                       (long long)(group->peer_timeout_ns / 1000000000));
        return;
    case HR_REASON_STALLED:
        (void)snprintf(text, text_bytes, "%s has not done its part for %g s", who, (double)group->stall_shutdown_ns / 1e9);
        return;
    case HR_REASON_LEFT:
        (void)snprintf(text, text_bytes, "%s has shut horo down", who);
        return;
    case HR_REASON_INTERRUPTED:
        (void)snprintf(text, text_bytes, "%s was interrupted by a signal in the middle of an operation", who);
        return;
    case HR_REASON_NONE:
    case HR_REASON_INTERNAL:
        break;
    }
    (void)snprintf(text, text_bytes, "%s has given up after an internal error; see its log", who);
}

static void describe_pending(struct hr_engine *engine, char *text, size_t text_bytes) {
    size_t used = 0;
    size_t count = 0;
    text[0] = '\0';
    for (const struct hr_request *request = engine->oldest; request != NULL; request = request->newer) {
        if (count++ < NAMES_IN_TEXT && used < text_bytes) {
            used += (size_t)snprintf(text + used, text_bytes - used, "%s'%s'", count == 1 ? "" : ", ", request->call.name);
        }
    }
    if (count > NAMES_IN_TEXT && used < text_bytes) {
        (void)snprintf(text + used, text_bytes - used, " and %zu more", count - NAMES_IN_TEXT);
    }
}

void hr_engine_fail_all(struct hr_engine *engine, int code, const char *why) {
    (void)hr_engine_announce(engine); /* nothing stays behind in the queue */
    char pending[HORO_MESSAGE_MAX / 2];
    char text[HORO_MESSAGE_MAX];
    (void)pthread_mutex_lock(&engine->lock);
    describe_pending(engine, pending, sizeof pending);
    (void)snprintf(text, sizeof text, "%.400s; pending here: %s", why, pending);
    const size_t count = engine->in_flight.count;
    struct hr_request **requests = calloc(count + 1, sizeof *requests);
    size_t found = 0;
    for (struct hr_request *request = engine->oldest; request != NULL && requests != NULL; request = request->newer) {
        if (request->pending_place != HR_NOT_ANNOUNCED) { /* else it came just now: the next turn takes it */
            requests[found++] = request;
        }
    }
    (void)pthread_mutex_unlock(&engine->lock);
    if (requests == NULL) {
        return; /* tried again by the next turn of the driver */
    }
    hr_engine_complete(engine, requests, found, code, text);
    free((void *)requests);
}

int hr_engine_fail_if_ended(struct hr_engine *engine) {
    struct hr_abort end = hr_arena_aborted(&engine->group->arena);
    const int left = hr_group_left(engine->group);
    if (end.code == 0 && left == 0) {
        return 0;
    }
    if (end.code == 0) {
        /* Somebody has left: what is in the log still runs, what is not agreed on never will be. */
        if (atomic_load(&engine->pending) == 0 ||
            atomic_load(&engine->group->arena.header->log.written) != engine->log_executed) {
            return 0;
        }
        end = (struct hr_abort){.code = HORO_ERR_ABORTED, .rank = left - 1, .reason = HR_REASON_LEFT};
    }
    char why[HORO_MESSAGE_MAX];
    hr_engine_describe_end(engine, end, why, sizeof why);
    if (atomic_load(&engine->pending) > 0) {
        hr_engine_fail_all(engine, end.code, why);
    }
    return 1;
}

/* The local ranks that have not submitted the name, as text; returns the first of them or -1. */
static int find_missing(const struct hr_engine *engine, uint64_t name_hash, char *text, size_t text_bytes) {
    const struct hr_group *group = engine->group;
    int first = -1;
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < group->local_size; i++) {
        if (i != group->local_rank && hr_arena_pending_has(&group->arena, i, name_hash) == 0) {
            const int rank = group->rank_of_local[i];
            first = first < 0 ? rank : first;
            if (used < text_bytes) {
                used += (size_t)snprintf(text + used, text_bytes - used, "%srank %d (%s)", used == 0 ? "" : ", ", rank,
                                         group->host_name_of_rank[rank]);
            }
        }
    }
    return first;
}

/* What waits for local ranks: "'a' (missing: rank 1 (h1)); ..." and the first culprit. Returns how many tensors. */
static int describe_local(struct hr_engine *engine, int64_t now_ns, char *text, size_t text_bytes, int *culprit,
                          int64_t *oldest_ns) {
    int count = 0;
    size_t used = 0;
    *culprit = -1;
    *oldest_ns = now_ns;
    (void)pthread_mutex_lock(&engine->lock);
    for (const struct hr_request *request = engine->oldest; request != NULL; request = request->newer) {
        if (now_ns - request->submit_ns < engine->group->stall_warning_ns) {
            break;
        }
        *oldest_ns = request->submit_ns < *oldest_ns ? request->submit_ns : *oldest_ns;
        char missing[NAME_TEXT_BYTES];
        const int rank = find_missing(engine, request->name_hash, missing, sizeof missing);
        if (rank < 0) {
            continue;
        }
        *culprit = *culprit < 0 ? rank : *culprit;
        if (count++ < NAMES_IN_TEXT && used < text_bytes) {
            used += (size_t)snprintf(text + used, text_bytes - used, "%s'%s' (missing: %s)", count == 1 ? "" : "; ",
                                     request->call.name, missing);
        }
    }
    (void)pthread_mutex_unlock(&engine->lock);
    return count;
}

static int64_t oldest_pending_ns(struct hr_engine *engine) {
    (void)pthread_mutex_lock(&engine->lock);
    const int64_t oldest = engine->oldest == NULL ? 0 : engine->oldest->submit_ns;
    (void)pthread_mutex_unlock(&engine->lock);
    const int64_t since = engine->is_leader ? hr_agree_waiting_since(&engine->agree) : 0;
    return since != 0 && (oldest == 0 || since < oldest) ? since : oldest;
}

/*
 * What all ranks here have submitted while the next one on the way to the root of the tree says nothing: it is stopped, or
 * somebody behind it is late. Each level waits one period longer than the one above, so whoever is nearest names the culprit.
 */
static int describe_undecided(struct hr_engine *engine, int64_t now_ns, char *text, size_t text_bytes, int *culprit,
                              int64_t *oldest_ns, int *periods) {
    const struct hr_group *group = engine->group;
    if (engine->is_root) {
        return 0;
    }
    *periods = (engine->is_leader ? 1 : 2) + __builtin_popcount((unsigned)group->host); /* the tree is binomial */
    *culprit = engine->is_leader ? engine->links[0].leader_rank : group->rank_of_local[0];
    char who[NAME_TEXT_BYTES];
    (void)hr_group_name_rank(group, *culprit, who, sizeof who);
    int count = 0;
    size_t used = 0;
    (void)pthread_mutex_lock(&engine->lock);
    for (const struct hr_request *request = engine->oldest; request != NULL; request = request->newer) {
        const int64_t since_ns = request->submit_ns > engine->stall_moved_ns ? request->submit_ns : engine->stall_moved_ns;
        if (now_ns - since_ns < *periods * group->stall_warning_ns) {
            continue;
        }
        *oldest_ns = since_ns < *oldest_ns ? since_ns : *oldest_ns;
        if (count++ < NAMES_IN_TEXT && used < text_bytes) {
            used += (size_t)snprintf(text + used, text_bytes - used, "%s'%s' (submitted by all here, no answer from %s)",
                                     count == 1 ? "" : "; ", request->call.name, who);
        }
    }
    (void)pthread_mutex_unlock(&engine->lock);
    return count;
}

/* One report per host and period: the first rank to ask gets the turn. */
static int take_turn(struct hr_engine *engine, int64_t now_ns) {
    _Atomic uint64_t *last = &engine->group->arena.header->stall_report_ns;
    uint64_t seen = atomic_load(last);
    return (seen == 0 || now_ns - (int64_t)seen >= engine->group->stall_warning_ns) &&
           atomic_compare_exchange_strong(last, &seen, (uint64_t)now_ns);
}

static void report(struct hr_engine *engine, int64_t now_ns) {
    struct hr_group *group = engine->group;
    char text[HORO_MESSAGE_MAX];
    int culprit = -1;
    int64_t oldest_ns = now_ns;
    int periods = 0; /* of patience with ranks of other hosts: those beside the culprit know it better */
    int count = describe_local(engine, now_ns, text, sizeof text, &culprit, &oldest_ns);
    if (count == 0 && engine->is_leader) {
        periods = 1;
        count = hr_agree_describe_waiting(&engine->agree, now_ns, group->stall_warning_ns, text, sizeof text, &oldest_ns,
                                          &culprit);
    }
    if (count == 0) {
        count = describe_undecided(engine, now_ns, text, sizeof text, &culprit, &oldest_ns, &periods);
    }
    if (count == 0) {
        return;
    }
    if (take_turn(engine, now_ns)) {
        hr_log(&group->log, HORO_LOG_WARNING,
               "waiting for %lld s for ranks that have not submitted what others have: %s%s. They may be slow or stopped, or "
               "take another path through the program",
               (long long)((now_ns - oldest_ns) / 1000000000), text, count > NAMES_IN_TEXT ? " and more" : "");
    }
    if (group->stall_shutdown_ns > 0 && now_ns - oldest_ns >= group->stall_shutdown_ns + periods * group->stall_warning_ns) {
        hr_group_abort(group, HORO_ERR_STALLED, culprit, HR_REASON_STALLED);
    }
}

int64_t hr_engine_check_stall(struct hr_engine *engine) {
    const int64_t warning_ns = engine->group->stall_warning_ns;
    if (warning_ns <= 0 ||
        (atomic_load(&engine->pending) == 0 && (!engine->is_leader || engine->agree.active == 0))) {
        engine->stall_check_ns = 0;
        return 0;
    }
    /* What is submitted later is due later, so the time found once holds until it comes. */
    const int64_t now_ns = hr_now_ns();
    if (now_ns < engine->stall_check_ns) {
        return engine->stall_check_ns;
    }
    const uint64_t batches = atomic_load_explicit(&engine->batches, memory_order_relaxed);
    if (batches != engine->stall_batches) {
        engine->stall_batches = batches;
        engine->stall_moved_ns = now_ns;
    }
    const int64_t oldest_ns = oldest_pending_ns(engine);
    if (oldest_ns != 0 && now_ns - oldest_ns >= warning_ns) {
        report(engine, now_ns);
        engine->stall_check_ns = now_ns + warning_ns;
    } else {
        engine->stall_check_ns = (oldest_ns == 0 ? now_ns : oldest_ns) + warning_ns;
    }
    return engine->stall_check_ns;
}
