/* Requests that have waited too long: which rank is late, and when the job ends for it. */
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "engine/drive/drive.h"
#include "engine/report/stall.h"

/* While it waits in a batch, a rank looks LOOKS times per period, and is silent once it has missed half of them. */
enum { LOOKS = 8 };

/* While others are waited for, it is looked so often whether anything has moved. */
enum { STEPS = 16 };

enum { TEAM_TEXT_BYTES = HR_TEAM_NAME_BYTES + 8 };

static int64_t oldest_pending_ns(struct hr_lane *lane) {
    (void)pthread_mutex_lock(&lane->engine->submission.lock);
    const struct hr_request *request = hr_lane_next_pending(lane, NULL);
    const int64_t oldest = request == NULL ? 0 : hr_stall_waits_since(lane, request);
    (void)pthread_mutex_unlock(&lane->engine->submission.lock);
    const int64_t since = lane->is_leader ? hr_agree_waiting_since(&lane->leader.agree) : 0;
    return since != 0 && (oldest == 0 || since < oldest) ? since : oldest;
}

/*
 * Describes what all ranks here have submitted while no answer comes from the next rank on the way to the root of the
 * tree, which is stopped, or a rank behind it is late. Each level waits one period longer than the one above, so the
 * nearest one names the culprit.
 */
static int describe_undecided(struct hr_lane *lane, int64_t now_ns, char *text, size_t text_bytes,
                              struct hr_stalled *stalled, int *periods) {
    const struct hr_node *node = lane->node;
    if (lane->is_root) {
        return 0;
    }
    *periods = (lane->is_leader ? 1 : 2) + __builtin_popcount((unsigned)lane->team->host); /* the tree is binomial */
    stalled->culprit =
        lane->is_leader ? lane->leader.links[0].leader_rank : lane->team->job_rank[lane->team->rank_of_local[0]];
    char who[HR_NAME_TEXT_BYTES];
    (void)hr_node_name_rank(node, stalled->culprit, who, sizeof who);
    int count = 0;
    size_t used = 0;
    (void)pthread_mutex_lock(&lane->engine->submission.lock);
    const struct hr_request *request = NULL;
    while ((request = hr_lane_next_pending(lane, request)) != NULL) {
        const int64_t since_ns = request->submit_ns > lane->stall.moved_ns ? request->submit_ns : lane->stall.moved_ns;
        if (now_ns - since_ns < *periods * node->stall_warning_ns) {
            continue;
        }
        stalled->oldest_ns = since_ns < stalled->oldest_ns ? since_ns : stalled->oldest_ns;
        if (!hr_stall_is_excused(request) && since_ns < stalled->blocked_ns) {
            stalled->blocked_ns = since_ns;
        }
        if (count++ < HR_NAMES_IN_TEXT && used < text_bytes) {
            used +=
                (size_t)snprintf(text + used, text_bytes - used, "%s'%s' (no answer from %s)",
                                 count == 1 ? "" : "; ", request->call.name, who);
        }
    }
    (void)pthread_mutex_unlock(&lane->engine->submission.lock);
    return count;
}

/*
 * A leader that has requests pending has the announcements of all ranks here, so the others let it make the report of a
 * period first.
 */
static int leaves_turn(struct hr_lane *lane, int64_t now_ns) {
    const int leader = lane->team->index_of_local[0];
    const int leaves = !lane->is_leader && hr_arena_pending_any(&lane->node->arena, leader) &&
                       now_ns - lane->stall.left_turn_ns >= lane->node->stall_warning_ns;
    lane->stall.left_turn_ns = leaves ? now_ns : lane->stall.left_turn_ns;
    return leaves;
}

/* One report per team, host and period: the first rank to ask gets the turn. */
static int take_turn(struct hr_lane *lane, int64_t now_ns) {
    _Atomic uint64_t *last = &lane->node->arena.header->stall_report_ns[lane->team->number];
    uint64_t seen = atomic_load(last);
    return (seen == 0 || now_ns - (int64_t)seen >= lane->node->stall_warning_ns) &&
           atomic_compare_exchange_strong(last, &seen, (uint64_t)now_ns);
}

/* " in process set 3"; nothing for that of all ranks. Returns text, which has TEAM_TEXT_BYTES. */
static const char *name_team(const struct hr_lane *lane, char *text) {
    char name[HR_TEAM_NAME_BYTES];
    text[0] = '\0';
    if (lane->team->number != 0) {
        (void)snprintf(text, TEAM_TEXT_BYTES, " in %s", hr_team_name(lane->team, name));
    }
    return text;
}

static void log_stalled(struct hr_lane *lane, const struct hr_stalled *stalled, int64_t now_ns) {
    char lines[HORO_MESSAGE_MAX + HORO_MESSAGE_MAX / 2];
    char where[TEAM_TEXT_BYTES];
    char seconds[HR_SECONDS_BYTES];
    char more[64] = "";
    hr_stall_describe(lane, stalled, lines, sizeof lines);
    if (stalled->total > stalled->count) {
        (void)snprintf(more, sizeof more, " (%d of %d names)", stalled->count, stalled->total);
    }
    hr_log(&lane->node->log, HORO_LOG_WARNING,
           "waiting%s for %s s for ranks that have not submitted what others have%s; they may be slow or stopped, or "
           "take another path through the program:%s",
           name_team(lane, where), hr_seconds(now_ns - stalled->oldest_ns, seconds), more, lines);
}

static void log_undecided(struct hr_lane *lane, const char *names, int64_t waited_ns) {
    char where[TEAM_TEXT_BYTES];
    char seconds[HR_SECONDS_BYTES];
    hr_log(&lane->node->log, HORO_LOG_WARNING, "waiting%s for %s s for an answer, all here have submitted: %s",
           name_team(lane, where), hr_seconds(waited_ns, seconds), names);
}

/* Returns when to look again. */
static int64_t report(struct hr_lane *lane, int64_t now_ns) {
    struct hr_node *node = lane->node;
    char names[HORO_MESSAGE_MAX];
    struct hr_stalled stalled;
    int periods = 0; /* of patience with ranks of other hosts: those beside the culprit know it better */
    hr_stall_find(lane, now_ns, &stalled);
    const int is_known = stalled.count > 0;
    if (is_known) {
        periods = stalled.is_elsewhere;
    } else if (describe_undecided(lane, now_ns, names, sizeof names, &stalled, &periods) == 0) {
        return now_ns + node->stall_warning_ns;
    }
    if (is_known && leaves_turn(lane, now_ns)) {
        return now_ns + node->stall_warning_ns / LOOKS;
    }
    if (take_turn(lane, now_ns)) {
        if (is_known) {
            log_stalled(lane, &stalled, now_ns);
            hr_stall_ask(lane, &stalled, now_ns);
        } else {
            log_undecided(lane, names, now_ns - stalled.oldest_ns);
        }
    }
    hr_engine_show_events(lane->engine, HORO_LOG_WARNING); /* every rank its own, also those whose turn it is not */
    if (node->stall_shutdown_ns > 0 &&
        now_ns - stalled.blocked_ns >= node->stall_shutdown_ns + periods * node->stall_warning_ns) {
        hr_node_abort(node, HORO_ERR_STALLED, stalled.culprit, HR_REASON_STALLED);
    }
    return now_ns + node->stall_warning_ns;
}

/*
 * The rank here that is in this batch, or not yet in it, and has missed its looks: it is stopped. A rank that looks
 * only waits, like this one, however few stages it has behind it. -1 if all look.
 */
static int find_silent(const struct hr_lane *lane, int64_t now_ns) {
    const struct hr_team *team = lane->team;
    for (int i = 0; i < team->local_size; i++) {
        const struct hr_arena_block *block = &lane->node->arena.blocks[team->index_of_local[i]];
        if (i != team->local_rank && atomic_load_explicit(&block->alive_until_ns, memory_order_relaxed) < now_ns &&
            atomic_load_explicit(&block->log_executed[team->number], memory_order_relaxed) <=
                hr_lane_place(lane)) {
            return team->job_rank[team->rank_of_local[i]];
        }
    }
    return -1;
}

/* The only rank on other hosts, -1 if there are none or several: which of these waits for which is not known here. */
static int find_only_other(const struct hr_team *team) {
    for (int rank = 0; rank < team->size && team->size == team->local_size + 1; rank++) {
        if (team->host_of_rank[rank] != team->host) {
            return team->job_rank[rank];
        }
    }
    return -1;
}

/* The batch that is being executed has not moved for waited_ns. */
static void report_batch(struct hr_lane *lane, int64_t now_ns, int64_t waited_ns) {
    struct hr_node *node = lane->node;
    const enum hr_gpu_wait on_gpu = hr_gpu_awaits(lane);
    const int silent = find_silent(lane, now_ns);
    const int is_late_here = silent < 0 && on_gpu == HR_GPU_ITSELF;
    const int late = silent >= 0 ? silent : is_late_here ? -1 : find_only_other(lane->team);
    /*
     * of patience: the ranks beside the culprit know it; one that has no turn yet may itself wait for others, and so
     * may one that waits for its GPU, which other GPUs hold up; those that are further know more than one in front
     */
    const int may_wait = on_gpu == HR_GPU_OTHER_RANKS || (late >= 0 && on_gpu == HR_GPU_BESIDE);
    const int periods = silent < 0 && may_wait ? 2 : late < 0;
    char name[HR_NAME_TEXT_BYTES];
    if (late >= 0) {
        (void)hr_node_name_rank(node, late, name, sizeof name);
    } else {
        (void)snprintf(name, sizeof name, "%s",
                       is_late_here                 ? "its own GPU"
                       : lane->team->host_count > 1 ? "another host"
                                                    : "another rank");
    }
    char where[TEAM_TEXT_BYTES];
    char seconds[HR_SECONDS_BYTES];
    hr_log(&node->log, HORO_LOG_WARNING, "waiting%s for %s in the middle of an operation for %s s",
           name_team(lane, where), name, hr_seconds(waited_ns, seconds));
    hr_engine_show_events(lane->engine, HORO_LOG_WARNING);
    if (node->stall_shutdown_ns > 0 && waited_ns >= node->stall_shutdown_ns + periods * node->stall_warning_ns) {
        hr_node_abort(node, HORO_ERR_STALLED, late, HR_REASON_STALLED);
    }
}

/* Excuses those who have joined: they have not waited in vain for as long as something moves. */
static void excuse_joined(struct hr_lane *lane, int64_t now_ns) {
    struct hr_stall *stall = &lane->stall;
    const int is_told = lane->is_leader && lane->leader.agree.joined.entry != NULL;
    if (!lane->is_joining && !is_told) {
        return;
    }
    const uint64_t moves = hr_drive_moves(lane->engine);
    if (moves == stall->all_moves) {
        return;
    }
    stall->all_moves = moves;
    stall->all_moved_ns = now_ns;
    if (is_told) {
        hr_agree_excuse_join(&lane->leader.agree, now_ns);
    }
}

/*
 * Notes what has moved since the last look, and shows the ranks here that this one is alive. Returns when to look
 * again; 0: any time.
 */
static int64_t look(struct hr_lane *lane, int64_t now_ns) {
    struct hr_stall *stall = &lane->stall;
    excuse_joined(lane, now_ns);
    const uint64_t moves = hr_lane_moves(lane);
    _Atomic int64_t *alive_until_ns = &lane->node->arena.blocks[lane->node->local_rank].alive_until_ns;
    const int is_executing = lane->executor.state != HR_EXECUTION_IDLE;
    const int was_stopped = is_executing && now_ns > atomic_load_explicit(alive_until_ns, memory_order_relaxed);
    /* others have not caused the delay while it was stopped itself, or other batches here had their turn */
    if (moves != stall->moves || was_stopped || hr_gpu_awaits(lane) == HR_GPU_OTHER_LANES) {
        stall->moves = moves;
        stall->moved_ns = now_ns;
    }
    if (!is_executing) {
        return 0;
    }
    const int64_t warning_ns = lane->node->stall_warning_ns;
    atomic_store_explicit(alive_until_ns, now_ns + warning_ns / 2, memory_order_relaxed);
    return now_ns + warning_ns / LOOKS;
}

/* Reports what has waited too long in a lane; returns when to look again (0: no need). */
static int64_t check(struct hr_lane *lane, int64_t now_ns) {
    const int64_t warning_ns = lane->node->stall_warning_ns;
    const int is_idle = atomic_load_explicit(&lane->pending, memory_order_relaxed) == 0 &&
                        (!lane->is_leader || lane->leader.agree.active == 0);
    if (warning_ns <= 0 || is_idle) {
        return 0;
    }
    /*
     * Later requests are due later. So the time found here need not be looked for again before it has come.
     */
    const int64_t look_ns = look(lane, now_ns);
    if (now_ns >= lane->stall.check_ns) {
        const int is_executing = lane->executor.state != HR_EXECUTION_IDLE;
        const int64_t since_ns = is_executing ? lane->stall.moved_ns : oldest_pending_ns(lane);
        if (since_ns != 0 && now_ns - since_ns >= warning_ns) {
            if (is_executing) {
                report_batch(lane, now_ns, now_ns - since_ns);
                lane->stall.check_ns = now_ns + warning_ns;
            } else {
                lane->stall.check_ns = report(lane, now_ns);
            }
        } else {
            lane->stall.check_ns = (since_ns == 0 ? now_ns : since_ns) + warning_ns;
        }
    }
    return look_ns != 0 && look_ns < lane->stall.check_ns ? look_ns : lane->stall.check_ns;
}

int64_t hr_stall_next_look_ns(const struct hr_node *node, int64_t now_ns) {
    return node->stall_warning_ns > 0 ? now_ns + node->stall_warning_ns / STEPS : HR_NEVER;
}

int64_t hr_stall_answers_ns(const struct hr_engine *engine) {
    int64_t next_ns = HR_NEVER;
    for (int i = 0; i < engine->lane_count; i++) {
        const int64_t answers_ns = engine->lanes[i]->stall.answers_ns;
        next_ns = answers_ns != 0 && answers_ns < next_ns ? answers_ns : next_ns;
    }
    return next_ns;
}

static int64_t due(struct hr_part *part, int64_t now_ns) {
    struct hr_engine *engine = part->owner;
    if (engine->driver.stage != HR_ENGINE_RUNNING) {
        return HR_NEVER;
    }
    int64_t next_ns = engine->driver.expects_others ? hr_stall_next_look_ns(engine->node, now_ns) : HR_NEVER;
    for (int i = 0; i < engine->lane_count; i++) {
        const int64_t due_ns = check(engine->lanes[i], now_ns);
        next_ns = due_ns != 0 && due_ns < next_ns ? due_ns : next_ns;
        hr_stall_check_answers(engine->lanes[i], now_ns);
    }
    const int64_t answers_ns = hr_stall_answers_ns(engine);
    return answers_ns < next_ns ? answers_ns : next_ns;
}

const struct hr_part_ops hr_part_stall = {.rank = HR_PART_STALL, .due = due};
