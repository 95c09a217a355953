#include "device/stager.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "base/clock.h"
#include "base/system.h"

enum {
    DEVICES_MAX = 64, /* a bit of a word for each */
    LOOKS = 4,            /* at idle memory that a copy may use still, before new memory is pinned */
    WATCH_NS = 100000000, /* between looks for failed copies: other ranks may wait for what is found */
    LOOK_NS = 100000,     /* at the end, between looks at what runs: at least, and at most */
    RARE_LOOK_NS = 900000000,
};

struct hr_stager {
    struct hr_cuda cuda;
    horo_library library;
    pthread_mutex_t opening; /* held while a device is opened */
    struct hr_device *devices[DEVICES_MAX]; /* by number; those that have been used */
    _Atomic int is_kept;
    pthread_mutex_t lock; /* of what follows; nobody calls CUDA with it, since CUDA calls a function that takes it */
    struct hr_block *idle; /* kept until the end: to pin new memory takes milliseconds */
    struct hr_block *first_launched, *last_launched; /* of which functions of the host are to come */
    int is_broken; /* copies have failed: those functions may never be called */
    void *owner;   /* NULL: closed */
    hr_stager_ready *on_ready;
    hr_stager_failed *on_failed;
    pthread_t watchdog;
    pthread_cond_t stirred; /* the watchdog rests, and copies are awaited; or it is at its end, or is to come to it */
    int is_resting, has_ended;
    int is_left;             /* nobody waits for the watchdog any more, so the stager is its own */
};

/* ---- Devices ---- */

int hr_stager_device(struct hr_stager *stager, int number, struct hr_device **device, struct hr_error *error) {
    int status = HORO_OK;
    if (number < 0 || number >= stager->library.device_count || number >= DEVICES_MAX) {
        return hr_fail(error, HORO_ERR_USAGE, "there is no device %d; this process sees %d", number,
                       stager->library.device_count);
    }
    (void)pthread_mutex_lock(&stager->opening);
    if (stager->devices[number] == NULL) {
        struct hr_device *opened = malloc(sizeof *opened);
        status = opened != NULL ? hr_device_open(opened, &stager->cuda, number, error)
                                : hr_fail(error, HORO_ERR_RESOURCE, "out of memory for the use of a GPU");
        if (status == HORO_OK) {
            stager->devices[number] = opened;
        } else {
            free(opened);
        }
    }
    *device = stager->devices[number];
    (void)pthread_mutex_unlock(&stager->opening);
    return status;
}

/* ---- Blocks ---- */

/* The caller has entered the device. */
static void free_block(struct hr_block *block) {
    const struct hr_cuda *cuda = block->device->cuda;
    if (block->data != NULL) {
        (void)cuda->host_free(block->data);
    }
    if (block->copied != NULL) {
        (void)cuda->event_destroy(block->copied);
    }
    free(block);
}

static hr_status create_block(struct hr_device *device, size_t bytes, struct hr_block **block, struct hr_error *error) {
    struct hr_block *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return hr_fail(error, HORO_ERR_RESOURCE, "out of memory for tensors on a GPU");
    }
    made->device = device;
    made->bytes = bytes;
    const struct hr_cuda *cuda = device->cuda;
    struct hr_error refusal = {0};
    void *data = NULL;
    int status = hr_cuda_check(cuda, cuda->host_alloc(&data, bytes, HR_CUDA_HOST_PORTABLE), "cuMemHostAlloc", &refusal);
    if (status != HORO_OK) {
        (void)hr_fail(error, status, "no %zu bytes of pinned memory: %s", bytes, refusal.text);
    } else {
        made->data = data;
        status = hr_cuda_check(cuda, cuda->event_create(&made->copied, HR_CUDA_EVENT_DISABLE_TIMING), "cuEventCreate",
                               error);
    }
    if (status != HORO_OK) {
        free_block(made);
        return status;
    }
    atomic_fetch_add(&device->held, 1);
    *block = made;
    return HORO_OK;
}

/* With the lock held: one user less. */
static void let_go(struct hr_block *block) {
    if (--block->users == 0) {
        block->next = block->stager->idle;
        block->stager->idle = block;
    }
}

/* The smallest idle one that is large enough and not more than four times as large; NULL: there is none. */
static struct hr_block *take_fitting(struct hr_stager *stager, const struct hr_device *device, size_t bytes) {
    struct hr_block **best = NULL;
    (void)pthread_mutex_lock(&stager->lock);
    for (struct hr_block **link = &stager->idle; *link != NULL; link = &(*link)->next) {
        const struct hr_block *block = *link;
        if (block->device == device && block->bytes >= bytes && block->bytes / 4 <= bytes &&
            (best == NULL || block->bytes < (*best)->bytes)) {
            best = link;
        }
    }
    struct hr_block *taken = best == NULL ? NULL : *best;
    if (taken != NULL) {
        *best = taken->next;
        taken->users = 1;
    }
    (void)pthread_mutex_unlock(&stager->lock);
    return taken;
}

hr_status hr_stager_take_block(struct hr_stager *stager, struct hr_device *device, size_t bytes,
                               struct hr_block **block, struct hr_error *error) {
    struct hr_block *busy[LOOKS];
    struct hr_block *taken = take_fitting(stager, device, bytes);
    int busy_count = 0;
    while (taken != NULL && device->cuda->event_query(taken->copied) == HR_CUDA_NOT_READY) {
        busy[busy_count++] = taken;
        taken = busy_count < LOOKS ? take_fitting(stager, device, bytes) : NULL;
    }
    while (busy_count > 0) {
        hr_stager_give_block(busy[--busy_count]);
    }
    HR_TRY(taken != NULL ? HORO_OK : create_block(device, bytes, &taken, error));
    taken->stager = stager;
    taken->users = 1;
    *block = taken;
    return HORO_OK;
}

void hr_stager_give_block(struct hr_block *block) {
    struct hr_stager *stager = block->stager;
    (void)pthread_mutex_lock(&stager->lock);
    block->request = NULL;
    let_go(block);
    (void)pthread_mutex_unlock(&stager->lock);
}

/* ---- Copies to the host ---- */

/* With the lock held: none is to come any more. */
static void end_launch(struct hr_stager *stager, struct hr_block *block) {
    *(block->earlier == NULL ? &stager->first_launched : &block->earlier->later) = block->later;
    *(block->later == NULL ? &stager->last_launched : &block->later->earlier) = block->earlier;
    block->is_launched = 0;
    let_go(block);
    if (stager->owner == NULL) {
        (void)pthread_cond_broadcast(&stager->stirred);
    }
}

/* Called by the driver's thread, which must not call CUDA. */
static void on_copied(void *data) {
    struct hr_block *block = data;
    struct hr_stager *stager = block->stager;
    (void)pthread_mutex_lock(&stager->lock);
    if (block->request != NULL && stager->owner != NULL) {
        stager->on_ready(stager->owner, block->request);
    }
    end_launch(stager, block);
    (void)pthread_mutex_unlock(&stager->lock);
}

int hr_stager_launch(struct hr_block *block, void *stream, void *request, struct hr_error *error) {
    struct hr_stager *stager = block->stager;
    const struct hr_device *device = block->device;
    (void)pthread_mutex_lock(&stager->lock);
    block->request = request;
    /* a function of the host is about to be launched for it */
    block->users++;
    block->is_launched = 1;
    block->has_failed = 0;
    block->earlier = stager->last_launched;
    block->later = NULL;
    *(block->earlier == NULL ? &stager->first_launched : &block->earlier->later) = block;
    stager->last_launched = block;
    if (stager->is_resting) {
        (void)pthread_cond_broadcast(&stager->stirred);
    }
    (void)pthread_mutex_unlock(&stager->lock);
    struct hr_device_visit visit;
    int status = hr_device_enter(device, &visit, error);
    if (status == HORO_OK) {
        /* without the lock: the driver may hold one of its own while it calls on_copied */
        status = hr_cuda_check(device->cuda, device->cuda->launch_host_function(stream, on_copied, block),
                               "cuLaunchHostFunc", error);
        hr_device_leave(device, &visit);
    }
    if (status != HORO_OK) {
        (void)pthread_mutex_lock(&stager->lock);
        end_launch(stager, block);
        (void)pthread_mutex_unlock(&stager->lock);
    }
    return status;
}

/* ---- The watchdog ---- */

/* With the lock held: the first copies that somebody awaits, but on devices of which nothing has failed, as bits. */
static struct hr_block *first_awaited(const struct hr_stager *stager, uint64_t fine) {
    struct hr_block *block = stager->first_launched;
    while (block != NULL && (block->request == NULL || block->has_failed || (fine >> block->device->number & 1) != 0)) {
        block = block->later;
    }
    return block;
}

/* With the lock held, which is let go meanwhile. 1: the copies have not failed; else on_ready never comes. */
static int look_at(struct hr_stager *stager, struct hr_block *block) {
    struct hr_error error = {0};
    struct hr_device_visit visit;
    int code = HR_CUDA_NOT_READY;
    block->users++;
    (void)pthread_mutex_unlock(&stager->lock);
    const int has_entered = hr_device_enter(block->device, &visit, &error) == HORO_OK;
    if (has_entered) {
        code = stager->cuda.event_query(block->copied);
        hr_device_leave(block->device, &visit);
    }
    const int is_bad = code != HR_CUDA_NOT_READY &&
                       hr_cuda_check(&stager->cuda, code, "the copy from the GPU", &error) != HORO_OK;
    (void)pthread_mutex_lock(&stager->lock);
    /* one that is launched no more has its values: something else has failed */
    stager->is_broken |= is_bad && block->is_launched;
    block->has_failed = !has_entered || (is_bad && block->is_launched);
    if (block->has_failed && block->is_launched && block->request != NULL && stager->owner != NULL) {
        stager->on_failed(stager->owner, block->request, error.text);
    }
    let_go(block);
    return !block->has_failed;
}

/* ---- The end ---- */

/* The caller has entered the device: until an event is reached, however long that takes. */
static void await_event(const struct hr_device *device, void *event) {
    const int64_t since_ns = hr_now_ns();
    while (device->cuda->event_query(event) == HR_CUDA_NOT_READY) {
        const long rarer_ns = (long)((hr_now_ns() - since_ns) / 32);
        const struct timespec rest = {
            .tv_nsec = rarer_ns < LOOK_NS ? LOOK_NS : rarer_ns > RARE_LOOK_NS ? RARE_LOOK_NS : rarer_ns};
        (void)nanosleep(&rest, NULL);
    }
}

/*
 * To free pinned memory waits for all that runs on the device, perhaps for ever, and a driver may keep other
 * calls of the program's meanwhile. So it waits here, also until what the program has put on its default stream has
 * ended, and what that waits for, as it mostly does for its other streams, which are not known here.
 */
static void free_device(struct hr_stager *stager, struct hr_device *device) {
    const struct hr_cuda *cuda = device->cuda;
    struct hr_device_visit visit;
    if (!atomic_load(&stager->is_kept) && hr_device_enter(device, &visit, NULL) == HORO_OK) {
        int has_blocks = 0, is_quiet = 0;
        void *event = NULL;
        for (const struct hr_block *block = stager->idle; block != NULL; block = block->next) {
            if (block->device == device) {
                has_blocks = 1;
                await_event(device, block->copied);
            }
        }
        if (has_blocks && hr_device_refuse_capture(device, NULL, NULL) == HORO_OK &&
            cuda->event_create(&event, HR_CUDA_EVENT_DISABLE_TIMING) == HR_CUDA_OK) {
            is_quiet = cuda->event_record(event, NULL) == HR_CUDA_OK;
            if (is_quiet) {
                await_event(device, event);
            }
            (void)cuda->event_destroy(event);
        }
        for (struct hr_block **link = &stager->idle; is_quiet && *link != NULL;) {
            struct hr_block *block = *link;
            if (block->device != device) {
                link = &block->next;
            } else {
                *link = block->next;
                free_block(block);
                atomic_fetch_sub(&device->held, 1);
            }
        }
        hr_device_leave(device, &visit);
    }
    hr_device_close(device);
    free(device);
}

static void free_stager(struct hr_stager *stager) {
    (void)pthread_cond_destroy(&stager->stirred);
    (void)pthread_mutex_destroy(&stager->lock);
    (void)pthread_mutex_destroy(&stager->opening);
    free(stager);
}

static void *watch(void *arg) {
    struct hr_stager *stager = arg;
    (void)pthread_mutex_lock(&stager->lock);
    while (stager->owner != NULL) {
        stager->is_resting = 1;
        while (stager->owner != NULL && first_awaited(stager, 0) == NULL) {
            (void)pthread_cond_wait(&stager->stirred, &stager->lock);
        }
        stager->is_resting = 0; /* from here on nobody need wake it for what comes, which it sees at its next look */
        const int64_t until_ns = hr_now_ns() + WATCH_NS;
        while (stager->owner != NULL && hr_now_ns() < until_ns) {
            hr_condition_wait(&stager->stirred, &stager->lock, until_ns);
        }
        /* copies of a device come in order: where the first ones have not failed, none have */
        uint64_t fine = 0;
        struct hr_block *block;
        while (stager->owner != NULL && (block = first_awaited(stager, fine)) != NULL) {
            fine |= (uint64_t)look_at(stager, block) << block->device->number;
        }
    }
    while (stager->first_launched != NULL && !stager->is_broken) {
        (void)pthread_cond_wait(&stager->stirred, &stager->lock);
    }
    const int frees = stager->first_launched == NULL; /* else the driver may call a function with it at any time */
    (void)pthread_mutex_unlock(&stager->lock);
    for (int i = 0; frees && i < DEVICES_MAX; i++) {
        if (stager->devices[i] != NULL) {
            free_device(stager, stager->devices[i]);
        }
    }
    (void)pthread_mutex_lock(&stager->lock);
    stager->has_ended = 1;
    (void)pthread_cond_broadcast(&stager->stirred);
    const int is_mine = stager->is_left && frees;
    (void)pthread_mutex_unlock(&stager->lock);
    if (is_mine) {
        free_stager(stager);
    }
    return NULL;
}

void hr_stager_keep_all(struct hr_stager *stager) {
    atomic_store(&stager->is_kept, 1);
}

void hr_stager_close(struct hr_stager *stager, int timeout_ms) {
    const int64_t until_ns = hr_now_ns() + (int64_t)timeout_ms * 1000000;
    (void)pthread_mutex_lock(&stager->lock);
    stager->owner = NULL;
    (void)pthread_cond_broadcast(&stager->stirred);
    while (!stager->has_ended && hr_now_ns() < until_ns) {
        hr_condition_wait(&stager->stirred, &stager->lock, until_ns);
    }
    const pthread_t watchdog = stager->watchdog;
    const int has_ended = stager->has_ended;
    const int is_free = has_ended && stager->first_launched == NULL;
    stager->is_left = !has_ended; /* the watchdog may free it from here on */
    (void)pthread_mutex_unlock(&stager->lock);
    (void)(has_ended ? pthread_join(watchdog, NULL) : pthread_detach(watchdog));
    if (is_free) {
        free_stager(stager);
    }
}

hr_status hr_stager_create(const char *const *paths, size_t path_count, void *owner, hr_stager_ready *on_ready,
                           hr_stager_failed *on_failed, struct hr_stager **stager, struct hr_error *error) {
    struct hr_stager *made = malloc(sizeof *made);
    if (made == NULL) {
        return hr_fail(error, HORO_ERR_RESOURCE, "out of memory for the use of GPUs");
    }
    *made = (struct hr_stager){.owner = owner, .on_ready = on_ready, .on_failed = on_failed};
    int status = hr_library_load(&hr_cuda_library, paths, path_count, &made->cuda, &made->library, error);
    if (status == HORO_OK) {
        status = hr_cuda_initialize(&made->cuda, &made->library.device_count, error);
    }
    if (status != HORO_OK) {
        free(made);
        return status;
    }
    hr_condition_init(&made->stirred);
    (void)pthread_mutex_init(&made->lock, NULL);
    (void)pthread_mutex_init(&made->opening, NULL);
    status = hr_thread_start(&made->watchdog, watch, made, "the thread that looks at copies from GPUs", error);
    if (status != HORO_OK) {
        free_stager(made);
        return status;
    }
    *stager = made;
    return HORO_OK;
}
