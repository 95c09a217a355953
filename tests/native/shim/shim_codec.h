/*
 * Allreduces by the codec of int8_codec.h, which no request can name: a job without engine or sockets, whose ranks are
 * threads of the caller's.
 */
#ifndef SHIM_CODEC_H
#define SHIM_CODEC_H

/* cffi: skip */
#include <stddef.h>
#include <stdint.h>
/* cffi: end */

typedef struct shim_codec_job shim_codec_job;

typedef struct {
    const float *input;
    float *output;
    size_t count;
} shim_codec_tensor;

/* NULL if there is no such job, or no memory. */
shim_codec_job *shim_codec_create(const int32_t *host_of_rank, int size, size_t segment_bytes, size_t block_elements);
void shim_codec_destroy(shim_codec_job *job);

/* By each rank in a thread of its own; the tensors are one vector. HORO_OK or a status, in time: HORO_ERR_TIMEOUT. */
int shim_codec_allreduce(shim_codec_job *job, int rank, const shim_codec_tensor *tensors, size_t tensor_count,
                         int reduce_op, double prescale, double postscale);

/* What this rank has sent to other hosts so far. */
uint64_t shim_codec_link_bytes(const shim_codec_job *job, int rank);

#endif
