#include "node/peer_memory.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>
#include <sys/uio.h>
#include <unistd.h>

void hr_peer_memory_show(struct hr_node *node) {
    struct hr_arena_block *block = &node->arena.blocks[node->local_rank];
    if (getrandom(node->proof, sizeof node->proof, GRND_NONBLOCK) != (ssize_t)sizeof node->proof) {
        return;
    }
    for (int i = 0; i < HR_PROOF_WORDS; i++) {
        atomic_store(&block->proof[i], node->proof[i]);
    }
    atomic_store(&block->proof_at, (uint64_t)(uintptr_t)node->proof);
    atomic_store(&block->process, (int32_t)getpid());
}

/* 0, or an error number. */
static int read_all(pid_t process, struct iovec *local, struct iovec *remote, int count) {
    while (count > 0) {
        const ssize_t got = process_vm_readv(process, local, (unsigned long)count, remote, (unsigned long)count, 0);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            return got < 0 ? errno : EFAULT;
        }
        size_t left = (size_t)got;
        for (; count > 0 && left >= local->iov_len; local++, remote++, count--) {
            left -= local->iov_len;
        }
        if (count > 0) { /* the rest of this range */
            local->iov_base = (char *)local->iov_base + left;
            remote->iov_base = (char *)remote->iov_base + left;
            local->iov_len -= left;
            remote->iov_len = local->iov_len;
        }
    }
    return 0;
}

int hr_peer_memory_read(const struct hr_node *node, int local_rank, const struct hr_peer_range *ranges, int count) {
    const struct hr_arena_block *block = &node->arena.blocks[local_rank];
    struct iovec local[HR_PEER_RANGES_MAX + 1];
    struct iovec remote[HR_PEER_RANGES_MAX + 1];
    uint64_t proof[HR_PROOF_WORDS] = {0};
    const int32_t process = atomic_load(&block->process);
    if (process == 0) {
        return ENOSYS;
    }
    for (int i = 0; i < count; i++) {
        local[i] = (struct iovec){ranges[i].to, ranges[i].bytes};
        remote[i] = (struct iovec){(void *)(uintptr_t)ranges[i].from, ranges[i].bytes};
    }
    local[count] = (struct iovec){proof, sizeof proof};
    remote[count] = (struct iovec){(void *)(uintptr_t)atomic_load(&block->proof_at), sizeof proof};
    const int error = read_all((pid_t)process, local, remote, count + 1);
    if (error != 0) {
        return error;
    }
    for (int i = 0; i < HR_PROOF_WORDS; i++) {
        if (proof[i] != atomic_load(&block->proof[i])) {
            return ESRCH;
        }
    }
    return 0;
}
