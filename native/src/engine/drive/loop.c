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
 *     a caller's: queue, report, shutdown, a wish to drive      | hr_drive_kick: the eventfd of the driver that sleeps
 *     another rank's of the host: log, announcements, room in a | hr_node_wake and hr_team_wake_*: the same eventfd
 *     ring, phases, abort, the LEAVE that somebody asks for     |
 *     an open round (round.h)                                   | nobody, so nobody sleeps in one: that turn closes it
 *     bytes between hosts                                       | the links, which are named after that turn
 *     a death                                                   | the life lines, likewise
 *     MPI, NCCL and CUDA, of which nothing tells                | poll() ends by itself soon, see name_fds in wait.c
 *     time                                                      | next_ns of the parts, which is looked at before
 *
 * The thread that sleeps while callers may drive has taken the same turn (watch). Parked, it sleeps on the kick and the
 * life lines alone: then no part needs it, or a caller drives, who kicks it if one does.
 */
#include "engine/drive/private.h"

enum {
    TURNS_PER_CLOCK = 16, /* while things move, the deadline is looked at once in so many turns */
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

int hr_drive_needs(const struct hr_drive *drive) {
    int needs = atomic_load(&drive->pending) > 0;
    for (const struct hr_part *part = drive->parts; part != NULL && !needs; part = part->next) {
        needs = part->ops->needs != NULL && part->ops->needs(part);
    }
    return needs;
}

uint64_t hr_drive_moves(const struct hr_drive *drive) {
    uint64_t moves = drive->gone_moves;
    for (const struct hr_part *part = drive->parts; part != NULL; part = part->next) {
        moves += moves_of(part);
    }
    return moves;
}

void hr_drive_end_parts(struct hr_drive *drive, int has_failed) {
    for (struct hr_part *part = drive->parts; part != NULL; part = part->next) {
        if (part->ops->end != NULL) {
            part->ops->end(part, has_failed);
        }
    }
}

/* The first part alone has turns once the group comes to its end. A part may add and remove others behind it. */
static int turn_parts(struct hr_drive *drive) {
    int moved = HR_STILL;
    int number = 0;
    for (struct hr_part *part = drive->parts; part != NULL; part = part->next, number++) {
        if (part->ops->turn == NULL || (part->is_quiet && !hr_node_looks_at_quiet(drive->node, number))) {
            continue;
        }
        const int turned = part->ops->turn(part);
        HR_TRY(turned);
        moved |= turned;
        if (drive->stage != HR_STAGE_RUNNING) {
            break;
        }
    }
    return moved;
}

/* As hr_node_wait calls it: whether anything has moved, or failed. */
static int turn(struct hr_node *node, void *arg) {
    const int moved = turn_parts(arg);
    if (moved < 0) { /* the state is not what it should be on this rank: nobody may wait for it */
        const int code = moved == HORO_ERR_RESOURCE ? HORO_ERR_ABORTED : HORO_ERR_INTERNAL;
        hr_log(&node->log, HORO_LOG_ERROR, "the engine stops: %s error", horo_status_name(moved));
        hr_node_abort(node, code, node->rank, HR_REASON_INTERNAL);
    }
    return moved != HR_STILL;
}

/* ---- Waiting for others ---- */

/* Whether something is under way that a peer may hold up. */
static int expects_others(const struct hr_drive *drive) {
    int expects = atomic_load(&drive->pending) > 0;
    for (const struct hr_part *part = drive->parts; part != NULL && !expects; part = part->next) {
        expects = part->ops->expects != NULL && part->ops->expects(part);
    }
    return expects;
}

/* It counts from now_ns on how long others are waited for; 0: they are waited for no longer. */
static void await_others(struct hr_drive *drive, int64_t now_ns) {
    drive->expects_others = now_ns != 0;
    for (struct hr_part *part = drive->parts; part != NULL; part = part->next) {
        if (part->ops->await != NULL) {
            part->ops->await(part, now_ns);
        }
    }
}

static void begin_expecting(struct hr_drive *drive, int64_t now_ns) {
    if (!drive->expects_others && expects_others(drive)) {
        await_others(drive, now_ns);
    }
}

/* Between hosts: the links are silent, and nobody may drive for a long time. */
static void stop_expecting(struct hr_drive *drive) {
    if (drive->expects_others && drive->node->transport_count > 0 && !expects_others(drive)) {
        await_others(drive, 0);
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

const struct hr_part_ops hr_part_links = {.rank = HR_PART_LINKS, .due = supervise_links, .await = await_on_links};

/* ---- The wait ---- */

/* The time when the wait must end by itself, which is not behind deadline_ns; 0: none. */
static int64_t next_due_ns(struct hr_drive *drive, int64_t deadline_ns, int64_t now_ns) {
    const int64_t log_ns = hr_log_check(&drive->node->log, now_ns);
    int64_t until_ns = deadline_ns == 0 ? HR_NEVER : deadline_ns;
    until_ns = log_ns != 0 && log_ns < until_ns ? log_ns : until_ns;
    for (struct hr_part *part = drive->parts; part != NULL; part = part->next) {
        if (now_ns >= part->next_ns) {
            part->next_ns = part->ops->due == NULL ? HR_NEVER : part->ops->due(part, now_ns);
        }
        until_ns = part->next_ns < until_ns ? part->next_ns : until_ns;
    }
    return until_ns == HR_NEVER ? 0 : until_ns;
}

static void show_moves(const struct hr_drive *drive) {
    struct hr_arena_block *block = &drive->node->arena.blocks[drive->node->local_rank];
    /* partner: count_moves */
    atomic_store_explicit(&block->moves, hr_drive_moves(drive), memory_order_relaxed);
}

/* 1: something has moved, or is due; 0: the caller should get back, for its time is up, or a signal came. */
static int wait_for_move(struct hr_drive *drive, int64_t spin_ns, int64_t deadline_ns) {
    /* one look at the clock serves all: it costs as much as a small operation can do in between */
    const int64_t now_ns = hr_now_ns();
    begin_expecting(drive, now_ns);
    const int64_t until_ns = next_due_ns(drive, deadline_ns, now_ns);
    show_moves(drive);
    const int status = hr_node_wait(drive->node, turn, drive, now_ns, spin_ns, until_ns);
    return status != HORO_IN_PROGRESS || deadline_ns == 0 || (hr_now_ns() < deadline_ns && hr_now_ns() >= until_ns);
}

/* The thread prepares to wait while callers may drive. 0: something has moved, or is due. */
static int watch(struct hr_drive *drive) {
    const int64_t now_ns = hr_now_ns();
    stop_expecting(drive);
    begin_expecting(drive, now_ns); /* as a leader, whose own program computes */
    const int64_t until_ns = next_due_ns(drive, 0, now_ns);
    show_moves(drive);
    return (until_ns == 0 || now_ns < until_ns) &&
           !hr_node_prepare_sleep(drive->node, turn, drive, &drive->sleep, until_ns);
}

/* ---- The loop ---- */

static int may_return(const struct hr_drive *drive, const _Atomic int *word, int value) {
    if (word != NULL) {
        return atomic_load(word) != value;
    }
    if (atomic_load(&drive->stop)) {
        return drive->stage == HR_STAGE_ENDED && atomic_load(&drive->pending) == 0;
    }
    return !atomic_load(&drive->serves_hosts) && !hr_drive_needs(drive);
}

/*
 * Whether a caller may take over from the thread, now that nothing moves: where it serves other hosts. What makes the
 * thread drive must be over, or it would do so again at once, without the sleep that notices a death.
 */
static int may_yield(const struct hr_drive *drive) {
    if (drive->stage != HR_STAGE_RUNNING || !atomic_load(&drive->serves_hosts) || atomic_load(&drive->stop)) {
        return 0;
    }
    return atomic_load(&drive->wanted) ? !hr_drive_must_end(drive) : !hr_drive_needs(drive);
}

int hr_drive_run(struct hr_drive *drive, const _Atomic int *word, int value, int64_t deadline_ns) {
    const int64_t spin_ns = word != NULL ? drive->caller_spin_ns : drive->thread_spin_ns;
    for (unsigned turns = 1; !may_return(drive, word, value); turns++) {
        if (turn(drive->node, drive)) {
            if (turns % TURNS_PER_CLOCK == 0 && deadline_ns != 0 && hr_now_ns() >= deadline_ns) {
                return 0;
            }
        } else if (word == NULL && may_yield(drive)) {
            if (watch(drive)) {
                return 1;
            }
        } else if (!wait_for_move(drive, spin_ns, deadline_ns)) {
            return 0;
        }
    }
    stop_expecting(drive);
    return 0;
}
