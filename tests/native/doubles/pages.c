/*
 * The memory of a kernel with larger pages, of PAGE_BYTES each, on one with smaller ones: what it refuses is refused,
 * and mappings of files begin where a page does. To be loaded before the C library (LD_PRELOAD).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static int is_within_page(uintptr_t place) {
    return place % PAGE_BYTES != 0;
}

static void *map(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    return (void *)syscall(SYS_mmap, at, bytes, protection, flags, fd, offset);
}

void *mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    if (fd < 0 || at != NULL) {
        return map(at, bytes, protection, flags, fd, offset);
    }
    if (is_within_page((uintptr_t)offset)) {
        errno = EINVAL;
        return MAP_FAILED;
    }
    char *room = map(NULL, bytes + PAGE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED) {
        return MAP_FAILED;
    }
    room += (PAGE_BYTES - (uintptr_t)room % PAGE_BYTES) % PAGE_BYTES;
    return map(room, bytes, protection, flags | MAP_FIXED, fd, offset);
}

void *mmap64(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    return mmap(at, bytes, protection, flags, fd, offset);
}

int madvise(void *at, size_t bytes, int advice) {
    if (advice == MADV_REMOVE && is_within_page((uintptr_t)at)) {
        errno = EINVAL;
        return -1;
    }
    return (int)syscall(SYS_madvise, at, bytes, advice);
}
