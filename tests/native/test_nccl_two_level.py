"""An allreduce of tensors on GPUs in two levels: by NCCL in each host, through host memory between hosts."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from device_group import SUM, Gpu, Nccl, OnGpu, on_gpu
from nccl_checks import DTYPES, reduces_every_dtype, sums_bfloat16
from ranks import Group, Rank, recorded_stderr
from test_join import join
from test_nccl_pack import reduced
from test_nccl_teams import add_teams
from test_teams import Links, hosts_of

HOSTS = [(2, 2), (3, 3), (2, 1), (1, 3), (3, 2), (2, 1, 2)]


def in_two(rank: Rank, gpu: Gpu, nccl: Nccl, **options: Any) -> OnGpu:
    return on_gpu(rank, gpu, nccl, two_levels=True, **options)


def calls_of(hosts: tuple[int, ...], length: int) -> int:
    """How many calls of NCCL an allreduce of so many values takes, of all ranks together."""
    owners = min(hosts)
    parts = (length >= owners) + (length % owners > 0)
    parts_elsewhere = owners * (length >= owners) + (length % owners > 0)
    return sum(2 * size * (parts if size == owners else parts_elsewhere) for size in hosts)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("length", [0, 1, 2, 1000, 70_001])
def test_each_host_reduces_first_and_owners_exchange_their_parts(
    gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], length: int
) -> None:
    """Large ones in more pieces than there are slots."""
    size = sum(hosts)

    def body(rank: Rank) -> list[np.ndarray]:
        own = in_two(rank, gpu, nccl)
        mine = np.arange(length, dtype=np.float32) * (rank.rank + 1)
        elsewhere = own.run("allreduce", "y", mine, np.zeros_like(mine), reduce_op=SUM)
        found = [elsewhere, own.allreduce(mine)]
        own.close()
        return found

    with Group(hosts, segment_bytes=1 << 12) as group:
        results = group.run(body)
    expected = np.arange(length, dtype=np.float32) * (size * (size + 1) / 2)
    for found in results:
        for values in found:
            np.testing.assert_array_equal(values, expected)
    assert nccl.counts()["launched"] == 2 * calls_of(hosts, length)
    assert (gpu.counts()["pinned_ever"] > 0) == (length > 0)
    assert (nccl.counts()["destroys"], nccl.counts()["aborts"]) == (2 * size, 0)


@pytest.mark.parametrize("hosts", [(3,), (1, 1)], ids=str)
def test_where_there_is_one_level_nccl_does_it_as_ever(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...]) -> None:
    def body(rank: Rank) -> list[float]:
        own = in_two(rank, gpu, nccl)
        found: list[float] = own.allreduce(np.ones(3, np.float32)).tolist()
        own.close()
        return found

    with Group(hosts) as group:
        assert group.run(body) == [[float(sum(hosts))] * 3] * sum(hosts)
    assert nccl.counts()["launched"] == nccl.counts()["destroys"] == sum(hosts)
    assert gpu.counts()["pinned_ever"] == 0


@pytest.mark.parametrize("hosts", [(2, 2), (2, 1), (3,)], ids=str)
@pytest.mark.parametrize("asking", [[0], [1], [0, 1], [1, 2]], ids=str)
def test_where_only_some_ranks_ask_for_it_nccl_reduces_among_all_and_it_is_said_why(
    gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], asking: list[int]
) -> None:
    one, other = (0, min({0, 1, 2} - set(asking))) if 0 in asking else (1, 0)
    words = f"NCCL reduces among all ranks, not inside hosts first: rank {one} asks for that, and rank {other} does not"

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl, two_levels=rank.rank in asking)
        for number in range(3):
            assert own.allreduce(np.ones(3, np.float32), f"x{number}").tolist() == [sum(hosts)] * 3
        own.close()

    with recorded_stderr() as text:
        with Group(hosts, log_level=3) as group:
            group.run(body)
        assert text().count(words) == text().count("inside hosts first") == int(len(hosts) > 1)
    assert nccl.counts()["launched"] == 3 * sum(hosts)
    assert gpu.counts()["pinned_ever"] == 0
    assert (nccl.counts()["destroys"], nccl.counts()["aborts"]) == (sum(hosts), 0)


def test_each_team_has_it_where_all_its_ranks_ask_for_it(gpu: Gpu, nccl: Nccl) -> None:
    links = Links(hosts_of([2, 2]))
    ones = np.ones(4, np.float32)

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl, two_levels=rank.rank < 3)
        all_ask, one_does_not = add_teams(rank, links, [[0, 1, 2], [1, 2, 3]])
        assert own.allreduce(ones).tolist() == [4.0] * 4
        if rank.rank < 3:
            assert own.allreduce(ones, "y", team=all_ask).tolist() == [3.0] * 4
        if rank.rank > 0:
            assert own.allreduce(ones, "z", team=one_does_not).tolist() == [3.0] * 4
        own.close()

    with recorded_stderr() as text:
        with Group([2, 2], log_level=3, teams=3) as group:
            group.run(body)
        words = "not inside hosts first: rank {} asks for that, and rank 3 does not"
        assert f"NCCL reduces among all ranks, {words.format(0)}" in text()
        assert f"NCCL reduces among all ranks of process set 2 (ranks 1, 2, 3), {words.format(1)}" in text()
        assert text().count("inside hosts first") == 2
    assert nccl.counts()["launched"] == 4 + calls_of((2, 1), 4) + 3


@pytest.mark.parametrize("lacking", [0, 1, 3])
def test_a_rank_without_nccl_has_all_staged(gpu: Gpu, nccl: Nccl, lacking: int) -> None:
    def body(rank: Rank) -> None:
        own = OnGpu(rank, gpu, [nccl.path] if rank.rank != lacking else [], device=rank.rank, two_levels=True)
        for number in range(3):
            assert own.allreduce(np.ones(3, np.float32), f"x{number}").tolist() == [4.0] * 3
        own.close()

    with recorded_stderr() as text:
        with Group((2, 2), log_level=3) as group:
            group.run(body)
        assert text().count(f"host memory, not by NCCL: rank {lacking} cannot use NCCL: no usable NCCL: ") == 1
    assert nccl.counts()["launched"] == 0


@pytest.mark.parametrize("away", range(4))
def test_a_rank_that_joins_before_it_has_used_its_gpu_has_all_staged_until_all_have_joined(
    gpu: Gpu, nccl: Nccl, away: int
) -> None:
    def body(rank: Rank) -> None:
        if rank.rank == away:
            join(rank)
        own = in_two(rank, gpu, nccl)
        if rank.rank != away:
            assert own.allreduce(np.ones(3, np.float32)).tolist() == [3.0] * 3
            join(rank)
        assert own.allreduce(np.ones(4, np.float32), "y").tolist() == [4.0] * 4
        own.close()

    with recorded_stderr() as text:
        with Group((2, 2), log_level=3) as group:
            group.run(body)
        assert text().count(f"until all ranks have joined: rank {away} has joined") == 1
    assert nccl.counts()["launched"] == calls_of((2, 2), 4)


@pytest.mark.parametrize("hosts", [(2, 2), (1, 2)], ids=str)
@pytest.mark.parametrize("op", ["sum", "average", "min", "max", "product"])
def test_every_reduction_of_every_dtype_of_nccl(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], op: str) -> None:
    chosen = reduces_every_dtype(hosts, op, lambda rank: in_two(rank, gpu, nccl))
    packed = 0 if op != "average" else sum(not name.startswith("float") for name in chosen)
    assert nccl.counts()["launched"] == calls_of(hosts, 50) * (len(chosen) - packed) + sum(hosts) * packed


def test_bfloat16_is_summed_and_scaled(gpu: Gpu, nccl: Nccl) -> None:
    for found in sums_bfloat16((2, 2), lambda rank: in_two(rank, gpu, nccl)):
        assert found == [0x4080, 0x4100, 0x40C0, 0x4140]  # 4, 8, 6 and 12


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
def test_all_ranks_have_the_same_bits(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], name: str) -> None:
    values = [np.random.default_rng(r).standard_normal(30_011).astype(name) for r in range(sum(hosts))]

    def body(rank: Rank) -> np.ndarray:
        own = in_two(rank, gpu, nccl)
        found = own.allreduce(values[rank.rank], "x", "average")
        own.close()
        return found

    with Group(hosts, segment_bytes=1 << 12) as group:
        results = group.run(body)
    mean = np.mean(np.array(values, np.float64), axis=0)
    np.testing.assert_allclose(results[0], mean, atol={"float16": 5e-3, "float32": 1e-6, "float64": 1e-14}[name])
    for found in results:
        assert found.tobytes() == results[0].tobytes()


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_a_group_of_many_dtypes_is_one_launch_at_each_end(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...]) -> None:
    size = sum(hosts)
    chance = random.Random(size)
    shapes = [(chance.randrange(1500), chance.choice(DTYPES[2:])) for _ in range(12)]

    def body(rank: Rank) -> None:
        own = in_two(rank, gpu, nccl)
        arrays = [(np.arange(n) % 7 + rank.rank).astype(name) for n, name in shapes]
        for (n, name), found in zip(shapes, reduced(own, "group", arrays), strict=True):
            np.testing.assert_array_equal(found, (np.arange(n) % 7 * size + size * (size - 1) // 2).astype(name))
        own.close()

    with Group(hosts, segment_bytes=1 << 12) as group:
        group.run(body)
    assert nccl.counts()["launched"] == sum(calls_of(hosts, n) for n, _ in shapes)


@pytest.mark.parametrize("refusing", [0, 1 << 0, 1 << 3], ids=["packed", "rank 0", "rank 3"])
def test_what_kernels_pack_is_nccls_among_all_ranks_or_staged(gpu: Gpu, nccl: Nccl, refusing: int) -> None:
    """And so is what shares a group with it; whether all have the kernels says nothing of what NCCL takes as it is."""
    gpu.refuse_kernels(refusing)
    ones = np.ones(9, np.float32)

    def body(rank: Rank) -> None:
        own = in_two(rank, gpu, nccl)
        for number in range(3):
            assert reduced(own, f"plain {number}", [ones])[0].tolist() == [4.0] * 9
            assert reduced(own, f"half {number}", [ones], half="float16")[0].tolist() == [4.0] * 9
            assert reduced(own, f"mean {number}", [ones.astype(np.int32)], "average")[0].tolist() == [1] * 9
            floats, shorts = reduced(own, f"group {number}", [ones, ones.astype(np.int16)])
            assert floats.tolist() == shorts.tolist() == [4.0] * 9
        own.close()

    with recorded_stderr() as text:
        with Group((2, 2), log_level=3) as group:
            group.run(body)
        assert text().count("cannot use horo's kernels") == (refusing > 0)
    assert nccl.counts()["launched"] == 3 * (calls_of((2, 2), 9) + (0 if refusing else 4 * 4))


def test_what_is_no_allreduce_is_nccls_among_all_ranks(gpu: Gpu, nccl: Nccl) -> None:
    def body(rank: Rank) -> None:
        own = in_two(rank, gpu, nccl)
        mine = np.full((4, 2), rank.rank, np.float32)
        for _ in range(3):
            assert own.run("broadcast", "b", mine, root_rank=3).tolist() == [[3.0] * 2] * 4
            assert own.allreduce(mine).tolist() == [[6.0] * 2] * 4
            output = np.zeros((1, 2), np.float32)
            assert own.run("reducescatter", "r", mine, output, reduce_op=SUM).tolist() == [[6.0] * 2]
            handle, _, _ = own.submit("allgather", "g", mine)
            assert own.taken(handle, 32, mine).tolist() == np.repeat(np.arange(4.0), 8).tolist()
            own.context.release(handle)
            assert own.allreduce(np.full(5, rank.rank, np.int16), "int16").tolist() == [6] * 5
            assert rank.allreduce(np.ones(5, np.float32), "host").tolist() == [4.0] * 5
        own.close()

    with Group((2, 2)) as group:
        group.run(body)
    assert nccl.counts()["launched"] == 3 * (4 * 4 + calls_of((2, 2), 8))


def test_a_gpu_without_memory_has_pinned_memory_stand_in(gpu: Gpu, nccl: Nccl) -> None:
    gpu.limit_rooms(1000)

    def body(rank: Rank) -> None:
        own = in_two(rank, gpu, nccl)
        mine = np.arange(5001, dtype=np.float32)
        np.testing.assert_array_equal(own.allreduce(mine), 4 * mine)
        own.close()

    with Group((2, 2), segment_bytes=1 << 12) as group:
        group.run(body)
    assert gpu.counts()["rooms_most"] == 0


def test_memory_goes_back_behind_each_batch(gpu: Gpu, nccl: Nccl) -> None:
    """The next batch uses the same pinned memory, where the copies of the one before are done."""

    def body(rank: Rank) -> None:
        own = in_two(rank, gpu, nccl)
        mine = np.arange(3000, dtype=np.float32)
        for _ in range(30):
            np.testing.assert_array_equal(own.allreduce(mine), 3 * mine)
        own.close()

    with Group((2, 1), segment_bytes=1 << 12) as group:
        group.run(body)
    assert gpu.counts()["rooms_most"] <= 3
    assert gpu.counts()["pinned_ever"] <= 6
