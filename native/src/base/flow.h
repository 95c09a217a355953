/*
 * A tensor that is on its way while a collective works on it: how far its input has come, and how far its result is
 * done. Both go from its front to its end.
 */
#ifndef HR_BASE_FLOW_H
#define HR_BASE_FLOW_H

#include <stdatomic.h>
#include <stddef.h>

struct hr_flow {
    _Atomic size_t arrived; /* bytes of the input that may be read. From any thread */
    size_t done;            /* bytes of the result that are final. Of whoever runs the collective */
};

#endif
