/* The difference of two requests of one name, in one sentence that names the tensor, both ranks and both values. */
#include <float.h>
#include <stdio.h>
#include <string.h>

#include "base/traits.h"
#include "engine/agree/private.h"

enum {
    VALUE_BYTES = 320,
    RANKS_IN_TEXT = 20, /* of a team; of 12 characters at most each */
    DIGITS_MIN = 6, /* as many as %g writes */
};

/* Requests that have been decoded have no other. */
static const char *const REDUCE_NAMES[] = {
    [HORO_AVERAGE] = "Average", [HORO_SUM] = "Sum",  [HORO_ADASUM] = "Adasum", [HORO_MIN] = "Min",   [HORO_MAX] = "Max",
    [HORO_PRODUCT] = "Product", [HORO_BAND] = "BAND", [HORO_BOR] = "BOR",      [HORO_BXOR] = "BXOR",
};

/* The first extent of an allgather or alltoall may differ by rank and is not part of the request. */
static void describe(const struct hr_wire_tensor *tensor, int op, char *text, size_t text_bytes) {
    (void)hr_wire_describe_tensor(tensor, text, text_bytes);
    char *first = strchr(text, '[');
    if (hr_op_is(op, HR_OP_TELLING_ROWS) && first != NULL && first[1] == '0') {
        first[1] = '*';
    }
}

/* The first tensor that differs; 1 if there is one. */
static int differing_tensors(const struct hr_wire_request *a, const struct hr_wire_request *b, uint32_t *index,
                             char *a_text, char *b_text) {
    const uint8_t *a_cursor = a->tensors;
    const uint8_t *b_cursor = b->tensors;
    for (*index = 0; *index < a->tensor_count && *index < b->tensor_count; (*index)++) {
        struct hr_wire_tensor one;
        struct hr_wire_tensor two;
        hr_wire_next_tensor(&a_cursor, &one);
        hr_wire_next_tensor(&b_cursor, &two);
        if (one.dtype != two.dtype || one.wire_dtype != two.wire_dtype || one.ndim != two.ndim ||
            memcmp(one.shape, two.shape, (size_t)one.ndim * sizeof one.shape[0]) != 0) {
            describe(&one, a->op, a_text, VALUE_BYTES);
            describe(&two, b->op, b_text, VALUE_BYTES);
            return 1;
        }
    }
    return 0;
}

static void write_factors(const struct hr_wire_request *request, int digits, char *text) {
    (void)snprintf(text, VALUE_BYTES, "prescale factor %.*g and postscale factor %.*g", digits, request->prescale,
                   digits, request->postscale);
}

/*
 * "add_process_set for the ranks [0, 2, 4]" or "remove_process_set for process set 3"; of many ranks those round the
 * first that differs: what reads as equal explains nothing.
 */
static void describe_change(const struct hr_wire_request *request, uint32_t difference, char *text) {
    if (request->op == HORO_REMOVE_TEAM) {
        (void)snprintf(text, VALUE_BYTES, "%s for process set %d", hr_op_name(request->op),
                       (int)hr_wire_u32(request->values, 0) % HORO_TEAM_ID_STEP);
        return;
    }
    if (request->op != HORO_ADD_TEAM) { /* how it begins where members are on several hosts */
        (void)snprintf(text, VALUE_BYTES, "%s", hr_op_name(HORO_ADD_TEAM));
        return;
    }
    const uint32_t begin = difference < RANKS_IN_TEXT ? 0 : difference - 2;
    const uint32_t end = request->value_count - begin <= RANKS_IN_TEXT ? request->value_count : begin + RANKS_IN_TEXT;
    size_t used = (size_t)snprintf(text, VALUE_BYTES, "%s for the ranks [%s", hr_op_name(request->op),
                                   begin == 0 ? "" : "..., ");
    for (uint32_t i = begin; i < end; i++) {
        used += (size_t)snprintf(text + used, VALUE_BYTES - used, i == begin ? "%d" : ", %d",
                                 (int)hr_wire_u32(request->values, i));
    }
    (void)snprintf(text + used, VALUE_BYTES - used, end == request->value_count ? "]" : ", ...]");
}

/* Both values, in the order in which a user would want to know. Returns a prefix such as "tensor 3: ". */
static void describe_difference(const struct hr_wire_request *a, const struct hr_wire_request *b, char *prefix,
                                char *a_text, char *b_text) {
    uint32_t index = 0;
    prefix[0] = '\0';
    if (hr_op_is(a->op, HR_OP_OF_TEAMS) || hr_op_is(b->op, HR_OP_OF_TEAMS)) {
        const uint32_t count = a->value_count < b->value_count ? a->value_count : b->value_count;
        uint32_t difference = 0;
        while (a->op == b->op && difference < count &&
               hr_wire_u32(a->values, difference) == hr_wire_u32(b->values, difference)) {
            difference++;
        }
        describe_change(a, difference, a_text);
        describe_change(b, difference, b_text);
    } else if (a->op != b->op) {
        (void)snprintf(a_text, VALUE_BYTES, "%s", hr_op_name(a->op));
        (void)snprintf(b_text, VALUE_BYTES, "%s", hr_op_name(b->op));
    } else if (a->tensor_count != b->tensor_count) {
        (void)snprintf(a_text, VALUE_BYTES, "%u tensor%s", a->tensor_count, a->tensor_count == 1 ? "" : "s");
        (void)snprintf(b_text, VALUE_BYTES, "%u tensor%s", b->tensor_count, b->tensor_count == 1 ? "" : "s");
    } else if (differing_tensors(a, b, &index, a_text, b_text)) {
        if (a->tensor_count > 1) {
            (void)snprintf(prefix, VALUE_BYTES, "tensor %u of the group: ", index);
        }
    } else if (a->reduce_op != b->reduce_op) {
        (void)snprintf(a_text, VALUE_BYTES, "op %s", REDUCE_NAMES[a->reduce_op]);
        (void)snprintf(b_text, VALUE_BYTES, "op %s", REDUCE_NAMES[b->reduce_op]);
    } else if (a->root_rank != b->root_rank) {
        (void)snprintf(a_text, VALUE_BYTES, "root rank %d", a->root_rank);
        (void)snprintf(b_text, VALUE_BYTES, "root rank %d", b->root_rank);
    } else if (memcmp(&a->prescale, &b->prescale, sizeof a->prescale) != 0 ||
               memcmp(&a->postscale, &b->postscale, sizeof a->postscale) != 0) {
        int digits = DIGITS_MIN;
        do { /* as few as tell them apart: what reads as equal explains nothing */
            write_factors(a, digits, a_text);
            write_factors(b, digits, b_text);
        } while (strcmp(a_text, b_text) == 0 && digits++ < DBL_DECIMAL_DIG);
    } else if (a->on_gpu != b->on_gpu) {
        static const char *const ways[] = {"it in host memory or on another GPU", "it on the GPU that NCCL uses"};
        (void)snprintf(a_text, VALUE_BYTES, "%s", ways[a->on_gpu]);
        (void)snprintf(b_text, VALUE_BYTES, "%s", ways[b->on_gpu]);
    } else {
        static const char *const uses[] = {"it under a name that the caller gave", "it under an automatic name"};
        (void)snprintf(a_text, VALUE_BYTES, "%s", uses[a->transient]);
        (void)snprintf(b_text, VALUE_BYTES, "%s", uses[b->transient]);
    }
}

/* "reduce(float32 [4], Sum, root 1)". */
static void describe_call(const struct hr_wire_request *request, char *text) {
    const uint8_t *cursor = request->tensors;
    size_t used = (size_t)snprintf(text, VALUE_BYTES, "%s(", hr_op_name(request->op));
    if (request->tensor_count > 0) {
        struct hr_wire_tensor tensor;
        char value[VALUE_BYTES / 2];
        hr_wire_next_tensor(&cursor, &tensor);
        describe(&tensor, request->op, value, sizeof value);
        used += (size_t)snprintf(text + used, VALUE_BYTES - used, "%s", value);
    }
    if (request->tensor_count > 1) {
        used += (size_t)snprintf(text + used, VALUE_BYTES - used, " and %u more", request->tensor_count - 1);
    }
    if (hr_op_is(request->op, HR_OP_REDUCTION)) {
        used += (size_t)snprintf(text + used, VALUE_BYTES - used, ", %s", REDUCE_NAMES[request->reduce_op]);
    }
    if (hr_op_is(request->op, HR_OP_ROOTED)) {
        used += (size_t)snprintf(text + used, VALUE_BYTES - used, ", root %d", request->root_rank);
    }
    (void)snprintf(text + used, VALUE_BYTES - used, ")");
}

void hr_agree_mismatch_text(const struct hr_agree_config *config, const struct hr_agree_entry *entry,
                            const struct hr_agree_copy *one, const struct hr_agree_copy *two, char *out,
                            size_t out_bytes) {
    const int swap = one->rank > two->rank; /* the lower rank is named first, whoever came first */
    const struct hr_agree_copy *low = swap ? two : one;
    const struct hr_agree_copy *high = swap ? one : two;
    const char *low_host = config->host_name_of_rank[low->rank];
    const char *high_host = config->host_name_of_rank[high->rank];
    struct hr_wire_request a = {0};
    struct hr_wire_request b = {0};
    (void)hr_wire_decode_request(low->bytes, low->count, &a);
    (void)hr_wire_decode_request(high->bytes, high->count, &b);
    char prefix[VALUE_BYTES];
    char a_text[VALUE_BYTES];
    char b_text[VALUE_BYTES];
    describe_difference(&a, &b, prefix, a_text, b_text);
    if (entry->is_call) {
        char a_call[VALUE_BYTES];
        char b_call[VALUE_BYTES];
        describe_call(&a, a_call);
        describe_call(&b, b_call);
        const int is_told = strcmp(a_call, b_call) != 0; /* else it is about another tensor, or a factor */
        const char *comma = is_told ? "" : ", ";
        (void)snprintf(out, out_bytes, "%s: rank %d (%s) calls %s%s%s, rank %d (%s) calls %s%s%s", entry->name,
                       low->rank, low_host, a_call, comma, is_told ? "" : a_text, high->rank, high_host, b_call, comma,
                       is_told ? "" : b_text);
    } else if (hr_op_is(a.op, HR_OP_OF_TEAMS) || hr_op_is(b.op, HR_OP_OF_TEAMS)) {
        (void)snprintf(out, out_bytes,
                       "rank %d (%s) calls %s, rank %d (%s) %s; all ranks must add and remove the same process sets in "
                       "the same order",
                       low->rank, low_host, a_text, high->rank, high_host, b_text);
    } else {
        const char *verb = hr_op_is(a.op, HR_OP_ROOTED) && strncmp(a_text, "root", 4) == 0 ? "named" : "sent";
        (void)snprintf(out, out_bytes, "%s '%.*s': %srank %d (%s) %s %s, rank %d (%s) %s %s", hr_op_name(a.op),
                       (int)(a.name.bytes < 200 ? a.name.bytes : 200), a.name.data, prefix, low->rank, low_host, verb,
                       a_text, high->rank, high_host, verb, b_text);
    }
}
