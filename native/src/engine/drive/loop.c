/*
 * Driving the engine: the parts are turned one after another, and again as long as any of them moves; then comes one
 * wait, which goes on turning them, and ends when one has moved. No predicate says what a turn would do.
 *
 * Why no sleep misses an event. Whoever changes something that a turn here may act on does that first, and then looks
 * whether this rank sleeps; the driver notes that it sleeps first, and then takes one turn in which no part is left
 * out and no room trusts its own notes (looks_at_all). Both are sequentially consistent: at least one sees the other.
 *
 *     the change                                                | its waker
 *     ----------------------------------------------------------+------------------------------------------------------
 *     a caller's: queue, report, shutdown, a wish to drive      | hr_engine_kick: the eventfd of the driver that sleeps
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
#include "engine/drive/drive.h"

enum {
    TURNS_PER_CLOCK = 16, /* while things move, the deadline is looked at once in so many turns */
};

/* ---- Parts ---- */

void hr_drive_add(struct hr_engine *engine, struct hr_part *part, const struct hr_part_ops *ops, void *owner) {
    struct hr_part **link = &engine->driver.parts;
    while (*link != NULL && (*link)->ops->rank <= ops->rank) {
        link = &(*link)->next;
    }
    *part = (struct hr_part){.ops = ops, .owner = owner, .next = *link, .next_ns = HR_NEVER};
    *link = part;
}

void hr_drive_remove(struct hr_engine *engine, const struct hr_part *part) {
    struct hr_part **link = &engine->driver.parts;
    while (*link != part) {
        link = &(*link)->next;
    }
    *link = part->next;
}

int hr_drive_needs(const struct hr_engine *engine) {
    for (const struct hr_part *part = engine->driver.parts; part != NULL; part = part->next) {
        if (part->ops->needs != NULL && part->ops->needs(part)) {
            return 1;
        }
    }
    return 0;
}

/* The first part alone has turns once the group comes to its end. A part may add and remove others behind it. */
static int turn_parts(struct hr_engine *engine) {
    int moved = HR_STILL;
    int number = 0;
    for (struct hr_part *part = engine->driver.parts; part != NULL; part = part->next, number++) {
        if (part->ops->turn == NULL || (part->is_quiet && !hr_node_looks_at_quiet(engine->node, number))) {
            continue;
        }
        const int turned = part->ops->turn(part);
        HR_TRY(turned);
        moved |= turned;
        if (engine->driver.stage != HR_ENGINE_RUNNING) {
            break;
        }
    }
    return moved;
}

/* The state is not what it should be on this rank: nobody may wait for it. */
static void give_up(struct hr_engine *engine, int status) {
    const int code = status == HORO_ERR_RESOURCE ? HORO_ERR_ABORTED : HORO_ERR_INTERNAL;
    hr_log(&engine->node->log, HORO_LOG_ERROR, "the engine stops: %s error", horo_status_name(status));
    hr_node_abort(engine->node, code, engine->node->rank, HR_REASON_INTERNAL);
}

static int turn(struct hr_node *node, void *arg) {
    struct hr_engine *engine = arg;
    (void)node;
    const int moved = turn_parts(engine);
    if (moved < 0) {
        give_up(engine, moved);
    }
    return moved != HR_STILL;
}

/* ---- Waiting for others ---- */

/* Whether something is under way that a peer may hold up. */
static int expects_others(const struct hr_engine *engine) {
    int expects = atomic_load(&engine->submission.pending) > 0;
    for (int i = 0; i < engine->lane_count && !expects; i++) {
        expects = engine->lanes[i]->is_leader && engine->lanes[i]->leader.agree.active > 0;
    }
    return expects;
}

/* From here on it counts how long others are waited for. */
static void begin_expecting(struct hr_engine *engine, int64_t now_ns) {
    struct hr_driver *driver = &engine->driver;
    if (!driver->expects_others && expects_others(engine)) {
        driver->expects_others = 1;
        hr_part_expect(&driver->links, now_ns + HR_SUPERVISE_AFTER_NS);
        hr_part_expect(&driver->stall, hr_stall_next_look_ns(engine->node, now_ns));
    }
}

/* Between hosts: the links are silent, and nobody may drive for a long time. */
static void stop_expecting(struct hr_engine *engine) {
    struct hr_driver *driver = &engine->driver;
    if (!driver->expects_others || engine->node->transport_count == 0 || expects_others(engine)) {
        return;
    }
    driver->expects_others = 0;
    driver->links.next_ns = HR_NEVER;
    driver->stall.next_ns = hr_stall_answers_ns(engine);
    hr_node_supervise(engine->node, 0);
}

/* Others have been waited for so long that their links are supervised. */
static int64_t links_due(struct hr_part *part, int64_t now_ns) {
    struct hr_engine *engine = part->owner;
    (void)now_ns;
    hr_node_supervise(engine->node, 1);
    return HR_NEVER;
}

const struct hr_part_ops hr_part_links = {.rank = HR_PART_LINKS, .due = links_due};

/* ---- The wait ---- */

/* The time when the wait must end by itself, which is not behind deadline_ns; 0: none. */
static int64_t next_due_ns(struct hr_engine *engine, int64_t deadline_ns, int64_t now_ns) {
    const int64_t log_ns = hr_log_check(&engine->node->log, now_ns);
    int64_t until_ns = deadline_ns == 0 ? HR_NEVER : deadline_ns;
    until_ns = log_ns != 0 && log_ns < until_ns ? log_ns : until_ns;
    for (struct hr_part *part = engine->driver.parts; part != NULL; part = part->next) {
        if (now_ns >= part->next_ns) {
            part->next_ns = part->ops->due == NULL ? HR_NEVER : part->ops->due(part, now_ns);
        }
        until_ns = part->next_ns < until_ns ? part->next_ns : until_ns;
    }
    return until_ns == HR_NEVER ? 0 : until_ns;
}

static void show_moves(struct hr_engine *engine) {
    struct hr_arena_block *block = &engine->node->arena.blocks[engine->node->local_rank];
    /* partner: count_moves */
    atomic_store_explicit(&block->moves, hr_drive_moves(engine), memory_order_relaxed);
}

/* 1: something has moved, or is due; 0: the caller should get back, for its time is up, or a signal came. */
static int wait_for_move(struct hr_engine *engine, int64_t spin_ns, int64_t deadline_ns) {
    /* one look at the clock serves all: it costs as much as a small operation can do in between */
    const int64_t now_ns = hr_now_ns();
    begin_expecting(engine, now_ns);
    const int64_t until_ns = next_due_ns(engine, deadline_ns, now_ns);
    show_moves(engine);
    const int status = hr_node_wait(engine->node, turn, engine, now_ns, spin_ns, until_ns);
    return status != HORO_IN_PROGRESS || deadline_ns == 0 || (hr_now_ns() < deadline_ns && hr_now_ns() >= until_ns);
}

/* The thread prepares to wait while callers may drive. 0: something has moved, or is due. */
static int watch(struct hr_engine *engine) {
    const int64_t now_ns = hr_now_ns();
    stop_expecting(engine);
    begin_expecting(engine, now_ns); /* as a leader, whose own program computes */
    const int64_t until_ns = next_due_ns(engine, 0, now_ns);
    show_moves(engine);
    return (until_ns == 0 || now_ns < until_ns) &&
           !hr_node_prepare_sleep(engine->node, turn, engine, &engine->driver.sleep, until_ns);
}

/* ---- The loop ---- */

static int may_return(const struct hr_engine *engine, const struct hr_request *until) {
    if (until != NULL) {
        return atomic_load(&until->status) != HORO_IN_PROGRESS;
    }
    if (atomic_load(&engine->driver.stop)) {
        return engine->driver.stage == HR_ENGINE_ENDED && atomic_load(&engine->submission.pending) == 0;
    }
    return !atomic_load(&engine->driver.serves_hosts) && !hr_drive_needs(engine);
}

/*
 * Whether a caller may take over from the thread, now that nothing moves: where it serves other hosts. What makes the
 * thread drive must be over, or it would do so again at once, without the sleep that notices a death.
 */
static int may_yield(const struct hr_engine *engine, const struct hr_request *until) {
    const struct hr_driver *driver = &engine->driver;
    if (until != NULL || driver->stage != HR_ENGINE_RUNNING || !atomic_load(&driver->serves_hosts) ||
        atomic_load(&driver->stop)) {
        return 0;
    }
    return atomic_load(&driver->wanted) ? !hr_part_end.needs(&driver->end) : !hr_drive_needs(engine);
}

int hr_engine_drive(struct hr_engine *engine, const struct hr_request *until, int64_t deadline_ns) {
    const int64_t spin_ns = until != NULL ? engine->driver.caller_spin_ns : engine->driver.thread_spin_ns;
    for (unsigned turns = 1; !may_return(engine, until); turns++) {
        if (turn(engine->node, engine)) {
            if (turns % TURNS_PER_CLOCK == 0 && deadline_ns != 0 && hr_now_ns() >= deadline_ns) {
                return 0;
            }
        } else if (may_yield(engine, until)) {
            if (watch(engine)) {
                return 1;
            }
        } else if (!wait_for_move(engine, spin_ns, deadline_ns)) {
            return 0;
        }
    }
    stop_expecting(engine);
    return 0;
}
