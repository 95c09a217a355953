/*
 * Small data that travels with the agreement. An operation that is alone in its lane has its data beside its
 * announcement; leaders reduce what their ranks carry, then the sums of hosts, in the order of the members, and the
 * record of the log brings the result: one trip up the tree and one down, and no collective. Where any member announces
 * without data, or several operations are under way, the data is dropped, and a batch does what it always does: to
 * carry costs bytes, and never decides anything.
 */
#include <stdlib.h>
#include <string.h>

#include "backend/carried.h"
#include "engine/engine.h"
#include "wire/frame.h"

size_t hr_lane_carries(const struct hr_lane *lane, const struct hr_request *request) {
    const int is_alone = atomic_load_explicit(&lane->pending, memory_order_relaxed) == 1;
    const size_t bytes = is_alone ? hr_carried_bytes(lane->team, &request->call) : 0;
    return hr_carried_pays(lane->team, bytes) ? bytes : 0;
}

static int member_count(const struct hr_lane *lane) {
    return lane->leader.agree.config.member_count;
}

static uint8_t *data_of(const struct hr_lane *lane, int member) {
    return lane->leader.carry.data + (size_t)member * HR_CARRIED_MAX;
}

static void free_memory(struct hr_carry *carry) {
    free(carry->has);
    free(carry->data);
    free((void *)carry->contributions);
    *carry = (struct hr_carry){0};
}

/* Room for a member's data; NULL: it is of no use, or there is no memory for it. */
static uint8_t *reserve(struct hr_lane *lane, int member, uint32_t id, size_t bytes) {
    struct hr_carry *carry = &lane->leader.carry;
    const size_t members = (size_t)member_count(lane);
    if (carry->data == NULL) {
        carry->data = malloc(members * HR_CARRIED_MAX);
        carry->has = calloc(members, sizeof *carry->has);
        carry->contributions = calloc(members, sizeof *carry->contributions);
        if (carry->data == NULL || carry->has == NULL || carry->contributions == NULL) {
            free_memory(carry);
            return NULL;
        }
    }
    if (carry->id == 0) {
        carry->id = id;
        carry->bytes = bytes;
    }
    if (bytes <= HR_CARRIED_MAX && carry->id == id && carry->bytes == bytes && !carry->has[member]) {
        carry->has[member] = 1;
        carry->count++;
        return data_of(lane, member);
    }
    return NULL;
}

void hr_carry_add(struct hr_lane *lane, int member, uint32_t id, const void *data, size_t bytes) {
    uint8_t *slot = reserve(lane, member, id, bytes);
    if (slot != NULL) {
        memcpy(slot, data, bytes);
    }
}

void hr_carry_add_own(struct hr_lane *lane, const struct hr_request *request, uint32_t id, size_t bytes) {
    uint8_t *slot = reserve(lane, 0, id, bytes);
    if (slot != NULL) {
        hr_carried_pack(lane->team, &request->call, slot);
    }
}

int hr_carry_is_all(const struct hr_lane *lane) {
    const struct hr_carry *carry = &lane->leader.carry;
    return carry->id != 0 && carry->count == member_count(lane) && hr_agree_lone(&lane->leader.agree) == carry->id;
}

/* The sum of this host and of all below it, in the place of the first member's data. HORO_OK or a status. */
static int reduce(struct hr_lane *lane) {
    const struct hr_carry *carry = &lane->leader.carry;
    const int local_size = lane->team->local_size;
    const int children = member_count(lane) - local_size;
    const struct hr_request *request = hr_lane_find_id(lane, carry->id); /* this rank is a member, too */
    if (request == NULL || hr_carried_bytes(lane->team, &request->call) != carry->bytes) {
        return HORO_ERR_INTERNAL; /* no data of the request was carried */
    }
    if (local_size > 1) {
        for (int i = 0; i < local_size; i++) {
            carry->contributions[i] = data_of(lane, i);
        }
        hr_carried_reduce_host(lane->team, &request->call, carry->contributions, carry->data);
    }
    if (children > 0) {
        carry->contributions[0] = carry->data;
        for (int i = 0; i < children; i++) {
            carry->contributions[1 + i] = data_of(lane, local_size + i);
        }
        hr_carried_reduce(lane->team, &request->call, carry->contributions, 1 + children, lane->is_root, carry->data);
    }
    return HORO_OK;
}

int hr_carry_write(struct hr_lane *lane, struct hr_buffer *out) {
    const struct hr_carry *carry = &lane->leader.carry;
    size_t mark;
    HR_TRY(reduce(lane));
    hr_agree_take_lone(&lane->leader.agree);
    HR_TRY(hr_frame_begin(out, &mark));
    HR_TRY(hr_wire_put(out, &(struct hr_wire_message){.type = lane->is_root ? HR_WIRE_RESULT : HR_WIRE_DATA,
                                                      .id = carry->id,
                                                      .data = carry->data,
                                                      .data_bytes = carry->bytes}));
    hr_frame_end(out, mark);
    return HORO_OK;
}

void hr_carry_clear(struct hr_lane *lane) {
    struct hr_carry *carry = &lane->leader.carry;
    if (carry->id != 0) {
        memset(carry->has, 0, (size_t)member_count(lane) * sizeof *carry->has);
        carry->id = 0;
        carry->count = 0;
    }
}

void hr_carry_fini(struct hr_lane *lane) {
    free_memory(&lane->leader.carry);
}
