/*
 * A double of the system call process_vm_readv, to be loaded before libc (LD_PRELOAD).
 *
 *     REFUSED  error number with which calls end, from number AFTER on (0: none does)
 *     PIECE    most bytes read by one call; 0: all
 *     FORGES   1: the last bytes that a call reads are not those of that process
 *     HELD     call of this number waits, before it reads, until the fifo $HELD_BY is opened and closed by a writer
 */
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef REFUSED
#define REFUSED 0
#endif
#ifndef AFTER
#define AFTER 0
#endif
#ifndef PIECE
#define PIECE 0
#endif
#ifndef FORGES
#define FORGES 0
#endif
#ifndef HELD
#define HELD (-1)
#endif

static void hold(void) {
    char byte;
    const int fifo = open(getenv("HELD_BY"), O_RDONLY);
    while (read(fifo, &byte, 1) > 0) {
    }
    (void)close(fifo);
}

ssize_t process_vm_readv(pid_t process, const struct iovec *local, unsigned long local_count,
                         const struct iovec *remote, unsigned long remote_count, unsigned long flags) {
    static atomic_int calls;
    const int number = atomic_fetch_add(&calls, 1);
    if (number == HELD) {
        hold();
    }
    if (REFUSED != 0 && number >= AFTER) {
        errno = REFUSED;
        return -1;
    }
    struct iovec first = local[0];
    if (PIECE != 0) {
        first.iov_len = first.iov_len < PIECE ? first.iov_len : PIECE;
        local = &first;
        local_count = 1;
    }
    const long got = syscall(SYS_process_vm_readv, process, local, local_count, remote, remote_count, flags);
    if (FORGES && got > 0) {
        const struct iovec *last = &local[local_count - 1];
        ((char *)last->iov_base)[last->iov_len - 1] ^= 1;
    }
    return got;
}
