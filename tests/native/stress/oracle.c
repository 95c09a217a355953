#include "oracle.h"

#include <stdlib.h>

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
    find_safe(oracle);
    return oracle->decided == NULL ? -1 : 0;
}

void oracle_free(struct oracle *oracle) {
    free(oracle->decided);
}

/* The victim has waited for all that it did before its last bunch, so a team that it is in has agreed on that. */
static int may_be_left(const struct oracle *oracle, int rank, const struct operation *operation, size_t bunch) {
    const struct schedule *schedule = oracle->schedule;
    return schedule->ending == ENDING_LEAVE &&
           (bunch >= schedule->victim_bunch ||
            (bunch >= oracle->safe[rank] && !team_has(&schedule->teams[operation->team], schedule->victim)));
}

/* What the dead rank has finished, others may be about to finish. */
static int may_be_lost(const struct oracle *oracle, int rank, size_t bunch) {
    return oracle->schedule->ending == ENDING_DEATH && bunch >= oracle->safe[rank];
}

enum verdict oracle_judge(struct oracle *oracle, int rank, size_t number, size_t bunch, int status) {
    const struct schedule *schedule = oracle->schedule;
    const struct operation *operation = &schedule->operations[number];
    const int decision = operation->difference == DIFFERENCE_NONE ? HORO_OK : HORO_ERR_MISMATCH;
    if (status == decision) {
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

int64_t oracle_find_torn(struct oracle *oracle) {
    const struct schedule *schedule = oracle->schedule;
    for (size_t i = 0; schedule->ending != ENDING_DEATH && i < schedule->operation_count; i++) {
        const struct team *team = &schedule->teams[schedule->operations[i].team];
        const int members = team->size - team_has(team, schedule->victim);
        const int decided = atomic_load(&oracle->decided[i]);
        if (decided != members && (decided != 0 || schedule->ending == ENDING_TOGETHER)) {
            return (int64_t)i;
        }
    }
    return -1;
}
