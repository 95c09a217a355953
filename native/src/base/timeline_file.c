/* The file of a timeline. */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/timeline.h"

enum { WRITE_BYTES = 4096, EVENT_BYTES = 8192 };

static const char closing[] = "\n]\n";

static int is_same_file(const struct stat *status, int fd) {
    struct stat other;
    return fd >= 0 && fstat(fd, &other) == 0 && other.st_dev == status->st_dev && other.st_ino == status->st_ino;
}

/* The reason to leave a file alone that is there: others may have planted it. NULL: it is the user's own. One that was
   made here may have any owner: a file system may give it to another user, as NFS does with root's. */
static const char *refusal(const struct stat *status, int is_new, char *text, size_t text_bytes) {
    if (!S_ISREG(status->st_mode)) {
        return "it is no regular file";
    }
    if (!is_new && status->st_uid != geteuid()) {
        (void)snprintf(text, text_bytes, "it belongs to user %u, not to you; name another file",
                       (unsigned)status->st_uid);
        return text;
    }
    if (status->st_nlink != 1) {
        (void)snprintf(text, text_bytes, "it has %lu names (hard links); remove it or name another file",
                       (unsigned long)status->st_nlink);
        return text;
    }
    return NULL;
}

static const char *why_not_opened(int reason) {
    return reason == ELOOP   ? "it is a symbolic link; remove it or name another file"
           : reason == ENXIO ? "it is no regular file"
                             : strerror(reason);
}

int hr_trace_open(struct hr_trace_file *file, const char *path, int written, struct hr_error *error) {
    *file = (struct hr_trace_file){.fd = -1, .end = 1, .is_empty = 1};
    struct stat status;
    if (stat(path, &status) == 0 && is_same_file(&status, written)) {
        return HORO_OK;
    }
    /* nonblocking: the open of a pipe that nobody reads would wait */
    const int flags = O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    int fd = open(path, flags | O_EXCL, 0666);
    const int is_new = fd >= 0;
    if (fd < 0 && errno == EEXIST) {
        fd = open(path, flags, 0666);
    }
    char text[96];
    const char *why = fd < 0                      ? why_not_opened(errno)
                      : fstat(fd, &status) != 0   ? strerror(errno)
                                                  : refusal(&status, is_new, text, sizeof text);
    if (why == NULL && (ftruncate(fd, 0) != 0 || pwrite(fd, "[\n]\n", 4, 0) != 4)) {
        why = strerror(errno);
    }
    if (why != NULL) {
        const int failed = hr_fail(error, HORO_ERR_USAGE, "the timeline '%.512s' cannot be written: %s", path, why);
        if (fd >= 0) {
            (void)close(fd);
        }
        return failed;
    }
    file->fd = fd;
    return HORO_OK;
}

void hr_trace_close(struct hr_trace_file *file) {
    if (file->fd >= 0) {
        (void)close(file->fd);
        file->fd = -1;
    }
    hr_buffer_fini(&file->text);
}

void hr_trace_put(struct hr_trace_file *file, const char *format, ...) {
    char event[EVENT_BYTES];
    va_list arguments;
    va_start(arguments, format);
    const int length = vsnprintf(event, sizeof event, format, arguments);
    va_end(arguments);
    const uint32_t bytes = (uint32_t)length;
    if (file->error == 0 && length > 0 && (size_t)length < sizeof event &&
        hr_buffer_reserve(&file->text, sizeof bytes + bytes) == HORO_OK) {
        (void)hr_buffer_append(&file->text, &bytes, sizeof bytes);
        (void)hr_buffer_append(&file->text, event, bytes);
    }
}

/* The file is whole again as it was, if it can be: no byte more is needed for that. */
static int give_up(struct hr_trace_file *file, int reason) {
    const ssize_t closed = pwrite(file->fd, closing, sizeof closing - 1, file->end);
    if (closed == sizeof closing - 1) {
        (void)!ftruncate(file->fd, file->end + closed);
    }
    file->error = reason;
    hr_buffer_consume(&file->text, hr_buffer_size(&file->text));
    return 0;
}

/* Events that fit, at least one, and the end of the array; returns the bytes without that end. */
static size_t fill(struct hr_trace_file *file, char *out) {
    size_t at = 0;
    for (uint32_t bytes; hr_buffer_size(&file->text) > 0;) {
        const uint8_t *front = hr_buffer_front(&file->text);
        memcpy(&bytes, front, sizeof bytes);
        if (at > 0 && at + bytes + 2 + sizeof closing > WRITE_BYTES) {
            break;
        }
        if (!file->is_empty) {
            out[at++] = ',';
        }
        out[at++] = '\n';
        memcpy(out + at, front + sizeof bytes, bytes);
        at += bytes;
        file->is_empty = 0;
        hr_buffer_consume(&file->text, sizeof bytes + bytes);
    }
    return at;
}

int hr_trace_flush(struct hr_trace_file *file) {
    while (file->error == 0 && hr_buffer_size(&file->text) > 0) {
        char out[EVENT_BYTES + 8];
        const size_t bytes = fill(file, out);
        memcpy(out + bytes, closing, sizeof closing - 1);
        const size_t whole = bytes + sizeof closing - 1;
        ssize_t written;
        do {
            written = pwrite(file->fd, out, whole, file->end);
        } while (written < 0 && errno == EINTR);
        if (written != (ssize_t)whole) {
            return give_up(file, written < 0 ? errno : ENOSPC);
        }
        file->end += (int64_t)bytes;
    }
    return file->error == 0;
}
