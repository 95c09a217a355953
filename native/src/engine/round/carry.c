#include <stdlib.h>
#include <string.h>

#include "backend/carried.h"
#include "engine/round/round.h"

static uint8_t *data_of(const struct hr_carry *carry, int member) {
    return carry->data + (size_t)member * HR_CARRIED_MAX;
}

void hr_carry_fini(struct hr_carry *carry) {
    free(carry->has);
    free(carry->data);
    free((void *)carry->contributions);
    *carry = (struct hr_carry){.members = carry->members};
}

static int allocate(struct hr_carry *carry) {
    const size_t members = (size_t)carry->members;
    carry->data = malloc(members * HR_CARRIED_MAX);
    carry->has = calloc(members, sizeof *carry->has);
    carry->contributions = calloc(members, sizeof *carry->contributions);
    if (carry->data == NULL || carry->has == NULL || carry->contributions == NULL) {
        hr_carry_fini(carry);
        return 0;
    }
    return 1;
}

void hr_carry_add(struct hr_carry *carry, int member, uint32_t id, const void *data, size_t bytes) {
    if (carry->data == NULL && !allocate(carry)) {
        return;
    }
    if (carry->id == 0) {
        carry->id = id;
        carry->bytes = bytes;
    }
    if (bytes <= HR_CARRIED_MAX && carry->id == id && carry->bytes == bytes && !carry->has[member]) {
        carry->has[member] = 1;
        carry->count++;
        memcpy(data_of(carry, member), data, bytes);
    }
}

int hr_carry_reduce(const struct hr_carry *carry, const struct hr_team *team, const struct hr_request *request) {
    const int local_size = team->local_size;
    const int children = carry->members - local_size;
    if (hr_carried_bytes(team, &request->call) != carry->bytes) {
        return HORO_ERR_INTERNAL; /* no data of the request was carried */
    }
    if (local_size > 1) {
        for (int i = 0; i < local_size; i++) {
            carry->contributions[i] = data_of(carry, i);
        }
        hr_carried_reduce_host(team, &request->call, carry->contributions, carry->data);
    }
    if (children > 0) {
        carry->contributions[0] = carry->data;
        for (int i = 0; i < children; i++) {
            carry->contributions[1 + i] = data_of(carry, local_size + i);
        }
        hr_carried_reduce(team, &request->call, carry->contributions, 1 + children, team->rank == 0, carry->data);
    }
    return HORO_OK;
}

void hr_carry_clear(struct hr_carry *carry) {
    if (carry->id != 0) {
        memset(carry->has, 0, (size_t)carry->members * sizeof *carry->has);
        carry->id = 0;
        carry->count = 0;
    }
}
