/* The vector types of one level; no include guard, as vector_template.h. VECTOR_BYTES is defined by the includer. */
#define VECTOR_OF(type) type __attribute__((vector_size(VECTOR_BYTES)))
typedef VECTOR_OF(uint8_t) vector_uint8;
typedef VECTOR_OF(uint16_t) vector_uint16;
typedef VECTOR_OF(uint32_t) vector_uint32;
typedef VECTOR_OF(uint64_t) vector_uint64;
typedef VECTOR_OF(int8_t) vector_int8;
typedef VECTOR_OF(int16_t) vector_int16;
typedef VECTOR_OF(int32_t) vector_int32;
typedef VECTOR_OF(int64_t) vector_int64;
typedef VECTOR_OF(float) vector_float;
typedef VECTOR_OF(double) vector_double;
typedef uint16_t vector_half __attribute__((vector_size(VECTOR_BYTES / 2)));
