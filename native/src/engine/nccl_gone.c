/* Looks at work of NCCL that nobody waits for, its failures, and teams that are gone. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/op.h"
#include "engine/by_nccl.h"

#define CONFIRM_NS 250000000ll /* other ranks may tell of the cause meanwhile: a rank that is gone */

int64_t hr_nccl_gone_within_ns(const struct hr_nccl_team *team, int64_t now_ns) {
    return hr_next_look_ns(now_ns - team->gone_ns, HR_NCCL_LOOK_NS, HR_NCCL_RARE_LOOK_NS);
}

/* A wait that spins comes here all the time, for all teams; of what runs on the GPU nobody here waits for the end. */
static int is_due(struct hr_nccl_team *team) {
    const int is_gone = team->gone_ns != 0;
    if (!is_gone && (team->comm.state != HR_NCCL_IDLE || !team->comm.is_in_flight)) {
        return 1;
    }
    const int64_t now_ns = hr_now_ns();
    if (now_ns < team->look_ns) {
        return 0;
    }
    team->look_ns = now_ns + (is_gone ? hr_nccl_gone_within_ns(team, now_ns) : HR_NCCL_LOOK_NS);
    return 1;
}

int hr_nccl_look(struct hr_nccl_team *team) {
    return team->comm.state != HR_NCCL_LAUNCHING && is_due(team) && hr_nccl_poll(&team->comm);
}

/* NCCL does not say who is to blame. A rank that is gone is heard of in a moment; else this one ends the group. */
int hr_nccl_turn_broken(struct hr_engine *engine, struct hr_nccl_team *team, const char *of) {
    char words[HORO_MESSAGE_MAX];
    if (team->is_told) {
        return 0;
    }
    if (team->tell_ns == 0) {
        team->tell_ns = hr_now_ns() + CONFIRM_NS;
        hr_log(&engine->node->log, HORO_LOG_ERROR, "NCCL%s%s: %s", of[0] == '\0' ? "" : " for ", of,
               team->comm.failure.text);
    }
    if (hr_now_ns() < team->tell_ns) {
        return 0;
    }
    team->is_told = 1;
    const int length = snprintf(words, sizeof words, "a failure of NCCL%s%s: %.700s", of[0] == '\0' ? "" : " for ", of,
                                team->comm.failure.text);
    hr_node_end(engine->node, HORO_ERR_PEER_LOST, engine->node->rank, words, (size_t)length);
    return 1;
}

/* ---- Teams that are gone ---- */

int hr_nccl_is_gone_late(const struct hr_nccl_team *team) {
    return team->report_ns != 0 && team->comm.state != HR_NCCL_BROKEN && hr_now_ns() >= team->report_ns;
}

char *hr_nccl_name_last(const struct hr_nccl_team *team, char *text) {
    (void)snprintf(text, HR_NCCL_LAST_BYTES, "%.28s '%s'", hr_op_name(team->last_op), team->last_name);
    return text;
}

/* Nobody waits for it, and a GPU may be late by any time: so this is told, and ends nothing. */
static void report_late(const struct hr_engine *engine, struct hr_nccl_team *team) {
    const struct hr_node *node = engine->node;
    const int64_t now_ns = hr_now_ns();
    char last[HR_NCCL_LAST_BYTES];
    char seconds[HR_SECONDS_BYTES];
    hr_log(&node->log, HORO_LOG_WARNING,
           "%s has been removed, and its last work by NCCL, %s, has not ended on %s, for %s s; the job goes on",
           team->name, hr_nccl_name_last(team, last),
           team->comm.state == HR_NCCL_IDLE ? "this rank's GPU, or on one that it waits for"
                                            : "the GPUs of other ranks",
           hr_seconds(now_ns - team->gone_ns, seconds));
    team->report_ns = now_ns + node->stall_warning_ns;
}

int hr_nccl_turn_gone(struct hr_engine *engine, struct hr_by_nccl *by) {
    int moved = 0;
    for (struct hr_nccl_team **link = &by->ending; *link != NULL;) {
        struct hr_nccl_team *team = *link;
        moved |= hr_nccl_look(team) | team->has_moved;
        team->has_moved = 0;
        if (team->comm.state == HR_NCCL_IDLE && !team->comm.is_in_flight) {
            hr_nccl_end(&team->comm);
            moved = 1;
        }
        if (team->comm.state == HR_NCCL_BROKEN) {
            moved |= hr_nccl_turn_broken(engine, team, team->name);
        }
        if (team->comm.state == HR_NCCL_NONE && !team->comm.is_in_flight) {
            *link = team->next;
            hr_nccl_close(&team->comm);
            free(team);
            continue;
        }
        if (hr_nccl_is_gone_late(team)) {
            report_late(engine, team);
        }
        link = &team->next;
    }
    return moved;
}

void hr_engine_remove_nccl(struct hr_engine *engine, const struct hr_lane *lane) {
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    struct hr_nccl_team *team = hr_nccl_team_of(engine, lane);
    if (team == NULL) {
        return;
    }
    struct hr_nccl_team *gone = team->comm.handle == NULL ? NULL : calloc(1, sizeof *gone);
    hr_nccl_backend_destroy(team->backend);
    team->backend = NULL;
    if (gone != NULL) {
        gone->comm = team->comm;
        gone->last_op = team->last_op;
        memcpy(gone->last_name, team->last_name, sizeof gone->last_name);
        gone->gone_ns = hr_now_ns();
        gone->report_ns = engine->node->stall_warning_ns > 0 ? gone->gone_ns + engine->node->stall_warning_ns : 0;
        (void)hr_team_name(lane->team, gone->name);
        gone->next = by->ending;
        by->ending = gone;
        atomic_store(&by->is_busy, 1);
    } else {
        hr_nccl_close(&team->comm); /* for lack of memory perhaps, of one that all others end in order */
    }
    (void)pthread_mutex_lock(&engine->submission.lock);
    atomic_store(&team->stage, HR_BY_NCCL_ASKED);
    team->unstaged = NULL;
    team->comm = (struct hr_nccl_comm){0};
    team->has_moved = 0;
    team->last_name[0] = '\0';
    (void)pthread_mutex_unlock(&engine->submission.lock);
}
