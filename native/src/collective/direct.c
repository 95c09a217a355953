/*
 * Moves with a single copy. Memory of another rank of this host is read by process_vm_readv: the kernel copies straight
 * from there. It lets a process do so that may also attach to it as a debugger; security modules, containers and
 * filters of system calls may refuse. So each rank shows in its arena block its process id and the place of its proof,
 * a random number in its private memory. Whoever reads that number under that process id reads the memory of that very
 * process: in another namespace, and after the death of a process whose id is used again, there is something else.
 * Every read takes the proof along, behind the data.
 */
#include <errno.h>
#include <string.h>
#include <sys/uio.h>

#include "collective/collective.h"

enum {
    READ_AT_ONCE = 1 << 19, /* bytes, before the driver looks at other things */
    SUM_AT_ONCE = 1 << 16,  /* of each: they are read into my slot, and still in the cache when they are added up */
    SUM_LEAST = 1 << 12,    /* with slots too small for more at once, the system calls take longer than two copies */
};

/* ---- Reading ---- */

int hr_read_peer(const struct hr_node *node, int local_rank, const struct hr_peer_range *ranges, int count) {
    const struct hr_arena_block *block = &node->arena.blocks[local_rank];
    struct iovec local[HR_RANGES_MAX + 1];
    struct iovec remote[HR_RANGES_MAX + 1];
    uint64_t proof[HR_PROOF_WORDS] = {0};
    const int32_t process = atomic_load(&block->process);
    if (process == 0) {
        return ENOSYS;
    }
    for (int i = 0; i < count; i++) {
        local[i] = (struct iovec){ranges[i].to, ranges[i].bytes};
        remote[i] = (struct iovec){(void *)(uintptr_t)ranges[i].from, ranges[i].bytes};
    }
    local[count] = (struct iovec){proof, sizeof proof};
    remote[count] = (struct iovec){(void *)(uintptr_t)atomic_load(&block->proof_at), sizeof proof};
    struct iovec *to = local;
    struct iovec *from = remote;
    for (unsigned long ranges_left = (unsigned long)count + 1; ranges_left > 0;) {
        const ssize_t got = process_vm_readv((pid_t)process, to, ranges_left, from, ranges_left, 0);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            return got < 0 ? errno : EFAULT;
        }
        size_t left = (size_t)got;
        for (; ranges_left > 0 && left >= to->iov_len; to++, from++, ranges_left--) {
            left -= to->iov_len;
        }
        if (ranges_left > 0) { /* the rest of this range */
            to->iov_base = (char *)to->iov_base + left;
            from->iov_base = (char *)from->iov_base + left;
            to->iov_len -= left;
            from->iov_len = to->iov_len;
        }
    }
    for (int i = 0; i < HR_PROOF_WORDS; i++) {
        if (proof[i] != atomic_load(&block->proof[i])) {
            return ESRCH;
        }
    }
    return 0;
}

/* ---- Whether it can be done ---- */

/* The report of a member about its reads, in one word: who could not be read, and why. */
enum { TOLD_YES = 1, TOLD_NO = 2, TOLD_BITS = 8, TOLD_RANK_SHIFT = 32 };

static _Atomic uint64_t *told_by(const struct hr_team *team, int local_rank) {
    return &team->partition.blocks[team->index_of_local[local_rank]].reads_peers;
}

static uint64_t refusal(int peer, int error) {
    return TOLD_NO | (uint64_t)error << TOLD_BITS | (uint64_t)peer << TOLD_RANK_SHIFT;
}

/* All have told before the last arrival, and nobody tells anything else before all have been here. */
static void conclude(struct hr_team *team) {
    int teller = 0;
    uint64_t told = atomic_load(told_by(team, 0)); /* partner: end_reading */
    while (told == TOLD_YES && ++teller < team->local_size) {
        told = atomic_load(told_by(team, teller));
    }
    const int reads = told == TOLD_YES ? 1 : -1;
    const int is_news = reads != team->reads_peers && team->local_rank == 0;
    char name[HR_TEAM_NAME_BYTES];
    team->reads_peers = reads;
    if (is_news && reads > 0) {
        hr_log(&team->node->log, HORO_LOG_INFO, "%s: large moves read the memory of the other ranks",
               hr_team_name(team, name));
    } else if (is_news) {
        hr_log(&team->node->log, HORO_LOG_INFO,
               "%s: large moves pass shared memory, since rank %d cannot read the memory of rank %d: %s",
               hr_team_name(team, name), team->job_rank[teller], team->job_rank[(int)(told >> TOLD_RANK_SHIFT)],
               strerror((int)((told & UINT32_MAX) >> TOLD_BITS)));
    }
}

/* ---- Moving ---- */

enum stage { STAGE_SHOW, STAGE_KEEP, STAGE_READ, STAGE_END };

/* The bytes that my addresses take of my slot. */
static size_t address_bytes(const struct hr_move *move) {
    return hr_round_up((size_t)move->shown_count * move->tensors * sizeof(uint64_t), HR_LINE);
}

/* Room in my slot for what is read of each other member at once; whole lines, so no value is cut. */
static size_t sum_room(const struct hr_team *team, const struct hr_move *move) {
    const size_t room = (team->tuning.segment - address_bytes(move)) / (size_t)(team->size - 1) / HR_LINE * HR_LINE;
    return room < SUM_AT_ONCE ? room : SUM_AT_ONCE;
}

int hr_direct_pays(const struct hr_team *team, const struct hr_move *move, size_t bytes) {
    const int can = team->host_count == 1 && team->size > 1 && team->reads_peers >= 0 && team->tuning.direct > 0 &&
                    address_bytes(move) <= team->tuning.segment;
    /*
     * From how many bytes on a rank saves more by one copy less than its reads cost, one of each other rank. What an
     * allgather copies into its slot is only its own part. All wait for the root's copy of a broadcast, with a read
     * each; the more ranks read, the longer a read takes.
     */
    const size_t size = (size_t)team->size;
    if (!can || bytes < team->tuning.direct * size * (move->is_gather ? size - 1 : 1)) {
        return 0;
    }
    if (move->adds_up) {
        return sum_room(team, move) >= SUM_LEAST;
    }
    /* an alltoall puts into a slot for one other rank alone: the copy never pays there */
    return move->shown_count > 1 || bytes <= team->tuning.direct_most / (size_t)team->local_size;
}

/* The beginning, in the slot of a member, of the addresses of what it shows to another. */
static _Atomic uint64_t *addresses(const struct hr_direct *run, int from, int to) {
    const struct hr_team *team = run->team;
    const size_t list = run->move.shown_count == 1 ? 0 : (size_t)to;
    char *slot = hr_team_slot(team, from, run->parity); /* all are on one host: rank and local index are the same */
    return (_Atomic uint64_t *)(void *)slot + list * run->move.tensors;
}

/* Shows my addresses, once the slot is nobody's any more: 1; 0: not yet. */
static int show(struct hr_task *task) {
    const struct hr_direct *run = (struct hr_direct *)task; /* its first member */
    const struct hr_team *team = run->team;
    if (!hr_team_reached(team, HR_PHASE_DRAINED, run->parity)) {
        return 0;
    }
    for (int to = 0; to < run->move.shown_count; to++) {
        const struct hr_fused *vector = &run->move.shown[to];
        _Atomic uint64_t *at = addresses(run, team->rank, to);
        for (size_t i = 0; i < vector->count; i++) { /* partner: hr_team_arrive */
            atomic_store_explicit(&at[i], (uint64_t)(uintptr_t)vector->pieces[i].input, memory_order_relaxed);
        }
    }
    return 1;
}

/* The next pieces of a part, at most `room` bytes together. */
static int collect(const struct hr_direct *run, const struct hr_fused *part, size_t room, struct hr_cut *cuts) {
    struct hr_cut cut = hr_cut_begin(part, run->done, hr_smaller(room, part->bytes - run->done));
    int count = 0;
    while (count < HR_RANGES_MAX && hr_cut_next(&cut)) {
        cuts[count++] = cut;
    }
    return count;
}

/* Reads what one member has of these, to `to`, one behind the other; NULL: to their outputs. 0, or an error number. */
static int read_cuts(const struct hr_direct *run, int from, const struct hr_fused *part, const struct hr_cut *cuts,
                     int count, char *to) {
    const _Atomic uint64_t *at = addresses(run, from, run->team->rank);
    struct hr_peer_range ranges[HR_RANGES_MAX];
    for (int i = 0; i < count; i++) {
        const uint64_t address = atomic_load_explicit(&at[cuts[i].piece - part->pieces], memory_order_relaxed);
        char *output = to != NULL ? to : cuts[i].piece->output + cuts[i].skip;
        ranges[i] = (struct hr_peer_range){output, address + cuts[i].skip, cuts[i].bytes};
        to = to != NULL ? to + cuts[i].bytes : NULL;
    }
    return hr_read_peer(run->team->node, run->team->index_of_local[from], ranges, count);
}

static int end_reading(struct hr_direct *run, uint64_t told) {
    atomic_store(told_by(run->team, run->team->local_rank), told); /* partner: conclude */
    hr_team_arrive(run->team, HR_PHASE_DRAINED, run->parity);
    run->stage = STAGE_END;
    return HR_MOVED;
}

/* Each rank begins with another, so that not all read the same memory. */
static int read_next(struct hr_direct *run) {
    struct hr_team *team = run->team;
    struct hr_cut cuts[HR_RANGES_MAX];
    const int from = (team->rank + 1 + run->peer) % team->size;
    const struct hr_fused *part = &run->move.from[from];
    const int count = collect(run, part, READ_AT_ONCE, cuts);
    const int error = count == 0 ? 0 : read_cuts(run, from, part, cuts, count, NULL);
    if (error != 0) { /* all will do it again by the slots, where a lost rank's life line ends it */
        return end_reading(run, refusal(from, error));
    }
    for (int i = 0; i < count; i++) {
        run->done += cuts[i].bytes;
    }
    if (count == 0) {
        run->done = 0;
        run->peer++;
    }
    return run->peer == team->size - 1 ? end_reading(run, TOLD_YES) : HR_MOVED;
}

/* ---- Sums ---- */

/* Of my values and the others': the same bytes of each at once. */
static int sum_next(struct hr_direct *run) {
    struct hr_team *team = run->team;
    const struct hr_fused *part = &run->move.from[team->rank];
    const size_t room = sum_room(team, &run->move);
    char *scratch = hr_team_slot(team, team->local_rank, run->parity) + address_bytes(&run->move);
    for (size_t done = 0; done < READ_AT_ONCE; done += room * (size_t)team->size) {
        struct hr_cut addends[HR_RANGES_MAX];
        const int count = collect(run, part, room, addends);
        if (count == 0) {
            return end_reading(run, TOLD_YES);
        }
        char *to = scratch;
        for (int from = 0; from < team->size; from++) {
            const int error = from == team->rank ? 0 : read_cuts(run, from, part, addends, count, to);
            if (error != 0) {
                return end_reading(run, refusal(from, error));
            }
            to += from == team->rank ? 0 : room;
        }
        /* In the order of ranks, as the slots are added up, so that the way changes no bit. */
        const char *read = scratch;
        for (int i = 0; i < count; i++) {
            const struct hr_cut *addend = &addends[i];
            const char *next = read;
            for (int r = 0; r < team->size; r++) {
                team->sources[r] = r == team->rank ? addend->piece->input + addend->skip : next;
                next += r == team->rank ? 0 : room;
            }
            hr_kernel_reduce(team->node->kernel, part->codec->wire_dtype, run->move.reduce_op,
                             addend->piece->output + addend->skip, NULL, team->sources, team->size,
                             addend->bytes / part->codec->wire_bytes, run->move.scale, HR_STORE_ORDINARY);
            read += addend->bytes;
            run->done += addend->bytes;
        }
    }
    return HR_MOVED;
}

static void end_showing(struct hr_direct *run) {
    hr_team_arrive(run->team, HR_PHASE_FILLED, run->parity);
    run->stage = run->move.adds_up ? STAGE_READ : STAGE_KEEP;
}

static int progress(struct hr_task *task) {
    struct hr_direct *run = (struct hr_direct *)task;
    struct hr_team *team = run->team;
    switch ((enum stage)run->stage) {
    case STAGE_SHOW:
        if (!show(task)) {
            return HR_STILL;
        }
        end_showing(run);
        return HR_MOVED;
    case STAGE_KEEP: { /* my own part is copied */
        const struct hr_fused *from = run->move.from;
        size_t received = 0;
        for (int r = 0; r < team->size; r++) {
            received += from[r].bytes;
        }
        hr_fused_unpack(&from[team->rank], 0, from[team->rank].bytes, NULL, team->node->kernel,
                        hr_store_choose_for_result(team, received));
        run->stage = STAGE_READ;
        return HR_MOVED;
    }
    case STAGE_READ:
        if (!run->is_shown_ahead && !hr_team_reached(team, HR_PHASE_FILLED, run->parity)) {
            return HR_STILL;
        }
        return run->move.adds_up ? sum_next(run) : read_next(run);
    case STAGE_END:
        /*
         * Until all have read, nobody's memory is the caller's again. Where the group has ended, what was read may be
         * wrong: a member's call may have failed before I read its memory, which it may have changed.
         */
        if (!hr_team_reached(team, HR_PHASE_DRAINED, run->parity) || hr_arena_aborted(&team->node->arena).code != 0) {
            return HR_STILL;
        }
        conclude(team);
        return HR_DONE;
    }
    return HORO_ERR_INTERNAL;
}

static void show_ahead(struct hr_task *task) {
    struct hr_direct *run = (struct hr_direct *)task;
    run->is_shown_ahead = 1;
    end_showing(run);
}

void hr_direct_begin(struct hr_direct *run, struct hr_team *team, const struct hr_move *move) {
    *run = (struct hr_direct){
        .task = {.progress = progress, .fill_ahead = show, .show_ahead = show_ahead},
        .team = team,
        .move = *move,
        .parity = (unsigned)(team->segment & 1),
    };
    team->segment++; /* its addresses take the place of one segment */
}
