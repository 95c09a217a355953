"""One call for submit, wait and release."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import Group, Rank

from horo import _core, _request_buffer
from horo._core import ffi, lib
from horo.errors import MismatchError, UnsupportedError, UsageError

SUM = _core.REDUCE_OPS["sum"]


def test_what_is_packed_by_hand_lies_where_the_compiler_expects_it() -> None:
    assert _request_buffer._LONE_REQUEST.size == ffi.sizeof("horo_request")
    assert _request_buffer._LONE_TENSOR.size == ffi.sizeof("horo_tensor")
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


@pytest.mark.parametrize("hosts", [[1], [2], [1, 1]])
def test_run_does_what_submit_wait_and_release_do(hosts: list[int]) -> None:
    def body(rank: Rank) -> None:
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

    with Group(hosts) as group:
        group.run(body)


def test_what_run_refuses_leaves_nothing_behind() -> None:
    def body(rank: Rank) -> None:
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
        assert lib.horo_poll(rank.context._context, handle - 1) == lib.HORO_ERR_USAGE  # the one before was released

    with Group([2]) as group:
        group.run(body)


def test_finish_waits_and_releases_and_says_what_went_wrong() -> None:
    def body(rank: Rank) -> None:
        context = rank.context
        good = np.ones(4, np.float32)
        handle = rank.submit("allreduce", "x", [good], reduce_op=SUM)
        context.finish(handle)
        assert np.all(good == rank.size)
        wrong = rank.submit("allreduce", "x", [np.ones(4 + rank.rank, np.float32)], reduce_op=SUM)
        with pytest.raises(MismatchError, match=r"float32 \[4\]"):
            context.finish(wrong)
        for gone in (handle, wrong):  # released, both
            with pytest.raises(UsageError, match=f"Handle {gone} was not created or has been cleared"):
                context.finish(gone)

    with Group([2]) as group:
        group.run(body)


def test_counters_may_be_asked_after_the_end() -> None:
    ranks: list[Rank] = []

    def body(rank: Rank) -> None:
        rank.run("barrier", "x", [])
        ranks.append(rank)

    with Group([1]) as group:
        group.run(body)
    for _ in range(2):
        assert ranks[0].context.counters()["requests"] == 1
        ranks[0].context.destroy()
