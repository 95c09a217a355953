#include "shim.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "mpi/mpi.h"
#include "transport/transport.h"

enum { SLEEP_FDS_MAX = 64 };

static void *tell(struct hr_transport *transport, const struct hr_error *failure, int *status, char *error) {
    *status = failure->code;
    (void)snprintf(error, HORO_MESSAGE_MAX, "%s", failure->text);
    return transport;
}

void *shim_tcp_create(const int *control_fds, const int *data_fds, int host_count, int data_sockets,
                      int peer_timeout_ms, int *status, char *error) {
    struct hr_error failure = {0};
    struct hr_transport *transport =
        hr_tcp_create(control_fds, data_fds, host_count, data_sockets, peer_timeout_ms, &failure);
    return tell(transport, &failure, status, error);
}

void *shim_mpi_create(const int *control_fds, const horo_mpi *calls, int host_count, int peer_timeout_ms, int *status,
                      char *error) {
    struct hr_error failure = {0};
    struct hr_transport *transport = NULL;
    struct hr_mpi *mpi = calloc(1, sizeof *mpi);
    if (mpi != NULL && hr_mpi_init(mpi, calls, &failure) == HORO_OK) {
        struct hr_transport *control = hr_tcp_create(control_fds, NULL, host_count, 1, peer_timeout_ms, &failure);
        if (control != NULL) {
            transport = hr_mpi_transport_create(mpi, control, control_fds, host_count, peer_timeout_ms, &failure);
        }
        if (control != NULL && transport == NULL) {
            control->ops->destroy(control);
        }
    }
    return tell(transport, &failure, status, error);
}

void shim_transport_destroy(void *transport) {
    ((struct hr_transport *)transport)->ops->destroy(transport);
}

void *shim_io_create(void) {
    return calloc(1, sizeof(struct hr_io));
}

void shim_io_destroy(void *io) {
    free(io);
}

int shim_io_state(const void *io) {
    return (int)((const struct hr_io *)io)->state;
}

size_t shim_io_done_bytes(const void *io) {
    return ((const struct hr_io *)io)->done_bytes;
}

int shim_post_send(void *transport, int peer, int channel, const void *data, size_t bytes, void *io) {
    struct hr_transport *self = transport;
    return self->ops->post(self, HR_SEND, peer, (enum hr_channel)channel, (char *)(uintptr_t)data, bytes, io);
}

int shim_post_recv(void *transport, int peer, int channel, void *data, size_t bytes, void *io) {
    struct hr_transport *self = transport;
    return self->ops->post(self, HR_RECV, peer, (enum hr_channel)channel, data, bytes, io);
}

int shim_post_recv_some(void *transport, int peer, void *data, size_t capacity, void *io) {
    struct hr_io *posted = io;
    HR_TRY(shim_post_recv(transport, peer, HR_CHANNEL_CONTROL, data, capacity, io));
    posted->takes_some = 1;
    return HORO_OK;
}

int shim_progress(void *transport) {
    struct hr_transport *self = transport;
    return self->ops->progress(self);
}

void shim_abandon(void *transport, int channel) {
    struct hr_transport *self = transport;
    self->ops->abandon(self, (enum hr_channel)channel);
}

void shim_watch(void *transport, int enabled) {
    struct hr_transport *self = transport;
    self->ops->watch(self, enabled);
}

int shim_loss(void *transport, int peer) {
    const struct hr_transport *self = transport;
    return (int)self->ops->loss(self, peer);
}

int shim_is_idle(void *transport) {
    struct hr_transport *self = transport;
    struct pollfd polled[SLEEP_FDS_MAX];
    return self->ops->sleep_fds(self, polled, SLEEP_FDS_MAX) == 0 && hr_transport_poll_within_ns(self) < 0;
}

int shim_sleep(void *transport, int timeout_ms) {
    struct hr_transport *self = transport;
    struct pollfd polled[SLEEP_FDS_MAX];
    const size_t count = self->ops->sleep_fds(self, polled, SLEEP_FDS_MAX);
    const int64_t look_ns = hr_transport_poll_within_ns(self);
    const int64_t asked_ns = (int64_t)timeout_ms * 1000000;
    const int looks = look_ns >= 0 && look_ns < asked_ns;
    const struct timespec timeout = {.tv_sec = looks ? 0 : timeout_ms / 1000,
                                     .tv_nsec = (looks ? look_ns : asked_ns) % 1000000000};
    return ppoll(polled, count < SLEEP_FDS_MAX ? count : SLEEP_FDS_MAX, &timeout, NULL) > 0 || looks;
}

static int state_of(void *const *ios, int io_count) {
    int status = HORO_OK;
    for (int i = 0; i < io_count; i++) {
        const struct hr_io *io = ios[i];
        if (io->state == HR_IO_POSTED) {
            return HORO_IN_PROGRESS;
        }
        if (io->state == HR_IO_FAILED) {
            status = HORO_ERR_PEER_LOST;
        }
    }
    return status;
}

int shim_wait(void *transport, void *const *ios, int io_count, int timeout_ms) {
    const int64_t deadline_ns = hr_now_ns() + (int64_t)timeout_ms * 1000000;
    int status;
    while ((status = state_of(ios, io_count)) == HORO_IN_PROGRESS) {
        if (shim_progress(transport)) {
            continue;
        }
        const int64_t left_ms = (deadline_ns - hr_now_ns()) / 1000000;
        if (left_ms <= 0) {
            return HORO_ERR_TIMEOUT;
        }
        (void)shim_sleep(transport, (int)left_ms);
    }
    return status;
}
