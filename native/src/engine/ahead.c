/*
 * Two hosts make the record of a small allreduce alike. Where only the other host's data is missing, the root does not
 * wait for it but sends what its own host has (AHEAD), as the other host sends its own (DATA) without waiting for the
 * root. Each then has both, makes the same RESULT record of them and writes it to its own copy of the log: each host
 * waits for one trip of the other's data, and no record travels.
 *
 * The log stays one. The root writes nothing else while an AHEAD is out, and each one is answered once, over a link
 * that keeps the order:
 *
 *     the other host, when AHEAD comes      | answers                              | the record
 *     --------------------------------------+--------------------------------------+--------------------------------
 *     has sent DATA of that tensor and for  | nothing: that DATA is the answer     | made alike by both
 *     that place in the log                 |                                      |
 *     has announced something else, which   | RELEASE                              | the root's, and handed down
 *     the log does not have yet             |                                      |
 *     neither: keeps it until               |                                      |
 *     - it has that tensor's data           | DATA                                 | made alike by both
 *     - it announces something else         | RELEASE, in front of it              | the root's, and handed down
 *     - RECALL comes: the root has a record | RELEASE                              | the root's, and handed down
 *       to write, LEAVE for example         |                                      |
 *
 * DATA says for which place in the log it was sent, since records may be on their way down meanwhile: DATA for an
 * earlier place is an announcement like any other. A RECALL that finds nothing kept has crossed the answer.
 *
 * Both reduce the same two sums in the same order, that of the root's host first, so the bits are the same.
 */
#include <string.h>

#include "engine/engine.h"

/* The child host, the last of the root's members. */
static int other_host(const struct hr_lane *lane) {
    return lane->leader.agree.config.member_count - 1;
}

static uint8_t *spare(const struct hr_lane *lane) {
    return hr_carry_data(lane, lane->leader.agree.config.member_count);
}

/* The sum of what the root's own ranks have carried. */
static uint8_t *own_sum(const struct hr_lane *lane) {
    return lane->team->local_size > 1 ? spare(lane) : hr_carry_data(lane, 0);
}

static int put_position(struct hr_lane *lane, enum hr_wire_type type) {
    struct hr_buffer *out = &lane->leader.links[0].out;
    size_t mark;
    HR_TRY(hr_frame_begin(out, &mark));
    HR_TRY(hr_wire_put_position(out, type, lane->leader.log_bytes));
    hr_frame_end(out, mark);
    return HORO_OK;
}

/* The RESULT record of two sums, the root's host's first, framed, at the end of `out`. */
static int put_result(struct hr_lane *lane, uint8_t *first, const uint8_t *second, struct hr_buffer *out) {
    const struct hr_carry *carry = &lane->leader.carry;
    carry->contributions[0] = first;
    carry->contributions[1] = second;
    HR_TRY(hr_carry_reduce(lane, 2, 1, first));
    return hr_carry_put(lane, HR_WIRE_RESULT, first, out);
}

/* ---- The root ---- */

int hr_ahead_may_go(const struct hr_lane *lane) {
    const struct hr_leader *leader = &lane->leader;
    return lane->is_root && lane->team->host_count == 2 && leader->ahead.id == 0 &&
           leader->ahead.last_end != leader->log_bytes + 1 && leader->leaver == 0 && leader->cycle_ns == 0 &&
           !leader->tuning.is_due && leader->links[0].open && hr_carry_lacks_last(lane) &&
           hr_agree_lacks_only(&leader->agree, other_host(lane)) == leader->carry.id;
}

int hr_ahead_go(struct hr_lane *lane) {
    if (!hr_ahead_may_go(lane)) {
        return 0;
    }
    struct hr_leader *leader = &lane->leader;
    const struct hr_carry *carry = &leader->carry;
    if (lane->team->local_size > 1) {
        HR_TRY(hr_carry_reduce_host(lane, own_sum(lane)));
    }
    HR_TRY(hr_carry_put(lane, HR_WIRE_AHEAD, own_sum(lane), &leader->links[0].out));
    leader->ahead =
        (struct hr_ahead){.id = carry->id, .bytes = carry->bytes, .last_end = leader->log_bytes + 1};
    return 1;
}

int hr_ahead_recall(struct hr_lane *lane) {
    HR_TRY(put_position(lane, HR_WIRE_RECALL));
    lane->leader.ahead.is_recalled = 1;
    return 1;
}

/* The one that is out has been answered. */
static void end_ahead(struct hr_lane *lane) {
    lane->leader.ahead.id = 0;
    lane->leader.ahead.is_recalled = 0;
}

int hr_ahead_take_back(struct hr_lane *lane, const struct hr_wire_message *release) {
    if (!hr_ahead_is_out(lane) || release->at != lane->leader.log_bytes) {
        return HORO_ERR_INTERNAL;
    }
    end_ahead(lane);
    return HORO_OK;
}

int hr_ahead_match_data(struct hr_lane *lane, const struct hr_wire_message *message) {
    struct hr_leader *leader = &lane->leader;
    if (!hr_ahead_is_out(lane) || message->id != leader->ahead.id || message->data_bytes != leader->ahead.bytes ||
        message->at != leader->log_bytes) {
        return 0;
    }
    uint8_t *theirs = hr_carry_data(lane, other_host(lane));
    const size_t mark = hr_buffer_size(&leader->log_out);
    memcpy(theirs, message->data, message->data_bytes);
    HR_TRY(put_result(lane, own_sum(lane), theirs, &leader->log_out));
    hr_agree_take(&leader->agree, message->id);
    end_ahead(lane);
    hr_leader_note_records(lane, mark);
    return 1;
}

/* ---- The other host ---- */

/* Its own sum is the first member's data, that of the root is in the spare room. */
static int make_record(struct hr_lane *lane) {
    struct hr_buffer framed = {0};
    struct hr_wire_message record;
    lane->leader.ahead.id = 0;
    int status = put_result(lane, spare(lane), hr_carry_data(lane, 0), &framed);
    const uint8_t *frame = hr_buffer_front(&framed);
    const size_t frame_bytes = hr_buffer_size(&framed);
    status = status == HORO_OK ? hr_wire_decode(frame + 4, frame_bytes - 4, &record) : status;
    status = status == HORO_OK ? hr_leader_take_record(lane, &record, frame, frame_bytes) : status;
    hr_buffer_fini(&framed);
    return status;
}

static int is_same(const struct hr_lane *lane) {
    const struct hr_carry *carry = &lane->leader.carry;
    return carry->id == lane->leader.ahead.id && carry->bytes == lane->leader.ahead.bytes;
}

int hr_ahead_match_kept(struct hr_lane *lane) {
    if (lane->leader.ahead.id == 0 || !is_same(lane)) {
        return 0;
    }
    HR_TRY(make_record(lane));
    return 1;
}

int hr_ahead_release(struct hr_lane *lane) {
    if (lane->is_root || lane->leader.ahead.id == 0) {
        return HORO_OK;
    }
    lane->leader.ahead.id = 0;
    return put_position(lane, HR_WIRE_RELEASE);
}

int hr_ahead_keep(struct hr_lane *lane, const struct hr_wire_message *message) {
    struct hr_leader *leader = &lane->leader;
    if (lane->team->host_count != 2 || leader->log_closed || leader->ahead.id != 0 ||
        message->at != leader->log_bytes) {
        return HORO_ERR_INTERNAL;
    }
    leader->ahead = (struct hr_ahead){.id = message->id, .bytes = message->data_bytes};
    if (message->data_bytes > HR_CARRIED_MAX || hr_carry_reserve(lane) != HORO_OK) {
        return hr_ahead_release(lane);
    }
    memcpy(spare(lane), message->data, message->data_bytes);
    if (leader->carry.is_sent && is_same(lane)) {
        return make_record(lane);
    }
    return hr_agree_is_reported(&leader->agree) ? hr_ahead_release(lane) : HORO_OK;
}

int hr_ahead_give_back(struct hr_lane *lane, const struct hr_wire_message *recall) {
    return recall->at <= lane->leader.log_bytes ? hr_ahead_release(lane) : HORO_ERR_INTERNAL;
}
