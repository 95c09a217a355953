#include "engine/tuner.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { ROW_BYTES = 512 };

/* ---- The values of the knobs ---- */

/* Keeps them ascending, each once. */
static void insert(uint64_t *values, int *count, uint64_t value) {
    int at = 0;
    while (at < *count && values[at] < value) {
        at++;
    }
    if ((at < *count && values[at] == value) || *count == HR_SEARCH_VALUES_MAX) {
        return;
    }
    memmove(&values[at + 1], &values[at], (size_t)(*count - at) * sizeof *values);
    values[at] = value;
    (*count)++;
}

static int index_of(const uint64_t *values, int count, uint64_t value) {
    int at = 0;
    while (at < count - 1 && values[at] != value) {
        at++;
    }
    return at;
}

void hr_tuner_init(struct hr_tuner *tuner, const horo_autotune *autotune, const uint64_t *start,
                   const uint64_t *defaults, const struct hr_knob_range *ranges) {
    struct hr_search_config config = {.warmup = autotune->warmup_samples, .most = autotune->max_samples};
    *tuner = (struct hr_tuner){.log_fd = -1, .random = autotune->shuffle};
    for (int k = 0; k < HORO_KNOB_COUNT; k++) {
        uint64_t *values = tuner->values[k];
        int *count = &config.counts[k];
        insert(values, count, start[k]);
        insert(values, count, defaults[k]);
        for (uint64_t value = ranges[k].low; value > 0 && value <= ranges[k].high; value *= 2) {
            insert(values, count, value);
        }
        config.first.index[k] = index_of(values, *count, start[k]);
        config.defaults.index[k] = index_of(values, *count, defaults[k]);
    }
    hr_search_init(&tuner->search, &config);
    hr_meter_init(&tuner->meter, autotune->steps_per_sample);
}

static void values_of(const struct hr_tuner *tuner, const struct hr_search_point *point, uint64_t *values) {
    for (int k = 0; k < HORO_KNOB_COUNT; k++) {
        values[k] = tuner->values[k][point->index[k]];
    }
}

void hr_tuner_values(const struct hr_tuner *tuner, uint64_t *values) {
    values_of(tuner, &tuner->search.point, values);
}

/* ---- The log ---- */

void hr_tuner_close_log(struct hr_tuner *tuner) {
    if (tuner->log_fd >= 0) {
        (void)close(tuner->log_fd);
        tuner->log_fd = -1;
    }
}

/* Each row in one write, so that whoever reads sees whole ones; a log that cannot be written ends there. */
static void write_text(struct hr_tuner *tuner, const char *text) {
    const size_t bytes = strlen(text);
    if (tuner->log_fd >= 0 && write(tuner->log_fd, text, bytes) != (ssize_t)bytes) {
        hr_tuner_close_log(tuner);
    }
}

void hr_tuner_own_log(struct hr_tuner *tuner, int fd) {
    tuner->log_fd = fd;
    write_text(tuner, "sample,stage,segment_bytes,piece_bytes,sockets_per_peer,tensor_fusion_threshold,doubling_bytes,"
                      "carried_bytes,cycle_time_ms,overlap,score\n");
}

/* The score is bytes per microsecond, as Horovod's. */
static void write_row(struct hr_tuner *tuner, const char *stage, const struct hr_search_point *point, double cost) {
    static const char *const overlaps[] = {"", "never", "always"};
    uint64_t v[HORO_KNOB_COUNT];
    char row[ROW_BYTES];
    values_of(tuner, point, v);
    (void)snprintf(row, sizeof row, "%d,%s,%llu,%llu,%llu,%llu,%llu,%llu,%.3f,%s,%.6g\n", tuner->samples, stage,
                   (unsigned long long)v[HORO_KNOB_SEGMENT], (unsigned long long)v[HORO_KNOB_PIECE],
                   (unsigned long long)v[HORO_KNOB_SOCKETS], (unsigned long long)v[HORO_KNOB_FUSION],
                   (unsigned long long)v[HORO_KNOB_DOUBLING], (unsigned long long)v[HORO_KNOB_CARRIED],
                   (double)v[HORO_KNOB_CYCLE] / 1000, overlaps[v[HORO_KNOB_OVERLAP] % 3], 1000 / cost);
    write_text(tuner, row);
}

/* ---- Samples ---- */

static uint64_t draw(struct hr_tuner *tuner, uint64_t below) {
    tuner->random = tuner->random * 6364136223846793005u + 1442695040888963407u; /* Knuth's MMIX generator */
    return (tuner->random >> 33) % below;
}

static int shuffle(struct hr_tuner *tuner) {
    for (int k = 0; k < HORO_KNOB_COUNT; k++) {
        tuner->search.point.index[k] = (int)draw(tuner, (uint64_t)tuner->search.config.counts[k]);
    }
    tuner->waits = 1;
    return 1;
}

static int end_sample(struct hr_tuner *tuner, double cost) {
    struct hr_search *search = &tuner->search;
    const struct hr_search_point before = search->point;
    tuner->samples++;
    write_row(tuner, hr_search_stage_name(search->stage), &before, cost);
    hr_search_note(search, cost);
    if (hr_tuner_is_done(tuner)) {
        write_row(tuner, hr_search_stage_name(search->stage), &search->point, search->winner_cost);
        hr_tuner_close_log(tuner);
    } else if (memcmp(&before, &search->point, sizeof before) == 0) {
        return 0;
    }
    tuner->waits = 1;
    return 1;
}

int hr_tuner_note(struct hr_tuner *tuner, uint64_t name, uint64_t bytes, int64_t now_ns) {
    double cost;
    if (tuner->waits) {
        return 0;
    }
    if (tuner->random != 0) {
        return shuffle(tuner);
    }
    return hr_meter_note(&tuner->meter, name, bytes, now_ns, &cost) ? end_sample(tuner, cost) : 0;
}

void hr_tuner_begin_point(struct hr_tuner *tuner) {
    tuner->waits = 0;
    hr_meter_restart(&tuner->meter);
}
