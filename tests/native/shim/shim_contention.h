/* What waits learn about other programs, for tests. */
#ifndef SHIM_CONTENTION_H
#define SHIM_CONTENTION_H

/* cffi: skip */
#include <stdint.h>
/* cffi: end */

/*
 * Notes yields that took yield_ns[i] until now_ns[i]; until when waits then sleep. The words of the host begin as
 * given; 0: nothing is known yet.
 */
void shim_contention_note(int64_t begin_until_ns, int64_t begin_while_ns, const int64_t *yield_ns,
                          const int64_t *now_ns, int count, int64_t *until_ns);

/* Notes a yield that ends now on the host of a context. */
void shim_contention_yielded(void *context, int64_t yield_ns);

int shim_contention_is_on(int64_t until_ns, int64_t now_ns);

#endif
