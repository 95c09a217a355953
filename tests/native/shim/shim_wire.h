/*
 * Wire messages with plain arguments. Encoders return the bytes written to out (out_bytes of room), or a negative
 * status.
 */
#ifndef SHIM_WIRE_H
#define SHIM_WIRE_H

#include <stddef.h>
#include <stdint.h>

#include "horo.h"

typedef struct {
    const char *data;
    size_t bytes;
} shim_text;

typedef struct {
    int op;
    int reduce_op;
    int transient;
    int on_gpu;
    int root_rank;
    double prescale;
    double postscale;
    shim_text name;
    uint32_t tensor_count;
    const uint8_t *bytes;
    size_t byte_count;
    const uint8_t *tensors;
} shim_wire_request;

typedef struct {
    int type;
    int rank;
    int status;
    int reason;
    shim_text name;
    shim_text text;
    uint32_t count;
    const uint8_t *items;
    uint32_t id;
    uint32_t question;
    const uint8_t *rows;
    uint32_t row_count;
    shim_wire_request request;
} shim_wire_message;

int64_t shim_wire_encode_request(const horo_request *request, void *out, size_t out_bytes);
int64_t shim_wire_put_ids(const uint32_t *ids, uint32_t count, void *out, size_t out_bytes);
int64_t shim_wire_put_rows(uint32_t id, const int64_t *rows, uint32_t row_count, void *out, size_t out_bytes);
int64_t shim_wire_put_request(int origin, int status, shim_text text, const int64_t *rows, uint32_t row_count,
                              const void *request, size_t request_bytes, void *out, size_t out_bytes);
int64_t shim_wire_put_lost(int rank, int status, int reason, int by, void *out, size_t out_bytes);
int64_t shim_wire_put_ended(int rank, int status, shim_text text, void *out, size_t out_bytes);
/* Lanes of the teams 0, 2, 4 and so on, with 1, 2 and more members, each with so many hashes. */
int64_t shim_wire_put_blocked(int rank, uint32_t question, shim_text text, shim_text others, uint32_t lanes,
                              uint32_t hashes, void *out, size_t out_bytes);
int64_t shim_wire_put_ask(int rank, void *out, size_t out_bytes);
int64_t shim_wire_put_query(uint32_t question, void *out, size_t out_bytes);
int64_t shim_wire_put_tune(int is_final, const uint64_t *values, uint32_t count, void *out, size_t out_bytes);
int64_t shim_wire_put_leave(int rank, int status, shim_text text, void *out, size_t out_bytes);
int64_t shim_wire_put_done(int rank, void *out, size_t out_bytes);
int64_t shim_wire_put_fail(int status, shim_text name, shim_text text, void *out, size_t out_bytes);
/* claimed_count is what the head says, count how many refs follow. */
int64_t shim_wire_put_batch(uint32_t claimed_count, uint32_t count, const uint32_t *ids, const shim_text *names,
                            const int64_t *rows, uint32_t row_count, void *out, size_t out_bytes);

int shim_wire_decode(const void *data, size_t bytes, shim_wire_message *message);
int shim_wire_decode_request(const void *data, size_t bytes, shim_wire_request *request);
/* rows has room for row_count. */
void shim_wire_rows(const shim_wire_message *message, int64_t *rows);
/* Walks the count items at message->items. */
void shim_wire_ids(const shim_wire_message *message, uint32_t *ids);
void shim_wire_refs(const shim_wire_message *message, uint32_t *ids, shim_text *names);
/* Dtypes, wire dtypes, numbers of dimensions, and HORO_DIMS_MAX extents of room for each tensor. */
void shim_wire_tensors(const shim_wire_request *request, int *dtypes, int *wire_dtypes, int *ndims, int64_t *shapes);
void shim_wire_describe(int dtype, int wire_dtype, int ndim, const int64_t *shape, char *out, size_t out_bytes);
int shim_wire_tensor_bytes(int op, const int64_t *shape, int ndim, int dtype, int64_t *bytes);

/*
 * Decodes a copy of the bytes that ends where its heap block ends, and touches everything that decoding gave, so that a
 * sanitizer sees any step outside. Returns the status.
 */
int shim_wire_probe(const void *data, size_t bytes);
/*
 * shim_wire_probe of every prefix and of the message with each single byte set to each value; the counts of each
 * outcome.
 */
int shim_wire_probe_mutants(const void *data, size_t bytes, uint64_t *accepted, uint64_t *rejected);

#endif
