#include "shim.h"

#include "engine/requests/request.h"

/* The data is where the answer goes. The first words of a block are its allocator's as soon as it is freed. */
static void look(void *request, void *answer) {
    *(int *)answer = ((struct hr_request *)request)->next == request;
}

int shim_request_outlives_cargo(void) {
    static const struct hr_hooks hooks = {.freed = look};
    const horo_request call = {.name = "x", .op = HORO_BARRIER, .prescale = 1.0, .postscale = 1.0};
    struct hr_error error;
    struct hr_request *request = NULL;
    int answer = -1;
    if (hr_request_create(&call, &request, &error) == HORO_OK) {
        request->next = request;
        request->cargo = (struct hr_cargo){&hooks, request, &answer};
        hr_request_destroy(request);
    }
    return answer;
}
