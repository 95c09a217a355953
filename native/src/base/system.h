/* Of the operating system: the process that owns something, threads, and descriptors that ranks share. */
#ifndef HR_BASE_SYSTEM_H
#define HR_BASE_SYSTEM_H

#include <pthread.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/status.h"

/* ---- Owner ---- */

/*
 * The process that something belongs to: its threads and locks do not exist in a forked child, though its memory does.
 * Asking costs no system call where the kernel can wipe a page at a fork (Linux 4.14).
 */

struct hr_owner {
    pid_t pid;
    volatile int *mark; /* in a page of its own: 1 here, 0 in a forked child; NULL: pid is compared instead */
};

/* Makes the calling process the owner. Cannot fail: without a page, asking is only slower. */
void hr_owner_init(struct hr_owner *owner);
/* In the owner only. */
void hr_owner_fini(struct hr_owner *owner);

/* Whether the calling process is the owner. */
int hr_owner_is_here(const struct hr_owner *owner);

/* ---- Threads ---- */

/* Starts a thread without signals: those are for the program's own. HORO_OK, or HORO_ERR_RESOURCE naming `what`. */
hr_status hr_thread_start(pthread_t *thread, void *(*run)(void *), void *arg, const char *what, struct hr_error *error);

/* A condition whose waits end at a time of hr_now_ns at the latest. */
void hr_condition_init(pthread_cond_t *condition);
void hr_condition_wait(pthread_cond_t *condition, pthread_mutex_t *lock, int64_t until_ns);

/* ---- Descriptors ---- */

/* Descriptors that ranks share. Both are closed in a process that this one becomes by exec. */

/*
 * A memfd of `bytes` zero bytes, which can grow but never shrink, so that no other process can take mapped pages away.
 * It has no name: the kernel frees it when its last descriptor and mapping are gone. HORO_OK or HORO_ERR_RESOURCE;
 * *descriptor is set on HORO_OK.
 */
hr_status hr_descriptor_memory(uint64_t bytes, int32_t *descriptor, struct hr_error *error);

/* A nonblocking eventfd at zero. HORO_OK or HORO_ERR_RESOURCE; *descriptor is set on HORO_OK. */
hr_status hr_descriptor_event(int32_t *descriptor, struct hr_error *error);

#endif
