"""Ranks that join while NCCL does what it can: they stand in with memory on their GPU that changes no result."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from device_group import SUM, Gpu, Nccl, OnGpu, on_gpu
from ranks import Group, Rank, describe, recorded_stderr, wait_for
from test_join import finish_join, join
from test_nccl_failures import ONES, begin, dies
from test_nccl_teams import SETS, add_teams, teams_of
from test_teams import Links, hosts_of

from horo import _core
from horo.errors import MismatchError, PeerLostError, UsageError

HOSTS = [(2,), (1, 1), (3,), (2, 1)]
DTYPES = ["uint8", "int8", "int32", "int64", "float16", "float32", "float64"]


def alone(hosts: tuple[int, ...], body: Callable[[Rank, OnGpu], None], gpu: Gpu, nccl: Nccl, **options: Any) -> None:
    """Rank 0 has joined when the others call ``body``; NCCL is known by then."""

    def of_rank(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        assert own.allreduce(ONES, "first").tolist() == [rank.size] * 5
        if rank.rank > 0:
            rank.barrier("rank 0 has joined")
            body(rank, own)
        join(rank)
        assert own.allreduce(ONES, "last").tolist() == [rank.size] * 5
        own.close()

    with Group(hosts, **options) as group:
        group.run(of_rank)


# ---- Values ----


@pytest.mark.parametrize("hosts", [(2,), (1, 1, 1)])
@pytest.mark.parametrize("op", ["sum", "average", "min", "max", "product"])
def test_values_of_joined_ranks_change_no_reduction(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], op: str) -> None:
    """All values lie on one side of zero, so those of a rank that gave zeros would show; some are infinite."""
    size = sum(hosts)
    numbers = [np.arange(70) % 5 * size * 2 + 2 * size * r + 1 for r in range(size)]
    chosen = [name for name in DTYPES if op != "average" or name.startswith("float")]

    def values(rank: int, name: str) -> np.ndarray:
        mine = numbers[rank] % 3 + 1 if op == "product" else numbers[rank]
        array = (-mine if op == "max" and name != "uint8" else mine).astype(name)
        if name.startswith("float") and op in ("min", "max"):
            array[7:9] = [np.inf, -np.inf]
        return array

    def expected(name: str) -> np.ndarray:
        there = np.array([values(r, name).astype(float) for r in range(1, size)])
        if op == "average":
            return there.sum(axis=0) / size
        return {"sum": np.sum, "min": np.min, "max": np.max, "product": np.prod}[op](there, axis=0)

    def body(rank: Rank, own: OnGpu) -> None:
        for name in chosen:
            found = own.allreduce(values(rank.rank, name), name, op)
            tolerance = 2e-3 if name == "float16" and op == "average" else 1e-6
            np.testing.assert_allclose(found.astype(float), expected(name), rtol=tolerance, err_msg=name)

    alone(hosts, body, gpu, nccl)
    assert nccl.counts()["launched"] == size * (len(chosen) + 2)
    assert gpu.counts()["pinned_ever"] == 0


@pytest.mark.parametrize("op", ["sum", "min", "max", "product"])
def test_bfloat16(gpu: Gpu, nccl: Nccl, op: str) -> None:
    def body(rank: Rank, own: OnGpu) -> None:
        bits = np.array([0x3F80, 0x4000, 0xC000, 0x7F80, 0xFF80], np.uint16).view(np.int16)
        found = own.run("allreduce", "b", bits, reduce_op=_core.REDUCE_OPS[op], dtype=_core.DTYPES["bfloat16"])
        assert found.tolist() == bits.tolist()

    alone((2,), body, gpu, nccl)


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("op", ["sum", "min"])
def test_groups_of_many_lengths_and_dtypes(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], op: str) -> None:
    lengths = [0, 1, 7, 70_001, 64]

    def body(rank: Rank, own: OnGpu) -> None:
        arrays = [np.full(n, 3 + rank.rank, name) for n in lengths for name in ("float64", "int64", "int8", "float32")]
        placed = [gpu.put(array) for array in arrays]
        tensors = [
            tensor._replace(input=address, output=address)
            for tensor, address in zip(describe(arrays, arrays), placed, strict=True)
        ]
        options = {"reduce_op": _core.REDUCE_OPS[op], "device": own.device + 1, "stream": own.stream}
        own.finish(own.context.submit(_core.RequestBuffer.of(_core.OPS["allreduce"], "group", tensors, **options)))
        gpu.synchronize(own.stream)
        wanted = sum(3 + r for r in range(1, rank.size)) if op == "sum" else 4
        for address, array in zip(placed, arrays, strict=True):
            np.testing.assert_array_equal(gpu.get(address, array), np.full_like(array, wanted))

    alone(hosts, body, gpu, nccl)


@pytest.mark.parametrize("hosts", HOSTS)
def test_rows_and_broadcasts_go_on(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...]) -> None:
    def body(rank: Rank, own: OnGpu) -> None:
        for turn in range(3):
            for most in (0, 1, 3000):
                rows = [0, *[most + turn * r for r in range(1, rank.size)]]
                expected = np.repeat(np.arange(rank.size), rows)
                handle, _, _ = own.submit("allgather", f"g{most}", np.full(rows[rank.rank], rank.rank, np.int32))
                found = own.taken(handle, expected.size, expected.astype(np.int32))
                np.testing.assert_array_equal(found, expected)
                own.context.release(handle)
            for root in range(1, rank.size):
                mine = np.full(5000, 10 * rank.rank, np.int16)
                assert np.all(own.run("broadcast", f"b{root}", mine, root_rank=root) == 10 * root)

    alone(hosts, body, gpu, nccl)
    assert gpu.counts()["pinned_ever"] == 0


def test_what_no_rank_can_do_for_another_is_an_error_and_nccl_goes_on(gpu: Gpu, nccl: Nccl) -> None:
    def body(rank: Rank, own: OnGpu) -> None:
        for op, options, words in (
            ("reducescatter", {"reduce_op": SUM}, "rank 0 has joined, and the rows that fall to it would be lost"),
            ("alltoall", {"splits": (1, 1)}, "rank 0 has joined and can neither send nor receive rows"),
            ("broadcast", {"root_rank": 0}, "its root, rank 0, has joined and sends nothing"),
        ):
            handle, _, _ = own.submit(op, op, np.ones(2, np.float32), **options)
            with pytest.raises(MismatchError, match=words):
                own.context.wait(handle)
            own.context.release(handle)
        assert own.allreduce(ONES).tolist() == [1.0] * 5
        assert own.allreduce(np.ones(4, np.float32), "alone", "adasum").tolist() == [1.0] * 4
        assert own.allreduce(np.ones(4, np.float32), "adasum", "adasum").tolist() == [1.0] * 4

    alone((2,), body, gpu, nccl)


@pytest.mark.parametrize("hosts", HOSTS)
def test_what_a_rank_has_submitted_before_it_joins_is_done_with_its_values(
    gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...]
) -> None:
    """Batches in which it stands in for a part: of what each has pending, nobody else submits something."""
    size = sum(hosts)

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        mine = np.full(10, float(rank.rank + 1))
        for turn in range(4):
            names = ["common", f"of rank {rank.rank}", *(["of some"] if rank.rank > 0 else [])]
            begun = {name: own.submit("allreduce", name, mine, reduce_op=SUM) for name in names}
            join(rank)
            for handle, _, _ in begun.values():
                own.finish(handle)
            gpu.synchronize(own.stream)
            total = size * (size + 1) / 2
            wanted = {"common": total, f"of rank {rank.rank}": rank.rank + 1, "of some": total - 1}
            for name, (_, source, _) in begun.items():
                assert np.all(gpu.get(source, mine) == wanted[name]), (turn, name)
        own.close()

    with Group(hosts) as group:
        group.run(body)


# ---- Memory ----


def test_memory_is_that_of_one_batch_while_the_gpu_stands_still(gpu: Gpu, nccl: Nccl) -> None:
    """Each is given back behind its batch, in the order of the stream, where the next one gets it again."""

    def body(rank: Rank, own: OnGpu) -> None:
        gate = gpu.hold(own.stream)
        begun = [own.submit("allreduce", f"{i}", np.full(1000, i, np.float32), reduce_op=SUM) for i in range(30)]
        for handle, _, _ in begun:
            own.finish(handle)
        gpu.open(gate)
        gpu.synchronize(own.stream)
        for i, (_, source, _) in enumerate(begun):
            assert np.all(gpu.get(source, np.zeros(1000, np.float32)) == i)

    alone((2,), body, gpu, nccl)
    assert gpu.counts()["rooms_most"] == 1


@pytest.mark.parametrize("op", ["sum", "min"])
def test_a_gpu_without_memory_has_the_host_stand_in(gpu: Gpu, nccl: Nccl, op: str) -> None:
    gpu.limit_rooms(100)

    def body(rank: Rank, own: OnGpu) -> None:
        for number in range(3):
            mine = np.full(1000, number + rank.rank, np.int64)
            assert np.all(own.allreduce(mine, "x", op) == number + 1)

    alone((2,), body, gpu, nccl)
    assert nccl.counts()["launched"] == 2 * 5
    assert gpu.counts()["pinned_ever"] > 0


def test_no_memory_at_all_ends_the_group_with_the_size(gpu: Gpu, nccl: Nccl) -> None:
    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        own.allreduce(ONES)
        with pytest.raises(PeerLostError, match=r"a failure of NCCL: no 4032 bytes on the GPU for .*: cuMemAlloc"):
            if rank.rank == 0:
                join(rank)
            rank.barrier("rank 0 has joined")
            gpu.limit_rooms(100)
            gpu.fail(host_bytes=100)
            handle, _, _ = own.submit("allreduce", "y", np.ones(1000, np.float32), reduce_op=SUM)
            own.context.wait(handle)
            own.context.release(handle)
            for _ in range(1_000_000):  # that call may be over before the other rank ends the group
                rank.barrier()
        own.close()

    with recorded_stderr(), Group((2,)) as group:
        group.run(body)


# ---- NCCL is set up while ranks have joined ----


def staged_until_rank_1_is_back(nccl: Nccl, hosts: Sequence[int], body: Callable[[Rank], None]) -> None:
    """Of two ranks, which ``body`` has join; at its end they have a call in common."""
    with recorded_stderr() as text, Group(hosts, log_level=3) as group:
        group.run(body)
        assert "travel through host memory until all ranks have joined: rank 1 has joined" in text()
    assert nccl.counts()["launched"] == 2


@pytest.mark.parametrize("hosts", [(2,), (1, 1)])
def test_a_rank_that_has_never_used_a_gpu_has_all_staged_until_all_have_joined(
    gpu: Gpu,
    nccl: Nccl,
    hosts: tuple[int, ...],
) -> None:
    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        if rank.rank == 0:
            assert own.allreduce(ONES).tolist() == [1.0] * 5
            assert own.allreduce(ONES, "y").tolist() == [1.0] * 5
        join(rank)
        assert nccl.counts()["launched"] == 0
        assert own.allreduce(ONES).tolist() == [2.0] * 5
        own.close()

    staged_until_rank_1_is_back(nccl, hosts, body)


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("joins", [0, 1])
@pytest.mark.parametrize("looks", [3, 800])
def test_a_rank_that_has_joined_takes_part_in_setting_up_a_process_set(
    gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], joins: int, looks: int
) -> None:
    """The first rank tells where they meet, also where it has joined; the others may be connected long before it is."""
    links = Links(hosts_of(hosts))
    size = sum(hosts)

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        assert own.allreduce(ONES).tolist() == [size] * 5
        (team,) = add_teams(rank, links, [list(range(size))])
        nccl.fail("late connect", joins, code=looks)
        rank.barrier()
        if rank.rank == joins:
            handle = rank.context.start_join(team)
            assert own.allreduce(ONES).tolist() == [size] * 5
            finish_join(rank, handle)
        else:
            assert own.allreduce(ONES).tolist() == [size] * 5
            for _ in range(3):
                assert own.allreduce(ONES, "x", team=team).tolist() == [size - 1] * 5
                assert own.allreduce(ONES, "y", "product", team=team).tolist() == [1] * 5
                handle, _, _ = own.submit("allgather", "g", ONES, team=team)
                assert own.taken(handle, 5 * (size - 1), ONES).tolist() == [1.0] * 5 * (size - 1)
                own.context.release(handle)
            join(rank, team)
        assert own.allreduce(ONES, team=team).tolist() == [size] * 5
        rank.context.remove_team(team)
        own.close()

    with Group(hosts) as group:
        group.run(body)
    assert gpu.counts()["pinned_ever"] == 0
    assert (nccl.counts()["destroys"], nccl.counts()["aborts"]) == (2 * size, 0)


def test_one_of_two_joined_ranks_has_never_used_a_gpu(gpu: Gpu, nccl: Nccl) -> None:
    links = Links([0, 0, 0])

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        pair, all_of_them = add_teams(rank, links, [[0, 1], [0, 1, 2]])
        if rank.rank < 2:
            assert own.allreduce(ONES, team=pair).tolist() == [2.0] * 5
        rank.barrier()
        if rank.rank == 0:
            assert own.allreduce(ONES, team=all_of_them).tolist() == [1.0] * 5
        join(rank, all_of_them)
        assert own.allreduce(ONES, team=all_of_them).tolist() == [3.0] * 5
        own.close()

    with recorded_stderr() as text, Group((3,), log_level=3) as group:
        group.run(body)
        assert "of process set 2 (ranks 0, 1, 2) travel through host memory until all ranks have joined: rank" in text()
    assert nccl.counts()["launched"] == 2 + 3


def test_what_waits_for_nccl_is_done_before_its_rank_joins(gpu: Gpu, nccl: Nccl) -> None:
    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        handle, source, _ = own.submit("allreduce", "x", ONES, reduce_op=SUM)
        join(rank)
        own.finish(handle)
        gpu.synchronize(own.stream)
        assert gpu.get(source, ONES).tolist() == [2.0] * 5
        own.close()

    with Group((2,)) as group:
        group.run(body)


def test_a_joined_rank_submits_nothing(gpu: Gpu, nccl: Nccl) -> None:
    refused = threading.Event()

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        own.allreduce(ONES)
        if rank.rank == 1:
            handle = rank.context.start_join(0)
            for name in ("x", "y"):
                with pytest.raises(UsageError, match=f"'{name}': rank 1 has joined; it can submit nothing"):
                    begin(own, name)
            refused.set()
            rank.context.wait(handle)
            rank.context.release(handle)
        else:
            assert own.allreduce(ONES, "alone").tolist() == [1.0] * 5
            assert refused.wait(60)  # joining ends when this rank joins, too
            join(rank)
        own.close()

    with Group((2,)) as group:
        group.run(body)


# ---- Several teams, and losses ----


@pytest.mark.parametrize("hosts", [[3], [2, 1], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_ranks_leave_all_their_teams_one_after_the_other(gpu: Gpu, nccl: Nccl, hosts: list[int], seed: int) -> None:
    """Each rank has steps of its own number in all of its teams, which overlap, in any order; then it joins them."""
    links = Links(hosts_of(hosts))
    lengths = random.Random(seed)
    epochs = [[lengths.randrange(6) for _ in range(3)] for _ in range(3)]
    members = [[0, 1, 2], *SETS]

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        teams = add_teams(rank, links)
        ranks_of = dict(zip((0, *teams), members, strict=True))
        mine = [team for team, _ in teams_of(rank, teams)]
        chance = random.Random(100 * seed + rank.rank)
        assert own.allreduce(ONES).tolist() == [3.0] * 5
        for epoch, ends in enumerate(epochs):
            for step in range(ends[rank.rank]):
                calls = [(team, op) for team in mine for op in ("sum", "min", "allgather")]
                chance.shuffle(calls)
                begun = []
                for team, op in calls:
                    there = [r + 1 for r in ranks_of[team] if ends[r] > step]
                    name, values = f"{epoch}:{step}:{op}", ONES * (rank.rank + 1)
                    if op == "allgather":
                        handle, source, _ = own.submit(op, name, values, team=team)
                        begun.append((handle, 0, np.repeat(np.array(there, np.float32), 5)))
                    else:
                        handle, source, _ = own.submit(
                            "allreduce", name, values, reduce_op=_core.REDUCE_OPS[op], team=team
                        )
                        begun.append((handle, source, ONES * {"sum": sum, "min": min}[op](there)))
                chance.shuffle(begun)
                for handle, source, expected in begun:
                    if source == 0:
                        np.testing.assert_array_equal(own.taken(handle, expected.size, ONES), expected)
                        own.context.release(handle)
                    else:
                        own.finish(handle)
                        gpu.synchronize(own.stream)
                        np.testing.assert_array_equal(gpu.get(source, ONES), expected)
            joining = [rank.context.start_join(team) for team in mine]
            for handle in joining:
                finish_join(rank, handle)
        own.close()

    with Group(hosts) as group:
        group.run(body)


def dies_while_rank_1_stands_in(
    gpu: Gpu,
    nccl: Nccl,
    hosts: tuple[int, ...],
    victim: int,
    launched: int,
    *,
    place: str = "hang",
    rooms: int = 1 << 30,
    others: Callable[[OnGpu], None] = lambda own: own.finish(begin(own)),
) -> None:
    """Rank 1 has joined, and NCCL fails it at the ``place`` in what the ``others`` call; so many are launched then."""

    def until(rank: Rank, own: OnGpu) -> int | None:
        own.allreduce(ONES, "first")
        if rank.rank == 1:
            handle = rank.context.start_join(0)
            wait_for(lambda: nccl.counts()["launched"] == launched)
            return int(handle)
        rank.barrier("rank 1 has joined")
        gpu.limit_rooms(rooms)
        nccl.fail(place, 1)
        rank.barrier("it will not do its part")
        others(own)
        return None

    dies(gpu, nccl, victim, hosts, until)


@pytest.mark.parametrize("hosts", [(2,), (1, 1), (3,)])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("place", ["late launch", "hang"])
def test_a_rank_dies_while_another_stands_in(
    gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], victim: int, place: str
) -> None:
    """Nothing of the memory with which it stood in is left, nor is it touched any more."""
    launched = 2 * sum(hosts) - (place == "late launch")
    dies_while_rank_1_stands_in(gpu, nccl, hosts, victim, launched, place=place)


@pytest.mark.parametrize("hosts", [(2,), (1, 1)])
@pytest.mark.parametrize(("op", "dtype"), [("sum", "float32"), ("min", "int64"), ("product", "float64")])
def test_a_rank_dies_while_another_stands_in_with_pinned_memory(
    gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], op: str, dtype: str
) -> None:
    """To fill that, no thread waits for the batch before, whose kernel waits for that rank."""

    def others(own: OnGpu) -> None:
        own.finish(begin(own))
        values = np.ones(1000, dtype)
        own.finish(own.submit("allreduce", "y", values, reduce_op=_core.REDUCE_OPS[op])[0])

    dies_while_rank_1_stands_in(gpu, nccl, hosts, 1, 3 * sum(hosts), rooms=100, others=others)
