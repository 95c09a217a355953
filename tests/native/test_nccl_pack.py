"""What NCCL reduces in another form than it has in memory: kernels put it into a buffer and take the results out."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import kernel_oracle as oracle
import numpy as np
import pytest
from device_group import SUM, Gpu, Nccl, OnGpu, on_gpu
from kernel_oracle import DTYPES
from ranks import Group, Rank, describe, recorded_stderr, wait_for
from test_nccl_failures import ONES, dies
from test_nccl_join import alone
from test_nccl_teams import add_teams, teams_of
from test_teams import Links, hosts_of

from horo import _core
from horo.errors import PeerLostError

HOSTS = [(2,), (1, 1), (3,), (2, 1)]
HALVES = ["float16", "bfloat16"]
BUFFER_BYTES = 32 << 20
INTEGERS = ["uint8", "int8", "int16", "int32", "int64"]


def submit(own: OnGpu, name: str, arrays: list[np.ndarray], op: str = "sum", **options: Any) -> tuple[int, list[int]]:
    """An allreduce of several arrays in place, which travel as 16-bit floats if ``half`` is given."""
    half = options.pop("half", None)
    placed = [own.gpu.put(array) for array in arrays]
    tensors = [
        tensor._replace(input=at, output=at, wire_dtype=0 if half is None else _core.DTYPES[half])
        for tensor, at in zip(describe(arrays, arrays), placed, strict=True)
    ]
    options = {"reduce_op": _core.REDUCE_OPS[op], "device": own.device + 1, "stream": own.stream, **options}
    return own.context.submit(_core.RequestBuffer.of(_core.OPS["allreduce"], name, tensors, **options)), placed


def reduced(own: OnGpu, name: str, arrays: list[np.ndarray], op: str = "sum", **options: Any) -> list[np.ndarray]:
    handle, placed = submit(own, name, arrays, op, **options)
    own.finish(handle)
    own.gpu.synchronize(own.stream)
    return [own.gpu.get(at, array) for at, array in zip(placed, arrays, strict=True)]


# ---- Values ----


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("wide", ["float32", "float64"])
def test_values_travel_as_16_bits_and_are_rounded_as_on_the_host(
    gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], half: str, wide: str
) -> None:
    """Of two contributions that count there is one sum, however it is made: it is that of the host, to the bit."""
    size, dtype, origin = sum(hosts), DTYPES[half], DTYPES[wide]
    lengths = [1, 5, 0, 4097, 20_001]
    rng = np.random.default_rng(3)
    inputs = [[(rng.standard_normal(n) * 10.0 ** rng.integers(-6, 4, n)).astype(wide) for n in lengths] for _ in "01"]
    inputs += [[np.zeros(n, wide) for n in lengths]] * (size - 2)
    factors = {"prescale": 0.3, "postscale": -1.7}

    def body(rank: Rank) -> list[np.ndarray]:
        own = on_gpu(rank, gpu, nccl)
        found = reduced(own, "plain", inputs[rank.rank], half=half)
        found += reduced(own, "scaled", inputs[rank.rank], half=half, **factors)
        own.close()
        return found

    with Group(hosts) as group:
        results = group.run(body)
    expected = []
    for scale, post in ((1.0, 1.0), (0.3, -1.7)):
        for n in range(len(lengths)):
            sent = [oracle.convert(dtype, origin, inputs[r][n], scale) for r in range(2)]
            total = oracle.reduce(dtype, oracle.SUM, [oracle.reduce(dtype, oracle.SUM, sent)], post)
            expected.append(oracle.convert(origin, dtype, total))
    for found in results:
        for mine, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(mine, wanted)
    assert nccl.counts()["launched"] == 2 * size
    assert gpu.counts()["kernels"] == 4 * size


@pytest.mark.parametrize("hosts", [(2,), (1, 1, 1)])
def test_an_average_of_what_float16_holds_does_not_leave_its_range(
    gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...]
) -> None:
    def body(rank: Rank) -> list[float]:
        own = on_gpu(rank, gpu, nccl)
        values = np.array([60000.0, -65504.0, 65504.0, np.inf, 2.0**-24], np.float32)
        (found,) = reduced(own, "x", [values], "average", half="float16")
        (beyond,) = reduced(own, "y", [np.full(1, 1e5, np.float32)], "average", half="float16")
        own.close()
        return [*found.tolist(), *beyond.tolist()]

    with Group(hosts) as group:
        for found in group.run(body):
            np.testing.assert_allclose(found[:3], [60000, -65504, 65504], rtol=1e-3)
            assert found[3] == np.inf
            assert abs(found[4]) <= 2.0**-23
            assert found[5] == np.inf  # a contribution is rounded before


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("op", ["sum", "average", "min", "max", "product"])
def test_integers_and_factors_are_as_on_the_host(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], op: str) -> None:
    """To the bit, at the ends of the range too, where sums wrap and products with factors saturate."""
    size = sum(hosts)
    rng = np.random.default_rng(11)

    def values(name: str) -> np.ndarray:
        limits = np.iinfo(name)
        wide = rng.integers(limits.min, limits.max, 300, dtype=name, endpoint=True)
        return np.concatenate([wide, rng.integers(0, 100, 300).astype(name), [limits.min, limits.max]]).astype(name)

    inputs = [{name: values(name) for name in INTEGERS} for _ in range(size)]
    scaled = [(1.0, 1.0), (1.0, 0.3), (2.5, 1.0), (-0.7, 3.0)]

    def body(rank: Rank) -> list[tuple[np.ndarray, np.ndarray]]:
        own = on_gpu(rank, gpu, nccl)
        pairs = []
        for name in INTEGERS:
            for pre, post in scaled:
                array, label = inputs[rank.rank][name], f"{name} {pre} {post}"
                factors = {"prescale": pre, "postscale": post}
                found = own.allreduce(array, label, op, **factors)
                kept = array.copy()
                rank.finish(
                    rank.submit("allreduce", "host " + label, [kept], reduce_op=_core.REDUCE_OPS[op], **factors)
                )
                pairs.append((found, kept))
        own.close()
        return pairs

    with Group(hosts) as group:
        for pairs in group.run(body):
            for found, kept in pairs:
                np.testing.assert_array_equal(found, kept)
    assert nccl.counts()["launched"] == size * len(INTEGERS) * len(scaled)
    assert gpu.counts()["pinned_ever"] <= 4 * size  # that of the pieces, which is used again


def test_bool_and_factors_of_extremes_and_products(gpu: Gpu, nccl: Nccl) -> None:
    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        bits = np.array([False, rank.rank == 1, True])
        for op, expected in (("sum", [False, True, True]), ("max", [False, True, True]), ("min", [False, False, True])):
            assert own.allreduce(bits, op, op).tolist() == expected
        assert own.allreduce(bits, "product", "product").tolist() == [False, False, True]
        for dtype in ("float16", "float32", "float64"):
            mine = np.array([1.0, -2.0, 0.5], dtype) * (rank.rank + 1)
            found = own.allreduce(mine, "max" + dtype, "max", prescale=2.0, postscale=0.5)
            assert found.tolist() == [2.0, -2.0, 1.0]
            found = own.allreduce(mine, "product" + dtype, "product", prescale=2.0, postscale=0.5)
            assert found.tolist() == [4.0, 16.0, 1.0]
        own.close()

    with Group((2,)) as group:
        group.run(body)
    assert nccl.counts()["launched"] == 2 * 10


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("kind", ["float16", "average", "int16"])
def test_a_reducescatter_is_packed_likewise(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], kind: str) -> None:
    """The rows need not be equally many."""
    size = sum(hosts)
    op = "average" if kind == "average" else "sum"

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        for rows in (size, size + 1, 1, 0, 2 * size, 3000 * size + 1):
            dtype = {"float16": np.float32, "average": np.int64, "int16": np.int16}[kind]
            whole = (np.arange(rows * 3) % 50).reshape(rows, 3)
            mine = (whole * (rank.rank + 1)).astype(dtype)
            expected = whole * (size * (size + 1) // 2)
            expected = expected // size if kind == "average" else expected
            wanted = np.array_split(expected, size)[rank.rank]
            target = gpu.put(np.zeros_like(wanted, dtype))
            (tensor,) = describe([mine], [mine])
            tensor = tensor._replace(
                input=gpu.put(mine), output=target, wire_dtype=_core.DTYPES["float16"] if kind == "float16" else 0
            )
            options = {"reduce_op": _core.REDUCE_OPS[op], "device": own.device + 1, "stream": own.stream}
            request = _core.RequestBuffer.of(_core.OPS["reducescatter"], f"r{rows}", [tensor], **options)
            own.finish(own.context.submit(request))
            gpu.synchronize(own.stream)
            np.testing.assert_array_equal(gpu.get(target, np.zeros_like(wanted, dtype)), wanted)
        own.close()

    with Group(hosts) as group:
        group.run(body)
    assert nccl.counts()["launched"] > 0


def test_a_group_of_all_dtypes_is_packed_as_far_as_it_must_be(gpu: Gpu, nccl: Nccl) -> None:
    """Floats go as they are, with NCCL's own factor, which is not applied to what the kernels have multiplied."""
    names = ["float32", "int32", "int64", "float16", "int16", "int8", "float64", "int32"]

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        arrays = [np.full(100 + i, 10 * (rank.rank + 1), name) for i, name in enumerate(names)]
        for array in reduced(own, "g", arrays, "average", postscale=2.0):
            np.testing.assert_array_equal(array, np.full_like(array, 30))
        own.close()

    with Group((2,)) as group:
        group.run(body)
    assert gpu.counts()["kernels"] == 4


# ---- Order and memory ----


@pytest.mark.parametrize("hosts", HOSTS)
def test_kernels_stand_behind_the_programs_work_and_before_it(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...]) -> None:
    """No value passes the host, and no thread waits for the GPU: the call is over while the GPU stands still."""

    def body(rank: Rank) -> np.ndarray:
        own = on_gpu(rank, gpu, nccl)
        array = np.full(9000, rank.rank, np.float32)
        address = gpu.put(array)
        (tensor,) = describe([array], [array])
        tensor = tensor._replace(input=address, output=address, wire_dtype=_core.DTYPES["float16"])
        gate = gpu.hold(own.stream)
        gpu.add(own.stream, address, array, 1.0)
        options = {"reduce_op": SUM, "device": own.device + 1, "stream": own.stream}
        own.finish(own.context.submit(_core.RequestBuffer.of(_core.OPS["allreduce"], "x", [tensor], **options)))
        gpu.add(own.stream, address, array, 0.5)
        np.testing.assert_array_equal(gpu.get(address, array), array)
        gpu.open(gate)
        gpu.synchronize(own.stream)
        own.close()
        return gpu.get(address, array)

    with Group(hosts) as group:
        results = group.run(body)
    size = sum(hosts)
    for result in results:
        np.testing.assert_array_equal(result, np.full(9000, size * (size + 1) / 2 + 0.5))


def test_a_gpu_without_memory_has_pinned_memory_stand_in(gpu: Gpu, nccl: Nccl) -> None:
    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        own.allreduce(ONES, "first")
        gpu.limit_rooms(1000)
        for i in range(3):
            (found,) = reduced(own, f"x{i}", [np.full(70_001, rank.rank + 1, np.float32)], half="bfloat16")
            np.testing.assert_array_equal(found, np.full_like(found, 3))
        own.close()

    with Group((2,)) as group:
        group.run(body)
    assert gpu.counts()["rooms_most"] == 0


def ends_without_memory(gpu: Gpu, nccl: Nccl, words: str, call: Callable[[OnGpu], object]) -> None:
    """Neither the GPU nor the host has what ``call`` needs."""

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        own.allreduce(ONES, "first")
        gpu.limit_rooms(1000)
        gpu.fail(host_bytes=100_000)
        with pytest.raises(PeerLostError, match=rf"no {words} bytes on the GPU for values: cuMemAllocAsync failed"):
            call(own)
        own.close()

    with recorded_stderr(), Group((2,)) as group:
        group.run(body)


def test_where_there_is_no_memory_at_all_the_group_ends_with_the_size(gpu: Gpu, nccl: Nccl) -> None:
    arrays = [np.ones(70_001, np.float32)]
    ends_without_memory(gpu, nccl, r"140\d\d\d", lambda own: reduced(own, "x", arrays, half="bfloat16"))


@pytest.mark.parametrize("edge", [-1000, -1, 0, 1, 40_000])
def test_more_than_the_buffer_holds_goes_in_rounds(gpu: Gpu, nccl: Nccl, edge: int) -> None:
    """Rounds end within a tensor, or between two; what needs no buffer goes with the first."""
    lengths = [3, BUFFER_BYTES // 8 - 10_003, 10_000 + edge]

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        arrays = [np.arange(n) % 1000 * 2 * (rank.rank + 1) for n in lengths]
        arrays += [np.full(5, rank.rank, np.float32), np.full(9, 6 * rank.rank, np.int16)]
        found = reduced(own, "x", arrays, "average")
        for array, n in zip(found, lengths, strict=False):
            np.testing.assert_array_equal(array, np.arange(n) % 1000 * 3)
        assert [found[3].tolist(), found[4].tolist()] == [[0.5] * 5, [3] * 9]
        own.close()

    with Group((2,)) as group:
        group.run(body)
    rounds = 1 if edge < -20 else 2
    assert gpu.counts()["kernels"] == 2 * 2 * rounds
    assert gpu.counts()["rooms_most"] <= 2


def test_a_rank_dies_between_two_rounds(gpu: Gpu, nccl: Nccl) -> None:
    def until(rank: Rank, own: OnGpu) -> int:
        own.allreduce(ONES, "first")
        nccl.fail("late launch", rank.rank, at=2)
        first = BUFFER_BYTES // 8  # which that round ends with
        handle, (at,) = submit(own, "x", [np.full(first + 5, 2 * rank.rank)], "average")
        wait_for(lambda: gpu.get(at + 8 * (first - 1), np.zeros(1, np.int64)).tolist() == [1])
        wait_for(lambda: gpu.counts()["kernels"] == 2 * 3)  # the second round is packed
        return handle

    dies(gpu, nccl, 1, (2,), until)


def use_memory_again(gpu: Gpu, nccl: Nccl, size: int, *words: str, **options: Any) -> None:
    """Batches of ``reduced`` one after the other, on so many ranks: each needs no more than the first."""

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        for i in range(20):
            reduced(own, f"x{i % 2}", [np.ones(300, np.float32)] * 5, *words, **options)
        own.close()

    with Group((size,)) as group:
        group.run(body)
    assert gpu.counts()["rooms_most"] <= size
    assert gpu.counts()["pinned_ever"] <= 5 * size


def test_batches_use_memory_again(gpu: Gpu, nccl: Nccl) -> None:
    use_memory_again(gpu, nccl, 2, half="float16")


# ---- Ranks without kernels ----


@pytest.mark.parametrize("devices", [0b01, 0b10, 0b11])
def test_where_a_driver_refuses_the_kernels_what_needs_them_is_staged_by_all(
    gpu: Gpu, nccl: Nccl, devices: int
) -> None:
    gpu.refuse_kernels(devices)
    blamed = 0 if devices & 1 else 1

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        held = [submit(own, f"h{i}", [np.full(5, i, np.int32)], "average") for i in range(3)]
        plain = [submit(own, f"p{i}", [np.full(5, i, np.float32)]) for i in range(3)]
        for number, (handle, (at,)) in enumerate(held):
            own.finish(handle)
            gpu.synchronize(own.stream)
            assert gpu.get(at, np.zeros(5, np.int32)).tolist() == [number] * 5
        for number, (handle, (at,)) in enumerate(plain):
            own.finish(handle)
            gpu.synchronize(own.stream)
            assert gpu.get(at, np.zeros(5, np.float32)).tolist() == [2.0 * number] * 5
        (found,) = reduced(own, "x", [np.full(7, 0.25, np.float32)], half="float16")
        assert found.tolist() == [0.5] * 7
        own.close()

    with recorded_stderr() as text:
        with Group((2,), log_level=3) as group:
            group.run(body)
        words = "on their way or are combined by Adasum travel through host memory, not by NCCL: rank "
        assert text().count(f"{words}{blamed} cannot use horo's kernels: cuModuleLoadData failed with code 222: ") == 1
    assert nccl.counts()["launched"] == 2 * 3
    assert gpu.counts()["kernels"] == 0


def test_a_joined_rank_without_kernels_stands_in_in_host_memory(gpu: Gpu, nccl: Nccl) -> None:
    gpu.refuse_kernels(0b001)

    def body(rank: Rank, own: OnGpu) -> None:
        for step in range(2):  # by its name, then as one that is known
            for op, wanted in (("sum", 5), ("min", 2), ("max", 3), ("product", 6)):
                (found,) = reduced(own, f"half {op}", [np.full(70, rank.rank + 1, np.float32)], op, half="float16")
                assert found.tolist() == [wanted] * 70
            mixed = [np.full(5, 3 * rank.rank, np.int16), np.full(5, 3.0 * rank.rank, np.float32)]
            assert [found.tolist() for found in reduced(own, "mixed", mixed)] == [[9] * 5] * 2
            assert own.allreduce(ONES, f"plain {step}").tolist() == [2] * 5

    with recorded_stderr():
        alone((2, 1), body, gpu, nccl)
    assert nccl.counts()["launched"] == 3 * 4
    assert gpu.counts()["kernels"] == 0


def test_a_process_set_whose_ranks_all_have_kernels_uses_them(gpu: Gpu, nccl: Nccl) -> None:
    gpu.refuse_kernels(0b001)
    links = Links(hosts_of([2, 1]))

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        sets = [[1, 2], [0, 1]]
        mine = teams_of(rank, add_teams(rank, links, sets), sets)
        begun = [(*submit(own, "x", [ONES], half="float16", team=team), size) for team, size in mine]
        for handle, (source,), size in begun:
            own.finish(handle)
            gpu.synchronize(own.stream)
            assert gpu.get(source, ONES).tolist() == [size] * 5
        own.close()

    with recorded_stderr() as text:
        with Group([2, 1], log_level=3) as group:
            group.run(body)
        of = "values on GPUs{} that are converted on their way or are combined by Adasum travel through host memory, "
        of += "not by NCCL: rank 0 cannot"
        assert [text().count(of.format(who)) for who in ("", " of process set 2 (ranks 0, 1)")] == [1, 1]
        assert text().count("that are converted on their way") == 2
    assert gpu.counts()["kernels"] == 2 * 2
    assert nccl.counts()["launched"] == 2


# ---- Failures ----


@pytest.mark.parametrize("launch", [1, 2, 3, 4])
def test_a_kernel_that_cannot_be_launched_ends_the_group(gpu: Gpu, nccl: Nccl, launch: int) -> None:
    words = "ended with a failure of NCCL: cuLaunchKernel failed with code 719: unspecified launch failure"

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        own.allreduce(ONES, "first")
        rank.barrier("all are connected")
        if rank.rank == 0:
            gpu.refuse_kernels(launch=launch)
        rank.barrier("it is to fail")
        with pytest.raises(PeerLostError, match=words):
            for number in range(10_000):
                reduced(own, f"x{number}", [ONES], half="float16")
        gpu.synchronize(own.stream)
        own.close()

    with recorded_stderr(), Group((2,)) as group:
        group.run(body)
    assert nccl.counts()["destroys"] == 0


@pytest.mark.parametrize("hosts", [(2,), (1, 1), (3,)])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("phase", ["held", "launching", "hanging"])
def test_a_rank_dies_while_others_have_packed(
    gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], victim: int, phase: str
) -> None:
    def until(rank: Rank, own: OnGpu) -> int | None:
        own.allreduce(ONES, "first")
        if phase == "launching":
            nccl.fail("late launch", rank.rank)
        if phase == "hanging" and rank.rank == victim:
            nccl.fail("hang", victim)
        if phase == "held" and rank.rank == victim:
            return None
        handle, _ = submit(own, "x", [np.ones(9000, np.float32)], half="float16")
        if phase == "hanging":
            own.finish(handle)
            return None
        return handle

    dies(gpu, nccl, victim, hosts, until)


def test_a_rank_dies_while_its_kernel_waits_for_the_program(gpu: Gpu, nccl: Nccl) -> None:
    """The buffer goes back behind the kernel, whatever the program's GPU is at."""
    gates = {}

    def until(rank: Rank, own: OnGpu) -> None:
        own.allreduce(ONES, "first")
        gates[rank.rank] = gpu.hold(own.stream)
        own.finish(submit(own, "x", [np.ones(9000, np.float32)], half="float16")[0])
        if rank.rank == 0:
            gpu.open(gates[0])

    def opened(rank: Rank, own: OnGpu) -> None:
        until(rank, own)
        if rank.rank == 1:
            gpu.open(gates[1])

    dies(gpu, nccl, 1, (2,), opened)


@pytest.mark.parametrize("hosts", [(2,), (1, 1)], ids=str)
def test_a_rank_dies_while_pinned_memory_stands_in(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...]) -> None:
    """What is packed for a batch does not make the thread wait for the batch before, which waits for that rank."""

    def until(rank: Rank, own: OnGpu) -> None:
        own.allreduce(ONES, "first")
        if rank.rank == 1:
            gpu.limit_rooms(1000)
            nccl.fail("hang", 1)
        rank.barrier()
        for name in "xy":
            own.finish(submit(own, name, [np.ones(9000, np.float32)], half="float16")[0])

    dies(gpu, nccl, 1, hosts, until)


# ---- Joined ranks, process sets ----


@pytest.mark.parametrize("hosts", [(2,), (1, 1, 1)])
@pytest.mark.parametrize("op", ["sum", "min", "max", "product"])
def test_values_of_joined_ranks_change_nothing(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], op: str) -> None:
    size = sum(hosts)
    pick = {"sum": sum, "min": min, "max": max, "product": lambda v: int(np.prod(list(v)))}[op]
    wanted = pick(range(2, size + 1))

    def body(rank: Rank, own: OnGpu) -> None:
        mine = rank.rank + 1
        for half in HALVES:
            arrays = [np.full(n, mine, name) for n in (3, 5000) for name in ("float32", "float64")]
            for found in reduced(own, half, arrays, op, half=half):
                np.testing.assert_array_equal(found, np.full_like(found, wanted))
        factors = {"prescale": 2.0, "postscale": 0.5} if op == "sum" else {}  # which others cannot have then
        for name in INTEGERS:
            (found,) = reduced(own, name, [np.full(70, mine, name)], op, **factors)
            np.testing.assert_array_equal(found, np.full(70, wanted, name), err_msg=name)
        (found,) = reduced(own, "bool", [np.array([True, False])], op)
        assert found.tolist() == [True, False]

    alone(hosts, body, gpu, nccl)
    assert gpu.counts()["kernels"] > 0


@pytest.mark.parametrize("seed", range(3))
def test_teams_that_overlap_pack_in_any_order(gpu: Gpu, nccl: Nccl, seed: int) -> None:
    links = Links(hosts_of([2, 1]))

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        mine = teams_of(rank, add_teams(rank, links))
        chance = random.Random(100 * seed + rank.rank)
        for step in range(5):
            calls = [(team, size, f"{step}:{i}") for team, size in mine for i in range(3)]
            chance.shuffle(calls)
            begun = [
                (*submit(own, name, [ONES * (team + 1)], half="float16", team=team), size * (team + 1))
                for team, size, name in calls
            ]
            chance.shuffle(begun)
            for handle, (source,), total in begun:
                own.finish(handle)
                gpu.synchronize(own.stream)
                assert gpu.get(source, ONES).tolist() == [total] * 5
        own.close()

    with Group([2, 1]) as group:
        group.run(body)
    assert nccl.counts()["launched"] > 0


# ---- Random batches ----

DTYPES_OF = {
    "float32": ["float32"],
    "half": ["float32", "float64"],
    "average": ["int32", "uint8"],
    "int16": ["int16"],
    "bool": ["bool"],
    "group": ["int64", "float16", "float32", "int8"],
}


def run_by_chance(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], seed: int) -> None:
    """Names in any order on each rank; what becomes one batch is for the ranks to find."""
    size = sum(hosts)

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        order, lengths = random.Random(1000 * seed + rank.rank), random.Random(seed)
        for step in range(3):
            names = [(f"{kind}:{step}:{i}", lengths.randrange(3000)) for kind in DTYPES_OF for i in range(4)]
            order.shuffle(names)
            begun = []
            for name, length in names:
                kind, value = name.partition(":")[0], rank.rank + 1
                arrays = [np.full(length + i, value, dtype) for i, dtype in enumerate(DTYPES_OF[kind])]
                op = "average" if kind in ("average", "group") else "sum"
                total = size * (size + 1) / 2 / (size if op == "average" else 1)
                expected = [np.full(len(a), total).astype(a.dtype) for a in arrays]
                begun.append((submit(own, name, arrays, op, half="bfloat16" if kind == "half" else None), expected))
            order.shuffle(begun)
            for (handle, placed), expected in begun:
                own.finish(handle)
                gpu.synchronize(own.stream)
                for at, wanted in zip(placed, expected, strict=True):
                    np.testing.assert_allclose(gpu.get(at, wanted).astype(float), wanted.astype(float), rtol=1e-6)
        own.close()

    with Group(hosts, segment_bytes=1 << 12) as group:
        group.run(body)
    assert nccl.counts()["launched"] > 0


@pytest.mark.parametrize("hosts", [(2,), (2, 1)])
@pytest.mark.parametrize("seed", range(4))
def test_batches_by_chance(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], seed: int) -> None:
    run_by_chance(gpu, nccl, hosts, seed)
    assert gpu.counts()["kernels"] > 0


@pytest.mark.parametrize("hosts", [(2,), (2, 1)])
@pytest.mark.parametrize("seed", range(4))
def test_batches_by_chance_without_kernels(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], seed: int) -> None:
    gpu.refuse_kernels(0b10)
    with recorded_stderr():
        run_by_chance(gpu, nccl, hosts, seed)
    assert gpu.counts()["kernels"] == 0
