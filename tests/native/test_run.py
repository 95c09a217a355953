"""One call for submit, wait and release."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import Rank, describe, on_ranks, run_ranks

from horo.core import context as _core
from horo.core import request_buffer
from horo.core.context import ffi, lib
from horo.errors import MismatchError, UnsupportedError, UsageError

SUM = _core.REDUCE_OPS["sum"]


def test_what_is_packed_by_hand_lies_where_the_compiler_expects_it() -> None:
    assert request_buffer._LONE_REQUEST.size == ffi.sizeof("horo_request")
    assert request_buffer._LONE_TENSOR.size == ffi.sizeof("horo_tensor")
    buffer = _core.RequestBuffer()
    buffer.set_name("name")
    tensor = _core.Tensor(1, 2, (3, 4), 5, 6, 7)
    numbers = {"reduce_op": 4, "root_rank": 5, "prescale": 0.5, "postscale": 0.25}
    for tensors in [[tensor], [tensor, tensor._replace(shape=()), tensor._replace(shape=(7,))]]:
        buffer.fill(2, tensors, sync=True, transient=True, into=True, **numbers)
        request = buffer.request
        assert request.flags == lib.HORO_SUBMIT_SYNC | lib.HORO_SUBMIT_TRANSIENT | lib.HORO_SUBMIT_INTO
        assert (ffi.string(request.name), request.op, request.tensor_count) == (b"name", 2, len(tensors))
        assert {name: getattr(request, name) for name in numbers} == numbers
        for index, expected in enumerate(tensors):
            packed = request.tensors[index]
            assert (int(ffi.cast("uintptr_t", packed.input)), int(ffi.cast("uintptr_t", packed.output))) == (1, 2)
            assert tuple(packed.shape[d] for d in range(packed.ndim)) == expected.shape
            assert (packed.dtype, packed.wire_dtype, packed.output_bytes) == (5, 6, 7)


@on_ranks([1], [2], [1, 1])
def test_run_does_what_submit_wait_and_release_do(rank: Rank) -> None:
    for _ in range(3):
        ones, ranks = np.ones((2, 3), np.float32), np.full(5, rank.rank, np.int64)
        rank.run("allreduce", "x", [ones], reduce_op=SUM)
        assert np.all(ones == rank.size)
        rank.run("broadcast", "y", [ranks], root_rank=rank.size - 1)
        assert np.all(ranks == rank.size - 1)
        pair = [np.ones(3, np.float32), np.ones((), np.float64)]
        rank.run("allreduce", "group", pair, reduce_op=SUM, prescale=2.0, transient=True)
        assert [float(np.max(array)) for array in pair] == [2.0 * rank.size] * 2
        rank.run("barrier", "barrier", [])


@pytest.mark.parametrize("hosts", [[1], [2], [2, 1]], ids=str)
@pytest.mark.parametrize("spin_us", [0, 1000])
def test_a_result_goes_into_the_memory_that_is_offered_if_it_fits(
    monkeypatch: pytest.MonkeyPatch, hosts: list[int], spin_us: int
) -> None:
    """Else the handle of the request, which is done, is left, and the result is to be taken."""
    monkeypatch.setattr(_core, "_SIGNAL_CHECK_MS", 60_000)  # after so long a wait the handle is left, too

    def body(rank: Rank) -> None:
        for turn, rows in enumerate([3, 4, 3, 0, 2]):  # of rank 0; the offer is for 3 rows of each
            mine = np.full((rows if rank.rank == 0 else 3, 2), 10 * turn + rank.rank, np.int32)
            wanted = np.concatenate(
                [np.full((rows, 2), 10 * turn)] + [np.full((3, 2), 10 * turn + r) for r in range(1, rank.size)]
            )
            output = np.full((3 * rank.size, 2), -1, np.int32)
            (tensor,) = describe([mine], [output])
            buffer = _core.RequestBuffer.of(_core.OPS["allgather"], "g", [tensor], sync=True, offers=True)
            rank.context.run(buffer)
            handle = buffer.last_handle[0]
            if rows == 3:
                assert handle == 0
                assert np.array_equal(output, wanted)
                continue
            data, first_dims = rank.context.take_result(handle, 0)
            assert first_dims == [rows] + [3] * (rank.size - 1)
            assert np.array_equal(np.frombuffer(data, np.int32).reshape(-1, 2), wanted)
            assert np.all(output == -1)
            rank.context.release(handle)
            with pytest.raises(UsageError):
                rank.context.poll(handle)

    run_ranks(body, hosts, spin_us=spin_us)


@pytest.mark.parametrize("check_ms", [0, 1])
@pytest.mark.parametrize("rows", [3, 4])
def test_a_wait_that_ends_early_goes_on_until_the_result_is_there(
    monkeypatch: pytest.MonkeyPatch, check_ms: int, rows: int
) -> None:
    """The way out and in again by which signal handlers run."""
    monkeypatch.setattr(_core, "_SIGNAL_CHECK_MS", check_ms)

    def body(rank: Rank) -> None:
        for turn in range(50):
            mine = np.full((rows, 2), 10 * turn + rank.rank, np.int32)
            output = np.full((3 * rank.size, 2), -1, np.int32)
            (tensor,) = describe([mine], [output])
            buffer = _core.RequestBuffer.of(_core.OPS["allgather"], "g", [tensor], sync=True, offers=True)
            rank.context.run(buffer)
            handle = buffer.last_handle[0]
            if handle:
                data, _ = rank.context.take_result(handle, 0)
                output = output if data is None else np.frombuffer(data, np.int32).reshape(-1, 2)
                rank.context.release(handle)
            wanted = np.repeat(np.arange(rank.size, dtype=np.int32) + 10 * turn, rows)
            assert np.array_equal(output, np.stack([wanted, wanted], 1))
            rank.run("barrier", "b", [])
            ones = np.ones(3, np.float32)
            rank.run("allreduce", "x", [ones], reduce_op=SUM)
            assert np.all(ones == rank.size)

    run_ranks(body, [3])


@on_ranks([2])
def test_what_run_refuses_leaves_nothing_behind(rank: Rank) -> None:
    good = np.ones(4, np.float32)
    with pytest.raises(UsageError, match="the name has 2000 bytes"):
        rank.run("allreduce", "n" * 2000, [good], reduce_op=SUM)
    with pytest.raises(UnsupportedError, match="65 dimensions"):
        lone = _core.Tensor(good.ctypes.data, good.ctypes.data, (1,) * 65, _core.DTYPES["float32"])
        rank.context.run(_core.RequestBuffer.of(_core.OPS["allreduce"], "deep", [lone], reduce_op=SUM, sync=True))
    with pytest.raises(MismatchError, match=r"float32 \[4\]"):
        rank.run("allreduce", "x", [np.ones(4 + rank.rank, np.float32)], reduce_op=SUM)
    rank.run("allreduce", "x", [good], reduce_op=SUM)  # the name is free again
    assert np.all(good == rank.size)
    handle = rank.submit("barrier", "last", [])
    rank.finish(handle)
    assert lib.horo_poll(rank.context._context, handle - 1) == lib.HORO_ERR_HANDLE  # the one before was released
