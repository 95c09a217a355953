/*
 * Allreduce over one arena; over several it is two_level.c. Each segment passes the stages of stages.h; small data
 * takes one phase instead of two, data of one rank alone none.
 */
#include <math.h>

#include "collective/collective.h"
#include "collective/two_level.h"

static struct hr_allreduce *run_of(struct hr_segments *segments) {
    return (struct hr_allreduce *)segments; /* its first member */
}

/* ---- One host ---- */

static void fill(struct hr_segments *segments, size_t k) {
    hr_stages_fill(&run_of(segments)->stages, k);
}

static void reduce(struct hr_segments *segments, size_t k) {
    hr_stages_reduce(&run_of(segments)->stages, k);
}

static void finish(struct hr_segments *segments, size_t k) {
    hr_team_arrive(segments->team, HR_PHASE_REDUCED, hr_segments_parity(segments, k));
}

static void drain(struct hr_segments *segments, size_t k) {
    hr_stages_drain(&run_of(segments)->stages, k);
}

static void exchange(struct hr_segments *segments, size_t k) {
    hr_stages_exchange(&run_of(segments)->stages, k);
}

static const struct hr_segments_ops one_host = {.fill = fill, .reduce = reduce, .finish = finish, .drain = drain};
static const struct hr_segments_ops exchanging = {
    .fill = fill, .reduce = reduce, .finish = finish, .drain = drain, .exchange = exchange};

/* ---- Small data on one host: everybody shows everything and reduces everything, in rank order ---- */

static void flat_fill(struct hr_segments *segments, size_t k) {
    const struct hr_stages *stages = &run_of(segments)->stages;
    const struct hr_fused *fused = stages->fused;
    hr_fused_pack(fused, 0, fused->bytes, hr_stages_slot(stages, stages->team->local_rank, k),
                  stages->team->node->kernel, stages->prescale, HR_STORE_ORDINARY);
    hr_team_arrive(stages->team, HR_PHASE_FILLED, hr_segments_parity(segments, k));
}

static void flat_drain(struct hr_segments *segments, size_t k) {
    struct hr_stages *stages = &run_of(segments)->stages;
    const struct hr_fused *fused = stages->fused;
    const int is_plain = hr_codec_is_plain(fused->codec);
    if (!is_plain) {
        char result[HR_FLAT_MAX]; /* packed here too: fused with others or not, a tensor gets the same bits */
        hr_stages_reduce_part(stages, k, 0, fused->bytes, NULL, result, NULL, stages->postscale);
        hr_fused_unpack(fused, 0, fused->bytes, result, stages->team->node->kernel);
    }
    for (size_t i = 0; i < fused->count && is_plain; i++) {
        const struct hr_piece *piece = &fused->pieces[i];
        hr_stages_reduce_part(stages, k, piece->offset, piece->bytes, NULL, piece->output, NULL, stages->postscale);
    }
    hr_team_arrive(stages->team, HR_PHASE_DRAINED, hr_segments_parity(segments, k));
}

static const struct hr_segments_ops flat = {.fill = flat_fill, .drain = flat_drain};

/* ---- One rank ---- */

/* Packs what would travel all the same, so that a script sees what it would see with more ranks. */
static void run_alone_packed(const struct hr_stages *call) {
    const struct hr_fused *fused = call->fused;
    const struct hr_codec *codec = fused->codec;
    const struct hr_kernel *kernel = call->team->node->kernel;
    char packed[HR_CODEC_BLOCK_BYTES_MAX];
    const size_t step = hr_codec_blocks(codec, sizeof packed) * codec->block_bytes;
    for (size_t at = 0; at < fused->bytes; at += step) {
        const size_t bytes = fused->bytes - at < step ? fused->bytes - at : step;
        hr_fused_pack(fused, at, bytes, packed, kernel, call->prescale, HR_STORE_ORDINARY);
        if (hr_scale_changes(call->postscale)) {
            codec->scale(codec, kernel, packed, hr_codec_blocks(codec, bytes), call->postscale);
        }
        hr_fused_unpack(fused, at, bytes, packed, kernel);
    }
}

static void run_alone(const struct hr_stages *call) {
    const struct hr_kernel *kernel = call->team->node->kernel;
    const int dtype = call->fused->codec->dtype;
    for (size_t i = 0; i < call->fused->count; i++) {
        const struct hr_piece *piece = &call->fused->pieces[i];
        if (piece->output != piece->input) {
            kernel->copy(piece->output, piece->input, piece->bytes, HR_STORE_ORDINARY);
        }
        if (call->prescale != 1.0) {
            kernel->scale(dtype, piece->output, piece->output, piece->count, hr_scale_by(call->prescale),
                          HR_STORE_ORDINARY);
        }
        if (hr_scale_changes(call->postscale)) {
            kernel->scale(dtype, piece->output, piece->output, piece->count, call->postscale, HR_STORE_ORDINARY);
        }
    }
}

double hr_partial_scale(const struct hr_codec *codec, int reduce_op, double postscale) {
    const double size = postscale < 0 ? -postscale : postscale;
    if (codec->wire_dtype != HORO_FLOAT16 || reduce_op != HORO_SUM || !(size < 1.0)) {
        return 1.0;
    }
    int exponent;
    (void)frexp(size, &exponent);
    return ldexp(1.0, exponent - 1);
}

/* ---- The task ---- */

static void begin_on_one_host(struct hr_allreduce *run) {
    struct hr_segments *segments = &run->segments;
    if (run->fused.bytes <= segments->team->tuning.flat) {
        segments->ops = &flat;
        segments->drain_phase = HR_PHASE_FILLED;
    } else {
        segments->ops = hr_stages_may_exchange(&run->stages) ? &exchanging : &one_host;
        segments->drain_phase = HR_PHASE_REDUCED;
        if (run->fused.bytes >= segments->team->tuning.stream) {
            segments->trial = hr_store_try(&segments->team->allreduce_stores, run->fused.bytes);
            run->stages.store = segments->trial.store;
        }
    }
}

int hr_allreduce_begin(struct hr_allreduce *run, struct hr_team *team, const struct hr_fused *fused, int reduce_op,
                       double prescale, struct hr_scale postscale) {
    run->segments = (struct hr_segments){.team = team};
    run->fused = *fused;
    run->stages = (struct hr_stages){
        .team = team,
        .fused = &run->fused,
        .reduce_op = reduce_op,
        .prescale = prescale,
        .partial_scale = 1.0,
        .postscale = postscale,
        .owners = fused->bytes <= team->tuning.flat ? 1 : team->owner_count,
        .unit = hr_share_unit(fused->codec->block_bytes),
        .segment_bytes = hr_segment_bytes(team, fused->codec),
        .first = team->segment,
    };
    if (team->size == 1 && fused->bytes > 0) {
        (hr_codec_is_plain(fused->codec) ? run_alone : run_alone_packed)(&run->stages);
    }
    if (team->size == 1 || fused->bytes == 0) {
        hr_segments_begin(&run->segments, 0);
        return HORO_OK;
    }
    if (team->host_count > 1) {
        run->stages.partial_scale = hr_partial_scale(fused->codec, reduce_op, postscale.factor);
        run->stages.postscale.factor /= run->stages.partial_scale;
        HR_TRY(hr_two_level_begin(run));
    } else {
        begin_on_one_host(run);
    }
    hr_segments_begin(&run->segments, hr_divide_up(fused->bytes, run->stages.segment_bytes));
    return HORO_OK;
}
