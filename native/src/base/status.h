/* Status codes are enum horo_status. The first function that knows an error records its sentence here. */
#ifndef HR_BASE_STATUS_H
#define HR_BASE_STATUS_H

#include "horo.h"

/* HORO_OK or a negative error: of functions that do something, or fail. */
typedef int hr_status;

/* The outcome of what is called again and again, where it is no negative error. Turns and tasks return it as an int. */
enum hr_progress {
    HR_STILL = 0, /* nothing can be done until something comes from outside */
    HR_MOVED = 1, /* something has been done: call again */
    HR_DONE = 2,  /* there is nothing left to do; stays so */
};

/* A status with the sentence that explains it. `code` stays HORO_OK until hr_fail is called. */
struct hr_error {
    int code;
    char text[HORO_MESSAGE_MAX];
};

/* The reason why a rank is at fault for the end of its group. The numbers travel between hosts. */
enum hr_abort_reason {
    HR_REASON_NONE = 0,
    HR_REASON_EXITED = 1,  /* its process ended without shutting horo down */
    HR_REASON_LINK = 2,    /* a connection to it broke */
    HR_REASON_SILENT = 3,  /* no answer on a connection within the peer timeout */
    HR_REASON_STALLED = 4, /* it did not submit what others wait for within the stall shutdown time */
    HR_REASON_LEFT = 5,    /* it shut horo down */
    HR_REASON_INTERNAL = 6, /* it met a state that should not be */
    /* its words say it all, see arena/arena.h: of its program's error, or of what it knows to hold up the group */
    HR_REASON_ENDED = 7,
    HR_REASON_ABORTED = 8, /* it has aborted the group, for the reason in its words */
};

/* Records code and sentence of the first error, the cause; returns its code. NULL: nobody wants the sentence. */
int hr_fail(struct hr_error *error, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Whether it is an error of enum horo_status: other numbers have no meaning to anybody. */
int hr_is_error(int status);

/* The one control-flow macro: passes a failure on. */
#define HR_TRY(expression)                                                                                             \
    do {                                                                                                               \
        int hr_try_status_ = (expression);                                                                             \
        if (hr_try_status_ < 0) {                                                                                      \
            return hr_try_status_;                                                                                     \
        }                                                                                                              \
    } while (0)

#endif
