#include "shim.h"

#include "engine/requests/request.h"

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
