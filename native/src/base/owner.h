/*
 * The process that something belongs to: its threads and locks do not exist in a forked child, though its memory does.
 * Asking costs no system call where the kernel can wipe a page at a fork (Linux 4.14).
 */
#ifndef HR_BASE_OWNER_H
#define HR_BASE_OWNER_H

#include <sys/types.h>

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

#endif
