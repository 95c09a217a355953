/* Messages that wait for the caller of the core, see horo_log.h. Any thread. */
#ifndef HR_BASE_LOG_QUEUE_H
#define HR_BASE_LOG_QUEUE_H

#include "horo_log.h"

/* Room for so many messages, and what each may have, with its terminator. */
enum { HR_LOG_QUEUE_LINES = 64, HR_LOG_TEXT_BYTES = 2 * HORO_MESSAGE_MAX - 64 };

/*
 * 1 if the message will be taken, or written to stderr if it cannot be; 0 if the queue takes no more: it has been
 * stopped, or belongs to the process that this one was forked from. One below `shown_from` is never written to stderr.
 */
int hr_log_queue_put(struct horo_log_queue *queue, int rank, int shown_from, int level, const char *text);

/* As hr_log_check. */
int64_t hr_log_queue_check(struct horo_log_queue *queue, int64_t now_ns);

#endif
