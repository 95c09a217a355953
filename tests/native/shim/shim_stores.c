#include "shim_stores.h"

#include "engine/engine.h"

/* The beginning of struct horo_context, see context.c. */
struct head {
    struct hr_node node;
    struct hr_engine engine;
};

static const struct hr_team *world_of(const void *context) {
    const struct head *head = context;
    return hr_engine_world(&head->engine)->team;
}

int64_t shim_stores_scatter_cost(const void *context) {
    return world_of(context)->scatter_stores.of[HR_STORE_ORDINARY];
}
