"""Collectives by NCCL on tensors of GPUs, also in process sets that overlap: launches have one order on all ranks.

Doubles of the CUDA driver and of NCCL stand for both.
"""

import random
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from device_group import Gpu, Nccl, OnGpu, on_gpu
from ranks import SUM, Rank, Written, on_ranks, run_ranks, wait_for

from horo.core import context
from horo.errors import GroupError, StalledError

MIN, HALF = context.REDUCE_OPS["min"], context.DTYPES["float16"]
HOSTS = [(2,), (1, 1), (3,), (2, 1)]


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("length", [0, 1, 1000, 70_001])
def test_nccl_takes_values_behind_the_programs_work_and_it_goes_on_behind_the_result(
    gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], length: int
) -> None:
    """No value passes the host, and no thread waits for the GPU: the call is over while the GPU stands still."""
    size = sum(hosts)

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        array = np.full(length, rank.rank, np.float32)
        gate = gpu.hold_stream(own.stream)
        gpu.add_floats(own.stream, gpu.put(array), array.nbytes, 1.0)
        handle, source, target = own.submit("allreduce", "x", array, reduce_op=SUM)
        own.finish(handle)
        gpu.add_floats(own.stream, target, array.nbytes, 0.5)
        np.testing.assert_array_equal(gpu.get(source, array), array)
        gpu.open(gate)
        gpu.synchronize(own.stream)
        np.testing.assert_array_equal(gpu.get(source, array), np.full(length, size * (size - 1) / 2 + 0.5))

    run_ranks(body, hosts)
    assert gpu.counts()["pinned_ever"] == 0
    assert nccl.counts()["launched"] == (size if length else 0)
    assert (nccl.counts()["destroys"], nccl.counts()["aborts"]) == (size, 0)


@pytest.mark.parametrize("op", ["sum", "average", "min", "max", "product"])
@on_ranks((2,), (1, 1, 1))
def test_every_reduction_of_every_dtype_of_nccl(rank: Rank, gpu: Gpu, nccl: Nccl, op: str) -> None:
    """Averages of integers are staged: NCCL divides what it sums as floats only."""
    size = rank.size
    numbers = [np.arange(50) % 5 * 4 + 4 * (r + 1) for r in range(size)]  # of which an average is exact in all dtypes
    if op == "product":
        numbers = [each // 4 for each in numbers]
    integers = ["uint8", "int8", "int32", "int64"]
    expected = {
        "sum": sum(numbers), "average": sum(numbers) / size, "min": np.min(numbers, axis=0),
        "max": np.max(numbers, axis=0), "product": np.prod(numbers, axis=0),
    }[op]  # fmt: skip
    chosen = [*(integers if op != "product" else integers[2:]), "float16", "float32", "float64"]
    own = on_gpu(rank, gpu, nccl)
    for name in chosen:
        values = own.allreduce(numbers[rank.rank].astype(name), name, op)
        tolerance = 2e-3 if name == "float16" and op == "average" else 1e-6
        np.testing.assert_allclose(values.astype(float), expected.astype(name), rtol=tolerance, err_msg=name)
    rank.meet()
    assert nccl.counts()["launched"] == size * (3 if op == "average" else len(chosen))


@on_ranks((3, 1))
def test_factors_are_one_premultiplied_sum(rank: Rank, gpu: Gpu, nccl: Nccl) -> None:
    own = on_gpu(rank, gpu, nccl)
    for dtype in ("float16", "float32", "float64"):
        mine = np.full(9, rank.rank + 1, dtype)
        assert own.allreduce(mine, dtype, "average", prescale=2.0, postscale=8.0).tolist() == [40.0] * 9
    bits = np.array([0x3F80, 0x4000], np.int16)  # 1 and 2
    scaled = {"dtype": context.DTYPES["bfloat16"], "prescale": 0.5, "postscale": 3.0}
    assert own.allreduce(bits, "bfloat16", **scaled).view(np.uint16).tolist() == [0x40C0, 0x4140]  # 6 and 12
    rank.meet()
    assert nccl.counts()["launched"] == 16


CALLS = 900
"""The program's own stream has room for as many marks; NCCL's has not for what they take."""


@pytest.mark.parametrize("op", ["allreduce", "reducescatter"])
@on_ranks((3,), cycle_time_us=200_000)
def test_a_batch_of_many_calls_is_one_launch(rank: Rank, gpu: Gpu, nccl: Nccl, op: str) -> None:
    """A reduction of rows that cannot be equally many is a call for each rank."""
    own = on_gpu(rank, gpu, nccl)
    mine = np.arange(4, dtype=np.float32)
    output = np.zeros(2 if rank.rank == 0 else 1, np.float32) if op == "reducescatter" else np.zeros_like(mine)
    begun = [own.submit(op, f"x{n}", mine, output, reduce_op=SUM) for n in range(CALLS)]
    for handle, _, target in begun:
        own.finish(handle)
        first = 0 if op == "allreduce" or rank.rank == 0 else rank.rank + 1
        gpu.synchronize(own.stream)
        assert gpu.get(target, output).tolist() == (mine * 3)[first : first + len(output)].tolist()
    rank.meet()
    assert nccl.counts()["launched"] == CALLS * 3 * (3 if op == "reducescatter" else 1)


@on_ranks(*HOSTS)
def test_broadcast_and_reducescatter(rank: Rank, gpu: Gpu, nccl: Nccl) -> None:
    """The rows of a reduce-scatter need not be equally many."""
    size, own = rank.size, on_gpu(rank, gpu, nccl)
    for root in range(size):
        got = own.run("broadcast", f"b{root}", np.full(3, 10 * rank.rank, np.int16), root_rank=root)
        np.testing.assert_array_equal(got, np.full(3, 10 * root))
    got = own.run("broadcast", "elsewhere", np.full(3, rank.rank, np.int16), np.zeros(3, np.int16))
    np.testing.assert_array_equal(got, np.zeros(3))
    for rows in (size, size + 1, 1, 0, 2 * size):
        mine = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)
        wanted = np.array_split(mine * (size * (size + 1) / 2), size)[rank.rank]
        got = own.run("reducescatter", f"r{rows}", mine * (rank.rank + 1), np.zeros_like(wanted), reduce_op=SUM)
        np.testing.assert_array_equal(got, wanted)
    assert gpu.counts()["pinned_ever"] == 0


V = np.arange(8) % 3 + 1
"""Of rank 0; rank 1 has twice as much."""
STAGED = {
    "a dtype that it has not": ("allreduce", np.int16, {"reduce_op": SUM}, 3 * V),
    "bool": ("allreduce", np.bool_, {"reduce_op": MIN}, V > 0),
    "an average of integers": ("allreduce", np.int32, {"reduce_op": context.REDUCE_OPS["average"]}, 3 * V // 2),
    "a factor of integers": ("reducescatter", np.int32, {"reduce_op": SUM, "postscale": 3.0}, 9 * V),
    "a factor beside a minimum": ("allreduce", np.float32, {"reduce_op": MIN, "prescale": 3.0}, 3 * V),
    "values that travel as float16": ("allreduce", np.float32, {"reduce_op": SUM, "wire_dtype": HALF}, 3 * V),
    "a product of complex numbers": (
        "allreduce",
        np.complex64,
        {"reduce_op": context.REDUCE_OPS["product"]},
        2 * V * V,
    ),
    "Adasum": ("allreduce", np.float32, {"reduce_op": context.REDUCE_OPS["adasum"]}, 1.5 * V),
    "allgather": ("allgather", np.float32, {}, np.concatenate([V, 2 * V])),
    "alltoall": ("alltoall", np.float32, {"splits": (4, 4)}, np.concatenate([V[:4], 2 * V[:4], V[4:], 2 * V[4:]])),
}
"""What NCCL cannot do as horo means it, or with results whose size only all ranks together know."""


@pytest.mark.parametrize("case", STAGED.values(), ids=STAGED)
@on_ranks((1, 1))
def test_what_nccl_lacks_is_staged(
    rank: Rank, gpu: Gpu, nccl: Nccl, case: tuple[str, type, dict[str, Any], np.ndarray]
) -> None:
    op, dtype, options, expected = case
    own = on_gpu(rank, gpu, nccl)
    mine = (V * (rank.rank + 1)).astype(dtype)
    output = mine[:4].copy() if op == "reducescatter" else None
    if op in ("allgather", "alltoall"):
        found = own.gathered(own.submit(op, "x", mine, **options)[0], mine)
    else:
        found = own.run(op, "x", mine, output, **options)
    if op in ("reducescatter", "alltoall"):  # each rank has a part
        expected = np.split(expected, 2)[rank.rank]
    np.testing.assert_array_equal(found, expected.astype(dtype))
    rank.meet()
    assert nccl.counts()["launched"] == 0
    assert gpu.counts()["pinned_ever"] > 0


ONES = np.ones(5, np.float32)
OF_THREE = ([3], [2, 1], [1, 1, 1])
SETS = ([0, 1], [1, 2], [0, 2])


def add_teams(own: OnGpu) -> list[int]:
    return [own.add_team(ranks) for ranks in SETS]


def begin(own: OnGpu, name: str, team: int = 0, array: np.ndarray = ONES) -> tuple[int, int]:
    handle, source, _ = own.submit("allreduce", name, array, reduce_op=SUM, team=team)
    return handle, source


def teams_of(rank: Rank, teams: Sequence[int]) -> list[tuple[int, int]]:
    """Those of a rank, with the number of members, and the world."""
    return [(0, 3), *[(team, len(ranks)) for team, ranks in zip(teams, SETS, strict=True) if rank.rank in ranks]]


@pytest.mark.parametrize("seed", range(6))
@on_ranks(*OF_THREE)
def test_launches_of_all_teams_come_in_one_order(rank: Rank, gpu: Gpu, nccl: Nccl, seed: int) -> None:
    """Ranks submit to the world and to sets that overlap in a circle, each in an order of its own."""
    own = on_gpu(rank, gpu, nccl)
    mine = teams_of(rank, add_teams(own))
    chance = random.Random(100 * seed + rank.rank)
    for step in range(8):
        calls = [(team, size, f"{step}:{i}") for team, size in mine for i in range(3)]
        chance.shuffle(calls)
        begun = [(*begin(own, name, team, ONES * (team + 1)), size * (team + 1)) for team, size, name in calls]
        chance.shuffle(begun)
        for handle, source, total in begun:
            own.finish(handle)
            gpu.synchronize(own.stream)
            assert gpu.get(source, ONES).tolist() == [total] * 5
    rank.meet()
    assert nccl.counts()["launched"] == 8 * 3 * (3 + 3 * 2)


@pytest.mark.parametrize("hosts", OF_THREE, ids=str)
def test_the_communicator_of_a_set_that_is_removed_ends_in_order(gpu: Gpu, nccl: Nccl, hosts: list[int]) -> None:
    """Its kernels are still to run; nobody waits for that, and a set of the same number has one of its own."""

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        for step in range(4):
            teams = add_teams(own)
            mine = teams_of(rank, teams)
            gate = gpu.hold_stream(own.stream)
            begun = [(*begin(own, "x", team), size) for team, size in mine]
            for handle, _, _ in begun:
                own.finish(handle)
            for team in teams:
                rank.context.remove_team(team)
            gpu.open(gate)
            gpu.synchronize(own.stream)
            for _, source, size in begun:
                assert gpu.get(source, ONES).tolist() == [size] * 5
            if step % 2 == 0:
                wait_for(lambda step=step: nccl.counts()["destroys"] >= 6 * (step + 1))

    run_ranks(body, hosts)
    assert (nccl.counts()["destroys"], nccl.counts()["aborts"]) == (4 * 6 + 3, 0)


def await_still(own: OnGpu) -> None:
    """Until the calls that have been launched have not become more for 40 looks."""
    seen = [(-1, 0)]

    def look() -> bool:
        now = own.context.counters()["batches"]
        seen.append((now, seen[-1][1] + 1 if now == seen[-1][0] else 0))
        return seen[-1][1] >= 40

    wait_for(look)


@pytest.mark.parametrize(("late", "cycle_time_us"), [(0, 0), (1, 50_000)])
@on_ranks((2, 1), "cycle_time_us")
def test_what_is_pending_on_a_gpu_that_is_late_has_a_bound(rank: Rank, gpu: Gpu, nccl: Nccl, late: int) -> None:
    """In many small batches or few large ones; no thread of horo's waits in the driver for a stream that is full."""
    own = on_gpu(rank, gpu, nccl)
    mine = teams_of(rank, add_teams(own))
    for team, _ in mine:
        own.allreduce(ONES, "first", team=team)
    gate = gpu.hold_stream(own.stream) if rank.rank == late else None
    order = mine if rank.rank else mine[::-1]
    begun = [(*begin(own, f"x{n}", team), size) for n in range(CALLS // 3) for team, size in order]
    there = np.ones(3, np.float32)
    behind = rank.submit("allreduce", "host", [there], reduce_op=SUM)
    await_still(own)
    if gate is not None:
        gpu.open(gate)
    rank.finish(behind)
    assert there.tolist() == [3.0] * 3
    for handle, _, _ in begun:
        own.finish(handle)
    gpu.synchronize(own.stream)
    for _, source, size in begun:
        assert gpu.get(source, ONES).tolist() == [size] * 5
    rank.meet()
    assert gpu.waits() == 0


@on_ranks((2,), (1, 1), stall_warning_ms=500, stall_shutdown_ms=1000)
def test_a_stall_for_lack_of_room_blames_no_other_rank(rank: Rank, gpu: Gpu, nccl: Nccl, written: Written) -> None:
    own = on_gpu(rank, gpu, nccl)
    own.allreduce(ONES, "first")
    rank.barrier()
    gate = gpu.hold_stream(own.stream) if rank.rank == 0 else None
    begun: list[int] = []
    with pytest.raises(StalledError) as caught:
        for n in range(CALLS):  # which on a busy machine takes longer than the stall
            begun.append(begin(own, f"x{n}")[0])
        own.context.wait(begun[-1])
    assert not re.search(r"rank [01] \(", str(caught.value)), str(caught.value)
    if gate is not None:
        gpu.open(gate)
    for handle in begun:
        with suppress(GroupError):
            own.context.wait(handle)
        own.context.release(handle)
    gpu.synchronize(own.stream)
    rank.meet()
    assert "waiting for its own GPU in the middle of an operation" in written()
