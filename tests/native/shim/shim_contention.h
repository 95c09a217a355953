/* What waits learn about other programs, for tests. */
#ifndef SHIM_CONTENTION_H
#define SHIM_CONTENTION_H

/* cffi: skip */
#include <stdint.h>
/* cffi: end */

/* Notes yields where nothing is known yet, which took yield_ns[i] until now_ns[i]; until when waits then sleep. */
void shim_contention_note(const int64_t *yield_ns, const int64_t *now_ns, int count, int64_t *until_ns);

/* Notes a yield that ends now on the host of a context. */
void shim_contention_yielded(void *context, int64_t yield_ns);

/* Whether waits there sleep now. */
int shim_contention_is_on(void *context);

#endif
