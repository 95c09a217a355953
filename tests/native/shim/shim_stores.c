#include "shim.h"

#include <stdlib.h>

#include "engine/engine.h"
#include "collective/fused.h"

/* The beginning of struct horo_context, see context.c. */
struct head {
    struct hr_node node;
    struct hr_engine engine;
};

static const struct hr_team *world_of(const void *context) {
    const struct head *head = context;
    return head->engine.lanes[0]->team;
}

int64_t shim_stores_scatter_cost(const void *context) {
    return world_of(context)->scatter_stores.of[HR_STORE_ORDINARY];
}

struct shim_stores {
    struct hr_store_costs costs;
    struct hr_store_trial trial;
};

shim_stores *shim_stores_create(void) {
    return calloc(1, sizeof(struct shim_stores));
}

void shim_stores_destroy(shim_stores *self) {
    free(self);
}

int shim_stores_try(shim_stores *self, size_t bytes) {
    self->trial = hr_store_try(&self->costs, bytes);
    return self->trial.store == HR_STORE_STREAM;
}

void shim_stores_learn(shim_stores *self, int64_t elapsed_ns) {
    hr_store_learn(&self->trial, elapsed_ns);
}
