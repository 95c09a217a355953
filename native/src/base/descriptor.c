#include "base/descriptor.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/*
 * glibc has memfd_create since 2.27 only, and older headers, as those of conda's compilers, lack what belongs to it.
 * The kernel has all of it since 3.17.
 */
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
