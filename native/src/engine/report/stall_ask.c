/* Questions to ranks that have not submitted what others wait for; each writes where it stands to its own log. */
#include "arena/question.h"
#include "engine/report/stall.h"
#include "wire/frame.h"

#define ANSWER_NS 2000000000ll /* an interpreter that is not busy answers in milliseconds */

static void ask_below(struct hr_lane *lane, int link_index, int asker) {
    size_t mark;
    struct hr_buffer *out = &lane->leader.links[link_index].out;
    if (!lane->leader.links[link_index].open || hr_frame_begin(out, &mark) != HORO_OK) {
        return; /* a question is not worth the end of the job */
    }
    if (hr_wire_put(out, &(struct hr_wire_message){.type = HR_WIRE_ASK, .rank = asker}) == HORO_OK) {
        hr_frame_end(out, mark);
    } else {
        out->end = out->begin + mark - 4; /* without its length */
    }
}

void hr_stall_ask(struct hr_lane *lane, const struct hr_stalled *stalled, int64_t now_ns) {
    const struct hr_team *team = lane->team;
    if (lane->stall.answers_ns != 0) {
        return; /* one question at a time */
    }
    for (int member = 0; member < team->local_size; member++) {
        if (hr_stall_is_waited_for(lane, stalled, member)) {
            hr_arena_ask(&lane->node->arena, team->index_of_local[member]);
        }
    }
    for (int i = lane->leader.has_parent; i < lane->leader.link_count; i++) {
        if (hr_stall_is_waited_for(lane, stalled, team->local_size + i - lane->leader.has_parent)) {
            ask_below(lane, i, lane->node->rank);
        }
    }
    lane->stall.answers_ns = now_ns + ANSWER_NS;
}

int hr_leader_pass_question(struct hr_lane *lane, int asker) {
    const struct hr_team *team = lane->team;
    for (int member = 0; member < team->local_size; member++) {
        if (!hr_arena_pending_any(&lane->node->arena, team->index_of_local[member])) {
            hr_arena_ask(&lane->node->arena, team->index_of_local[member]);
        }
    }
    for (int i = lane->leader.has_parent; i < lane->leader.link_count; i++) {
        ask_below(lane, i, asker);
    }
    lane->stall.answers_ns = hr_now_ns() + ANSWER_NS;
    hr_part_expect(&lane->engine->driver.stall, lane->stall.answers_ns);
    return HORO_OK;
}

void hr_stall_check_answers(struct hr_lane *lane, int64_t now_ns) {
    if (lane->stall.answers_ns == 0 || now_ns < lane->stall.answers_ns) {
        return;
    }
    lane->stall.answers_ns = 0;
    for (int member = 0; member < lane->team->local_size; member++) {
        if (hr_arena_owes_answer(&lane->node->arena, lane->team->index_of_local[member])) {
            char name[HR_NAME_TEXT_BYTES];
            (void)hr_node_name_rank(lane->node, lane->team->job_rank[lane->team->rank_of_local[member]], name,
                                    sizeof name);
            hr_log(&lane->node->log, HORO_LOG_WARNING,
                   "%s does not answer where it stands: its Python interpreter is busy in a call that keeps it, or its "
                   "process is stopped",
                   name);
        }
    }
}
