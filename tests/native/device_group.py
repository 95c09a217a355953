"""The program's side of the double of a GPU, for tests with ranks as threads."""

import ctypes
import graphlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gpu_driver import Driver
from ranks import Rank, describe, wait_for

from horo.bootstrap.nccl import Nccl as Connector
from horo.bootstrap.teams import exchange_bytes
from horo.core import context as _core
from horo.core.libraries import copy_back, use_cuda


class Gpu(Driver):
    """The double, as the program that calls horo sees it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path = path
        self.is_broken = False
        self._streams: list[int] = []

    def make_stream(self) -> int:
        """One of the program's, until ``close_streams``."""
        self._streams.append(super().make_stream())
        return self._streams[-1]

    def put(self, array: np.ndarray) -> int:
        """The address of a copy on the device."""
        address = self.alloc(array.nbytes)
        self.lib.double_write(
            ctypes.c_uint64(address), array.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(array.nbytes)
        )
        return address

    def get(self, address: int, like: np.ndarray) -> np.ndarray:
        """What is at the address, whether anything still writes there or not."""
        array = np.empty_like(like)
        self.lib.double_read(
            ctypes.c_uint64(address), array.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(array.nbytes)
        )
        return array

    def pause(self) -> ctypes.c_int:
        """The thread that next makes a stream wait for an event waits in that call for ``resume`` with the result."""
        self._gates.append(gate := ctypes.c_int(0))
        self.lib.double_pause(ctypes.byref(gate))
        return gate

    def await_pause(self, gate: ctypes.c_int) -> None:
        wait_for(lambda: self.lib.double_is_paused(ctypes.byref(gate)) == 1)

    def resume(self, gate: ctypes.c_int, code: int = 0) -> None:
        """The call goes on, or fails with the code."""
        self.lib.double_resume(ctypes.byref(gate), code)

    def capture(self, stream: int, is_begun: bool) -> int:
        """Begins or ends to capture a graph; at the end, whether a call of others has spoiled it."""
        return int(self.lib.double_capture(ctypes.c_void_p(stream), int(is_begun)))

    def close_streams(self) -> None:
        for stream in self._streams:
            self.lib.cuStreamDestroy_v2(ctypes.c_void_p(stream))

    def end(self) -> None:
        """Gives back its memory, unless a stream still has something to do. Nothing is called behind that."""
        self.lib.double_end()

    def limit_pinned(self, piece_bytes: int = 1 << 30) -> None:
        self.lib.double_limit_pinned(piece_bytes)

    def let_copies(self, count: int) -> None:
        """From now on so many copies to the host are done, and others wait for the next call; -1: all are."""
        self.lib.double_let_copies(count)

    def await_program(self) -> None:
        """From now on, what frees pinned memory waits for the program's streams, too, as a driver does."""
        self.lib.double_await_program()

    def fail_staging(self, number: int) -> None:
        """That copy to the host from now on fails."""
        self.lib.double_fail_staging(number)

    def counts(self) -> dict[str, int]:
        numbers = (ctypes.c_int * 5)()
        self.lib.double_count(numbers)
        names = "streams", "contexts", "events", "pinned", "pinned_ever"
        return dict(zip(names, numbers, strict=True))

    def waits(self) -> int:
        """How often a thread has had to wait because a stream of horo's was full."""
        return int(self.lib.double_waits())


PLACES = ("id", "init", "connect", "call", "group end", "run", "hang", "scale", "late connect", "late launch", "end")
"""Where the double of NCCL can fail, or be so late that it never comes."""


class Nccl:
    """The double of NCCL."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lib = ctypes.CDLL(str(path))

    def fail(self, place: str, rank: int = 0, *, at: int = 1, code: int = 2) -> None:
        """At the ``at``-th time from now on that this rank comes there.

        Of "late connect" the code says after how many looks it comes; 2 is never.
        """
        self.lib.double_nccl_fail(PLACES.index(place), rank, at, code)

    def counts(self) -> dict[str, int]:
        numbers = (ctypes.c_int * 7)()
        self.lib.double_nccl_count(numbers)
        names = ("comms", "aborts", "destroys", "misuses", "scales", "launched", "mismatches")
        return dict(zip(names, numbers, strict=True))

    def check_order(self) -> None:
        """Fails if orders of launches contradict one another: kernels may wait for one another for ever then.

        What has no circle: each collective, on all of its ranks, behind the one before it on each GPU.
        """
        self.lib.double_nccl_launches.restype = ctypes.c_char_p
        behind: dict[str, set[str]] = {}
        last: dict[str, tuple[str, str]] = {}  # on a GPU: the stream, and the collective
        for line in self.lib.double_nccl_launches().decode().splitlines():
            if line == "over":
                last.clear()
                continue
            gpu, stream, collective = line.split()
            if gpu in last:
                assert stream == last[gpu][0], "launches on two streams of a GPU have no order"
                behind.setdefault(collective, set()).add(last[gpu][1])
            last[gpu] = stream, collective
        graphlib.TopologicalSorter(behind).prepare()


class OnGpu:
    """A rank whose arrays are on a device, with one stream of the program's."""

    def __init__(
        self,
        rank: Rank,
        gpu: Gpu,
        nccl: Sequence[Path] | None = None,
        *,
        device: int = 0,
        default_stream: bool = False,
        within_s: float = 60,
    ) -> None:
        """``nccl``: the places of it; all ranks are connected by it, within that time."""
        use_cuda(rank.context, [str(gpu.path)])
        self.connector: Connector | None = None
        if nccl is not None:
            self.connector = Connector(rank.context, rank.rank, [f"rank {r}" for r in range(rank.size)], within_s)
            places = {"cuda": [str(gpu.path)], "nccl": [str(path) for path in nccl]}
            self.connector.connect_world(device, rank.rank, partial(exchange_bytes, rank.context, "nccl"), **places)
        self.rank, self.gpu, self.context, self.device = rank, gpu, rank.context, device
        self.stream = 0 if default_stream else gpu.make_stream()

    def add_team(self, members: Sequence[int]) -> int:
        """Adds a process set, as all ranks do."""
        if self.connector is not None:
            self.connector.connect_set(members, partial(exchange_bytes, self.context, "nccl"))
        return self.rank.add_team(members)

    def submit(self, op: str, name: str, array: np.ndarray, output: np.ndarray | None = None, **options: Any) -> Any:
        """Starts it; returns the handle, and where the values and the result are on the device."""
        source = self.gpu.put(array)
        target = source if output is None else self.gpu.put(output)
        (tensor,) = describe([array], [array if output is None else output])
        splits = tuple(options.pop("splits", ()))
        tensor = tensor._replace(input=source, output=target, splits=splits, dtype=options.pop("dtype", tensor.dtype))
        tensor = tensor._replace(wire_dtype=options.pop("wire_dtype", 0))
        options = {"device": self.device + 1, "stream": self.stream, **options}
        return self.context.submit(_core.RequestBuffer.of(_core.OPS[op], name, [tensor], **options)), source, target

    def finish(self, handle: int) -> None:
        """Until the program's stream waits for the results."""
        self.context.wait(handle)
        copy_back(self.context, handle, self.stream)
        self.context.release(handle)

    def run(self, op: str, name: str, array: np.ndarray, output: np.ndarray | None = None, **options: Any) -> Any:
        """The result."""
        handle, _, target = self.submit(op, name, array, output, **options)
        self.finish(handle)
        self.gpu.synchronize(self.stream)
        return self.gpu.get(target, array if output is None else output)

    def allreduce(self, array: np.ndarray, name: str = "x", op: str = "sum", **options: Any) -> np.ndarray:
        result: np.ndarray = self.run("allreduce", name, array, reduce_op=_core.REDUCE_OPS[op], **options)
        return result

    def gathered(self, handle: int, like: np.ndarray) -> np.ndarray:
        self.context.wait(handle)
        data, _ = self.context.take_result(handle, 0)
        self.context.release(handle)
        return np.frombuffer(data, like.dtype)


def on_gpu(rank: Rank, gpu: Gpu, nccl: Nccl, **options: Any) -> OnGpu:
    """Each rank on a GPU of its own."""
    return OnGpu(rank, gpu, [nccl.path], **{"device": rank.rank, **options})
