#include "base/thread.h"

#include <signal.h>
#include <string.h>
#include <time.h>

hr_status hr_thread_start(pthread_t *thread, void *(*run)(void *), void *arg, const char *what,
                          struct hr_error *error) {
    sigset_t all;
    sigset_t before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    const int status = pthread_create(thread, NULL, run, arg);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return status == 0 ? HORO_OK
                       : hr_fail(error, HORO_ERR_RESOURCE, "cannot start %s: %s", what, strerror(status));
}

void hr_condition_init(pthread_cond_t *condition) {
    pthread_condattr_t attributes;
    (void)pthread_condattr_init(&attributes);
    (void)pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    (void)pthread_cond_init(condition, &attributes);
    (void)pthread_condattr_destroy(&attributes);
}

void hr_condition_wait(pthread_cond_t *condition, pthread_mutex_t *lock, int64_t until_ns) {
    const struct timespec until = {.tv_sec = until_ns / 1000000000, .tv_nsec = until_ns % 1000000000};
    (void)pthread_cond_timedwait(condition, lock, &until);
}
