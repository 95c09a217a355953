#include "shim.h"

#include <stdlib.h>
#include <string.h>

#include "wire/wire.h"
#include "wire_walk.h"

int64_t shim_wire_encode_request(const horo_request *request, void *out, size_t out_bytes) {
    struct hr_buffer buffer = {0};
    int64_t result = hr_buffer_append(&buffer, "xy", 2);
    hr_buffer_consume(&buffer, 1); /* with unread bytes and one byte consumed, as a send buffer */
    result = result == HORO_OK ? hr_wire_encode_request(&buffer, request) : result;
    const size_t bytes = hr_buffer_size(&buffer) - 1;
    if (result == HORO_OK && bytes <= out_bytes) {
        memcpy(out, hr_buffer_front(&buffer) + 1, bytes);
        result = (int64_t)bytes;
    } else if (result == HORO_OK || bytes != 0) { /* no room here; or a failure that appended something */
        result = HORO_ERR_USAGE;
    }
    hr_buffer_fini(&buffer);
    return result;
}

void shim_wire_describe(int dtype, int wire_dtype, int ndim, const int64_t *shape, char *out, size_t out_bytes) {
    struct hr_wire_tensor tensor = {.dtype = dtype, .wire_dtype = wire_dtype, .ndim = ndim};
    memcpy(tensor.shape, shape, (size_t)ndim * sizeof *shape);
    (void)hr_wire_describe_tensor(&tensor, out, out_bytes);
}

int shim_wire_probe(const void *data, size_t bytes) {
    uint8_t *copy = malloc(bytes == 0 ? 1 : bytes);
    if (copy == NULL) {
        return HORO_ERR_RESOURCE;
    }
    memcpy(copy, data, bytes);
    const int status = wire_walk(copy, bytes);
    free(copy);
    return status;
}

int shim_wire_probe_mutants(const void *data, size_t bytes) {
    for (size_t length = 0; length < bytes; length++) {
        if (shim_wire_probe(data, length) != HORO_ERR_INTERNAL) {
            return HORO_ERR_USAGE;
        }
    }
    uint8_t *mutant = malloc(bytes);
    if (mutant == NULL) {
        return HORO_ERR_RESOURCE;
    }
    int status = HORO_OK;
    for (size_t i = 0; i < bytes && status == HORO_OK; i++) {
        memcpy(mutant, data, bytes);
        for (int value = 0; value < 256 && status == HORO_OK; value++) {
            mutant[i] = (uint8_t)value;
            status = shim_wire_probe(mutant, bytes);
            status = status == HORO_ERR_INTERNAL ? HORO_OK : status;
        }
    }
    free(mutant);
    return status;
}
