/*
 * Large allreduces whose tensor is on a GPU, and which flow: they are announced when their first piece is in host
 * memory, and their batch takes the other pieces as they come. What is done of the result goes back meanwhile
 * (docs/adr/0052-large-tensors-on-gpus-flow.md).
 *
 * The copies to the host are behind one another and wait for nothing, so a batch that waits for one waits for the GPU's
 * copying alone. It does so as it waits for another rank: the driver goes on with all else, and each piece wakes it.
 * Only a GPU that fails calls nobody. Then the other ranks cannot be told in the request's place any more, and the
 * group ends.
 */
#include <stdio.h>

#include "base/cut.h"
#include "base/op.h"
#include "device/staging.h"
#include "engine/engine.h"

enum {
    FLOWING_BYTES = 4 << 20, /* from here on two pieces are worth it */
    PIECE_BYTES = 2 << 20,   /* the calls for a piece take a tenth of the time of its copies */
    PIECES_MAX = 32,         /* which the caller's thread begins all, some ten microseconds each */
};

#define LOOK_NS 1000000ll /* for a failure of the GPU, while nothing else can go on */

/* ---- Submission ---- */

int hr_engine_may_flow(const struct hr_request *request) {
    const horo_request *call = &request->call;
    return call->op == HORO_ALLREDUCE && call->reduce_op != HORO_ADASUM && call->tensor_count == 1 &&
           request->data_bytes >= FLOWING_BYTES && request->team_size > 1 && request->lane->backend->ops->flows;
}

size_t hr_engine_piece_bytes(size_t bytes) {
    const size_t most = hr_round_up(hr_divide_up(bytes, PIECES_MAX), HR_STAGED_ALIGNMENT);
    return most > PIECE_BYTES ? most : PIECE_BYTES;
}

/* ---- The driver ---- */

static int has_come(const struct hr_request *request) {
    return atomic_load(&request->staging->flow.arrived) >= (size_t)request->data_bytes;
}

void hr_engine_end_for_copy(struct hr_engine *engine, const horo_request *call, const char *text) {
    char words[HORO_MESSAGE_MAX];
    const int length = snprintf(words, sizeof words,
                                "an error on GPU %d that lost the values of %s '%.60s': %.500s; if a kernel of the "
                                "program is at fault, a run with CUDA_LAUNCH_BLOCKING=1 shows which",
                                call->device - 1, hr_op_name(call->op), call->name, text);
    hr_node_end(engine->node, HORO_ERR_PEER_LOST, engine->node->rank, words, (size_t)length);
}

/* Returns what is done by a whole piece more; the rest is the caller's, who is told if the GPU's driver refuses. */
static void return_done(const struct hr_request *request) {
    struct hr_staging *staging = request->staging;
    struct hr_error ignored = {0};
    const size_t piece_bytes = staging->tensors[0].piece_bytes;
    const size_t done = staging->flow.done;
    if (done >= staging->returned + piece_bytes && !staging->returns_late) {
        staging->returns_late = hr_staging_return(staging, done, &ignored) != HORO_OK;
    }
}

static void look_for_failure(struct hr_lane *lane, const struct hr_request *request) {
    struct hr_error error = {0};
    if (hr_staging_check(request->staging, &error) != HORO_OK) {
        hr_engine_end_for_copy(lane->engine, &request->call, error.text);
    }
}

void hr_lane_follow_flows(struct hr_lane *lane, struct hr_request *const *requests, size_t count, int is_blocked) {
    const int64_t now_ns = is_blocked ? hr_now_ns() : 0;
    const int is_due = lane->executor.look_ns != 0 && now_ns >= lane->executor.look_ns;
    int awaits_copy = 0;
    for (size_t i = 0; i < count; i++) {
        if (!requests[i]->flows) {
            continue;
        }
        return_done(requests[i]);
        if (is_blocked && !has_come(requests[i])) {
            awaits_copy = 1;
            if (is_due) {
                look_for_failure(lane, requests[i]);
            }
        }
    }
    if (!awaits_copy) {
        lane->executor.look_ns = 0;
    } else if (is_due || lane->executor.look_ns == 0) {
        lane->executor.look_ns = now_ns + LOOK_NS;
    }
}

int hr_engine_are_flows_back(const struct hr_engine *engine) {
    for (int i = 0; i < engine->lane_count; i++) {
        if (!hr_lane_are_flows_back(engine->lanes[i])) {
            return 0;
        }
    }
    return 1;
}
