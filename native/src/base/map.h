/*
 * A hash map from short byte strings to pointers: open addressing, linear probing, no tombstones.
 * Keys are not copied: they must live inside the value (or outlive it). The caller brings the hash, so that a name that
 * is looked up many times is hashed once.
 */
#ifndef HR_BASE_MAP_H
#define HR_BASE_MAP_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

struct hr_map_slot {
    uint64_t hash;
    const char *key;
    size_t key_bytes;
    void *value; /* NULL: free */
};

struct hr_map {
    struct hr_map_slot *slots;
    size_t capacity; /* a power of two, or 0 */
    size_t count;
};

/* 64-bit FNV-1a; never 0. The same on every rank. */
uint64_t hr_hash(const char *key, size_t key_bytes);

void hr_map_fini(struct hr_map *map);

/* NULL if absent. */
void *hr_map_find(const struct hr_map *map, uint64_t hash, const char *key, size_t key_bytes);

/* The key must be absent and value not NULL. HORO_OK or HORO_ERR_RESOURCE. */
hr_status hr_map_insert(struct hr_map *map, uint64_t hash, const char *key, size_t key_bytes, void *value);

/* Returns the value removed, or NULL. */
void *hr_map_remove(struct hr_map *map, uint64_t hash, const char *key, size_t key_bytes);

#endif
