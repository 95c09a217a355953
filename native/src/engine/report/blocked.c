/* The report of a rank whose threads all wait, and the search for a deadlock in those of all ranks; see deadlock.h. */
#include <stdio.h>
#include <string.h>

#include "base/traits.h"
#include "engine/report/report.h"
#include "wire/frame.h"

/* ---- Callers, and their last report. Under the lock. ---- */

/* "'a' (train.py:12) and 'b' (train.py:40)". */
static void describe(const struct hr_engine *engine, const horo_waiting *waits, int32_t count, char *text,
                     size_t text_bytes) {
    char name[HR_TEAM_NAME_BYTES];
    size_t used = 0;
    text[0] = '\0';
    for (int32_t i = 0; i < count && used < text_bytes; i++) {
        const struct hr_request *request = hr_requests_find(&engine->requests, waits[i].handle);
        const int op = request->call.op;
        const int is_change = strcmp(request->call.name, HR_CHANGE_NAME) == 0; /* it may begin by an allgather */
        const char *told = is_change ? hr_op_name(op == HORO_REMOVE_TEAM ? op : HORO_ADD_TEAM) : request->call.name;
        const size_t bytes = strlen(told);
        const size_t excess = bytes < HR_BLOCKED_NAME_MAX ? 0 : bytes - HR_BLOCKED_NAME_MAX;
        used += (size_t)snprintf(text + used, text_bytes - used, "%s'%s%s'", i == 0 ? "" : " and ",
                                 excess == 0 ? "" : "...", told + excess);
        if (request->call.team != 0 && used < text_bytes) {
            used += (size_t)snprintf(text + used, text_bytes - used, " in %s", hr_team_name(request->port->team, name));
        }
        if (waits[i].place[0] != '\0' && used < text_bytes) {
            used += (size_t)snprintf(text + used, text_bytes - used, " (%s)", waits[i].place);
        }
    }
}

int hr_engine_report_blocked(struct hr_engine *engine, const horo_waiting *waits, int32_t count, uint32_t question,
                             const char *others) {
    struct hr_blocked *blocked = &engine->blocked;
    if (count < 0 || count > HORO_WAITING_MAX || engine->node->stall_warning_ns == 0) {
        return HORO_OK;
    }
    struct hr_blocked_report report = {.count = count};
    (void)snprintf(report.others, sizeof report.others, "%s", others);
    hr_drive_lock(&engine->drive);
    /* every record that this rank executes in any team ends a request of its own, or is counted as one that does not */
    report.last_handle = engine->requests.last_handle;
    report.pending = atomic_load(&engine->drive.pending);
    report.passed = engine->requests.passed;
    int all_wait = 1;
    for (int32_t i = 0; i < count; i++) {
        const struct hr_request *request = hr_requests_find(&engine->requests, waits[i].handle);
        report.handles[i] = waits[i].handle;
        /* one whose values are on their way from a GPU is going to be announced */
        all_wait &= request != NULL && atomic_load(&request->status) == HORO_IN_PROGRESS &&
                    request->state != HR_REQUEST_STAGING;
    }
    const int is_answer = question != 0 && question != atomic_load(&blocked->answered);
    const int is_news = is_answer || memcmp(&report, &blocked->report, sizeof report) != 0;
    if (all_wait && is_news && (count > 0 || blocked->report.count > 0)) {
        if (question != 0) {
            atomic_store(&blocked->answered, question);
        }
        blocked->question = question;
        blocked->report = report;
        describe(engine, waits, count, blocked->text, sizeof blocked->text);
        atomic_store(&blocked->is_new, 1);
        hr_drive_kick(&engine->drive);
    }
    hr_drive_unlock(&engine->drive);
    return HORO_OK;
}

uint32_t hr_engine_blocked_question(const struct hr_engine *engine) {
    /* partner: ask */
    const uint32_t asked = atomic_load(&engine->node->arena.header->blocked_question);
    return asked == atomic_load(&engine->blocked.answered) ? 0 : asked;
}

/* ---- The message to rank 0, which the driver writes ---- */

/* The next one but for those behind a refusal, which are not announced: a rank has each name once. */
static const struct hr_request *next_announced(const struct hr_port *port, const struct hr_request *request) {
    do {
        request = hr_port_next(port, request);
    } while (request != NULL && request->is_behind);
    return request;
}

/* With the lock held, so that what is pending and what is executed are of one moment. */
static int put_report(struct hr_engine *engine, const struct hr_buffer *moves, struct hr_buffer *out) {
    const struct hr_blocked *blocked = &engine->blocked;
    const struct hr_wire_text text = {blocked->text, strlen(blocked->text)};
    const struct hr_wire_text others = {blocked->report.others, strlen(blocked->report.others)};
    const struct hr_wire_message message = {
        .type = HR_WIRE_BLOCKED, .rank = engine->node->rank, .question = blocked->question, .text = text,
        .others = others, .sent = engine->pairs.sent, .received = engine->pairs.received,
        .data = hr_buffer_front(moves), .data_bytes = hr_buffer_size(moves), .count = (uint32_t)engine->lane_count};
    HR_TRY(hr_wire_put(out, &message));
    for (int number = 0; number < HR_TEAMS_MAX; number++) { /* in the order of the message */
        const struct hr_port *port = engine->requests.places[number].port;
        if (port == NULL) {
            continue;
        }
        const uint64_t team = (uint64_t)port->team->id;
        const int is_paused = port->state == HR_PORT_PAUSED;
        struct hr_wire_lane head = {.team = (uint32_t)number, .members = (uint32_t)port->team->size,
                                    .executed = port->lane->executor.place, .count = (uint32_t)is_paused};
        const struct hr_request *request = NULL;
        while ((request = next_announced(port, request)) != NULL) {
            head.count++;
        }
        HR_TRY(hr_wire_put_lane(out, &head));
        HR_TRY(is_paused ? hr_wire_put_hash(out, HR_WIRE_ALL_NAMES) : HORO_OK);
        while ((request = next_announced(port, request)) != NULL) {
            const uint64_t hash = request->name_hash ^ (team << 32 | team);
            HR_TRY(hr_wire_put_hash(out, hash == HR_WIRE_ALL_NAMES ? hash + 1 : hash));
        }
    }
    return HORO_OK;
}

int hr_engine_tell_blocked(struct hr_engine *engine) {
    struct hr_blocked *blocked = &engine->blocked;
    struct hr_blocked_report *report = &blocked->report;
    struct hr_announcer *announcer = &engine->lanes[0]->announcer;
    struct hr_buffer moves = {0};
    size_t mark;
    HR_TRY(hr_announcer_write_ids(announcer));
    HR_TRY(hr_frame_begin(&announcer->out, &mark));
    hr_drive_lock(&engine->drive);
    atomic_store(&blocked->is_new, 0);
    int waits = report->count > 0 && report->last_handle == engine->requests.last_handle &&
                report->passed == engine->requests.passed;
    for (int i = 0; i < report->count && waits; i++) {
        const struct hr_request *request = hr_requests_find(&engine->requests, report->handles[i]);
        waits = request != NULL && atomic_load(&request->status) == HORO_IN_PROGRESS;
    }
    int status = waits ? hr_pairs_put_pending(&engine->pairs, &moves) : HORO_OK;
    blocked->is_told = waits && hr_buffer_size(&moves) <= HR_WIRE_DATA_MAX; /* more have no room in a message */
    report->count = blocked->is_told ? report->count : 0;
    const struct hr_wire_message none = {.type = HR_WIRE_BLOCKED, .rank = engine->node->rank};
    if (status == HORO_OK) {
        status = blocked->is_told ? put_report(engine, &moves, &announcer->out) : hr_wire_put(&announcer->out, &none);
    }
    hr_drive_unlock(&engine->drive);
    hr_buffer_fini(&moves);
    HR_TRY(status);
    hr_frame_end(&announcer->out, mark);
    return HORO_OK;
}

/* ---- Leaders ---- */

int hr_blocked_handle(struct hr_lane *lane, int member, const struct hr_wire_message *message, int64_t now_ns) {
    if (lane->team->number != 0 || member < 0) {
        return HORO_ERR_INTERNAL;
    }
    if (lane->leader.is_root) {
        hr_part_expect(&lane->engine->deadlock, 0); /* it may be judged */
        return hr_deadlock_note(&lane->engine->judge, lane->node->size, message, now_ns);
    }
    return hr_frame_pass(&lane->leader.links[0].out, message);
}

/* Asks the ranks of this subtree whether they are still blocked. HORO_OK or a status. */
static int ask(struct hr_lane *lane, const struct hr_wire_message *query) {
    /* partner: hr_engine_blocked_question. Who waits looks there from time to time, so nobody is called. */
    atomic_store(&lane->node->arena.header->blocked_question, query->question);
    for (int i = lane->leader.has_parent; i < lane->leader.link_count; i++) {
        struct hr_link *link = &lane->leader.links[i];
        HR_TRY(link->open ? hr_frame_put(&link->out, query) : HORO_OK);
    }
    return HORO_OK;
}

int hr_blocked_handle_query(struct hr_lane *lane, int member, const struct hr_wire_message *query, int64_t now_ns) {
    (void)now_ns;
    return member >= 0 || lane->team->number != 0 ? HORO_ERR_INTERNAL : ask(lane, query);
}

/* The root of all ranks: ends the group at a deadlock. */
static int64_t due(struct hr_part *part, int64_t now_ns) {
    struct hr_engine *engine = part->owner;
    struct hr_lane *lane = engine->lanes[0];
    struct hr_deadlock *deadlock = &engine->judge;
    const int64_t due_ns = hr_deadlock_due_ns(deadlock, lane->node->stall_warning_ns);
    if (due_ns == 0 || now_ns < due_ns || engine->drive.stage != HR_STAGE_RUNNING) {
        return due_ns == 0 || now_ns >= due_ns ? HR_NEVER : due_ns;
    }
    char text[HR_LAST_WORDS_MAX + 1];
    switch (hr_deadlock_judge(deadlock, text, sizeof text)) {
    case HR_VERDICT_NONE: break;
    case HR_VERDICT_ASK:
        if (ask(lane, &(struct hr_wire_message){.type = HR_WIRE_QUERY, .question = deadlock->question}) != HORO_OK) {
            hr_log(&lane->node->log, HORO_LOG_WARNING,
                   "no memory to ask whether all ranks wait for one another: they wait until something changes");
        }
        break;
    case HR_VERDICT_OPEN:
        if (!deadlock->is_judged) {
            return now_ns + lane->node->stall_warning_ns;
        }
        hr_log(&lane->node->log, HORO_LOG_WARNING, "all ranks wait and nothing can finish: %s", text);
        break;
    case HR_VERDICT_DEADLOCK: hr_node_end(lane->node, HORO_ERR_DEADLOCK, "%s", text); break;
    }
    return HR_NEVER;
}

const struct hr_part_ops hr_part_deadlock = {.rank = HR_PART_DEADLOCK, .due = due};
