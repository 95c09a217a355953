/* horo_pairs.h: the part of the native core's surface that moves a tensor from one rank to another. */
#ifndef HORO_PAIRS_H
#define HORO_PAIRS_H

/* cffi: skip */
#include "horo.h"
/* cffi: end */

/*
 * Sends a tensor to another rank, or receives one, in host memory: a send reads `input`, a receive writes `output`.
 * Both are outside all order of the operations above, and of no concern to other ranks. A receive takes the next send
 * to this rank with its tag (0 or more) that no earlier receive takes, of that peer, or, with peer -1, of whoever is
 * first; dtype and number of elements must be equal, or both end with HORO_ERR_MISMATCH. Neither blocks; a send is done
 * when the receiver has all of it. flags: 0 or HORO_SUBMIT_SYNC. timeout_ms: as in horo_request. A rank that leaves
 * fails what others have begun with it, and, of ranks on different hosts, all that is not done.
 */
HORO_API int horo_send(horo_context *context, const horo_tensor *tensor, int32_t peer, int32_t tag, int32_t flags,
                       int32_t timeout_ms, int64_t *handle, char *error, size_t error_bytes);
HORO_API int horo_receive(horo_context *context, const horo_tensor *tensor, int32_t peer, int32_t tag, int32_t flags,
                          int32_t timeout_ms, int64_t *handle, char *error, size_t error_bytes);

#endif
