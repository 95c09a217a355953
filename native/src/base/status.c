#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>

int hr_fail(struct hr_error *error, int code, const char *format, ...) {
    if (error == NULL) {
        return code;
    }
    if (error->code != HORO_OK) {
        return error->code;
    }
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    error->code = code;
    return code;
}

static const char unknown[] = "unknown";

int hr_is_error(int status) {
    return status < 0 && horo_status_name(status) != unknown;
}

HORO_API const char *horo_status_name(int status) {
    switch (status) {
    case HORO_OK: return "ok";
    case HORO_IN_PROGRESS: return "in progress";
    case HORO_ERR_USAGE: return "usage";
    case HORO_ERR_NOT_INITIALIZED: return "not initialized";
    case HORO_ERR_MISMATCH: return "mismatch";
    case HORO_ERR_UNSUPPORTED: return "unsupported";
    case HORO_ERR_DUPLICATE_NAME: return "duplicate name";
    case HORO_ERR_HANDLE: return "handle";
    case HORO_ERR_RESOURCE: return "resource";
    case HORO_ERR_FORKED: return "forked";
    case HORO_ERR_PEER_LOST: return "peer lost";
    case HORO_ERR_STALLED: return "stalled";
    case HORO_ERR_TIMEOUT: return "timeout";
    case HORO_ERR_ABORTED: return "aborted";
    case HORO_ERR_DEADLOCK: return "deadlock";
    case HORO_ERR_INTERNAL: return "internal";
    default: return unknown;
    }
}
