/* The log with a queue of the caller's, for tests. */
#ifndef SHIM_LOG_H
#define SHIM_LOG_H

#include "horo_log.h"

/* Rank 3 writes this message of this level; `shown_from` is its own least severe level for stderr. */
void shim_log(horo_log_queue *queue, int shown_from, int level, const char *text);
/* What the engine does when it looks round `later_ns` from now. In how many ns it is to come again; 0: never. */
int64_t shim_log_check(horo_log_queue *queue, int64_t later_ns);
int shim_log_capacity(void);

#endif
