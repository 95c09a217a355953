/*
 * The watchdog: a thread that looks whether copies to the host have failed, of which a driver tells nobody. Callers
 * leave that to it, since a driver may keep whoever calls it, as long as another call waits there for all that runs on
 * a GPU (docs/adr/0054-a-thread-of-its-own-looks-for-failed-copies.md). Nobody waits for this one, and
 * it looks only while copies are awaited.
 */
#ifndef HR_DEVICE_WATCHDOG_H
#define HR_DEVICE_WATCHDOG_H

#include "device/staging.h"

/* HORO_OK, or HORO_ERR_RESOURCE with a sentence. */
int hr_watchdog_start(struct hr_stager *stager, struct hr_error *error);

/* With the stager's lock held: a function of the host is about to be launched for it; none comes any more. */
void hr_watchdog_add(struct hr_stager *stager, struct hr_staging *staging);
void hr_watchdog_remove(struct hr_stager *stager, struct hr_staging *staging);

/*
 * With the stager's lock held, which is closed: waits until the thread is at its end, which lets go of what is there
 * (enum hr_stager_end). 0 if a driver keeps it until then, or it goes on to wait for what runs on a device: it comes
 * back to the stager, and to nothing else.
 */
int hr_watchdog_await_end(struct hr_stager *stager, int64_t until_ns);

#endif
