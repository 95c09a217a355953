"""One rank of two_hosts.py, which starts it: takes its turns with every contestant and says how long each took.

python two_hosts_rank.py '{"bytes": 67108864, "rounds": 5, "contestants": ["tcp", "gloo", "horo"]}'
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import horo.torch as hvd

LIMIT_S = 120.0
COMPRESSIONS = {
    "horo": hvd.Compression.none,
    "horo bf16": hvd.Compression.bf16,
    "horo fp16": hvd.Compression.fp16,
}
BLOCK_BYTES = 1 << 20


class PlainStream:
    """What TCP alone makes of the link: each host sends its right neighbour what an allreduce must, and no more."""

    def __init__(self, size_bytes: int) -> None:
        hosts = hvd.cross_size()
        self._bytes = 2 * (hosts - 1) * size_bytes // hosts
        self._block = bytearray(BLOCK_BYTES)
        self._place = bytearray(BLOCK_BYTES)
        self._takes_part = hvd.local_rank() == 0
        listener = socket.create_server((own_address(), 0)) if self._takes_part else None
        mine: tuple[str, int] = listener.getsockname()[:2] if listener is not None else ("", 0)
        names = hvd.allgather_object(mine)
        if listener is not None:
            leaders = [name for name in names if name[1] != 0]
            self._to = socket.create_connection(leaders[(hvd.cross_rank() + 1) % hosts], timeout=LIMIT_S)
            listener.settimeout(LIMIT_S)
            self._from = listener.accept()[0]
            self._from.settimeout(LIMIT_S)
            listener.close()

    def run(self) -> None:
        if self._takes_part:
            sender = threading.Thread(target=self._send)
            sender.start()
            self._receive()
            sender.join()

    def _send(self) -> None:
        left = self._bytes
        while left > 0:
            part = min(left, BLOCK_BYTES)
            self._to.sendall(memoryview(self._block)[:part])
            left -= part

    def _receive(self) -> None:
        left = self._bytes
        while left > 0:
            got = self._from.recv_into(self._place, min(left, BLOCK_BYTES))
            if got == 0:
                raise ConnectionError("the neighbour's end of the plain stream closed")
            left -= got


def own_address() -> str:
    """This host's address on its one cable."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        return str(probe.getsockname()[0])


class Turns:
    """Every contestant's turn is one sum of a tensor of ``size_bytes`` over all ranks."""

    def __init__(self, size_bytes: int) -> None:
        place = torch.arange(size_bytes // 4, dtype=torch.float32) % 3 + 1
        self._mine = place * (hvd.rank() % 4 + 1)
        self._sum = place * sum(rank % 4 + 1 for rank in range(hvd.size()))
        self._tensor = torch.zeros_like(self._mine)
        self._stream = PlainStream(size_bytes)

    def call(self, contestant: str) -> Callable[[], torch.Tensor]:
        """The measured call; returns the sum, except the plain stream, which only moves bytes."""
        if contestant == "tcp":
            return self._move
        if contestant == "gloo":
            return lambda: (dist.all_reduce(self._tensor), self._tensor)[1]
        if contestant == "horo":
            return lambda: hvd.allreduce_(self._tensor, op=hvd.Sum, name=contestant)
        compression = COMPRESSIONS[contestant]
        return lambda: hvd.allreduce(self._tensor, op=hvd.Sum, name=contestant, compression=compression)

    def _move(self) -> torch.Tensor:
        self._stream.run()
        return self._tensor

    def is_right(self, contestant: str) -> bool:
        """Whether a known pattern gives its known sum on every rank; small whole numbers are exact in any dtype."""
        self._tensor.copy_(self._mine)
        right = contestant == "tcp" or torch.equal(self.call(contestant)(), self._sum)
        self._tensor.zero_()  # the timed calls add zeros
        return highest(0.0 if right else 1.0) == 0.0

    def seconds(self, contestant: str) -> float:
        """Of one call on the slowest rank, after one that is not counted: a warm connection, and all ranks are here."""
        call = self.call(contestant)
        dist.barrier()
        call()
        begin = time.perf_counter_ns()
        call()
        return highest((time.perf_counter_ns() - begin) / 1e9)


def highest(value: float) -> float:
    """The largest value of all ranks."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def main(words: list[str]) -> int:
    job = json.loads(words[0])
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    hvd.init()
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size=hvd.size(),
        is_master=hvd.rank() == 0,
        timeout=timedelta(seconds=LIMIT_S),
    )
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size(), timeout=limit)
    turns = Turns(job["bytes"])
    names: list[str] = job["contestants"]
    right = {name: turns.is_right(name) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(job["rounds"]):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(turns.seconds(name))
    right = {name: right[name] and turns.is_right(name) for name in names}
    if hvd.rank() == 0:
        print(json.dumps({"seconds": seconds, "right": right}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
