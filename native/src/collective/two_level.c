/*
 * Allreduce over several hosts (two-level form): the owner's share stays in its slot, is reduced with the same owner's share on the
 * other hosts by ring or recursive doubling, and is then gathered from the slots. So a link carries 2(h-1)/h of the data once,
 * whatever the number of ranks per host.
 *
 * Every segment passes five stations: filled, reduced on this host, begun between hosts, finished there, drained. There is no fixed
 * order of these between segments: whatever can be done is done, what the link waits for first, and only when nothing can, one wait
 * covers it all. So a segment begins to travel when the one before has been posted to its end, and the link never idles between
 * two; meanwhile the next is filled. Two slots hold two segments.
 *
 * A rank that is alone on its host has nobody to share memory with: where a segment lies in one tensor it travels from and to
 * the output itself, and no slot is used. That is nobody else's business: what travels is the same.
 */
#include "collective/two_level.h"

#include <stdlib.h>

#include "collective/collective.h"

enum {
    DOUBLING_BYTES = 1 << 16, /* between hosts: latency counts up to here, bandwidth above */
    SCRATCH_ALIGNMENT = 64,
    TRAVELLING_MAX = 2,
};

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

/* One allreduce. The five count segments; each is at most the one before, and filled at most drained + 2. */
struct run {
    struct hr_stages *call;
    size_t segments;
    size_t filled, reduced, begun, finished, drained;
    int moved; /* 0: nothing yet in this wait; else what advance came back with */
    size_t scratch_bytes; /* of one that travels */
    struct hr_cross cross[TRAVELLING_MAX]; /* segment k uses entry k % TRAVELLING_MAX */
};

static struct hr_cross *cross_of(struct run *run, size_t k) {
    return &run->cross[k % TRAVELLING_MAX];
}

static struct hr_range own_share(const struct hr_stages *call, size_t k) {
    const struct hr_range segment = hr_segment(call->group, call->fused->bytes, k);
    return hr_share(segment.bytes, call->group->local_rank, call->owners);
}

static const struct hr_cross_ops *cross_ops(size_t share_bytes) {
    return share_bytes <= DOUBLING_BYTES ? &hr_cross_doubling : &hr_cross_ring;
}

/* Room for two of the largest shares, before anything travels: it cannot be moved then. Small data gets one: it is one segment. */
static int reserve_scratch(struct run *run) {
    struct hr_group *group = run->call->group;
    const size_t share_bytes = own_share(run->call, 0).bytes;
    const size_t small_bytes = share_bytes < DOUBLING_BYTES ? share_bytes : DOUBLING_BYTES; /* the last segment may be */
    const size_t small = hr_cross_doubling.scratch_bytes(group->host_count, small_bytes, HR_CROSS_PIECE_BYTES);
    const size_t large = cross_ops(share_bytes)->scratch_bytes(group->host_count, share_bytes, HR_CROSS_PIECE_BYTES);
    const size_t each = ((small > large ? small : large) + SCRATCH_ALIGNMENT - 1) & ~(size_t)(SCRATCH_ALIGNMENT - 1);
    const size_t bytes = run->segments == 1 ? each : TRAVELLING_MAX * each;
    run->scratch_bytes = each;
    if (bytes <= group->cross_scratch_bytes) {
        return HORO_OK;
    }
    free(group->cross_scratch);
    group->cross_scratch_bytes = 0;
    group->cross_scratch = aligned_alloc(SCRATCH_ALIGNMENT, bytes);
    if (group->cross_scratch == NULL) {
        return HORO_ERR_RESOURCE;
    }
    group->cross_scratch_bytes = bytes;
    return HORO_OK;
}

/* The piece of which segment k is a part, if it travels without a slot; else NULL. What is converted needs one. */
static const struct hr_piece *whole_piece(const struct hr_stages *call, size_t k) {
    if (call->group->local_size > 1 || call->fused->wide_dtype != 0 || call->partial_scale != 1.0) {
        return NULL;
    }
    const struct hr_range segment = hr_segment(call->group, call->fused->bytes, k);
    const struct hr_piece *piece = &call->fused->pieces[hr_fused_find(call->fused, segment.offset)];
    return segment.offset + segment.bytes <= piece->offset + piece->bytes ? piece : NULL;
}

/* Where my share of segment k travels from and to. */
static char *travelling(const struct hr_stages *call, size_t k) {
    const struct hr_piece *piece = whole_piece(call, k);
    return piece == NULL ? hr_stages_slot(call, call->group->local_rank, k) + own_share(call, k).offset
                         : piece->output + (hr_segment(call->group, call->fused->bytes, k).offset - piece->offset);
}

static int fill(struct hr_stages *call, size_t k) {
    const struct hr_piece *piece = whole_piece(call, k);
    if (piece == NULL) {
        return hr_stages_fill(call, k);
    }
    if (piece->output != piece->input || call->prescale != 1.0) {
        const struct hr_range segment = hr_segment(call->group, call->fused->bytes, k);
        hr_fused_pack(call->fused, segment.offset, segment.bytes, travelling(call, k), call->group->kernel, call->prescale,
                      HR_STORE_ORDINARY);
    }
    return HORO_OK;
}

static int cross_begin(struct run *run, size_t k) {
    struct hr_stages *call = run->call;
    struct hr_group *group = call->group;
    struct hr_cross *cross = cross_of(run, k);
    if (!hr_stages_owns(call)) {
        cross->status = HORO_OK;
        return HORO_OK;
    }
    const struct hr_range share = own_share(call, k);
    const struct hr_cross_call cross_call = {
        .transport = group->transport,
        .host = group->host,
        .host_count = group->host_count,
        .data = travelling(call, k),
        .count = share.bytes / call->element,
        .dtype = call->fused->dtype,
        .reduce_op = call->reduce_op,
        .piece_bytes = HR_CROSS_PIECE_BYTES,
        .scratch = group->cross_scratch + k % TRAVELLING_MAX * run->scratch_bytes * (run->segments > 1),
    };
    return cross_ops(share.bytes)->begin(cross, &cross_call);
}

static void cross_finish(struct hr_stages *call, size_t k) {
    if (hr_stages_owns(call) && call->postscale != 1.0) {
        char *data = travelling(call, k);
        call->group->kernel->scale(call->fused->dtype, data, data, own_share(call, k).bytes / call->element, call->postscale,
                                   HR_STORE_ORDINARY);
    }
    if (whole_piece(call, k) == NULL) {
        hr_group_arrive(call->group, HR_PHASE_REDUCED, hr_stages_parity(call, k));
    }
}

/* What is between hosts. 1: a segment has finished or begun; 0: neither can yet; an error. */
static int travel(struct run *run) {
    for (size_t k = run->finished; k < run->begun; k++) {
        struct hr_cross *cross = cross_of(run, k);
        const int status = cross->status == HORO_IN_PROGRESS ? cross->ops->progress(cross) : cross->status;
        if (status < 0) {
            return status;
        }
    }
    if (run->finished < run->begun && cross_of(run, run->finished)->status == HORO_OK) {
        cross_finish(run->call, run->finished++);
        return 1;
    }
    if (run->begun < run->reduced && (run->begun == run->finished || hr_cross_all_posted(cross_of(run, run->begun - 1)))) {
        HR_TRY(cross_begin(run, run->begun));
        run->begun++;
        return 1;
    }
    return 0;
}

static int phase_reached(const struct run *run, enum hr_phase phase, size_t k) {
    return whole_piece(run->call, k) != NULL || hr_group_reached(run->call->group, phase, hr_stages_parity(run->call, k));
}

/* Takes one segment one station further, without blocking. 1, 0 if none can go on now, or an error. */
static int advance(struct run *run) {
    struct hr_stages *call = run->call;
    const int travelled = travel(run);
    if (travelled != 0) {
        return travelled;
    }
    if (run->drained < run->finished && phase_reached(run, HR_PHASE_REDUCED, run->drained)) {
        HR_TRY(whole_piece(call, run->drained) == NULL ? hr_stages_drain(call, run->drained) : HORO_OK);
        run->drained++;
        return 1;
    }
    if (run->reduced < run->filled && phase_reached(run, HR_PHASE_FILLED, run->reduced)) {
        HR_TRY(whole_piece(call, run->reduced) == NULL ? hr_stages_reduce(call, run->reduced) : HORO_OK);
        run->reduced++;
        return 1;
    }
    if (run->filled < run->segments && run->filled < run->drained + TRAVELLING_MAX &&
        phase_reached(run, HR_PHASE_DRAINED, run->filled)) {
        HR_TRY(fill(call, run->filled));
        run->filled++;
        return 1;
    }
    return 0;
}

/* A wait may ask again after it has heard yes, so the answer stays. */
static int advances(struct hr_group *group, void *arg) {
    (void)group;
    struct run *run = arg;
    if (run->moved == 0) {
        run->moved = advance(run);
    }
    return run->moved != 0;
}

static int run_segments(struct run *run) {
    struct hr_group *group = run->call->group;
    HR_TRY(reserve_scratch(run));
    while (run->drained < run->segments) {
        run->moved = 0;
        HR_TRY(hr_group_finish(group, advances, run));
        if (run->moved == HORO_ERR_PEER_LOST) {
            hr_group_suspect_link(group);
        }
        HR_TRY(run->moved);
        (void)group->transport->ops->progress(group->transport); /* the link goes on between two stations */
    }
    return HORO_OK;
}

int hr_two_level(struct hr_stages *call, size_t segments) {
    struct run run = {.call = call, .segments = segments};
    const int status = run_segments(&run);
    if (status != HORO_OK) {
        hr_group_abandon_data(call->group); /* what is posted lies in `run` and in memory that goes away */
    }
    return status;
}
