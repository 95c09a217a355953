/* The talk between leaders: the links along the tree of hosts, the messages on them, and the end of both. */
#include <stdlib.h>
#include <string.h>

#include "arena/arena.h"
#include "engine/lead/private.h"
#include "node/linked.h"
#include "wire/frame.h"

int hr_leader_open_links(struct hr_leader *leader, struct hr_error *error) {
    const struct hr_team *team = leader->team;
    leader->links = calloc((size_t)team->host_count, sizeof *leader->links);
    if (leader->links == NULL) {
        return hr_fail(error, HORO_ERR_RESOURCE, "out of memory for the links of %d hosts", team->host_count);
    }
    for (int host = 0; host < team->host_count; host++) {
        if (!hr_hosts_are_linked(HR_CHANNEL_CONTROL, team->host_count, team->host, host)) {
            continue;
        }
        leader->has_parent |= host < team->host;
        const int status = hr_link_open(leader, &leader->links[leader->link_count++], host);
        if (status == HORO_ERR_RESOURCE) {
            return hr_fail(error, status, "no memory for the link to host %d", host);
        }
        if (status != HORO_OK) {
            return hr_fail(error, status, "host %d has no connection for agreement to host %d (%s)", team->host, host,
                           leader->team->node->host_name_of_rank[team->job_rank[team->leader_of_host[host]]]);
        }
    }
    return HORO_OK;
}

/* Not the root: the next record of the log. */
static int take_record(struct hr_leader *leader, const struct hr_wire_message *record, const uint8_t *frame,
                       size_t frame_bytes) {
    const int moved = hr_leader_report(leader); /* before apply, see agree.h */
    HR_TRY(moved);
    if (leader->log_closed || (record->type == HR_WIRE_LEAVE && leader->team->number != 0)) {
        return HORO_ERR_INTERNAL;
    }
    if (record->type == HR_WIRE_LEAVE) {
        hr_leader_close_log(leader);
        leader->leaver = record->rank + 1;
    } else if (record->type != HR_WIRE_TUNE) {
        HR_TRY(hr_agree_apply(&leader->agree, record));
    }
    const size_t mark = hr_buffer_size(&leader->log_out);
    HR_TRY(hr_buffer_append(&leader->log_out, frame, frame_bytes));
    return hr_leader_hand_down(leader, mark);
}

/* Whether a message of the parent is a record of the log. */
static int is_record(enum hr_wire_type type) {
    const uint32_t records = 1u << HR_WIRE_BATCH | 1u << HR_WIRE_RESULT | 1u << HR_WIRE_FAIL | 1u << HR_WIRE_REQUEST |
                             1u << HR_WIRE_JOINED | 1u << HR_WIRE_TUNE | 1u << HR_WIRE_LEAVE;
    return (records >> type & 1) != 0;
}

static int handle_message(struct hr_leader *leader, int link_index, const struct hr_wire_message *message,
                          const uint8_t *frame, size_t frame_bytes, int64_t now_ns) {
    struct hr_node *node = leader->team->node;
    const int from_parent = leader->has_parent && link_index == 0;
    if (message->rank >= node->size || message->by >= node->size) {
        return HORO_ERR_INTERNAL;
    }
    switch (message->type) {
    case HR_WIRE_DONE: leader->links[link_index].has_said_done = 1; return HORO_OK;
    case HR_WIRE_LOST:
        hr_node_pass_abort(node, (struct hr_abort){.code = message->status,
                                                   .rank = message->rank,
                                                   .by = message->by,
                                                   .reason = message->reason});
        return HORO_OK;
    case HR_WIRE_ENDED:
        hr_node_end(node, message->status, message->rank, message->text.data, message->text.bytes);
        return HORO_OK;
    default: break;
    }
    if (from_parent && is_record(message->type)) {
        return take_record(leader, message, frame, frame_bytes);
    }
    const int64_t at_ns = now_ns == 0 ? hr_now_ns() : now_ns;
    const int member = leader->team->local_size + link_index - leader->has_parent;
    return from_parent ? hr_leader_handle(leader, -1, message, at_ns)
                       : hr_leader_announce(leader, member, message, at_ns);
}

static int handle_frames(struct hr_leader *leader, int link_index, int64_t now_ns) {
    struct hr_buffer *in = &leader->links[link_index].in;
    struct hr_wire_message message;
    size_t bytes;
    int status;
    while ((status = hr_frame_peek(in, &message, &bytes)) == HORO_OK) {
        leader->has_news = 1;
        HR_TRY(handle_message(leader, link_index, &message, hr_buffer_front(in), bytes, now_ns));
        hr_buffer_consume(in, bytes);
    }
    return status < 0 ? status : HORO_OK;
}

static void link_broke(struct hr_leader *leader, struct hr_link *link) {
    link->open = 0;
    if (!link->has_said_done && !leader->expects_removal && !hr_team_is_left(leader->team)) {
        const enum hr_loss how = leader->team->transport->ops->loss(leader->team->transport, link->host);
        hr_node_abort(leader->team->node, HORO_ERR_PEER_LOST, link->leader_rank,
                      how == HR_LOSS_SILENT ? HR_REASON_SILENT : HR_REASON_LINK);
    }
}

int hr_leader_progress_links(struct hr_leader *leader, int64_t now_ns) {
    int moved = HR_STILL;
    for (int i = 0; i < leader->link_count; i++) {
        struct hr_link *link = &leader->links[i];
        const int status = hr_link_progress(leader, link);
        if (status == HR_STILL) {
            continue;
        }
        if (status < 0 && status != HORO_ERR_PEER_LOST) {
            return status;
        }
        HR_TRY(handle_frames(leader, i, now_ns)); /* also what came before the link broke: the LEAVE record perhaps */
        if (status == HORO_ERR_PEER_LOST) {
            link_broke(leader, link);
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

int hr_leader_is_done(const struct hr_leader *world) {
    for (int i = 1; i < world->team->local_size; i++) {
        if (!has_local_done(&world->team->node->arena, i)) {
            return 0;
        }
    }
    for (int i = world->has_parent; i < world->link_count; i++) {
        if (world->links[i].open && !world->links[i].has_said_done) {
            return 0;
        }
    }
    return 1;
}

static int tell(struct hr_leader *leader, const struct hr_wire_message *message) {
    for (int i = 0; i < leader->link_count; i++) {
        HR_TRY(leader->links[i].open ? hr_frame_put(&leader->links[i].out, message) : HORO_OK);
    }
    return HORO_OK;
}

int hr_leader_tell_done(struct hr_leader *leader) {
    const int is_told = leader->told_done;
    leader->told_done = 1;
    return is_told ? HORO_OK : tell(leader, &(struct hr_wire_message){.type = HR_WIRE_DONE,
                                                                      .rank = leader->team->node->rank});
}

/* Each leader passes an abort on once, to all its neighbours. */
static int tell_abort(struct hr_leader *leader) {
    const struct hr_arena *arena = &leader->team->node->arena;
    const struct hr_abort end = hr_arena_aborted(arena);
    if (end.code == 0 || leader->told_abort) {
        return HORO_OK;
    }
    leader->told_abort = 1;
    const char *words = end.reason == HR_REASON_ENDED ? hr_arena_last_words(arena, end.rank) : NULL;
    struct hr_wire_message message = {.type = words != NULL ? HR_WIRE_ENDED : HR_WIRE_LOST,
                                      .rank = end.rank,
                                      .status = end.code,
                                      .reason = end.reason == HR_REASON_ENDED ? HR_REASON_EXITED : end.reason,
                                      .by = end.by};
    if (words != NULL) {
        message.text = (struct hr_wire_text){words, strlen(words)};
    }
    return tell(leader, &message);
}

struct hr_link *hr_leader_link_of(const struct hr_leader *leader, int member) {
    const int local_size = leader->team->local_size;
    return member < local_size ? NULL : &leader->links[leader->has_parent + member - local_size];
}

int hr_leader_sends_left(const struct hr_leader *leader) {
    for (int i = 0; i < leader->link_count; i++) {
        const struct hr_link *link = &leader->links[i];
        if (link->open && (hr_buffer_size(&link->out) > 0 || link->send.state == HR_IO_POSTED)) {
            return 1;
        }
    }
    return 0;
}

int hr_leader_flush_links(struct hr_leader *leader) {
    HR_TRY(tell_abort(leader));
    (void)hr_node_progress(leader->team->node);
    for (int i = 0; i < leader->link_count; i++) {
        if (hr_link_progress(leader, &leader->links[i]) < 0) {
            leader->links[i].open = 0; /* later messages change nothing */
        }
    }
    return !hr_leader_sends_left(leader);
}
