"""Reduce-scatter between hosts: each member's part of the sum, in the promised order, and never a hang."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import kernel_oracle as oracle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from links import KINDS, fabric_of, run_ranks
from test_cross import (
    _KEPT,
    FLOAT32,
    INTERNAL,
    MIXED_CASES,
    OK,
    PEER_LOST,
    Array,
    call_of,
    die_or_run_on,
    random_values,
    run,
    simulate,
)

SCATTER_RING = 6


def scatter_of(
    native: ModuleType, parts: Sequence[int], dtype: oracle.Dtype = FLOAT32, piece_bytes: int = 1 << 16, op: int = 1
) -> Any:
    """Of so many elements for each member."""
    call = call_of(native, SCATTER_RING, len(parts), sum(parts), dtype=dtype, reduce_op=op, piece_bytes=piece_bytes)
    element = native.lib.horo_dtype_bytes(dtype.code)
    sizes = native.ffi.new("size_t[]", [count * element for count in parts])
    call.part_bytes = sizes
    _KEPT[call] = sizes
    return call


def slices(parts: Sequence[int]) -> list[slice]:
    return [slice(sum(parts[:host]), sum(parts[: host + 1])) for host in range(len(parts))]


def scattered(dtype: oracle.Dtype, op: int, inputs: list[Array], parts: Sequence[int]) -> list[Array]:
    """Each member's part, in the documented order of summation, rounded after every hop."""
    hosts = len(parts)
    results = []
    for host, part in enumerate(slices(parts)):
        value = inputs[(host + 1) % hosts][part]
        for hop in range(2, hosts + 1):
            value = oracle.reduce(dtype, op, [value, inputs[(host + hop) % hosts][part]])
        results.append(value)
    return results


def own(data: Array, host: int, parts: Sequence[int]) -> bytes:
    return data[slices(parts)[host]].tobytes()


@pytest.mark.parametrize("hosts", [2, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_any_length_on_every_transport(native: ModuleType, kind: str, hosts: int) -> None:
    lengths = [[0] * hosts, [1] * hosts, [7, 0, 300, 1, 50][:hosts], [0, 9000, 1, 3, 1][:hosts]]
    with fabric_of(native, kind, hosts) as fabric:

        def body(host: int) -> None:
            for parts in lengths:
                for piece_bytes in (60, 4096):
                    data = ((np.arange(sum(parts)) % 1000) * (host + 1)).astype(np.float32)
                    call = scatter_of(native, parts, piece_bytes=piece_bytes)
                    assert run(fabric.ranks[host], host, call, data) == OK
                    total = (np.arange(sum(parts)) % 1000 * (hosts * (hosts + 1) // 2)).astype(np.float32)
                    assert own(data, host, parts) == own(total, host, parts)

        run_ranks(hosts, body)


@pytest.mark.parametrize(("dtype", "op"), oracle.CASES, ids=str)
def test_every_dtype_and_operation_in_the_documented_order(native: ModuleType, dtype: oracle.Dtype, op: int) -> None:
    for hosts in (2, 3, 6):
        parts = [40 + 7 * host for host in range(hosts)]
        inputs = [random_values(dtype, sum(parts), seed=host) for host in range(hosts)]
        statuses, _, data = simulate(native, scatter_of(native, parts, dtype, 100, op), inputs)
        assert statuses == [OK] * hosts
        for host, expected in enumerate(scattered(dtype, op, inputs, parts)):
            assert own(data[host], host, parts) == expected.tobytes()


@settings(max_examples=150)
@given(data=st.data())
def test_any_timing_gives_the_documented_bits(native: ModuleType, data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.integers(0, 150), min_size=2, max_size=9), "parts")
    dtype, op = data.draw(st.sampled_from(MIXED_CASES), "dtype, op")
    piece_bytes = data.draw(st.integers(1, 400), "piece_bytes")
    faults = data.draw(st.tuples(st.integers(0, 4), st.integers(0, 50)), "delay_polls, link_piece_bytes")
    seed = data.draw(st.integers(0, 2**32), "seed")
    inputs = [random_values(dtype, sum(parts), seed=host) for host in range(len(parts))]
    call = scatter_of(native, parts, dtype, piece_bytes, op)
    statuses, _, results = simulate(native, call, inputs, seed=seed, faults=faults)
    assert statuses == [OK] * len(parts)
    for host, expected in enumerate(scattered(dtype, op, inputs, parts)):
        assert own(results[host], host, parts) == expected.tobytes()


@pytest.mark.parametrize("hosts", [2, 3, 5, 8])
def test_every_link_carries_all_parts_but_one(native: ModuleType, hosts: int) -> None:
    parts = [40] * hosts
    inputs = [random_values(FLOAT32, sum(parts), seed=host) for host in range(hosts)]
    _, sent, _ = simulate(native, scatter_of(native, parts, piece_bytes=16), inputs)
    assert sent == [160 * (hosts - 1)] * hosts


@pytest.mark.parametrize("hosts", [2, 3, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_a_member_that_dies_halfway_fails_the_others(native: ModuleType, kind: str, hosts: int) -> None:
    parts = [20_000 + host for host in range(hosts)]
    with fabric_of(native, kind, hosts) as fabric:

        def body(host: int) -> int:
            call = scatter_of(native, parts, piece_bytes=10_000)
            return die_or_run_on(fabric, host, hosts, call, np.ones(5 * sum(parts), np.float32))

        assert run_ranks(hosts, body) == [PEER_LOST] * hosts


@settings(max_examples=150)
@given(data=st.data())
def test_a_link_cut_at_any_moment_never_gives_a_wrong_result(native: ModuleType, data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.integers(0, 200), min_size=2, max_size=7), "parts")
    cut = data.draw(st.permutations(range(len(parts))), "order")[:2]
    turn = data.draw(st.integers(0, 120), "turn")
    faults = data.draw(st.tuples(st.integers(0, 2), st.integers(1, 100)), "delay_polls, link_piece_bytes")
    seed = data.draw(st.integers(0, 2**32), "seed")
    call = scatter_of(native, parts, piece_bytes=data.draw(st.integers(4, 800), "piece_bytes"))
    inputs = [random_values(FLOAT32, sum(parts), seed=host) for host in range(len(parts))]
    statuses, _, results = simulate(native, call, inputs, seed=seed, faults=faults, cut=(*cut, turn))
    assert set(statuses) <= {OK, PEER_LOST}
    for host, expected in enumerate(scattered(FLOAT32, oracle.SUM, inputs, parts)):
        assert statuses[host] != OK or own(results[host], host, parts) == expected.tobytes()


def test_a_call_without_parts_is_refused(native: ModuleType) -> None:
    call = call_of(native, SCATTER_RING, 2, 10)
    assert native.lib.shim_cross_begin(native.ffi.NULL, 0, call, native.ffi.NULL) == INTERNAL
