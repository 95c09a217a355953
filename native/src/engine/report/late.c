/*
 * Timeouts of requests: a rank whose operation is not done in time ends the group, with the ranks that are the cause.
 * Who has not called it, leaders know; a rank with a late request tells its own, which decides, or passes that on to
 * where it is known. Meanwhile the ranks of the host are called: who drives and does not answer is stopped. If nobody
 * has ended the group after a while, the rank does so, and names who should have.
 */
#include <stdio.h>
#include <string.h>

#include "arena/arena.h"
#include "base/traits.h"
#include "engine/report/report.h"
#include "wire/frame.h"

enum { GRACE_MS = 500 }; /* on one host, and twice that where leaders talk */

/* ---- Who it is, and the end ---- */

/* "rank 1 (h1) has" or "ranks 1, 3 (h1) have", then `rest` and the operation. */
static void end_group(const struct hr_lane *lane, const struct hr_rank_list *who, const char *verb, const char *verbs,
                      const char *rest, struct hr_wire_text late) {
    const int is_one = who->count == 1;
    hr_node_end(lane->node, HORO_ERR_TIMEOUT, "rank%s %s (%s) %s %s %.*s", is_one ? "" : "s", who->numbers,
                lane->node->host_name_of_rank[who->first], is_one ? verb : verbs, rest, (int)late.bytes, late.data);
}

/* ---- Leaders ---- */

/* Whether a member has not announced it; nobody has whose `announced` is NULL. */
static int is_missing(const struct hr_lane *lane, const uint64_t *announced, int member) {
    return !hr_agree_is_absent(&lane->leader.agree, member) && (announced == NULL || !hr_agree_has(announced, member));
}

/* A message that the leaders behind a link, NULL: none, wait for that rank now. HORO_OK or a status. */
static int tell_asked(struct hr_lane *lane, struct hr_link *link, int rank) {
    lane->leader.has_news = 1;
    if (link == NULL || !link->open) {
        return HORO_OK;
    }
    return hr_frame_put(&link->out, &(struct hr_wire_message){.type = HR_WIRE_LATE, .rank = rank});
}

/* Another leader is to end the group, and is to blame where it does not. HORO_OK or a status. */
static int pass(struct hr_lane *lane, struct hr_link *link, int member, const struct hr_wire_message *message) {
    atomic_store(&lane->node->arena.header->asked_rank, 1 + link->leader_rank); /* partner: give_up */
    HR_TRY(hr_frame_pass(&link->out, message));
    return tell_asked(lane, hr_leader_link_of(&lane->leader, member), link->leader_rank);
}

int hr_late_handle(struct hr_lane *lane, int member, const struct hr_wire_message *message, int64_t now_ns) {
    struct hr_leader *leader = &lane->leader;
    const uint64_t *announced = NULL;
    (void)now_ns;
    if (message->text.bytes == 0) { /* another leader is asked now: all who ask through this one wait for that rank */
        const int asked = 1 + message->rank;
        const int is_news = atomic_exchange(&lane->node->arena.header->asked_rank, asked) != asked;
        for (int i = 0; is_news && i < leader->link_count; i++) {
            struct hr_link *link = &leader->links[i];
            HR_TRY(link == hr_leader_link_of(leader, member) ? HORO_OK : tell_asked(lane, link, message->rank));
        }
        return HORO_OK;
    }
    if (member > 0 && member < lane->team->local_size) { /* its turn comes when all that is announced here is read */
        return hr_announcer_put(&lane->announcer, message);
    }
    const enum hr_agree_state state = hr_agree_look_up(&leader->agree, message->name, &announced);
    if (state != HR_AGREE_WAITING && (state != HR_AGREE_IDLE || member >= 0)) { /* all of this subtree have */
        return leader->is_root || member < 0 ? HORO_OK : pass(lane, &leader->links[0], member, message);
    }
    struct hr_rank_list who = {0};
    for (int local = 0; local < lane->team->local_size; local++) {
        if (is_missing(lane, announced, local)) {
            hr_rank_list_add(&who, leader->member_ranks[local]);
        }
    }
    if (who.count > 0) {
        end_group(lane, &who, "has", "have", "not called", message->text);
        return HORO_OK;
    }
    for (int i = leader->has_parent; i < leader->link_count; i++) {
        struct hr_link *link = &leader->links[i];
        const int below = lane->team->local_size + i - leader->has_parent;
        HR_TRY(link->open && is_missing(lane, announced, below) ? pass(lane, link, member, message) : HORO_OK);
    }
    return HORO_OK;
}

/* ---- A rank with a request that is late ---- */

struct late {
    struct hr_lane *lane;
    int64_t handle;
    char name[HORO_NAME_MAX + 1];
    char text[HORO_MESSAGE_MAX];
};

static struct hr_wire_text text_of(const char *text) {
    return (struct hr_wire_text){text, strlen(text)};
}

/* With the lock held: the time when the first request is late; HR_NEVER: none will be. */
static int64_t find_first(const struct hr_requests *requests, const struct hr_request **first) {
    int64_t first_ns = HR_NEVER;
    for (const struct hr_request *request = requests->oldest; request != NULL; request = request->newer) {
        if (request->call.timeout_ms > 0 && hr_late_deadline_ns(request) < first_ns) {
            first_ns = hr_late_deadline_ns(request);
            *first = request;
        }
    }
    return first_ns;
}

/* Tells the leader, and wakes those who are to answer the roll call. HORO_OK or a status. */
static int ask(const struct late *late, int64_t until_ns) {
    struct hr_lane *lane = late->lane;
    struct hr_node *node = lane->node;
    const struct hr_wire_message message = {
        .type = HR_WIRE_LATE, .rank = node->rank, .name = text_of(late->name), .text = text_of(late->text)};
    HR_TRY(hr_lane_end_round(lane));
    HR_TRY(hr_announcer_put(&lane->announcer, &message));
    lane->part.is_quiet = 0;
    if (!lane->is_leader) {
        const int leader = lane->team->index_of_local[0];
        HR_TRY(hr_announcer_flush(&lane->announcer));
        atomic_store(&node->arena.blocks[leader].called_until_ns, until_ns); /* partner: needs, in stall.c */
        hr_node_call(node, leader);
    }
    hr_node_wake_all(node);
    return HORO_OK;
}

/* Nobody has ended the group: 1, this rank has; 0: before the last look, others may know better. */
static int give_up(const struct late *late, int is_last) {
    const struct hr_lane *lane = late->lane;
    const struct hr_team *team = lane->team;
    const uint32_t roll_call = lane->engine->late.roll_call; /* one that has answered a later one is there, too */
    const int is_executing = lane->executor.state != HR_EXECUTION_IDLE;
    struct hr_rank_list who = {0};
    /* ranks of this host that others wait for, and that have not answered the roll call: they are stopped */
    for (int i = 0; i < team->local_size; i++) {
        const struct hr_arena_block *block = hr_block_of(lane, i);
        const uint64_t place = atomic_load_explicit(&block->log_executed[team->number], memory_order_relaxed);
        /* a rank behind that place has done its part; where nothing is executed, the leader is to agree on it */
        const int is_awaited = is_executing ? place <= lane->executor.place : i == 0;
        if (i != team->local_rank && is_awaited && (int32_t)(atomic_load(&block->present) - roll_call) < 0) {
            hr_rank_list_add(&who, team->job_rank[team->rank_of_local[i]]);
        }
    }
    if (who.count == 0 && !is_last) {
        return 0;
    }
    if (who.count == 0) {
        const int asked = is_executing ? -1 : atomic_load(&lane->node->arena.header->asked_rank) - 1;
        const int other = asked >= 0 ? asked : hr_stall_find_only_other(team);
        if (other >= 0) {
            hr_rank_list_add(&who, other);
        }
    }
    if (who.count > 0) {
        end_group(lane, &who, "does", "do", "not answer, and others wait for", text_of(late->text));
    } else {
        hr_node_end(lane->node, HORO_ERR_TIMEOUT, "all ranks have called, and not done, %s", late->text);
    }
    return 1;
}

static int64_t due(struct hr_part *part, int64_t now_ns) {
    struct hr_engine *engine = part->owner;
    struct hr_late *asked = &engine->late;
    const struct hr_request *first = NULL;
    struct late late = {0};
    if (hr_arena_aborted(&engine->node->arena).code != 0) {
        return HR_NEVER;
    }
    hr_drive_lock(&engine->drive);
    const int64_t first_ns = find_first(&engine->requests, &first);
    if (first_ns <= now_ns && first->port == NULL) { /* a send or receive, about which nobody else need be asked */
        hr_pairs_describe(&engine->pairs, first, late.text, sizeof late.text);
        hr_node_end(engine->node, HORO_ERR_TIMEOUT, "%s within the timeout of %g s", late.text,
                    (double)first->call.timeout_ms / 1e3);
    } else if (first_ns <= now_ns && engine->drive.stage == HR_STAGE_RUNNING) {
        late.lane = first->port->lane;
        late.handle = first->handle;
        (void)snprintf(late.name, sizeof late.name, "%s", first->call.name);
        (void)snprintf(late.text, sizeof late.text, "%s '%.200s' within the timeout of %g s",
                       hr_op_name(first->call.op), first->call.name, (double)first->call.timeout_ms / 1e3);
    }
    hr_drive_unlock(&engine->drive);
    if (late.lane == NULL) { /* behind the end, it fails soon */
        return first_ns <= now_ns ? now_ns + GRACE_MS * 1000000ll : first_ns;
    }
    const int64_t grace_ns = (late.lane->team->host_count > 1 ? 2 : 1) * GRACE_MS * 1000000ll;
    if (asked->asked_ns == 0 || asked->asked != late.handle) {
        asked->asked = late.handle;
        asked->asked_ns = now_ns;
        atomic_store(&engine->node->arena.header->asked_rank, 0); /* of an earlier question, which is over */
        /* partner: turn, in leave.c */
        asked->roll_call = 1 + atomic_fetch_add(&engine->node->arena.header->roll_call, 1);
        if (ask(&late, now_ns + grace_ns) != HORO_OK) {
            hr_log(&engine->node->log, HORO_LOG_WARNING, "no memory to ask which ranks have not called %s", late.text);
        }
    }
    const int64_t look_ns = asked->asked_ns + GRACE_MS * 1000000ll;
    const int is_last = now_ns >= asked->asked_ns + grace_ns;
    if (now_ns >= look_ns && give_up(&late, is_last)) {
        return HR_NEVER;
    }
    return now_ns < look_ns ? look_ns : asked->asked_ns + grace_ns;
}

const struct hr_part_ops hr_part_late = {.rank = HR_PART_LATE, .due = due, .await = hr_part_rest};
