/* Status codes are enum horo_status. The first function that knows an error records its sentence here. */
#ifndef HR_BASE_STATUS_H
#define HR_BASE_STATUS_H

#include "horo.h"

/* A status with the sentence that explains it. `code` stays HORO_OK until hr_fail is called. */
struct hr_error {
    int code;
    char text[HORO_MESSAGE_MAX];
};

/* Records code and sentence unless an error is recorded already (the first one is the cause). Returns the recorded code. */
int hr_fail(struct hr_error *error, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* The one control-flow macro: passes a failure on. */
#define HR_TRY(expression)                                                                                             \
    do {                                                                                                               \
        int hr_try_status_ = (expression);                                                                             \
        if (hr_try_status_ < 0) {                                                                                      \
            return hr_try_status_;                                                                                     \
        }                                                                                                              \
    } while (0)

#endif
