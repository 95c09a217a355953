#include "base/buffer.h"

#include <stdlib.h>
#include <string.h>

#include "horo.h"

enum { KEPT_BYTES = 1 << 18 }; /* more is given back when it is empty: a burst of names must not be paid for ever */

void hr_buffer_fini(struct hr_buffer *buffer) {
    if (buffer->pool == NULL) {
        free(buffer->data);
    } else {
        hr_pool_give(buffer->pool, buffer->data, buffer->capacity);
    }
    *buffer = (struct hr_buffer){.pool = buffer->pool};
}

hr_status hr_buffer_reserve(struct hr_buffer *buffer, size_t bytes) {
    const size_t unread = hr_buffer_size(buffer);
    if (buffer->capacity - buffer->end < bytes && buffer->begin > 0 && buffer->begin >= unread) {
        /* else little room would be made at the price of moving much, again and again */
        memmove(buffer->data, buffer->data + buffer->begin, unread);
        buffer->begin = 0;
        buffer->end = unread;
    }
    if (buffer->capacity - buffer->end >= bytes && buffer->data != NULL) {
        return HORO_OK;
    }
    size_t capacity = buffer->capacity < 256 ? 256 : buffer->capacity;
    while (capacity - buffer->end < bytes) {
        if (capacity > SIZE_MAX / 2) {
            return HORO_ERR_RESOURCE;
        }
        capacity *= 2;
    }
    const int is_pooled = buffer->pool != NULL;
    uint8_t *data = is_pooled ? hr_pool_take(buffer->pool, capacity) : realloc(buffer->data, capacity);
    if (data == NULL) {
        return HORO_ERR_RESOURCE;
    }
    if (is_pooled && buffer->data != NULL) {
        memcpy(data, buffer->data, buffer->end);
        hr_pool_give(buffer->pool, buffer->data, buffer->capacity);
    }
    buffer->data = data;
    buffer->capacity = capacity;
    return HORO_OK;
}

int hr_buffer_append(struct hr_buffer *buffer, const void *data, size_t bytes) {
    const int status = hr_buffer_reserve(buffer, bytes);
    if (status == HORO_OK && bytes > 0) {
        memcpy(buffer->data + buffer->end, data, bytes);
        buffer->end += bytes;
    }
    return status;
}

void hr_buffer_consume(struct hr_buffer *buffer, size_t bytes) {
    buffer->begin += bytes;
    if (buffer->begin == buffer->end) {
        buffer->begin = buffer->end = 0;
        if (buffer->capacity > KEPT_BYTES) {
            hr_buffer_fini(buffer);
        }
    }
}
