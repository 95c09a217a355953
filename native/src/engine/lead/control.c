/* The talk between leaders: the links along the tree of hosts, the messages on them, and the end of both. */
#include <stdlib.h>
#include <string.h>

#include "arena/last_words.h"
#include "engine/engine.h"
#include "node/linked.h"
#include "wire/frame.h"

int hr_leader_open_links(struct hr_lane *lane, struct hr_error *error) {
    const struct hr_team *team = lane->team;
    lane->leader.links = calloc((size_t)team->host_count, sizeof *lane->leader.links);
    if (lane->leader.links == NULL) {
        return hr_fail(error, HORO_ERR_RESOURCE, "out of memory for the links of %d hosts", team->host_count);
    }
    for (int host = 0; host < team->host_count; host++) {
        if (!hr_hosts_are_linked(HR_CHANNEL_CONTROL, team->host_count, team->host, host)) {
            continue;
        }
        lane->leader.has_parent |= host < team->host;
        const int status = hr_link_open(lane, &lane->leader.links[lane->leader.link_count++], host);
        if (status == HORO_ERR_RESOURCE) {
            return hr_fail(error, status, "no memory for the link to host %d", host);
        }
        if (status != HORO_OK) {
            return hr_fail(error, status, "host %d has no connection for agreement to host %d (%s)", team->host, host,
                           lane->node->host_name_of_rank[team->job_rank[team->leader_of_host[host]]]);
        }
    }
    return HORO_OK;
}

/* Not the root: the next record of the log. */
static int take_record(struct hr_lane *lane, const struct hr_wire_message *record, const uint8_t *frame,
                       size_t frame_bytes) {
    const int moved = hr_leader_collect(lane); /* before apply, see agree.h */
    HR_TRY(moved);
    if (lane->leader.log_closed) {
        return HORO_ERR_INTERNAL;
    }
    if (record->type == HR_WIRE_LEAVE && lane->team->number != 0) {
        return HORO_ERR_INTERNAL;
    }
    if (record->type == HR_WIRE_LEAVE) {
        hr_leader_close_log(lane);
        lane->leader.leaver = record->rank + 1;
    } else if (record->type != HR_WIRE_TUNE) {
        HR_TRY(hr_agree_apply(&lane->leader.agree, record));
    }
    const size_t mark = hr_buffer_size(&lane->leader.log_out);
    HR_TRY(hr_buffer_append(&lane->leader.log_out, frame, frame_bytes));
    return hr_leader_hand_down(lane, mark);
}

static int handle_message(struct hr_lane *lane, int link_index, const struct hr_wire_message *message,
                          const uint8_t *frame, size_t frame_bytes) {
    const int from_parent = lane->leader.has_parent && link_index == 0;
    const int member = lane->team->local_size + link_index - lane->leader.has_parent;
    if (message->rank >= lane->node->size || message->by >= lane->node->size) {
        return HORO_ERR_INTERNAL;
    }
    if (message->type == HR_WIRE_DONE) {
        lane->leader.links[link_index].has_said_done = 1;
        return HORO_OK;
    }
    if (message->type == HR_WIRE_LOST) {
        hr_node_pass_abort(lane->node, (struct hr_abort){.code = message->status,
                                                         .rank = message->rank,
                                                         .by = message->by,
                                                         .reason = message->reason});
        return HORO_OK;
    }
    if (message->type == HR_WIRE_ENDED) {
        hr_node_end(lane->node, message->status, message->rank, message->text.data, message->text.bytes);
        return HORO_OK;
    }
    if (message->type == HR_WIRE_ASK) {
        return from_parent ? hr_leader_pass_question(lane, message->rank) : HORO_ERR_INTERNAL;
    }
    if (message->type == HR_WIRE_QUERY) {
        return from_parent ? hr_leader_ask_blocked(lane, message->question) : HORO_ERR_INTERNAL;
    }
    if (!from_parent) {
        return hr_leader_announce(lane, member, message, hr_now_ns());
    }
    switch (message->type) {
    case HR_WIRE_BATCH:
    case HR_WIRE_RESULT:
    case HR_WIRE_FAIL:
    case HR_WIRE_REQUEST:
    case HR_WIRE_JOINED:
    case HR_WIRE_TUNE:
    case HR_WIRE_LEAVE: return take_record(lane, message, frame, frame_bytes);
    default: return HORO_ERR_INTERNAL;
    }
}

static int handle_frames(struct hr_lane *lane, int link_index) {
    struct hr_buffer *in = &lane->leader.links[link_index].in;
    const uint8_t *data;
    size_t bytes;
    int status;
    while ((status = hr_frame_peek(in, &data, &bytes)) == HORO_OK) {
        struct hr_wire_message message;
        HR_TRY(hr_wire_decode(data, bytes, &message));
        lane->leader.has_news = 1;
        HR_TRY(handle_message(lane, link_index, &message, data - 4, bytes + 4));
        hr_buffer_consume(in, 4 + bytes);
    }
    return status < 0 ? status : HORO_OK;
}

static void link_broke(struct hr_lane *lane, struct hr_link *link) {
    link->open = 0;
    if (!link->has_said_done && !lane->leader.expects_removal && !hr_lane_is_left(lane)) {
        const enum hr_loss how = lane->team->transport->ops->loss(lane->team->transport, link->host);
        hr_node_abort(lane->node, HORO_ERR_PEER_LOST, link->leader_rank,
                       how == HR_LOSS_SILENT ? HR_REASON_SILENT : HR_REASON_LINK);
    }
}

int hr_leader_progress_links(struct hr_lane *lane) {
    int moved = HR_STILL;
    for (int i = 0; i < lane->leader.link_count; i++) {
        struct hr_link *link = &lane->leader.links[i];
        const int status = hr_link_progress(lane, link);
        if (status == HR_STILL) {
            continue;
        }
        if (status < 0 && status != HORO_ERR_PEER_LOST) {
            return status;
        }
        HR_TRY(handle_frames(lane, i)); /* also what came before the link broke: the LEAVE record perhaps */
        if (status == HORO_ERR_PEER_LOST) {
            link_broke(lane, link);
        }
        moved = HR_MOVED;
    }
    return moved;
}

/* A rank that has nothing pending has executed all that stands in the log, for no record comes about without it. */
static int has_local_done(const struct hr_arena *arena, int local_rank) {
    return hr_arena_has_closed(arena, local_rank) ||
           atomic_load(&arena->blocks[local_rank].state) == HR_MEMBER_LEFT;
}

int hr_leader_is_done(const struct hr_lane *world) {
    for (int i = 1; i < world->team->local_size; i++) {
        if (!has_local_done(&world->node->arena, i)) {
            return 0;
        }
    }
    for (int i = world->leader.has_parent; i < world->leader.link_count; i++) {
        if (world->leader.links[i].open && !world->leader.links[i].has_said_done) {
            return 0;
        }
    }
    return 1;
}

int hr_leader_tell_done(struct hr_lane *lane) {
    if (lane->leader.told_done) {
        return HORO_OK;
    }
    for (int i = 0; i < lane->leader.link_count; i++) {
        struct hr_link *link = &lane->leader.links[i];
        size_t mark;
        if (link->open) {
            HR_TRY(hr_frame_begin(&link->out, &mark));
            HR_TRY(hr_wire_put(&link->out, &(struct hr_wire_message){.type = HR_WIRE_DONE, .rank = lane->node->rank}));
            hr_frame_end(&link->out, mark);
        }
    }
    lane->leader.told_done = 1;
    return HORO_OK;
}

static int put_end(struct hr_lane *lane, struct hr_buffer *out, struct hr_abort end) {
    const char *words = end.reason == HR_REASON_ENDED ? hr_arena_last_words(&lane->node->arena, end.rank) : NULL;
    struct hr_wire_message message = {.type = words != NULL ? HR_WIRE_ENDED : HR_WIRE_LOST,
                                      .rank = end.rank,
                                      .status = end.code,
                                      .reason = end.reason == HR_REASON_ENDED ? HR_REASON_EXITED : end.reason,
                                      .by = end.by};
    if (words != NULL) {
        message.text = (struct hr_wire_text){words, strlen(words)};
    }
    return hr_wire_put(out, &message);
}

/* Each leader passes an abort on once, to all its neighbours. */
static int tell_abort(struct hr_lane *lane) {
    const struct hr_abort end = hr_arena_aborted(&lane->node->arena);
    if (end.code == 0 || lane->leader.told_abort) {
        return 0;
    }
    lane->leader.told_abort = 1;
    for (int i = 0; i < lane->leader.link_count; i++) {
        struct hr_link *link = &lane->leader.links[i];
        size_t mark;
        if (!link->open) {
            continue;
        }
        HR_TRY(hr_frame_begin(&link->out, &mark));
        HR_TRY(put_end(lane, &link->out, end));
        hr_frame_end(&link->out, mark);
    }
    return 1;
}

int hr_leader_sends_left(const struct hr_lane *lane) {
    for (int i = 0; i < lane->leader.link_count; i++) {
        const struct hr_link *link = &lane->leader.links[i];
        if (link->open && (hr_buffer_size(&link->out) > 0 || link->send.state == HR_IO_POSTED)) {
            return 1;
        }
    }
    return 0;
}

int hr_leader_flush_links(struct hr_lane *lane) {
    HR_TRY(tell_abort(lane));
    (void)hr_node_progress(lane->node);
    for (int i = 0; i < lane->leader.link_count; i++) {
        if (hr_link_progress(lane, &lane->leader.links[i]) < 0) {
            lane->leader.links[i].open = 0; /* later messages change nothing */
        }
    }
    return !hr_leader_sends_left(lane);
}
