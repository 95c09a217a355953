#include "base/owner.h"

#include <stddef.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_WIPEONFORK /* in glibc since 2.27, in the kernel since 4.14 */
#define MADV_WIPEONFORK 18
#endif

static size_t page_bytes(void) {
    return (size_t)sysconf(_SC_PAGESIZE);
}

void hr_owner_init(struct hr_owner *owner) {
    *owner = (struct hr_owner){.pid = getpid()};
    void *page = mmap(NULL, page_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) {
        return;
    }
    if (madvise(page, page_bytes(), MADV_WIPEONFORK) != 0) {
        (void)munmap(page, page_bytes());
        return;
    }
    owner->mark = page;
    *owner->mark = 1;
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
