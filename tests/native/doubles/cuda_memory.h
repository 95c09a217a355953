/* Memory of the double of the CUDA driver: of the device, and pinned. For cuda.c. */
#ifndef CUDA_MEMORY_H
#define CUDA_MEMORY_H

/* Copies to the host: that have begun, the one that fails, how many may still be done (-1: all). */
static int fetches, fetch_fails_at, fetches_let = -1;

uint64_t double_alloc(size_t bytes) {
    pthread_mutex_lock(&lock);
    const uint64_t address = (uint64_t)(uintptr_t)(hidden + used);
    used += (bytes + 511) / 512 * 512;
    pthread_mutex_unlock(&lock);
    return address;
}

int cuMemHostAlloc(void **data, size_t bytes, unsigned flags) {
    (void)flags;
    if (bytes > (size_t)host_limit) {
        return OUT_OF_MEMORY;
    }
    if (is_unsafe()) {
        return CAPTURE_UNSUPPORTED;
    }
    *data = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    count(&host_allocs, 1);
    return 0;
}

static int is_program_awaited; /* by calls that wait for a device */

/* With the lock held: whether something is on a stream that was made for the device, or perhaps on the program's. */
static int is_device_busy(int device) {
    const struct stream *stream = all_streams;
    while (stream != NULL && (stream->pending == 0 ||
                              (stream->device != device && !(is_program_awaited && stream->device == -1)))) {
        stream = stream->next;
    }
    return stream != NULL;
}

/* As a driver may, it waits for all that runs on the device; for what is the program's, if a test asks for that. */
static void await_device(void) {
    pthread_mutex_lock(&lock);
    while (is_device_busy(entered > 0 ? entered_devices[(entered - 1) % 8] : -2)) {
        pthread_cond_wait(&changed, &lock);
    }
    pthread_mutex_unlock(&lock);
}

void double_await_program(void) {
    count(&is_program_awaited, 1);
}

int cuMemFreeHost(void *data) {
    (void)is_unsafe();
    await_device();
    free(data);
    count(&host_frees, 1);
    return 0;
}

static void copy(struct work *work) {
    struct stream *stream = work->stream;
    pthread_mutex_lock(&lock);
    while (work->is_to_host && fetches_let == 0) {
        pthread_cond_wait(&changed, &lock);
    }
    fetches_let -= work->is_to_host && fetches_let > 0;
    fetches += work->is_to_host;
    if (work->is_to_host && fetches == fetch_fails_at) {
        stream->code = LAUNCH_FAILED;
    }
    const int works = stream->code == 0;
    pthread_mutex_unlock(&lock);
    if (works) {
        memcpy(work->target, work->source, work->bytes);
    }
}

int cuMemcpyDtoHAsync_v2(void *host, uint64_t device, size_t bytes, void *stream) {
    const char *source = opened(device, bytes);
    return source == NULL ? INVALID_VALUE
                          : put(stream, (struct work){.run = copy, .target = host, .source = source, .bytes = bytes,
                                                      .is_to_host = 1});
}

int cuMemcpyHtoDAsync_v2(uint64_t device, const void *host, size_t bytes, void *stream) {
    char *target = opened(device, bytes);
    return target == NULL ? INVALID_VALUE
                          : put(stream, (struct work){.run = copy, .target = target, .source = host, .bytes = bytes});
}

/* From now on so many copies to the host are done, and others wait for the next call; -1: all are. */
void double_let_copies(int count) {
    pthread_mutex_lock(&lock);
    fetches_let = count;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* Copy number `number` to the host from now on fails. */
void double_fail_staging(int number) {
    pthread_mutex_lock(&lock);
    fetch_fails_at = number == 0 ? 0 : fetches + number;
    pthread_mutex_unlock(&lock);
}

#endif
