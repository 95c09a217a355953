"""The breaks: mistakes that somebody could make, each with the tests that must notice it.

A text is short, and stands in its file once, so that it survives when code around it moves. When it is found no more,
the mistake is made anew where the code has gone.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Break:
    """One mistake.

    Attributes:
        name: of the break, room first.
        file: where it is made.
        old: the text that is replaced.
        new: the text in its place.
        shows: what a user would see.
        tests: words for pytest; few tests that run in seconds.
    """

    name: str
    file: str
    old: str
    new: str
    shows: str
    tests: str

    @property
    def is_native(self) -> bool:
        """Whether the core must be compiled."""
        return self.file.startswith("native/")


BREAKS = (
    # ---- the core, from below ----
    Break(
        "base-map-gap",
        "native/src/base/map.c",
        "if (((i - home) & mask) >= ((i - hole) & mask))",
        "if (((i - home) & mask) > ((i - hole) & mask))",
        "After many names, one that is pending is found no more, and its call never returns.",
        "tests/native/test_control.py tests/native/test_engine.py -k 'thousands or long_names'",
    ),
    Break(
        "base-recorder-status",
        "native/src/base/recorder.c",
        "event->status = (int8_t)(what >> 8 & 0xff);",
        "event->status = (int32_t)(what >> 8 & 0xff);",
        "The flight recorder shows failed requests with an unknown positive status.",
        "tests/native/test_recorder.py",
    ),
    Break(
        "base-log-wake-up",
        "native/src/base/log.c",
        "(void)pthread_cond_signal(&queue->changed);",
        "",
        "A warning reaches the logging module when the next one comes, or seconds later on stderr.",
        "tests/native/test_log.py -k 'stall_is_a_record or taken_in_order'",
    ),
    Break(
        "kernel-nan",
        "native/src/kernel/scalar.c",
        "((b) < (a) || (b) != (b) ? (b) : (a))",
        "((b) < (a) ? (b) : (a))",
        "Min of a tensor with a NaN depends on which rank has it, and on the processor.",
        "tests/native/test_kernel.py -k reduce_gives",
    ),
    Break(
        "wire-nul-in-name",
        "native/src/wire/decode.c",
        "(name.bytes == 0 || memchr(name.data, 0, name.bytes) == NULL)",
        "name.bytes <= HORO_NAME_MAX",
        "A hostile member sends a name with a NUL, and errors name another tensor.",
        "tests/native/test_wire.py -k 'refused'",
    ),
    Break(
        "arena-last-cause",
        "native/src/arena/arena.c",
        "    uint64_t expected = 0;",
        "    uint64_t expected = atomic_load(end_word);",
        "The error names the last rank that gave up, not the one that died first.",
        "tests/native/test_end.py -k first_death",
    ),
    Break(
        "arena-partition-size",
        "native/src/arena/arena.c",
        "layout.bytes = hr_round_up(layout.slots + ranks * 2 * segment_bytes, PAGES);",
        "layout.bytes = hr_round_up(layout.slots + ranks * segment_bytes, PAGES);",
        "A process set writes into the memory of the next one.",
        "tests/native/test_teams.py -k all_operations",
    ),
    Break(
        "transport-last-words",
        "native/src/transport/tcp.c",
        "if (link->send_errno != 0 && !link->lost && !moved) {",
        "if (link->send_errno != 0 && !link->lost) {",
        "A rank that dies is reported as a closed connection; the cause, which it has sent, is not read.",
        "tests/native/test_transport.py -k last_words",
    ),
    Break(
        "node-wake-up",
        "native/src/node/team.c",
        "        hr_team_wake_all(team); /* only",
        "        /* only",
        "An operation with a rank that is late takes until the next deadline of those that sleep.",
        "tests/native/test_reducescatter.py -k kinds",
    ),
    Break(
        "node-lost-wake-up",
        "native/src/node/wait.c",
        "const int is_ready = ready(node, arg);",
        "const int is_ready = arg == NULL && ready(node, arg);",
        "Now and then a rank sleeps on although what it waits for has happened.",
        "tests/native/test_waits.py -k behind_its_mark",
    ),
    Break(
        "node-set-neighbours",
        "native/src/node/team.c",
        "team->index_of_local[i++] = index;",
        "team->index_of_local[i] = i, i++;",
        "A process set that leaves out the first rank of a host wakes and watches the wrong processes.",
        "tests/native/test_teams.py -k all_operations",
    ),
    Break(
        "local-own-share",
        "native/src/collective/allreduce.c",
        "return run->prescale != 1.0 || !run->fused.codec->is_plain;",
        "return !run->fused.codec->is_plain;",
        "With prescale_factor, each rank's own part of a sum is not scaled.",
        "tests/native/test_engine.py -k scales_before",
    ),
    Break(
        "cross-order",
        "native/src/cross/algorithms.c",
        "partner < host ? HR_ARRIVAL_IS_LEFT : HR_ARRIVAL_IS_RIGHT",
        "HR_ARRIVAL_IS_LEFT",
        "On four hosts, min and max of 0.0 and -0.0, and sums of NaNs, are not the same bits on all ranks.",
        "tests/native/test_cross.py -k infinities_and_nans",
    ),
    Break(
        "collective-alltoall-slot",
        "native/src/collective/alltoall.c",
        "const size_t rounding = 2 * others * run->unit;",
        "const size_t rounding = 0;",
        "An alltoall of uneven splits that fill a segment writes behind the slot of its rank.",
        "tests/native/test_alltoall.py -k 'any_splits or many_ranks or one_may_have'",
    ),
    Break(
        "collective-scratch",
        "native/src/collective/segments.c",
        "if (whole <= team->cross_scratch_bytes) {",
        "if (team->cross_scratch_bytes > 0) {",
        "A large operation between hosts behind a small one writes behind its scratch memory.",
        "tests/native/test_engine.py -k allreduce_sums_any_size",
    ),
    Break(
        "backend-average-integers",
        "native/src/backend/host.c",
        "hr_dtype_is_integer(dtype) ? (struct hr_scale){postscale, size} :",
        "hr_dtype_is_integer(dtype) && size < 2 ? (struct hr_scale){postscale, size} :",
        "The average of large integers is off by one.",
        "tests/native/test_integer_average.py",
    ),
    Break(
        "backend-given-memory",
        "native/src/engine/requests/request.c",
        "free(request->gathered[i].is_given ? NULL : request->gathered[i].data);",
        "free(request->gathered[i].is_given ? request->gathered[i].data : NULL);",
        "An allgather into a tensor of the program crashes in free(); any other leaks its result.",
        "tests/native/test_gather.py -k 'caller_gives or left_alone'",
    ),
    Break(
        "drive-other-hosts",
        "native/src/engine/drive/drive.c",
        "    return !atomic_load(&drive->serves_hosts) && !hr_drive_needs(drive);",
        "    return !hr_drive_needs(drive);",
        "While the program of a leader computes, the calls of other hosts wait for its next call.",
        "tests/native/test_driving.py",
    ),
    Break(
        "lead-silent-news",
        "native/src/engine/lead/control.c",
        "    leader->has_news = 1;\n    switch (message->type) {",
        "    switch (message->type) {",
        "What another rank announces is agreed on when the leader goes to sleep, a millisecond late.",
        "tests/native/test_control.py -k thousands",
    ),
    Break(
        "requests-error-text",
        "native/src/engine/requests/submit.c",
        "request->call.team % HORO_TEAM_ID_STEP",
        "request->call.team",
        "Where number 1 has been used again, an error calls process set 1 process set 65.",
        "tests/native/test_teams.py -k shutdown_ends",
    ),
    Break(
        "agree-known-differs",
        "native/src/engine/agree/agree.c",
        "memcmp(entry->current.bytes, entry->known.bytes, entry->known.count) != 0)) {",
        "0)) {",
        "A dtype that changes on one rank only is not refused: the sum is of unlike bytes.",
        "tests/native/test_engine.py -k mismatch",
    ),
    Break(
        "agree-factors",
        "native/src/engine/agree/agree.c",
        "a->prescale == b->prescale && ",
        "",
        "Of two tensors in flight with unlike prescale_factor, one is scaled by that of the other.",
        "tests/native/test_engine.py -k unlike_factors",
    ),
    Break(
        "agree-fusion-limit",
        "native/src/engine/agree/agree.c",
        "if (kind->bytes > most || bytes > most - kind->bytes) {",
        "if (kind->bytes > most || bytes > most) {",
        "Batches are larger than HORO_FUSION_THRESHOLD by up to one tensor.",
        "tests/native/test_engine.py -k fused",
    ),
    Break(
        "announce-eviction",
        "native/src/engine/announce/announcer.c",
        "return pending == NULL ? HORO_OK : hr_announcer_put_full(announcer, pending);",
        "return pending == NULL ? HORO_OK : HORO_OK;",
        "With more names in flight than the cache holds, a call never returns.",
        "tests/native/test_agree.py -k announced_anew",
    ),
    Break(
        "round-other-name",
        "native/src/engine/round/round.c",
        "return !is_open ? 0 : word >> ID_SHIFT == id ? word + 1 : word | CLOSED;",
        "return !is_open ? 0 : word + 1;",
        "Two ranks that call different operations at once get the sum of unlike tensors.",
        "tests/native/test_lone.py -k different_operations",
    ),
    Break(
        "lead-carried-once",
        "native/src/engine/round/round.c",
        "        memset(carry->has, 0, (size_t)carry->members * sizeof *carry->has);\n",
        "",
        "After a round that came to nothing, small sums between hosts are never carried again.",
        "tests/native/test_carry.py",
    ),
    Break(
        "execute-rows-order",
        "native/src/engine/execute/rows.c",
        "read_tensor(request, team, team->rank_by_host[r], i, &cursor);",
        "read_tensor(request, team, r, i, &cursor);",
        "Where ranks are placed in turn on hosts, an allgather ends the job with an internal error.",
        "tests/native/test_gather.py tests/native/test_alltoall.py -k order_of",
    ),
    Break(
        "membership-set-id",
        "native/src/engine/membership/sets.c",
        "place->id + HORO_TEAM_ID_STEP : -1;",
        "place->id : -1;",
        "A removed process set means the one that was added after it.",
        "tests/native/test_teams.py -k used_again",
    ),
    Break(
        "membership-neutral",
        "native/src/engine/membership/join.c",
        "{0xff800000, 0x7f800000, 0x3f800000}",
        "{0x7f800000, 0x7f800000, 0x3f800000}",
        "Max over ranks of which one has joined is infinite.",
        "tests/native/test_join.py -k 'neutral or change_no_reduction'",
    ),
    Break(
        "report-answer",
        "native/src/engine/report/deadlock.c",
        "    deadlock->is_open = 0;\n    deadlock->question = 0;",
        "    deadlock->is_open = 0;",
        "A job is ended as deadlocked by an answer from before it went on.",
        "tests/native/test_deadlock_judge.py",
    ),
    Break(
        "report-wrong-rank",
        "native/src/engine/report/stall.c",
        "            return team->job_rank[rank];",
        "            return rank;",
        "A stall in a process set is blamed on the rank with the number that the late one has in the set.",
        "tests/native/test_stalls.py -k in_the_middle",
    ),
    Break(
        "gpu-reducescatter-rows",
        "native/src/engine/gpu/staged.c",
        "bytes[i] = (size_t)all / (size_t)tensor->shape[0] * rows;",
        "bytes[i] = (size_t)all / (size_t)request->team_size;",
        "A reducescatter on GPUs whose rows do not divide evenly leaves the last rows unwritten.",
        "tests/ranks/test_ranks_gpu.py -k check_of_real",
    ),
    Break(
        "context-fork",
        "native/src/context.c",
        "    } else if (!hr_owner_is_here(&context->owner)) {",
        "    } else if (0) {",
        "A forked child that calls horo hangs, or disturbs the job of its parent.",
        "tests/native/test_events.py -k forked",
    ),
    Break(
        "transport-descriptor",
        "native/src/transport/tcp.c",
        "(void)close(tcp->links[i].fd);",
        "(void)shutdown(tcp->links[i].fd, SHUT_RDWR);",
        "Each init() and shutdown() on several hosts leaves descriptors open, until there are none left.",
        "tests/native/test_link.py -k no_descriptor",
    ),
    # ---- Python ----
    Break(
        "torch-sparse-average",
        "horo/torch/optimizer/parameter_state.py",
        "values.mul_(self.scale)",
        "values",
        "The average of a sparse gradient is its sum.",
        "tests/ranks/test_ranks_optimizer.py -k sparse",
    ),
    Break(
        "torch-summed-twice",
        "horo/torch/optimizer/at_backward.py",
        "state.summed = None if grad is None else (weakref.ref(grad), self.membership.size)",
        "state.summed = None",
        "With op=Sum, a backward onto gradients that are summed already counts those of other ranks twice.",
        "tests/ranks/test_ranks_backward.py -k 'summed_once or another_dtype or replaced or set_by_hand'",
    ),
    Break(
        "torch-postscale",
        "horo/torch/ops/allreduce.py",
        'postscale=factor_of(postscale_factor, kind, "postscale_factor")',
        'postscale=factor_of(prescale_factor, kind, "postscale_factor")',
        "postscale_factor has no effect, and prescale_factor counts twice.",
        "tests/ranks/test_ranks_ops.py -k factors",
    ),
    Break(
        "torch-buffers-after-join",
        "horo/torch/functions/broadcast_state.py",
        "postscale=scale, team=team), in_place=True)",
        "team=team), in_place=True)",
        "average_buffers() beside a rank that has joined gives means that are too small.",
        "tests/ranks/test_ranks_join.py -k everything_that_makes_sense",
    ),
    Break(
        "torch-cache-dtype",
        "horo/torch/engine/request_cache.py",
        "            and tensor.dtype is dtype\n",
        "",
        "A call that repeats another with a tensor of another dtype sends its bytes as the first one's dtype.",
        "tests/ranks/test_ranks_repeats.py",
    ),
    Break(
        "torch-batch-norm-unbiased",
        "horo/torch/nn/sync_batch_norm.py",
        "unbiased = whole.variance * (whole.values / (whole.values - 1))",
        "unbiased = whole.variance",
        "Running variances of SyncBatchNorm are too small, and evaluation is off.",
        "tests/ranks/test_ranks_sync_batch_norm.py -k one_process",
    ),
    Break(
        "bootstrap-links",
        "horo/bootstrap/host/grouping.py",
        "for distance in distances for sign in (1, -1)",
        "for distance in distances for sign in (1,)",
        "init() on three hosts and more ends with a missing connection.",
        "tests/python/test_bootstrap_grouping.py",
    ),
    Break(
        "bootstrap-relayed",
        "horo/bootstrap/auth/handshake.py",
        "if (address, port) != self._reached:",
        "if address != self._reached[0]:",
        "A process of another user on this host can pass a rank's connection on through a port of its own.",
        "tests/security/test_security_relay.py",
    ),
    Break(
        "bootstrap-store-unless",
        "horo/bootstrap/store/server.py",
        "if waiter.unless in self._values:",
        "if waiter.unless and waiter.unless in self._values and waiter.position == len(waiter.keys):",
        "Where a rank fails while the job starts, the others wait for the whole start timeout.",
        "tests/python/test_store.py -k unless",
    ),
    Break(
        "bootstrap-secret-shown",
        "horo/config/variable.py",
        'shown = f" ({len(text)} characters)" if self.secret else f"={text!r}"',
        'shown = f"={text!r}"',
        "A message about a secret that is too short has the secret in it.",
        "tests/python/test_config.py -k secret",
    ),
    Break(
        "runner-max-slots",
        "runner/hosts.py",
        "else (earlier.max_slots or 0) + (host.max_slots or 0)",
        "else earlier.max_slots",
        "A host that a host file names twice takes fewer ranks than its max_slots say.",
        "tests/runner/test_hosts.py",
    ),
    Break(
        "runner-signal-code",
        "runner/job/report.py",
        "return 128 + cause.signal if cause.signal else cause.code",
        "return cause.signal or cause.code",
        "hororun ends with 9 instead of 137 where a rank was killed.",
        "tests/runner/test_failures.py",
    ),
    Break(
        "runner-carriage-return",
        "runner/job/output.py",
        "pieces.append(self._take(update=not newline))",
        "pieces.append(self._take(update=True))",
        "A line that ends in CR LF between two reads is overwritten by the next one.",
        "tests/runner/test_output.py",
    ),
    Break(
        "runner-cross-rank",
        "runner/job/placement.py",
        "columns = [other for other, others in enumerate(counts) if others > local_rank]",
        "columns = [other for other, others in enumerate(counts) if others]",
        "cross_size() counts hosts that have no rank with this local rank.",
        "tests/runner/test_hosts.py",
    ),
    Break(
        "timeline-offset",
        "horo/timeline/clocks.py",
        "return o0 + (o1 - o0) * (time_us - t0) / (t1 - t0)",
        "return o0",
        "In a merged timeline of a long job, ranks of other hosts drift by milliseconds.",
        "tests/python/test_timeline_merge.py -k faster",
    ),
    Break(
        "horovod-pythonpath",
        "horo/horovod/environment.py",
        "os.pathsep.join([_FOLDER, *others])",
        "_FOLDER",
        "Under Horovod's names, modules that PYTHONPATH had are not found.",
        "tests/runner/test_horovod_scripts.py -k pythonpath",
    ),
)
