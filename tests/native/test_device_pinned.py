"""Pinned memory of which too much is idle. A driver that frees some waits for all that runs on the device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from device_group import Gpu, Nccl, OnGpu
from ranks import Group, Rank, describe, wait_for

from horo import _core
from horo._core_libraries import copy_back

IDLE = 2  # of enum hr_nccl_state
LARGE, SMALL = 200 << 20, 60 << 20


@pytest.fixture
def comm(native: Any, gpu: Gpu, nccl: Nccl) -> Iterator[Any]:
    """A communicator of one rank, whose kernel hangs until it is aborted."""
    lib, ffi = native.lib, native.ffi
    identity = ffi.new("char[]", lib.SHIM_NCCL_ID_BYTES)
    made = lib.shim_nccl_connect(str(gpu.path).encode(), str(nccl.path).encode(), 1, 0, identity, 60_000)
    assert made
    wait_for(lambda: lib.shim_nccl_poll(made) == IDLE)
    yield made
    lib.shim_nccl_destroy(made)


def launch(native: Any, gpu: Gpu, comm: Any) -> None:
    native.lib.shim_nccl_launch(comm, gpu.put(np.ones(1, np.uint8)))
    wait_for(lambda: native.lib.shim_nccl_poll(comm) == IDLE)


def test_memory_goes_back_while_a_kernel_hangs_and_nobody_waits(native: Any, gpu: Gpu, nccl: Nccl, comm: Any) -> None:
    nccl.fail("hang", 0)
    launch(native, gpu, comm)
    using = threading.Thread(target=native.lib.shim_nccl_use_pinned, args=(comm, 2, LARGE), daemon=True)
    using.start()
    using.join(20)
    assert not using.is_alive(), "it waits for the kernel"
    assert gpu.counts()["pinned"] == 2


def test_what_is_too_much_is_freed_by_a_thread_that_may_wait(native: Any, gpu: Gpu, comm: Any) -> None:
    assert native.lib.shim_nccl_use_pinned(comm, 4, LARGE) == 4
    assert gpu.counts()["pinned"] == 4
    native.lib.shim_nccl_trim_pinned(comm)
    assert gpu.counts()["pinned"] == 1


def test_what_is_too_much_is_used_for_anything_before_more_is_pinned(native: Any, gpu: Gpu, comm: Any) -> None:
    native.lib.shim_nccl_use_pinned(comm, 2, LARGE)
    native.lib.shim_nccl_use_pinned(comm, 2, 1000)
    assert gpu.counts()["pinned_ever"] == 3, "the rest of it is not too much"
    native.lib.shim_nccl_trim_pinned(comm)
    native.lib.shim_nccl_use_pinned(comm, 1, SMALL)
    assert gpu.counts()["pinned_ever"] == 3


def test_a_caller_that_releases_its_request_frees_what_is_too_much(gpu: Gpu) -> None:
    """Four requests of 80 MiB, on the same memory of the device."""

    def body(rank: Rank) -> None:
        own = OnGpu(rank, gpu)
        array = np.zeros(80 << 20, np.uint8)
        address = gpu.put(array)
        (tensor,) = describe([array], [array])
        tensor = tensor._replace(input=address, output=address)
        options = {"device": 1, "stream": own.stream, "root_rank": 0}
        handles = [
            own.context.submit(_core.RequestBuffer.of(_core.OPS["broadcast"], f"x{i}", [tensor], **options))
            for i in range(4)
        ]
        for handle in handles:  # all have read that memory when the first one writes there
            own.context.wait(handle)
        for handle in handles:
            copy_back(own.context, handle, own.stream)
        gpu.synchronize(own.stream)
        assert gpu.counts()["pinned"] == 4
        for handle in handles:
            own.context.release(handle)
        assert gpu.counts()["pinned"] == 3
        own.close()

    with Group((1,)) as group:
        group.run(body)
