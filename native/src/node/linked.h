/*
 * The hosts that have links with one another: no more than the algorithms need, so that the links of a rank grow with
 * the logarithm of the hosts. horo/bootstrap/host/grouping.py says the same in Python; tests hold both, and every
 * algorithm, to it.
 *
 *  - Control: leaders, along the binomial tree over host numbers. A host's parent is its number without the lowest bit.
 *  - Data: hosts whose numbers are a power of two apart, counted round the ring of all hosts, in one direction or the
 *    other. Rings and chains go to the next host; the doubling ones and the tree, from any root, go 1, 2, 4 ... hosts
 *    further (cross/).
 */
#ifndef HR_NODE_LINKED_H
#define HR_NODE_LINKED_H

#include "node/team.h"

/* Whether two hosts of a team have a link on a channel; a host has none with itself. */
int hr_hosts_are_linked(enum hr_channel channel, int host_count, int host, int other);

/*
 * Whether this rank was given all links that it needs, in the words of horo_setup and horo_team_setup: a leader those
 * for control, a local index below owner_count those for data. An array that is NULL is not looked at: there are no
 * such links, on purpose, and posting to one fails. node->host_name_of_rank must be there. HORO_OK, or HORO_ERR_USAGE
 * with the hosts in *error.
 */
hr_status hr_links_check(const struct hr_team *team, const int32_t *control_fds, const int32_t *data_fds,
                         int data_sockets, struct hr_error *error);

#endif
