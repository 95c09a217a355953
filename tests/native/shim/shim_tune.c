#include "shim_tune.h"

#include <stdlib.h>
#include <string.h>

#include "engine/meter.h"
#include "engine/search.h"

struct shim_meter {
    struct hr_meter meter;
};

struct shim_search {
    struct hr_search search;
};

shim_meter *shim_meter_create(int steps) {
    shim_meter *self = calloc(1, sizeof *self);
    hr_meter_init(&self->meter, steps);
    return self;
}

void shim_meter_destroy(shim_meter *self) {
    free(self);
}

void shim_meter_restart(shim_meter *self) {
    hr_meter_restart(&self->meter);
}

double shim_meter_note(shim_meter *self, uint64_t name, uint64_t bytes, int64_t now_ns) {
    double cost;
    return hr_meter_note(&self->meter, name, bytes, now_ns, &cost) ? cost : -1;
}

shim_search *shim_search_create(const int *counts, const int *first, const int *defaults, int warmup, int most) {
    shim_search *self = calloc(1, sizeof *self);
    struct hr_search_config config = {.warmup = warmup, .most = most};
    memcpy(config.counts, counts, sizeof config.counts);
    memcpy(config.first.index, first, sizeof config.first.index);
    memcpy(config.defaults.index, defaults, sizeof config.defaults.index);
    hr_search_init(&self->search, &config);
    return self;
}

void shim_search_destroy(shim_search *self) {
    free(self);
}

const char *shim_search_point(const shim_search *self, int *point) {
    memcpy(point, self->search.point.index, sizeof self->search.point.index);
    return hr_search_stage_name(self->search.stage);
}

void shim_search_note(shim_search *self, double cost) {
    hr_search_note(&self->search, cost);
}

int shim_search_measured(const shim_search *self) {
    return self->search.measured;
}
