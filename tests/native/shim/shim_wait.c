#include "shim.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "base/clock.h"
#include "engine/engine.h"
#include "node/node.h"

static int is_marked(struct hr_node *node, void *arg) {
    (void)arg;
    return node->looks_at_all && atomic_load(&node->arena.blocks[node->local_rank].sleeping) != 0;
}

/* A context begins with its node. */
int shim_wait_looks_last(void *context, int64_t limit_ns) {
    const int64_t now_ns = hr_now_ns();
    return hr_node_wait(context, is_marked, context, now_ns, 0, now_ns + limit_ns) == HORO_OK;
}

int shim_wait_prepares_with_a_look(void *context) {
    struct hr_node *node = context;
    struct hr_sleep sleep = {0};
    if (hr_sleep_reserve(&sleep, (size_t)node->local_size + 2) != HORO_OK) {
        return 0;
    }
    const int is_ready = hr_node_prepare_sleep(node, is_marked, node, &sleep, 0);
    hr_node_end_sleep(node, NULL);
    free(sleep.fds);
    return is_ready;
}

/* ---- A kick or a call that comes when the thread has found nothing to do, and does not sleep yet ---- */

enum { ARMED, HAS_COME, DONE };

struct late_call {
    struct hr_part part;
    struct hr_drive *drive;
    int by_kick;
    _Atomic int state;
};

/* The thread asks with the lock held: what comes as the answer is on its way back is behind all that it looks at. */
static int needs(const struct hr_part *part) {
    struct late_call *late = part->owner;
    if (atomic_load(&late->state) != ARMED) {
        return atomic_load(&late->state) == HAS_COME;
    }
    atomic_store(&late->state, HAS_COME);
    if (late->by_kick) {
        hr_drive_kick(late->drive);
    } else {
        hr_node_call(late->drive->node, late->drive->node->local_rank);
    }
    return 0;
}

static int turn(struct hr_part *part) {
    struct late_call *late = part->owner;
    atomic_store(&late->state, DONE);
    return HR_MOVED;
}

static const struct hr_part_ops LATE_CALL = {.rank = HR_PART_LATE, .turn = turn, .needs = needs, .is_called = 1};

struct context { /* the beginning of one */
    struct hr_node node;
    struct hr_engine engine;
};

int shim_drive_hears_late(void *context, int by_kick, int64_t limit_ns) {
    struct hr_drive *drive = &((struct context *)context)->engine.drive;
    struct late_call *late = calloc(1, sizeof *late);
    if (late == NULL) {
        return -1;
    }
    const int64_t end_ns = hr_now_ns() + limit_ns;
    hr_drive_lock(drive);
    while (drive->sleep.word == NULL && hr_now_ns() < end_ns) { /* the thread has not slept yet */
        hr_drive_unlock(drive);
        (void)sched_yield();
        hr_drive_lock(drive);
    }
    late->drive = drive;
    late->by_kick = by_kick;
    hr_drive_add(drive, &late->part, &LATE_CALL, late);
    hr_drive_unlock(drive);
    hr_node_call(drive->node, drive->node->local_rank); /* it wakes, and looks */
    while (atomic_load(&late->state) != DONE && hr_now_ns() < end_ns) {
        (void)sched_yield();
    }
    const int state = atomic_load(&late->state);
    if (state != DONE) { /* the part stays, for the thread may yet look at it */
        return state == HAS_COME ? 0 : -1;
    }
    hr_drive_lock(drive);
    while (!hr_drive_is_free(drive)) {
        hr_drive_unlock(drive);
        (void)sched_yield();
        hr_drive_lock(drive);
    }
    hr_drive_remove(drive, &late->part);
    hr_drive_unlock(drive);
    free(late);
    return 1;
}
