"""Adasum of tensors on GPUs by NCCL: what all ranks get, against a float64 reference and the paper's properties."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import kernel_oracle as oracle
import numpy as np
import pytest
from device_group import SUM, Gpu, Nccl, OnGpu, on_gpu
from ranks import Group, Rank, describe, recorded_stderr
from test_adasum import OP, assert_same_bits, check
from test_adasum import values_of as drawn_of
from test_nccl_pack import reduced, submit, use_memory_again
from test_nccl_teams import add_teams, teams_of
from test_teams import Links, hosts_of

from horo import _core

HOSTS = [(1,), (2,), (1, 1), (3,), (2, 1), (4,), (3, 2), (8,)]
over_all_hosts = pytest.mark.parametrize("hosts", HOSTS, ids=str)
COUNTS = [0, 1, 2, 7, 64, 1001, 30_011, 50_000]
"""The last two of two ranks have more partial sums than a block has threads."""


@functools.cache
def values_of(rank: int, count: int, dtype: Any = np.float64, seed: int = 0) -> np.ndarray:
    """Nobody writes to it: all ranks of a process want those of all."""
    return drawn_of(rank, count, dtype, seed)


def combined(own: OnGpu, array: np.ndarray, name: str = "x", **options: Any) -> np.ndarray:
    """Out of place."""
    handle, source, target = own.submit("allreduce", name, array, np.full_like(array, 77), reduce_op=OP, **options)
    own.finish(handle)
    own.gpu.synchronize(own.stream)
    assert own.gpu.get(source, array).tobytes() == array.tobytes()
    return own.gpu.get(target, array)


def calls_of(size: int, counts: Sequence[int]) -> int:
    """How many calls of NCCL a batch takes, of all ranks together; by dtype, how many values travel in it."""
    if size == 1:
        return sum(count > 0 for count in counts)
    calls = size * (size - 1).bit_length() * (sum(counts) > 0)
    for count in counts:
        owners = size if count >= size else count > 0  # the last rank has what does not divide
        calls += 2 * size * owners + size * ((count >= size) + (count % size > 0))
    return calls


@over_all_hosts
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_any_count_of_any_number_of_ranks(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], dtype: str) -> None:
    size = sum(hosts)

    def body(rank: Rank) -> list[bytes]:
        own, results = on_gpu(rank, gpu, nccl), []
        for count in COUNTS:
            inputs = [values_of(r, count, dtype) for r in range(rank.size)]
            results.append(combined(own, inputs[rank.rank], str(count)))
            check(results[-1], inputs, dtype)
            for name in ("in place", "again"):  # sums are made in one order
                assert own.allreduce(inputs[rank.rank], f"{count} {name}", "adasum").tobytes() == results[-1].tobytes()
        own.close()
        return [result.tobytes() for result in results]

    with Group(hosts) as group:
        assert_same_bits(group.run(body))
    assert nccl.counts()["launched"] == 3 * sum(calls_of(size, [count]) for count in COUNTS)
    levels = (size - 1).bit_length()
    shares = [[c // size + (r == size - 1) * (c % size) for r in range(size)] for c in COUNTS]
    launches = [levels * (1 + 2 * (n > 0) + (n > 64 * 256)) for of_count in shares for n in of_count if sum(of_count)]
    assert gpu.counts()["kernels"] == 3 * sum(launches)
    assert (nccl.counts()["destroys"], nccl.counts()["aborts"]) == (size, 0)


@over_all_hosts
def test_the_tree_is_that_of_host_memory(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...]) -> None:
    """Products of whole numbers are exact in any order: with those, results have the same bits."""

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        for dtype in ("float16", "float32", "float64"):
            mine = np.round(4 * values_of(rank.rank, 3001)).astype(dtype)
            staged = mine.copy()
            rank.allreduce(staged, f"host {dtype}", "adasum")
            if rank.size <= 2:
                assert combined(own, mine, dtype).tobytes() == staged.tobytes()
            else:  # what comes of the first level is not whole
                digits = {"float16": 2e-2, "float32": 1e-5, "float64": 1e-12}[dtype]
                np.testing.assert_allclose(combined(own, mine, dtype).astype(float), staged.astype(float), atol=digits)
        own.close()

    with Group(hosts) as group:
        group.run(body)


@over_all_hosts
def test_float16_is_computed_in_float32(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...]) -> None:
    def body(rank: Rank) -> list[bytes]:
        own, results = on_gpu(rank, gpu, nccl), []
        for count in COUNTS:
            inputs = [values_of(r, count, np.float16) for r in range(rank.size)]
            results.append(combined(own, inputs[rank.rank], str(count)))
            check(results[-1], inputs, "float16")
        large = combined(own, np.full(3000, 60000, np.float16))  # its square is beyond float16
        assert (large == 60000).all()
        own.close()
        return [result.tobytes() for result in results]

    with Group(hosts) as group:
        assert_same_bits(group.run(body))


@over_all_hosts
def test_bfloat16(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...]) -> None:
    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        inputs = [oracle.narrow_bfloat16(values_of(r, 3001, np.float32)) for r in range(rank.size)]
        mine = inputs[rank.rank].view(np.int16)
        bits = own.run("allreduce", "b", mine, reduce_op=OP, dtype=_core.DTYPES["bfloat16"]).view(np.uint16)
        check(oracle.widen_bfloat16(bits), [oracle.widen_bfloat16(i) for i in inputs], "bfloat16")
        own.close()

    with Group(hosts) as group:
        group.run(body)
    assert nccl.counts()["launched"] == calls_of(sum(hosts), [3001])


# ---- The paper's properties ----


@over_all_hosts
def test_orthogonal_vectors_add_to_the_bit(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...]) -> None:
    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        for count in (rank.size, 5000):
            array = np.zeros(count, np.float32)
            array[rank.rank :: rank.size] = values_of(rank.rank, len(array[rank.rank :: rank.size]), np.float32)
            assert np.array_equal(combined(own, array, str(count)), own.allreduce(array, f"sum{count}"))
        own.close()

    with Group(hosts) as group:
        group.run(body)


@over_all_hosts
def test_equal_vectors_average_to_themselves(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...]) -> None:
    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        for dtype in (np.float16, np.float32, np.float64):
            array = np.round(values_of(0, 4001) * 8).astype(dtype)
            assert np.array_equal(combined(own, array, np.dtype(dtype).name), array)
        own.close()

    with Group(hosts) as group:
        group.run(body)


@pytest.mark.parametrize("hosts", [(2,), (1, 1)], ids=str)
def test_parallel_vectors_average_whatever_their_lengths(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...]) -> None:
    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        array = np.arange(1000, dtype=np.float64) * 4**rank.rank
        assert np.array_equal(combined(own, array), np.arange(1000) * 2.5)
        opposite = combined(own, array * (-1) ** rank.rank, "opposite")  # factors 1 + 2 and 1 + 1/8
        assert np.array_equal(opposite, np.arange(1000) * (3 - 4 * 1.125))
        own.close()

    with Group(hosts) as group:
        group.run(body)


@pytest.mark.parametrize("hosts", [(3,), (4,), (2, 1)], ids=str)
def test_zero_vectors_change_nothing(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...]) -> None:
    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        mine = values_of(0, 500)
        for holder in range(rank.size):
            array = mine if rank.rank == holder else np.zeros(500)
            assert np.array_equal(combined(own, array, f"one{holder}"), mine)
        assert not combined(own, np.zeros(500), "all").any()
        tiny = np.full(500, 1e-160)  # its square is no normal number: it counts as zero, and is added
        array = tiny if rank.rank == 0 else mine * (rank.rank == 1)
        assert np.array_equal(combined(own, array, "tiny"), mine + tiny)
        own.close()

    with Group(hosts) as group:
        group.run(body)


@pytest.mark.parametrize("hosts", [(2,), (3,), (4,)], ids=str)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_spreads_over_its_tensor_only(
    gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], bad: float
) -> None:
    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        poisoned, clean = values_of(rank.rank, 2000), values_of(rank.rank, 2000, seed=1)
        if rank.rank == rank.size - 1:
            poisoned[1234] = bad
        first, second = reduced(own, "both", [poisoned, clean], "adasum")
        assert np.isnan(first).all()
        check(second, [values_of(r, 2000, seed=1) for r in range(rank.size)], "float64")
        own.close()

    with Group(hosts) as group:
        group.run(body)


# ---- Options ----


@over_all_hosts
def test_factors_are_multiplied_in_before_and_after(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...]) -> None:
    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        for dtype in ("float16", "float32", "float64"):
            inputs = [values_of(r, 2001, dtype) for r in range(rank.size)]
            found = combined(own, inputs[rank.rank], dtype, prescale=0.25, postscale=3.0)
            check(found, inputs, dtype, 0.75)
            check(own.allreduce(inputs[rank.rank], f"{dtype} in place", "adasum", postscale=2.0), inputs, dtype, 2.0)
        own.close()

    with Group(hosts) as group:
        group.run(body)


KINDS = [("float32", 3), ("float64", 10), ("float32", 70_001), ("float32", 0), ("float16", 11), ("float32", 1)]


@over_all_hosts
def test_each_tensor_of_a_group_by_itself(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...]) -> None:
    """Also one of its dtype, which needs no buffer."""
    size = sum(hosts)

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        inputs = [[values_of(r, n, dtype, i) for i, (dtype, n) in enumerate(KINDS)] for r in range(rank.size)]
        for step in range(2):
            for i, found in enumerate(reduced(own, f"group{step}", inputs[rank.rank], "adasum")):
                check(found, [mine[i] for mine in inputs], KINDS[i][0])
        own.close()

    with Group(hosts) as group:
        group.run(body)
    if size > 1:
        assert nccl.counts()["launched"] == 2 * calls_of(size, [11, 70_005, 10])
    assert gpu.counts()["rooms_most"] <= 2 * size


@pytest.mark.parametrize("hosts", [(2,), (3,), (2, 2), (1, 1, 1)], ids=str)
def test_tensors_of_one_batch_are_not_mixed(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...]) -> None:
    counts = [1, 5, 700, 33, 1, 12_000, 2, 0]

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        inputs = [[values_of(r, n, np.float32, i) for i, n in enumerate(counts)] for r in range(rank.size)]
        for _ in range(5):
            begun = [submit(own, f"b{i}", [array], "adasum") for i, array in enumerate(inputs[rank.rank])]
            for i, (handle, (at,)) in enumerate(begun):
                own.finish(handle)
                gpu.synchronize(own.stream)
                check(gpu.get(at, inputs[0][i]), [mine[i] for mine in inputs], "float32")
        own.close()

    with Group(hosts) as group:
        group.run(body)


@over_all_hosts
@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_floats_travel_as_narrower_ones(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], wire: str) -> None:
    def body(rank: Rank) -> list[bytes]:
        own, results = on_gpu(rank, gpu, nccl), []
        for dtype in (np.float32, np.float64):
            inputs = [values_of(r, 3001, dtype) for r in range(rank.size)]
            (found,) = reduced(own, np.dtype(dtype).name, [inputs[rank.rank]], "adasum", half=wire)
            check(found, inputs, wire)
            half, wide = oracle.DTYPES[wire], oracle.DTYPES[np.dtype(dtype).name]
            assert np.array_equal(oracle.convert(wide, half, oracle.convert(half, wide, found)), found)
            results.append(found.tobytes())
        own.close()
        return results

    with Group(hosts) as group:
        assert_same_bits(group.run(body))
    assert nccl.counts()["launched"] == 2 * calls_of(sum(hosts), [3001])


@pytest.mark.parametrize("seed", range(3))
def test_teams_combine_in_the_order_of_their_members(gpu: Gpu, nccl: Nccl, seed: int) -> None:
    """Sets that overlap, their calls in any order, sums of all ranks between them."""
    sets = ([0, 1, 2], [1, 2, 3], [0, 3], [2])
    links = Links(hosts_of([2, 2]))

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        members = dict(zip(add_teams(rank, links, sets), sets, strict=False))
        mine = [(team, members.get(team, [*range(4)])) for team, _ in teams_of(rank, [*members], sets)]
        chance, lengths = random.Random(100 * seed + rank.rank), random.Random(seed)
        for step in range(4):
            counts = [lengths.choice([1, 3, 900, 4000]) for _ in range(2)]
            calls = [(team, who, f"{step}:{i}", n) for team, who in mine for i, n in enumerate(counts)]
            chance.shuffle(calls)
            begun = []
            for team, who, name, n in calls:
                inputs = [values_of(member, n, np.float32, team) for member in who]
                own_input = inputs[who.index(rank.rank)]
                begun.append((own.submit("allreduce", name, own_input, reduce_op=OP, team=team), inputs))
                summed = own.submit("allreduce", f"sum{name}", np.ones(n, np.float32), reduce_op=SUM, team=team)
                begun.append((summed, len(who)))
            chance.shuffle(begun)
            for (handle, source, _), inputs in begun:
                own.finish(handle)
                gpu.synchronize(own.stream)
                if isinstance(inputs, list):
                    check(gpu.get(source, inputs[0]), inputs, "float32")
                else:
                    assert gpu.get(source, np.ones(1, np.float32)) == inputs
        own.close()

    with Group([2, 2], teams=len(sets) + 1) as group:
        group.run(body)


# ---- Order and memory ----


@pytest.mark.parametrize("hosts", [(2,), (3,)], ids=str)
@pytest.mark.parametrize("tensors", [1, 2])
def test_no_thread_waits_for_the_gpu(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], tensors: int) -> None:
    """The call is over while the GPU stands still: all of it is behind the program's work, and before what follows."""

    def body(rank: Rank) -> list[np.ndarray]:
        own = on_gpu(rank, gpu, nccl)
        array = np.full(9000, rank.rank, np.float32)
        placed = [gpu.put(array) for _ in range(tensors)]
        gate = gpu.hold(own.stream)
        for at in placed:
            gpu.add(own.stream, at, array, 1.0)
        described = [
            tensor._replace(input=at, output=at)
            for tensor, at in zip(describe([array] * tensors, [array] * tensors), placed, strict=True)
        ]
        options = {"reduce_op": OP, "device": own.device + 1, "stream": own.stream}
        own.finish(own.context.submit(_core.RequestBuffer.of(_core.OPS["allreduce"], "x", described, **options)))
        for at in placed:
            gpu.add(own.stream, at, array, 0.5)
            np.testing.assert_array_equal(gpu.get(at, array), array)
        gpu.open(gate)
        gpu.synchronize(own.stream)
        own.close()
        return [gpu.get(at, array) for at in placed]

    with Group(hosts) as group:
        results = group.run(body)
    inputs = [np.full(9000, r + 1, np.float32) for r in range(sum(hosts))]
    for found in results:
        for values in found:
            check(values - 0.5, inputs, "float32")


def test_a_gpu_without_memory_has_pinned_memory_stand_in(gpu: Gpu, nccl: Nccl) -> None:
    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        own.allreduce(np.ones(5, np.float32), "first")
        gpu.limit_rooms(1000)
        inputs = [values_of(r, 20_001, np.float32) for r in range(rank.size)]
        for i in range(3):
            check(combined(own, inputs[rank.rank], f"x{i}"), inputs, "float32")
            for found in reduced(own, f"two{i}", [inputs[rank.rank]] * 2, "adasum", half="float16"):
                check(found, inputs, "float16")
        own.close()

    with Group((3,)) as group:
        group.run(body)
    assert gpu.counts()["rooms_most"] == 0


def test_memory_goes_back_behind_each_batch(gpu: Gpu, nccl: Nccl) -> None:
    use_memory_again(gpu, nccl, 3, "adasum")


# ---- Who does it ----


@pytest.mark.parametrize("devices", [0b001, 0b100, 0b111])
def test_where_a_driver_refuses_the_kernels_it_is_staged_by_all(gpu: Gpu, nccl: Nccl, devices: int) -> None:
    gpu.refuse_kernels(devices)
    inputs = [values_of(r, 500, np.float32) for r in range(3)]

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        begun = [own.submit("allreduce", f"h{i}", inputs[rank.rank], reduce_op=OP) for i in range(3)]
        for handle, source, _ in begun:
            own.finish(handle)
            gpu.synchronize(own.stream)
            check(gpu.get(source, inputs[0]), inputs, "float32")
        assert own.allreduce(np.ones(3, np.float32), "sum").tolist() == [3.0] * 3
        check(combined(own, inputs[rank.rank]), inputs, "float32")
        own.close()

    with recorded_stderr() as text:
        with Group((2, 1), log_level=3) as group:
            group.run(body)
        words = "converted on their way or are combined by Adasum travel through host memory, not by NCCL: rank "
        assert text().count(f"{words}{0 if devices & 1 else 2} cannot use horo's kernels: cuModuleLoadData") == 1
    assert nccl.counts()["launched"] == 3
    assert gpu.counts()["kernels"] == 0


def test_two_levels_are_for_other_reductions(gpu: Gpu, nccl: Nccl) -> None:
    inputs = [values_of(r, 500, np.float32) for r in range(4)]

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl, two_levels=True)
        for number in range(3):
            check(combined(own, inputs[rank.rank], f"x{number}"), inputs, "float32")
            assert own.allreduce(np.ones(3, np.float32), f"sum{number}").tolist() == [4.0] * 3
        own.close()

    with Group((2, 2)) as group:
        group.run(body)


@pytest.mark.parametrize("hosts", [(2,), (2, 1), (5,)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_batches_by_chance(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], seed: int) -> None:
    """Names in any order on each rank; what becomes one batch is for the ranks to find."""
    size = sum(hosts)
    kinds = {
        "one": (["float32"], {}),
        "wide": (["float64"], {}),
        "half": (["float32", "float64"], {"half": "bfloat16"}),
        "scaled": (["float16"], {"prescale": 0.5, "postscale": 4.0}),
        "group": (["float64", "float16", "float32", "float32"], {}),
    }

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        order, lengths = random.Random(1000 * seed + rank.rank), random.Random(seed)
        for step in range(3):
            names = [(f"{kind}:{step}:{i}", lengths.randrange(2000)) for kind in kinds for i in range(3)]
            order.shuffle(names)
            begun = []
            for name, length in names:
                dtypes, options = kinds[name.partition(":")[0]]
                inputs = [[values_of(r, length + i, dtype, i) for i, dtype in enumerate(dtypes)] for r in range(size)]
                begun.append((submit(own, name, inputs[rank.rank], "adasum", **options), inputs, name))
            order.shuffle(begun)
            for (handle, placed), inputs, name in begun:
                dtypes, options = kinds[name.partition(":")[0]]
                own.finish(handle)
                gpu.synchronize(own.stream)
                for i, at in enumerate(placed):
                    scale = options.get("prescale", 1.0) * options.get("postscale", 1.0)
                    of_rank = [mine[i] for mine in inputs]
                    check(gpu.get(at, of_rank[0]), of_rank, options.get("half", dtypes[i]), scale)
        own.close()

    with Group(hosts, segment_bytes=1 << 12) as group:
        group.run(body)
    assert nccl.counts()["launched"] > 0
