/* Transports as plain functions. A transport is a void *, and so is an io. */
#ifndef SHIM_TRANSPORT_H
#define SHIM_TRANSPORT_H

/* cffi: skip */
#include <stddef.h>

#include "horo.h"
/* cffi: end */

/* NULL with the sentence in error (HORO_MESSAGE_MAX bytes) and the code in *status. */
void *shim_tcp_create(const int *control_fds, const int *data_fds, int host_count, int data_sockets,
                      int peer_timeout_ms, int *status, char *error);
/*
 * Data by MPI, control by sockets. What describes the MPI is never freed: what it has been asked for may outlive the
 * transport.
 */
void *shim_mpi_create(const int *control_fds, const horo_mpi *calls, int host_count, int peer_timeout_ms, int *status,
                      char *error);
void shim_transport_destroy(void *transport);

void *shim_io_create(void);
void shim_io_destroy(void *io);
int shim_io_state(const void *io);
size_t shim_io_done_bytes(const void *io);

int shim_post_send(void *transport, int peer, int channel, const void *data, size_t bytes, void *io);
int shim_post_recv(void *transport, int peer, int channel, void *data, size_t bytes, void *io);
int shim_post_recv_some(void *transport, int peer, void *data, size_t capacity, void *io);
int shim_progress(void *transport);
void shim_abandon(void *transport, int channel);
void shim_watch(void *transport, int enabled);
/* enum hr_loss of a peer. */
int shim_loss(void *transport, int peer);
/* How many descriptors; the first `capacity` of them in fds and events. */
size_t shim_sleep_fds(void *transport, int *fds, int *events, size_t capacity);
/* Sleeps on them: 1 if one woke or it was time to look without one, 0 if neither happened in time. */
int shim_sleep(void *transport, int timeout_ms);
/* Whether a sleeper must look by itself now and then. */
int shim_must_look(void *transport);

/*
 * Progress and sleep until none of the ios is posted any more. HORO_OK, HORO_ERR_PEER_LOST if any failed,
 * HORO_ERR_TIMEOUT. *sleeps (or NULL) counts the sleeps.
 */
int shim_wait(void *transport, void *const *ios, int io_count, int timeout_ms, int *sleeps);

#endif
