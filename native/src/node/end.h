/* The end of the group, as this rank knows it: its cause, the sentence for it, and the events that led to it. */
#ifndef HR_NODE_END_H
#define HR_NODE_END_H

#include "node/node.h"

/* Room for what hr_node_name_rank writes. */
enum { HR_NAME_TEXT_BYTES = 256 };

/* The reason why the group has ended; code 0 if it has not. Any thread, as all of these. */
struct hr_abort hr_end_find(const struct hr_node *node);
/* The sentence for it. */
void hr_end_describe(const struct hr_node *node, struct hr_abort end, char *text, size_t text_bytes);
/* HORO_OK, or the end with its sentence in *error. */
hr_status hr_end_check(const struct hr_node *node, struct hr_error *error);
/* The flight recorder gets it, once. */
void hr_end_note(struct hr_node *node);
/* Logs the last events, if there are any that have not been logged. */
void hr_end_show_events(struct hr_node *node, int level);
/* The same for the end of the group, once; nothing where it has ended in order. */
void hr_end_show(struct hr_node *node);

#endif
