#include "collective/segment.h"

enum {
    STREAM_WORTH_BYTES = 1 << 18, /* below it, what was stored is still in the cache when it is read */
    TRY_OTHER_EVERY = 64,
    SMOOTHING = 8,
};

enum hr_store hr_store_choose(struct hr_group *group, size_t bytes) {
    if (bytes < STREAM_WORTH_BYTES) {
        return HR_STORE_ORDINARY;
    }
    for (int store = 0; store < 2; store++) {
        if (group->store_cost[store] == 0) {
            return (enum hr_store)store;
        }
    }
    const int cheaper = group->store_cost[HR_STORE_STREAM] < group->store_cost[HR_STORE_ORDINARY];
    return (enum hr_store)(++group->store_choices % TRY_OTHER_EVERY == 0 ? !cheaper : cheaper);
}

void hr_store_learn(struct hr_group *group, enum hr_store store, size_t bytes, int64_t elapsed_ns) {
    if (bytes < STREAM_WORTH_BYTES) {
        return;
    }
    const int64_t cost = elapsed_ns * 1000 / (int64_t)bytes + 1;
    int64_t *smoothed = &group->store_cost[store];
    *smoothed = *smoothed == 0 ? cost : (*smoothed * (SMOOTHING - 1) + cost) / SMOOTHING;
}
