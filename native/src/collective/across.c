#include "collective/across.h"

#include "collective/two_level.h"

static struct hr_cross *cross_of(struct hr_across *across, size_t k) {
    return &across->cross[k % HR_SEGMENTS_TRAVELLING_MAX];
}

/* For elements of any width. */
static size_t scratch_bytes_of(const struct hr_team *team, size_t piece_bytes) {
    size_t most = 0;
    for (size_t width = 1; width <= 8; width *= 2) {
        const size_t bytes = hr_two_level_scratch_bytes(&team->tuning, team->host_count, 1, width, piece_bytes);
        most = bytes > most ? bytes : most;
    }
    return most;
}

int hr_across_begin(struct hr_across *across, struct hr_team *team, int reduce_op, size_t piece_bytes) {
    across->team = team;
    across->reduce_op = reduce_op;
    across->scratch_bytes = scratch_bytes_of(team, piece_bytes);
    across->begun = 0;
    across->finished = 0;
    return hr_segments_reserve_scratch(team, HR_SEGMENTS_TRAVELLING_MAX * across->scratch_bytes);
}

int hr_across_may_add(const struct hr_across *across) {
    const size_t travelling = across->begun - across->finished;
    return travelling == 0 ||
           (travelling < HR_SEGMENTS_TRAVELLING_MAX &&
            hr_cross_all_posted(&across->cross[(across->begun - 1) % HR_SEGMENTS_TRAVELLING_MAX]));
}

int hr_across_add(struct hr_across *across, const struct hr_codec *codec, void *data, size_t bytes) {
    const struct hr_team *team = across->team;
    const size_t k = across->begun;
    struct hr_cross_call call = hr_cross_call_of(team, codec);
    call.data = data;
    call.count = hr_codec_blocks(codec, bytes);
    call.reduce_op = across->reduce_op;
    call.scratch = team->cross_scratch + k % HR_SEGMENTS_TRAVELLING_MAX * across->scratch_bytes;
    HR_TRY(hr_two_level_cross(&team->tuning, bytes)->begin(cross_of(across, k), &call));
    across->begun++;
    return HORO_OK;
}

int hr_across_progress(struct hr_across *across) {
    for (size_t k = across->finished; k < across->begun; k++) {
        HR_TRY(hr_cross_move(across->team, cross_of(across, k)));
    }
    if (across->finished == across->begun || cross_of(across, across->finished)->status != HORO_OK) {
        return 0;
    }
    across->finished++;
    return 1;
}

void hr_across_cancel(struct hr_across *across) {
    hr_team_abandon_data(across->team); /* posted data lies in here and in memory that goes away */
}
