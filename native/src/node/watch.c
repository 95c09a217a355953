#include "node/watch.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/system.h"

struct horo_watch {
    pthread_mutex_t lock;
    struct hr_node *first; /* under the lock, with their life lines */
    pthread_t thread;
    struct hr_owner owner; /* a forked child has the memory and the descriptors but not the thread */
    int epoll_fd;
    int32_t stop_fd;
};

/* Under the lock. The line may be nobody's by now. Nothing is ever sent on one. */
static void look_at(const struct horo_watch *watch, int fd) {
    char byte;
    for (struct hr_node *node = watch->first; node != NULL; node = node->next_watched) {
        for (int i = 0; i < node->local_size; i++) {
            if (node->life_fds[i] != fd) {
                continue;
            }
            const ssize_t count = recv(fd, &byte, sizeof byte, MSG_DONTWAIT);
            if (count == 0 || (count < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
                (void)epoll_ctl(watch->epoll_fd, EPOLL_CTL_DEL, fd, NULL);
                hr_node_lose(node, i);
            }
        }
    }
}

static void *thread_main(void *arg) {
    struct horo_watch *watch = arg;
    for (int stops = 0; !stops;) {
        struct epoll_event event;
        if (epoll_wait(watch->epoll_fd, &event, 1, -1) != 1) {
            continue; /* a debugger's signal */
        }
        stops = event.data.fd == watch->stop_fd;
        (void)pthread_mutex_lock(&watch->lock);
        look_at(watch, event.data.fd);
        (void)pthread_mutex_unlock(&watch->lock);
    }
    return NULL;
}

static hr_status watch_line(const struct horo_watch *watch, int fd, struct hr_error *error) {
    struct epoll_event event = {.events = EPOLLIN, .data = {.fd = fd}};
    return epoll_ctl(watch->epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0
               ? HORO_OK
               : hr_fail(error, HORO_ERR_RESOURCE, "cannot watch descriptor %d: %s", fd, strerror(errno));
}

hr_status hr_watch_add(struct horo_watch *watch, struct hr_node *node, struct hr_error *error) {
    int status = HORO_OK;
    (void)pthread_mutex_lock(&watch->lock);
    node->next_watched = watch->first;
    watch->first = node;
    for (int i = 0; i < node->local_size && status == HORO_OK; i++) {
        status = node->life_fds[i] < 0 ? HORO_OK : watch_line(watch, node->life_fds[i], error);
    }
    (void)pthread_mutex_unlock(&watch->lock);
    if (status != HORO_OK) {
        hr_watch_remove(watch, node);
    }
    return status;
}

void hr_watch_remove(struct horo_watch *watch, const struct hr_node *node) {
    if (!hr_owner_is_here(&watch->owner)) {
        return;
    }
    (void)pthread_mutex_lock(&watch->lock);
    for (struct hr_node **link = &watch->first; *link != NULL; link = &(*link)->next_watched) {
        if (*link == node) {
            *link = node->next_watched;
            for (int i = 0; i < node->local_size; i++) { /* some may not have been added */
                (void)epoll_ctl(watch->epoll_fd, EPOLL_CTL_DEL, node->life_fds[i], NULL);
            }
            break;
        }
    }
    (void)pthread_mutex_unlock(&watch->lock);
}

static void close_fds(struct horo_watch *watch) {
    if (watch->epoll_fd >= 0) {
        (void)close(watch->epoll_fd);
    }
    if (watch->stop_fd >= 0) {
        (void)close(watch->stop_fd);
    }
    watch->epoll_fd = watch->stop_fd = -1;
}

static void destroy(struct horo_watch *watch) {
    close_fds(watch);
    hr_owner_fini(&watch->owner);
    (void)pthread_mutex_destroy(&watch->lock);
    free(watch);
}

hr_status hr_watch_create(struct horo_watch **watch, struct hr_error *error) {
    struct horo_watch *created = calloc(1, sizeof *created);
    if (created == NULL) {
        return hr_fail(error, HORO_ERR_RESOURCE, "out of memory for a thread");
    }
    (void)pthread_mutex_init(&created->lock, NULL);
    hr_owner_init(&created->owner);
    created->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    created->stop_fd = -1;
    int status = created->epoll_fd >= 0 ? hr_descriptor_event(&created->stop_fd, error)
                                        : hr_fail(error, HORO_ERR_RESOURCE,
                                                  "cannot watch the processes of other ranks: %s", strerror(errno));
    status = status == HORO_OK ? watch_line(created, created->stop_fd, error) : status;
    status = status == HORO_OK ? hr_thread_start(&created->thread, thread_main, created,
                                                 "the thread that watches other ranks", error)
                               : status;
    if (status != HORO_OK) {
        destroy(created);
        return status;
    }
    *watch = created;
    return HORO_OK;
}

void hr_watch_destroy(struct horo_watch *watch) {
    if (!hr_owner_is_here(&watch->owner)) {
        close_fds(watch);
        return;
    }
    const uint64_t one = 1;
    const ssize_t written = write(watch->stop_fd, &one, sizeof one);
    (void)written;
    (void)pthread_join(watch->thread, NULL);
    destroy(watch);
}
