#include "node/linked.h"

static int is_power_of_two(int number) {
    return number > 0 && (number & (number - 1)) == 0;
}

int hr_hosts_are_linked(enum hr_channel channel, int host_count, int host, int other) {
    const int low = host < other ? host : other;
    const int high = host < other ? other : host;
    if (low == high) {
        return 0;
    }
    if (channel == HR_CHANNEL_CONTROL) {
        return (high & (high - 1)) == low;
    }
    return is_power_of_two(high - low) || is_power_of_two(host_count - (high - low));
}

static hr_status check_channel(const struct hr_team *team, enum hr_channel channel, const int32_t *fds, int sockets,
                               struct hr_error *error) {
    const struct hr_node *node = team->node;
    for (int host = 0; fds != NULL && host < team->host_count; host++) {
        for (int i = 0; i < sockets && hr_hosts_are_linked(channel, team->host_count, team->host, host); i++) {
            if (fds[host * sockets + i] < 0) {
                return hr_fail(error, HORO_ERR_USAGE,
                               "rank %d on host %d (%s) was given no connection for %s to host %d (%s)", node->rank,
                               team->host, node->host_name_of_rank[node->rank],
                               channel == HR_CHANNEL_CONTROL ? "agreement" : "data", host,
                               node->host_name_of_rank[team->job_rank[team->leader_of_host[host]]]);
            }
        }
    }
    return HORO_OK;
}

hr_status hr_links_check(const struct hr_team *team, const int32_t *control_fds, const int32_t *data_fds,
                         int data_sockets, struct hr_error *error) {
    if (team->local_rank == 0) {
        HR_TRY(check_channel(team, HR_CHANNEL_CONTROL, control_fds, 1, error));
    }
    if (team->local_rank < team->owner_count) {
        HR_TRY(check_channel(team, HR_CHANNEL_DATA, data_fds, data_sockets, error));
    }
    return HORO_OK;
}
