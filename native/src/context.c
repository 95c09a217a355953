/* The composition root: the only place that sees all layers. */
#include "horo.h"

/* Changes with anything that ranks must agree on: arena layout, wire format, handshake. */
HORO_API const char *horo_version(void) {
    return "0.1.0+abi1";
}
