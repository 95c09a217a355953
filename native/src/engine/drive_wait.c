/* The events that the driver waits for, and until when. */
#include "engine/drive.h"

enum {
    LOOKS_PER_TURN = 2, /* at a task, while it waits */
};

static int log_waits(const struct hr_lane *lane) {
    return lane->executor.state == HR_EXECUTION_IDLE &&
           /* partner: hr_ring_write */
           atomic_load(&lane->team->partition.header->log.written) != lane->executor.log_position;
}

static int ring_has_room(const struct hr_lane *lane) {
    const struct hr_partition_block *block = &lane->team->partition.blocks[lane->node->local_rank];
    return hr_buffer_size(&lane->announcer.request_out) > 0 &&
           atomic_load(&block->requests.written) - atomic_load(&block->requests_read) < HR_REQUEST_RING_BYTES;
}

static int is_at_task(enum hr_execution state) {
    return state == HR_EXECUTION_RUNNING || state == HR_EXECUTION_CHANGING;
}

/*
 * A task that can go on does so here already; what came of it is kept for the next turn. On one host it waits for a
 * word in memory most of the time, and is looked at more often than all else.
 */
static int task_moves(struct hr_lane *lane) {
    struct hr_executor *executor = &lane->executor;
    const int looks = lane->team->transport == NULL ? LOOKS_PER_TURN : 1;
    for (int i = 0; i < looks && executor->outcome == 0 &&
                    is_at_task(executor->state); i++) {
        executor->outcome = hr_lane_execute(lane);
    }
    return executor->outcome != 0;
}

static int lane_has_work(struct hr_lane *lane) {
    return task_moves(lane) || hr_lone_has_work(lane) || log_waits(lane) || ring_has_room(lane) ||
           (lane->is_leader && hr_lane_has_lead_work(lane));
}

static int has_work_closing(struct hr_engine *engine) {
    const int may_fail =
        atomic_load(&engine->submission.pending) > 0 && !hr_drive_any_leader(engine, hr_leader_sends_left);
    return hr_drive_is_aborted(engine) || may_fail || hr_drive_may_end(engine) ||
           hr_drive_any_leader(engine, hr_leader_has_messages);
}

static int has_work(struct hr_node *node, void *arg) {
    (void)node;
    struct hr_engine *engine = arg;
    switch (engine->driver.stage) {
    case HR_ENGINE_CLOSING: return has_work_closing(engine);
    case HR_ENGINE_ENDING:
        return hr_drive_any_leader(engine, hr_leader_has_messages) ||
               !hr_drive_any_leader(engine, hr_leader_sends_left);
    case HR_ENGINE_ENDED: return atomic_load(&engine->submission.pending) > 0;
    case HR_ENGINE_RUNNING: break;
    }
    if (hr_drive_is_aborted(engine) || hr_drive_may_close(engine) || atomic_load(&engine->submission.queued) > 0 ||
        hr_engine_has_blocked(engine) || hr_gpu_has_work(engine) ||
        (atomic_load(&engine->driver.stop) && !hr_engine_world(engine)->announcer.has_asked_to_leave)) {
        return 1;
    }
    for (int i = 0; i < engine->lane_count; i++) {
        if (!hr_drive_skips(engine, i) && lane_has_work(engine->lanes[i])) {
            engine->lanes[i]->is_due = 1;
            return 1;
        }
    }
    return 0;
}

/* Of two times, of which 0 is none. */
static int64_t earlier(int64_t a, int64_t b) {
    return a == 0 || (b != 0 && b < a) ? b : a;
}

static int is_agreeing(const struct hr_lane *lane) {
    return lane->leader.agree.active > 0;
}

int hr_drive_expects_others(const struct hr_engine *engine) {
    return atomic_load(&engine->submission.pending) > 0 || hr_drive_any_leader(engine, is_agreeing);
}

void hr_drive_stop_expecting(struct hr_engine *engine) {
    if (engine->driver.expecting_since_ns != 0) {
        engine->driver.expecting_since_ns = 0;
        hr_node_supervise(engine->node, 0);
    }
}

/* The time when links are to be supervised, which this does if it has come; 0: they are, or need not be. */
static int64_t supervise_due_ns(struct hr_engine *engine, int64_t now_ns) {
    struct hr_node *node = engine->node;
    if (!hr_drive_expects_others(engine)) {
        hr_drive_stop_expecting(engine);
        return 0;
    }
    if (engine->driver.expecting_since_ns == 0) {
        engine->driver.expecting_since_ns = now_ns;
    }
    if (now_ns < engine->driver.expecting_since_ns + HR_SUPERVISE_AFTER_NS) {
        return engine->driver.expecting_since_ns + HR_SUPERVISE_AFTER_NS;
    }
    hr_node_supervise(node, 1);
    return 0;
}

static int64_t lane_deadline(struct hr_lane *lane, int64_t now_ns) {
    int64_t deadline_ns = earlier(hr_lane_check_stall(lane, now_ns), hr_lone_due_ns(lane, now_ns));
    if (lane->executor.state == HR_EXECUTION_LOST && !hr_lane_is_left(lane)) {
        deadline_ns = earlier(deadline_ns, lane->executor.confirm_ns);
    }
    if (!lane->is_leader) {
        return deadline_ns;
    }
    return earlier(earlier(deadline_ns, hr_lane_batch_due_ns(lane)), hr_leader_check_deadlock(lane, now_ns));
}

/* The time when the wait must end by itself. */
static int64_t next_deadline(struct hr_engine *engine, int64_t deadline_ns, int64_t now_ns) {
    deadline_ns = earlier(deadline_ns, hr_log_check(&engine->node->log, now_ns));
    if (engine->driver.stage == HR_ENGINE_ENDING) {
        return engine->driver.flush_ns;
    }
    if (engine->driver.stage == HR_ENGINE_ENDED) {
        return deadline_ns;
    }
    deadline_ns = earlier(deadline_ns, engine->driver.leave_ns);
    if (engine->driver.stage == HR_ENGINE_CLOSING) {
        return atomic_load(&engine->submission.pending) > 0 ? earlier(deadline_ns, engine->driver.flush_ns)
                                                            : deadline_ns;
    }
    for (int i = 0; i < engine->lane_count; i++) {
        if (!hr_drive_skips(engine, i)) {
            deadline_ns = earlier(deadline_ns, lane_deadline(engine->lanes[i], now_ns));
        }
    }
    return engine->node->transport_count == 0 ? deadline_ns : earlier(deadline_ns, supervise_due_ns(engine, now_ns));
}

static void show_moves(struct hr_engine *engine) {
    struct hr_arena_block *block = &engine->node->arena.blocks[engine->node->local_rank];
    /* partner: count_moves */
    atomic_store_explicit(&block->moves, hr_drive_moves(engine), memory_order_relaxed);
}

int hr_drive_wait_for_work(struct hr_engine *engine, int64_t spin_ns, int64_t deadline_ns) {
    /* one look at the clock serves all: it costs as much as a small operation can do in between */
    const int64_t now_ns = hr_now_ns();
    const int64_t until_ns = next_deadline(engine, deadline_ns, now_ns);
    show_moves(engine);
    const int status = hr_node_wait(engine->node, has_work, engine, now_ns, spin_ns, until_ns);
    return status != HORO_IN_PROGRESS || deadline_ns == 0 || (hr_now_ns() < deadline_ns && hr_now_ns() >= until_ns);
}

int hr_drive_watch(struct hr_engine *engine) {
    struct hr_driver *driver = &engine->driver;
    const int64_t now_ns = hr_now_ns();
    const int64_t until_ns = next_deadline(engine, 0, now_ns);
    show_moves(engine);
    if ((until_ns != 0 && now_ns >= until_ns) ||
        hr_node_prepare_sleep(engine->node, has_work, engine, &driver->sleep, until_ns)) {
        return 0;
    }
    driver->is_watching = 1;
    driver->watching_since = driver->drives;
    return 1;
}
