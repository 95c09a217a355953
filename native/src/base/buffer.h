/* Memory that grows: a byte buffer with a read position, to append at the end and consume at the front; and arrays. */
#ifndef HR_BASE_BUFFER_H
#define HR_BASE_BUFFER_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "base/status.h"
#include "base/pool.h"

struct hr_buffer {
    uint8_t *data;
    size_t begin; /* first unread byte */
    size_t end;   /* one past the last byte */
    size_t capacity;
    struct hr_pool *pool; /* where its memory is from; NULL: malloc */
};

void hr_buffer_fini(struct hr_buffer *buffer);

/* Makes room for `bytes` more at data + end. HORO_OK or HORO_ERR_RESOURCE; nothing changes on failure. */
hr_status hr_buffer_reserve(struct hr_buffer *buffer, size_t bytes);

int hr_buffer_append(struct hr_buffer *buffer, const void *data, size_t bytes);

/* Drops `bytes` (at most the unread ones) from the front; memory that is no longer needed may go with the last one. */
void hr_buffer_consume(struct hr_buffer *buffer, size_t bytes);

/* Room for `count` elements in an array, *capacity of them so far. HORO_OK or HORO_ERR_RESOURCE. */
static inline hr_status hr_reserve(void **array, size_t *capacity, size_t count, size_t element_bytes) {
    void *larger = count <= *capacity ? *array : realloc(*array, count * element_bytes);
    if (larger == NULL && count > 0) {
        return HORO_ERR_RESOURCE;
    }
    *array = larger;
    *capacity = count > *capacity ? count : *capacity;
    return HORO_OK;
}

static inline size_t hr_buffer_size(const struct hr_buffer *buffer) {
    return buffer->end - buffer->begin;
}

static inline const uint8_t *hr_buffer_front(const struct hr_buffer *buffer) {
    return buffer->data == NULL ? NULL : buffer->data + buffer->begin;
}

#endif
