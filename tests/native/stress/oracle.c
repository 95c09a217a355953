#include "oracle.h"

#include <stdlib.h>

#include "joins.h"

/* What is done in a bunch by ranks that the victim has worked with later on, before it went, was over by then. */
static void find_safe(struct oracle *oracle) {
    const struct schedule *schedule = oracle->schedule;
    for (size_t b = 0; schedule->ending != ENDING_TOGETHER && b < schedule->victim_bunch; b++) {
        for (size_t i = schedule->bunches[b].first; i < schedule->bunches[b].first + schedule->bunches[b].count; i++) {
            const struct team *team = &schedule->teams[schedule->operations[i].team];
            for (int m = 0; m < team->size && team_has(team, schedule->victim); m++) {
                oracle->safe[team->ranks[m]] = b;
            }
        }
    }
}

int oracle_init(struct oracle *oracle, const struct schedule *schedule) {
    *oracle = (struct oracle){.schedule = schedule};
    oracle->decided = calloc(schedule->operation_count, sizeof *oracle->decided);
    oracle->ends = calloc(schedule->operation_count, sizeof *oracle->ends);
    find_safe(oracle);
    for (size_t i = 0; i < schedule->operation_count && oracle->ends != NULL; i++) {
        atomic_store(&oracle->ends[i], 1);
    }
    return oracle->decided == NULL || oracle->ends == NULL ? -1 : 0;
}

void oracle_free(struct oracle *oracle) {
    free(oracle->decided);
    free(oracle->ends);
}

/* The victim has waited for all that it did before its last bunch: all ranks have agreed on what they did with it. */
static int may_be_left(const struct oracle *oracle, int rank, const struct operation *operation, size_t bunch) {
    const struct schedule *schedule = oracle->schedule;
    return schedule->ending == ENDING_LEAVE &&
           (bunch >= schedule->victim_bunch || (bunch >= oracle->safe[rank] && operation->team != 0));
}

/* What the dead rank has finished, others may be about to finish. */
static int may_be_lost(const struct oracle *oracle, int rank, size_t bunch) {
    return oracle->schedule->ending == ENDING_DEATH && bunch >= oracle->safe[rank];
}

enum verdict oracle_judge(struct oracle *oracle, int rank, size_t number, size_t bunch, int status) {
    const struct schedule *schedule = oracle->schedule;
    const struct operation *operation = &schedule->operations[number];
    if (joins_may_end(schedule, operation, rank, status)) {
        int first = 1;
        if (operation->difference == DIFFERENCE_REFUSED && operation->differs == rank) {
            return GOES_ON; /* it has not waited for the others */
        }
        if (!atomic_compare_exchange_strong(&oracle->ends[number], &first, status) && first != status) {
            return IS_WRONG;
        }
        if (rank != schedule->victim) {
            atomic_fetch_add(&oracle->decided[number], 1);
        }
        return GOES_ON;
    }
    if ((status == HORO_ERR_ABORTED && may_be_left(oracle, rank, operation, bunch)) ||
        (status == HORO_ERR_PEER_LOST && may_be_lost(oracle, rank, bunch))) {
        return HAS_ENDED;
    }
    return IS_WRONG;
}

int oracle_number_is_right(struct oracle *oracle, int team, int number) {
    int first = 0;
    return atomic_compare_exchange_strong(&oracle->numbers[team], &first, number) ? number > 0 : number == first;
}

int oracle_last_is_right(struct oracle *oracle, int join, int rank) {
    int first = 0;
    return rank >= 0 && team_has(&oracle->schedule->teams[oracle->schedule->joins[join].team], rank) &&
           (atomic_compare_exchange_strong(&oracle->joined[join], &first, rank + 1) || rank + 1 == first);
}

int64_t oracle_find_torn(struct oracle *oracle) {
    const struct schedule *schedule = oracle->schedule;
    for (size_t i = 0; schedule->ending != ENDING_DEATH && i < schedule->operation_count; i++) {
        const struct operation *operation = &schedule->operations[i];
        struct team active;
        joins_list(schedule, operation, &active);
        const int refuser = operation->difference == DIFFERENCE_REFUSED ? operation->differs : schedule->victim;
        const int is_another = refuser != schedule->victim && team_has(&active, refuser);
        const int members = active.size - team_has(&active, schedule->victim) - is_another;
        const int decided = atomic_load(&oracle->decided[i]);
        const int may_be_torn = schedule->ending == ENDING_LEAVE && operation->team != 0;
        if (decided != members && !may_be_torn && (decided != 0 || schedule->ending == ENDING_TOGETHER)) {
            return (int64_t)i;
        }
    }
    return -1;
}
