/* What has waited too long, who is late, and who ends the job for it. */
#include <stdio.h>
#include <string.h>

#include "engine/engine.h"

enum { NAMES_IN_TEXT = 6, NAME_TEXT_BYTES = 256 };

/* The local ranks that have not submitted the name, as text; returns the first of them or -1. */
static int find_missing(const struct hr_engine *engine, uint64_t name_hash, char *text, size_t text_bytes) {
    const struct hr_node *node = engine->node;
    int first = -1;
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < node->local_size; i++) {
        if (i != node->local_rank && hr_arena_pending_has(&node->arena, i, name_hash) == 0) {
            const int rank = node->rank_of_local[i];
            first = first < 0 ? rank : first;
            if (used < text_bytes) {
                used += (size_t)snprintf(text + used, text_bytes - used, "%srank %d (%s)", used == 0 ? "" : ", ", rank,
                                         node->host_name_of_rank[rank]);
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
    (void)pthread_mutex_lock(&engine->submission.lock);
    for (const struct hr_request *request = engine->submission.oldest; request != NULL; request = request->newer) {
        if (now_ns - request->submit_ns < engine->node->stall_warning_ns) {
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
    (void)pthread_mutex_unlock(&engine->submission.lock);
    return count;
}

static int64_t oldest_pending_ns(struct hr_engine *engine) {
    (void)pthread_mutex_lock(&engine->submission.lock);
    const int64_t oldest = engine->submission.oldest == NULL ? 0 : engine->submission.oldest->submit_ns;
    (void)pthread_mutex_unlock(&engine->submission.lock);
    const int64_t since = engine->is_leader ? hr_agree_waiting_since(&engine->leader.agree) : 0;
    return since != 0 && (oldest == 0 || since < oldest) ? since : oldest;
}

/*
 * What all ranks here have submitted while the next one on the way to the root of the tree says nothing: it is stopped, or
 * somebody behind it is late. Each level waits one period longer than the one above, so whoever is nearest names the culprit.
 */
static int describe_undecided(struct hr_engine *engine, int64_t now_ns, char *text, size_t text_bytes, int *culprit,
                              int64_t *oldest_ns, int *periods) {
    const struct hr_node *node = engine->node;
    if (engine->is_root) {
        return 0;
    }
    *periods = (engine->is_leader ? 1 : 2) + __builtin_popcount((unsigned)engine->team->host); /* the tree is binomial */
    *culprit = engine->is_leader ? engine->leader.links[0].leader_rank : node->rank_of_local[0];
    char who[NAME_TEXT_BYTES];
    (void)hr_node_name_rank(node, *culprit, who, sizeof who);
    int count = 0;
    size_t used = 0;
    (void)pthread_mutex_lock(&engine->submission.lock);
    for (const struct hr_request *request = engine->submission.oldest; request != NULL; request = request->newer) {
        const int64_t since_ns = request->submit_ns > engine->driver.stall_moved_ns ? request->submit_ns : engine->driver.stall_moved_ns;
        if (now_ns - since_ns < *periods * node->stall_warning_ns) {
            continue;
        }
        *oldest_ns = since_ns < *oldest_ns ? since_ns : *oldest_ns;
        if (count++ < NAMES_IN_TEXT && used < text_bytes) {
            used += (size_t)snprintf(text + used, text_bytes - used, "%s'%s' (submitted by all here, no answer from %s)",
                                     count == 1 ? "" : "; ", request->call.name, who);
        }
    }
    (void)pthread_mutex_unlock(&engine->submission.lock);
    return count;
}

/* One report per host and period: the first rank to ask gets the turn. */
static int take_turn(struct hr_engine *engine, int64_t now_ns) {
    _Atomic uint64_t *last = &engine->node->arena.header->stall_report_ns;
    uint64_t seen = atomic_load(last);
    return (seen == 0 || now_ns - (int64_t)seen >= engine->node->stall_warning_ns) &&
           atomic_compare_exchange_strong(last, &seen, (uint64_t)now_ns);
}

static void report(struct hr_engine *engine, int64_t now_ns) {
    struct hr_node *node = engine->node;
    char text[HORO_MESSAGE_MAX];
    int culprit = -1;
    int64_t oldest_ns = now_ns;
    int periods = 0; /* of patience with ranks of other hosts: those beside the culprit know it better */
    int count = describe_local(engine, now_ns, text, sizeof text, &culprit, &oldest_ns);
    if (count == 0 && engine->is_leader) {
        periods = 1;
        count = hr_agree_describe_waiting(&engine->leader.agree, now_ns, node->stall_warning_ns, text, sizeof text, &oldest_ns,
                                          &culprit);
    }
    if (count == 0) {
        count = describe_undecided(engine, now_ns, text, sizeof text, &culprit, &oldest_ns, &periods);
    }
    if (count == 0) {
        return;
    }
    if (take_turn(engine, now_ns)) {
        hr_log(&node->log, HORO_LOG_WARNING,
               "waiting for %lld s for ranks that have not submitted what others have: %s%s. They may be slow or stopped, or "
               "take another path through the program",
               (long long)((now_ns - oldest_ns) / 1000000000), text, count > NAMES_IN_TEXT ? " and more" : "");
    }
    hr_engine_show_events(engine, HORO_LOG_WARNING); /* every rank its own, also those whose turn it is not */
    if (node->stall_shutdown_ns > 0 && now_ns - oldest_ns >= node->stall_shutdown_ns + periods * node->stall_warning_ns) {
        hr_node_abort(node, HORO_ERR_STALLED, culprit, HR_REASON_STALLED);
    }
}

/* The batch that is being executed has not moved for waited_ns. */
static void report_batch(struct hr_engine *engine, int64_t waited_ns) {
    struct hr_node *node = engine->node;
    const int late = hr_team_find_late(engine->team);
    char name[NAME_TEXT_BYTES];
    if (late >= 0) {
        (void)hr_node_name_rank(node, late, name, sizeof name);
    } else {
        (void)snprintf(name, sizeof name, node->host_count > 1 ? "another host" : "another rank");
    }
    hr_log(&node->log, HORO_LOG_WARNING, "waiting for %s in the middle of an operation for %lld s", name,
           (long long)(waited_ns / 1000000000));
    hr_engine_show_events(engine, HORO_LOG_WARNING);
    if (node->stall_shutdown_ns > 0 && waited_ns >= node->stall_shutdown_ns) {
        hr_node_abort(node, HORO_ERR_STALLED, late, HR_REASON_STALLED);
    }
}

int64_t hr_engine_check_stall(struct hr_engine *engine, uint64_t moves) {
    const int64_t warning_ns = engine->node->stall_warning_ns;
    if (warning_ns <= 0 ||
        (atomic_load(&engine->submission.pending) == 0 && (!engine->is_leader || engine->leader.agree.active == 0))) {
        engine->driver.stall_check_ns = 0;
        return 0;
    }
    /* What is submitted later is due later, so the time found once holds until it comes. */
    const int64_t now_ns = hr_now_ns();
    if (moves != engine->driver.stall_moves) {
        engine->driver.stall_moves = moves;
        engine->driver.stall_moved_ns = now_ns;
    }
    if (now_ns < engine->driver.stall_check_ns) {
        return engine->driver.stall_check_ns;
    }
    const int is_executing = engine->executor.state != HR_EXECUTION_IDLE;
    const int64_t since_ns = is_executing ? engine->driver.stall_moved_ns : oldest_pending_ns(engine);
    if (since_ns != 0 && now_ns - since_ns >= warning_ns) {
        if (is_executing) {
            report_batch(engine, now_ns - since_ns);
        } else {
            report(engine, now_ns);
        }
        engine->driver.stall_check_ns = now_ns + warning_ns;
    } else {
        engine->driver.stall_check_ns = (since_ns == 0 ? now_ns : since_ns) + warning_ns;
    }
    return engine->driver.stall_check_ns;
}
