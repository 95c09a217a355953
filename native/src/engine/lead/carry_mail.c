/* Mail between ranks of different hosts, between their leaders: along the tree. */
#include "engine/lead/leader.h"
#include "node/team.h"
#include "wire/frame.h"

enum { WAITING_MOST = 1 << 16 }; /* bytes; a record behind them waits for no more */

/* Towards a rank of another host; NULL: there is none. */
static struct hr_link *link_to(const struct hr_leader *leader, int rank) {
    const int host = leader->team->host_of_rank[rank];
    for (int i = leader->has_parent; i < leader->link_count; i++) {
        const int child = leader->links[i].host;
        if (host >= child && host < child + (child & -child)) { /* see node/team.h */
            return &leader->links[i];
        }
    }
    return leader->has_parent ? &leader->links[0] : NULL;
}

static hr_status carry(void *owner, const struct hr_mail_message *message, const void *data) {
    struct hr_link *link = link_to(owner, message->to);
    if (link == NULL) {
        return HORO_ERR_INTERNAL;
    }
    const struct hr_wire_message wire = {
        .type = HR_WIRE_MAIL,
        .rank = message->from,
        .status = message->status,
        .data = data,
        .data_bytes = message->bytes,
        .mail = {.to = message->to,
                 .kind = message->kind,
                 .dtype = message->dtype,
                 .tag = message->tag,
                 .send = message->send,
                 .count = message->count},
    };
    return link->open ? hr_frame_put(&link->out, &wire) : HORO_OK; /* else the group ends for that */
}

static int has_room(void *owner, int rank) {
    const struct hr_link *link = link_to(owner, rank);
    return link == NULL || hr_buffer_size(&link->out) < WAITING_MOST;
}

struct hr_mail_carrier hr_leader_carrier(struct hr_leader *leader) {
    return (struct hr_mail_carrier){.carry = carry, .has_room = has_room, .owner = leader};
}

hr_status hr_leader_take_mail(const struct hr_leader *leader, int member, const struct hr_wire_message *wire,
                              struct hr_mail_message *message) {
    const struct hr_team *team = leader->team;
    const int index = member < 0 ? 0 : member - team->local_size + leader->has_parent;
    const struct hr_wire_mail *mail = &wire->mail;
    if (team->number != 0 || (member >= 0 && member < team->local_size) || mail->to >= team->size) {
        return HORO_ERR_INTERNAL;
    }
    const struct hr_link *link = &leader->links[index];
    const int goes_on = team->host_of_rank[mail->to] != team->host;
    if (team->host_of_rank[wire->rank] == team->host || link_to(leader, wire->rank) != link ||
        (goes_on && link_to(leader, mail->to) == link)) {
        return HORO_ERR_INTERNAL; /* it does not come from there, or would go back */
    }
    *message = (struct hr_mail_message){
        .from = wire->rank,
        .to = mail->to,
        .kind = (uint16_t)mail->kind,
        .bytes = (uint16_t)wire->data_bytes,
        .send = mail->send,
        .count = mail->count,
        .tag = mail->tag,
        .dtype = mail->dtype,
        .status = wire->status,
    };
    return HORO_OK;
}
