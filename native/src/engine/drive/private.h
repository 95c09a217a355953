/* Between the loop and the token. */
#ifndef HR_ENGINE_DRIVE_PRIVATE_H
#define HR_ENGINE_DRIVE_PRIVATE_H

#include "engine/drive/drive.h"

/*
 * For the owner of the token: drives until the word has another value, the deadline has passed, or a signal came. The
 * background thread, whose word is NULL: until no part needs it; where it serves other hosts, until there is nothing
 * to do but wait, or a caller wants to: 1, and its sleep on all that may come is prepared.
 */
int hr_drive_run(struct hr_drive *drive, const _Atomic int *word, int value, int64_t deadline_ns);

extern const struct hr_part_ops hr_part_links; /* loop.c */

/* Whether a rank of this host leaves, which the first part alone looks for. As its `needs`. */
static inline int hr_drive_must_end(const struct hr_drive *drive) {
    return drive->parts->ops->needs(drive->parts);
}

#endif
