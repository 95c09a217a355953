#include "links.h"

#include <sys/socket.h>
#include <unistd.h>

/* Who is where among the members. */
struct places {
    int host_count;
    int sizes[HOSTS_MAX];
    int ranks[HOSTS_MAX][RANKS_MAX]; /* by local index */
};

/* Hosts are numbered by their lowest member. */
static void place(const struct schedule *schedule, const struct team *team, struct places *places) {
    int numbers[HOSTS_MAX] = {0}; /* 1 + those in the team */
    *places = (struct places){0};
    for (int i = 0; i < team->size; i++) {
        int *number = &numbers[schedule->host_of_rank[team->ranks[i]]];
        *number = *number == 0 ? ++places->host_count : *number;
        const int host = *number - 1;
        places->ranks[host][places->sizes[host]++] = team->ranks[i];
    }
}

static int least_size(const struct places *places) {
    int least = RANKS_MAX;
    for (int host = 0; host < places->host_count; host++) {
        least = places->sizes[host] < least ? places->sizes[host] : least;
    }
    return least;
}

int links_join(int32_t *one, int32_t *other) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
        return -1;
    }
    *one = ends[0];
    *other = ends[1];
    return 0;
}

int links_make(const struct schedule *schedule, const struct team *team, struct link_fds *const *ends,
               int *host_count) {
    struct places places;
    place(schedule, team, &places);
    const int owners = least_size(&places);
    for (int host = 1; host < places.host_count; host++) {
        const int *here = places.ranks[host];
        const int parent = host & (host - 1);
        if (links_join(&ends[here[0]]->control[parent], &ends[places.ranks[parent][0]]->control[host]) != 0) {
            return -1;
        }
        for (int other = 0; other < host; other++) {
            const int *there = places.ranks[other];
            for (int i = 0; i < owners; i++) {
                if (links_join(&ends[here[i]]->data[other], &ends[there[i]]->data[host]) != 0) {
                    return -1;
                }
            }
        }
    }
    *host_count = places.host_count;
    return 0;
}

int links_copy(const int32_t *fds, int32_t *copies, int count) {
    for (int i = 0; i < count; i++) {
        copies[i] = fds[i] < 0 ? -1 : dup(fds[i]);
        if (fds[i] >= 0 && copies[i] < 0) {
            return -1;
        }
    }
    return 0;
}

void links_end(const int32_t *fds, int count) {
    for (int i = 0; i < count; i++) {
        if (fds[i] >= 0) {
            (void)shutdown(fds[i], SHUT_WR);
        }
    }
}

void links_close(int32_t *fds, int count) {
    for (int i = 0; i < count; i++) {
        if (fds[i] >= 0) {
            (void)close(fds[i]);
            fds[i] = -1;
        }
    }
}
