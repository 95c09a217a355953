#include "shim_nccl.h"

#include <stdlib.h>
#include <string.h>

#include "device/stager.h"
#include "device/nccl_comm.h"

struct shim_nccl {
    struct hr_nccl nccl;
    struct hr_stager *stager;
    struct hr_device *device;
    void *stream;
    struct hr_nccl_comm comm;
};

_Static_assert(SHIM_NCCL_ID_BYTES == sizeof(struct hr_nccl_id), "of NCCL");

static void on_ready(void *owner, void *request) {
    (void)owner, (void)request;
}

static void on_failed(void *owner, void *request, const char *text) {
    (void)owner, (void)request, (void)text;
}

static int create_stream(struct shim_nccl *made, struct hr_error *error) {
    struct hr_device_visit visit;
    HR_TRY(hr_device_enter(made->device, &visit, error));
    const int status = hr_device_create_stream(made->device, &made->stream, error);
    hr_device_leave(made->device, &visit);
    return status;
}

static int connect(struct shim_nccl *made, const char *cuda, const char *nccl, int size, int rank, char *id) {
    struct hr_error error = {0};
    horo_library library = {0};
    struct hr_nccl_id where;
    HR_TRY(hr_stager_create(&cuda, 1, made, on_ready, on_failed, &made->stager, &error));
    HR_TRY(hr_stager_device(made->stager, rank, &made->device, &error));
    HR_TRY(create_stream(made, &error));
    HR_TRY(hr_nccl_load(&made->nccl, &nccl, 1, &library, &error));
    if (rank == 0) {
        HR_TRY(hr_nccl_check(&made->nccl, made->nccl.get_unique_id(&where), "ncclGetUniqueId", NULL, &error));
        memcpy(id, &where, sizeof where);
    }
    memcpy(&where, id, sizeof where);
    const struct hr_nccl_ranks ranks = {size, rank, &where};
    return hr_nccl_connect(&made->comm, &made->nccl, made->device, made->stream, &ranks, &error);
}

shim_nccl *shim_nccl_connect(const char *cuda, const char *nccl, int size, int rank, char *id) {
    shim_nccl *made = calloc(1, sizeof *made);
    if (made != NULL && connect(made, cuda, nccl, size, rank, id) != HORO_OK) {
        shim_nccl_destroy(made);
        return NULL;
    }
    return made;
}

int shim_nccl_poll(shim_nccl *made) {
    (void)hr_nccl_poll(&made->comm);
    return (int)made->comm.state;
}

int shim_nccl_launch(shim_nccl *made, uint64_t address) {
    const struct hr_nccl_call call = {
        .kind = HR_NCCL_ALL_REDUCE,
        .input = (const void *)(uintptr_t)address,
        .output = (void *)(uintptr_t)address,
        .count = 1,
        .dtype = HR_NCCL_UINT8,
        .op = HR_NCCL_SUM,
    };
    return hr_nccl_launch(&made->comm, &call, 1, NULL);
}

int shim_nccl_is_in_flight(const shim_nccl *made) {
    return made->comm.is_in_flight;
}

void shim_nccl_end(shim_nccl *made) {
    hr_nccl_end(&made->comm);
}

int shim_nccl_use_pinned(shim_nccl *made, int count, size_t bytes) {
    struct hr_error error = {0};
    struct hr_device_visit visit;
    struct hr_block *blocks[SHIM_NCCL_BLOCKS_MAX];
    int taken = 0;
    HR_TRY(hr_device_enter(made->device, &visit, &error));
    while (taken < count && taken < SHIM_NCCL_BLOCKS_MAX &&
           hr_stager_take_block(made->stager, made->device, bytes, &blocks[taken], &error) == HORO_OK) {
        taken++;
    }
    for (int i = 0; i < taken; i++) {
        hr_stager_give_block(made->stager, blocks[i]);
    }
    hr_device_leave(made->device, &visit);
    return taken;
}

void shim_nccl_trim_pinned(shim_nccl *made) {
    hr_stager_trim(made->stager);
}

const char *shim_nccl_failure(const shim_nccl *made) {
    return made->comm.failure.text;
}

void shim_nccl_destroy(shim_nccl *made) {
    struct hr_error ignored = {0};
    struct hr_device_visit visit;
    if (made->comm.device != NULL) {
        hr_nccl_close(&made->comm);
    }
    if (made->stream != NULL && hr_device_enter(made->device, &visit, &ignored) == HORO_OK) {
        (void)made->device->cuda->stream_destroy(made->stream);
        hr_device_leave(made->device, &visit);
    }
    if (made->stager != NULL) {
        hr_stager_close(made->stager, 20000);
    }
    free(made);
}
