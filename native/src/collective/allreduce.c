/*
 * Allreduce over one arena; over several it is two_level.c. Each segment passes the stages of stages.h; small data takes one phase
 * instead of two, data of one rank alone none.
 */
#include <math.h>

#include "collective/collective.h"
#include "collective/stages.h"
#include "collective/two_level.h"

enum { FLAT_BYTES = 4096 }; /* up to here everybody reduces everything: one phase instead of two */

static int reduce(struct hr_stages *call, size_t k) {
    HR_TRY(hr_stages_reduce(call, k));
    hr_group_arrive(call->group, HR_PHASE_REDUCED, hr_stages_parity(call, k));
    return HORO_OK;
}

static void learn_store(struct hr_stages *call, size_t k, int64_t begin_ns) {
    const size_t bytes = hr_segment(call->group, call->fused->bytes, k).bytes;
    hr_store_learn(call->group, call->store, bytes, hr_now_ns() - begin_ns);
    call->store = hr_store_choose(call->group, bytes);
}

static int run_one_host(struct hr_stages *call, size_t segments) {
    HR_TRY(hr_stages_fill(call, 0));
    for (size_t k = 0; k < segments; k++) {
        const int64_t begin_ns = hr_now_ns();
        if (k + 1 < segments) {
            HR_TRY(hr_stages_fill(call, k + 1));
        }
        HR_TRY(reduce(call, k));
        HR_TRY(hr_stages_drain(call, k));
        learn_store(call, k, begin_ns);
    }
    return HORO_OK;
}

/* Where slots may be exchanged: a segment comes back from a slot as the next but one goes into it. Reducing is one segment ahead. */
static int run_exchanging(struct hr_stages *call, size_t segments) {
    for (size_t k = 0; k < 2 && k < segments; k++) {
        HR_TRY(hr_stages_fill(call, k));
    }
    int64_t begin_ns = hr_now_ns();
    HR_TRY(reduce(call, 0));
    for (size_t k = 0; k + 1 < segments; k++) {
        HR_TRY(reduce(call, k + 1));
        HR_TRY(k + 2 < segments ? hr_stages_exchange(call, k) : hr_stages_drain(call, k));
        learn_store(call, k, begin_ns);
        begin_ns = hr_now_ns();
    }
    HR_TRY(hr_stages_drain(call, segments - 1));
    if (segments == 1) { /* a last drain alone would make its store look cheap */
        learn_store(call, 0, begin_ns);
    }
    return HORO_OK;
}

/* Small data on one host: everybody shows everything and reduces everything, in rank order. */
static int run_flat(struct hr_stages *call) {
    struct hr_group *group = call->group;
    const struct hr_fused *fused = call->fused;
    const unsigned parity = hr_stages_parity(call, 0);
    HR_TRY(hr_group_await(group, HR_PHASE_DRAINED, parity));
    hr_fused_pack(fused, 0, fused->bytes, hr_stages_slot(call, group->local_rank, 0), group->kernel, call->prescale,
                  HR_STORE_ORDINARY);
    hr_group_arrive(group, HR_PHASE_FILLED, parity);
    HR_TRY(hr_group_await(group, HR_PHASE_FILLED, parity));
    if (fused->wide_dtype != 0) {
        char result[FLAT_BYTES]; /* rounded here too: fused with others or not, a tensor gets the same bits */
        hr_stages_reduce_part(call, 0, 0, fused->bytes, NULL, result, NULL, call->postscale);
        hr_fused_unpack(fused, 0, fused->bytes, result, group->kernel);
    }
    for (size_t i = 0; i < fused->count && fused->wide_dtype == 0; i++) {
        const struct hr_piece *piece = &fused->pieces[i];
        hr_stages_reduce_part(call, 0, piece->offset, piece->bytes, NULL, piece->output, NULL, call->postscale);
    }
    hr_group_arrive(group, HR_PHASE_DRAINED, parity);
    return HORO_OK;
}

/* What would travel is rounded all the same, so that a script sees what it would see with more ranks. */
static void run_alone_converted(const struct hr_stages *call) {
    const struct hr_fused *fused = call->fused;
    const struct hr_kernel *kernel = call->group->kernel;
    char block[FLAT_BYTES];
    for (size_t at = 0; at < fused->bytes; at += sizeof block) {
        const size_t bytes = fused->bytes - at < sizeof block ? fused->bytes - at : sizeof block;
        hr_fused_pack(fused, at, bytes, block, kernel, call->prescale, HR_STORE_ORDINARY);
        kernel->scale(fused->dtype, block, block, bytes / call->element, call->postscale, HR_STORE_ORDINARY);
        hr_fused_unpack(fused, at, bytes, block, kernel);
    }
}

static void run_alone(const struct hr_stages *call) {
    const struct hr_kernel *kernel = call->group->kernel;
    const int dtype = call->fused->dtype;
    for (size_t i = 0; i < call->fused->count; i++) {
        const struct hr_piece *piece = &call->fused->pieces[i];
        const size_t count = piece->bytes / call->element;
        if (piece->output != piece->input) {
            kernel->copy(piece->output, piece->input, piece->bytes, HR_STORE_ORDINARY);
        }
        if (call->prescale != 1.0) {
            kernel->scale(dtype, piece->output, piece->output, count, hr_scale_by(call->prescale), HR_STORE_ORDINARY);
        }
        if (hr_scale_changes(call->postscale)) {
            kernel->scale(dtype, piece->output, piece->output, count, call->postscale, HR_STORE_ORDINARY);
        }
    }
}

double hr_partial_scale(int dtype, int reduce_op, double postscale) {
    const double size = postscale < 0 ? -postscale : postscale;
    if (dtype != HORO_FLOAT16 || reduce_op != HORO_SUM || !(size < 1.0)) {
        return 1.0;
    }
    int exponent;
    (void)frexp(size, &exponent);
    return ldexp(1.0, exponent - 1);
}

int hr_allreduce(struct hr_group *group, const struct hr_fused *fused, int reduce_op, double prescale,
                 struct hr_scale postscale) {
    if (fused->bytes == 0) {
        return HORO_OK;
    }
    struct hr_stages call = {
        .group = group,
        .fused = fused,
        .reduce_op = reduce_op,
        .prescale = prescale,
        .partial_scale = 1.0,
        .postscale = postscale,
        .owners = fused->bytes <= FLAT_BYTES ? 1 : group->owner_count,
        .element = hr_dtype_bytes(fused->dtype),
        .store = hr_store_choose(group, fused->bytes),
        .first = group->segment,
    };
    if (group->size == 1) {
        (fused->wide_dtype == 0 ? run_alone : run_alone_converted)(&call);
        return HORO_OK;
    }
    const size_t segments = hr_segment_count(group, fused->bytes);
    group->segment += segments;
    if (group->host_count > 1) {
        call.partial_scale = hr_partial_scale(fused->dtype, reduce_op, postscale.factor);
        call.postscale.factor /= call.partial_scale;
        return hr_two_level(&call, segments);
    }
    if (fused->bytes <= FLAT_BYTES) {
        return run_flat(&call);
    }
    return hr_stages_may_exchange(&call) ? run_exchanging(&call, segments) : run_one_host(&call, segments);
}
