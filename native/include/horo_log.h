/* horo_log.h: the part of the native core's surface that hands its messages to a log of the caller's. */
#ifndef HORO_LOG_H
#define HORO_LOG_H

/* cffi: skip */
#include "horo.h"
/* cffi: end */

typedef struct horo_log_queue horo_log_queue;

/*
 * Messages of contexts for a log of the caller's. A thread of its own waits in horo_await_line until there is one,
 * HORO_OK, or until horo_stop_log_queue, HORO_ERR_ABORTED once none is left; then takes it, HORO_OK, or finds that it
 * is gone, HORO_IN_PROGRESS: what nobody takes for seconds is written to stderr by the engine, and so is what does not
 * fit, what comes after the stop, and what is left at the end. NULL, which is a queue without messages that has been
 * stopped: out of memory. No context may use the queue when it is destroyed, and no thread.
 */
HORO_API horo_log_queue *horo_create_log_queue(void);
HORO_API int horo_await_line(horo_log_queue *queue);
/*
 * Never blocks. *level is an enum horo_log_level, or HORO_LOG_QUESTION: another rank waits for this one, and asks where
 * its program stands, which is to be logged.
 */
enum { HORO_LOG_QUESTION = -1 };
HORO_API int horo_take_line(horo_log_queue *queue, int32_t *rank, int32_t *level, char *text, size_t text_bytes);
HORO_API void horo_stop_log_queue(horo_log_queue *queue);
HORO_API void horo_destroy_log_queue(horo_log_queue *queue);

#endif
