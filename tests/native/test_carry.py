"""Small allreduces between hosts whose data travels with the agreement: no link moves a byte, and no bit differs."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from ranks import SUM, Group, Rank, on_ranks, run_ranks, wait_for

from horo.core import context
from horo.errors import MismatchError

HOSTS = [[1, 1], [2, 2], [1, 1, 1], [3, 1, 2], [1, 3], [1, 1, 1, 1, 1]]
SEGMENT_BYTES = 1 << 16
LIMIT = 1 << 14
"""Bytes that one tensor may have to be carried, as tuning.carried of ``team.h``."""


def link_bytes(rank: Rank) -> int:
    """That this rank has handed to its links for data so far."""
    return rank.context.counters()["link_bytes"]


def warm_up(rank: Rank, name: str, array: np.ndarray, **options: Any) -> None:
    """Afterwards the tensor is known by its id, and nothing is under way anywhere."""
    for _ in range(2):
        rank.allreduce(array.copy(), name, **options)
        rank.barrier()


@pytest.mark.parametrize("count", [1, 3, 1000, LIMIT // 4])
@on_ranks(*HOSTS)
def test_a_lone_small_tensor_needs_no_link_for_data(rank: Rank, count: int) -> None:
    warm_up(rank, "x", np.ones(count, np.float32))
    before = link_bytes(rank)
    for step in range(20):
        array = np.arange(count, dtype=np.float32) + rank.rank + step
        rank.allreduce(array, "x")
        wanted = rank.size * (np.arange(count) + step) + rank.size * (rank.size - 1) / 2
        assert (array == wanted).all()
    assert link_bytes(rank) == before


@on_ranks([1, 1])
def test_what_is_too_large_travels_by_itself(rank: Rank) -> None:
    warm_up(rank, "x", np.ones(LIMIT // 4 + 1, np.float32))
    before = link_bytes(rank)
    assert (rank.allreduce(np.ones(LIMIT // 4 + 1, np.float32), "x") == rank.size).all()
    assert link_bytes(rank) > before


@pytest.mark.parametrize("busy", [0, 1])
@on_ranks([1, 1], [2, 1], [1, 1, 1])
def test_data_that_only_some_carry_is_dropped(rank: Rank, busy: int) -> None:
    """One rank has another operation under way when it comes to the small one, in every second step."""
    warm_up(rank, "x", np.ones(5, np.float32))
    for step in range(60):
        rank.meet()
        array = np.full(5, rank.rank + step, np.float32)
        other = np.full(3000, step, np.float32)
        calls = [("other", other), ("x", array)][:: 1 if rank.rank == busy else -1] if step % 2 else [("x", array)]
        rank.finish(*[rank.submit("allreduce", name, [value], reduce_op=SUM) for name, value in calls])
        assert (array == rank.size * step + rank.size * (rank.size - 1) / 2).all()
        assert (other == step * (rank.size if step % 2 else 1)).all()


@pytest.mark.parametrize("differs", [0, 1])
@on_ranks([1, 1], [2, 1], [1, 1, 1])
def test_data_of_a_round_that_failed_is_not_used_in_the_next(rank: Rank, differs: int) -> None:
    warm_up(rank, "x", np.ones(5, np.float32))
    for step in range(30):
        with pytest.raises(MismatchError, match="'x'"):
            rank.allreduce(np.full(6 if rank.rank == differs else 5, 100 + step, np.float32), "x")
        assert (rank.allreduce(np.full(5, step, np.float32), "x") == rank.size * step).all()


@pytest.mark.parametrize(("hosts", "is_carried"), [([2], False), ([2, 1], True)], ids=str)
def test_a_tensor_alone_on_one_host_is_not_carried(native: ModuleType, hosts: list[int], is_carried: bool) -> None:
    """There the arena is quicker: what rank 1 writes to its leader is an announcement, which has no data."""
    data, steps = np.ones(1000, np.float32), 10

    def written(group: Group) -> int:
        memory = native.ffi.cast("void *", group.arena_address(0))
        return int(native.lib.shim_arena_requests_written(memory, 2, SEGMENT_BYTES, 1))

    def body(rank: Rank) -> None:
        for _ in range(steps):
            array = data.copy()
            rank.finish(rank.submit("allreduce", "x", [array], reduce_op=1))  # by what waits, it would be counted
            assert (array == rank.size).all()
            rank.barrier()

    with Group(hosts, segment_bytes=SEGMENT_BYTES) as group:
        group.run(lambda rank: warm_up(rank, "x", data))
        before = written(group)
        group.run(body)
        sent = written(group) - before
    assert steps * 4 <= sent
    assert (sent >= steps * data.nbytes) == is_carried, sent


COUNT = 300
SCALED = {"prescale": 0.3, "postscale": 0.7}


@pytest.mark.parametrize("hosts", [[1, 1], [2, 2], [3, 1], [1, 2]], ids=str)
@pytest.mark.parametrize(
    ("op", "options"),
    [("average", {}), ("sum", SCALED), ("product", {}), ("product", SCALED)],
    ids=["average", "scaled sum", "product", "scaled product"],
)
@pytest.mark.parametrize("spread", [1, 1e-5], ids=str)
@pytest.mark.parametrize(
    "form", [("float16", None), ("float32", "bfloat16"), ("float32", None), ("complex64", None)], ids=str
)
def test_the_bits_do_not_depend_on_the_path(
    hosts: list[int], op: str, options: dict[str, float], spread: float, form: tuple[str, str | None]
) -> None:
    """On all ranks, in a batch and carried."""
    dtype, wire = form
    random = np.random.default_rng(7)
    turn = np.exp(1j * np.arange(COUNT)) if dtype.startswith("complex") else 1
    inputs = [(random.standard_normal(COUNT) * turn * spread).astype(dtype) for _ in range(sum(hosts))]
    wanted = {"wires": [wire], "reduce_op": context.REDUCE_OPS[op], **options}

    def reduce(rank: Rank, *names: str) -> bytes:
        arrays = [inputs[rank.rank].copy() for _ in names]
        pairs = zip(names, arrays, strict=True)
        rank.finish(*[rank.submit("allreduce", name, [array], **wanted) for name, array in pairs])
        return arrays[-1].tobytes()

    def body(rank: Rank) -> None:
        other = rank.group.contexts[hosts[0]]  # the leader of the other host
        for name in ("x", "y"):
            reduce(rank, name)
        rank.barrier()
        assert rank.is_common("bits", reduce(rank, "y", "x"))  # two at once are not carried
        rank.meet()
        before = other.counters()["messages_sent"]
        rank.meet()
        if rank.rank == hosts[0] - 1:  # so the other host's data is at the root before that of all its own ranks
            wait_for(lambda: other.counters()["messages_sent"] > before)
        assert rank.is_common("bits", reduce(rank, "x"))

    run_ranks(body, hosts, cache_capacity=8)


@on_ranks([1, 1], [1, 1, 1])
def test_data_is_that_of_the_call_that_carries_it(rank: Rank) -> None:
    """Calls without names that look alike have one id. Others make the second one while the first comes to its end."""
    for step in range(1500):
        arrays = [np.array([2 * step + call + rank.rank]) for call in range(2)]
        handles = []
        for array in arrays:
            handles.append(rank.submit("allreduce", None, [array], reduce_op=SUM))  # type: ignore[arg-type]
            if rank.rank == 0:
                rank.context.wait(handles[-1])
            else:
                sum(range(step % 300))  # some time
        rank.finish(*handles)
        size = rank.size
        assert [array[0] for array in arrays] == [
            (2 * step + call) * size + size * (size - 1) // 2 for call in range(2)
        ], step
