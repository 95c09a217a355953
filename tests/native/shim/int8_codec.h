/*
 * A codec for tests only, with all that the codecs of the core lack: float32 travels as int8 with one scale per block,
 * whose bytes are no power of two, and which many values share.
 */
#ifndef INT8_CODEC_H
#define INT8_CODEC_H

#include "kernel/codec.h"

enum { INT8_CODEC_ELEMENTS_MAX = 1024 };

/*
 * A block: scale = largest magnitude / 127 as float32, then round(value / scale) of each value. Reduced in float32, in
 * the order of the sources, multiplied by the factor and packed anew. Values are finite, and block_elements is 1 to
 * INT8_CODEC_ELEMENTS_MAX.
 */
struct hr_codec int8_codec(size_t block_elements);

#endif
