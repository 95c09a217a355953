/* The flight recorder by itself, for tests. */
#ifndef SHIM_RECORDER_H
#define SHIM_RECORDER_H

typedef struct shim_recorder shim_recorder;

shim_recorder *shim_recorder_create(void);
void shim_recorder_destroy(shim_recorder *recorder);
void shim_recorder_add(shim_recorder *recorder, int32_t event, int32_t op, int32_t status, int32_t team, int32_t number,
                       int64_t bytes, const char *name);
/*
 * `count` events of which every part says the same: team `writer`, and k = 1, 2, ... as number, bytes and "writer.k".
 */
void shim_recorder_add_many(shim_recorder *recorder, int32_t writer, int32_t count);
/* Reads until one of the writers has come to `last`; returns how many events did not say everywhere the same. */
int32_t shim_recorder_read_until(shim_recorder *recorder, int32_t last);
int32_t shim_recorder_read(shim_recorder *recorder, horo_event *events, int32_t capacity);
int shim_recorder_describe(shim_recorder *recorder, int lines, char *text, size_t text_bytes);
/* A timeline while `count` requests are submitted and end, as fast as one thread can note that; the status of start. */
int shim_recorder_write_timeline(shim_recorder *recorder, int descriptor, int32_t count);

#endif
