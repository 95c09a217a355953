/*
 * Allreduce over one arena or several.
 *
 * One host of p ranks, per segment: each rank copies the shares that others own into its slot; reduces its own share straight from its
 * private memory and the peers' slots, into its private memory and its slot at once; copies the other shares out. Two slots in turn:
 * filling segment k + 1 overlaps the peers' finishing k.
 *
 * Several hosts (two-level form): the owner's share stays in its slot, is reduced with the same owner's share on the other hosts by
 * ring or recursive doubling, and is then gathered from the slots as before. So a link carries 2(h-1)/h of the data once, whatever the
 * number of ranks per host, and segment k travels while k + 1 is filled and reduced.
 */
#include <stdlib.h>

#include "collective/collective.h"
#include "collective/segment.h"

enum {
    FLAT_BYTES = 4096,          /* up to here everybody reduces everything: one phase instead of two */
    DOUBLING_BYTES = 1 << 16,   /* between hosts: latency counts up to here, bandwidth above */
    SCRATCH_ALIGNMENT = 64,
};

struct call {
    struct hr_group *group;
    const struct hr_fused *fused;
    int reduce_op;
    double prescale, postscale;
    int owners;
    size_t element;
    enum hr_store store;
    uint64_t first; /* number of my first segment */
    struct hr_cross cross;
};

static unsigned parity_of(const struct call *call, size_t k) {
    return (unsigned)((call->first + k) & 1);
}

static char *slot_of(const struct call *call, int local_rank, size_t k) {
    return hr_arena_slot(&call->group->arena, local_rank, parity_of(call, k));
}

static int is_owner(const struct call *call) {
    return call->group->local_rank < call->owners;
}

/* Whether the owner reads its own contribution from its slot: it must be scaled first. */
static int packs_own_share(const struct call *call) {
    return call->prescale != 1.0;
}

static int fill(struct call *call, size_t k) {
    struct hr_group *group = call->group;
    const struct hr_range segment = hr_segment(group, call->fused->bytes, k);
    HR_TRY(hr_group_await(group, HR_PHASE_DRAINED, parity_of(call, k))); /* the slot is free again */
    char *slot = slot_of(call, group->local_rank, k);
    for (int owner = 0; owner < call->owners; owner++) {
        if (owner == group->local_rank && !packs_own_share(call)) {
            continue;
        }
        const struct hr_range share = hr_share(segment.bytes, owner, call->owners);
        hr_fused_pack(call->fused, segment.offset + share.offset, share.bytes, slot + share.offset, group->kernel,
                      call->prescale, call->store);
    }
    hr_group_arrive(group, HR_PHASE_FILLED, parity_of(call, k));
    return HORO_OK;
}

/* Reduces `bytes` at `at` within the segment; `mine` is my contribution. */
static void reduce_part(struct call *call, size_t k, size_t at, size_t bytes, const char *mine, char *target, char *copy,
                        double scale) {
    struct hr_group *group = call->group;
    for (int i = 0; i < group->local_size; i++) {
        group->sources[i] = i == group->local_rank && mine != NULL ? mine : slot_of(call, i, k) + at;
    }
    group->kernel->reduce(call->fused->dtype, call->reduce_op, target, copy, group->sources, group->local_size,
                          bytes / call->element, scale, call->store);
}

/* One host: the result goes to private memory and to my slot. Several: to my slot only, unscaled, to travel on. */
static int reduce_own_share(struct call *call, size_t k) {
    struct hr_group *group = call->group;
    HR_TRY(hr_group_await(group, HR_PHASE_FILLED, parity_of(call, k)));
    if (!is_owner(call)) {
        return HORO_OK;
    }
    const struct hr_range segment = hr_segment(group, call->fused->bytes, k);
    const struct hr_range share = hr_share(segment.bytes, group->local_rank, call->owners);
    char *slot = slot_of(call, group->local_rank, k);
    size_t at = share.offset;
    size_t left = share.bytes;
    for (size_t i = left == 0 ? 0 : hr_fused_find(call->fused, segment.offset + at); left > 0; i++) {
        const struct hr_piece *piece = &call->fused->pieces[i];
        const size_t skip = segment.offset + at - piece->offset;
        const size_t part = piece->bytes - skip < left ? piece->bytes - skip : left;
        const char *mine = packs_own_share(call) ? NULL : piece->input + skip;
        if (group->host_count == 1) {
            reduce_part(call, k, at, part, mine, piece->output + skip, slot + at, call->postscale);
        } else {
            reduce_part(call, k, at, part, mine, slot + at, NULL, 1.0);
        }
        at += part;
        left -= part;
    }
    return HORO_OK;
}

static int drain(struct call *call, size_t k) {
    struct hr_group *group = call->group;
    const struct hr_range segment = hr_segment(group, call->fused->bytes, k);
    HR_TRY(hr_group_await(group, HR_PHASE_REDUCED, parity_of(call, k)));
    for (int owner = 0; owner < call->owners; owner++) {
        if (owner == group->local_rank && group->host_count == 1) {
            continue; /* written by reduce_own_share */
        }
        const struct hr_range share = hr_share(segment.bytes, owner, call->owners);
        hr_fused_unpack(call->fused, segment.offset + share.offset, share.bytes, slot_of(call, owner, k) + share.offset,
                        group->kernel);
    }
    hr_group_arrive(group, HR_PHASE_DRAINED, parity_of(call, k));
    return HORO_OK;
}

static int cross_ready(struct hr_group *group, void *arg) {
    (void)group;
    struct hr_cross *cross = arg;
    return cross->ops->progress(cross) != HORO_IN_PROGRESS;
}

int hr_cross_run(struct hr_group *group, struct hr_cross *cross) {
    const int ended = hr_group_finish(group, cross_ready, cross);
    if (ended != HORO_OK) {
        hr_group_abandon_data(group);
        return ended;
    }
    const int status = cross->ops->progress(cross);
    if (status == HORO_ERR_PEER_LOST) {
        hr_group_suspect_link(group);
        hr_group_abandon_data(group); /* the transport still moves what other peers send */
    }
    return status;
}

static int reserve_scratch(struct hr_group *group, size_t bytes) {
    if (bytes <= group->cross_scratch_bytes) {
        return HORO_OK;
    }
    free(group->cross_scratch);
    group->cross_scratch_bytes = 0;
    group->cross_scratch = aligned_alloc(SCRATCH_ALIGNMENT, (bytes + SCRATCH_ALIGNMENT - 1) & ~(size_t)(SCRATCH_ALIGNMENT - 1));
    if (group->cross_scratch == NULL) {
        return HORO_ERR_RESOURCE;
    }
    group->cross_scratch_bytes = bytes;
    return HORO_OK;
}

static int cross_begin(struct call *call, size_t k) {
    struct hr_group *group = call->group;
    if (!is_owner(call)) {
        return HORO_OK;
    }
    const struct hr_range segment = hr_segment(group, call->fused->bytes, k);
    const struct hr_range share = hr_share(segment.bytes, group->local_rank, call->owners);
    const struct hr_cross_ops *ops = share.bytes <= DOUBLING_BYTES ? &hr_cross_doubling : &hr_cross_ring;
    HR_TRY(reserve_scratch(group, ops->scratch_bytes(group->host_count, share.bytes, HR_CROSS_PIECE_BYTES)));
    const struct hr_cross_call cross_call = {
        .transport = group->transport,
        .host = group->host,
        .host_count = group->host_count,
        .data = slot_of(call, group->local_rank, k) + share.offset,
        .count = share.bytes / call->element,
        .dtype = call->fused->dtype,
        .reduce_op = call->reduce_op,
        .piece_bytes = HR_CROSS_PIECE_BYTES,
        .scratch = group->cross_scratch,
    };
    return ops->begin(&call->cross, &cross_call);
}

static int cross_finish(struct call *call, size_t k) {
    struct hr_group *group = call->group;
    if (!is_owner(call)) {
        return HORO_OK;
    }
    HR_TRY(hr_cross_run(group, &call->cross));
    if (call->postscale != 1.0) {
        const struct hr_range segment = hr_segment(group, call->fused->bytes, k);
        const struct hr_range share = hr_share(segment.bytes, group->local_rank, call->owners);
        char *data = slot_of(call, group->local_rank, k) + share.offset;
        group->kernel->scale(call->fused->dtype, data, data, share.bytes / call->element, call->postscale,
                             HR_STORE_ORDINARY);
    }
    return HORO_OK;
}

static int run_one_host(struct call *call, size_t segments) {
    struct hr_group *group = call->group;
    HR_TRY(fill(call, 0));
    for (size_t k = 0; k < segments; k++) {
        const int64_t begin_ns = hr_now_ns();
        if (k + 1 < segments) {
            HR_TRY(fill(call, k + 1));
        }
        HR_TRY(reduce_own_share(call, k));
        hr_group_arrive(group, HR_PHASE_REDUCED, parity_of(call, k));
        HR_TRY(drain(call, k));
        const size_t bytes = hr_segment(group, call->fused->bytes, k).bytes;
        hr_store_learn(group, call->store, bytes, hr_now_ns() - begin_ns);
        call->store = hr_store_choose(group, bytes);
    }
    return HORO_OK;
}

static int run_two_level(struct call *call, size_t segments) {
    HR_TRY(fill(call, 0));
    HR_TRY(reduce_own_share(call, 0));
    HR_TRY(cross_begin(call, 0));
    for (size_t k = 0; k < segments; k++) {
        if (k + 1 < segments) {
            HR_TRY(fill(call, k + 1));
            HR_TRY(reduce_own_share(call, k + 1));
        }
        HR_TRY(cross_finish(call, k));
        if (k + 1 < segments) {
            HR_TRY(cross_begin(call, k + 1));
        }
        hr_group_arrive(call->group, HR_PHASE_REDUCED, parity_of(call, k));
        HR_TRY(drain(call, k));
    }
    return HORO_OK;
}

/* Small data on one host: everybody shows everything and reduces everything, in rank order. */
static int run_flat(struct call *call) {
    struct hr_group *group = call->group;
    const struct hr_fused *fused = call->fused;
    const unsigned parity = parity_of(call, 0);
    HR_TRY(hr_group_await(group, HR_PHASE_DRAINED, parity));
    hr_fused_pack(fused, 0, fused->bytes, slot_of(call, group->local_rank, 0), group->kernel, call->prescale,
                  HR_STORE_ORDINARY);
    hr_group_arrive(group, HR_PHASE_FILLED, parity);
    HR_TRY(hr_group_await(group, HR_PHASE_FILLED, parity));
    for (size_t i = 0; i < fused->count; i++) {
        const struct hr_piece *piece = &fused->pieces[i];
        reduce_part(call, 0, piece->offset, piece->bytes, NULL, piece->output, NULL, call->postscale);
    }
    hr_group_arrive(group, HR_PHASE_DRAINED, parity);
    return HORO_OK;
}

static void run_alone(const struct call *call) {
    const struct hr_kernel *kernel = call->group->kernel;
    const int dtype = call->fused->dtype;
    for (size_t i = 0; i < call->fused->count; i++) {
        const struct hr_piece *piece = &call->fused->pieces[i];
        const size_t count = piece->bytes / call->element;
        if (piece->output != piece->input) {
            kernel->copy(piece->output, piece->input, piece->bytes, HR_STORE_ORDINARY);
        }
        if (call->prescale != 1.0) {
            kernel->scale(dtype, piece->output, piece->output, count, call->prescale, HR_STORE_ORDINARY);
        }
        if (call->postscale != 1.0) {
            kernel->scale(dtype, piece->output, piece->output, count, call->postscale, HR_STORE_ORDINARY);
        }
    }
}

int hr_allreduce(struct hr_group *group, const struct hr_fused *fused, int reduce_op, double prescale, double postscale) {
    if (fused->bytes == 0) {
        return HORO_OK;
    }
    struct call call = {
        .group = group,
        .fused = fused,
        .reduce_op = reduce_op,
        .prescale = prescale,
        .postscale = postscale,
        .owners = fused->bytes <= FLAT_BYTES ? 1 : group->owner_count,
        .element = hr_dtype_bytes(fused->dtype),
        .store = hr_store_choose(group, fused->bytes),
        .first = group->segment,
    };
    if (group->size == 1) {
        run_alone(&call);
        return HORO_OK;
    }
    const size_t segments = hr_segment_count(group, fused->bytes);
    group->segment += segments;
    if (group->host_count > 1) {
        const int status = run_two_level(&call, segments);
        if (status != HORO_OK) {
            hr_group_abandon_data(group); /* a segment may be under way in memory that goes away now */
        }
        return status;
    }
    return fused->bytes <= FLAT_BYTES ? run_flat(&call) : run_one_host(&call, segments);
}
