/* Threads of horo's own, and what they wait for. */
#ifndef HR_BASE_THREAD_H
#define HR_BASE_THREAD_H

#include <pthread.h>
#include <stdint.h>

#include "base/status.h"

/*
 * Starts a thread that gets no signals: those belong to the program's own threads. HORO_OK, or HORO_ERR_RESOURCE with
 * a sentence that names `what`.
 */
hr_status hr_thread_start(pthread_t *thread, void *(*run)(void *), void *arg, const char *what, struct hr_error *error);

/* A condition whose waits end at a time of hr_now_ns at the latest. */
void hr_condition_init(pthread_cond_t *condition);
void hr_condition_wait(pthread_cond_t *condition, pthread_mutex_t *lock, int64_t until_ns);

#endif
