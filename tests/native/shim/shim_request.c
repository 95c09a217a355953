#include "shim.h"

#include "engine/drive/drive.h"
#include "engine/requests/port.h"
#include "engine/requests/requests.h"

struct watched {
    const struct hr_request *request;
    int answer;
};

/* The first words of a block are its allocator's as soon as it is freed. */
static void look(void *data) {
    struct watched *watched = data;
    watched->answer = watched->request->next == watched->request;
}

int shim_request_outlives_cargo(void) {
    static const struct hr_hooks hooks = {.freed = look};
    const horo_request call = {.name = "x", .op = HORO_BARRIER, .prescale = 1.0, .postscale = 1.0};
    struct hr_error error;
    struct hr_request *request = NULL;
    struct watched watched = {.answer = -1};
    if (hr_request_create(&call, &request, &error) == HORO_OK) {
        watched.request = request->next = request;
        request->cargo = (struct hr_cargo){&hooks, &watched};
        hr_request_destroy(request);
    }
    return watched.answer;
}

int shim_request_call_behind_failed_ones(void) {
    enum { CALLS = 3 };
    static const horo_request call = {
        .op = HORO_BARRIER, .flags = HORO_SUBMIT_ORDERED, .prescale = 1.0, .postscale = 1.0};
    struct hr_arena_block block = {0};
    struct hr_node node = {.arena.blocks = &block};
    struct hr_drive drive = {.node = &node, .lock = PTHREAD_MUTEX_INITIALIZER};
    struct hr_requests requests = {.node = &node, .drive = &drive};
    struct hr_port port = {.requests = &requests};
    struct hr_request *calls[CALLS + 1] = {NULL};
    int is_there = 1;
    for (int i = 0; i <= CALLS && is_there; i++) {
        for (int ended = CALLS - 1; i == CALLS && ended >= 0; ended--) {
            hr_port_remove(&requests, calls[ended]);
            hr_request_destroy(calls[ended]);
        }
        is_there = hr_request_create(&call, &calls[i], NULL) == HORO_OK;
        if (is_there) {
            calls[i]->port = &port;
            is_there = hr_port_add(&requests, calls[i]) == HORO_OK;
        }
    }
    const int is_next = is_there && hr_port_take_call(&port) == calls[CALLS];
    hr_request_destroy(calls[CALLS]);
    return is_next;
}
