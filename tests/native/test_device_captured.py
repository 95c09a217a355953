"""Streams that a program captures into a CUDA graph, and results that they are to wait for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from device_group import SUM, Gpu, Nccl, OnGpu, on_gpu
from ranks import Rank, on_ranks

from horo.core.libraries import copy_back
from horo.errors import UsageError

REFUSED = "the current stream is being captured into a CUDA graph"


def refuses(own: OnGpu, call: Callable[[int], object]) -> None:
    """On rank 0, while its program captures on its stream, which that leaves whole."""
    own.rank.barrier()
    if own.rank.rank == 0:
        own.gpu.capture(own.stream, True)
        with pytest.raises(UsageError, match=REFUSED):
            call(own.stream)
        assert own.gpu.capture(own.stream, False) == 0
    own.rank.barrier()


@on_ranks((2,))
def test_results_that_are_copied_back_wait_for_its_end(rank: Rank, gpu: Gpu) -> None:
    own = OnGpu(rank, gpu)
    array = np.ones(10, np.float32)
    handle, source, _ = own.submit("allreduce", "x", array, reduce_op=SUM)
    own.context.wait(handle)
    refuses(own, lambda stream: copy_back(own.context, handle, stream))
    copy_back(own.context, handle, own.stream)
    refuses(own, lambda stream: copy_back(own.context, handle, stream))  # to wait for the copy, too
    own.finish(handle)
    gpu.synchronize(own.stream)
    np.testing.assert_array_equal(gpu.get(source, array), array * 2)
    own.close()


@on_ranks((2,))
def test_results_of_nccl_wait_for_its_end(rank: Rank, gpu: Gpu, nccl: Nccl) -> None:
    own = on_gpu(rank, gpu, nccl)
    array = np.ones(10, np.float32)
    handle, source, _ = own.submit("allreduce", "x", array, reduce_op=SUM)
    own.context.wait(handle)
    refuses(own, lambda stream: copy_back(own.context, handle, stream))
    own.finish(handle)
    gpu.synchronize(own.stream)
    np.testing.assert_array_equal(gpu.get(source, array), array * 2)
    own.close()
