/* Whom something belongs to, for tests. */
#ifndef SHIM_OWNER_H
#define SHIM_OWNER_H

typedef struct shim_owner shim_owner;

/* With `by_pid`, as where the kernel has no page that a fork wipes. */
shim_owner *shim_owner_create(int by_pid);
void shim_owner_destroy(shim_owner *owner);
int shim_owner_is_here(const shim_owner *owner);

#endif
