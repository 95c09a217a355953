#include "engine/meter.h"

#include <stdlib.h>
#include <string.h>

enum {
    SEEN_ENOUGH = 3,  /* so often: it comes again and again */
    SEEN_AGAIN = 2,   /* meanwhile others of every step have come so often */
    STEPS_WITHOUT = 4, /* as many bytes as these have without the anchor: it does not come any more */
};

void hr_meter_init(struct hr_meter *meter, int steps) {
    memset(meter, 0, sizeof *meter);
    meter->steps = steps;
}

void hr_meter_restart(struct hr_meter *meter) {
    meter->count = 0;
    meter->skipped = HR_METER_SKIPPED;
}

static void forget_anchor(struct hr_meter *meter) {
    memset(meter->names, 0, sizeof meter->names);
    meter->anchor = 0;
    meter->bytes = 0;
    meter->step_bytes = 0;
    meter->count = 0;
    meter->skipped = 0;
}

/* The place of a key, where there is none and no room NULL. */
static struct hr_meter_name *find(struct hr_meter *meter, uint64_t key) {
    for (size_t i = 0; i < HR_METER_NAMES; i++) {
        struct hr_meter_name *name = &meter->names[(key + i) % HR_METER_NAMES];
        if (name->key == key || name->key == 0) {
            return name;
        }
    }
    return NULL;
}

/*
 * The largest that has come again; 0: what has come again is less than half of all bytes, so the first steps are not
 * over, or what comes before them (the parameters, sent once) still outweighs them.
 */
static uint64_t largest_that_repeats(const struct hr_meter *meter) {
    const struct hr_meter_name *largest = NULL;
    double repeated = 0;
    for (size_t i = 0; i < HR_METER_NAMES; i++) {
        const struct hr_meter_name *name = &meter->names[i];
        if (name->seen < SEEN_AGAIN) {
            continue;
        }
        repeated += (double)name->bytes * name->seen;
        largest = largest == NULL || name->bytes > largest->bytes ? name : largest;
    }
    return largest == NULL || 2 * repeated < (double)meter->bytes ? 0 : largest->key;
}

static void look_for_anchor(struct hr_meter *meter, uint64_t key, uint64_t bytes) {
    struct hr_meter_name *name = find(meter, key);
    if (name == NULL) { /* of so many names none has come three times */
        forget_anchor(meter);
        return;
    }
    name->key = key;
    name->bytes = bytes;
    if (++name->seen >= SEEN_ENOUGH) {
        meter->anchor = largest_that_repeats(meter);
    }
    if (meter->anchor != 0) {
        meter->skipped = 1; /* up to its next appearance it is no whole step */
        meter->step_bytes = meter->bytes; /* all so far: a step has no more */
        meter->bytes = 0;
    }
}

static int compare(const void *one, const void *other) {
    const double a = *(const double *)one;
    const double b = *(const double *)other;
    return (a > b) - (a < b);
}

/* The step that ends now. */
static int end_step(struct hr_meter *meter, int64_t now_ns, double *cost) {
    const int64_t took_ns = now_ns - meter->step_ns;
    const uint64_t bytes = meter->bytes;
    meter->step_ns = now_ns;
    meter->bytes = 0;
    if (meter->skipped > 0) { /* perhaps with a few of its bytes only */
        meter->skipped--;
        return 0;
    }
    meter->step_bytes = bytes;
    meter->costs[meter->count++] = (double)(took_ns > 0 ? took_ns : 1) / (double)bytes;
    if (meter->count < meter->steps) {
        return 0;
    }
    qsort(meter->costs, (size_t)meter->count, sizeof meter->costs[0], compare);
    *cost = (meter->costs[(meter->count - 1) / 2] + meter->costs[meter->count / 2]) / 2;
    meter->count = 0;
    return 1;
}

int hr_meter_note(struct hr_meter *meter, uint64_t name, uint64_t bytes, int64_t now_ns, double *cost) {
    if (bytes == 0) {
        return 0;
    }
    const uint64_t key = name != 0 ? name : bytes;
    meter->bytes += bytes;
    if (meter->anchor == 0) {
        look_for_anchor(meter, key, bytes);
        return 0;
    }
    if (key == meter->anchor) {
        return end_step(meter, now_ns, cost);
    }
    if (meter->bytes / STEPS_WITHOUT > meter->step_bytes) {
        forget_anchor(meter);
    }
    return 0;
}
