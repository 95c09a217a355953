/* Wire messages as bytes. */
#ifndef SHIM_WIRE_H
#define SHIM_WIRE_H

#include <stddef.h>
#include <stdint.h>

#include "horo.h"

/* The bytes written to out (out_bytes of room), or a negative status. */
int64_t shim_wire_encode_request(const horo_request *request, void *out, size_t out_bytes);
void shim_wire_describe(int dtype, int wire_dtype, int ndim, const int64_t *shape, char *out, size_t out_bytes);
int shim_wire_tensor_bytes(int op, const int64_t *shape, int ndim, int dtype, int64_t *bytes);

/*
 * Decodes a copy of the bytes that ends where its heap block ends, touches everything that decoding gave, so that a
 * sanitizer sees any step outside, and encodes it again, to the same bytes. Returns the status.
 */
int shim_wire_probe(const void *data, size_t bytes);
/* shim_wire_probe of every prefix and of the message with each byte set to each value; the counts of each outcome. */
int shim_wire_probe_mutants(const void *data, size_t bytes, uint64_t *accepted, uint64_t *rejected);

#endif
