#include "local/shares.h"

enum {
    WARM_UP = 2, /* the first operations pay for page faults and tell nothing */
    FIRST_TRIES = 8,
    TRY_OTHER_EVERY = 251, /* a prime, so that it comes to operations of all sizes of a step */
    /* a slow one may have been interrupted: it counts for an eighth, and for no more than twice the last estimate */
    RISE_SHIFT = 3,
};

struct hr_store_trial hr_store_try(struct hr_store_costs *costs, size_t bytes) {
    struct hr_store_trial trial = {.costs = costs, .bytes = bytes, .store = HR_STORE_ORDINARY};
    const uint64_t number = costs->operations;
    if (number >= WARM_UP + FIRST_TRIES) {
        /* Streaming pays several times over where it pays; a small lead is noise. */
        const enum hr_store cheaper =
            costs->of[HR_STORE_STREAM] * 4 < costs->of[HR_STORE_ORDINARY] * 3 ? HR_STORE_STREAM : HR_STORE_ORDINARY;
        trial.store = number % TRY_OTHER_EVERY == 0 ? (enum hr_store)!cheaper : cheaper;
    } else if (number >= WARM_UP) {
        trial.store = number / 2 % 2 == 0 ? HR_STORE_ORDINARY : HR_STORE_STREAM; /* in pairs: of two sizes in turn */
    }
    return trial;
}

void hr_store_learn(const struct hr_store_trial *trial, int64_t elapsed_ns) {
    if (trial->costs->operations++ < WARM_UP) {
        return;
    }
    const int64_t cost = elapsed_ns * 1000 / (int64_t)trial->bytes + 1;
    int64_t *estimate = &trial->costs->of[trial->store];
    if (*estimate == 0 || cost < *estimate) { /* a quick operation shows what is possible */
        *estimate = cost;
    } else {
        const int64_t rise = cost < 2 * *estimate ? cost - *estimate : *estimate;
        *estimate += (rise >> RISE_SHIFT) + 1;
    }
}

enum hr_store hr_store_choose_for_move(const struct hr_team *team, size_t bytes) {
    const int64_t *of = team->allreduce_stores.of;
    const int is_dear = of[HR_STORE_ORDINARY] > 0 && of[HR_STORE_STREAM] * 3 > of[HR_STORE_ORDINARY] * 4;
    const int is_small = bytes < team->tuning.moved_stream;
    return team->host_count > 1 || is_small || is_dear ? HR_STORE_ORDINARY : HR_STORE_STREAM;
}
