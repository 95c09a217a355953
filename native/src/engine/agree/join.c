/*
 * Ranks that have joined, in the agreement. A member that has announced JOIN counts as announced for whatever another
 * one announces. What the job needs of it, it does when the record comes (membership/join.c); what it cannot do for
 * another rank is refused here, and fails like a difference between requests: on all ranks, with a sentence.
 */
#include <stdio.h>
#include <string.h>

#include "base/traits.h"
#include "engine/agree/private.h"

void hr_agree_note_absence(struct hr_agree *agree, int rank, uint64_t at) {
    agree->absent.is_known = 1;
    if (at >= agree->absent.last_at) {
        agree->absent.last = rank;
        agree->absent.last_at = at;
    }
}

void hr_agree_count_absent(struct hr_agree *agree, struct hr_agree_entry *entry) {
    if (agree->absent.entry == NULL || entry == agree->absent.entry) {
        return;
    }
    for (size_t word = 0; word < hr_agree_words(agree); word++) {
        const uint64_t others = agree->absent.entry->announced[word] & ~entry->announced[word];
        entry->stood_in[word] |= others;
        entry->announced[word] |= others;
        entry->announced_count += __builtin_popcountll(others);
    }
}

/* Says what a rank that has joined cannot do; empty: it can. */
static void refuse(const struct hr_agree *agree, const struct hr_agree_entry *entry, int rank, char *text,
                   size_t text_bytes) {
    struct hr_wire_request request = {0};
    const struct hr_agree_copy *copy = hr_agree_request(entry);
    (void)hr_wire_decode_request(copy->bytes, copy->count, &request); /* it was decoded when it came */
    const char *op = hr_op_name(request.op);
    const char *why = "";
    text[0] = '\0';
    if (entry->is_call) {
        why = ", and ordered calls need all ranks";
    } else if (request.op == HORO_REDUCESCATTER) {
        why = ", and the rows that fall to it would be lost; use an allreduce, or let all ranks take part before they "
              "join";
    } else if (hr_op_is(request.op, HR_OP_EXCHANGE) || request.op == HORO_REDUCE) {
        why = " and can neither send nor receive anything; let all ranks take part before they join";
    } else if (hr_op_is(request.op, HR_OP_OF_TEAMS)) {
        (void)snprintf(text, text_bytes, "%s: rank %d has joined, and all ranks must call it; call it before or after",
                       op, rank);
    } else if (request.op == HORO_ALLREDUCE && request.prescale != 1.0 &&
               (request.reduce_op == HORO_MIN || request.reduce_op == HORO_MAX || request.reduce_op == HORO_PRODUCT)) {
        (void)snprintf(text, text_bytes,
                       "%s '%s': rank %d has joined, and a min, max or product cannot leave it out where there is a "
                       "prescale factor, which is %g; scale the tensor before",
                       op, entry->name, rank, request.prescale);
    } else if (request.op == HORO_BROADCAST) {
        const int root = request.root_rank < agree->config.rank_count ? request.root_rank : -1;
        const int member = root < 0 ? -1 : agree->config.member_of_rank[root];
        if (member >= 0 && hr_agree_has(entry->stood_in, member)) {
            (void)snprintf(text, text_bytes,
                           "%s '%s': its root, rank %d, has joined and sends nothing; choose a rank that has not, or "
                           "broadcast when all have",
                           op, entry->name, root);
        }
    }
    if (why[0] != '\0') {
        (void)snprintf(text, text_bytes, "%s '%s': rank %d has joined%s", op, entry->name, rank, why);
    }
}

int hr_agree_complete_if_all(struct hr_agree *agree, struct hr_agree_entry *entry) {
    char text[HORO_MESSAGE_MAX];
    const uint64_t gathers = hr_agree_request(entry)->gathers;
    if (entry->state != HR_AGREE_WAITING || entry->announced_count != agree->config.member_count) {
        return HORO_OK;
    }
    for (int member = 0; member < agree->config.member_count && entry->failure == 0; member++) {
        if (!hr_agree_has(entry->stood_in, member)) {
            continue;
        }
        refuse(agree, entry, agree->config.rank_of_member[member], text, sizeof text);
        if (text[0] != '\0') {
            HR_TRY(hr_agree_set_failure(entry, HORO_ERR_MISMATCH, text, strlen(text)));
        } else if (gathers > 0) { /* so many values of 0, one byte each */
            const size_t count = (size_t)gathers * (size_t)agree->config.ranks_of_member[member];
            struct hr_buffer *rows = &entry->rows;
            HR_TRY(hr_agree_note_rows(agree, entry, member, gathers, (struct hr_wire_rows){.count = (uint32_t)count}));
            HR_TRY(hr_buffer_reserve(rows, count));
            memset(rows->data + rows->end, 0, count);
            rows->end += count;
            entry->rows_of_member[member].bytes = count;
        }
    }
    hr_agree_move(agree, entry, HR_AGREE_COMPLETE);
    return HORO_OK;
}

/* Completes what waited for this member only, before JOIN can be: it goes before it. */
int hr_agree_begin_absence(struct hr_agree *agree, struct hr_agree_entry *entry) {
    struct hr_agree_entry *next;
    agree->absent.entry = entry;
    agree->absent.is_known = 1;
    for (struct hr_agree_entry *other = agree->lists[HR_AGREE_WAITING].first; other != NULL; other = next) {
        next = other->next;
        hr_agree_count_absent(agree, other);
        HR_TRY(other == entry ? HORO_OK : hr_agree_complete_if_all(agree, other));
    }
    return HORO_OK;
}

int hr_agree_is_absent(const struct hr_agree *agree, int member) {
    return agree->absent.entry != NULL && hr_agree_has(agree->absent.entry->announced, member);
}

int hr_agree_are_all_absent(const struct hr_agree *agree) {
    return agree->absent.entry != NULL && agree->absent.entry->state == HR_AGREE_REPORTED;
}

int hr_agree_describe(struct hr_agree *agree, const struct hr_wire_message *message) {
    struct hr_agree_entry *entry = hr_agree_find(agree, message->request.name);
    if (entry != NULL && entry->state == HR_AGREE_REPORTED) {
        return HORO_OK;
    }
    if ((entry != NULL && entry->state != HR_AGREE_IDLE) || !hr_agree_are_all_absent(agree) ||
        message->status != HORO_OK) {
        return HORO_ERR_INTERNAL;
    }
    entry = hr_agree_find_or_create(agree, message->request.name);
    if (entry == NULL) {
        return HORO_ERR_RESOURCE;
    }
    const struct hr_agree_copy request = {(uint8_t *)(uintptr_t)message->request.bytes, message->request.byte_count,
                                          message->rank, hr_agree_rows_told(agree, &message->request)};
    HR_TRY(hr_agree_keep(entry, &request));
    hr_agree_move(agree, entry, HR_AGREE_REPORTED);
    agree->active++;
    return HORO_OK;
}

void hr_agree_excuse_absent(struct hr_agree *agree, int64_t now_ns) {
    struct hr_agree_entry *entry = agree->absent.entry;
    if (entry != NULL && entry->state == HR_AGREE_WAITING) {
        entry->first_ns = now_ns;
        hr_agree_move(agree, entry, HR_AGREE_WAITING); /* behind those that have waited longer */
    }
}
