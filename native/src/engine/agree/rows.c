/*
 * The rows of an allgather or alltoall, from the announcements of the members to the record: who gives how many rows.
 */
#include <stdio.h>

#include "base/op.h"
#include "engine/agree/private.h"

uint64_t hr_agree_rows_told(const struct hr_agree *agree, const struct hr_wire_request *request) {
    if (!hr_op_tells_rows(request->op)) {
        return 0;
    }
    return (uint64_t)request->tensor_count * (request->op == HORO_ALLTOALL ? (uint64_t)agree->config.team_size : 1);
}

int hr_agree_note_rows(struct hr_agree *agree, struct hr_agree_entry *entry, int member, uint64_t gathers,
                       struct hr_wire_rows rows) {
    if (rows.count != gathers * (uint64_t)agree->config.ranks_of_member[member]) {
        return HORO_ERR_INTERNAL;
    }
    if (rows.count == 0) {
        return HORO_OK;
    }
    if (entry->rows_of_member == NULL) {
        entry->rows_of_member =
            hr_pool_take(&agree->pool, (size_t)agree->config.member_count * sizeof *entry->rows_of_member);
        if (entry->rows_of_member == NULL) {
            return HORO_ERR_RESOURCE;
        }
    }
    entry->rows_of_member[member] = (struct hr_agree_rows){hr_buffer_size(&entry->rows), rows.bytes};
    return hr_buffer_append(&entry->rows, rows.data, rows.bytes);
}

/* Of all members: what stands in `rows` may be more, where an announcement was made twice. */
static size_t merged_bytes(const struct hr_agree *agree, const struct hr_agree_entry *entry) {
    size_t bytes = 0;
    for (int member = 0; member < agree->config.member_count; member++) {
        bytes += entry->rows_of_member[member].bytes;
    }
    return bytes;
}

static int rank_count(const struct hr_agree *agree) {
    int count = 0;
    for (int member = 0; member < agree->config.member_count; member++) {
        count += agree->config.ranks_of_member[member];
    }
    return count;
}

int hr_agree_check_rows(const struct hr_agree *agree, const struct hr_agree_entry *entry, char *text,
                        size_t text_bytes) {
    const struct hr_agree_copy *request = hr_agree_request(entry);
    if (request->gathers == 0) {
        return HORO_OK;
    }
    const size_t bytes = merged_bytes(agree, entry);
    if (bytes + request->count <= HR_WIRE_REQUEST_MAX) {
        return HORO_OK;
    }
    struct hr_wire_request call = {0};
    (void)hr_wire_decode_request(request->bytes, request->count, &call); /* it was decoded when it came */
    (void)snprintf(text, text_bytes,
                   "%s '%s': the %s of its %u tensors on %d ranks take %zu bytes with its description; at most %d can "
                   "travel as one request: submit the tensors as several groups",
                   hr_op_name(call.op), entry->name, call.op == HORO_ALLTOALL ? "splits" : "first extents",
                   call.tensor_count, rank_count(agree), bytes + request->count, HR_WIRE_REQUEST_MAX);
    return HORO_ERR_USAGE;
}

int hr_agree_merge_rows(struct hr_agree *agree, const struct hr_agree_entry *entry, struct hr_wire_rows *merged) {
    const uint64_t gathers = hr_agree_request(entry)->gathers;
    *merged = (struct hr_wire_rows){0};
    if (gathers == 0) {
        return HORO_OK;
    }
    struct hr_buffer *out = &agree->merged_rows;
    const uint8_t *rows = hr_buffer_front(&entry->rows);
    hr_buffer_consume(out, hr_buffer_size(out));
    for (int member = 0; member < agree->config.member_count; member++) {
        const struct hr_agree_rows *theirs = &entry->rows_of_member[member];
        HR_TRY(hr_buffer_append(out, rows + theirs->at, theirs->bytes));
    }
    *merged = (struct hr_wire_rows){hr_buffer_front(out), hr_buffer_size(out),
                                    (uint32_t)(gathers * (uint64_t)rank_count(agree))};
    return HORO_OK;
}
