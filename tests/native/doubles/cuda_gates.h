/* What tests put on streams of the double of the CUDA driver, and where they hold up those and threads. For cuda.c. */
#ifndef CUDA_GATES_H
#define CUDA_GATES_H

static void add(struct work *work) {
    float *values = work->target;
    for (size_t i = 0; i < work->bytes / sizeof *values; i++) {
        values[i] += work->value;
    }
}

/* A kernel on a stream: adds to each float. */
int double_add(void *stream, uint64_t address, size_t bytes, float value) {
    return put(stream, (struct work){.run = add, .target = opened(address, bytes), .bytes = bytes, .value = value});
}

static void hold(struct work *work) {
    pthread_mutex_lock(&lock);
    while (!*(volatile int *)work->target) {
        pthread_cond_wait(&changed, &lock);
    }
    pthread_mutex_unlock(&lock);
}

/* What comes behind it on the stream waits until double_open is called with the gate. */
int double_hold(void *stream, int *gate) {
    return put(stream, (struct work){.run = hold, .target = gate});
}

void double_open(int *gate) {
    pthread_mutex_lock(&lock);
    *gate = 1;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* The thread that makes a stream wait for an event next sets *gate to 1 and waits for double_resume. */
void double_pause(int *gate) {
    pthread_mutex_lock(&lock);
    *gate = 0;
    next_pause = gate;
    pthread_mutex_unlock(&lock);
}

int double_is_paused(int *gate) {
    return count(gate, 0) == 1;
}

/* The call goes on, or returns this code. */
void double_resume(int *gate, int code) {
    pthread_mutex_lock(&lock);
    *gate = 2 + code;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/*
 * Behind a test, when nobody calls the driver any more: the memory goes back, and the thread of the default stream. If
 * a stream still has something to do, all of it stays.
 */
void double_end(void) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 1;
    pthread_mutex_lock(&lock);
    if (default_stream != NULL) {
        default_stream->is_ending = 1;
        default_stream = NULL;
    }
    pthread_cond_broadcast(&changed);
    while (all_streams != NULL && pthread_cond_timedwait(&changed, &lock, &until) == 0) {
    }
    if (all_streams == NULL && hidden != NULL) {
        munmap(hidden, MEMORY_BYTES);
        munmap(open_memory, MEMORY_BYTES);
        hidden = NULL;
    }
    pthread_mutex_unlock(&lock);
}

#endif
