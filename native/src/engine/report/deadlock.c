#include "engine/report/deadlock.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    HEAD_BYTES = 1 + 4 + 4, /* of a report: type, rank and question */
    TAIL_BYTES = 160, /* kept free for the end of the sentence */
    WAITS_MAX = 255,  /* bytes shown of what a rank says that it waits for */
};

void hr_deadlock_fini(struct hr_deadlock *deadlock) {
    for (int rank = 0; rank < deadlock->size; rank++) {
        hr_buffer_fini(&deadlock->reports[rank].message);
    }
    free(deadlock->reports);
    *deadlock = (struct hr_deadlock){0};
}

int hr_deadlock_note(struct hr_deadlock *deadlock, int size, const struct hr_wire_message *message, int64_t now_ns) {
    if (deadlock->reports == NULL) {
        deadlock->reports = calloc((size_t)size, sizeof *deadlock->reports);
        if (deadlock->reports == NULL) {
            return HORO_ERR_RESOURCE;
        }
        deadlock->size = size;
    }
    if (message->rank >= deadlock->size) {
        return HORO_ERR_INTERNAL;
    }
    struct hr_report *report = &deadlock->reports[message->rank];
    struct hr_buffer *last = &report->message;
    const uint32_t question = message->question;
    const int says_the_same = message->byte_count > HEAD_BYTES && hr_buffer_size(last) == message->byte_count &&
                              memcmp(hr_buffer_front(last) + HEAD_BYTES, message->bytes + HEAD_BYTES,
                                     message->byte_count - HEAD_BYTES) == 0;
    if (says_the_same) {
        if (question != 0 && question == deadlock->question && question != report->answered) {
            report->answered = question;
            deadlock->answers++;
            deadlock->is_judged = deadlock->answers < deadlock->size;
        }
        return HORO_OK;
    }
    deadlock->count -= hr_buffer_size(last) > 0;
    hr_buffer_consume(last, hr_buffer_size(last));
    deadlock->is_judged = 0;
    deadlock->is_open = 0;
    deadlock->question = 0;
    deadlock->changed_ns = now_ns;
    if (message->count == 0) {
        return HORO_OK;
    }
    HR_TRY(hr_buffer_append(last, message->bytes, message->byte_count));
    deadlock->count++;
    return HORO_OK;
}

int64_t hr_deadlock_due_ns(const struct hr_deadlock *deadlock, int64_t open_ns) {
    const int is_due = deadlock->count > 0 && deadlock->count == deadlock->size && !deadlock->is_judged;
    return is_due ? deadlock->changed_ns + (deadlock->is_open ? open_ns : 0) : 0;
}

static struct hr_wire_message report_of(const struct hr_deadlock *deadlock, int rank) {
    const struct hr_buffer *last = &deadlock->reports[rank].message;
    struct hr_wire_message message;
    (void)hr_wire_decode(hr_buffer_front(last), hr_buffer_size(last), &message); /* as it has been before */
    return message;
}

/* A walk over the lanes of all reports; begins as {.deadlock = deadlock}. */
struct walk {
    const struct hr_deadlock *deadlock;
    int rank; /* whose report is next */
    uint32_t left;
    const uint8_t *cursor;
};

/* 0: there is none any more. */
static int next_lane(struct walk *walk, struct hr_wire_lane *lane) {
    while (walk->left == 0) {
        if (walk->rank == walk->deadlock->size) {
            return 0;
        }
        const struct hr_wire_message report = report_of(walk->deadlock, walk->rank++);
        walk->left = report.count;
        walk->cursor = report.items;
    }
    walk->left--;
    hr_wire_next_lane(&walk->cursor, lane);
    return 1;
}

/* ---- Whether anything can finish ---- */

struct team {
    uint32_t members, reports, with_all;
    uint64_t executed;
};

struct submitted {
    uint64_t hash;
    uint32_t team;
    int has_all; /* submitted by a rank that has submitted all names: it counts by itself */
};

static int compare(const void *a, const void *b) {
    const struct submitted *one = a;
    const struct submitted *two = b;
    if (one->team != two->team) {
        return one->team < two->team ? -1 : 1;
    }
    return one->hash < two->hash ? -1 : one->hash > two->hash;
}

/* All together, that the ranks wait for. */
struct awaited {
    size_t names, sends, receives;
};

/* Whether its rank counts as one that has submitted all names, for it has joined the team. */
static int has_all(const struct hr_wire_lane *lane) {
    for (uint32_t k = 0; k < lane->count; k++) {
        if (hr_wire_u64(lane->hashes, k) == HR_WIRE_ALL_NAMES) {
            return 1;
        }
    }
    return 0;
}

/* Adds up what all reports say; 0 if they are not of one state of the logs. */
static int add_up(const struct hr_deadlock *deadlock, struct team *teams, struct awaited *awaited) {
    struct walk walk = {.deadlock = deadlock};
    struct hr_wire_lane lane;
    while (next_lane(&walk, &lane)) {
        struct team *team = &teams[lane.team];
        if (team->reports++ == 0) {
            team->members = lane.members;
            team->executed = lane.executed;
        }
        if (team->members != lane.members || team->executed != lane.executed) {
            return 0;
        }
        team->with_all += (uint32_t)has_all(&lane);
        awaited->names += lane.count;
    }
    for (int i = 0; i < HORO_TEAMS_MAX; i++) {
        if (teams[i].reports != teams[i].members) {
            return 0;
        }
    }
    return 1;
}

static int is_received(const struct hr_deadlock *deadlock, int from, struct hr_wire_move send) {
    if (send.peer >= deadlock->size) {
        return 0;
    }
    const struct hr_wire_message report = report_of(deadlock, send.peer);
    const uint8_t *cursor = report.data;
    struct hr_wire_move move;
    while (cursor < report.data + report.data_bytes) {
        hr_wire_next_move(&cursor, &move);
        if (!move.sends && move.tag == send.tag && (move.peer == from || move.peer < 0)) {
            return 1;
        }
    }
    return 0;
}

/* Whether both ends of a send are under way, or have ended at one of them only: its receiver's, which is the first. */
static int can_move(const struct hr_deadlock *deadlock, struct awaited *awaited) {
    uint64_t sent = 0, received = 0;
    int is_matched = 0;
    for (int rank = 0; rank < deadlock->size; rank++) {
        const struct hr_wire_message report = report_of(deadlock, rank);
        const uint8_t *cursor = report.data;
        sent += report.sent;
        received += report.received;
        while (!is_matched && cursor < report.data + report.data_bytes) {
            struct hr_wire_move move;
            hr_wire_next_move(&cursor, &move);
            awaited->sends += move.sends != 0;
            awaited->receives += move.sends == 0;
            is_matched = move.sends && is_received(deadlock, rank, move);
        }
    }
    return is_matched || sent != received;
}

/*
 * Whether all members of a team have submitted some name, or joined; a rank submits it once at a time. Or the same of a
 * send and a receive. Names are sorted: ranks may have ten thousand each.
 */
static int can_finish(const struct hr_deadlock *deadlock, struct awaited *awaited) {
    struct team teams[HORO_TEAMS_MAX] = {{0}};
    if (!add_up(deadlock, teams, awaited) || can_move(deadlock, awaited) ||
        awaited->names + awaited->sends + awaited->receives == 0) {
        return 1;
    }
    struct submitted *all = calloc(awaited->names + 1, sizeof *all);
    if (all == NULL) {
        return 1; /* nothing is said that is not known */
    }
    struct walk walk = {.deadlock = deadlock};
    struct hr_wire_lane lane;
    for (struct submitted *next = all; next_lane(&walk, &lane);) {
        const int all_names = has_all(&lane);
        for (uint32_t k = 0; k < lane.count; k++) {
            *next++ = (struct submitted){hr_wire_u64(lane.hashes, k), lane.team, all_names};
        }
    }
    qsort(all, awaited->names, sizeof *all, compare);
    int is_complete = 0;
    uint32_t others = 0; /* that have submitted this name, and not all */
    for (size_t i = 0; i < awaited->names; i++) {
        const struct team *team = &teams[all[i].team];
        others = i > 0 && compare(&all[i - 1], &all[i]) == 0 ? others : 0;
        others += all[i].has_all == 0;
        is_complete |= all[i].hash != HR_WIRE_ALL_NAMES && others + team->with_all >= team->members;
    }
    free(all);
    return is_complete;
}

/* ---- The sentence ---- */

static int waits_alike(const struct hr_deadlock *deadlock, int a, int b) {
    const struct hr_wire_text one = report_of(deadlock, a).text;
    const struct hr_wire_text two = report_of(deadlock, b).text;
    return one.bytes == two.bytes && (one.bytes == 0 || memcmp(one.data, two.data, one.bytes) == 0);
}

/* "rank 1" or "ranks 1, 3-7": all that wait as `first` does. */
static size_t name_ranks(const struct hr_deadlock *deadlock, int first, char *text, size_t text_bytes) {
    char numbers[256];
    size_t used = 0;
    int count = 0;
    for (int rank = first; rank < deadlock->size; rank++) {
        if (!waits_alike(deadlock, first, rank)) {
            continue;
        }
        int last = rank;
        while (last + 1 < deadlock->size && waits_alike(deadlock, first, last + 1)) {
            last++;
        }
        if (used + 32 > sizeof numbers) {
            used += (size_t)snprintf(numbers + used, sizeof numbers - used, ", ...");
            count++;
            break;
        }
        used += (size_t)snprintf(numbers + used, sizeof numbers - used, used == 0 ? "%d" : ", %d", rank);
        if (last > rank) {
            used += (size_t)snprintf(numbers + used, sizeof numbers - used, "-%d", last);
        }
        count += last - rank + 1;
        rank = last;
    }
    return (size_t)snprintf(text, text_bytes, "rank%s %s", count == 1 ? "" : "s", numbers);
}

static size_t describe_waits(const struct hr_deadlock *deadlock, char *text, size_t text_bytes) {
    size_t used = 0;
    for (int rank = 0; rank < deadlock->size; rank++) {
        const struct hr_wire_text waits = report_of(deadlock, rank).text;
        int before = 0;
        while (!waits_alike(deadlock, before, rank)) {
            before++;
        }
        if (before < rank) {
            continue; /* it has been named with that one */
        }
        const size_t bytes = waits.bytes < WAITS_MAX ? waits.bytes : WAITS_MAX;
        if (used + bytes + TAIL_BYTES + 280 > text_bytes && used > 0) {
            return used + (size_t)snprintf(text + used, text_bytes - used, ", others for something else");
        }
        used += (size_t)snprintf(text + used, text_bytes - used, used == 0 ? "" : ", ");
        const size_t begin = used;
        used += name_ranks(deadlock, rank, text + used, text_bytes - used);
        const int is_one = text[begin + 4] == ' ';
        const char *verb = begin > 0 ? "" : (is_one ? " waits" : " wait");
        used += (size_t)snprintf(text + used, text_bytes - used, "%s for %.*s", verb, (int)bytes, waits.data);
    }
    return used;
}

enum hr_verdict hr_deadlock_judge(struct hr_deadlock *deadlock, char *text, size_t text_bytes) {
    int open = 0; /* the first rank that may go on by another thread */
    struct awaited awaited = {0};
    deadlock->is_judged = 1;
    if (can_finish(deadlock, &awaited)) {
        return HR_VERDICT_NONE;
    }
    while (open < deadlock->size && report_of(deadlock, open).others.bytes == 0) {
        open++;
    }
    if (open < deadlock->size) {
        const struct hr_wire_text others = report_of(deadlock, open).others;
        const size_t used = describe_waits(deadlock, text, text_bytes);
        (void)snprintf(text + used, text_bytes - used, "; only %.*s of rank %d may still submit something",
                       (int)(others.bytes < 64 ? others.bytes : 64), others.data, open);
        deadlock->is_judged = deadlock->is_open;
        deadlock->is_open = 1;
        return HR_VERDICT_OPEN;
    }
    if (deadlock->question == 0) { /* all ranks are to be asked */
        deadlock->last_question = deadlock->last_question == UINT32_MAX ? 1 : deadlock->last_question + 1; /* never 0 */
        deadlock->question = deadlock->last_question;
        deadlock->answers = 0;
        return HR_VERDICT_ASK;
    }
    if (deadlock->answers < deadlock->size) {
        return HR_VERDICT_NONE;
    }
    const size_t used = describe_waits(deadlock, text, text_bytes);
    /* the usual cause, by what is waited for: collectives, or sends and receives alone */
    (void)snprintf(text + used, text_bytes - used, "; %s",
                   awaited.names > 0      ? "has a rank fewer batches, or has it skipped a backward() or step()?"
                   : awaited.receives > 0 ? "does one of the ranks send first, with the tag that the other receives?"
                                          : "a send ends when it is received: let one rank receive first, or use isend "
                                            "and irecv, or batch_isend_irecv");
    return HR_VERDICT_DEADLOCK;
}
