#include "shim.h"

#include <stdlib.h>

#include "base/system.h"

struct shim_owner {
    struct hr_owner owner;
};

shim_owner *shim_owner_create(int by_pid) {
    shim_owner *made = calloc(1, sizeof *made);
    if (made != NULL) {
        hr_owner_init(&made->owner);
    }
    if (made != NULL && by_pid) {
        hr_owner_fini(&made->owner);
    }
    return made;
}

void shim_owner_destroy(shim_owner *owner) {
    hr_owner_fini(&owner->owner);
    free(owner);
}

int shim_owner_is_here(const shim_owner *owner) {
    return hr_owner_is_here(&owner->owner);
}
