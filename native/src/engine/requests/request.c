/* Requests as they are made, and those that are pending: by process set and name, in their order, and in the queue. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/map.h"
#include "base/traits.h"
#include "engine/requests/requests.h"

/* ---- A request from the caller: checked, copied, encoded ---- */

/* Of a shape that is refused: the first negative extent, or else the one from which on the bytes are too many. */
static int impossible_dimension(const horo_request *call, const horo_tensor *tensor) {
    for (int d = 0; d < tensor->ndim; d++) {
        if (tensor->shape[d] < 0) {
            return d;
        }
    }
    const int first = hr_op_is(call->op, HR_OP_TELLING_ROWS) && tensor->shape[0] == 0;
    int d = first;
    int64_t bytes;
    while (hr_shape_bytes(tensor->shape + first, d - first + 1, tensor->dtype, &bytes) == HORO_OK) {
        d++;
    }
    return d;
}

static hr_status refuse_reduction(const horo_request *call, const horo_tensor *tensor, struct hr_error *error) {
    const int dtype = tensor->dtype;
    const char *instead = "convert the tensor to another dtype";
    if (hr_dtype_is_complex(dtype)) {
        instead = "complex numbers can be reduced with Sum, Average or Product";
    } else if (call->reduce_op >= HORO_BAND) {
        instead = "bits are those of integers and bool";
    } else if (dtype >= HORO_DTYPE_COUNT) {
        instead = "allgather, alltoall and broadcast move it; to reduce it, convert the tensor to another dtype";
    } else if (dtype == HORO_BOOL && call->reduce_op == HORO_AVERAGE) {
        instead = "bool can be reduced with Sum, Max (any), Min or Product (all)";
    } else if (call->reduce_op == HORO_ADASUM) {
        instead = "Adasum is for floats";
    }
    return hr_fail(error, HORO_ERR_UNSUPPORTED, "%s '%s': this op is not offered for %s; %s", hr_op_name(call->op),
                   call->name, hr_dtype_name(dtype), instead);
}

static int check_tensor(const horo_request *call, const horo_tensor *tensor, struct hr_error *error) {
    const char *op = hr_op_name(call->op);
    if (tensor->dtype < 0 || tensor->dtype >= HORO_ANY_DTYPE_COUNT) {
        return hr_fail(error, HORO_ERR_UNSUPPORTED, "%s '%s': dtype number %d is not known", op, call->name,
                       tensor->dtype);
    }
    if (tensor->ndim < 0 || tensor->ndim > HORO_DIMS_MAX) {
        return hr_fail(error, HORO_ERR_UNSUPPORTED, "%s '%s': %d dimensions; at most %d are supported", op, call->name,
                       tensor->ndim, HORO_DIMS_MAX);
    }
    if ((hr_op_is(call->op, HR_OP_TELLING_ROWS) || call->op == HORO_REDUCESCATTER) && tensor->ndim == 0) {
        return hr_fail(error, HORO_ERR_USAGE, "%s '%s': a scalar has no first dimension to %s along; reshape it to [1]",
                       op, call->name, call->op == HORO_ALLGATHER ? "concatenate" : "split");
    }
    if (call->reduce_op == HORO_ADASUM && hr_op_is(call->op, HR_OP_REDUCTION) && call->op != HORO_ALLREDUCE) {
        return hr_fail(error, HORO_ERR_UNSUPPORTED, "%s '%s': op Adasum is offered by allreduce only", op, call->name);
    }
    if (hr_op_is(call->op, HR_OP_REDUCTION) && !hr_dtype_reducible(tensor->dtype, call->reduce_op)) {
        return refuse_reduction(call, tensor, error);
    }
    if (tensor->wire_dtype != 0 &&
        (!hr_op_is(call->op, HR_OP_REDUCTION) || !hr_dtype_narrows(tensor->dtype, tensor->wire_dtype))) {
        return hr_fail(error, HORO_ERR_UNSUPPORTED, "%s '%s': %s cannot travel as %s; only a reduction of float32 or "
                       "float64 can, as float16 or bfloat16", op, call->name, hr_dtype_name(tensor->dtype),
                       hr_dtype_name(tensor->wire_dtype));
    }
    if ((tensor->dtype == HORO_BOOL || call->reduce_op >= HORO_BAND) &&
        (call->prescale != 1.0 || call->postscale != 1.0)) {
        return hr_fail(error, HORO_ERR_UNSUPPORTED, "%s '%s': %s cannot be scaled", op, call->name,
                       tensor->dtype == HORO_BOOL ? "bool" : "bits");
    }
    int64_t bytes;
    if (hr_wire_tensor_bytes(call->op, tensor->shape, tensor->ndim, tensor->dtype, &bytes) == HORO_OK) {
        return HORO_OK;
    }
    const int d = impossible_dimension(call, tensor);
    return hr_fail(error, HORO_ERR_USAGE, "%s '%s': extent %lld of dimension %d is impossible", op, call->name,
                   (long long)tensor->shape[d], d);
}

/* Checks the splits; their number is compared with the team when that is known. */
static hr_status check_splits(const horo_request *call, const horo_tensor *tensor, struct hr_error *error) {
    int64_t left = tensor->shape[0];
    for (int i = 0; i < tensor->split_count && tensor->splits != NULL; i++) {
        if (tensor->splits[i] < 0) {
            return hr_fail(error, HORO_ERR_USAGE, "alltoall '%s': split %d is %lld; it must be 0 or more", call->name,
                           i, (long long)tensor->splits[i]);
        }
        if (tensor->splits[i] > left) {
            return hr_fail(error, HORO_ERR_USAGE,
                           "alltoall '%s': the splits up to number %d are more than the %lld rows of the tensor",
                           call->name, i, (long long)tensor->shape[0]);
        }
        left -= tensor->splits[i];
    }
    return left == 0 && tensor->splits != NULL
               ? HORO_OK
               : hr_fail(error, HORO_ERR_USAGE, "alltoall '%s': %lld of the %lld rows of the tensor are in no split",
                         call->name, (long long)left, (long long)tensor->shape[0]);
}

static hr_status check_call(const horo_request *call, struct hr_error *error) {
    if (call->op < 0 || (call->op >= HORO_OP_COUNT && !hr_op_is(call->op, HR_OP_OF_PAIRS))) {
        return hr_fail(error, HORO_ERR_UNSUPPORTED, "operation number %d is not known", call->op);
    }
    const size_t name_bytes = call->name == NULL ? 0 : strlen(call->name);
    if (name_bytes == 0 || name_bytes > HORO_NAME_MAX) {
        return hr_fail(error, HORO_ERR_USAGE, "%s: the name has %zu bytes; 1 to %d are allowed", hr_op_name(call->op),
                       name_bytes, HORO_NAME_MAX);
    }
    const int wrong_count = hr_op_is(call->op, HR_OP_WITH_TENSORS) ? call->tensor_count < 1 : call->tensor_count != 0;
    if (wrong_count || call->tensor_count > HR_WIRE_TENSORS_MAX) {
        return hr_fail(error, HORO_ERR_USAGE, "%s '%s': %d tensors", hr_op_name(call->op), call->name,
                       call->tensor_count);
    }
    for (int i = 0; i < call->tensor_count; i++) {
        HR_TRY(check_tensor(call, &call->tensors[i], error));
        HR_TRY(call->op == HORO_ALLTOALL ? check_splits(call, &call->tensors[i], error) : HORO_OK);
    }
    return HORO_OK;
}

int hr_request_is_call(const struct hr_request *request) {
    return (request->call.flags & HORO_SUBMIT_ORDERED) != 0;
}

/* Everything in one allocation; the last parts, of byte_count and row_bytes, are for what travels. */
static hr_status copy_call(const horo_request *call, size_t byte_count, size_t row_bytes, struct hr_request **out) {
    size_t dims = 0;
    for (int i = 0; i < call->tensor_count; i++) {
        dims += (size_t)call->tensors[i].ndim;
        dims += call->op == HORO_ALLTOALL ? (size_t)call->tensors[i].split_count : 0;
    }
    const size_t count = (size_t)call->tensor_count;
    const size_t name_bytes = strlen(call->name);
    const size_t name_room = (call->flags & HORO_SUBMIT_ORDERED) != 0 ? HR_CALL_NAME_BYTES : name_bytes + 1;
    struct hr_request *request = malloc(sizeof *request + count * sizeof(horo_tensor) + dims * sizeof(int64_t) +
                                        name_room + byte_count + row_bytes);
    if (request == NULL) {
        return HORO_ERR_RESOURCE;
    }
    horo_tensor *tensors = (horo_tensor *)(void *)(request + 1);
    int64_t *shape = (int64_t *)(void *)(tensors + count);
    char *name = (char *)(shape + dims);
    *request = (struct hr_request){
        .call = *call, .owners = 1, .answer = -1, .submit_ns = hr_now_ns(),
        .name_bytes = name_bytes, .name_hash = hr_hash(call->name, name_bytes),
        .bytes = (uint8_t *)name + name_room, .byte_count = byte_count,
    };
    for (size_t i = 0; i < count; i++) {
        tensors[i] = call->tensors[i];
        tensors[i].shape = shape;
        for (int d = 0; d < tensors[i].ndim; d++) {
            *shape++ = call->tensors[i].shape[d];
        }
        tensors[i].splits = shape;
        for (int d = 0; call->op == HORO_ALLTOALL && d < tensors[i].split_count; d++) {
            *shape++ = call->tensors[i].splits[d];
        }
        request->data_bytes += (int64_t)hr_tensor_bytes(&tensors[i]);
    }
    memcpy(name, call->name, name_bytes + 1);
    request->call.name = name;
    request->call.tensors = tensors;
    atomic_init(&request->status, HORO_IN_PROGRESS);
    *out = request;
    return HORO_OK;
}

static int encode(struct hr_request *request) {
    request->rows = hr_wire_encode_rows(&request->call, request->bytes + request->byte_count);
    /* just enough: it will not grow */
    struct hr_buffer room = {.data = request->bytes, .capacity = request->byte_count};
    return hr_wire_encode_request(&room, &request->call);
}

hr_status hr_request_create(const horo_request *given, struct hr_request **request, struct hr_error *error) {
    horo_request named = *given;
    const horo_request *call = &named;
    if ((given->flags & HORO_SUBMIT_ORDERED) != 0) {
        named.name = "ordered call"; /* until it has a number */
        if (given->device != 0) {
            return hr_fail(error, HORO_ERR_UNSUPPORTED,
                           "%s: an ordered call of a tensor on a GPU is not offered; copy it to the host",
                           hr_op_name(given->op));
        }
    }
    HR_TRY(check_call(call, error));
    const size_t byte_count = hr_wire_request_bytes(call);
    const size_t row_bytes = hr_wire_encode_rows(call, NULL).bytes;
    if (byte_count + row_bytes > HR_WIRE_REQUEST_MAX) { /* it could be encoded, but no message would hold it */
        return hr_fail(error, HORO_ERR_USAGE,
                       "%s '%s': the description of its %d tensors takes %zu bytes; at most %d can travel as one "
                       "request: submit the tensors as several groups",
                       hr_op_name(call->op), call->name, call->tensor_count, byte_count + row_bytes,
                       HR_WIRE_REQUEST_MAX);
    }
    struct hr_request *copy = NULL;
    int status = copy_call(call, byte_count, row_bytes, &copy);
    status = status == HORO_OK ? encode(copy) : status;
    if (status == HORO_OK && hr_op_is(call->op, HR_OP_TELLING_ROWS)) {
        copy->gathered = calloc((size_t)call->tensor_count, sizeof *copy->gathered);
        status = copy->gathered == NULL ? HORO_ERR_RESOURCE : HORO_OK;
    }
    if (status != HORO_OK) {
        free(copy);
        return hr_fail(error, status, "%s '%s': out of memory for the request", hr_op_name(call->op), call->name);
    }
    *request = copy;
    return HORO_OK;
}

void hr_request_set_on_gpu(struct hr_request *request) {
    request->call.flags |= HORO_SUBMIT_ON_GPU;
    (void)encode(request); /* into the room that it has already */
}

void hr_cargo_drop(const struct hr_cargo *cargo) {
    if (cargo->hooks != NULL && cargo->hooks->freed != NULL) {
        cargo->hooks->freed(cargo->data);
    }
}

void hr_request_drop_results(struct hr_request *request) {
    if (request->gathered == NULL) {
        return;
    }
    free(request->gathered[0].first_dims); /* those of all, see execute/rows.c */
    for (int i = 0; i < request->call.tensor_count; i++) {
        free(request->gathered[i].is_given ? NULL : request->gathered[i].data);
        request->gathered[i] = (struct hr_gathered){0};
    }
    free(request->splits);
    request->splits = NULL;
    request->misfit = 0;
}

void hr_request_destroy(struct hr_request *request) {
    if (request == NULL) {
        return;
    }
    hr_request_drop_results(request);
    free(request->gathered);
    free(request->error_text);
    hr_cargo_drop(&request->cargo); /* first: until then a thread of the GPU's driver may look at the request */
    free(request);
}

int hr_request_is_like(const struct hr_request *request, const horo_request *call) {
    const horo_request *own = &request->call;
    const size_t fixed = offsetof(horo_request, op);
    if (memcmp((const char *)own + fixed, (const char *)call + fixed, offsetof(horo_request, tensors) - fixed) != 0 ||
        own->tensor_count != call->tensor_count || own->team != call->team || own->device != call->device ||
        (!hr_request_is_call(request) && (call->name == NULL || strcmp(own->name, call->name) != 0))) {
        return 0;
    }
    const horo_tensor *mine = own->tensors;
    const horo_tensor *other = call->tensors;
    if (own->tensor_count == 0) {
        return 1;
    }
    if (own->op == HORO_ALLTOALL &&
        (mine->split_count != other->split_count ||
         memcmp(mine->splits, other->splits, (size_t)mine->split_count * sizeof *mine->splits) != 0)) {
        return 0;
    }
    return mine->dtype == other->dtype && mine->wire_dtype == other->wire_dtype && mine->ndim == other->ndim &&
           memcmp(mine->shape, other->shape, (size_t)mine->ndim * sizeof *mine->shape) == 0;
}

void hr_request_renew(struct hr_request *request, const horo_request *call) {
    horo_tensor *tensor = (horo_tensor *)(void *)(request + 1);
    if (call->tensor_count > 0) {
        tensor->input = call->tensors->input;
        tensor->output = call->tensors->output;
        tensor->output_bytes = call->tensors->output_bytes;
    }
    request->call.timeout_ms = call->timeout_ms;
    request->newer = NULL;
    request->next_call = NULL;
    request->owners = 1;
    request->state = HR_REQUEST_QUEUED;
    request->announced_id = 0;
    request->submit_ns = hr_now_ns();
    atomic_store(&request->status, HORO_IN_PROGRESS);
}

/* ---- Pending ---- */

hr_status hr_port_find(const struct hr_requests *requests, int32_t id, const char *name, struct hr_port **port,
                       struct hr_error *error) {
    const int number = id < 0 ? -1 : hr_team_number(id);
    const int fits = number >= 0 && number < HR_TEAMS_MAX;
    const struct hr_place *place = fits ? &requests->places[number] : NULL;
    if (fits && place->is_used && place->id == id) {
        *port = place->port;
        return HORO_OK;
    }
    const int is_gone = fits && (place->id < 0 || id < place->id);
    return hr_fail(error, HORO_ERR_USAGE, "%s%s%sprocess set %d %s", name == NULL ? "" : "'", name == NULL ? "" : name,
                   name == NULL ? "" : "': ", is_gone ? number : id, is_gone ? "has been removed" : "does not exist");
}

struct hr_request *hr_port_next(const struct hr_port *port, const struct hr_request *last) {
    struct hr_request *request = last == NULL ? port->requests->oldest : last->newer;
    while (request != NULL && request->port != port) {
        request = request->newer;
    }
    return request;
}

struct hr_request *hr_port_find_name(struct hr_port *port, struct hr_wire_text name) {
    hr_drive_lock(port->requests->drive);
    struct hr_request *request = hr_map_find(&port->names, hr_hash(name.data, name.bytes), name.data, name.bytes);
    hr_drive_unlock(port->requests->drive);
    return request;
}

struct hr_request *hr_port_take_call(struct hr_port *port) {
    hr_drive_lock(port->requests->drive);
    struct hr_request *request = port->next_call;
    port->next_call = request == NULL ? NULL : request->next_call;
    hr_drive_unlock(port->requests->drive);
    return request;
}

/* The last one in flight of the request's name; NULL: there is none. */
static struct hr_request *last_of_name(const struct hr_request *request) {
    struct hr_request *last =
        hr_map_find(&request->port->names, request->name_hash, request->call.name, request->name_bytes);
    while (last != NULL && last->behind != NULL) {
        last = last->behind;
    }
    return last;
}

int hr_port_is_next(struct hr_request *request) {
    if (hr_request_is_call(request)) {
        request->is_behind = 0;
        return 1;
    }
    const struct hr_request *last = last_of_name(request);
    request->is_behind = last != NULL;
    return last == NULL || last->refused != 0;
}

hr_status hr_port_add(struct hr_requests *requests, struct hr_request *request) {
    struct hr_port *port = request->port;
    if (hr_request_is_call(request)) {
        request->name_bytes = hr_name_call(++port->call_count, (char *)request->bytes - HR_CALL_NAME_BYTES);
        request->name_hash = hr_hash(request->call.name, request->name_bytes) + 1; /* that of no name */
        if (port->last_call != NULL) {
            port->last_call->next_call = request;
        }
        port->last_call = request;
        port->next_call = port->next_call == NULL ? request : port->next_call;
    } else if (request->is_behind) {
        last_of_name(request)->behind = request;
    } else if (port != NULL) {
        HR_TRY(hr_map_insert(&port->names, request->name_hash, request->call.name, request->name_bytes, request));
    }
    request->older = requests->newest;
    *(requests->newest == NULL ? &requests->oldest : &requests->newest->newer) = request;
    requests->newest = request;
    atomic_fetch_add(&requests->drive->pending, 1);
    if (port != NULL) {
        atomic_store_explicit(&port->pending, atomic_load(&port->pending) + 1, memory_order_relaxed);
    }
    return HORO_OK;
}

void hr_requests_queue(struct hr_requests *requests, struct hr_request *request) {
    request->state = HR_REQUEST_QUEUED;
    if (request->is_behind) {
        return;
    }
    request->next = NULL;
    *requests->queue_tail = request;
    requests->queue_tail = &request->next;
    atomic_fetch_add(&requests->queued, 1);
}

struct hr_request *hr_requests_take_queue(struct hr_requests *requests) {
    hr_drive_lock(requests->drive);
    struct hr_request *head = requests->queue_head;
    for (struct hr_request *request = head; request != NULL; request = request->next) {
        request->state = HR_REQUEST_ANNOUNCED;
    }
    requests->queue_head = NULL;
    requests->queue_tail = &requests->queue_head;
    atomic_store(&requests->queued, 0);
    hr_drive_unlock(requests->drive);
    return head;
}

void hr_port_remove(struct hr_requests *requests, const struct hr_request *request) {
    struct hr_arena_block *block = &requests->node->arena.blocks[requests->node->local_rank];
    struct hr_port *port = request->port;
    struct hr_request *next = request->behind;
    const uint32_t left = atomic_fetch_sub(&requests->drive->pending, 1) - 1;
    atomic_store_explicit(&block->pending, left, memory_order_relaxed);
    *(request->older == NULL ? &requests->oldest : &request->older->newer) = request->newer;
    *(request->newer == NULL ? &requests->newest : &request->newer->older) = request->older;
    if (port == NULL) {
        return;
    }
    atomic_store_explicit(&port->pending, atomic_load(&port->pending) - 1, memory_order_relaxed);
    if (hr_request_is_call(request)) { /* they end in their order; where all fail, from the newest on */
        port->last_call = port->last_call == request ? NULL : port->last_call;
        if (port->next_call == request) {
            port->next_call = port->last_call == NULL ? NULL : request->next_call;
        }
    } else if (request->is_behind) {
        struct hr_request *front =
            hr_map_find(&port->names, request->name_hash, request->call.name, request->name_bytes);
        while (front->behind != request) {
            front = front->behind;
        }
        front->behind = next;
    } else {
        (void)hr_map_remove(&port->names, request->name_hash, request->call.name, request->name_bytes);
        if (next != NULL) { /* into the place that has just become free */
            (void)hr_map_insert(&port->names, next->name_hash, next->call.name, next->name_bytes, next);
            next->is_behind = 0;
            atomic_store_explicit(&block->behind, 0, memory_order_relaxed);
            if (next->state == HR_REQUEST_QUEUED) {
                hr_requests_queue(requests, next);
            }
        }
    }
}
