#include "schedule.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "chance.h"
#include "joins.h"
#include "teams.h"

enum { REPEATED_NAMES = 150, TEAM_BYTES = 32 + 3 * RANKS_MAX };

#define ANY_OF(chance, list) ((list)[chance_below((chance), (uint32_t)(sizeof(list) / sizeof((list)[0])))])

/* ---- Who is where ---- */

static void place_ranks(struct chance *chance, int hosts_most, struct schedule *schedule) {
    schedule->host_count = 1 + (int)chance_below(chance, (uint32_t)hosts_most);
    const int equal = (int)chance_below(chance, 2);
    const int common = 1 + (int)chance_below(chance, RANKS_MAX / HOSTS_MAX);
    schedule->size = 0;
    for (int host = 0; host < schedule->host_count; host++) {
        schedule->host_sizes[host] = equal ? common : 1 + (int)chance_below(chance, RANKS_MAX / HOSTS_MAX);
        schedule->size += schedule->host_sizes[host];
    }
    int left[HOSTS_MAX];
    memcpy(left, schedule->host_sizes, sizeof left);
    const int in_turn = chance_once_in(chance, 4);
    for (int rank = 0, host = 0; rank < schedule->size; rank++) {
        while (left[host] == 0) {
            host = (host + 1) % schedule->host_count;
        }
        schedule->host_of_rank[rank] = host;
        left[host]--;
        host = in_turn ? (host + 1) % schedule->host_count : host;
    }
    schedule->team_count = 1;
    schedule->teams[0].size = schedule->size;
    for (int rank = 0; rank < schedule->size; rank++) {
        schedule->teams[0].ranks[rank] = rank;
    }
}

static void choose_options(struct chance *chance, struct schedule *schedule) {
    static const uint64_t segments[] = {4096, 8192, 1 << 16, 1 << 18};
    static const uint64_t fusions[] = {0, 4096, 1 << 16, 1 << 20, 128 << 20};
    static const uint64_t directs[] = {0, 1, 1, 500, 8192};
    static const int32_t capacities[] = {0, 4, 64, 4096};
    static const int32_t spins[] = {0, 50, 1000};
    static const int32_t cycles[] = {0, 0, 0, 100, 500};
    schedule->segment_bytes = ANY_OF(chance, segments);
    schedule->fusion_bytes = ANY_OF(chance, fusions);
    schedule->direct_bytes = ANY_OF(chance, directs);
    schedule->cache_capacity = ANY_OF(chance, capacities);
    schedule->spin_us = ANY_OF(chance, spins);
    schedule->cycle_time_us = ANY_OF(chance, cycles);
    schedule->is_tuned = chance_once_in(chance, 2);
}

static void choose_ending(struct chance *chance, int together, struct schedule *schedule) {
    static const enum ending endings[] = {ENDING_TOGETHER, ENDING_TOGETHER, ENDING_LEAVE, ENDING_DEATH};
    const int is_together = schedule->size == 1 || together || schedule->joins_once_in > 0;
    schedule->ending = is_together ? ENDING_TOGETHER : ANY_OF(chance, endings);
    schedule->victim = (int)chance_below(chance, (uint32_t)schedule->size);
    const uint32_t bunches = (uint32_t)schedule->bunch_count;
    schedule->victim_bunch = bunches - 1 - chance_below(chance, 1 + bunches / 2);
    for (size_t i = 0; i < schedule->operation_count && !is_together; i++) {
        struct operation *operation = &schedule->operations[i];
        if (operation->difference == DIFFERENCE_REFUSED && operation->differs == schedule->victim) {
            operation->difference = DIFFERENCE_NONE; /* it would not wait for the others */
        }
    }
}

/* ---- Operations ---- */

static int64_t choose_count(struct chance *chance, const struct limits *limits, int64_t most) {
    const uint32_t kind = chance_below(chance, 100);
    const int64_t limit = kind < 4 ? 1 : kind < 60 ? 17 : kind < 92 ? 1500 : kind < 99 ? 20000 : most;
    const int64_t count = (int64_t)chance_below(chance, (uint32_t)(limit < most ? limit : most));
    return count == 0 && limits->moving ? 1 : count;
}

static int has_floats(const struct operation *operation) {
    return operation->dtype == HORO_FLOAT16 || operation->dtype == HORO_BFLOAT16 || operation->dtype == HORO_FLOAT32 ||
           operation->dtype == HORO_FLOAT64;
}

static void choose_scales(struct chance *chance, struct operation *operation) {
    static const double factors[] = {0.25, 0.5, 2.0};
    const int is_float = has_floats(operation);
    if (!chance_once_in(chance, 4) || operation->dtype == HORO_UINT8) {
        return;
    }
    if (operation->reduce_op != HORO_PRODUCT) { /* there it counts once for every rank */
        operation->prescale = is_float ? ANY_OF(chance, factors) : 2.0;
    }
    operation->postscale = is_float ? ANY_OF(chance, factors) : 2.0;
}

static void choose_reduction(struct chance *chance, const struct limits *limits, struct operation *operation) {
    static const int32_t ops[] = {HORO_SUM, HORO_SUM, HORO_SUM, HORO_AVERAGE, HORO_MIN, HORO_MAX, HORO_PRODUCT,
                                  HORO_ADASUM};
    operation->reduce_op = ANY_OF(chance, ops);
    operation->op = chance_once_in(chance, 4) ? HORO_REDUCESCATTER : HORO_ALLREDUCE;
    if (operation->reduce_op == HORO_ADASUM && (operation->op != HORO_ALLREDUCE || !has_floats(operation))) {
        operation->reduce_op = HORO_SUM;
    }
    if (operation->reduce_op == HORO_PRODUCT && chance_once_in(chance, 2)) {
        static const int32_t wholes[] = {HORO_COMPLEX32, HORO_COMPLEX64, HORO_COMPLEX128};
        operation->dtype = ANY_OF(chance, wholes);
    }
    operation->apart |= operation->op == HORO_REDUCESCATTER;
    operation->tensor_count = chance_once_in(chance, 4) ? 2 + (int)chance_below(chance, TENSORS_MAX - 1) : 1;
    for (int i = 0; i < operation->tensor_count; i++) {
        operation->counts[i] = choose_count(chance, limits, limits->elements);
    }
    choose_scales(chance, operation);
}

/* All but the name. */
static void choose_operation(struct chance *chance, const struct schedule *schedule, const struct limits *limits,
                             int team_number, struct operation *operation) {
    static const int32_t dtypes[] = {HORO_FLOAT32, HORO_FLOAT32, HORO_FLOAT64, HORO_INT32, HORO_INT64,
                                     HORO_UINT8,   HORO_FLOAT16, HORO_BFLOAT16};
    const struct team *team = &schedule->teams[team_number];
    *operation =
        (struct operation){.salt = chance_next(chance) >> 16, .prescale = 1.0, .postscale = 1.0, .tensor_count = 1};
    operation->team = team_number;
    operation->dtype = ANY_OF(chance, dtypes);
    operation->apart = (int)chance_below(chance, 2);
    const uint32_t kind = chance_below(chance, limits->moving ? 20 : 22);
    if (kind < 14) {
        choose_reduction(chance, limits, operation);
    } else if (kind < 16) {
        operation->op = HORO_BROADCAST;
        operation->root_rank = team->ranks[chance_below(chance, (uint32_t)team->size)];
        operation->counts[0] = choose_count(chance, limits, limits->elements);
    } else if (kind < 18) {
        operation->op = HORO_ALLGATHER;
        operation->columns = 1 + chance_below(chance, 5);
        operation->counts[0] = choose_count(chance, limits, 1 + limits->elements / team->size / operation->columns);
    } else if (kind < 20) {
        operation->op = HORO_ALLTOALL;
        operation->columns = 1 + chance_below(chance, 5);
        const int64_t pairs = (int64_t)team->size * team->size;
        operation->counts[0] = choose_count(chance, limits, 1 + limits->elements / pairs / operation->columns);
    } else {
        operation->op = HORO_BARRIER;
        operation->tensor_count = 0;
    }
    if (operation->tensor_count > 0 && team->size > 1 && chance_once_in(chance, 30) && !limits->moving) {
        static const enum difference differences[] = {DIFFERENCE_SHAPE, DIFFERENCE_DTYPE, DIFFERENCE_REFUSED};
        operation->difference = ANY_OF(chance, differences);
        if (operation->op == HORO_ALLREDUCE && operation->reduce_op == HORO_ADASUM &&
            operation->difference == DIFFERENCE_DTYPE) {
            operation->difference = DIFFERENCE_SHAPE; /* another dtype may be one that is refused at once */
        }
        operation->differs = team->ranks[chance_below(chance, (uint32_t)team->size)];
    }
}

/* Two teams may use a name at once. */
static int is_taken(const struct schedule *schedule, const struct bunch *bunch, int team, const char *name) {
    for (size_t i = bunch->first; i < bunch->first + bunch->count; i++) {
        if (schedule->operations[i].team == team && strcmp(schedule->operations[i].name, name) == 0) {
            return 1;
        }
    }
    return 0;
}

/* Half of the names come again, mostly with the same tensors. */
static void add_operation(struct chance *chance, const struct limits *limits, struct schedule *schedule,
                          struct bunch *bunch, int team) {
    struct operation *operation = &schedule->operations[schedule->operation_count];
    const uint32_t which = chance_below(chance, REPEATED_NAMES);
    const uint32_t kind = chance_below(chance, 8);
    char name[NAME_BYTES];
    (void)snprintf(name, sizeof name, "layers.%u.weight", which);
    if (kind < 5 && !is_taken(schedule, bunch, team, name)) {
        const uint32_t variant = chance_once_in(chance, 12) ? chance_below(chance, 3) : 0;
        struct chance its_own = {chance_mix(schedule->seed, ((uint32_t)team * REPEATED_NAMES + which) * 3 + variant)};
        choose_operation(&its_own, schedule, limits, team, operation);
        if (operation->difference != DIFFERENCE_NONE && !chance_once_in(chance, 4)) {
            operation->difference = DIFFERENCE_NONE;
        }
    } else {
        choose_operation(chance, schedule, limits, team, operation);
        (void)snprintf(name, sizeof name, "%s.%zu", kind < 7 ? "once" : "new", schedule->operation_count);
        operation->flags = kind < 7 ? HORO_SUBMIT_TRANSIENT : 0;
    }
    memcpy(operation->name, name, sizeof name);
    joins_note(schedule, operation);
    schedule->operation_count++;
    bunch->count++;
}

static void choose_teams(struct chance *chance, const struct limits *limits, struct schedule *schedule) {
    static const uint32_t churns[] = {1, 3, 10};
    schedule->teams_at_once = (int)chance_below(chance, (uint32_t)limits->teams + 1);
    schedule->churn = ANY_OF(chance, churns);
}

static void choose_joins(struct chance *chance, const struct limits *limits, struct schedule *schedule) {
    static const uint32_t once_in[] = {0, 0, 3, 15};
    schedule->joins_once_in = limits->moving ? 0 : ANY_OF(chance, once_in);
}

static struct bunch *begin_bunch(struct schedule *schedule) {
    struct bunch *bunch = &schedule->bunches[schedule->bunch_count++];
    bunch->first = schedule->operation_count;
    return bunch;
}

/* For one operation more, besides what ends the joins and the last one. */
static int has_room(const struct limits *limits, const struct schedule *schedule) {
    const size_t open = schedule->bunch_count == 0 ? 0 : joins_count_open(schedule);
    return schedule->operation_count + open + 1 < limits->operations;
}

/* The last one is of all ranks and by itself: who has done it knows that nobody is behind. */
static void choose_bunches(struct chance *chance, const struct limits *limits, struct schedule *schedule) {
    struct live_teams live = {0};
    while (has_room(limits, schedule)) {
        struct bunch *bunch = begin_bunch(schedule);
        const uint32_t wanted = chance_once_in(chance, 2) ? 1 : 1 + chance_below(chance, BUNCH_MAX);
        if (!joins_change(chance, limits, schedule, bunch, &live)) {
            teams_change(chance, limits, schedule, bunch, &live);
        }
        for (uint32_t i = bunch->count; i < wanted && has_room(limits, schedule); i++) {
            const int team = teams_choose(chance, &live);
            if (!joins_end_here(schedule, team)) {
                add_operation(chance, limits, schedule, bunch, team);
            }
        }
        teams_settle(&live);
    }
    struct bunch *bunch = begin_bunch(schedule);
    joins_end_all(schedule, bunch);
    if (bunch->count > 0) {
        bunch = begin_bunch(schedule);
    }
    add_operation(chance, limits, schedule, bunch, 0);
    struct operation *last = &schedule->operations[schedule->operation_count - 1];
    if (last->difference == DIFFERENCE_REFUSED) { /* a rank that refuses does not wait for the others */
        last->difference = DIFFERENCE_NONE;
    }
}

int schedule_make(uint64_t seed, const struct limits *limits, struct schedule *schedule) {
    struct chance chance = {chance_mix(seed, 0)};
    *schedule = (struct schedule){.seed = seed};
    place_ranks(&chance, limits->hosts, schedule);
    choose_options(&chance, schedule);
    choose_teams(&chance, limits, schedule);
    choose_joins(&chance, limits, schedule);
    schedule->operations = calloc(limits->operations, sizeof *schedule->operations);
    schedule->bunches = calloc(limits->operations, sizeof *schedule->bunches);
    if (schedule->operations == NULL || schedule->bunches == NULL) {
        schedule_free(schedule);
        return -1;
    }
    choose_bunches(&chance, limits, schedule);
    choose_ending(&chance, limits->together, schedule);
    return 0;
}

void schedule_free(struct schedule *schedule) {
    free(schedule->operations);
    free(schedule->bunches);
    *schedule = (struct schedule){0};
}

/* ---- Words ---- */

void schedule_describe(const struct schedule *schedule, char *text, size_t text_bytes) {
    static const char *const endings[] = {"all leave together", "leaves", "dies"};
    char hosts[HOSTS_MAX * 4] = "";
    size_t used = 0;
    for (int host = 0; host < schedule->host_count; host++) {
        used += (size_t)snprintf(hosts + used, sizeof hosts - used, "%s%d", host == 0 ? "" : ",",
                                 schedule->host_sizes[host]);
    }
    char who[64] = "";
    if (schedule->ending != ENDING_TOGETHER) {
        (void)snprintf(who, sizeof who, "rank %d in bunch %zu of %zu ", schedule->victim, schedule->victim_bunch,
                       schedule->bunch_count);
    }
    (void)snprintf(text, text_bytes,
                   "hosts [%s]%s, teams %d, at once %d, segment %llu, direct %llu, fusion %llu, cache %d, spin %d us, "
                   "cycle %d us, tuned %d, %d joins, %zu operations; %s%s",
                   hosts, schedule->host_count > 1 && schedule->host_of_rank[1] != 0 ? " in turn" : "",
                   schedule->team_count, schedule->teams_at_once, (unsigned long long)schedule->segment_bytes,
                   (unsigned long long)schedule->direct_bytes, (unsigned long long)schedule->fusion_bytes,
                   schedule->cache_capacity, schedule->spin_us, schedule->cycle_time_us, schedule->is_tuned,
                   schedule->join_count, schedule->operation_count, who, endings[schedule->ending]);
}

static void describe_team(const struct schedule *schedule, int number, char *text, size_t text_bytes) {
    const struct team *team = &schedule->teams[number];
    int used = snprintf(text, text_bytes, "team %d [", number);
    for (int i = 0; i < team->size; i++) {
        used += snprintf(text + used, text_bytes - (size_t)used, "%s%d", i == 0 ? "" : ",", team->ranks[i]);
    }
    (void)snprintf(text + used, text_bytes - (size_t)used, "]");
}

static void describe_change(const struct schedule *schedule, const struct operation *operation, char *text,
                            size_t text_bytes) {
    char team[TEAM_BYTES];
    char other[TEAM_BYTES + 32] = "";
    describe_team(schedule, operation->subject, team, sizeof team);
    if (operation->difference != DIFFERENCE_NONE) {
        const int used = snprintf(other, sizeof other, ", but rank %d ", operation->differs);
        describe_team(schedule, operation->other, other + used, sizeof other - (size_t)used);
    }
    (void)snprintf(text, text_bytes, "%s %s%s", operation->op == HORO_ADD_TEAM ? "add" : "remove", team, other);
}

void operation_describe(const struct schedule *schedule, const struct operation *operation, char *text,
                        size_t text_bytes) {
    static const char *const ops[HORO_OP_COUNT] = {
        [HORO_ALLREDUCE] = "allreduce", [HORO_ALLGATHER] = "allgather",         [HORO_BROADCAST] = "broadcast",
        [HORO_BARRIER] = "barrier",     [HORO_REDUCESCATTER] = "reducescatter",
        [HORO_ALLTOALL] = "alltoall",   [HORO_JOIN] = "join",
    };
    static const char *const differences[] = {"", ", another shape on rank ", ", another dtype on rank ",
                                             ", refused on rank "};
    if (operation_changes_teams(operation)) {
        describe_change(schedule, operation, text, text_bytes);
        return;
    }
    char who[16] = "";
    char team[TEAM_BYTES];
    describe_team(schedule, operation->team, team, sizeof team);
    if (operation->difference != DIFFERENCE_NONE) {
        (void)snprintf(who, sizeof who, "%d", operation->differs);
    }
    (void)snprintf(text, text_bytes,
                   "%s '%s' in %s (reduce op %d, dtype %d, %d tensors, the first of %lld, factors %g and %g%s%s)",
                   ops[operation->op], operation->name, team, operation->reduce_op, operation->dtype,
                   operation->tensor_count, (long long)operation->counts[0], operation->prescale, operation->postscale,
                   differences[operation->difference], who);
}
