/* What the double of the CUDA driver refuses, as a driver does. For cuda.c. */
#ifndef CUDA_REFUSALS_H
#define CUDA_REFUSALS_H

enum { NON_BLOCKING = 1, GREATEST_PRIORITY = -5 };

/* In the mode "global", which is 0, such a call ends the capture of any stream. */
static int is_unsafe(void) {
    pthread_mutex_lock(&lock);
    const int found = captures > 0 && capture_mode != 2;
    spoiled |= found;
    pthread_mutex_unlock(&lock);
    return found ? CAPTURE_UNSUPPORTED : 0;
}

/* Whether the stream is being captured: to make it wait for an event from outside ends that. */
static int ends_capture(const struct stream *stream) {
    pthread_mutex_lock(&lock);
    const int is_capturing = (stream == NULL ? default_stream : stream)->is_capturing;
    spoiled |= is_capturing;
    pthread_mutex_unlock(&lock);
    return is_capturing;
}

/* The device whose context is current on this thread; -1: none is. */
static int current_device(void) {
    return entered > 0 ? entered_devices[(entered - 1) % 8] : -1;
}

/* Streams of horo, which enters a device for them, have the highest priority and no order with the default stream. */
static int is_ordinary(unsigned flags, int priority) {
    return current_device() >= 0 && (flags != NON_BLOCKING || priority != GREATEST_PRIORITY);
}

/* An event goes onto a stream of its own context only; of the program's streams the context is not known. */
static int is_elsewhere(const struct event *event, const struct stream *stream) {
    return stream != NULL && stream->device >= 0 && event->device != stream->device;
}

#endif
