/*
 * Requests that have waited too long: which rank is late, and when the job ends for it. The leaders of a team know who
 * has announced what, so they report it, and ask the late ranks where they stand, who write that into their own logs. A
 * leader whose program computes is called for it by those that wait. Others say something only where it does not look.
 */
#include <stdio.h>

#include "arena/arena.h"
#include "base/clock.h"
#include "base/traits.h"
#include "engine/gpu/gpu.h"
#include "engine/report/report.h"
#include "wire/frame.h"

/* While others are waited for, a rank looks STEPS times per period; it is silent once it has missed half of them. */
enum { STEPS = 16 };

enum { TEAM_TEXT_BYTES = HR_TEAM_NAME_BYTES + 8 };

#define ANSWER_NS 2000000000ll /* an interpreter that is not busy answers in milliseconds */

/* ---- Waiting for those that lead ---- */

/*
 * Since when a request waits in vain, 0 if none does. To join while something moves, in whatever team, is to wait for
 * what the others have left to do. They may also have to do what needs nobody, so a JOIN is reported, and never ends
 * the job.
 */
static int64_t oldest_pending_ns(struct hr_lane *lane) {
    int64_t oldest = 0;
    hr_drive_lock(&lane->engine->drive);
    const struct hr_request *request = hr_port_next(&lane->port, NULL);
    if (request != NULL) {
        const int is_excused = hr_op_is(request->call.op, HR_OP_LAST) && lane->stall.all_moved_ns > request->submit_ns;
        oldest = is_excused ? lane->stall.all_moved_ns : request->submit_ns;
    }
    hr_drive_unlock(&lane->engine->drive);
    const int64_t since = lane->is_leader ? hr_agree_since(&lane->leader.agree, HR_AGREE_WAITING) : 0;
    return since != 0 && (oldest == 0 || since < oldest) ? since : oldest;
}

/* Until when the leader here has looked, at least. */
static int64_t leader_looks_until_ns(const struct hr_lane *lane) {
    return atomic_load_explicit(&hr_block_of(lane, 0)->alive_until_ns, memory_order_relaxed);
}

/*
 * Describes what ranks here have submitted while no answer comes from the next rank on the way to the root of the tree,
 * which is stopped, or a rank behind it is late. Each level waits one period longer than the one above, so the nearest
 * one names the culprit.
 */
static int describe_undecided(struct hr_lane *lane, int64_t now_ns, char *text, size_t text_bytes,
                              struct hr_stalled *stalled) {
    const struct hr_node *node = lane->node;
    const int level = 1 + __builtin_popcount((unsigned)lane->team->host); /* the tree is binomial */
    const int64_t moved_ns = lane->stall.moved_ns;
    const int64_t looked_ns = lane->is_leader ? 0 : leader_looks_until_ns(lane);
    const int64_t least_ns = looked_ns > moved_ns && looked_ns < now_ns ? looked_ns : moved_ns;
    stalled->periods = level + !lane->is_leader;
    stalled->culprit =
        lane->is_leader ? lane->leader.links[0].leader_rank : lane->team->job_rank[lane->team->rank_of_local[0]];
    char who[HR_NAME_TEXT_BYTES];
    (void)hr_node_name_rank(node, stalled->culprit, who, sizeof who);
    int count = 0;
    size_t used = 0;
    hr_drive_lock(&lane->engine->drive);
    const struct hr_request *request = NULL;
    while ((request = hr_port_next(&lane->port, request)) != NULL) {
        const int64_t since_ns = request->submit_ns > least_ns ? request->submit_ns : least_ns;
        if (now_ns - since_ns < (lane->is_leader ? level : 1) * node->stall_warning_ns) {
            continue;
        }
        stalled->oldest_ns = since_ns < stalled->oldest_ns ? since_ns : stalled->oldest_ns;
        const int is_excused = hr_op_is(request->call.op, HR_OP_LAST) || request->refused != 0;
        if (!is_excused && since_ns < stalled->blocked_ns) {
            stalled->blocked_ns = since_ns;
        }
        if (count++ < HR_NAMES_IN_TEXT && used < text_bytes) {
            used += (size_t)snprintf(text + used, text_bytes - used, "%s'%s' (no answer from %s)",
                                     count == 1 ? "" : "; ", request->call.name, who);
        }
    }
    hr_drive_unlock(&lane->engine->drive);
    return count;
}

/* One such report per team, host and period: the first rank to ask gets the turn. */
static int take_turn(struct hr_lane *lane, int64_t now_ns) {
    _Atomic uint64_t *last = &lane->node->arena.header->stall_report_ns[lane->team->number];
    uint64_t seen = atomic_load(last);
    return (seen == 0 || now_ns - (int64_t)seen >= lane->node->stall_warning_ns) &&
           atomic_compare_exchange_strong(last, &seen, (uint64_t)now_ns);
}

/* ---- Questions to those that are late ---- */

/* Of a report: asks those that it is about. NULL: a leader above asks all that wait for nothing. */
static void ask(struct hr_lane *lane, const struct hr_stalled *stalled, int asker, int64_t now_ns) {
    const struct hr_wire_message question = {.type = HR_WIRE_ASK, .rank = asker};
    for (int member = 0; member < lane->leader.agree.config.member_count; member++) {
        struct hr_link *link = hr_leader_link_of(&lane->leader, member);
        const int is_meant = stalled != NULL ? hr_stall_is_waited_for(lane, stalled, member)
                                             : link != NULL || !hr_stall_is_waiting(lane, member);
        if (is_meant && link == NULL) {
            hr_node_ask(lane->node, lane->team->index_of_local[member]);
        } else if (is_meant && link->open) {
            (void)hr_frame_put(&link->out, &question); /* a question is not worth the end of the job */
        }
    }
    lane->stall.answers_ns = now_ns + ANSWER_NS;
}

int hr_stall_handle_question(struct hr_lane *lane, int member, const struct hr_wire_message *message, int64_t now_ns) {
    if (member >= 0) {
        return HORO_ERR_INTERNAL;
    }
    ask(lane, NULL, message->rank, now_ns);
    hr_part_expect(&lane->engine->stall, lane->stall.answers_ns);
    return HORO_OK;
}

/* Names those that should have answered and have not. */
static void check_answers(struct hr_lane *lane, int64_t now_ns) {
    if (lane->stall.answers_ns == 0 || now_ns < lane->stall.answers_ns) {
        return;
    }
    lane->stall.answers_ns = 0;
    for (int member = 0; member < lane->team->local_size; member++) {
        const struct hr_arena_block *block = hr_block_of(lane, member);
        if (atomic_load(&block->answers) != 0 && atomic_load(&block->answered) != atomic_load(&block->asked)) {
            const int rank = lane->team->job_rank[lane->team->rank_of_local[member]];
            char name[HR_NAME_TEXT_BYTES];
            hr_log(&lane->node->log, HORO_LOG_WARNING,
                   "%s does not answer where it stands: its Python interpreter is busy in a call that keeps it, or its "
                   "process is stopped", hr_node_name_rank(lane->node, rank, name, sizeof name));
        }
    }
}

/* ---- Reports ---- */

/* " in process set 3"; nothing for that of all ranks. Returns text, which has TEAM_TEXT_BYTES. */
static const char *name_team(const struct hr_lane *lane, char *text) {
    char name[HR_TEAM_NAME_BYTES];
    text[0] = '\0';
    if (lane->team->number != 0) {
        (void)snprintf(text, TEAM_TEXT_BYTES, " in %s", hr_team_name(lane->team, name));
    }
    return text;
}

/* Returns when to look again. */
static int64_t report(struct hr_lane *lane, int64_t now_ns) {
    struct hr_node *node = lane->node;
    char lines[HORO_MESSAGE_MAX + HORO_MESSAGE_MAX / 2], where[TEAM_TEXT_BYTES], seconds[HR_SECONDS_BYTES];
    struct hr_stalled stalled = {.culprit = -1, .oldest_ns = now_ns, .blocked_ns = now_ns};
    if (lane->is_leader) {
        hr_stall_find(lane, now_ns, &stalled);
    }
    if (stalled.count > 0) {
        char more[64] = "";
        hr_stall_describe(lane, &stalled, lines, sizeof lines);
        if (stalled.total > stalled.count) {
            (void)snprintf(more, sizeof more, " (%d of %d names)", stalled.count, stalled.total);
        }
        hr_log(&node->log, HORO_LOG_WARNING,
               "waiting%s for %s s for ranks that have not submitted what others have%s; they may be slow or stopped, "
               "or take another path through the program:%s",
               name_team(lane, where), hr_seconds(now_ns - stalled.oldest_ns, seconds), more, lines);
        if (lane->stall.answers_ns == 0) { /* one question at a time */
            ask(lane, &stalled, node->rank, now_ns);
        }
    } else if (lane->leader.is_root || describe_undecided(lane, now_ns, lines, sizeof lines, &stalled) == 0) {
        return now_ns + node->stall_warning_ns;
    } else if (!lane->is_leader && leader_looks_until_ns(lane) >= now_ns) {
        stalled.blocked_ns = now_ns; /* it sees to that */
    } else if (take_turn(lane, now_ns)) {
        hr_log(&node->log, HORO_LOG_WARNING, "waiting%s for %s s for an answer, all here have submitted: %s",
               name_team(lane, where), hr_seconds(now_ns - stalled.oldest_ns, seconds), lines);
    }
    hr_end_show_events(lane->node, HORO_LOG_WARNING); /* every rank its own, also those whose turn it is not */
    if (node->stall_shutdown_ns > 0 &&
        now_ns - stalled.blocked_ns >= node->stall_shutdown_ns + stalled.periods * node->stall_warning_ns) {
        hr_node_abort(node, HORO_ERR_STALLED, stalled.culprit, HR_REASON_STALLED);
    }
    return now_ns + node->stall_warning_ns;
}

int hr_stall_find_only_other(const struct hr_team *team) {
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
    const struct hr_team *team = lane->team;
    const enum hr_gpu_wait on_gpu = hr_gpu_awaits(lane);
    /*
     * the rank here that is in this batch, or not yet in it, and has missed its looks: it is stopped. A rank that looks
     * only waits, like this one, however few stages it has behind it
     */
    int silent = -1;
    for (int i = 0; i < team->local_size && silent < 0; i++) {
        const struct hr_arena_block *block = hr_block_of(lane, i);
        if (i != team->local_rank && atomic_load_explicit(&block->alive_until_ns, memory_order_relaxed) < now_ns &&
            atomic_load_explicit(&block->log_executed[team->number], memory_order_relaxed) <= lane->executor.place) {
            silent = team->job_rank[team->rank_of_local[i]];
        }
    }
    const int is_late_here = silent < 0 && on_gpu == HR_GPU_ITSELF;
    const int late = silent >= 0 ? silent : is_late_here ? -1 : hr_stall_find_only_other(team);
    /*
     * of patience: the ranks beside the culprit know it; one that has no turn yet may itself wait for others, and so
     * may one that waits for its GPU, which other GPUs hold up; those that are further know more than one in front
     */
    const int may_wait = on_gpu == HR_GPU_OTHER_RANKS || (late >= 0 && on_gpu == HR_GPU_BESIDE);
    const int periods = silent < 0 && may_wait ? 2 : late < 0;
    char text[HR_NAME_TEXT_BYTES];
    const char *name = late >= 0              ? hr_node_name_rank(node, late, text, sizeof text)
                       : is_late_here         ? "its own GPU"
                       : team->host_count > 1 ? "another host"
                                              : "another rank";
    char where[TEAM_TEXT_BYTES];
    char seconds[HR_SECONDS_BYTES];
    hr_log(&node->log, HORO_LOG_WARNING, "waiting%s for %s in the middle of an operation for %s s",
           name_team(lane, where), name, hr_seconds(waited_ns, seconds));
    hr_end_show_events(lane->node, HORO_LOG_WARNING);
    if (node->stall_shutdown_ns > 0 && waited_ns >= node->stall_shutdown_ns + periods * node->stall_warning_ns) {
        hr_node_abort(node, HORO_ERR_STALLED, late, HR_REASON_STALLED);
    }
}

/* ---- Looks ---- */

/* Notes what has moved since the last look. 0: nothing has. */
static int note_moves(struct hr_lane *lane, int64_t now_ns, int was_stopped) {
    struct hr_stall *stall = &lane->stall;
    const uint64_t all_moves = hr_drive_moves(&lane->engine->drive);
    if (all_moves != stall->all_moves) {
        stall->all_moves = all_moves;
        stall->all_moved_ns = now_ns;
        if (lane->is_leader) {
            hr_agree_excuse_absent(&lane->leader.agree, now_ns);
        }
    }
    const uint64_t moves = hr_part_lane.moves(&lane->part);
    const int is_executing = lane->executor.state != HR_EXECUTION_IDLE;
    /* others have not caused the delay while it was stopped itself, or other batches here had their turn */
    if (moves != stall->moves || (is_executing && was_stopped) || hr_gpu_awaits(lane) == HR_GPU_OTHER_LANES) {
        stall->moves = moves;
        stall->moved_ns = now_ns;
        return 1;
    }
    return 0;
}

/* Reports what has waited too long in a lane; returns when to look again (0: no need). */
static int64_t check(struct hr_lane *lane, int64_t now_ns, int was_stopped) {
    const int64_t warning_ns = lane->node->stall_warning_ns;
    const int is_idle = atomic_load(&lane->port.pending) == 0 && (!lane->is_leader || lane->leader.agree.active == 0);
    if (warning_ns <= 0 || is_idle) {
        return 0;
    }
    const int has_moved = note_moves(lane, now_ns, was_stopped);
    const int is_executing = lane->executor.state != HR_EXECUTION_IDLE;
    _Atomic int64_t *called_until_ns = &hr_block_of(lane, 0)->called_until_ns; /* partner: needs */
    /* nothing moves here: the leader is to collect what its ranks have announced, and to look at that for a while */
    if (!has_moved && !is_executing && !lane->is_leader &&
        atomic_load(called_until_ns) < now_ns + 2 * warning_ns / STEPS) {
        atomic_store(called_until_ns, now_ns + warning_ns / 2);
        hr_node_call(lane->node, lane->team->index_of_local[0]);
    }
    /* Later requests are due later. So the time found here need not be looked for again before it has come. */
    if (now_ns >= lane->stall.check_ns) {
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
    return lane->stall.check_ns;
}

static int64_t next_look_ns(const struct hr_node *node, int64_t now_ns) {
    return node->stall_warning_ns > 0 ? now_ns + node->stall_warning_ns / STEPS : HR_NEVER;
}

static int64_t next_answers_ns(const struct hr_engine *engine) {
    int64_t next_ns = HR_NEVER;
    for (int i = 0; i < engine->lane_count; i++) {
        const int64_t answers_ns = engine->lanes[i]->stall.answers_ns;
        next_ns = answers_ns != 0 && answers_ns < next_ns ? answers_ns : next_ns;
    }
    return next_ns;
}

static int64_t due(struct hr_part *part, int64_t now_ns) {
    struct hr_engine *engine = part->owner;
    if (engine->drive.stage != HR_STAGE_RUNNING) {
        return HR_NEVER;
    }
    const struct hr_node *node = engine->node;
    int64_t next_ns = engine->drive.expects_others ? next_look_ns(node, now_ns) : HR_NEVER;
    /* shows the ranks here that this one is alive */
    _Atomic int64_t *alive_until_ns = &node->arena.blocks[node->local_rank].alive_until_ns;
    const int was_stopped = now_ns > atomic_load_explicit(alive_until_ns, memory_order_relaxed);
    if (engine->drive.expects_others && node->stall_warning_ns > 0) {
        atomic_store_explicit(alive_until_ns, now_ns + node->stall_warning_ns / 2, memory_order_relaxed);
    }
    uint64_t behind = 0; /* shows the leaders here the oldest call that waits behind a refusal */
    hr_drive_lock(&engine->drive);
    const struct hr_request *request = engine->requests.oldest;
    while (request != NULL && (!request->is_behind || request->refused != 0)) {
        request = request->newer;
    }
    if (request != NULL) {
        behind = (uint64_t)request->submit_ns * HR_TEAMS_MAX + (uint64_t)request->port->team->number;
    }
    atomic_store_explicit(&node->arena.blocks[node->local_rank].behind, behind, memory_order_relaxed);
    hr_drive_unlock(&engine->drive);
    for (int i = 0; i < engine->lane_count; i++) {
        const int64_t due_ns = check(engine->lanes[i], now_ns, was_stopped);
        next_ns = due_ns != 0 && due_ns < next_ns ? due_ns : next_ns;
        check_answers(engine->lanes[i], now_ns);
    }
    const int64_t answers_ns = next_answers_ns(engine);
    return answers_ns < next_ns ? answers_ns : next_ns;
}

/* Whether ranks here have called this one, which leads a team and has something there that not all have announced. */
static int needs(const struct hr_part *part) {
    const struct hr_engine *engine = part->owner;
    const struct hr_node *node = engine->node;
    /* partner: check */
    const int64_t called_until_ns = atomic_load(&node->arena.blocks[node->local_rank].called_until_ns);
    if (called_until_ns == 0 || hr_now_ns() >= called_until_ns || engine->drive.stage != HR_STAGE_RUNNING) {
        return 0;
    }
    for (int i = 0; i < engine->lane_count; i++) {
        const struct hr_lane *lane = engine->lanes[i];
        if (lane->is_leader &&
            (lane->leader.agree.active > 0 ||
             atomic_load(&lane->team->partition.header->announced) != lane->leader.announced_seen)) {
            return 1;
        }
    }
    return 0;
}

/* Others are waited for from now_ns on, or (0) no longer, but for answers that ranks here owe. */
static void await(struct hr_part *part, int64_t now_ns) {
    const struct hr_engine *engine = part->owner;
    if (now_ns != 0) {
        hr_part_expect(part, next_look_ns(engine->node, now_ns));
    } else {
        part->next_ns = next_answers_ns(engine);
    }
}

const struct hr_part_ops hr_part_stall = {
    .rank = HR_PART_STALL, .due = due, .needs = needs, .is_called = 1, .await = await};
