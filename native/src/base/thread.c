#include "base/thread.h"

#include <signal.h>
#include <string.h>

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
