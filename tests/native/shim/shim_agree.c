#include "shim_agree.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/agree/agree.h"

enum { NAME_BYTES = 64 };

struct shim_agree {
    struct hr_agree agree;
    int *ranks;
    int *counts;
    int *member_of_rank;
    char **host_names;
    int rank_count;
    struct hr_buffer out;
};

shim_agree *shim_agree_create(int is_root, int member_count, int local_count, const int32_t *rank_of_member,
                              const int32_t *ranks_of_member, int rank_count, uint32_t capacity, uint64_t evict_after,
                              uint64_t fusion_bytes) {
    shim_agree *node = calloc(1, sizeof *node);
    if (node == NULL) {
        return NULL;
    }
    node->rank_count = rank_count;
    node->ranks = calloc((size_t)member_count, sizeof *node->ranks);
    node->counts = calloc((size_t)member_count, sizeof *node->counts);
    node->member_of_rank = calloc((size_t)rank_count, sizeof *node->member_of_rank);
    node->host_names = calloc((size_t)rank_count, sizeof *node->host_names);
    if (node->ranks == NULL || node->counts == NULL || node->member_of_rank == NULL || node->host_names == NULL) {
        return NULL;
    }
    memcpy(node->ranks, rank_of_member, (size_t)member_count * sizeof *node->ranks);
    memcpy(node->counts, ranks_of_member, (size_t)member_count * sizeof *node->counts);
    for (int r = 0; r < rank_count; r++) {
        node->host_names[r] = strdup("h");
        node->member_of_rank[r] = -1;
    }
    /* ranks follow one another within a host and the hosts below it, as the tests number them */
    for (int i = 0; i < member_count; i++) {
        for (int r = rank_of_member[i]; r < rank_count && r < rank_of_member[i] + ranks_of_member[i]; r++) {
            node->member_of_rank[r] = i;
        }
    }
    const struct hr_agree_config config = {
        .is_root = is_root,
        .member_count = member_count,
        .local_count = local_count,
        .rank_of_member = node->ranks,
        .ranks_of_member = node->counts,
        .member_of_rank = node->member_of_rank,
        .host_name_of_rank = (const char *const *)node->host_names,
        .team_size = rank_count,
        .rank_count = rank_count,
        .capacity = capacity,
        .evict_after = evict_after,
        .fusion_bytes = fusion_bytes,
    };
    return hr_agree_init(&node->agree, &config) == HORO_OK ? node : NULL;
}

void shim_agree_destroy(shim_agree *node) {
    hr_agree_fini(&node->agree);
    hr_buffer_fini(&node->out);
    for (int r = 0; r < node->rank_count; r++) {
        free(node->host_names[r]);
    }
    free((void *)node->host_names);
    free(node->ranks);
    free(node->counts);
    free(node->member_of_rank);
    free(node);
}

int shim_agree_announce_id(shim_agree *node, int member, uint32_t id, int64_t now_ns) {
    return hr_agree_announce_id(&node->agree, member, id, (struct hr_wire_rows){0}, now_ns);
}

int shim_agree_announce(shim_agree *node, int member, int32_t rank, const char *name, int64_t extent, int transient,
                        int64_t now_ns) {
    const horo_tensor tensor = {.shape = &extent, .ndim = 1, .dtype = HORO_FLOAT32};
    const horo_request call = {
        .name = name,
        .op = HORO_ALLREDUCE,
        .reduce_op = HORO_SUM,
        .flags = transient ? HORO_SUBMIT_TRANSIENT : 0,
        .prescale = 1.0,
        .postscale = 1.0,
        .tensors = &tensor,
        .tensor_count = 1,
    };
    struct hr_buffer bytes = {0};
    struct hr_wire_message message = {.type = HR_WIRE_REQUEST, .rank = rank};
    int status = hr_wire_encode_request(&bytes, &call);
    if (status == HORO_OK) {
        status = hr_wire_decode_request(bytes.data, bytes.end, &message.request);
    }
    if (status == HORO_OK) {
        status = hr_agree_announce_request(&node->agree, member, &message, now_ns);
    }
    hr_buffer_fini(&bytes);
    return status;
}

int shim_agree_receive(shim_agree *node, int member, const void *data, size_t bytes, int64_t now_ns) {
    struct hr_wire_message message;
    HR_TRY(hr_wire_decode(data, bytes, &message));
    if (message.type == HR_WIRE_REQUEST) {
        return hr_agree_announce_request(&node->agree, member, &message, now_ns);
    }
    if (message.type == HR_WIRE_ROWS) {
        return hr_agree_announce_id(&node->agree, member, message.id, message.rows, now_ns);
    }
    for (uint32_t i = 0; message.type == HR_WIRE_IDS && i < message.count; i++) {
        HR_TRY(hr_agree_announce_id(&node->agree, member, hr_wire_u32(message.items, i), message.rows, now_ns));
    }
    return message.type == HR_WIRE_IDS ? HORO_OK : HORO_ERR_INTERNAL;
}

int shim_agree_apply(shim_agree *node, const void *data, size_t bytes) {
    struct hr_wire_message message;
    HR_TRY(hr_wire_decode(data, bytes, &message));
    return hr_agree_apply(&node->agree, &message);
}

static void show(shim_agree *node, const void **data, size_t *bytes) {
    *data = hr_buffer_front(&node->out);
    *bytes = hr_buffer_size(&node->out);
}

int shim_agree_collect(shim_agree *node, const void **data, size_t *bytes) {
    uint32_t frames;
    hr_buffer_consume(&node->out, hr_buffer_size(&node->out));
    const int status = hr_agree_collect(&node->agree, &node->out, &frames);
    show(node, data, bytes);
    return status;
}

int shim_agree_form_batch(shim_agree *node, const void **data, size_t *bytes) {
    uint32_t frames;
    hr_buffer_consume(&node->out, hr_buffer_size(&node->out));
    const int status = hr_agree_form_batch(&node->agree, &node->out, &frames);
    show(node, data, bytes);
    return status;
}

uint32_t shim_agree_active(const shim_agree *node) {
    return node->agree.active;
}

int shim_agree_describe(const shim_agree *node, int64_t now_ns, int64_t age_ns, char *out, size_t out_bytes) {
    struct hr_agree_waiting waiting[1];
    const int count = hr_agree_list_waiting(&node->agree, now_ns, age_ns, waiting, 1);
    out[0] = '\0';
    if (count > 0) {
        (void)snprintf(out, out_bytes, "%s since %lld of %llu", waiting[0].name, (long long)waiting[0].since_ns,
                       (unsigned long long)waiting[0].announced[0]);
    }
    return count;
}

static void copy_text(struct hr_wire_text from, char *out, size_t out_bytes) {
    (void)snprintf(out, out_bytes, "%.*s", (int)from.bytes, from.bytes == 0 ? "" : from.data);
}

int shim_agree_read_batch(const void *data, size_t bytes, uint32_t *ids, char *names, int capacity) {
    struct hr_wire_message message;
    if (hr_wire_decode(data, bytes, &message) != HORO_OK || message.type != HR_WIRE_BATCH ||
        message.count > (uint32_t)capacity) {
        return -1;
    }
    const uint8_t *cursor = message.items;
    for (uint32_t i = 0; i < message.count; i++) {
        struct hr_wire_ref ref;
        hr_wire_next_ref(&cursor, &ref);
        ids[i] = ref.id;
        copy_text(ref.name, names + (size_t)i * NAME_BYTES, NAME_BYTES);
    }
    return (int)message.count;
}

int shim_agree_read_fail(const void *data, size_t bytes, char *name, char *text, size_t text_bytes) {
    struct hr_wire_message message;
    if (hr_wire_decode(data, bytes, &message) != HORO_OK || message.type != HR_WIRE_FAIL) {
        return 0;
    }
    copy_text(message.name, name, NAME_BYTES);
    copy_text(message.text, text, text_bytes);
    return message.status;
}
