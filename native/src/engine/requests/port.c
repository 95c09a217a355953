/* Requests that are pending: by process set and name, in their order, and in the queue of what is to be announced. */
#include "engine/requests/private.h"

#include "base/map.h"

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
    const struct hr_request *last = last_of_name(request);
    request->is_behind = last != NULL;
    return last == NULL || last->refused != 0;
}

static void change_pending(struct hr_port *port, uint32_t change) {
    atomic_store_explicit(&port->pending, hr_port_pending(port) + change, memory_order_relaxed);
}

hr_status hr_port_add(struct hr_requests *requests, struct hr_request *request) {
    struct hr_port *port = request->port;
    if (request->is_behind) {
        last_of_name(request)->behind = request;
    } else {
        HR_TRY(hr_map_insert(&port->names, request->name_hash, request->call.name, request->name_bytes, request));
    }
    request->older = requests->newest;
    *(requests->newest == NULL ? &requests->oldest : &requests->newest->newer) = request;
    requests->newest = request;
    atomic_fetch_add(&requests->drive->pending, 1);
    change_pending(port, 1);
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
    if (request->is_behind) {
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
    change_pending(port, (uint32_t)-1);
    const uint32_t left = atomic_fetch_sub(&requests->drive->pending, 1) - 1;
    atomic_store_explicit(&block->pending, left, memory_order_relaxed);
    *(request->older == NULL ? &requests->oldest : &request->older->newer) = request->newer;
    *(request->newer == NULL ? &requests->newest : &request->newer->older) = request->older;
}
