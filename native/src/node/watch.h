/*
 * The life lines of all contexts of a process, and the thread that sleeps on them: the end of a line is the end of a
 * peer's process. No other wait names them. Made by the caller, who shares it among its contexts, as their log.
 */
#ifndef HR_NODE_WATCH_H
#define HR_NODE_WATCH_H

#include "node/node.h"

/* As horo_create_watch and horo_destroy_watch. */
hr_status hr_watch_create(struct horo_watch **watch, struct hr_error *error);
void hr_watch_destroy(struct horo_watch *watch);

/* Watches the life lines of a node, which may be none. HORO_OK, or a status with *error set and nothing watched. */
hr_status hr_watch_add(struct horo_watch *watch, struct hr_node *node, struct hr_error *error);
/* Afterwards the thread does not touch the node or its life lines. Nothing if it is not there, or after a fork. */
void hr_watch_remove(struct horo_watch *watch, const struct hr_node *node);

#endif
