#include "teams.h"

#include <stdio.h>
#include <string.h>

enum { EARLY_OPERATIONS = 20, DIFFERS_ONCE_IN = 4 };

/* ---- Who is in a team ---- */

static int is_drawn(struct chance *chance, const struct schedule *schedule, uint32_t kind, int chosen, int rank) {
    switch (kind) {
    case 0: return rank == chosen;
    case 1: return schedule->host_of_rank[rank] == schedule->host_of_rank[chosen];
    case 2: return 1;
    default: return chance_below(chance, 9) < kind;
    }
}

/* One rank, a host, all ranks, or few to many of them. */
static void draw(struct chance *chance, const struct schedule *schedule, struct team *team) {
    const uint32_t kind = chance_below(chance, 9);
    const int chosen = (int)chance_below(chance, (uint32_t)schedule->size);
    team->size = 0;
    for (int rank = 0; rank < schedule->size; rank++) {
        if (is_drawn(chance, schedule, kind, chosen, rank)) {
            team->ranks[team->size++] = rank;
        }
    }
    if (team->size == 0) {
        team->ranks[team->size++] = chosen;
    }
}

/* The same with one rank more or less; there are two at least. */
static void alter(struct chance *chance, const struct schedule *schedule, const struct team *team, struct team *other) {
    int chosen = (int)chance_below(chance, (uint32_t)schedule->size);
    if (team->size == 1 && team->ranks[0] == chosen) {
        chosen = (chosen + 1) % schedule->size;
    }
    other->size = 0;
    for (int rank = 0; rank < schedule->size; rank++) {
        if (team_has(team, rank) != (rank == chosen)) {
            other->ranks[other->size++] = rank;
        }
    }
}

static int is_same(const struct team *one, const struct team *other) {
    return one->size == other->size && memcmp(one->ranks, other->ranks, (size_t)one->size * sizeof *one->ranks) == 0;
}

/* ---- Changes ---- */

static struct operation *append(struct schedule *schedule, struct bunch *bunch, int32_t op, int subject) {
    struct operation *operation = &schedule->operations[schedule->operation_count++];
    bunch->count++;
    *operation = (struct operation){.op = op, .subject = subject, .other = subject, .join = -1};
    (void)snprintf(operation->name, sizeof operation->name, "%s %d", op == HORO_ADD_TEAM ? "add" : "remove", subject);
    return operation;
}

static int may_differ(struct chance *chance, const struct limits *limits, const struct schedule *schedule) {
    return schedule->size > 1 && !limits->moving && chance_once_in(chance, DIFFERS_ONCE_IN);
}

static void differ(struct chance *chance, const struct schedule *schedule, struct operation *operation, int other) {
    operation->difference = DIFFERENCE_TEAM;
    operation->differs = (int)chance_below(chance, (uint32_t)schedule->size);
    operation->other = other;
}

static void add(struct chance *chance, const struct limits *limits, struct schedule *schedule, struct bunch *bunch,
                struct live_teams *live) {
    const int subject = schedule->team_count++;
    struct team *team = &schedule->teams[subject];
    draw(chance, schedule, team);
    struct operation *operation = append(schedule, bunch, HORO_ADD_TEAM, subject);
    if (!may_differ(chance, limits, schedule)) {
        live->fates[live->count] = FATE_COMES;
        live->teams[live->count++] = subject;
        return;
    }
    const int other = schedule->team_count++;
    draw(chance, schedule, &schedule->teams[other]);
    if (chance_once_in(chance, 2) || is_same(team, &schedule->teams[other])) {
        alter(chance, schedule, team, &schedule->teams[other]);
    }
    differ(chance, schedule, operation, other);
}

static void take_away(struct chance *chance, const struct limits *limits, struct schedule *schedule,
                      struct bunch *bunch, struct live_teams *live) {
    const uint32_t which = chance_below(chance, (uint32_t)live->count);
    struct operation *operation = append(schedule, bunch, HORO_REMOVE_TEAM, live->teams[which]);
    if (live->count == 1 || !may_differ(chance, limits, schedule)) {
        live->fates[which] = FATE_GOES;
        return;
    }
    const uint32_t other = (which + 1 + chance_below(chance, (uint32_t)live->count - 1)) % (uint32_t)live->count;
    live->fates[which] = FATE_IS_DISPUTED;
    live->fates[other] = FATE_IS_DISPUTED;
    differ(chance, schedule, operation, live->teams[other]);
}

void teams_change(struct chance *chance, const struct limits *limits, struct schedule *schedule, struct bunch *bunch,
                  struct live_teams *live) {
    const size_t room = limits->operations - schedule->operation_count;
    const int is_early = schedule->operation_count < EARLY_OPERATIONS;
    if (schedule->teams_at_once == 0 || room < 4) { /* a change, and something behind it */
        return;
    }
    if (live->count > 0 && chance_once_in(chance, 2 * schedule->churn)) {
        take_away(chance, limits, schedule, bunch, live);
        return; /* one change at a time: the ranks submit those of a bunch in any order */
    }
    const int may_come = live->count < schedule->teams_at_once && schedule->team_count + 2 <= TEAMS_MAX;
    if (may_come && chance_once_in(chance, is_early ? 2 : schedule->churn)) {
        add(chance, limits, schedule, bunch, live);
    }
}

void teams_settle(struct live_teams *live) {
    int kept = 0;
    for (int i = 0; i < live->count; i++) {
        if (live->fates[i] != FATE_GOES) {
            live->teams[kept] = live->teams[i];
            live->fates[kept++] = FATE_STAYS;
        }
    }
    live->count = kept;
}

int teams_choose(struct chance *chance, const struct live_teams *live) {
    if (live->count == 0 || chance_once_in(chance, 3)) {
        return 0;
    }
    const uint32_t which = chance_below(chance, (uint32_t)live->count);
    return live->fates[which] == FATE_STAYS ? live->teams[which] : 0;
}
