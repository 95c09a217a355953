/* What is printed of a schedule that went wrong. */
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#include "rank.h"

enum { TEXT_BYTES = 768 };

void run_describe(const struct run *run) {
    static const char *const phases[] = {"begins",         "submits",       "runs", "waits for", "is gone since",
                                         "destroys after", "is over after"};
    for (int i = 0; i < run->schedule->size; i++) {
        const struct rank *rank = &run->ranks[i];
        const size_t number = atomic_load(&rank->operation);
        char text[TEXT_BYTES];
        operation_describe(run->schedule, &run->schedule->operations[number], text, sizeof text);
        (void)fprintf(stderr, "  rank %d %s operation %zu, %zu finished: %s\n", i, phases[atomic_load(&rank->phase)],
                      number, atomic_load(&rank->finished), text);
    }
}

void rank_fail(struct rank *rank, size_t operation, const char *format, ...) {
    if (atomic_exchange(&rank->run->failed, 1)) {
        for (;;) {
            (void)pause(); /* another rank ends the process */
        }
    }
    const struct schedule *schedule = rank->run->schedule;
    char text[TEXT_BYTES];
    operation_describe(schedule, &schedule->operations[operation], text, sizeof text);
    (void)fprintf(stderr, "stress: rank %d, operation %zu, %s: ", rank->number, operation, text);
    va_list arguments;
    va_start(arguments, format);
    (void)vfprintf(stderr, format, arguments);
    va_end(arguments);
    schedule_describe(schedule, text, sizeof text);
    (void)fprintf(stderr, "\n  %s\n", text);
    run_describe(rank->run);
    (void)fprintf(stderr, "again: %s\n", rank->run->replay);
    _exit(1);
}
