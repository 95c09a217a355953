/*
 * Messages for whoever runs the job. Where the caller takes them for a log of its own, they wait in a queue until it
 * has; else, and where it does not come, they are lines on stderr: "horo [rank] level: text". One write per line, so
 * lines of several ranks never mix.
 */
#ifndef HR_BASE_LOG_H
#define HR_BASE_LOG_H

#include <stdatomic.h>

#include "horo.h"

/* Room in the queue for so many messages, and what each may have, with its terminator. */
enum { HR_LOG_QUEUE_LINES = 64, HR_LOG_TEXT_BYTES = 2 * HORO_MESSAGE_MAX - 64 };

struct hr_log {
    int level; /* enum horo_log_level: lines below it are dropped, but a queue gets them */
    int rank;
    struct horo_log_queue *queue; /* the caller's, which outlives this; NULL: none */
};

void hr_log(const struct hr_log *log, int level, const char *format, ...) __attribute__((format(printf, 3, 4)));

/*
 * Another rank asks where the program of this one stands: whoever takes that from the queue finds out and logs it, and
 * *answered becomes `question` when it is taken. Nothing without a queue. Afterwards hr_log_end must come before
 * *answered is gone.
 */
void hr_log_ask(const struct hr_log *log, _Atomic uint32_t *answered, uint32_t question);
void hr_log_end(const struct hr_log *log, const _Atomic uint32_t *answered);

/*
 * Writes the queue to stderr where nobody has taken a message for seconds: a call of the program keeps the interpreter,
 * or a log handler hangs. Returns when to come again; 0: nothing waits. To be called whenever the engine looks round.
 */
int64_t hr_log_check(const struct hr_log *log, int64_t now_ns);

#endif
