/* dlpack.h: the part of DLPack's table of functions that horo reads: torch shows tensors to C without Python. */
#ifndef HORO_PYTHON_DLPACK_H
#define HORO_PYTHON_DLPACK_H

#include <stdint.h>

enum { DLPACK_MAJOR = 1, DLPACK_CPU = 1 };

typedef struct {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} dlpack_dtype;

typedef struct {
    char *data;
    struct {
        int32_t type;
        int32_t number;
    } device;
    int32_t ndim;
    dlpack_dtype dtype;
    const int64_t *shape;   /* the tensor's own */
    const int64_t *strides; /* likewise; NULL: dense */
    uint64_t byte_offset;
} dlpack_tensor;

typedef int dlpack_reader(void *object, dlpack_tensor *tensor);

typedef struct {
    uint32_t major, minor;
    void *older; /* table */
    void (*others[3])(void);
    dlpack_reader *read; /* 0, or -1 with an exception */
} dlpack_table;

#endif
