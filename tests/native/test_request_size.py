"""How large a request may be: what is let in travels, what would not is refused where it is submitted."""

from __future__ import annotations

import native_build
import numpy as np
import pytest
from ranks import Rank, run_ranks

from horo.core import context
from horo.errors import UsageError

REQUEST_MAX = (64 << 20) - 11 - 65535 - 9  # in a message with the longest text that may go with it
DIMS_MAX = 64
FIXED_BYTES, TENSOR_BYTES = 29, 3 + 8 * DIMS_MAX


def request_of(byte_count: int, last: np.ndarray | None = None) -> context.RequestBuffer:
    """A group of tensors without elements, but for the last one, whose canonical form takes so many bytes."""
    count = (byte_count - FIXED_BYTES - 1) // TENSOR_BYTES
    name = "n" * (byte_count - FIXED_BYTES - count * TENSOR_BYTES)
    tensor = context.Tensor(64, 64, (0,) * DIMS_MAX, context.DTYPES["float32"])
    tensors = [tensor] * count
    if last is not None:
        address = last.ctypes.data
        tensors[-1] = context.Tensor(address, address, (1,) * (DIMS_MAX - 1) + last.shape, context.DTYPES["float32"])
    return context.RequestBuffer.of(context.OPS["allreduce"], name, tensors, reduce_op=1)


@pytest.mark.parametrize("byte_count", [REQUEST_MAX + 1, (64 << 20) - 5, 65 << 20])
def test_a_request_that_could_not_travel_is_refused_with_its_size(byte_count: int) -> None:
    request = request_of(byte_count)

    def body(rank: Rank) -> None:
        if rank.rank == 1:
            with pytest.raises(UsageError, match=f"takes {byte_count} bytes.* at most {REQUEST_MAX}.* several groups"):
                rank.context.submit(request)
        assert rank.allreduce(np.ones(3)).tolist() == [2.0] * 3

    run_ranks(body, [1, 1])


@pytest.mark.skipif(native_build.FLAVOUR == "thread", reason="what is looked for is memory, which the other one checks")
@pytest.mark.parametrize("hosts", [[2], [1, 1]], ids=str)
def test_the_largest_request_is_agreed_on(hosts: list[int]) -> None:
    arrays = [np.full(3, 10.0**rank, np.float32) for rank in range(2)]
    requests = [request_of(REQUEST_MAX, array) for array in arrays]

    def body(rank: Rank) -> None:
        handle = rank.context.submit(requests[rank.rank])
        rank.finish(handle)

    run_ranks(body, hosts)
    assert [array.tolist() for array in arrays] == [[11.0] * 3] * 2
