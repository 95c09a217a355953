/* Shared by the shim and the fuzz target: decode and use everything that decoding gave. */
#ifndef WIRE_WALK_H
#define WIRE_WALK_H

#include <stddef.h>
#include <stdint.h>

/*
 * Decodes the bytes as a message and as a request, reads every byte and item of what is accepted, and encodes it again.
 * The status of the message; aborts if an accepted message does not encode to the very same bytes.
 */
int wire_walk(const uint8_t *data, size_t bytes);

#endif
