#include "device/backlog.h"

int hr_backlog_create(struct hr_backlog *backlog, const struct hr_device *device, void *stream,
                      struct hr_error *error) {
    const struct hr_cuda *cuda = device->cuda;
    *backlog = (struct hr_backlog){.device = device, .stream = stream};
    return hr_cuda_check(cuda, cuda->event_create(&backlog->event, HR_CUDA_EVENT_DISABLE_TIMING), "cuEventCreate",
                         error);
}

void hr_backlog_destroy(struct hr_backlog *backlog) {
    if (backlog->event != NULL) {
        (void)backlog->device->cuda->event_destroy(backlog->event);
        backlog->event = NULL;
    }
}

int hr_backlog_mark(struct hr_backlog *backlog, struct hr_error *error) {
    const struct hr_cuda *cuda = backlog->device->cuda;
    struct hr_device_visit visit;
    if (backlog->before > 0 || backlog->behind < HR_BACKLOG_EVERY) {
        return HORO_OK;
    }
    HR_TRY(hr_device_enter(backlog->device, &visit, error));
    const int status = hr_cuda_check(cuda, cuda->event_record(backlog->event, backlog->stream), "cuEventRecord", error);
    hr_device_leave(backlog->device, &visit);
    HR_TRY(status);
    backlog->before = backlog->behind + 1; /* and the event */
    backlog->behind = 0;
    return HORO_OK;
}

/* An event that has been reached goes behind the rest, so there is always one that room comes with. */
int hr_backlog_has_room(struct hr_backlog *backlog) {
    struct hr_error ignored = {0};
    struct hr_device_visit visit;
    if (backlog->before + backlog->behind >= HR_BACKLOG_MOST &&
        hr_device_enter(backlog->device, &visit, &ignored) == HORO_OK) {
        /* a failure ends the wait, too: others report it */
        if (backlog->before > 0 && backlog->device->cuda->event_query(backlog->event) != HR_CUDA_NOT_READY) {
            backlog->before = 0;
            backlog->passed++;
        }
        (void)hr_backlog_mark(backlog, &ignored);
        hr_device_leave(backlog->device, &visit);
    }
    backlog->is_awaited = backlog->before + backlog->behind >= HR_BACKLOG_MOST;
    return !backlog->is_awaited;
}
