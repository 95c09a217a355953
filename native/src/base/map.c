#include "base/map.h"

#include <stdlib.h>
#include <string.h>

#include "horo.h"

uint64_t hr_hash(const char *key, size_t key_bytes) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < key_bytes; i++) {
        hash = (hash ^ (uint8_t)key[i]) * 0x100000001b3u;
    }
    return hash == 0 ? 1 : hash;
}

void hr_map_fini(struct hr_map *map) {
    free(map->slots);
    *map = (struct hr_map){0};
}

/* The slot that holds the key, or the free slot where it would go. The map has at least one free slot. */
static struct hr_map_slot *locate(const struct hr_map *map, uint64_t hash, const char *key, size_t key_bytes) {
    size_t i = (size_t)hash & (map->capacity - 1);
    while (map->slots[i].value != NULL) {
        struct hr_map_slot *slot = &map->slots[i];
        if (slot->hash == hash && slot->key_bytes == key_bytes && memcmp(slot->key, key, key_bytes) == 0) {
            return slot;
        }
        i = (i + 1) & (map->capacity - 1);
    }
    return &map->slots[i];
}

void *hr_map_find(const struct hr_map *map, uint64_t hash, const char *key, size_t key_bytes) {
    if (map->capacity == 0) {
        return NULL;
    }
    return locate(map, hash, key, key_bytes)->value;
}

hr_status hr_map_insert(struct hr_map *map, uint64_t hash, const char *key, size_t key_bytes, void *value) {
    if (2 * (map->count + 1) > map->capacity) {
        struct hr_map larger = {.capacity = map->capacity == 0 ? 64 : 2 * map->capacity, .count = map->count};
        larger.slots = calloc(larger.capacity, sizeof *larger.slots);
        if (larger.slots == NULL) {
            return HORO_ERR_RESOURCE;
        }
        for (size_t i = 0; i < map->capacity; i++) {
            const struct hr_map_slot *slot = &map->slots[i];
            if (slot->value != NULL) {
                *locate(&larger, slot->hash, slot->key, slot->key_bytes) = *slot;
            }
        }
        free(map->slots);
        *map = larger;
    }
    *locate(map, hash, key, key_bytes) = (struct hr_map_slot){hash, key, key_bytes, value};
    map->count++;
    return HORO_OK;
}

void *hr_map_remove(struct hr_map *map, uint64_t hash, const char *key, size_t key_bytes) {
    if (map->capacity == 0) {
        return NULL;
    }
    struct hr_map_slot *slot = locate(map, hash, key, key_bytes);
    void *value = slot->value;
    if (value == NULL) {
        return NULL;
    }
    map->count--;
    /* Close the gap: move back every later entry of the run that may sit in the hole. */
    const size_t mask = map->capacity - 1;
    size_t hole = (size_t)(slot - map->slots);
    for (size_t i = (hole + 1) & mask; map->slots[i].value != NULL; i = (i + 1) & mask) {
        const size_t home = (size_t)map->slots[i].hash & mask;
        if (((i - home) & mask) >= ((i - hole) & mask)) {
            map->slots[hole] = map->slots[i];
            hole = i;
        }
    }
    map->slots[hole] = (struct hr_map_slot){0};
    return value;
}
