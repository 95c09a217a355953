/* The GPUs of a context and their pinned memory. */
#include <stdlib.h>
#include <time.h>

#include "base/clock.h"
#include "device/blocks.h"
#include "device/watchdog.h"
#include "device/staging.h"

enum {
    IDLE_BYTES_MAX = 256 << 20, /* idle memory stays pinned up to this: to pin new memory takes milliseconds */
    LOOK_NS = 100000,           /* at what runs on a device still, at the end: time between two at least, */
    RARE_LOOK_NS = 900000000,   /* and at most */
    LOOKS = 4,                  /* at idle memory that a copy may use still, before new memory is pinned */
};

static void init_sync(struct hr_stager *stager) {
    pthread_condattr_t attributes;
    (void)pthread_condattr_init(&attributes);
    (void)pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    (void)pthread_cond_init(&stager->drained, &attributes);
    (void)pthread_cond_init(&stager->stirred, &attributes);
    (void)pthread_condattr_destroy(&attributes);
    (void)pthread_mutex_init(&stager->lock, NULL);
    (void)pthread_mutex_init(&stager->opening, NULL);
}

static void fini_sync(struct hr_stager *stager) {
    (void)pthread_cond_destroy(&stager->drained);
    (void)pthread_cond_destroy(&stager->stirred);
    (void)pthread_mutex_destroy(&stager->lock);
    (void)pthread_mutex_destroy(&stager->opening);
}

int hr_stager_create(const char *const *paths, size_t path_count, void *owner, hr_staging_ready *on_ready,
                     hr_staging_failed *on_failed, struct hr_stager **stager, struct hr_error *error) {
    struct hr_stager *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return hr_fail(error, HORO_ERR_RESOURCE, "out of memory for the use of GPUs");
    }
    int status = hr_cuda_load(&made->cuda, paths, path_count, &made->library, error);
    if (status == HORO_OK) {
        status = hr_cuda_initialize(&made->cuda, &made->library.device_count, error);
    }
    if (status != HORO_OK) {
        free(made);
        return status;
    }
    init_sync(made);
    made->owner = owner;
    made->on_ready = on_ready;
    made->on_failed = on_failed;
    status = hr_watchdog_start(made, error);
    if (status != HORO_OK) {
        fini_sync(made);
        free(made);
        return status;
    }
    *stager = made;
    return HORO_OK;
}

/* The caller has entered the device. Not under the lock, as all calls of CUDA: see hr_staging_launch. */
static int is_done(const struct hr_block *block) {
    const struct hr_cuda *cuda = block->device->cuda;
    return cuda->event_query(block->copied_in) != HR_CUDA_NOT_READY &&
           (!block->is_out || cuda->event_query(block->copied_out) != HR_CUDA_NOT_READY);
}

static int can_go(const struct hr_block *block) {
    struct hr_error ignored = {0};
    struct hr_device_visit visit;
    int done = 0;
    if (hr_device_enter(block->device, &visit, &ignored) == HORO_OK) {
        done = is_done(block);
        hr_device_leave(block->device, &visit);
    }
    return done;
}

/* With the lock held: until nothing is launched, or the time is over. After a failure nothing of it is called. */
static void drain(struct hr_stager *stager, int64_t until_ns) {
    const struct timespec until = {.tv_sec = until_ns / 1000000000, .tv_nsec = until_ns % 1000000000};
    while (stager->launched > 0 && !atomic_load(&stager->is_broken) && hr_now_ns() < until_ns) {
        (void)pthread_cond_timedwait(&stager->drained, &stager->lock, &until);
    }
}

/* ---- The end ---- */

/*
 * With the device entered, until the time is over: whether the event is reached. There is no wait for an event that
 * ends by itself; so it looks, the more rarely the longer it takes.
 */
static int await_event(const struct hr_device *device, void *event, int64_t until_ns) {
    const int64_t since_ns = hr_now_ns();
    for (int64_t now_ns = since_ns; device->cuda->event_query(event) == HR_CUDA_NOT_READY; now_ns = hr_now_ns()) {
        if (now_ns >= until_ns) {
            return 0;
        }
        const struct timespec rest = {.tv_nsec = (long)hr_next_look_ns(now_ns - since_ns, LOOK_NS, RARE_LOOK_NS)};
        (void)nanosleep(&rest, NULL);
    }
    return 1;
}

/* With the device entered: whether no copy uses a block of it. */
static int await_copies(const struct hr_stager *stager, const struct hr_device *device, int64_t until_ns) {
    int are_done = 1;
    for (const struct hr_block *block = stager->idle; block != NULL && are_done; block = block->next) {
        if (block->device == device) {
            are_done = await_event(device, block->copied_in, until_ns) &&
                       (!block->is_out || await_event(device, block->copied_out, until_ns));
        }
    }
    return are_done;
}

/* With the device entered. 0: the driver refuses it. */
static int mark_program(struct hr_device *device) {
    const struct hr_cuda *cuda = device->cuda;
    struct hr_error ignored = {0};
    void *event = NULL;
    if (hr_device_refuse_capture(device, NULL, &ignored) != HORO_OK ||
        cuda->event_create(&event, HR_CUDA_EVENT_DISABLE_TIMING) != HR_CUDA_OK) {
        return 0;
    }
    if (cuda->event_record(event, NULL) != HR_CUDA_OK) {
        (void)cuda->event_destroy(event);
        return 0;
    }
    device->behind_program = event;
    return 1;
}

enum quiet { QUIET, BUSY, UNKNOWN };

/*
 * With the device entered: whether what the program has put on its default stream has ended, and what that waits for,
 * as it mostly does for its other streams. Those are not known here. Behind BUSY, another call goes on to wait for the
 * same: each mark takes a place on that stream.
 */
static enum quiet await_program(struct hr_device *device, int64_t until_ns) {
    if (device->behind_program == NULL && !mark_program(device)) {
        return UNKNOWN;
    }
    if (!await_event(device, device->behind_program, until_ns)) {
        return BUSY;
    }
    (void)device->cuda->event_destroy(device->behind_program);
    device->behind_program = NULL;
    return QUIET;
}

/*
 * Whether nothing is found to run on the device: to free pinned memory waits for all that does, perhaps for
 * ever, and a driver may keep other calls of the program's meanwhile.
 */
static enum quiet await_quiet(const struct hr_stager *stager, struct hr_device *device, int64_t until_ns) {
    struct hr_error ignored = {0};
    struct hr_device_visit visit;
    if (atomic_load(&stager->is_kept) || hr_device_enter(device, &visit, &ignored) != HORO_OK) {
        return UNKNOWN;
    }
    const enum quiet found = await_copies(stager, device, until_ns) ? await_program(device, until_ns) : BUSY;
    hr_device_leave(device, &visit);
    return found;
}

/* All blocks of a device. */
static void let_go_of_blocks(struct hr_stager *stager, const struct hr_device *device, int is_quiet) {
    for (struct hr_block **link = &stager->idle; *link != NULL;) {
        struct hr_block *block = *link;
        if (block->device != device) {
            link = &block->next;
            continue;
        }
        *link = block->next;
        (is_quiet ? hr_block_destroy : hr_block_disown)(block);
    }
}

static int has_blocks(const struct hr_stager *stager, const struct hr_device *device) {
    const struct hr_block *block = stager->idle;
    while (block != NULL && block->device != device) {
        block = block->next;
    }
    return block != NULL;
}

/* 0: it stays for now, as something runs there still. */
static int free_device(struct hr_stager *stager, struct hr_device *device, int64_t until_ns) {
    const enum quiet found = has_blocks(stager, device) ? await_quiet(stager, device, until_ns) : QUIET;
    if (found == BUSY) {
        return 0;
    }
    let_go_of_blocks(stager, device, found == QUIET);
    hr_device_close(device);
    free(device);
    return 1;
}

int hr_stager_free_parts(struct hr_stager *stager, int64_t until_ns) {
    int are_gone = 1;
    for (int i = 0; i < HR_DEVICES_MAX; i++) {
        if (stager->devices[i] != NULL && free_device(stager, stager->devices[i], until_ns)) {
            stager->devices[i] = NULL;
        }
        are_gone &= stager->devices[i] == NULL;
    }
    return are_gone;
}

void hr_stager_free(struct hr_stager *stager) {
    fini_sync(stager);
    free(stager);
}

void hr_stager_close(struct hr_stager *stager, int timeout_ms) {
    const int64_t until_ns = hr_now_ns() + (int64_t)timeout_ms * 1000000;
    (void)pthread_mutex_lock(&stager->lock);
    stager->owner = NULL;
    (void)pthread_cond_signal(&stager->stirred);
    drain(stager, until_ns);
    const int is_free = stager->launched == 0;
    stager->quiet_until_ns = (hr_now_ns() + until_ns) / 2; /* freeing takes time, too */
    stager->end = is_free ? HR_STAGER_FREES : HR_STAGER_STAYS;
    (void)pthread_cond_signal(&stager->stirred);
    if (!hr_watchdog_await_end(stager, until_ns)) {
        stager->is_left = 1;
        (void)pthread_cond_signal(&stager->stirred);
        (void)pthread_detach(stager->watchdog);
        (void)pthread_mutex_unlock(&stager->lock);
        return;
    }
    (void)pthread_mutex_unlock(&stager->lock);
    (void)pthread_join(stager->watchdog, NULL);
    if (is_free) {
        hr_stager_free(stager);
    }
}

/* ---- Devices and blocks ---- */

/* With opening held. */
static int open_device(struct hr_stager *stager, int number, struct hr_error *error) {
    if (number < 0 || number >= stager->library.device_count || number >= HR_DEVICES_MAX) {
        return hr_fail(error, HORO_ERR_USAGE, "there is no device %d; this process sees %d", number,
                       stager->library.device_count);
    }
    if (stager->devices[number] != NULL) {
        return HORO_OK;
    }
    struct hr_device *device = malloc(sizeof *device);
    if (device == NULL) {
        return hr_fail(error, HORO_ERR_RESOURCE, "out of memory for the use of a GPU");
    }
    const int status = hr_device_open(device, &stager->cuda, number, error);
    if (status != HORO_OK) {
        free(device);
        return status;
    }
    stager->devices[number] = device;
    return HORO_OK;
}

int hr_stager_device(struct hr_stager *stager, int number, struct hr_device **device, struct hr_error *error) {
    (void)pthread_mutex_lock(&stager->opening);
    const int status = open_device(stager, number, error);
    if (status == HORO_OK) {
        *device = stager->devices[number];
    }
    (void)pthread_mutex_unlock(&stager->opening);
    return status;
}

/*
 * The smallest idle one that is large enough and not more than four times as large, or of any size where too much is
 * idle; NULL: there is none.
 */
static struct hr_block *take_fitting(struct hr_stager *stager, const struct hr_device *device, size_t bytes) {
    struct hr_block **best = NULL;
    (void)pthread_mutex_lock(&stager->lock);
    for (struct hr_block **link = &stager->idle; *link != NULL; link = &(*link)->next) {
        const struct hr_block *block = *link;
        const int is_too_large = block->bytes / 4 > bytes && stager->idle_bytes <= IDLE_BYTES_MAX;
        if (block->device == device && block->bytes >= bytes && !is_too_large &&
            (best == NULL || block->bytes < (*best)->bytes)) {
            best = link;
        }
    }
    struct hr_block *taken = best == NULL ? NULL : *best;
    if (taken != NULL) {
        *best = taken->next;
        stager->idle_bytes -= taken->bytes;
    }
    (void)pthread_mutex_unlock(&stager->lock);
    return taken;
}

void hr_stager_give_block_locked(struct hr_stager *stager, struct hr_block *block) {
    block->next = stager->idle;
    stager->idle = block;
    stager->idle_bytes += block->bytes;
}

static void put_idle(struct hr_stager *stager, struct hr_block *blocks) {
    (void)pthread_mutex_lock(&stager->lock);
    while (blocks != NULL) {
        struct hr_block *block = blocks;
        blocks = block->next;
        hr_stager_give_block_locked(stager, block);
    }
    (void)pthread_mutex_unlock(&stager->lock);
}

int hr_stager_take_block(struct hr_stager *stager, struct hr_device *device, size_t bytes, struct hr_block **block,
                         struct hr_error *error) {
    struct hr_block *busy = NULL;
    struct hr_block *taken = NULL;
    for (int i = 0; i < LOOKS && (taken = take_fitting(stager, device, bytes)) != NULL && !is_done(taken); i++) {
        taken->next = busy;
        busy = taken;
        taken = NULL;
    }
    put_idle(stager, busy);
    *block = taken;
    return taken != NULL ? HORO_OK : hr_block_create(device, bytes, block, error);
}

/* All that is idle, where it is too much; else NULL. */
static struct hr_block *take_excess(struct hr_stager *stager) {
    struct hr_block *all = NULL;
    (void)pthread_mutex_lock(&stager->lock);
    if (stager->idle_bytes > IDLE_BYTES_MAX) {
        all = stager->idle;
        stager->idle = NULL;
        stager->idle_bytes = 0;
    }
    (void)pthread_mutex_unlock(&stager->lock);
    return all;
}

void hr_stager_give_block(struct hr_stager *stager, struct hr_block *block) {
    (void)pthread_mutex_lock(&stager->lock);
    hr_stager_give_block_locked(stager, block);
    (void)pthread_mutex_unlock(&stager->lock);
}

void hr_stager_trim(struct hr_stager *stager) {
    struct hr_block *kept = NULL;
    struct hr_block *gone = NULL;
    size_t kept_bytes = 0;
    for (struct hr_block *each = take_excess(stager), *after; each != NULL; each = after) {
        after = each->next;
        const int goes = kept_bytes + each->bytes > IDLE_BYTES_MAX && can_go(each);
        struct hr_block **list = goes ? &gone : &kept;
        kept_bytes += goes ? 0 : each->bytes;
        each->next = *list;
        *list = each;
    }
    put_idle(stager, kept); /* first: others may need it while this thread waits */
    while (gone != NULL) {
        struct hr_block *block = gone;
        gone = block->next;
        hr_block_destroy(block);
    }
}
