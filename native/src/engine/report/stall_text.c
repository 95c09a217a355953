/* The report of what some ranks have submitted and others not: a line for each, or for those that are alike. */
#include <stdio.h>

#include "engine/report/report.h"

/* ---- Names that have waited too long ---- */

/*
 * The first that has not submitted something that holds up others, or anything else: who has not joined may wait itself
 * for a rank that is late with something else. Local ranks come first, and are known better.
 */
static int first_missing(const struct hr_lane *lane, const struct hr_stalled *stalled, int holds_up) {
    for (int member = 0; member < lane->leader.agree.config.member_count; member++) {
        for (int i = 0; i < stalled->count; i++) {
            const struct hr_agree_waiting *name = &stalled->names[i];
            if (name->holds_up == holds_up && !hr_agree_has(name->announced, member)) {
                return member;
            }
        }
    }
    return -1;
}

void hr_stall_find(struct hr_lane *lane, int64_t now_ns, struct hr_stalled *stalled) {
    *stalled = (struct hr_stalled){.oldest_ns = now_ns, .blocked_ns = now_ns};
    stalled->total = hr_agree_list_waiting(&lane->leader.agree, now_ns, lane->node->stall_warning_ns, stalled->names,
                                           HR_NAMES_IN_TEXT);
    stalled->count = stalled->total < HR_NAMES_IN_TEXT ? stalled->total : HR_NAMES_IN_TEXT;
    for (int i = 0; i < stalled->count; i++) {
        const struct hr_agree_waiting *name = &stalled->names[i];
        stalled->oldest_ns = name->since_ns < stalled->oldest_ns ? name->since_ns : stalled->oldest_ns;
        if (name->holds_up && name->since_ns < stalled->blocked_ns) {
            stalled->blocked_ns = name->since_ns;
        }
    }
    /* calls that ranks here wait for behind a refusal of their own, which is all that has been announced */
    for (int member = 0; member < lane->team->local_size && stalled->count > 0; member++) {
        const struct hr_arena_block *block = hr_block_of(lane, member);
        const uint64_t behind = atomic_load_explicit(&block->behind, memory_order_relaxed);
        const int64_t since_ns = (int64_t)(behind / HR_TEAMS_MAX);
        if (behind != 0 && (int)(behind % HR_TEAMS_MAX) == lane->team->number && since_ns < stalled->blocked_ns &&
            atomic_load_explicit(&block->alive_until_ns, memory_order_relaxed) >= now_ns) {
            stalled->blocked_ns = since_ns;
        }
    }
    int missing = first_missing(lane, stalled, 1);
    missing = missing < 0 ? first_missing(lane, stalled, 0) : missing;
    stalled->periods = missing >= lane->team->local_size;
    stalled->culprit = missing < 0 ? -1 : lane->leader.member_ranks[missing];
}

/* ---- The text of the report ---- */

enum { MEMBERS_MAX = 256 }; /* more are not shown */

#define HAS_JOINED (1u << 31) /* beside the names */

static uint32_t submitted_by(const struct hr_lane *lane, const struct hr_stalled *stalled, int member) {
    uint32_t names = 0;
    for (int i = 0; i < stalled->count; i++) {
        names |= (uint32_t)hr_agree_has(stalled->names[i].announced, member) << i;
    }
    return hr_agree_is_absent(&lane->leader.agree, member) ? names | HAS_JOINED : names;
}

static int is_whole(const struct hr_stalled *stalled, uint32_t submitted) {
    return (submitted & ~HAS_JOINED) == (1u << stalled->count) - 1;
}

int hr_stall_is_waiting(const struct hr_lane *lane, int member) {
    return atomic_load_explicit(&hr_block_of(lane, member)->pending, memory_order_relaxed) > 0;
}

int hr_stall_is_waited_for(const struct hr_lane *lane, const struct hr_stalled *stalled, int member) {
    const uint32_t submitted = submitted_by(lane, stalled, member);
    uint32_t excused = 0;
    for (int i = 0; i < stalled->count; i++) {
        excused |= (uint32_t)!stalled->names[i].holds_up << i;
    }
    if (!is_whole(stalled, excused)) {
        return !is_whole(stalled, submitted | excused);
    }
    return !is_whole(stalled, submitted) && (member >= lane->team->local_size || !hr_stall_is_waiting(lane, member));
}

static size_t list_names(const struct hr_stalled *stalled, uint32_t names, char *text, size_t text_bytes) {
    size_t used = 0;
    for (int i = 0; i < stalled->count && used < text_bytes; i++) {
        if ((names >> i & 1) != 0) {
            used += (size_t)snprintf(text + used, text_bytes - used, "%s'%.*s'", used == 0 ? "" : ", ",
                                     HR_BLOCKED_NAME_MAX, stalled->names[i].name);
        }
    }
    return used;
}

void hr_rank_list_add(struct hr_rank_list *list, int rank) {
    const size_t room = sizeof list->numbers - list->used;
    const char *comma = list->count == 0 ? "" : ", ";
    list->first = list->count++ == 0 ? rank : list->first;
    if (room > 16) {
        list->used += (size_t)snprintf(list->numbers + list->used, room, "%s%d", comma, rank);
    } else if (room > 1) { /* the last that is written */
        (void)snprintf(list->numbers + list->used, room, ", ...");
        list->used = sizeof list->numbers;
    }
}

static size_t write_line(const struct hr_lane *lane, const struct hr_stalled *stalled, const uint32_t *submitted,
                         int member, char *text, size_t text_bytes) {
    char have[HR_NAMES_IN_TEXT * (HR_BLOCKED_NAME_MAX + 4)] = "";
    char lack[sizeof have] = "";
    char who[2 * HR_NAME_TEXT_BYTES];
    const size_t had = list_names(stalled, submitted[member], have, sizeof have);
    const size_t lacked = list_names(stalled, ~submitted[member], lack, sizeof lack);
    const int rank = lane->leader.member_ranks[member];
    const char *host = lane->node->host_name_of_rank[rank];
    struct hr_rank_list alike = {0};
    for (int other = member; other < lane->team->local_size && other < MEMBERS_MAX; other++) {
        if (submitted[other] == submitted[member]) {
            hr_rank_list_add(&alike, lane->leader.member_ranks[other]);
        }
    }
    if (alike.count > 0) {
        (void)snprintf(who, sizeof who, "rank%s %s (%s) %s", alike.count == 1 ? "" : "s", alike.numbers, host,
                       alike.count == 1 ? "has" : "have");
    } else {
        (void)snprintf(who, sizeof who, "the ranks led by rank %d (%s) have all", rank, host);
    }
    if ((submitted[member] & HAS_JOINED) != 0) {
        return (size_t)snprintf(text, text_bytes, "\n  %s joined", who);
    }
    const char *middle = had > 0 ? (lacked > 0 ? " and not " : "") : "";
    const char *verb = had > 0 ? "submitted" : "not submitted";
    return (size_t)snprintf(text, text_bytes, "\n  %s %s %s%s%s", who, verb, have, middle, lack);
}

void hr_stall_describe(const struct hr_lane *lane, const struct hr_stalled *stalled, char *text, size_t text_bytes) {
    uint32_t submitted[MEMBERS_MAX];
    const int members = lane->leader.agree.config.member_count;
    const int count = members < MEMBERS_MAX ? members : MEMBERS_MAX;
    size_t used = 0;
    text[0] = '\0';
    for (int member = 0; member < count; member++) {
        submitted[member] = submitted_by(lane, stalled, member);
    }
    for (int member = 0; member < count && used < text_bytes; member++) {
        const int is_local = member < lane->team->local_size;
        int before = is_local ? 0 : member; /* local members alike share a line, which the first of them begins */
        while (submitted[before] != submitted[member]) {
            before++;
        }
        /* of other hosts only those that lack something: there may be many */
        if (before == member && (is_local || !is_whole(stalled, submitted[member]))) {
            used += write_line(lane, stalled, submitted, member, text + used, text_bytes - used);
        }
    }
}
