/* Threads of horo's own. */
#ifndef HR_BASE_THREAD_H
#define HR_BASE_THREAD_H

#include <pthread.h>

#include "base/status.h"

/*
 * Starts a thread that gets no signals: those belong to the program's own threads. HORO_OK, or HORO_ERR_RESOURCE with
 * a sentence that names `what`.
 */
hr_status hr_thread_start(pthread_t *thread, void *(*run)(void *), void *arg, const char *what, struct hr_error *error);

#endif
