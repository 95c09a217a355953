"""The algorithms between hosts: right sums in the promised order, the same bits everywhere, and never a hang."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import kernel_oracle as oracle
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from links import DEADLINE_MS, KINDS, Fabric, Rank, fabric_of, run_ranks

Array = npt.NDArray[Any]
RING, DOUBLING, TREE, CHAIN, GATHER_RING, GATHER_DOUBLING = range(6)
REDUCTIONS = {"ring": RING, "doubling": DOUBLING}
BROADCASTS = {"tree": TREE, "chain": CHAIN}
GATHERS = {"ring": GATHER_RING, "doubling": GATHER_DOUBLING}
OK, IN_PROGRESS, PEER_LOST, INTERNAL = 0, 1, -40, -60
FLOAT32 = oracle.DTYPES["float32"]
UINT8 = oracle.DTYPES["uint8"]
MIXED_CASES = [
    *((oracle.DTYPES[name], oracle.SUM) for name in ("int64", "float32", "float16", "bfloat16", "uint8")),
    *((dtype, oracle.PRODUCT) for dtype in oracle.COMPLEX.values()),
]
HOSTS = range(2, 7)
_KEPT: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""What calls point to."""

by_reduction = pytest.mark.parametrize("algorithm", REDUCTIONS.values(), ids=REDUCTIONS.keys())
by_broadcast = pytest.mark.parametrize("algorithm", BROADCASTS.values(), ids=BROADCASTS.keys())
by_gather = pytest.mark.parametrize("algorithm", GATHERS.values(), ids=GATHERS.keys())


def call_of(
    native: ModuleType,
    algorithm: int,
    hosts: int,
    count: int,
    *,
    dtype: oracle.Dtype = FLOAT32,
    reduce_op: int = oracle.SUM,
    root: int = 0,
    piece_bytes: int = 1 << 16,
) -> Any:
    return native.ffi.new(
        "shim_cross_call *",
        {
            "algorithm": algorithm,
            "host_count": hosts,
            "count": count,
            "dtype": dtype.code,
            "reduce_op": reduce_op,
            "root_host": root,
            "piece_bytes": piece_bytes,
        },
    )


def gather_of(native: ModuleType, algorithm: int, parts: Sequence[int], piece_bytes: int = 1 << 16) -> Any:
    """An allgather of so many bytes of each member, which lie one behind the other."""
    call = call_of(native, algorithm, len(parts), sum(parts), dtype=UINT8, piece_bytes=piece_bytes)
    sizes = native.ffi.new("size_t[]", list(parts))
    call.part_bytes = sizes
    _KEPT[call] = sizes
    return call


def gathered(parts: Sequence[int]) -> Array:
    """What every member holds in the end."""
    return np.concatenate([random_values(UINT8, size, seed=host) for host, size in enumerate(parts)])


def before_gather(host: int, parts: Sequence[int]) -> Array:
    """Only my own part is in its place."""
    data = np.full(sum(parts), 255 - host, np.uint8)
    mine = slice(sum(parts[:host]), sum(parts[: host + 1]))
    data[mine] = gathered(parts)[mine]
    return data


def run(rank: Rank, host: int, call: Any, data: Array, repeats: int = 1) -> int:
    """The status of `repeats` calls on consecutive parts of data, in place."""
    address = rank.native.ffi.from_buffer(data)
    return int(rank.lib.shim_cross_run(rank.transport, host, call, address, repeats, DEADLINE_MS))


def simulate(
    native: ModuleType,
    call: Any,
    inputs: list[Array],
    *,
    seed: int = 0,
    faults: tuple[int, int] = (0, 0),
    cut: Any = None,
) -> tuple[list[int], list[int], list[Array]]:
    """All members in one thread in random order: statuses, bytes sent, data afterwards."""
    data = [values.copy() for values in inputs]
    addresses = native.ffi.new("void *[]", [native.ffi.from_buffer(values) for values in data])
    statuses = native.ffi.new("int[]", len(inputs))
    sent = native.ffi.new("size_t[]", len(inputs))
    status = native.lib.shim_cross_simulate(call, addresses, *faults, seed, *(cut or (-1, -1, 0)), statuses, sent)
    assert status == OK
    return list(statuses), list(sent), data


def random_values(dtype: oracle.Dtype, count: int, seed: int) -> Array:
    """Finite values of any kind: whole ranges of integers, floats of mixed magnitude."""
    generator = np.random.default_rng(seed)
    if dtype.name == "bool":
        return generator.integers(0, 2, count).astype(np.uint8)
    if dtype.name in oracle.COMPLEX:
        parts = generator.standard_normal(2 * count)
        return oracle.join_parts(dtype, parts[:count], parts[count:])
    if dtype.is_float:
        floats = generator.standard_normal(count) * 10.0 ** generator.integers(-3, 3, count)
        return oracle.stored_form(dtype, floats.astype(np.float32 if dtype.is_half else dtype.storage))
    limits = np.iinfo(dtype.storage)
    integers: Array = generator.integers(limits.min, limits.max, count, dtype=dtype.storage, endpoint=True)
    return integers


def parts_of(count: int, parts: int) -> list[slice]:
    lengths = [count // parts + (1 if index < count % parts else 0) for index in range(parts)]
    ends = np.cumsum(lengths).tolist()
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def reduced(algorithm: int, dtype: oracle.Dtype, op: int, inputs: list[Array]) -> Array:
    """The result in the documented order of summation, rounded after every hop."""
    hosts = len(inputs)
    if algorithm == RING:
        result: Array = inputs[0].copy()
        for first, part in enumerate(parts_of(len(result), hosts)):
            value = inputs[first][part]
            for hop in range(1, hosts):
                value = oracle.reduce(dtype, op, [value, inputs[(first + hop) % hosts][part]])
            result[part] = value
        return result
    exchanging = 1 << (hosts.bit_length() - 1)
    values = [oracle.reduce(dtype, op, inputs[first::exchanging]) for first in range(exchanging)]
    while len(values) > 1:
        values = [oracle.reduce(dtype, op, values[at : at + 2]) for at in range(0, len(values), 2)]
    return values[0]


def same_bits(arrays: list[Array], expected: Array) -> bool:
    return all(values.tobytes() == expected.tobytes() for values in arrays)


def counts_for(hosts: int) -> list[int]:
    return [0, 1, hosts - 1, hosts, hosts + 1, 1001, 4999]


# Reductions and broadcasts on every transport, ranks as threads.


@by_reduction
@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("kind", KINDS)
def test_allreduce_sums_on_every_transport(native: ModuleType, kind: str, hosts: int, algorithm: int) -> None:
    cases = [
        (count, piece_bytes)
        for count in counts_for(hosts)
        for piece_bytes in (1, 60, 4096, 1 << 20)
        if count < 2000 or piece_bytes > 60
    ]
    with fabric_of(native, kind, hosts) as fabric:

        def body(host: int) -> None:
            for count, piece_bytes in cases:
                data = ((np.arange(count) % 1000) * (host + 1)).astype(np.float32)
                call = call_of(native, algorithm, hosts, count, piece_bytes=piece_bytes)
                assert run(fabric.ranks[host], host, call, data) == OK
                expected = (np.arange(count) % 1000) * (hosts * (hosts + 1) // 2)
                np.testing.assert_array_equal(data, expected.astype(np.float32))

        run_ranks(hosts, body)


@by_reduction
@pytest.mark.parametrize(
    ("kind", "hosts"),
    [
        ("tcp", 8),
        ("loopback", 8),
        ("tcp-unix", 3),
        ("loopback-delayed", 3),
        ("loopback-one-piece", 3),
        ("loopback-late-data", 3),
    ],
)
def test_allreduce_of_a_mebibyte(native: ModuleType, kind: str, hosts: int, algorithm: int) -> None:
    inputs = [random_values(FLOAT32, 1 << 18, host) for host in range(hosts)]
    expected = reduced(algorithm, FLOAT32, oracle.SUM, inputs)
    with fabric_of(native, kind, hosts) as fabric:

        def body(host: int) -> Array:
            data: Array = inputs[host].copy()
            call = call_of(native, algorithm, hosts, len(data), piece_bytes=20_000)
            assert run(fabric.ranks[host], host, call, data) == OK
            return data

        assert same_bits(run_ranks(hosts, body), expected)


@by_broadcast
@pytest.mark.parametrize("hosts", [*HOSTS, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_broadcast_from_every_root_on_every_transport(
    native: ModuleType, kind: str, hosts: int, algorithm: int
) -> None:
    cases = [(root, count, piece) for root in range(hosts) for count in (0, 1, 1001) for piece in (100, 1 << 20)]
    with fabric_of(native, kind, hosts) as fabric:

        def body(host: int) -> None:
            for root, count, piece_bytes in cases:
                data = random_values(FLOAT32, count, seed=host)
                call = call_of(native, algorithm, hosts, count, root=root, piece_bytes=piece_bytes)
                assert run(fabric.ranks[host], host, call, data) == OK
                assert same_bits([data], random_values(FLOAT32, count, seed=root))

        run_ranks(hosts, body)


@by_broadcast
@pytest.mark.parametrize("kind", KINDS)
def test_broadcast_of_a_mebibyte(native: ModuleType, kind: str, algorithm: int) -> None:
    hosts, root = 4, 2
    with fabric_of(native, kind, hosts) as fabric:

        def body(host: int) -> Array:
            data = random_values(oracle.DTYPES["uint8"], 1 << 20, seed=host)
            call = call_of(
                native, algorithm, hosts, len(data), dtype=oracle.DTYPES["uint8"], root=root, piece_bytes=30_000
            )
            assert run(fabric.ranks[host], host, call, data) == OK
            return data

        assert same_bits(run_ranks(hosts, body), random_values(oracle.DTYPES["uint8"], 1 << 20, seed=root))


@by_gather
@pytest.mark.parametrize("hosts", [*HOSTS, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_allgather_of_parts_of_any_length_on_every_transport(
    native: ModuleType, kind: str, hosts: int, algorithm: int
) -> None:
    lengths: list[list[int]] = [
        [0] * hosts,
        [1] * hosts,
        [1000] * hosts,
        list(range(hosts)),
        [0] * (hosts - 1) + [9001],
        [5003] + [0] * (hosts - 2) + [70_000],
    ]
    with fabric_of(native, kind, hosts) as fabric:

        def body(host: int) -> None:
            for parts in lengths:
                for piece_bytes in (100, 1 << 20):
                    data = before_gather(host, parts)
                    call = gather_of(native, algorithm, parts, piece_bytes)
                    assert run(fabric.ranks[host], host, call, data) == OK
                    assert same_bits([data], gathered(parts))

        run_ranks(hosts, body)


@by_gather
@pytest.mark.parametrize("kind", KINDS)
def test_allgather_of_megabytes(native: ModuleType, kind: str, algorithm: int) -> None:
    parts = [1 << 19, 3, 1 << 20, 200_000]
    with fabric_of(native, kind, len(parts)) as fabric:

        def body(host: int) -> Array:
            data = before_gather(host, parts)
            assert run(fabric.ranks[host], host, gather_of(native, algorithm, parts, 30_000), data) == OK
            return data

        assert same_bits(run_ranks(len(parts), body), gathered(parts))


@by_gather
@pytest.mark.parametrize("kind", KINDS)
def test_allgathers_may_follow_each_other_closely(native: ModuleType, kind: str, algorithm: int) -> None:
    parts, repeats = [700, 0, 1300, 64], 40
    with fabric_of(native, kind, len(parts)) as fabric:

        def body(host: int) -> Array:
            data = np.tile(before_gather(host, parts), repeats)
            call = gather_of(native, algorithm, parts, piece_bytes=128)
            assert run(fabric.ranks[host], host, call, data, repeats) == OK
            return data

        assert same_bits(run_ranks(len(parts), body), np.tile(gathered(parts), repeats))


@pytest.mark.parametrize("algorithm", [RING, DOUBLING, TREE, CHAIN])
@pytest.mark.parametrize("kind", KINDS)
def test_calls_may_follow_each_other_closely(native: ModuleType, kind: str, algorithm: int) -> None:
    hosts, count, repeats = 3, 500, 40
    with fabric_of(native, kind, hosts) as fabric:

        def body(host: int) -> Array:
            data = np.repeat(np.arange(repeats, dtype=np.float32) * 10, count) + host
            call = call_of(native, algorithm, hosts, count, piece_bytes=128)
            assert run(fabric.ranks[host], host, call, data, repeats) == OK
            return data

        tens = np.repeat(np.arange(repeats, dtype=np.float32) * 10, count)
        expected = 3 * tens + 3 if algorithm in REDUCTIONS.values() else tens
        assert same_bits(run_ranks(hosts, body), expected)


# What is computed.


@by_reduction
@pytest.mark.parametrize(("dtype", "op"), oracle.CASES, ids=str)
def test_every_dtype_and_operation_in_the_documented_order(
    native: ModuleType, dtype: oracle.Dtype, op: int, algorithm: int
) -> None:
    for hosts in (2, 3, 5, 6):
        inputs = [random_values(dtype, 257, seed=host) for host in range(hosts)]
        call = call_of(native, algorithm, hosts, 257, dtype=dtype, reduce_op=op, piece_bytes=100)
        statuses, _, data = simulate(native, call, inputs)
        assert statuses == [OK] * hosts
        assert same_bits(data, reduced(algorithm, dtype, op, inputs))


@by_reduction
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_infinities_and_nans_are_the_same_bits_everywhere(native: ModuleType, name: str, algorithm: int) -> None:
    dtype = oracle.DTYPES[name]
    wide = np.float32 if dtype.is_half else dtype.storage
    specials = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 1e30, -1e-30], dtype=wide)
    with np.errstate(over="ignore"):
        inputs = [oracle.stored_form(dtype, np.roll(np.repeat(specials, 9), 7 * host)) for host in range(5)]
    for op in oracle.OPS.values():
        call = call_of(native, algorithm, 5, len(inputs[0]), dtype=dtype, reduce_op=op, piece_bytes=64)
        statuses, _, data = simulate(native, call, inputs)
        assert statuses == [OK] * 5
        assert same_bits(data, data[0])
        nan = oracle.is_nan(dtype, reduced(algorithm, dtype, op, inputs))
        np.testing.assert_array_equal(oracle.is_nan(dtype, data[0]), nan)


@settings(max_examples=150)
@given(data=st.data())
def test_any_reduction_under_any_timing_gives_the_documented_bits(native: ModuleType, data: st.DataObject) -> None:
    algorithm = data.draw(st.sampled_from([RING, DOUBLING]), "algorithm")
    hosts = data.draw(st.integers(2, 9), "hosts")
    count = data.draw(st.integers(0, 300), "count")
    dtype, op = data.draw(st.sampled_from(MIXED_CASES), "dtype, op")
    piece_bytes = data.draw(st.integers(1, 400), "piece_bytes")
    faults = data.draw(st.tuples(st.integers(0, 4), st.integers(0, 50)), "delay_polls, link_piece_bytes")
    inputs = [random_values(dtype, count, seed=host) for host in range(hosts)]
    call = call_of(native, algorithm, hosts, count, dtype=dtype, reduce_op=op, piece_bytes=piece_bytes)
    seed = data.draw(st.integers(0, 2**32), "seed")
    statuses, _, results = simulate(native, call, inputs, seed=seed, faults=faults)
    assert statuses == [OK] * hosts
    assert same_bits(results, reduced(algorithm, dtype, op, inputs))


@settings(max_examples=150)
@given(data=st.data())
def test_any_broadcast_under_any_timing_gives_the_roots_bits(native: ModuleType, data: st.DataObject) -> None:
    algorithm = data.draw(st.sampled_from([TREE, CHAIN]), "algorithm")
    hosts = data.draw(st.integers(2, 17), "hosts")
    root = data.draw(st.integers(0, hosts - 1), "root")
    count = data.draw(st.integers(0, 300), "count")
    piece_bytes = data.draw(st.integers(1, 400), "piece_bytes")
    faults = data.draw(st.tuples(st.integers(0, 4), st.integers(0, 50)), "delay_polls, link_piece_bytes")
    inputs = [random_values(oracle.DTYPES["int16"], count, seed=host) for host in range(hosts)]
    call = call_of(native, algorithm, hosts, count, dtype=oracle.DTYPES["int16"], root=root, piece_bytes=piece_bytes)
    seed = data.draw(st.integers(0, 2**32), "seed")
    statuses, sent, results = simulate(native, call, inputs, seed=seed, faults=faults)
    assert statuses == [OK] * hosts
    assert same_bits(results, inputs[root])
    assert sum(sent) == (hosts - 1) * count * 2


@settings(max_examples=150)
@given(data=st.data())
def test_any_allgather_under_any_timing_gives_every_part_once(native: ModuleType, data: st.DataObject) -> None:
    algorithm = data.draw(st.sampled_from([GATHER_RING, GATHER_DOUBLING]), "algorithm")
    parts = data.draw(st.lists(st.integers(0, 300), min_size=2, max_size=17), "parts")
    piece_bytes = data.draw(st.integers(1, 400), "piece_bytes")
    faults = data.draw(st.tuples(st.integers(0, 4), st.integers(0, 50)), "delay_polls, link_piece_bytes")
    seed = data.draw(st.integers(0, 2**32), "seed")
    hosts = len(parts)
    inputs = [before_gather(host, parts) for host in range(hosts)]
    statuses, sent, results = simulate(
        native, gather_of(native, algorithm, parts, piece_bytes), inputs, seed=seed, faults=faults
    )
    assert statuses == [OK] * hosts
    assert same_bits(results, gathered(parts))
    assert sum(sent) == (hosts - 1) * sum(parts)


@given(count=st.integers(0, 1 << 50), parts=st.integers(1, 1000), data=st.data())
def test_parts_cover_everything_and_differ_by_at_most_one(
    native: ModuleType, count: int, parts: int, data: st.DataObject
) -> None:
    begin, length = native.ffi.new("size_t *"), native.ffi.new("size_t *")

    def part(index: int) -> tuple[int, int]:
        native.lib.shim_part(count, parts, index, begin, length)
        return begin[0], length[0]

    index = data.draw(st.integers(0, parts - 1))
    first, size = part(index)
    assert size in (count // parts, math.ceil(count / parts))
    assert part(0)[0] == 0
    assert first + size == (part(index + 1)[0] if index + 1 < parts else count)


# What it costs.


@pytest.mark.parametrize("hosts", [2, 3, 5, 8])
def test_ring_sends_only_two_h_minus_one_of_h_parts(native: ModuleType, hosts: int) -> None:
    count = 40 * hosts
    inputs = [random_values(FLOAT32, count, seed=host) for host in range(hosts)]
    _, sent, _ = simulate(native, call_of(native, RING, hosts, count, piece_bytes=16), inputs)
    assert sent == [4 * 2 * (hosts - 1) * count // hosts] * hosts


@pytest.mark.parametrize(
    ("hosts", "sends"), [(2, [1, 1]), (3, [2, 1, 1]), (4, [2] * 4), (6, [3, 3, 2, 2, 1, 1]), (8, [3] * 8)]
)
def test_doubling_sends_all_bytes_once_per_round(native: ModuleType, hosts: int, sends: list[int]) -> None:
    inputs = [random_values(FLOAT32, 10, seed=host) for host in range(hosts)]
    _, sent, _ = simulate(native, call_of(native, DOUBLING, hosts, 10), inputs)
    assert sent == [40 * times for times in sends]


@pytest.mark.parametrize(("hosts", "sends"), [(2, [1, 0]), (5, [3, 0, 1, 0, 0]), (8, [3, 0, 1, 0, 2, 0, 1, 0])])
def test_tree_root_sends_once_per_round_and_chain_members_once(
    native: ModuleType, hosts: int, sends: list[int]
) -> None:
    inputs = [random_values(FLOAT32, 10, seed=host) for host in range(hosts)]
    _, sent, _ = simulate(native, call_of(native, TREE, hosts, 10), inputs)
    assert sent == [40 * times for times in sends]
    _, sent, _ = simulate(native, call_of(native, CHAIN, hosts, 10), inputs)
    assert sent == [40] * (hosts - 1) + [0]


@pytest.mark.parametrize("hosts", [2, 3, 5, 8])
def test_an_allgather_of_equal_parts_loads_every_link_alike(native: ModuleType, hosts: int) -> None:
    parts = [70] * hosts
    for algorithm in GATHERS.values():
        inputs = [before_gather(host, parts) for host in range(hosts)]
        _, sent, _ = simulate(native, gather_of(native, algorithm, parts, 16), inputs)
        assert sent == [70 * (hosts - 1)] * hosts


# Loss.


def run_or_leave(fabric: Fabric, host: int, call: Any, data: Array) -> int:
    """Closes its end after an error, as a process that gives up does."""
    status = run(fabric.ranks[host], host, call, data)
    if status != OK:
        fabric.crash(host)
    return status


@pytest.mark.parametrize("algorithm", [RING, DOUBLING, TREE, CHAIN])
@pytest.mark.parametrize("hosts", [2, 4, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_a_member_that_never_comes_fails_the_others(native: ModuleType, kind: str, hosts: int, algorithm: int) -> None:
    missing = hosts - 1
    root = missing if algorithm in BROADCASTS.values() else 0
    with fabric_of(native, kind, hosts) as fabric:

        def body(host: int) -> int:
            if host == missing:
                fabric.crash(host)
                return PEER_LOST
            call = call_of(native, algorithm, hosts, 100_000, root=root, piece_bytes=4096)
            return run_or_leave(fabric, host, call, np.zeros(100_000, np.float32))

        assert run_ranks(hosts, body) == [PEER_LOST] * hosts


@by_reduction
@pytest.mark.parametrize("hosts", [2, 3, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_a_member_that_dies_halfway_fails_the_others(native: ModuleType, kind: str, hosts: int, algorithm: int) -> None:
    """The last member stops in the middle: it has taken part in the first of two calls only."""
    count = 50_000
    with fabric_of(native, kind, hosts) as fabric:

        def body(host: int) -> list[int]:
            call = call_of(native, algorithm, hosts, count, piece_bytes=1000)
            data = np.ones(count, np.float32)
            statuses = [run(fabric.ranks[host], host, call, data)]
            if host == hosts - 1:
                fabric.crash(host)
                return [*statuses, PEER_LOST]
            return [*statuses, run_or_leave(fabric, host, call, data)]

        assert run_ranks(hosts, body) == [[OK, PEER_LOST]] * hosts


def die_or_run_on(fabric: Fabric, host: int, hosts: int, call: Any, data: Array) -> int:
    """The last host leaves after the first of five calls; the status of the others."""
    if host == hosts - 1:
        assert run(fabric.ranks[host], host, call, data) == OK
        fabric.crash(host)
        return PEER_LOST
    status = run(fabric.ranks[host], host, call, data, repeats=5)
    fabric.crash(host)
    return status


@pytest.mark.parametrize("algorithm", [RING, DOUBLING, TREE, CHAIN])
@pytest.mark.parametrize("kind", KINDS)
def test_a_member_that_dies_while_two_calls_are_under_way_fails_both(
    native: ModuleType, kind: str, algorithm: int
) -> None:
    """It has taken part in the first of five calls; the others have begun the second, and the third behind it."""
    hosts, count, root = 3, 30_000, 2 if algorithm in BROADCASTS.values() else 0
    with fabric_of(native, kind, hosts) as fabric:

        def body(host: int) -> int:
            call = call_of(native, algorithm, hosts, count, root=root, piece_bytes=40_000)
            data = np.ones(5 * count, np.float32)
            return die_or_run_on(fabric, host, hosts, call, data)

        assert run_ranks(hosts, body) == [PEER_LOST] * hosts


@by_gather
@pytest.mark.parametrize("hosts", [2, 3, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_a_member_that_dies_halfway_through_allgathers_fails_the_others(
    native: ModuleType, kind: str, hosts: int, algorithm: int
) -> None:
    """It has taken part in the first of five calls; the others have begun the second, and the third behind it."""
    parts = [100_000 + host for host in range(hosts)]
    with fabric_of(native, kind, hosts) as fabric:

        def body(host: int) -> int:
            call = gather_of(native, algorithm, parts, piece_bytes=10_000)
            data = np.tile(before_gather(host, parts), 5)
            return die_or_run_on(fabric, host, hosts, call, data)

        assert run_ranks(hosts, body) == [PEER_LOST] * hosts


@settings(max_examples=200)
@given(data=st.data())
def test_an_allgather_whose_link_is_cut_never_hangs_and_never_gives_a_wrong_result(
    native: ModuleType, data: st.DataObject
) -> None:
    algorithm = data.draw(st.sampled_from([GATHER_RING, GATHER_DOUBLING]), "algorithm")
    parts = data.draw(st.lists(st.integers(0, 800), min_size=2, max_size=7), "parts")
    cut = data.draw(st.permutations(range(len(parts))), "order")[:2]
    turn = data.draw(st.integers(0, 120), "turn")
    faults = data.draw(st.tuples(st.integers(0, 2), st.integers(1, 100)), "delay_polls, link_piece_bytes")
    seed = data.draw(st.integers(0, 2**32), "seed")
    call = gather_of(native, algorithm, parts, data.draw(st.integers(4, 800), "piece_bytes"))
    inputs = [before_gather(host, parts) for host in range(len(parts))]
    statuses, _, results = simulate(native, call, inputs, seed=seed, faults=faults, cut=(*cut, turn))
    assert set(statuses) <= {OK, PEER_LOST}
    whole = [result for result, status in zip(results, statuses, strict=True) if status == OK]
    assert same_bits(whole, gathered(parts))


@settings(max_examples=200)
@given(data=st.data())
def test_a_link_cut_at_any_moment_never_hangs_and_never_gives_a_wrong_result(
    native: ModuleType, data: st.DataObject
) -> None:
    algorithm = data.draw(st.sampled_from([RING, DOUBLING, TREE, CHAIN]), "algorithm")
    hosts = data.draw(st.integers(2, 7), "hosts")
    cut = data.draw(st.permutations(range(hosts)), "order")[:2]
    turn = data.draw(st.integers(0, 120), "turn")
    inputs = [random_values(FLOAT32, 200, seed=host) for host in range(hosts)]
    call = call_of(native, algorithm, hosts, 200, piece_bytes=data.draw(st.integers(4, 800), "piece_bytes"))
    faults = data.draw(st.tuples(st.integers(0, 2), st.integers(1, 100)), "delay_polls, link_piece_bytes")
    seed = data.draw(st.integers(0, 2**32), "seed")
    statuses, _, results = simulate(native, call, inputs, seed=seed, faults=faults, cut=(*cut, turn))
    assert set(statuses) <= {OK, PEER_LOST}
    reduces = algorithm in REDUCTIONS.values()
    expected = reduced(algorithm, FLOAT32, oracle.SUM, inputs) if reduces else inputs[0]
    assert same_bits([result for result, status in zip(results, statuses, strict=True) if status == OK], expected)


@pytest.mark.parametrize("algorithm", [RING, DOUBLING, TREE, CHAIN])
@pytest.mark.parametrize("hosts", [2, 3, 6])
def test_a_link_cut_in_the_middle_of_a_transfer_is_an_error_somewhere(
    native: ModuleType, hosts: int, algorithm: int
) -> None:
    inputs = [random_values(FLOAT32, 5000, seed=host) for host in range(hosts)]
    call = call_of(native, algorithm, hosts, 5000, piece_bytes=100)
    statuses, _, _ = simulate(native, call, inputs, faults=(0, 50), cut=(0, 1, 50))
    assert PEER_LOST in statuses and set(statuses) <= {OK, PEER_LOST}


# What no caller should do.


@pytest.mark.parametrize(
    "wrong",
    [{"host_count": 1}, {"host_count": 0}, {"dtype": 99}, {"dtype": -1}, {"piece_bytes": 0}],
    ids=lambda wrong: "-".join(f"{name}={value}" for name, value in wrong.items()),
)
@pytest.mark.parametrize("algorithm", [RING, DOUBLING, TREE, CHAIN])
def test_an_impossible_call_is_refused(native: ModuleType, algorithm: int, wrong: dict[str, int]) -> None:
    call = call_of(native, algorithm, 2, 10)
    for name, value in wrong.items():
        setattr(call, name, value)
    assert native.lib.shim_cross_begin(native.ffi.NULL, 0, call, native.ffi.NULL) == INTERNAL


@pytest.mark.parametrize("host", [-1, 2])
@pytest.mark.parametrize("algorithm", range(6))
def test_a_host_that_is_none_is_refused(native: ModuleType, algorithm: int, host: int) -> None:
    is_gather = algorithm in GATHERS.values()
    call = gather_of(native, algorithm, [5, 5]) if is_gather else call_of(native, algorithm, 2, 10)
    assert native.lib.shim_cross_begin(native.ffi.NULL, host, call, native.ffi.NULL) == INTERNAL


@by_broadcast
@pytest.mark.parametrize("root", [-1, 2])
def test_a_root_that_is_none_is_refused(native: ModuleType, algorithm: int, root: int) -> None:
    call = call_of(native, algorithm, 2, 10, root=root)
    assert native.lib.shim_cross_begin(native.ffi.NULL, 0, call, native.ffi.NULL) == INTERNAL


@by_gather
def test_an_allgather_without_parts_or_of_other_than_bytes_is_refused(native: ModuleType, algorithm: int) -> None:
    call = call_of(native, algorithm, 2, 10, dtype=UINT8)
    assert native.lib.shim_cross_begin(native.ffi.NULL, 0, call, native.ffi.NULL) == INTERNAL
    call = gather_of(native, algorithm, [5, 5])
    call.dtype = FLOAT32.code
    assert native.lib.shim_cross_begin(native.ffi.NULL, 0, call, native.ffi.NULL) == INTERNAL


def test_a_missing_link_is_an_internal_error_and_lets_go_of_everything(native: ModuleType) -> None:
    with fabric_of(native, "loopback", 3) as fabric:
        data = np.zeros(100, np.float32)
        rank = fabric.ranks[0]
        assert run(rank, 3, call_of(native, RING, 5, 100), data) == INTERNAL
        assert rank.sleep_fds()[0] == 0
