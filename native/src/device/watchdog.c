#include "device/watchdog.h"

#include <time.h>

#include "base/clock.h"
#include "base/thread.h"
#include "device/blocks.h"

#define LOOK_NS 100000000ll /* other ranks may wait for what it finds; a look is a call for each device */

/*
 * With the lock held: the first copies that somebody awaits, but on devices of which nothing has failed, as bits. Those
 * behind marks are on another stream, and the driver of the engine, which has put them there, looks for their failure.
 */
static struct hr_staging *first_awaited(const struct hr_stager *stager, uint64_t fine) {
    struct hr_staging *staging = stager->first_launched;
    while (staging != NULL && (staging->request == NULL || atomic_load(&staging->is_ready) || staging->has_failed ||
                               staging->from_device != staging->device->to_host ||
                               (fine >> staging->device->number & 1) != 0)) {
        staging = staging->later;
    }
    return staging;
}

/* With the lock held, which is let go meanwhile. 1: nothing has failed. */
static int look_at(struct hr_stager *stager, struct hr_staging *staging) {
    struct hr_error error = {0};
    hr_staging_keep(staging);
    (void)pthread_mutex_unlock(&stager->lock);
    const int is_fine = hr_staging_check(staging, &error) == HORO_OK;
    (void)pthread_mutex_lock(&stager->lock);
    staging->has_failed = !is_fine;
    if (!is_fine && staging->request != NULL && stager->owner != NULL) {
        stager->on_failed(stager->owner, staging, error.text);
    }
    (void)pthread_mutex_unlock(&stager->lock);
    hr_staging_drop(staging);
    (void)pthread_mutex_lock(&stager->lock);
    return is_fine;
}

/* With the lock held. Copies of a device come in order: where the first ones have not failed, none have. */
static void look(struct hr_stager *stager) {
    uint64_t fine = 0;
    struct hr_staging *staging;
    while (stager->owner != NULL && (staging = first_awaited(stager, fine)) != NULL) {
        const int number = staging->device->number;
        fine |= (uint64_t)look_at(stager, staging) << number;
    }
}

/* With the lock held. 0: the stager is closed. */
static int sleep_until_look(struct hr_stager *stager) {
    stager->is_resting = 1;
    while (stager->owner != NULL && first_awaited(stager, 0) == NULL) {
        (void)pthread_cond_wait(&stager->stirred, &stager->lock);
    }
    stager->is_resting = 0; /* from here on nobody need wake it for what comes, which it sees at its next look */
    const int64_t until_ns = hr_now_ns() + LOOK_NS;
    const struct timespec until = {.tv_sec = until_ns / 1000000000, .tv_nsec = until_ns % 1000000000};
    while (stager->owner != NULL && hr_now_ns() < until_ns) {
        (void)pthread_cond_timedwait(&stager->stirred, &stager->lock, &until);
    }
    return stager->owner != NULL;
}

/*
 * With the lock held, which is let go meanwhile. What is still in use when nobody waits any longer goes when it is not,
 * perhaps never. Returns whether the stager is this thread's then.
 */
static int free_all(struct hr_stager *stager) {
    int64_t until_ns = stager->quiet_until_ns;
    int are_gone = 0;
    while (!are_gone) {
        (void)pthread_mutex_unlock(&stager->lock);
        are_gone = hr_stager_free_parts(stager, until_ns);
        (void)pthread_mutex_lock(&stager->lock);
        stager->goes_on = !are_gone;
        (void)pthread_cond_broadcast(&stager->drained);
        while (!are_gone && !stager->is_left) {
            (void)pthread_cond_wait(&stager->stirred, &stager->lock);
        }
        until_ns = INT64_MAX;
    }
    return stager->is_left;
}

static void *watch(void *arg) {
    struct hr_stager *stager = arg;
    (void)pthread_mutex_lock(&stager->lock);
    while (sleep_until_look(stager)) {
        look(stager);
    }
    while (stager->end == HR_STAGER_OPEN) {
        (void)pthread_cond_wait(&stager->stirred, &stager->lock);
    }
    const int frees = stager->end == HR_STAGER_FREES;
    const int is_mine = frees && free_all(stager);
    stager->has_ended = 1;
    (void)pthread_cond_broadcast(&stager->drained);
    (void)pthread_mutex_unlock(&stager->lock);
    if (is_mine) {
        hr_stager_free(stager);
    }
    return NULL;
}

int hr_watchdog_start(struct hr_stager *stager, struct hr_error *error) {
    return hr_thread_start(&stager->watchdog, watch, stager, "the thread that looks at copies from GPUs", error);
}

void hr_watchdog_add(struct hr_stager *stager, struct hr_staging *staging) {
    staging->earlier = stager->last_launched;
    *(staging->earlier == NULL ? &stager->first_launched : &staging->earlier->later) = staging;
    stager->last_launched = staging;
    if (stager->is_resting) {
        (void)pthread_cond_signal(&stager->stirred);
    }
}

void hr_watchdog_remove(struct hr_stager *stager, struct hr_staging *staging) {
    *(staging->earlier == NULL ? &stager->first_launched : &staging->earlier->later) = staging->later;
    *(staging->later == NULL ? &stager->last_launched : &staging->later->earlier) = staging->earlier;
}

int hr_watchdog_await_end(struct hr_stager *stager, int64_t until_ns) {
    const struct timespec until = {.tv_sec = until_ns / 1000000000, .tv_nsec = until_ns % 1000000000};
    while (!stager->has_ended && !stager->goes_on && hr_now_ns() < until_ns) {
        (void)pthread_cond_timedwait(&stager->drained, &stager->lock, &until);
    }
    return stager->has_ended;
}
