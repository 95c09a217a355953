/*
 * The part of a rank that has joined in the operations of the others: it makes a request of its own from the bytes that
 * they have agreed on, with values that change no result, and drops what comes of it. Driver only.
 */
#include <stdlib.h>
#include <string.h>

#include "base/traits.h"
#include "engine/membership/private.h"

enum { ALIGNMENT = 64, ELEMENT_MAX = 16 };

/* ---- Neutral elements ---- */

static uint64_t lowest_integer(int dtype) {
    const int bits = 8 * (int)hr_dtype_bytes(dtype);
    return dtype == HORO_UINT8 || dtype == HORO_BOOL ? 0 : (uint64_t)1 << (bits - 1);
}

static uint64_t highest_integer(int dtype) {
    return dtype == HORO_BOOL ? 1 : ~lowest_integer(dtype);
}

/*
 * The bits of 1, and of infinity, as a float of this dtype; its sign is the highest bit. Of a complex 1 those of its
 * real part, which comes first: all behind them are 0.
 */
static uint64_t one_of(int dtype) {
    switch (hr_dtype_real(dtype)) {
    case HORO_FLOAT16: return 0x3c00;
    case HORO_BFLOAT16: return 0x3f80;
    case HORO_FLOAT32: return 0x3f800000;
    case HORO_FLOAT64: return 0x3ff0000000000000;
    default: return 1;
    }
}

static uint64_t infinity_of(int dtype) {
    switch (dtype) {
    case HORO_FLOAT16: return 0x7c00;
    case HORO_BFLOAT16: return 0x7f80;
    case HORO_FLOAT32: return 0x7f800000;
    default: return 0x7ff0000000000000;
    }
}

/* Of what is at most 64 bits wide. */
static uint64_t sign_of(int dtype) {
    return (uint64_t)1 << (8 * hr_dtype_bytes(dtype) - 1);
}

/*
 * The bits of the value of a dtype that changes no result of a reduction; 0 for one that has none. Where the dtype is
 * wider, its other bits are 0. No complex number leaves a product as it is beside an infinite or NaN part: 1 does for
 * all others, but for the sign of a zero.
 */
static uint64_t neutral_element(int dtype, int reduce_op) {
    if (!hr_dtype_reducible(dtype, reduce_op)) {
        return 0; /* it is refused before it is run */
    }
    const int is_integer = hr_dtype_is_integer(dtype) || dtype == HORO_BOOL;
    switch (reduce_op) {
    case HORO_MIN: return is_integer ? highest_integer(dtype) : infinity_of(dtype);
    case HORO_MAX: return is_integer ? lowest_integer(dtype) : infinity_of(dtype) | sign_of(dtype);
    case HORO_PRODUCT: return one_of(dtype);
    default: return 0;
    }
}

static void fill(void *data, size_t bytes, int dtype, uint64_t bits) {
    const size_t width = hr_dtype_bytes(dtype);
    uint8_t element[ELEMENT_MAX] = {0};
    for (size_t i = 0; i < sizeof bits; i++) {
        element[i] = (uint8_t)(bits >> 8 * i); /* values in memory are little-endian, as on the wire */
    }
    for (size_t at = 0; at < bytes; at += width) {
        memcpy((uint8_t *)data + at, element, width);
    }
}

/* ---- Making one ---- */

/* The tensors of a request while it is made. */
struct draft {
    horo_request call;
    char *name;
    horo_tensor *tensors;
    struct hr_wire_tensor *decoded;
    uint8_t *data;
};

static void free_draft(struct draft *draft) {
    free(draft->name);
    free(draft->tensors);
    free(draft->decoded);
    free(draft->data);
}

static int decode_tensors(const struct hr_wire_request *request, struct draft *draft) {
    const size_t count = request->tensor_count;
    draft->tensors = calloc(count + 1, sizeof *draft->tensors);
    draft->decoded = calloc(count + 1, sizeof *draft->decoded);
    draft->name = malloc(request->name.bytes + 1);
    if (draft->tensors == NULL || draft->decoded == NULL || draft->name == NULL) {
        return HORO_ERR_RESOURCE;
    }
    memcpy(draft->name, request->name.data, request->name.bytes);
    draft->name[request->name.bytes] = '\0';
    const uint8_t *cursor = request->tensors;
    for (size_t i = 0; i < count; i++) {
        struct hr_wire_tensor *tensor = &draft->decoded[i];
        hr_wire_next_tensor(&cursor, tensor);
        draft->tensors[i] = (horo_tensor){
            .shape = tensor->shape, .ndim = tensor->ndim, .dtype = tensor->dtype, .wire_dtype = tensor->wire_dtype};
    }
    draft->call = (horo_request){
        .name = draft->name,
        .op = request->op,
        .reduce_op = request->reduce_op,
        .root_rank = request->root_rank,
        .flags = request->transient ? HORO_SUBMIT_TRANSIENT : 0,
        .prescale = request->prescale,
        .postscale = request->postscale,
        .tensors = draft->tensors,
        .tensor_count = (int32_t)count,
    };
    return HORO_OK;
}

/* In place. Of an allgather there is nothing: the extents agreed on are those of no rows. */
static int allocate_values(struct draft *draft) {
    size_t total = 1;
    for (int32_t i = 0; i < draft->call.tensor_count; i++) {
        int64_t bytes = 0; /* it was checked when it was decoded */
        (void)hr_shape_bytes(draft->tensors[i].shape, draft->tensors[i].ndim, draft->tensors[i].dtype, &bytes);
        draft->tensors[i].output_bytes = bytes;
        if (__builtin_add_overflow(total, ((size_t)bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, &total)) {
            return HORO_ERR_RESOURCE;
        }
    }
    draft->data = calloc(total, 1); /* pages of zeros that nobody has touched yet, where it is large */
    if (draft->data == NULL) {
        return HORO_ERR_RESOURCE;
    }
    uint8_t *at = draft->data;
    for (int32_t i = 0; i < draft->call.tensor_count; i++) {
        horo_tensor *tensor = &draft->tensors[i];
        const size_t bytes = (size_t)tensor->output_bytes;
        const int reduces = hr_op_reduces(draft->call.op);
        const uint64_t bits = reduces ? neutral_element(tensor->dtype, draft->call.reduce_op) : 0;
        if (bits != 0) {
            fill(at, bytes, tensor->dtype, bits);
        }
        tensor->input = at;
        tensor->output = at;
        at += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    }
    return HORO_OK;
}

static void end_stand_in(void *owner, struct hr_request *request, int status) {
    struct hr_lane *lane = owner;
    (void)status;
    (void)hr_map_remove(&lane->absence->stand_ins, request->name_hash, request->call.name, request->name_bytes);
    hr_request_destroy(request);
}

static void free_values(void *lane, void *values) {
    (void)lane;
    free(values);
}

static const struct hr_hooks hooks = {.ended = end_stand_in, .freed = free_values};

static int finish_draft(struct hr_lane *lane, struct draft *draft, struct hr_request **request) {
    struct hr_error error = {0};
    draft->call.team = lane->team->id;
    HR_TRY(hr_request_create(&draft->call, request, &error));
    (*request)->port = &lane->port;
    (*request)->team_size = lane->team->size;
    (*request)->state = HR_REQUEST_STANDS_IN;
    (*request)->cargo = (struct hr_cargo){&hooks, lane, draft->data};
    draft->data = NULL;
    return HORO_OK;
}

/* The others have refused what a rank that has joined cannot do. */
static int can_stand_in(const struct hr_lane *lane, const struct hr_wire_request *request) {
    const int op = request->op;
    const int is_possible = op == HORO_ALLREDUCE || op == HORO_ALLGATHER || op == HORO_BROADCAST || op == HORO_BARRIER;
    return hr_has_joined(lane) && is_possible && !request->on_gpu &&
           (op != HORO_BROADCAST || hr_team_member(lane->team, request->root_rank) >= 0);
}

/*
 * Makes one from the canonical bytes of theirs, for the record that comes next. HORO_OK, HORO_ERR_RESOURCE, or
 * HORO_ERR_INTERNAL where this rank has not joined, or nobody can stand in.
 */
static int make(struct hr_lane *lane, const void *bytes, size_t byte_count, struct hr_request **request) {
    struct hr_wire_request decoded = {0};
    struct draft draft = {0};
    HR_TRY(hr_wire_decode_request(bytes, byte_count, &decoded));
    if (!can_stand_in(lane, &decoded)) {
        return HORO_ERR_INTERNAL; /* this rank has not submitted it, nor may it be done without */
    }
    struct hr_request *made = NULL;
    int status = decode_tensors(&decoded, &draft);
    status = status == HORO_OK ? allocate_values(&draft) : status;
    status = status == HORO_OK ? finish_draft(lane, &draft, &made) : status;
    free_draft(&draft);
    if (status == HORO_OK) {
        status = hr_map_insert(&lane->absence->stand_ins, made->name_hash, made->call.name, made->name_bytes, made);
        if (status != HORO_OK) {
            hr_request_destroy(made);
        }
    }
    if (status == HORO_OK) {
        *request = made;
    }
    return status;
}

/* ---- Until it is over ---- */

static struct hr_request *find(const struct hr_lane *lane, struct hr_wire_text name) {
    return lane->absence == NULL
               ? NULL
               : hr_map_find(&lane->absence->stand_ins, hr_hash(name.data, name.bytes), name.data, name.bytes);
}

int hr_stand_in_for(void *owner, struct hr_wire_text name, struct hr_wire_text bytes, struct hr_request **request) {
    struct hr_lane *lane = owner;
    if (bytes.bytes > 0) {
        return make(lane, bytes.data, bytes.bytes, request);
    }
    *request = find(lane, name);
    return *request != NULL || hr_has_joined(lane) ? HORO_OK : HORO_ERR_INTERNAL;
}

int hr_stand_in_describe(void *owner, const struct hr_wire_message *record) {
    struct hr_lane *lane = owner;
    const struct hr_wire_request *request = &record->request;
    struct hr_request *made;
    if (hr_port_find_name(&lane->port, request->name) != NULL) {
        return HORO_OK; /* submitted here, too */
    }
    return find(lane, request->name) != NULL ? HORO_ERR_INTERNAL
                                             : make(lane, request->bytes, request->byte_count, &made);
}

static void destroy(void *request) {
    hr_request_destroy(request);
}

void hr_membership_forget(struct hr_lane *lane) {
    if (lane->absence == NULL) {
        return;
    }
    struct hr_map *stand_ins = &lane->absence->stand_ins;
    for (size_t i = 0; i < stand_ins->capacity; i++) {
        if (stand_ins->slots[i].value != NULL) {
            hr_node_bury(lane->node, stand_ins->slots[i].value, destroy);
        }
    }
    hr_map_fini(stand_ins);
    free(lane->absence);
    lane->absence = NULL;
}
