/* The members of a leader's agreement: what they announce, and what becomes of it once all have. */
#include "engine/lead/private.h"
#include "wire/frame.h"

int hr_leader_send_down(struct hr_leader *leader, const void *frames, size_t bytes) {
    for (int i = leader->has_parent; i < leader->link_count; i++) {
        if (leader->links[i].open) {
            HR_TRY(hr_buffer_append(&leader->links[i].out, frames, bytes));
        }
    }
    return HORO_OK;
}

int hr_leader_hand_down(struct hr_leader *leader, size_t mark) {
    const uint8_t *front = hr_buffer_front(&leader->log_out);
    const size_t bytes = hr_buffer_size(&leader->log_out) - mark;
    if (bytes == 0) {
        return HORO_OK;
    }
    hr_carry_clear(&leader->carry);
    return hr_leader_send_down(leader, front + mark, bytes);
}

int hr_leader_put_carried(struct hr_leader *leader, struct hr_buffer *out, int *is_put) {
    struct hr_carry *carry = &leader->carry;
    const uint32_t id = hr_carry_whole(carry);
    const int is_whole = id != 0 && hr_agree_lone(&leader->agree) == id;
    /* this rank is a member, too, but has none any more where its requests have failed at the end of the group */
    const struct hr_request *request = is_whole ? hr_announcer_pending(leader->announcer, id) : NULL;
    *is_put = request != NULL;
    if (!*is_put) {
        return HORO_OK;
    }
    HR_TRY(hr_carry_reduce(carry, leader->team, request));
    hr_agree_take_lone(&leader->agree);
    return hr_frame_put(out, &(struct hr_wire_message){.type = leader->is_root ? HR_WIRE_RESULT : HR_WIRE_DATA,
                                                       .id = id,
                                                       .data = carry->data,
                                                       .data_bytes = carry->bytes});
}

int hr_leader_report(struct hr_leader *leader) {
    if (!hr_agree_is_complete(&leader->agree) || leader->log_closed) {
        return HR_STILL; /* behind the LEAVE record nothing is agreed on */
    }
    struct hr_buffer *out = leader->is_root ? &leader->log_out : &leader->links[0].out;
    const size_t mark = hr_buffer_size(out);
    uint32_t frames = 0;
    int is_put = 0;
    HR_TRY(leader->is_root ? HORO_OK : hr_leader_put_carried(leader, out, &is_put));
    HR_TRY(is_put ? HORO_OK : hr_agree_collect(&leader->agree, out, &frames));
    HR_TRY(leader->is_root ? hr_leader_hand_down(leader, mark) : HORO_OK);
    return HR_MOVED;
}

/* A rank of this subtree wants to leave; one LEAVE record closes the log for all. */
static int note_leaver(struct hr_leader *leader, const struct hr_wire_message *message) {
    if (message->rank >= leader->team->node->size || leader->team->number != 0) {
        return HORO_ERR_INTERNAL;
    }
    if (leader->leaver != 0) {
        return HORO_OK;
    }
    leader->leaver = message->rank + 1;
    if (leader->is_root) {
        return hr_frame_put(&leader->leave_record, message); /* see form_batches */
    }
    const int reported = hr_leader_report(leader); /* earlier announcements travel first */
    return reported < 0 ? reported : hr_frame_put(&leader->links[0].out, message);
}

int hr_leader_announce(struct hr_leader *leader, int member, const struct hr_wire_message *message, int64_t now_ns) {
    struct hr_agree *agree = &leader->agree;
    leader->has_news = 1;
    switch (message->type) {
    case HR_WIRE_IDS:
        for (uint32_t i = 0; i < message->count; i++) {
            HR_TRY(hr_agree_announce_id(agree, member, hr_wire_u32(message->items, i), message->rows, now_ns));
        }
        return HORO_OK;
    case HR_WIRE_DATA:
        hr_carry_add(&leader->carry, member, message->id, message->data, message->data_bytes);
        return hr_agree_announce_id(agree, member, message->id, message->rows, now_ns);
    case HR_WIRE_ROWS: return hr_agree_announce_id(agree, member, message->id, message->rows, now_ns);
    case HR_WIRE_REQUEST: return hr_agree_announce_request(agree, member, message, now_ns);
    case HR_WIRE_LEAVE: return note_leaver(leader, message);
    default: return hr_leader_handle(leader, member, message, now_ns);
    }
}

int hr_leader_handle(struct hr_leader *leader, int member, const struct hr_wire_message *message, int64_t now_ns) {
    hr_leader_handler *handler = leader->handlers[message->type];
    return handler == NULL || message->rank >= leader->team->node->size
               ? HORO_ERR_INTERNAL
               : handler(leader->owner, member, message, now_ns);
}

void hr_leader_close_log(struct hr_leader *leader) {
    /* by me */
    const uint64_t written = atomic_load_explicit(&leader->team->partition.header->log.written, memory_order_relaxed);
    atomic_store(&leader->team->node->arena.header->leave_at,
                 written + hr_buffer_size(&leader->log_out) + leader->round->rounds + 1);
    leader->log_closed = 1;
}
