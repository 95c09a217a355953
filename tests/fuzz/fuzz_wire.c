/* libFuzzer's entry for the wire decoder; replay.c calls it for the files of a corpus. */
#include <stddef.h>
#include <stdint.h>

#include "wire_walk.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* wire_walk reads all that was decoded and aborts where accepted bytes are not exactly what the encoder would write. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    (void)wire_walk(data, size);
    return 0;
}
