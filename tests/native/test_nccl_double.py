"""The double of NCCL finds launches of the ranks of a process whose orders contradict one another."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from device_group import Gpu, Nccl
from doubles import NCCL, build_double
from ranks import wait_for

UNSET, UINT8, SUM, IN_PROGRESS = -(1 << 31), 1, 0, 7


class Id(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 128),)


class Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        *((name, ctypes.c_int) for name in ("blocking", "cga", "least", "most")),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    )


class Ranks:
    """Ranks on a GPU each, and communicators of some of them. Calls of one rank come in the order of the test."""

    def __init__(self, gpu: Gpu, nccl: Nccl, size: int) -> None:
        self.gpu, self.lib = gpu, nccl.lib
        self.streams = [gpu.stream() for _ in range(size)]
        self.contexts = [ctypes.c_void_p() for _ in range(size)]
        for device, context in enumerate(self.contexts):
            gpu.lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        self.buffer = ctypes.c_void_p(gpu.put(np.zeros(64, np.uint8)))
        self.comms: list[ctypes.c_void_p] = []

    def connect(self, members: list[int]) -> dict[int, ctypes.c_void_p]:
        where = Id()
        self.lib.ncclGetUniqueId(ctypes.byref(where))
        config = Config(ctypes.sizeof(Config), 0xCAFEBEEF, 21801, 0, UNSET, UNSET, UNSET, None, UNSET)
        made = {rank: ctypes.c_void_p() for rank in members}
        for number, (rank, comm) in enumerate(made.items()):
            self.on(rank, "ncclCommInitRankConfig", ctypes.byref(comm), len(made), where, number, ctypes.byref(config))
        for comm in made.values():
            wait_for(lambda comm=comm: self.look(comm) == 0)  # type: ignore[misc]
        self.comms.extend(made.values())
        return made

    def on(self, rank: int, function: str, *arguments: object) -> int:
        self.gpu.lib.cuCtxPushCurrent_v2(self.contexts[rank])
        code = int(getattr(self.lib, function)(*arguments))
        self.gpu.lib.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        return code

    def look(self, comm: ctypes.c_void_p) -> int:
        code = ctypes.c_int(-1)
        assert self.lib.ncclCommGetAsyncError(comm, ctypes.byref(code)) == 0
        return code.value

    def launch(self, rank: int, comm: ctypes.c_void_p, *, until: int = 0) -> None:
        """A sum, which all ranks of the communicator take part in."""
        assert self.add(rank, comm) == IN_PROGRESS
        wait_for(lambda: self.look(comm) == until)

    def add(self, rank: int, comm: ctypes.c_void_p) -> int:
        stream, eight = ctypes.c_void_p(self.streams[rank]), ctypes.c_size_t(8)
        return self.on(rank, "ncclAllReduce", self.buffer, self.buffer, eight, UINT8, SUM, comm, stream)

    def close(self) -> None:
        for comm in self.comms:
            self.lib.ncclCommAbort(comm)
        for device, stream in enumerate(self.streams):
            self.gpu.synchronize(stream)
            self.gpu.close(stream)
            self.gpu.lib.cuDevicePrimaryCtxRelease_v2(device)


@pytest.fixture
def double(gpu: Gpu, tmp_path: Path) -> Nccl:
    options = {"CUDA_DOUBLE": f'"{gpu.path}"', "DELAYS": 5}
    return Nccl(build_double(NCCL, tmp_path / "checked", soname="double-nccl-checked.so", **options))


@pytest.fixture
def ranks(gpu: Gpu, double: Nccl) -> Iterator[Ranks]:
    made = Ranks(gpu, double, 3)
    yield made
    made.close()
    wait_for(lambda: double.counts()["comms"] == 0)
    assert [double.counts()[name] for name in ("misuses", "mismatches")] == [0, 0]


@pytest.mark.parametrize("is_right", [True, False])
def test_two_ranks_launch_for_two_teams(double: Nccl, ranks: Ranks, is_right: bool) -> None:
    a, b = ranks.connect([0, 1]), ranks.connect([0, 1])
    for _ in range(3):
        ranks.launch(0, a[0])
        ranks.launch(0, b[0])
        for comm in (a, b) if is_right else (b, a):
            ranks.launch(1, comm[1])
    assert (double.counts()["wrong_orders"] > 0) == (not is_right)


@pytest.mark.parametrize("is_right", [True, False])
def test_three_teams_in_a_circle(double: Nccl, ranks: Ranks, is_right: bool) -> None:
    """Each two ranks agree, and all three together do not: 0 has A before C, 1 has B before A, 2 has C before B."""
    a, b, c = ranks.connect([0, 1]), ranks.connect([1, 2]), ranks.connect([2, 0])
    ranks.launch(0, a[0])
    ranks.launch(0, c[0])
    for comm in (a, b) if is_right else (b, a):
        ranks.launch(1, comm[1])
    ranks.launch(2, c[2])
    ranks.launch(2, b[2])
    assert (double.counts()["wrong_orders"] > 0) == (not is_right)


def test_a_call_is_told_what_has_failed_before(double: Nccl, ranks: Ranks) -> None:
    """As NCCL's: who calls could not know of it."""
    a = ranks.connect([0, 1])
    double.fail("run", 0)
    ranks.launch(0, a[0], until=2)
    assert ranks.add(0, a[0]) == 2
    assert ranks.look(a[0]) == 2
    assert ranks.on(0, "ncclCommFinalize", a[0]) == 2


def test_no_launch_is_too_late_to_be_looked_at(double: Nccl, ranks: Ranks) -> None:
    a, b = ranks.connect([0, 1]), ranks.connect([0, 1])
    for _ in range(600):  # there is room for 1024 launches, and for more when it is needed
        for rank in range(2):
            ranks.launch(rank, a[rank])
    ranks.launch(0, a[0])
    ranks.launch(0, b[0])
    ranks.launch(1, b[1])
    ranks.launch(1, a[1])
    assert double.counts()["wrong_orders"] == 1
