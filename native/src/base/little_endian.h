/* Numbers as bytes, the lowest first, at any address. Writers return where the next one goes. */
#ifndef HR_BASE_LITTLE_ENDIAN_H
#define HR_BASE_LITTLE_ENDIAN_H

#include <stdint.h>

static inline uint16_t hr_load_u16(const uint8_t *at) {
    return (uint16_t)(at[0] | at[1] << 8);
}

static inline uint32_t hr_load_u32(const uint8_t *at) {
    return hr_load_u16(at) | (uint32_t)hr_load_u16(at + 2) << 16;
}

static inline uint64_t hr_load_u64(const uint8_t *at) {
    return hr_load_u32(at) | (uint64_t)hr_load_u32(at + 4) << 32;
}

static inline uint8_t *hr_store_u16(uint8_t *at, uint16_t value) {
    at[0] = (uint8_t)value;
    at[1] = (uint8_t)(value >> 8);
    return at + 2;
}

static inline uint8_t *hr_store_u32(uint8_t *at, uint32_t value) {
    return hr_store_u16(hr_store_u16(at, (uint16_t)value), (uint16_t)(value >> 16));
}

static inline uint8_t *hr_store_u64(uint8_t *at, uint64_t value) {
    return hr_store_u32(hr_store_u32(at, (uint32_t)value), (uint32_t)(value >> 32));
}

#endif
