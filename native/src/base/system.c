#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/system.h"

/* ---- Owner ---- */

#ifndef MADV_WIPEONFORK /* in glibc since 2.27, in the kernel since 4.14 */
#define MADV_WIPEONFORK 18
#endif

static size_t page_bytes(void) {
    return (size_t)sysconf(_SC_PAGESIZE);
}

void hr_owner_init(struct hr_owner *owner) {
    *owner = (struct hr_owner){.pid = getpid()};
    void *page = mmap(NULL, page_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page != MAP_FAILED && madvise(page, page_bytes(), MADV_WIPEONFORK) != 0) {
        (void)munmap(page, page_bytes());
    } else if (page != MAP_FAILED) {
        owner->mark = page;
        *owner->mark = 1;
    }
}

void hr_owner_fini(struct hr_owner *owner) {
    if (owner->mark != NULL) {
        (void)munmap((void *)owner->mark, page_bytes());
        owner->mark = NULL;
    }
}

int hr_owner_is_here(const struct hr_owner *owner) {
    return owner->mark != NULL ? *owner->mark : getpid() == owner->pid;
}

/* ---- Threads ---- */

hr_status hr_thread_start(pthread_t *thread, void *(*run)(void *), void *arg, const char *what,
                          struct hr_error *error) {
    sigset_t all, before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    const int status = pthread_create(thread, NULL, run, arg);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return status == 0 ? HORO_OK : hr_fail(error, HORO_ERR_RESOURCE, "cannot start %s: %s", what, strerror(status));
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

/* ---- Descriptors ---- */

/* Older headers lack these, as those of conda's compilers and glibc before 2.27; the kernel has them since 3.17. */
#ifndef MFD_CLOEXEC
#define MFD_CLOEXEC 0x0001U
#define MFD_ALLOW_SEALING 0x0002U
#endif
#ifndef SYS_memfd_create
#if defined(__x86_64__)
#define SYS_memfd_create 319
#elif defined(__aarch64__)
#define SYS_memfd_create 279
#endif
#endif
#ifndef F_ADD_SEALS
#define F_ADD_SEALS 1033
#define F_SEAL_SEAL 0x0001
#define F_SEAL_SHRINK 0x0002
#endif

hr_status hr_descriptor_memory(uint64_t bytes, int32_t *descriptor, struct hr_error *error) {
    const int memory = (int)syscall(SYS_memfd_create, "horo-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (memory < 0) {
        return hr_fail(error, HORO_ERR_RESOURCE, "cannot create shared memory (memfd_create): %s", strerror(errno));
    }
    if (ftruncate(memory, (off_t)bytes) != 0 || fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL) != 0) {
        const int reason = errno;
        (void)close(memory);
        return hr_fail(error, HORO_ERR_RESOURCE, "cannot create %llu bytes of shared memory: %s",
                       (unsigned long long)bytes, strerror(reason));
    }
    *descriptor = memory;
    return HORO_OK;
}

hr_status hr_descriptor_event(int32_t *descriptor, struct hr_error *error) {
    const int event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (event < 0) {
        return hr_fail(error, HORO_ERR_RESOURCE, "cannot create an eventfd: %s", strerror(errno));
    }
    *descriptor = event;
    return HORO_OK;
}
