#include "local/shares.h"

enum {
    WARM_UP = 4,                  /* the first passes pay for page faults and tell nothing */
    TRY_OTHER_EVERY = 256,
    FALL_SHIFT = 1, /* a quick pass shows what is possible: it counts for half */
    /* a slow one may have been interrupted: it counts for an eighth, and for no more than twice the last estimate */
    RISE_SHIFT = 3,
};

enum hr_store hr_store_choose(const struct hr_team *team, const struct hr_store_costs *costs, size_t bytes) {
    if (bytes < team->tuning.stream || costs->passes < WARM_UP) {
        return HR_STORE_ORDINARY;
    }
    for (int store = 0; store < 2; store++) {
        if (costs->of[store] == 0) {
            return (enum hr_store)store;
        }
    }
    /* Streaming pays several times over where it pays; a small lead is noise. */
    const int cheaper = costs->of[HR_STORE_STREAM] * 4 < costs->of[HR_STORE_ORDINARY] * 3;
    return (enum hr_store)(costs->passes % TRY_OTHER_EVERY == 0 ? !cheaper : cheaper);
}

void hr_store_learn(struct hr_store_costs *costs, enum hr_store store, size_t bytes, int64_t elapsed_ns) {
    if (++costs->passes <= WARM_UP) {
        return;
    }
    const int64_t cost = elapsed_ns * 1000 / (int64_t)bytes + 1;
    int64_t *estimate = &costs->of[store];
    if (*estimate == 0) {
        *estimate = cost;
    } else if (cost < *estimate) {
        *estimate -= (*estimate - cost) >> FALL_SHIFT;
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
