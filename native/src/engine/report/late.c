/*
 * The end of the group for a request that is not done in time, with the ranks that are the cause: by a timeout of its
 * own, or because it has stalled. Who has not called it, leaders know; a rank with a late request tells its own, which
 * decides, or passes that on to where it is known. Meanwhile the ranks of the host are called: who drives and does not
 * answer is stopped. If nobody has ended the group after a while, the rank does so, and names who should have.
 */
#include <stdio.h>
#include <string.h>

#include "arena/arena.h"
#include "base/traits.h"
#include "engine/gpu/gpu.h"
#include "engine/report/report.h"
#include "wire/frame.h"

enum { GRACE_MS = 500 }; /* on one host, and twice that where leaders talk */

/* ---- Who it is, and the end ---- */

/* A stall, whose `late` is empty, by the first of these ranks. Else "rank 1 (h1) has", `rest` and the operation. */
static void end_group(const struct hr_lane *lane, const struct hr_rank_list *who, const char *verb, const char *verbs,
                      const char *rest, struct hr_wire_text late) {
    struct hr_node *node = lane->node;
    char text[HR_LAST_WORDS_MAX + 1];
    const int is_one = who->count == 1;
    if (late.bytes == 0) {
        hr_node_abort(node, HORO_ERR_STALLED, who->count == 0 ? -1 : who->first, HR_REASON_STALLED);
        return;
    }
    (void)snprintf(text, sizeof text, "rank%s %s (%s) %s %s %.*s", is_one ? "" : "s", who->numbers,
                   node->host_name_of_rank[who->first], is_one ? verb : verbs, rest, (int)late.bytes, late.data);
    hr_node_end(node, HORO_ERR_TIMEOUT, node->rank, text, strlen(text));
}

/* ---- Leaders ---- */

/* Whether a member has not announced it; nobody has whose `announced` is NULL. */
static int is_missing(const struct hr_lane *lane, const uint64_t *announced, int member) {
    return !hr_agree_is_absent(&lane->leader.agree, member) &&
           (announced == NULL || !hr_agree_has(announced, member));
}

/* The members on this host that have not announced it. */
static void find_missing(const struct hr_lane *lane, const uint64_t *announced, struct hr_rank_list *who) {
    for (int member = 0; member < lane->team->local_size; member++) {
        if (is_missing(lane, announced, member)) {
            hr_rank_list_add(who, lane->leader.member_ranks[member]);
        }
    }
}

/* Another leader is to end the group, and is to blame where it does not. HORO_OK or a status. */
static int pass(struct hr_lane *lane, struct hr_link *link, const struct hr_wire_message *message) {
    lane->leader.has_news = 1;
    atomic_store(&lane->node->arena.header->asked_rank, 1 + link->leader_rank); /* partner: give_up */
    return hr_frame_pass(&link->out, message);
}

int hr_late_handle(void *owner, int member, const struct hr_wire_message *message, int64_t now_ns) {
    struct hr_lane *lane = owner;
    struct hr_leader *leader = &lane->leader;
    const uint64_t *announced = NULL;
    (void)now_ns;
    if (member > 0 && member < lane->team->local_size) { /* its turn comes when all that is announced here is read */
        return hr_announcer_put(&lane->announcer, message);
    }
    const enum hr_agree_state state = hr_agree_look_up(&leader->agree, message->name, &announced);
    if (state != HR_AGREE_WAITING && (state != HR_AGREE_IDLE || member >= 0)) { /* all of this subtree have */
        return lane->is_root || member < 0 ? HORO_OK : pass(lane, &leader->links[0], message);
    }
    struct hr_rank_list who = {0};
    find_missing(lane, announced, &who);
    if (who.count > 0) {
        end_group(lane, &who, "has", "have", "not called", message->text);
        return HORO_OK;
    }
    for (int i = leader->has_parent; i < leader->link_count; i++) {
        struct hr_link *link = &leader->links[i];
        const int below = lane->team->local_size + i - leader->has_parent;
        HR_TRY(link->open && is_missing(lane, announced, below) ? pass(lane, link, message) : HORO_OK);
    }
    return HORO_OK;
}

/* ---- A rank with a request that is late ---- */

struct late {
    struct hr_lane *lane;
    int64_t handle;
    char text[HORO_MESSAGE_MAX]; /* empty: it has stalled */
};

static struct hr_wire_text text_of(const char *text) {
    return (struct hr_wire_text){text, strlen(text)};
}

static int is_executing(const struct hr_lane *lane) {
    return lane->executor.state != HR_EXECUTION_IDLE;
}

/*
 * With the lock held: whether a request that is late ends the group. Of stalled ones, one that nobody waits for does
 * not, nor a JOIN, which waits for what the others have to do, nor one that its own GPU or its lane still works for.
 */
static int counts(const struct hr_request *request, int64_t now_ns) {
    return request->call.timeout_ms > 0 ||
           (request->refused == 0 && !hr_op_is(request->call.op, HR_OP_LAST) &&
            request->state != HR_REQUEST_STAGING &&
            !hr_stall_is_moving(request->port->lane, now_ns, request->port->lane->node->stall_shutdown_ns));
}

/*
 * With the lock held: the request to be ended for now, one with a timeout of its own if there is any; NULL: none is
 * late. And when the next one may be, HR_NEVER: none.
 */
static const struct hr_request *find_first(const struct hr_engine *engine, int64_t now_ns, int64_t *next_ns) {
    const struct hr_request *first = NULL;
    *next_ns = HR_NEVER;
    for (const struct hr_request *request = engine->requests.oldest; request != NULL; request = request->newer) {
        int64_t late_ns = hr_late_deadline_ns(request);
        if (late_ns <= now_ns && counts(request, now_ns)) {
            const int is_timeout = request->call.timeout_ms > 0;
            const int was_timeout = first != NULL && first->call.timeout_ms > 0;
            const int is_earlier = first == NULL || late_ns < hr_late_deadline_ns(first);
            first = is_timeout > was_timeout || (is_timeout == was_timeout && is_earlier) ? request : first;
            continue;
        }
        late_ns = late_ns <= now_ns ? now_ns + engine->node->stall_warning_ns / 4 : late_ns; /* it may count by then */
        *next_ns = late_ns < *next_ns ? late_ns : *next_ns;
    }
    return first;
}

/* Whether the leader is to be asked about it, too: all that have stalled, but what all have called. */
static int is_asked(const struct hr_request *request, const struct late *late, int64_t now_ns) {
    if (late->text[0] != '\0') {
        return request->handle == late->handle;
    }
    return request->call.timeout_ms == 0 && hr_late_deadline_ns(request) <= now_ns && counts(request, now_ns) &&
           !is_executing(request->port->lane);
}

/* Tells the leaders, and calls the roll. HORO_OK or a status. */
static int ask(const struct late *late, int64_t now_ns, int64_t until_ns) {
    struct hr_engine *engine = late->lane->engine;
    struct hr_node *node = engine->node;
    int status = hr_lane_end_round(late->lane);
    hr_drive_lock(&engine->drive);
    for (const struct hr_request *request = engine->requests.oldest; request != NULL && status == HORO_OK;
         request = request->newer) {
        if (is_asked(request, late, now_ns)) {
            const struct hr_wire_message message = {.type = HR_WIRE_LATE,
                                                    .rank = node->rank,
                                                    .name = text_of(request->call.name),
                                                    .text = text_of(late->text)};
            status = hr_announcer_put(&request->port->lane->announcer, &message);
        }
    }
    hr_drive_unlock(&engine->drive);
    HR_TRY(status);
    for (int i = 0; i < engine->lane_count; i++) {
        struct hr_lane *lane = engine->lanes[i];
        lane->part.is_quiet = 0;
        if (!lane->is_leader && atomic_load(&lane->port.pending) > 0) {
            const int leader = lane->team->index_of_local[0];
            const int flushed = hr_announcer_flush(&lane->announcer);
            HR_TRY(flushed);
            atomic_store(&node->arena.blocks[leader].called_until_ns, until_ns); /* partner: needs, in stall.c */
            hr_node_call(node, leader);
        }
    }
    (void)atomic_fetch_add(&node->arena.header->roll_call, 1); /* partner: turn, in leave.c */
    hr_node_wake_all(node);
    return HORO_OK;
}

/* The ranks of this host that others wait for, and that have not answered the roll call: they are stopped. */
static void find_silent(const struct hr_lane *lane, struct hr_rank_list *who) {
    const struct hr_team *team = lane->team;
    const struct hr_arena *arena = &lane->node->arena;
    const uint32_t roll_call = atomic_load(&arena->header->roll_call);
    for (int i = 0; i < team->local_size; i++) {
        const struct hr_arena_block *block = &arena->blocks[team->index_of_local[i]];
        const uint64_t place = atomic_load_explicit(&block->log_executed[team->number], memory_order_relaxed);
        /* a rank behind that place has done its part; where nothing is executed, the leader is to agree on it */
        const int is_awaited = is_executing(lane) ? place <= lane->executor.place : i == 0;
        if (i != team->local_rank && is_awaited && atomic_load(&block->present) != roll_call) {
            hr_rank_list_add(who, team->job_rank[team->rank_of_local[i]]);
        }
    }
}

/* Nobody has ended the group: 1, this rank has; 0: before the last look, others may know better. */
static int give_up(const struct late *late, int is_last) {
    const struct hr_lane *lane = late->lane;
    const struct hr_wire_text text = text_of(late->text);
    const int is_stall = text.bytes == 0;
    /* of a batch the only other rank, unless a GPU is waited for, which others may hold up */
    int other = is_executing(lane) && (!is_stall || hr_gpu_awaits(lane) == HR_GPU_NOTHING)
                    ? hr_stall_find_only_other(lane->team)
                    : -1;
    struct hr_rank_list who = {0};
    find_silent(lane, &who);
    if (who.count == 0 && !is_last && (!is_stall || other < 0)) {
        return 0;
    }
    if (who.count == 0 && !is_executing(lane)) {
        const int asked = atomic_load(&lane->node->arena.header->asked_rank) - 1;
        other = asked >= 0 ? asked : hr_stall_find_only_other(lane->team);
    }
    if (who.count == 0 && other >= 0) {
        hr_rank_list_add(&who, other);
    }
    if (who.count == 0 && is_stall && !is_executing(lane)) {
        return 0; /* all have called it: its turn comes */
    }
    if (who.count > 0 || is_stall) {
        end_group(lane, &who, "does", "do", "not answer, and others wait for", text);
        return 1;
    }
    char all[HR_LAST_WORDS_MAX + 1];
    (void)snprintf(all, sizeof all, "all ranks have called, and not done, %.*s", (int)text.bytes, text.data);
    hr_node_end(lane->node, HORO_ERR_TIMEOUT, lane->node->rank, all, strlen(all));
    return 1;
}

/* With the lock held: a send or receive is late, about which nobody else need be asked. */
static void end_for_pair(const struct hr_engine *engine, const struct hr_request *request) {
    char what[HORO_MESSAGE_MAX / 2];
    char text[HR_LAST_WORDS_MAX + 1];
    hr_pairs_describe(&engine->pairs, request, what, sizeof what);
    (void)snprintf(text, sizeof text, "%s within the timeout of %g s", what, (double)request->call.timeout_ms / 1e3);
    hr_node_end(engine->node, HORO_ERR_TIMEOUT, engine->node->rank, text, strlen(text));
}

static int64_t due(struct hr_part *part, int64_t now_ns) {
    struct hr_engine *engine = part->owner;
    struct hr_late *asked = &engine->late;
    struct late late = {0};
    int64_t next_ns;
    if (hr_arena_aborted(&engine->node->arena).code != 0) {
        return HR_NEVER;
    }
    hr_drive_lock(&engine->drive);
    const struct hr_request *first = find_first(engine, now_ns, &next_ns);
    if (first != NULL && first->port == NULL) {
        end_for_pair(engine, first);
    } else if (first != NULL && engine->drive.stage == HR_STAGE_RUNNING) {
        late.lane = first->port->lane;
        late.handle = first->handle;
        if (first->call.timeout_ms > 0) {
            (void)snprintf(late.text, sizeof late.text, "%s '%.200s' within the timeout of %g s",
                           hr_op_name(first->call.op), first->call.name, (double)first->call.timeout_ms / 1e3);
        }
    }
    hr_drive_unlock(&engine->drive);
    if (late.lane == NULL) { /* behind the end, it fails soon */
        return first != NULL ? now_ns + GRACE_MS * 1000000ll : next_ns;
    }
    const int is_stall = late.text[0] == '\0';
    int64_t grace_ns = (late.lane->team->host_count > 1 ? 2 : 1) * GRACE_MS * 1000000ll;
    if (is_stall) { /* ranks nearer to the cause know it better; the tree is binomial */
        const int periods = is_executing(late.lane) ? 1 : 1 + __builtin_popcount((unsigned)late.lane->team->host);
        const int64_t warning_ns = engine->node->stall_warning_ns;
        grace_ns = periods * (warning_ns > grace_ns ? warning_ns : grace_ns);
    }
    const int64_t about = is_executing(late.lane) ? -late.handle : late.handle;
    if (asked->asked_ns == 0 || asked->asked != about) {
        asked->asked = about;
        asked->asked_ns = now_ns;
        if (ask(&late, now_ns, now_ns + grace_ns) != HORO_OK) {
            hr_log(&engine->node->log, HORO_LOG_WARNING, "no memory to ask which ranks are late");
        }
    }
    const int64_t look_ns = asked->asked_ns + GRACE_MS * 1000000ll;
    const int is_last = now_ns >= asked->asked_ns + grace_ns;
    if (now_ns >= look_ns && give_up(&late, is_last)) {
        return HR_NEVER;
    }
    if (is_last) { /* all are asked again */
        asked->asked_ns = 0;
        return now_ns + GRACE_MS * 1000000ll;
    }
    const int64_t again_ns = now_ns < look_ns ? look_ns : asked->asked_ns + grace_ns;
    return next_ns < again_ns ? next_ns : again_ns;
}

const struct hr_part_ops hr_part_late = {.rank = HR_PART_LATE, .due = due, .await = hr_part_rest};
