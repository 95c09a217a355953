#include "backend/carried.h"

#include "base/traits.h"
#include "collective/collective.h"
#include "horo_gpu.h"
#include "kernel/kernel.h"

static const struct hr_codec *codec_of(const horo_request *call) {
    return hr_codec_find(call->tensors[0].dtype, call->tensors[0].wire_dtype);
}

static size_t value_count(const horo_request *call) {
    return hr_tensor_bytes(&call->tensors[0]) / codec_of(call)->element_bytes;
}

/* The leader reduces what all ranks of its host carry, one after the other, where a collective would share that out. */
int hr_carried_pays(const struct hr_team *team, size_t bytes) {
    return bytes <= team->tuning.carried && bytes <= team->tuning.carried_per_host / (size_t)team->largest_host;
}

size_t hr_carried_bytes(const struct hr_team *team, const horo_request *call) {
    if (call->op != HORO_ALLREDUCE || call->reduce_op == HORO_ADASUM || call->tensor_count != 1 ||
        team->host_count == 1 || (call->flags & HORO_SUBMIT_ON_GPU) != 0 ||
        hr_dtype_worked_on(call->tensors[0].dtype, call->reduce_op) != call->tensors[0].dtype) {
        return 0;
    }
    const size_t bytes = value_count(call) * codec_of(call)->wire_bytes;
    return bytes <= HR_CARRIED_MAX ? bytes : 0;
}

static struct hr_scale postscale_of(const struct hr_team *team, const horo_request *call) {
    return hr_postscale_of(call->reduce_op, call->postscale, codec_of(call)->wire_dtype, team->size);
}

static double partial_scale_of(const struct hr_team *team, const horo_request *call) {
    return hr_partial_scale(codec_of(call), hr_operation_of(call->reduce_op), postscale_of(team, call).factor);
}

static void scale(const struct hr_team *team, const horo_request *call, void *packed, struct hr_scale by) {
    const struct hr_codec *codec = codec_of(call);
    if (hr_scale_changes(by)) {
        hr_kernel_scale(team->node->kernel, codec->wire_dtype, packed, packed,
                        hr_carried_bytes(team, call) / codec->wire_bytes, by, HR_STORE_ORDINARY);
    }
}

static void reduce(const struct hr_team *team, const horo_request *call, const void *const *contributions, int count,
                   void *packed, double factor) {
    const struct hr_codec *codec = codec_of(call);
    hr_kernel_reduce(team->node->kernel, codec->wire_dtype, hr_operation_of(call->reduce_op), packed, NULL,
                     contributions, count, hr_carried_bytes(team, call) / codec->wire_bytes, hr_scale_by(factor),
                     HR_STORE_ORDINARY);
}

void hr_carried_pack(const struct hr_team *team, const horo_request *call, void *packed) {
    const struct hr_codec *codec = codec_of(call);
    hr_codec_pack(codec, team->node->kernel, packed, call->tensors[0].input, value_count(call), call->prescale,
                  HR_STORE_ORDINARY);
    if (team->local_size == 1) {
        scale(team, call, packed, hr_scale_by(partial_scale_of(team, call)));
    }
}

void hr_carried_reduce_host(const struct hr_team *team, const horo_request *call, const void *const *contributions,
                            void *packed) {
    reduce(team, call, contributions, team->local_size, packed, partial_scale_of(team, call));
}

void hr_carried_reduce(const struct hr_team *team, const horo_request *call, const void *const *sums, int count,
                       int is_root, void *packed) {
    reduce(team, call, sums, count, packed, 1.0);
    if (is_root) {
        struct hr_scale postscale = postscale_of(team, call);
        postscale.factor /= partial_scale_of(team, call);
        scale(team, call, packed, postscale);
    }
}

void hr_carried_unpack(const struct hr_team *team, const horo_request *call, const void *packed) {
    const struct hr_codec *codec = codec_of(call);
    hr_codec_unpack(codec, team->node->kernel, call->tensors[0].output, packed, value_count(call), HR_STORE_ORDINARY);
}
