"""Thousands of calls by NCCL while a GPU stands still: what is pending on NCCL's stream has a bound, so no thread of
horo's waits in the driver for a stream that is full.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from device_group import SUM, Gpu, Nccl, OnGpu, on_gpu
from ranks import Group, Rank, recorded_stderr, wait_for
from test_nccl_teams import add_teams
from test_teams import Links, hosts_of

from horo.errors import GroupError, PeerLostError, StalledError

ONES = np.ones(5, np.float32)
CALLS = 900
"""The program's own stream has room for as many marks; NCCL's has not for what they take."""


def begin(own: OnGpu, name: str, array: np.ndarray = ONES, **options: Any) -> tuple[int, int]:
    handle, _, target = own.submit("allreduce", name, array, **{"reduce_op": SUM, **options})
    return handle, target


def is_still(*, looks: int = 40) -> Callable[[OnGpu], bool]:
    """Whether the calls that have been launched have not become more for so many looks."""
    seen = [(-1, 0)]

    def look(own: OnGpu) -> bool:
        now = own.context.counters()["batches"]
        seen.append((now, seen[-1][1] + 1 if now == seen[-1][0] else 0))
        return seen[-1][1] >= looks

    return look


def await_still(own: OnGpu) -> None:
    look = is_still()
    wait_for(lambda: look(own))


@pytest.fixture(autouse=True)
def no_thread_has_waited_in_the_driver(gpu: Gpu) -> Iterator[None]:
    yield
    assert gpu.waits() == 0


# ---- A rank is gone ----


@pytest.mark.parametrize("hosts", [(2,), (1, 1), (3,), (2, 1)], ids=str)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_rank_dies_while_calls_stand_behind_its_kernel(
    gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], victim: int, one_by_one: bool
) -> None:
    """Its kernel hangs, so those of the others wait for it; they submit until the stream has no room, and go on to."""
    there = threading.Barrier(sum(hosts))

    def submit_all(own: OnGpu) -> None:
        handles = []
        try:
            for number in range(2 * CALLS):
                handles.append(begin(own, f"x{number}")[0])
                if one_by_one:
                    own.context.wait(handles[-1])
        except GroupError:
            pass
        finally:
            for handle in handles:
                with suppress(GroupError):  # one that was launched before is done
                    own.context.wait(handle)
                own.context.release(handle)

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        own.allreduce(ONES, "first")
        if rank.rank == victim:
            nccl.fail("hang", victim)
        thread = threading.Thread(target=submit_all, args=(own,))
        thread.start()
        await_still(own)
        there.wait(60)
        if rank.rank == victim:
            group.kill(victim)
            own.context.end("its death")  # which its engine, that lives on, does not know of by itself
        thread.join(60)
        assert not thread.is_alive()
        with pytest.raises(PeerLostError, match="gone|this rank" if rank.rank == victim else f"^rank {victim} "):
            own.allreduce(ONES, "later")
        gpu.synchronize(own.stream)
        own.close()

    with recorded_stderr(), Group(hosts) as group:
        group.run(body)


# ---- A GPU that is late ----


def behind_a_gate(gpu: Gpu, own: OnGpu, is_late: bool, submit: Callable[[], Any]) -> Any:
    """What the function begins while this rank's GPU stands still, if it is late; it goes on when nothing moves."""
    gate = gpu.hold(own.stream) if is_late else None
    begun = submit()
    await_still(own)
    if gate is not None:
        gpu.open(gate)
    return begun


@pytest.mark.parametrize("hosts", [(2,), (1, 1), (3,)], ids=str)
@pytest.mark.parametrize("cycle_us", [0, 50_000])
def test_a_gpu_that_is_late_comes_to_all_results(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], cycle_us: int) -> None:
    """In many small batches or few large ones."""

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        own.allreduce(ONES, "first")
        arrays = [np.full(3, number % 50, np.float32) for number in range(CALLS)]
        begun = behind_a_gate(
            gpu,
            own,
            rank.rank == 0,
            lambda: [begin(own, f"x{n}", a) for n, a in enumerate(arrays)],
        )
        for handle, _ in begun:
            own.finish(handle)
        gpu.synchronize(own.stream)
        for (_, target), array in zip(begun, arrays, strict=True):
            np.testing.assert_array_equal(gpu.get(target, array), array * sum(hosts))
        own.close()

    with Group(hosts, cycle_time_us=cycle_us) as group:
        group.run(body)


@pytest.mark.parametrize("late", [0, 1])
def test_process_sets_that_overlap_come_to_all_results(gpu: Gpu, nccl: Nccl, late: int) -> None:
    sets = [[0, 1], [1, 2], [0, 2]]
    links = Links(hosts_of([2, 1]))

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        teams = [
            0,
            *(team for team, ranks in zip(add_teams(own, links, sets), sets, strict=True) if rank.rank in ranks),
        ]
        for team in teams:
            own.allreduce(ONES, "first", team=team)

        def submit() -> list[tuple[int, int, int]]:
            order = teams if rank.rank else teams[::-1]
            return [(team, *begin(own, f"x{n}", team=team)) for n in range(CALLS // 4) for team in order]

        begun = behind_a_gate(gpu, own, rank.rank == late, submit)
        for _, handle, _ in begun:
            own.finish(handle)
        gpu.synchronize(own.stream)
        for team, _, target in begun:
            assert gpu.get(target, ONES).tolist() == [3.0 if team == 0 else 2.0] * 5
        own.close()

    with Group((2, 1)) as group:
        group.run(body)


@pytest.mark.parametrize("op", ["allreduce", "reducescatter"])
def test_a_batch_of_thousands_of_calls(gpu: Gpu, nccl: Nccl, op: str) -> None:
    """A reduction of rows that cannot be equally many is a call for each rank."""
    size = 3

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        mine = np.arange(4, dtype=np.float32)
        output = np.zeros(2 if rank.rank == 0 else 1, np.float32) if op == "reducescatter" else np.zeros_like(mine)
        begun = [own.submit(op, f"x{n}", mine, output, reduce_op=SUM) for n in range(CALLS)]
        for handle, _, target in begun:
            own.finish(handle)
            first = 0 if op == "allreduce" or rank.rank == 0 else rank.rank + 1
            gpu.synchronize(own.stream)
            assert gpu.get(target, output).tolist() == (mine * size)[first : first + len(output)].tolist()
        own.close()

    with Group((size,), cycle_time_us=200_000) as group:
        group.run(body)


# ---- What waits with it ----


def test_what_is_in_host_memory_behind_them_waits_and_then_goes_on(gpu: Gpu, nccl: Nccl) -> None:
    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        own.allreduce(ONES, "first")
        gate = gpu.hold(own.stream)
        begun = [begin(own, f"x{n}") for n in range(CALLS)]
        there = np.ones(3, np.float32)
        handle = rank.submit("allreduce", "host", [there], reduce_op=SUM)
        await_still(own)
        gpu.open(gate)
        rank.finish(handle)
        assert there.tolist() == [2.0] * 3
        for each, _ in begun:
            own.finish(each)
        gpu.synchronize(own.stream)
        own.close()

    with Group((2,)) as group:
        group.run(body)


@pytest.mark.parametrize("hosts", [(2,), (1, 1)], ids=str)
def test_a_stall_for_lack_of_room_blames_no_other_rank(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...]) -> None:
    gates: list[ctypes.c_int] = []

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        own.allreduce(ONES, "first")
        rank.barrier()
        if rank.rank == 0:
            gates.append(gpu.hold(own.stream))
        begun: list[int] = []
        with pytest.raises(StalledError) as caught:
            for n in range(CALLS):  # which on a busy machine takes longer than the stall
                begun.append(begin(own, f"x{n}")[0])
            own.context.wait(begun[-1])
        assert "rank 0 (" not in str(caught.value), str(caught.value)
        assert "rank 1 (" not in str(caught.value), str(caught.value)
        if rank.rank == 0:
            gpu.open(gates[0])
        for handle in begun:
            with suppress(GroupError):
                own.context.wait(handle)
            own.context.release(handle)
        gpu.synchronize(own.stream)
        own.close()

    with recorded_stderr() as errors, Group(hosts, stall_warning_ms=500, stall_shutdown_ms=1000) as group:
        group.run(body)
        assert "waiting for its own GPU in the middle of an operation" in errors()


def test_a_rank_leaves_while_its_calls_wait_for_room(gpu: Gpu, nccl: Nccl) -> None:
    gates = []

    def body(rank: Rank) -> tuple[OnGpu, list[int]]:
        own = on_gpu(rank, gpu, nccl)
        own.allreduce(ONES, "first")
        gates.append(gpu.hold(own.stream))
        begun = [begin(own, f"x{n}")[0] for n in range(CALLS)]
        await_still(own)
        return own, begun

    group = Group((2,))
    owners = group.run(body)
    group.destroy_while(lambda: gpu.open(*gates))
    for own, _ in owners:
        own.close()
