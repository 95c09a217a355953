#include "device/backlog.h"

/* So where there is no room, an event is behind some of what is pending, or is put there, and room comes with it. */
_Static_assert(HR_BACKLOG_EVERY <= HR_BACKLOG_MOST, "what has no event behind it is never known to have run");

int hr_backlog_create(struct hr_backlog *backlog, const struct hr_device *device, void *stream,
                      struct hr_error *error) {
    const struct hr_cuda *cuda = device->cuda;
    *backlog = (struct hr_backlog){.device = device, .stream = stream};
    for (int i = 0; i < HR_BACKLOG_EVENTS; i++) {
        HR_TRY(hr_cuda_check(cuda, cuda->event_create(&backlog->events[i], HR_CUDA_EVENT_DISABLE_TIMING),
                             "cuEventCreate", error));
    }
    return HORO_OK;
}

void hr_backlog_destroy(struct hr_backlog *backlog) {
    for (int i = 0; i < HR_BACKLOG_EVENTS && backlog->events[i] != NULL; i++) {
        (void)backlog->device->cuda->event_destroy(backlog->events[i]);
        backlog->events[i] = NULL;
    }
}

int hr_backlog_mark(struct hr_backlog *backlog, struct hr_error *error) {
    const struct hr_cuda *cuda = backlog->device->cuda;
    const int last = (backlog->first + backlog->count) % HR_BACKLOG_EVENTS;
    struct hr_device_visit visit;
    if (backlog->rest < HR_BACKLOG_EVERY || backlog->count == HR_BACKLOG_EVENTS) {
        return HORO_OK;
    }
    HR_TRY(hr_device_enter(backlog->device, &visit, error));
    const int status =
        hr_cuda_check(cuda, cuda->event_record(backlog->events[last], backlog->stream), "cuEventRecord", error);
    hr_device_leave(backlog->device, &visit);
    HR_TRY(status);
    hr_backlog_add(backlog, 1);
    backlog->weights[last] = backlog->rest;
    backlog->rest = 0;
    backlog->count++;
    return HORO_OK;
}

/* With the device entered. What has failed does not run any more, either: others tell of that. */
static void look(struct hr_backlog *backlog) {
    const struct hr_cuda *cuda = backlog->device->cuda;
    while (backlog->count > 0 && cuda->event_query(backlog->events[backlog->first]) != HR_CUDA_NOT_READY) {
        backlog->pending -= backlog->weights[backlog->first];
        backlog->first = (backlog->first + 1) % HR_BACKLOG_EVENTS;
        backlog->count--;
        backlog->passed++;
    }
}

int hr_backlog_has_room(struct hr_backlog *backlog) {
    struct hr_error ignored = {0};
    struct hr_device_visit visit;
    if (backlog->pending >= HR_BACKLOG_MOST && hr_device_enter(backlog->device, &visit, &ignored) == HORO_OK) {
        look(backlog);
        (void)hr_backlog_mark(backlog, &ignored); /* there may have been no event left */
        hr_device_leave(backlog->device, &visit);
    }
    backlog->is_awaited = backlog->pending >= HR_BACKLOG_MOST;
    return !backlog->is_awaited;
}
