/*
 * The work of an allreduce on one segment in the stages of segments.h, on all ranks of a host alike:
 *
 *     fill    packs the shares that others own into my slot, scaled on the way; arrives at HR_PHASE_FILLED
 *     reduce  reduces my own share straight from my private memory and the peers' slots
 *     drain   unpacks the other shares from the slots; arrives at HR_PHASE_DRAINED
 *
 * The caller arrives at HR_PHASE_REDUCED itself, when the share in its slot is final.
 */
#ifndef HR_LOCAL_STAGES_H
#define HR_LOCAL_STAGES_H

#include "local/fused.h"
#include "local/shares.h"

/* One running allreduce. */
struct hr_stages {
    struct hr_team *team;
    const struct hr_fused *fused; /* the caller keeps it */
    int reduce_op;
    double prescale;
    double partial_scale; /* several hosts: what each host's partial result is multiplied by before it travels on */
    struct hr_scale postscale;
    int owners;
    size_t unit;          /* of shares, see hr_share_unit */
    size_t segment_bytes; /* of every segment but the last */
    enum hr_store store;
    uint64_t first; /* number of its first segment */
};

static inline unsigned hr_stages_parity(const struct hr_stages *call, size_t k) {
    return (unsigned)((call->first + k) & 1);
}

static inline char *hr_stages_slot(const struct hr_stages *call, int local_rank, size_t k) {
    return hr_team_slot(call->team, local_rank, hr_stages_parity(call, k));
}

static inline struct hr_range hr_stages_segment(const struct hr_stages *call, size_t k) {
    return hr_segment(call->segment_bytes, call->fused->bytes, k);
}

static inline struct hr_range hr_stages_share(const struct hr_stages *call, struct hr_range segment, int owner) {
    return hr_share(call->unit, segment.bytes, owner, call->owners);
}

static inline int hr_stages_owns(const struct hr_stages *call) {
    return call->team->local_rank < call->owners;
}

void hr_stages_fill(struct hr_stages *call, size_t k);
/*
 * On one host the result goes to private memory and to my slot, or to my slot only if it must be unpacked; on several
 * to my slot only, to travel on and be scaled last.
 */
void hr_stages_reduce(struct hr_stages *call, size_t k);
void hr_stages_drain(struct hr_stages *call, size_t k);

/*
 * On one host of two ranks, where the codec is plain and nothing is scaled on the way in, nobody but me reads what I
 * drain. So segment k + 2 may take the place of segment k as it comes out, in one pass if both are of one size, and
 * HR_PHASE_DRAINED is not asked for: exchange is drain of k, then fill of k + 2. Equal on all ranks.
 */
int hr_stages_may_exchange(const struct hr_stages *call);
void hr_stages_exchange(struct hr_stages *call, size_t k);

/*
 * Reduces `bytes` at `at` within segment k; `mine` is my contribution, NULL if it is in my slot as those of the others
 * are.
 */
void hr_stages_reduce_part(struct hr_stages *call, size_t k, size_t at, size_t bytes, const char *mine, char *target,
                           char *copy, struct hr_scale scale);

#endif
