/*
 * The way of a collective's segments through the slots of the arena and, where there are several hosts, between hosts.
 * Every segment passes these stages on each rank; the counters in struct hr_segments say how many segments have passed
 * each.
 *
 *     stage    | may begin when                                     | does
 *     ---------+----------------------------------------------------+-----------------------------------------------
 *     filled   | all have drained segment k - 2 (two slots in turn) | fill: puts my contribution into my slot
 *     ready    | all have filled k                                  | reduce: reduces my share
 *     begun    | k - 1 has posted all that it sends                 | begin: my share starts to travel between hosts
 *     finished | it has travelled                                   | finish: shows that my share is final
 *     drained  | all have finished k                                | drain: takes out what I need
 *
 * On one host begun and finished follow ready at once, and the stages follow one another in a fixed order, which was
 * measured to be the best. Between hosts whatever can be done is done, what the link waits for first: a segment begins
 * to travel when the one before has been posted to its end, so the link never idles between two, and meanwhile the next
 * is filled.
 */
#ifndef HR_COLLECTIVE_SEGMENTS_H
#define HR_COLLECTIVE_SEGMENTS_H

#include "collective/fused.h"
#include "cross/cross.h"

/*
 * A task is a collective that is under way. Nothing in it waits: the driver of the engine calls progress again and
 * again, serves the control links between two calls, and sleeps when nothing can go on.
 */
struct hr_task {
    /*
     * At most one stage of one segment of work: enum hr_progress, or an error, which ends the task. HR_DONE: it is
     * complete on this rank. HORO_ERR_PEER_LOST comes with team->suspect set.
     */
    int (*progress)(struct hr_task *task);
    /* Gives the task up, unless it is done, also after an error: nothing is posted any more. NULL: it posts nothing. */
    void (*cancel)(struct hr_task *task);
    /*
     * On one host, before anybody knows that the other ranks do the same: does what needs nothing of them. 1, or 0
     * where that cannot be done now. Then, when all ranks have done so, lets it go on; or it is cancelled, and
     * team->segment is what it was. Both NULL: never.
     */
    int (*fill_ahead)(struct hr_task *task);
    void (*show_ahead)(struct hr_task *task);
};

enum { HR_SEGMENTS_TRAVELLING_MAX = 2 };

struct hr_segments;

/*
 * The work of a collective on segment k in each stage. None waits. Behind fill this rank arrives at HR_PHASE_FILLED,
 * behind drain at HR_PHASE_DRAINED, and behind finish, where draining waits for it, at HR_PHASE_REDUCED.
 */
struct hr_segments_ops {
    void (*fill)(struct hr_segments *segments, size_t k);
    void (*reduce)(struct hr_segments *segments, size_t k); /* NULL: there is nothing to reduce */
    /* hr_cross_begin for the share that this rank carries; NULL on one host. */
    void (*begin)(struct hr_segments *segments, size_t k, struct hr_cross *cross);
    void (*finish)(struct hr_segments *segments, size_t k); /* the last step of my share; NULL: there is none */
    void (*drain)(struct hr_segments *segments, size_t k);
    /* drain of k, then fill of k + 2, in one pass; NULL: they are two. On one host. */
    void (*exchange)(struct hr_segments *segments, size_t k);
};

/* The first member of every collective that runs so. Zeroed but for the first group of fields. */
struct hr_segments {
    struct hr_task task;
    struct hr_team *team;
    const struct hr_segments_ops *ops;
    size_t count;
    uint64_t first;            /* number of its first segment; the parity of a segment's number chooses the slot */
    int carries;               /* this rank moves data between hosts; else begin is not called */
    int begins_alone;          /* travelling needs nothing of the other ranks of this host */
    enum hr_phase drain_phase; /* draining waits for it: HR_PHASE_REDUCED; HR_PHASE_FILLED if that is enough */
    int is_filled_ahead;       /* the first segment is, on all ranks, see struct hr_task */
    /*
     * The store into slots; see hr_store_try. ns: how long the first fill took; from the first reduction on, when all
     * began: without waits for late ranks.
     */
    struct hr_store_trial trial;

    size_t filled, ready, begun, finished, drained; /* each at most the one before; filled is at most drained + 2 */
    struct hr_cross cross[HR_SEGMENTS_TRAVELLING_MAX]; /* segment k uses entry k % HR_SEGMENTS_TRAVELLING_MAX */
};

static inline unsigned hr_segments_parity(const struct hr_segments *segments, size_t k) {
    return (unsigned)((segments->first + k) & 1);
}

static inline char *hr_segments_slot(const struct hr_segments *segments, int local_rank, size_t k) {
    return hr_team_slot(segments->team, local_rank, hr_segments_parity(segments, k));
}

/* Takes the next `count` segment numbers of the team and makes the task ready to run; other fields stay. */
void hr_segments_begin(struct hr_segments *segments, const struct hr_segments_ops *ops, enum hr_phase drain_phase,
                       size_t count);

/* A call between the hosts of a team, with what all such calls have in common. */
static inline struct hr_cross_call hr_cross_call_of(const struct hr_team *team, const struct hr_codec *codec) {
    return (struct hr_cross_call){
        .transport = team->transport,
        .host = team->host,
        .host_count = team->host_count,
        .codec = codec,
        .kernel = team->node->kernel,
        .sent_bytes = &team->node->counts.link_bytes,
        .piece_bytes = team->tuning.piece,
    };
}

/* Makes team->cross_scratch at least so large, while nothing travels: its values are lost. HORO_OK or RESOURCE. */
hr_status hr_segments_reserve_scratch(struct hr_team *team, size_t bytes);

/* ---- Shares in a slot, for collectives in which each rank has one there ---- */

/*
 * The unit of shares of which so many lie in a slot at once: lines, unless that would take more than half of the slot.
 * A share is at most two units longer than the mean: *rounding is the room for that. HORO_ERR_RESOURCE for so many
 * that a slot has none.
 */
hr_status hr_segments_choose_unit(const struct hr_team *team, size_t shares, size_t *unit, size_t *rounding);

/* The parts of all ranks, or other vectors, cut into shares: an equal number for each owner and segment. */
struct hr_shares {
    const struct hr_fused *by_rank; /* NULL: of other vectors */
    size_t unit, count;
    size_t region_bytes; /* of each owner in a slot; 0: each has a slot */
    int owners;
};

/* Goes through what one owner carries in one segment: whose share it is, and where it lies in the slot. */
struct hr_walk {
    const struct hr_team *team;
    const struct hr_shares *shares;
    size_t index; /* of the share in each part */
    int next;     /* of team->rank_by_host */
    int rank;
    struct hr_range share;
    size_t at;
};

static inline struct hr_walk hr_walk_begin(const struct hr_team *team, const struct hr_shares *shares, size_t k,
                                           int owner) {
    const size_t index = k * (size_t)shares->owners + (size_t)owner;
    return (struct hr_walk){
        .team = team, .shares = shares, .index = index, .at = (size_t)owner * shares->region_bytes};
}

/* The share of the next vector, which has so many bytes. */
static inline void hr_walk_to(struct hr_walk *walk, size_t bytes) {
    walk->at += walk->share.bytes;
    walk->share = hr_units(walk->shares->unit, bytes, walk->index, walk->shares->count);
}

/* The share of the next rank: 1, or 0 behind the last one. */
static inline int hr_walk_on(struct hr_walk *walk) {
    if (walk->next == walk->team->size) {
        return 0;
    }
    walk->rank = walk->team->rank_by_host[walk->next++];
    hr_walk_to(walk, walk->shares->by_rank[walk->rank].bytes);
    return 1;
}

#endif
