/*
 * A task is a collective that is under way. Nothing in it waits: the driver of the engine calls progress again and
 * again, serves the control links between two calls, and sleeps when nothing can go on.
 */
#ifndef HR_COLLECTIVE_TASK_H
#define HR_COLLECTIVE_TASK_H

#include "base/status.h"

struct hr_task {
    /*
     * At most one stage of one segment of work: enum hr_progress, or an error, which ends the task. HR_DONE: it is
     * complete on this rank. HORO_ERR_PEER_LOST comes with team->suspect set.
     */
    int (*progress)(struct hr_task *task);
    /*
     * Gives the task up: afterwards nothing of it is posted any more. For a task that is not done, after an error too.
     * NULL: it posts nothing.
     */
    void (*cancel)(struct hr_task *task);
    /* Whether all that this rank sends has been posted, so that only the end is waited for. NULL: it has not. */
    int (*is_ending)(const struct hr_task *task);
};

#endif
