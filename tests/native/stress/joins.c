#include "joins.h"

#include <stdio.h>

enum { LENGTH_MOST = 8, ALL_AT_ONCE_IN = 3 };

/* ---- While a schedule is made ---- */

static size_t this_bunch(const struct schedule *schedule) {
    return schedule->bunch_count - 1;
}

/* The join of a team that the bunch at hand is part of; NULL: none. */
static struct join *find(const struct schedule *schedule, int team) {
    for (int i = schedule->join_count - 1; i >= 0; i--) {
        if (schedule->joins[i].team == team && schedule->joins[i].last_bunch >= this_bunch(schedule)) {
            return (struct join *)&schedule->joins[i];
        }
    }
    return NULL;
}

static void begin(struct chance *chance, struct schedule *schedule, int team) {
    struct join *join = &schedule->joins[schedule->join_count++];
    const uint32_t length = 1 + chance_below(chance, LENGTH_MOST);
    const int is_at_once = chance_once_in(chance, 4);
    join->team = team;
    join->last_bunch = this_bunch(schedule) + length;
    for (int i = 0; i < schedule->teams[team].size; i++) {
        const uint32_t steps = is_at_once ? 0 : chance_below(chance, length + 1);
        join->after[schedule->teams[team].ranks[i]] = this_bunch(schedule) + steps;
    }
}

static void end(struct schedule *schedule, struct bunch *bunch, const struct join *join) {
    struct operation *operation = &schedule->operations[schedule->operation_count++];
    bunch->count++;
    *operation = (struct operation){
        .op = HORO_JOIN, .team = join->team, .subject = (int)(join - schedule->joins), .join = -1};
    (void)snprintf(operation->name, sizeof operation->name, "join %d", operation->subject);
}

static void consider(struct chance *chance, struct schedule *schedule, struct bunch *bunch, int team, int begins) {
    const struct join *join = find(schedule, team);
    if (join != NULL && join->last_bunch == this_bunch(schedule)) {
        end(schedule, bunch, join);
    } else if (join == NULL && begins && schedule->join_count < JOINS_MAX) {
        begin(chance, schedule, team);
    }
}

int joins_change(struct chance *chance, const struct limits *limits, struct schedule *schedule, struct bunch *bunch,
                 const struct live_teams *live) {
    if (schedule->joins_once_in == 0) {
        return 0;
    }
    const size_t room = 3 * (LIVE_MAX + 1); /* for the operations that end them */
    const int begins = limits->operations - schedule->operation_count > room &&
                       chance_once_in(chance, schedule->joins_once_in);
    const int all = begins && chance_once_in(chance, ALL_AT_ONCE_IN); /* as a rank of Python's joins */
    const int chosen = begins ? (int)chance_below(chance, (uint32_t)live->count + 1) : 0;
    consider(chance, schedule, bunch, 0, begins && (all || chosen == 0));
    for (int i = 0; i < live->count; i++) {
        consider(chance, schedule, bunch, live->teams[i], begins && (all || chosen == i + 1));
    }
    return joins_count_open(schedule) > 0;
}

int joins_end_here(const struct schedule *schedule, int team) {
    const struct join *join = find(schedule, team);
    return join != NULL && join->last_bunch == this_bunch(schedule);
}

void joins_note(const struct schedule *schedule, struct operation *operation) {
    const struct join *join = find(schedule, operation->team);
    operation->bunch = this_bunch(schedule);
    operation->join = join == NULL ? -1 : (int)(join - schedule->joins);
}

size_t joins_count_open(const struct schedule *schedule) {
    size_t open = 0;
    for (int i = 0; i < schedule->join_count; i++) {
        open += schedule->joins[i].last_bunch >= this_bunch(schedule);
    }
    return open;
}

void joins_end_all(struct schedule *schedule, struct bunch *bunch) {
    for (int i = 0; i < schedule->join_count; i++) {
        struct join *join = &schedule->joins[i];
        if (join->last_bunch < this_bunch(schedule)) {
            continue;
        }
        join->last_bunch = this_bunch(schedule);
        for (int rank = 0; rank < schedule->size; rank++) {
            join->after[rank] = join->after[rank] < join->last_bunch ? join->after[rank] : join->last_bunch;
        }
        end(schedule, bunch, join);
    }
}

/* ---- What it changes ---- */

int joins_has(const struct schedule *schedule, const struct operation *operation, int rank) {
    return team_has(&schedule->teams[operation->team], rank) &&
           (operation->join < 0 || schedule->joins[operation->join].after[rank] >= operation->bunch);
}

void joins_list(const struct schedule *schedule, const struct operation *operation, struct team *active) {
    const struct team *team = &schedule->teams[operation->team];
    active->size = 0;
    for (int i = 0; i < team->size; i++) {
        if (joins_has(schedule, operation, team->ranks[i])) {
            active->ranks[active->size++] = team->ranks[i];
        }
    }
}

int joins_differs(const struct schedule *schedule, const struct operation *operation, int rank) {
    struct team active;
    joins_list(schedule, operation, &active);
    return operation->difference != DIFFERENCE_NONE && operation->differs == rank && team_has(&active, rank) &&
           (operation->difference == DIFFERENCE_REFUSED || active.size > 1);
}

/* What no rank can do for one that has joined. */
static int is_impossible(const struct operation *operation, const struct team *active) {
    const int is_scaled = operation->op == HORO_ALLREDUCE && operation->prescale != 1.0 &&
                          (operation->reduce_op == HORO_MIN || operation->reduce_op == HORO_MAX ||
                           operation->reduce_op == HORO_PRODUCT);
    return operation->op == HORO_REDUCESCATTER || operation->op == HORO_ALLTOALL || is_scaled ||
           (operation->op == HORO_BROADCAST && !team_has(active, operation->root_rank));
}

int joins_may_end(const struct schedule *schedule, const struct operation *operation, int rank, int status) {
    if (operation_changes_teams(operation)) {
        return status == (operation->difference == DIFFERENCE_NONE ? HORO_OK : HORO_ERR_MISMATCH);
    }
    struct team active;
    joins_list(schedule, operation, &active);
    const int is_whole = active.size == schedule->teams[operation->team].size;
    const int is_missing = !is_whole && is_impossible(operation, &active);
    const int is_other = joins_differs(schedule, operation, operation->differs);
    const int is_refused = is_other && operation->difference == DIFFERENCE_REFUSED;
    if (is_refused && rank == operation->differs) {
        return status == HORO_ERR_UNSUPPORTED;
    }
    return (status == HORO_OK && !is_missing && !is_other) || (status == HORO_ERR_UNSUPPORTED && is_refused) ||
           (status == HORO_ERR_MISMATCH && (is_missing || (is_other && !is_refused)));
}
