/*
 * All-to-all over one arena; over several it is two_level_exchange.c. What a rank has for another is cut into as many
 * shares as there are segments. In each segment a rank shows its share for each of the others in its slot, one behind
 * the other, and takes out of their slots what is there for it. So all are at work in every segment, however many ranks
 * there are.
 *
 * Data of a rank for itself never passes a slot.
 */
#include "collective/collective.h"
#include "collective/two_level.h"

/* The share of what s has for d in segment k. */
static struct hr_range share_of(const struct hr_alltoall *run, int s, int d, size_t k) {
    return hr_units(run->unit, hr_alltoall_bytes(run, s, d), k, run->share_count);
}

static void show(struct hr_segments *segments, size_t k) {
    const struct hr_alltoall *run = (struct hr_alltoall *)segments;
    struct hr_team *team = segments->team;
    char *slot = hr_segments_slot(segments, team->local_rank, k);
    for (int i = 1; i < team->size; i++) {
        const int to = (team->rank + i) % team->size;
        const struct hr_range share = share_of(run, team->rank, to, k);
        hr_fused_pack(&run->to[to], share.offset, share.bytes, slot + run->starts[to], team->node->kernel, 1.0,
                      run->store);
    }
}

/* Each rank begins with another, so that not all read the same slot. */
static void take(struct hr_segments *segments, size_t k) {
    const struct hr_alltoall *run = (struct hr_alltoall *)segments;
    struct hr_team *team = segments->team;
    for (int i = 1; i < team->size; i++) {
        const int from = (team->rank + i) % team->size;
        const struct hr_range share = share_of(run, from, team->rank, k);
        hr_fused_put(&run->from[from], share.offset, share.bytes,
                     hr_segments_slot(segments, from, k) + run->places[from], team->node->kernel, run->result_store);
    }
}

static const struct hr_segments_ops one_host = {.fill = show, .drain = take};

/* ---- The beginning ---- */

/* The bytes of the shares for the ranks below `end` in the slot of s, as if each were as long as any of its kind. */
static size_t room_for(const struct hr_alltoall *run, int s, int end, size_t count) {
    size_t bytes = 0;
    for (int d = 0; d < end; d++) {
        bytes += hr_divide_up(hr_divide_up(hr_alltoall_bytes(run, s, d), run->unit), count) * run->unit;
    }
    return bytes;
}

/*
 * So many segments that what each rank shows fits its slot; a share is at most two units longer than the mean.
 * HORO_ERR_RESOURCE for so many ranks that a slot has no room for that.
 */
static hr_status cut_shares(struct hr_alltoall *run, size_t *count) {
    const struct hr_team *team = run->segments.team;
    const size_t segment = team->tuning.segment;
    const size_t others = (size_t)team->size - 1;
    size_t most = 0;
    run->unit = 2 * others * HR_LINE <= segment / 2 ? HR_LINE : 1;
    const size_t rounding = 2 * others * run->unit;
    if (rounding >= segment) {
        return HORO_ERR_RESOURCE;
    }
    for (int s = 0; s < team->size; s++) {
        size_t bytes = 0;
        for (int d = 0; d < team->size; d++) {
            bytes += hr_alltoall_bytes(run, s, d);
        }
        most = bytes > most ? bytes : most;
    }
    *count = hr_divide_up(most, segment); /* enough where all is even */
    for (int s = 0; s < team->size && *count > 0; s++) {
        if (room_for(run, s, team->size, *count) > segment) {
            *count = hr_divide_up(most, segment - rounding);
            break;
        }
    }
    return HORO_OK;
}

static hr_status begin_on_one_host(struct hr_alltoall *run) {
    struct hr_team *team = run->segments.team;
    const size_t size = (size_t)team->size;
    size_t count;
    HR_TRY(cut_shares(run, &count));
    HR_TRY(hr_segments_reserve_scratch(team, 2 * size * sizeof *run->starts));
    run->starts = (size_t *)(void *)team->cross_scratch;
    run->places = run->starts + size;
    run->share_count = count;
    for (int r = 0; r < team->size && count > 0; r++) {
        run->starts[r] = room_for(run, team->rank, r, count);
        run->places[r] = room_for(run, r, team->rank, count);
    }
    run->store = hr_store_choose_for_move(team, run->to[team->rank].bytes);
    run->segments.ops = &one_host;
    run->segments.drain_phase = HR_PHASE_FILLED;
    hr_segments_begin(&run->segments, count);
    return HORO_OK;
}

int hr_alltoall_begin(struct hr_alltoall *run, struct hr_team *team, const struct hr_fused *to,
                      const struct hr_fused *from, const size_t *bytes) {
    *run = (struct hr_alltoall){.segments = {.team = team}, .to = to, .from = from, .bytes = bytes};
    const struct hr_fused *mine = &to[team->rank];
    size_t received = 0;
    for (int r = 0; r < team->size; r++) {
        received += from[r].bytes;
    }
    run->result_store = hr_store_choose_for_result(team, received);
    for (size_t i = 0; i < mine->count; i++) { /* the pieces of both are alike: it is the same rows */
        team->node->kernel->copy(from[team->rank].pieces[i].output, mine->pieces[i].input, mine->pieces[i].bytes,
                                 run->result_store);
    }
    return team->host_count == 1 ? begin_on_one_host(run) : hr_two_level_exchange_begin(run);
}
