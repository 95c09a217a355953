/* Building and dissolving a node from what the bootstrap hands over. */
#ifndef HR_NODE_NODE_SETUP_H
#define HR_NODE_NODE_SETUP_H

#include "node/team.h"

/*
 * Maps the arena, makes the transport. HORO_OK, or a status with *error set. The setup's descriptors stay the caller's
 * until hr_node_own, which cannot fail: once everything else stands. fini closes what is owned.
 */
hr_status hr_node_init(struct hr_node *node, const horo_setup *setup, struct hr_team *world, struct hr_error *error);
void hr_node_own(struct hr_node *node, const horo_setup *setup);
void hr_node_fini(struct hr_node *node);
/* In a forked child: closes the child's copies of the descriptors and nothing else. */
void hr_node_close_fds(struct hr_node *node);

/*
 * Connects a team that has members on several hosts, over duplicates of descriptors as in horo_team_setup, which stay
 * the caller's until it closes them. The node takes the transport in later (hr_node_add_transport). HORO_OK, or a
 * status with *error set.
 */
hr_status hr_node_connect_team(const struct hr_node *node, struct hr_team *team, const int32_t *control_fds,
                               const int32_t *data_fds, struct hr_error *error);
void hr_node_close_links(const struct hr_node *node, int host_count, const int32_t *control_fds,
                         const int32_t *data_fds);

#endif
