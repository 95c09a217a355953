/* The autotuner's parts for tests: the meter, and the search. */
#ifndef SHIM_TUNE_H
#define SHIM_TUNE_H

/* cffi: skip */
#include <stdint.h>
/* cffi: end */

typedef struct shim_meter shim_meter;
typedef struct shim_search shim_search;

shim_meter *shim_meter_create(int steps);
void shim_meter_destroy(shim_meter *self);
void shim_meter_restart(shim_meter *self);
/* Nanoseconds per byte where a sample is complete, else -1. */
double shim_meter_note(shim_meter *self, uint64_t name, uint64_t bytes, int64_t now_ns);

/* counts, first and defaults have 8 values. */
shim_search *shim_search_create(const int *counts, const int *first, const int *defaults, int warmup, int most);
void shim_search_destroy(shim_search *self);
/* The name of the stage, with the 8 indices of the point to be measured. */
const char *shim_search_point(const shim_search *self, int *point);
void shim_search_note(shim_search *self, double cost);
int shim_search_measured(const shim_search *self);

#endif
