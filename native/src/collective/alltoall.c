/*
 * All-to-all over one arena. What a rank has for another is cut into as many
 * shares as there are segments. In each segment a rank shows its share for each of the others in its slot, one behind
 * the other, and takes out of their slots what is there for it. So all are at work in every segment, however many ranks
 * there are.
 *
 * Data of a rank for itself never passes a slot.
 */
#include <string.h>

#include "base/cut.h"
#include "collective/collective.h"

/* The bytes that s has for d and that pass a slot. */
static size_t bytes_of(const struct hr_alltoall *run, int s, int d) {
    return s == d ? 0 : run->bytes[(size_t)s * (size_t)run->segments.team->size + (size_t)d];
}

/* The share of what s has for d in segment k. */
static struct hr_range share_of(const struct hr_alltoall *run, int s, int d, size_t k) {
    return hr_units(run->shares.unit, bytes_of(run, s, d), k, run->shares.count);
}

static void show(struct hr_segments *segments, size_t k) {
    const struct hr_alltoall *run = (struct hr_alltoall *)segments;
    struct hr_team *team = segments->team;
    char *slot = hr_segments_slot(segments, team->local_rank, k);
    for (int i = 1; i < team->size; i++) {
        const int to = (team->rank + i) % team->size;
        const struct hr_range share = share_of(run, team->rank, to, k);
        hr_fused_pack(&run->to[to], share.offset, share.bytes, slot + run->starts[to], team->node->kernel, 1.0,
                      segments->trial.store);
    }
}

/* Copies what this rank has for itself. */
static void keep_own(const struct hr_alltoall *run) {
    const struct hr_team *team = run->segments.team;
    const struct hr_fused *own = &run->from[team->rank];
    hr_fused_unpack(own, 0, own->bytes, NULL, team->node->kernel, run->result_store);
}

/* Each rank begins with another, so that not all read the same slot. */
static void take(struct hr_segments *segments, size_t k) {
    const struct hr_alltoall *run = (struct hr_alltoall *)segments;
    struct hr_team *team = segments->team;
    if (k == 0) { /* not before all have agreed, as what is shown is */
        keep_own(run);
    }
    for (int i = 1; i < team->size; i++) {
        const int from = (team->rank + i) % team->size;
        const struct hr_range share = share_of(run, from, team->rank, k);
        hr_fused_unpack(&run->from[from], share.offset, share.bytes,
                        hr_segments_slot(segments, from, k) + run->places[from], team->node->kernel, run->result_store);
    }
}

static const struct hr_segments_ops one_host = {.fill = show, .drain = take};

/* The bytes of the shares for the ranks below `end` in the slot of s, as if each were as long as any of its kind. */
static size_t room_for(const struct hr_alltoall *run, int s, int end, size_t count) {
    size_t bytes = 0;
    for (int d = 0; d < end; d++) {
        bytes += hr_divide_up(hr_divide_up(bytes_of(run, s, d), run->shares.unit), count) * run->shares.unit;
    }
    return bytes;
}

static hr_status begin_on_one_host(struct hr_alltoall *run) {
    struct hr_team *team = run->segments.team;
    const size_t size = (size_t)team->size;
    const size_t segment = team->tuning.segment;
    size_t most = 0;
    size_t rounding;
    HR_TRY(hr_segments_choose_unit(team, size - 1, &run->shares.unit, &rounding));
    HR_TRY(hr_segments_reserve_scratch(team, 2 * size * sizeof *run->starts));
    for (int s = 0; s < team->size; s++) {
        size_t bytes = 0;
        for (int d = 0; d < team->size; d++) {
            bytes += bytes_of(run, s, d);
        }
        most = bytes > most ? bytes : most;
    }
    /* so many segments that what each rank shows fits its slot: of these there are enough where all is even */
    size_t count = hr_divide_up(most, segment);
    for (int s = 0; s < team->size && count > 0; s++) {
        if (room_for(run, s, team->size, count) > segment) {
            count = hr_divide_up(most, segment - rounding);
            break;
        }
    }
    run->starts = (size_t *)(void *)team->cross_scratch;
    run->places = run->starts + size;
    run->shares.count = count;
    if (count == 0) {
        keep_own(run);
    }
    for (int r = 0; r < team->size && count > 0; r++) {
        run->starts[r] = room_for(run, team->rank, r, count);
        run->places[r] = room_for(run, r, team->rank, count);
    }
    run->segments.trial.store = hr_store_choose_for_move(team, run->to[team->rank].bytes);
    hr_segments_begin(&run->segments, &one_host, HR_PHASE_FILLED, count);
    return HORO_OK;
}

/*
 * ---- Several hosts (two-level form) ----
 *
 * What the ranks of one host have for those of another, or for one
 * another, is a *stream*: of each sender in turn what it has for each receiver, both in the order of their ranks. Every
 * stream is cut into `share_count` shares, an equal number for each owner and segment: share j belongs to segment
 * j / owners and lies in the slot of owner j % owners. There lie, one behind the other, the shares of the streams from
 * this host to each host, this one included; then those from each other host to this one; then those that only pass
 * here.
 *
 * So the ranks of a host write what they have into the slots of the owners, each owner exchanges with its like on the
 * other hosts, and each rank takes what is for it out of the slots. Since streams are cut and not what one rank has for
 * one other, a slot is full however unequal that is, and it does not matter how many ranks there are.
 */

static size_t *stream(const struct hr_alltoall *run, int origin, int destination) {
    return &run->streams[(size_t)origin * (size_t)run->segments.team->host_count + (size_t)destination];
}

/* The part of a share in bytes [begin, begin + bytes) of its stream: the offset from `begin`, and the length. */
static struct hr_range overlap(struct hr_range share, size_t begin, size_t bytes) {
    const size_t first = share.offset > begin ? share.offset : begin;
    const size_t end = hr_smaller(share.offset + share.bytes, begin + bytes);
    return first < end ? (struct hr_range){first - begin, end - first} : (struct hr_range){0};
}

static void fill_owners(struct hr_segments *segments, size_t k) {
    const struct hr_alltoall *run = (struct hr_alltoall *)segments;
    struct hr_team *team = segments->team;
    for (int owner = 0; owner < run->shares.owners; owner++) {
        struct hr_walk walk = hr_walk_begin(team, &run->shares, k, owner);
        for (int host = 0, i = 0; host < team->host_count; host++) { /* i: of team->rank_by_host */
            hr_walk_to(&walk, *stream(run, team->host, host));
            char *data = hr_segments_slot(segments, owner, k) + walk.at;
            size_t begin = run->starts[host];
            for (const int end = i + team->host_size[host]; i < end; i++) {
                const int rank = team->rank_by_host[i];
                const struct hr_range part = overlap(walk.share, begin, bytes_of(run, team->rank, rank));
                if (part.bytes > 0) {
                    hr_fused_pack(&run->to[rank], part.offset, part.bytes,
                                  data + (begin + part.offset - walk.share.offset), team->node->kernel, 1.0,
                                  HR_STORE_ORDINARY);
                }
                begin += bytes_of(run, team->rank, rank);
            }
        }
    }
}

static void drain_owners(struct hr_segments *segments, size_t k) {
    const struct hr_alltoall *run = (struct hr_alltoall *)segments;
    struct hr_team *team = segments->team;
    for (int owner = 0; owner < run->shares.owners; owner++) {
        struct hr_walk walk = hr_walk_begin(team, &run->shares, k, owner);
        struct hr_walk own = walk;
        for (int host = 0; host < team->host_count; host++) {
            hr_walk_to(&walk, *stream(run, team->host, host));
            own = host == team->host ? walk : own;
        }
        for (int host = 0, i = 0; host < team->host_count; host++) {
            if (host != team->host) {
                hr_walk_to(&walk, *stream(run, host, team->host));
            }
            const struct hr_walk *at = host == team->host ? &own : &walk;
            const char *data = hr_segments_slot(segments, owner, k) + at->at;
            for (const int end = i + team->host_size[host]; i < end; i++) {
                const int rank = team->rank_by_host[i];
                const size_t begin = run->places[rank];
                const struct hr_range part = overlap(at->share, begin, bytes_of(run, rank, team->rank));
                if (part.bytes > 0) {
                    hr_fused_unpack(&run->from[rank], part.offset, part.bytes,
                                    data + (begin + part.offset - at->share.offset), team->node->kernel,
                                    HR_STORE_ORDINARY);
                }
            }
        }
    }
}

/* Whether a stream of other hosts passes the slots of this one. */
static int passes(const struct hr_team *team, int origin, int destination) {
    int hosts[HR_CROSS_HOPS_MAX];
    const int count = hr_cross_way(team->host_count, origin, destination, hosts);
    for (int i = 0; i < count; i++) {
        if (hosts[i] == team->host) {
            return 1;
        }
    }
    return 0;
}

static void begin(struct hr_segments *segments, size_t k, struct hr_cross *cross) {
    const struct hr_alltoall *run = (struct hr_alltoall *)segments;
    const struct hr_team *team = segments->team;
    const size_t pairs = (size_t)team->host_count * (size_t)team->host_count;
    struct hr_cross_part *parts = run->parts + k % HR_SEGMENTS_TRAVELLING_MAX * pairs;
    /* all parts are as long as on every host; those that come here or pass here have a place */
    const int h = team->host_count;
    char *slot = hr_segments_slot(segments, team->local_rank, k);
    struct hr_walk walk = hr_walk_begin(team, &run->shares, k, team->local_rank);
    for (int i = 0; i < h; i++) {
        hr_walk_to(&walk, *stream(run, team->host, i));
        parts[team->host * h + i] = (struct hr_cross_part){slot + walk.at, walk.share.bytes};
    }
    parts[team->host * h + team->host].bytes = 0; /* data that stays on its host does not travel */
    for (int i = 0; i < h; i++) {
        if (i != team->host) {
            hr_walk_to(&walk, *stream(run, i, team->host));
            parts[i * h + team->host] = (struct hr_cross_part){slot + walk.at, walk.share.bytes};
        }
    }
    for (int origin = 0; origin < h; origin++) {
        for (int destination = 0; destination < h; destination++) {
            if (origin == team->host || destination == team->host || origin == destination) {
                continue;
            }
            const struct hr_walk before = walk;
            const int is_here = passes(team, origin, destination);
            hr_walk_to(&walk, *stream(run, origin, destination));
            parts[origin * h + destination] =
                (struct hr_cross_part){is_here ? slot + walk.at : NULL, walk.share.bytes};
            walk = is_here ? walk : before;
        }
    }
    struct hr_cross_call call = hr_cross_call_of(team, hr_codec_find(HORO_UINT8, 0));
    call.parts = parts;
    call.scratch = run->scratch + k % HR_SEGMENTS_TRAVELLING_MAX * run->scratch_bytes;
    hr_cross_begin(&hr_cross_exchange, cross, &call);
}

static const struct hr_segments_ops several_hosts = {.fill = fill_owners, .begin = begin, .drain = drain_owners};

/* The tables of a run stay in the scratch of the team until the next collective begins. */
static hr_status reserve_tables(struct hr_alltoall *run) {
    struct hr_team *team = run->segments.team;
    const size_t hosts = (size_t)team->host_count;
    const size_t pairs = hosts * hosts;
    size_t bytes = 0;
    const size_t parts = hr_place(&bytes, HR_SEGMENTS_TRAVELLING_MAX * pairs * sizeof *run->parts, HR_CROSS_ALIGNMENT);
    const size_t streams = hr_place(&bytes, pairs * sizeof *run->streams, HR_CROSS_ALIGNMENT);
    const size_t starts = hr_place(&bytes, hosts * sizeof *run->starts, HR_CROSS_ALIGNMENT);
    const size_t places = hr_place(&bytes, (size_t)team->size * sizeof *run->places, HR_CROSS_ALIGNMENT);
    const size_t traffic = hr_place(&bytes, hosts * sizeof *run->traffic, HR_CROSS_ALIGNMENT);
    run->scratch_bytes = hr_round_up(hr_cross_exchange_scratch_bytes(team->host_count), HR_CROSS_ALIGNMENT);
    const size_t scratch = hr_place(&bytes, HR_SEGMENTS_TRAVELLING_MAX * run->scratch_bytes, HR_CROSS_ALIGNMENT);
    HR_TRY(hr_segments_reserve_scratch(team, bytes));
    memset(team->cross_scratch, 0, bytes);
    run->parts = (struct hr_cross_part *)(void *)(team->cross_scratch + parts);
    run->streams = (size_t *)(void *)(team->cross_scratch + streams);
    run->starts = (size_t *)(void *)(team->cross_scratch + starts);
    run->places = (size_t *)(void *)(team->cross_scratch + places);
    run->traffic = (struct hr_traffic *)(void *)(team->cross_scratch + traffic);
    run->scratch = team->cross_scratch + scratch;
    return HORO_OK;
}

/* So many segments that the shares of all streams that pass a host find room in its slots. */
static hr_status count_segments(struct hr_alltoall *run, size_t *count) {
    const struct hr_team *team = run->segments.team;
    const int h = team->host_count;
    size_t streams = 0;
    size_t bytes = 0;
    for (int pair = 0; pair < h * h; pair++) {
        const int origin = pair / h;
        const int destination = pair % h;
        int hosts[HR_CROSS_HOPS_MAX + 2];
        int passed = hr_cross_way(h, origin, destination, hosts);
        hosts[passed++] = origin;
        hosts[passed] = destination;
        passed += destination != origin;
        for (int i = 0; i < passed; i++) {
            struct hr_traffic *traffic = &run->traffic[hosts[i]];
            traffic->bytes += *stream(run, origin, destination);
            traffic->streams++;
            bytes = traffic->bytes > bytes ? traffic->bytes : bytes;
            streams = traffic->streams > streams ? traffic->streams : streams;
        }
    }
    size_t rounding;
    HR_TRY(hr_segments_choose_unit(team, streams, &run->shares.unit, &rounding));
    *count = hr_divide_up(bytes, (team->tuning.segment - rounding) * (size_t)run->shares.owners);
    return HORO_OK;
}

static hr_status begin_between_hosts(struct hr_alltoall *run) {
    struct hr_team *team = run->segments.team;
    HR_TRY(reserve_tables(run));
    /* of all streams, in their order: how long they are, and where in them what I have and what I get */
    for (int i = 0; i < team->size; i++) {
        const int s = team->rank_by_host[i];
        for (int j = 0; j < team->size; j++) {
            const int d = team->rank_by_host[j];
            const int to = team->host_of_rank[d];
            size_t *bytes = stream(run, team->host_of_rank[s], to);
            if (s == team->rank && (j == 0 || to != team->host_of_rank[team->rank_by_host[j - 1]])) {
                run->starts[to] = *bytes;
            }
            if (d == team->rank) {
                run->places[s] = *bytes;
            }
            *bytes += bytes_of(run, s, d);
        }
    }
    size_t total = 0;
    for (int i = 0; i < team->host_count * team->host_count; i++) {
        total += run->streams[i];
    }
    size_t count;
    run->shares.owners = total <= team->tuning.gather_spread ? 1 : team->owner_count;
    HR_TRY(count_segments(run, &count));
    run->shares.count = count * (size_t)run->shares.owners;
    run->segments.carries = team->local_rank < run->shares.owners;
    hr_segments_begin(&run->segments, &several_hosts, HR_PHASE_REDUCED, count);
    return HORO_OK;
}

hr_status hr_alltoall_begin(struct hr_alltoall *run, struct hr_team *team, const struct hr_fused *to,
                            const struct hr_fused *from, const size_t *bytes) {
    *run = (struct hr_alltoall){.segments = {.team = team}, .to = to, .from = from, .bytes = bytes};
    size_t received = 0;
    for (int r = 0; r < team->size; r++) {
        received += from[r].bytes;
    }
    run->result_store = hr_store_choose_for_result(team, received);
    if (team->host_count == 1) {
        return begin_on_one_host(run);
    }
    keep_own(run);
    return begin_between_hosts(run);
}
