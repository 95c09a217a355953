/*
 * The token: the right to turn the parts, which one thread at a time has.
 *
 *     owner  | who turns the parts | taken by                                 | left when
 *     -------+---------------------+------------------------------------------+----------------------------------------
 *     FREE   | nobody              |                                          |
 *     CALLER | a thread that waits | FREE or WATCH, under the lock that it    | its request is done, its time is up, or
 *            | for a request       | has anyway                               | a signal came
 *     THREAD | the background      | FREE, when it is kicked and needed, a    | nothing needs it; between hosts, a
 *            | thread              | rank of the host calls it, or after      | caller wants it and nothing moves
 *            |                     | STREAM_NS; WATCH, by an event            |
 *     WATCH  | nobody: the thread  | THREAD, between hosts, when nothing      | an event (THREAD), or a caller, who
 *            | sleeps for whoever  | needs it                                 | clears the mark that this rank sleeps
 *            | comes, on all that  |                                          | and wakes nobody
 *            | may come            |                                          |
 *
 * Otherwise the thread sleeps on calls to it alone, so that nothing which comes for a caller wakes it. Where
 * other hosts need this rank it ends that sleep after STREAM_NS, so a stream of calls wakes it once in so long, and
 * takes the token if that has been free all the time. While one call lasts longer it sleeps on: then the caller kicks
 * it. Whoever leaves the token FREE wakes the callers that wait for it, and kicks the thread if something needs it.
 */
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "base/system.h"
#include "engine/drive/drive.h"

/*
 * Driving: the parts are turned one after another, and again as long as any of them moves; then comes one
 * wait, which goes on turning them, and ends when one has moved. No predicate says what a turn would do.
 *
 * Why no sleep misses an event. Whoever changes something that a turn here may act on does that first, and then looks
 * whether this rank sleeps; the driver notes that it sleeps first, and then takes one turn in which no part is left
 * out and no room trusts its own notes (looks_at_all). Both are sequentially consistent: at least one sees the other.
 *
 *     the change                                                | its waker
 *     ----------------------------------------------------------+------------------------------------------------------
 *     a caller's: queue, report, shutdown, a wish to drive      | hr_drive_kick: the mark of the driver that sleeps
 *     another rank's of the host: log, announcements, room in a | hr_node_wake and hr_team_wake_*: the same
 *     ring, phases, abort, the LEAVE that somebody asks for     |
 *     an open round (round.h)                                   | nobody, so nobody sleeps in one: that turn closes it
 *     bytes between hosts                                       | the links, which are named after that turn
 *     a death                                                   | the thread of watch.h, which wakes all
 *     MPI, NCCL and CUDA, of which nothing tells                | sleeps end soon, see name_events in wait.c
 *     time                                                      | next_ns of the parts, which is looked at before
 *
 * The thread that sleeps while callers may drive has taken the same turn (watch). Parked, it sleeps on calls alone:
 * then no part needs it, or a caller drives, who kicks it if one does.
 */

enum {
    TURNS_PER_CLOCK = 16, /* while things move, the deadline is looked at once in so many turns */
    THREAD_SPIN_DIVISOR = 20, /* the background thread shares its core with the training: it spins less than a caller */
    STREAM_NS = 1000000, /* a call within so long after another continues a stream of calls */
    TIMER_SLACK_NS = 1000, /* 50000 otherwise: too coarse for MPI's looks (hr_transport_poll_within_ns) */
};

/* ---- Parts ---- */

void hr_drive_add(struct hr_drive *drive, struct hr_part *part, const struct hr_part_ops *ops, void *owner) {
    struct hr_part **link = &drive->parts;
    while (*link != NULL && (*link)->ops->rank <= ops->rank) {
        link = &(*link)->next;
    }
    *part = (struct hr_part){.ops = ops, .owner = owner, .next = *link, .next_ns = HR_NEVER};
    *link = part;
}

static uint64_t moves_of(const struct hr_part *part) {
    return part->ops->moves == NULL ? 0 : part->ops->moves(part);
}

void hr_drive_remove(struct hr_drive *drive, const struct hr_part *part) {
    struct hr_part **link = &drive->parts;
    while (*link != part) {
        link = &(*link)->next;
    }
    *link = part->next;
    drive->gone_moves += moves_of(part);
}

/* Whether somebody must drive, by the driver or with the lock held while nobody drives. */
static int is_needed(const struct hr_drive *drive) {
    int needs = atomic_load(&drive->pending) > 0;
    for (const struct hr_part *part = drive->parts; part != NULL && !needs; part = part->next) {
        needs = part->ops->needs != NULL && part->ops->needs(part);
    }
    return needs;
}

void hr_part_expect(struct hr_part *part, int64_t at_ns) {
    part->next_ns = at_ns < part->next_ns ? at_ns : part->next_ns;
}

void hr_part_rest(struct hr_part *part, int64_t now_ns) {
    part->next_ns = now_ns == 0 ? HR_NEVER : part->next_ns;
}

uint64_t hr_drive_moves(const struct hr_drive *drive) {
    uint64_t moves = drive->gone_moves;
    for (const struct hr_part *part = drive->parts; part != NULL; part = part->next) {
        moves += moves_of(part);
    }
    return moves;
}

/*
 * As hr_node_wait calls it: whether anything has moved, or failed. Once the group comes to its end, the first part has
 * turns, and behind the end those that outlive it. A part may add and remove others behind it.
 */
static int turn(struct hr_node *node, void *arg) {
    struct hr_drive *drive = arg;
    int moved = HR_STILL;
    int number = 0;
    for (struct hr_part *part = drive->parts; part != NULL; part = part->next, number++) {
        const int ends = drive->stage != HR_STAGE_RUNNING && part != drive->parts;
        if (part->ops->turn == NULL || (ends && (drive->stage != HR_STAGE_ENDED || !part->ops->outlives)) ||
            (part->is_quiet && !hr_node_looks_at_quiet(node, number))) {
            continue;
        }
        const int turned = part->ops->turn(part);
        if (turned < 0) { /* the state is not what it should be on this rank: nobody may wait for it */
            const int code = turned == HORO_ERR_RESOURCE ? HORO_ERR_ABORTED : HORO_ERR_INTERNAL;
            hr_log(&node->log, HORO_LOG_ERROR, "the engine stops: %s error", horo_status_name(turned));
            hr_node_abort(node, code, node->rank, HR_REASON_INTERNAL);
            return 1;
        }
        moved |= turned;
    }
    return moved != HR_STILL;
}

/* ---- The wait ---- */

/*
 * Others are waited for from now_ns on, if something is under way that a peer may hold up. 0: no longer, if nothing is;
 * that matters between hosts, whose links are silent then, and nobody may drive for a long time.
 */
static void await_others(struct hr_drive *drive, int64_t now_ns) {
    const int begins = now_ns != 0;
    if (drive->expects_others == begins || (!begins && drive->node->transport_count == 0)) {
        return;
    }
    int expects = atomic_load(&drive->pending) > 0;
    for (const struct hr_part *part = drive->parts; part != NULL && !expects; part = part->next) {
        expects = part->ops->expects != NULL && part->ops->expects(part);
    }
    if (expects != begins) {
        return;
    }
    drive->expects_others = begins;
    for (struct hr_part *part = drive->parts; part != NULL; part = part->next) {
        if (part->ops->await != NULL) {
            part->ops->await(part, now_ns);
        }
    }
}

static void await_on_links(struct hr_part *part, int64_t now_ns) {
    if (now_ns != 0) {
        hr_part_expect(part, now_ns + HR_SUPERVISE_AFTER_NS);
    } else {
        part->next_ns = HR_NEVER;
        hr_node_supervise(part->owner, 0);
    }
}

/* Others have been waited for so long that their links are supervised. */
static int64_t supervise_links(struct hr_part *part, int64_t now_ns) {
    (void)now_ns;
    hr_node_supervise(part->owner, 1);
    return HR_NEVER;
}

static const struct hr_part_ops LINKS = {.rank = HR_PART_LINKS, .due = supervise_links, .await = await_on_links};

/* A wait begins: the time when it must end by itself, which is not behind deadline_ns; 0: none. */
static int64_t begin_wait(struct hr_drive *drive, int64_t deadline_ns, int64_t now_ns) {
    await_others(drive, now_ns);
    const int64_t log_ns = hr_log_check(&drive->node->log, now_ns);
    int64_t until_ns = deadline_ns == 0 ? HR_NEVER : deadline_ns;
    until_ns = log_ns != 0 && log_ns < until_ns ? log_ns : until_ns;
    for (struct hr_part *part = drive->parts; part != NULL; part = part->next) {
        if (now_ns >= part->next_ns) {
            part->next_ns = part->ops->due == NULL ? HR_NEVER : part->ops->due(part, now_ns);
        }
        until_ns = part->next_ns < until_ns ? part->next_ns : until_ns;
    }
    struct hr_arena_block *block = &drive->node->arena.blocks[drive->node->local_rank];
    atomic_store_explicit(&block->moves, hr_drive_moves(drive), memory_order_relaxed); /* partner: count_moves */
    return until_ns == HR_NEVER ? 0 : until_ns;
}

static int may_return(const struct hr_drive *drive, const _Atomic int *word, int value) {
    if (word != NULL) {
        return atomic_load(word) != value;
    }
    if (atomic_load(&drive->stop)) {
        const struct hr_arena *arena = &drive->node->arena;
        return atomic_load(&arena->blocks[arena->local_rank].state) == HR_MEMBER_LEFT &&
               atomic_load(&drive->pending) == 0;
    }
    return !atomic_load(&drive->serves_hosts) && !is_needed(drive);
}

/*
 * For the owner of the token: drives until the word has another value, the deadline has passed, or a signal came. The
 * background thread, whose word is NULL: until no part needs it; where it serves other hosts, until there is nothing
 * to do but wait, or a caller wants to: 1, and its sleep on all that may come is prepared.
 */
static int run_loop(struct hr_drive *drive, const _Atomic int *word, int value, int64_t deadline_ns) {
    const int64_t spin_ns = word != NULL ? drive->spin_ns : drive->spin_ns / THREAD_SPIN_DIVISOR;
    for (unsigned turns = 1; !may_return(drive, word, value); turns++) {
        if (turn(drive->node, drive)) {
            if (turns % TURNS_PER_CLOCK == 0 && deadline_ns != 0 && hr_now_ns() >= deadline_ns) {
                return 0;
            }
            continue;
        }
        /* one look at the clock serves all: it costs as much as a small operation can do in between */
        const int64_t now_ns = hr_now_ns();
        /*
         * The thread prepares to wait while callers may drive. What makes it drive must be over, or it would do so
         * again at once, without the sleep that notices a death.
         */
        const int yields =
            word == NULL && drive->stage == HR_STAGE_RUNNING && atomic_load(&drive->serves_hosts) &&
            !atomic_load(&drive->stop) &&
            (atomic_load(&drive->wanted) ? !drive->parts->ops->needs(drive->parts) : !is_needed(drive));
        if (yields) {
            await_others(drive, 0);
        }
        const int64_t until_ns = begin_wait(drive, deadline_ns, now_ns);
        if (yields) { /* as a leader, whose own program computes */
            if ((until_ns == 0 || now_ns < until_ns) &&
                !hr_node_prepare_sleep(drive->node, turn, drive, &drive->sleep, until_ns)) {
                return 1;
            }
        } else if (hr_node_wait(drive->node, turn, drive, now_ns, spin_ns, until_ns) == HORO_IN_PROGRESS &&
                   deadline_ns != 0 && (hr_now_ns() >= deadline_ns || hr_now_ns() < until_ns)) {
            return 0; /* the time of the caller is up, or a signal came */
        }
    }
    await_others(drive, 0);
    return 0;
}

/* ---- Callers, with the lock held ---- */

void hr_drive_lock(struct hr_drive *drive) {
    (void)pthread_mutex_lock(&drive->lock);
}

void hr_drive_unlock(struct hr_drive *drive) {
    (void)pthread_mutex_unlock(&drive->lock);
}

int hr_drive_is_free(const struct hr_drive *drive) {
    return drive->owner == HR_TOKEN_FREE || drive->owner == HR_TOKEN_WATCH;
}

void hr_drive_wake_waiters(struct hr_drive *drive) {
    if (drive->waiters > 0) {
        (void)pthread_cond_broadcast(&drive->done);
    }
}

void hr_drive_kick(struct hr_drive *drive) {
    if (!hr_drive_is_free(drive)) {
        hr_node_wake(drive->node, drive->node->local_rank); /* if it sleeps; else it will look at the queue anyway */
    } else if (!drive->is_kicked) {
        drive->is_kicked = 1;
        if (drive->sleep.word == NULL) {
            const uint64_t one = 1;
            const ssize_t written = write(drive->kick_fd, &one, sizeof one);
            (void)written;
        } else {
            hr_node_call(drive->node, drive->node->local_rank);
        }
        atomic_fetch_add_explicit(&drive->node->wakes, 1, memory_order_relaxed);
    }
}

void hr_drive_wait(struct hr_drive *drive, int64_t deadline_ns) {
    drive->waiters++;
    hr_condition_wait(&drive->done, &drive->lock, deadline_ns);
    drive->waiters--;
}

static void set_free(struct hr_drive *drive) {
    drive->owner = HR_TOKEN_FREE;
    hr_drive_wake_waiters(drive);
}

void hr_drive_until(struct hr_drive *drive, const _Atomic int *word, int value, int64_t now_ns, int64_t deadline_ns) {
    drive->owner = HR_TOKEN_CALLER;
    drive->since_ns = now_ns;
    hr_drive_unlock(drive);
    if (atomic_load(&drive->serves_hosts)) {
        hr_node_end_sleep(drive->node, NULL); /* the thread may sleep for whoever drives, and is not to be woken */
    }
    (void)run_loop(drive, word, value, deadline_ns);
    hr_drive_lock(drive);
    set_free(drive);
    const int serves_hosts = atomic_load(&drive->serves_hosts);
    drive->since_ns = serves_hosts ? hr_now_ns() : 0;
    if ((serves_hosts && !drive->looks_soon) || atomic_load(&drive->stop) || is_needed(drive)) {
        hr_drive_kick(drive);
    }
}

/* ---- The thread ---- */

/* Sleeps on what has been prepared, with the lock held, which it lets go meanwhile. Whether something has come. */
static int park(struct hr_drive *drive) {
    struct hr_sleep *sleep = &drive->sleep;
    if (sleep->word == NULL) { /* a kick of its own: the driver takes what comes to the eventfd of this rank */
        sleep->fds[sleep->count++] = (struct pollfd){.fd = drive->kick_fd, .events = POLLIN};
    }
    hr_drive_unlock(drive);
    if (atomic_load(&drive->serves_hosts)) {
        atomic_fetch_add_explicit(&drive->node->sleeps, 1, memory_order_relaxed); /* of a driver, but for the name */
    }
    const int events = hr_node_sleep(sleep);
    if (sleep->word == NULL && events > 0) {
        uint64_t drained;
        const ssize_t got = read(drive->kick_fd, &drained, sizeof drained);
        (void)got; /* nonblocking */
    }
    hr_drive_lock(drive);
    return events > 0;
}

static void run(struct hr_drive *drive) {
    drive->owner = HR_TOKEN_THREAD;
    hr_drive_unlock(drive);
    const int watches = run_loop(drive, NULL, 0, 0);
    hr_drive_lock(drive);
    set_free(drive);
    drive->since_ns = hr_now_ns();
    if (atomic_exchange(&drive->wanted, 0) && drive->waiters > 0 && atomic_load(&drive->serves_hosts)) {
        return; /* it is left to that caller for a while */
    }
    drive->owner = watches ? HR_TOKEN_WATCH : HR_TOKEN_FREE;
    drive->is_kicked |= !watches && is_needed(drive); /* since its last look */
}

/* Whether it is to take the token: when it has been kicked or called, or the token has been free for a while. */
static int may_drive(struct hr_drive *drive) {
    const int was_kicked = drive->is_kicked;
    drive->is_kicked = 0;
    if (drive->owner != HR_TOKEN_FREE) {
        return 0;
    }
    int is_called = 0; /* by a rank of this host */
    for (const struct hr_part *part = drive->parts; part != NULL && !is_called; part = part->next) {
        is_called = part->ops->is_called && part->ops->needs(part);
    }
    const int serves_hosts = atomic_load(&drive->serves_hosts);
    return (was_kicked && is_needed(drive)) || is_called ||
           (serves_hosts && hr_now_ns() - drive->since_ns >= STREAM_NS);
}

static void *thread_main(void *arg) {
    struct hr_drive *drive = arg;
    struct hr_node *node = drive->node;
    struct hr_sleep *sleep = &drive->sleep;
    (void)prctl(PR_SET_TIMERSLACK, (unsigned long)TIMER_SLACK_NS); /* of this thread; it is horo's own */
    hr_drive_lock(drive);
    while (!atomic_load(&drive->stop)) {
        if (drive->owner == HR_TOKEN_WATCH) {
            const int has_come = park(drive); /* on all that may come, but leaves the token to a caller that comes */
            if (drive->owner == HR_TOKEN_WATCH) {
                hr_node_end_sleep(node, has_come ? sleep : NULL); /* else that is the next driver's */
                drive->owner = HR_TOKEN_FREE;
                drive->since_ns = 0; /* it has been so for long enough */
            }
            continue;
        }
        /* a later one ends the sleep */
        const uint32_t calls = atomic_load(&node->arena.blocks[node->local_rank].calls);
        hr_node_pass_questions(node);
        if (may_drive(drive)) {
            run(drive);
            continue;
        }
        const int64_t left_ns = drive->since_ns + STREAM_NS - hr_now_ns();
        drive->looks_soon = atomic_load(&drive->serves_hosts) && (left_ns > 0 || drive->owner == HR_TOKEN_FREE);
        sleep->word = &node->arena.blocks[node->local_rank].calls;
        sleep->value = calls;
        sleep->deadline_ns = 0;
        sleep->look_ns = !drive->looks_soon ? -1 : left_ns > 0 ? left_ns : 0;
        (void)park(drive);
        drive->looks_soon = 0;
    }
    while (drive->owner == HR_TOKEN_CALLER) { /* a call that still waits */
        hr_drive_wait(drive, INT64_MAX);
    }
    run(drive); /* until it has left */
    hr_drive_unlock(drive);
    hr_node_wake_all(node); /* this rank has left */
    return NULL;
}

/* ---- The beginning and the end ---- */

hr_status hr_drive_init(struct hr_drive *drive, struct hr_node *node, int64_t spin_ns, struct hr_error *error) {
    *drive = (struct hr_drive){.node = node, .kick_fd = -1, .spin_ns = spin_ns};
    hr_condition_init(&drive->done);
    (void)pthread_mutex_init(&drive->lock, NULL);
    (void)pthread_mutex_init(&drive->end_lock, NULL);
    hr_drive_add(drive, &drive->links, &LINKS, node);
    hr_status status = node->wake_fds == NULL ? HORO_OK : hr_descriptor_event(&drive->kick_fd, error);
    if (status == HORO_OK && hr_sleep_reserve(&drive->sleep, 2) != HORO_OK) {
        status = hr_fail(error, HORO_ERR_RESOURCE, "out of memory for the engine");
    }
    if (status != HORO_OK) {
        hr_drive_fini(drive);
    }
    return status;
}

hr_status hr_drive_start(struct hr_drive *drive, struct hr_error *error) {
    return hr_thread_start(&drive->thread, thread_main, drive, "the background thread", error);
}

void hr_drive_end_thread(struct hr_drive *drive) {
    (void)pthread_mutex_lock(&drive->end_lock);
    if (!drive->has_ended) {
        hr_node_wake(drive->node, drive->node->local_rank);
        (void)pthread_join(drive->thread, NULL);
        drive->has_ended = 1;
    }
    (void)pthread_mutex_unlock(&drive->end_lock);
}

void hr_drive_close_fd(struct hr_drive *drive) {
    /* else this child's own parent was forked too: the number is another file's by now */
    if (drive->kick_fd >= 0) {
        (void)close(drive->kick_fd);
        drive->kick_fd = -1;
    }
}

void hr_drive_fini(struct hr_drive *drive) {
    free(drive->sleep.fds);
    hr_drive_close_fd(drive);
    (void)pthread_cond_destroy(&drive->done);
    (void)pthread_mutex_destroy(&drive->end_lock);
    (void)pthread_mutex_destroy(&drive->lock);
}
