"""A rank that moves and adds up arrays of several sizes with the others and checks each element.

    moving_rank.py TURNS [VICTIM]

It needs no torch. VICTIM is killed while it is in the middle of a call, after some of them.
"""

import os
import signal
import sys
import threading

import numpy as np

from horo.bootstrap import job as bootstrap
from horo.core.context import DTYPES, OPS, REDUCE_OPS, Context, RequestBuffer, Tensor

CALLS_BEFORE = 12


def gathered(core: Context, op: str, given: np.ndarray, count: int, splits: tuple[int, ...] = ()) -> np.ndarray:
    """The ``count`` numbers of an allgather or alltoall, in memory that is offered for them."""
    result = np.empty(count, np.float32)
    addresses = given.ctypes.data, result.ctypes.data
    tensor = Tensor(*addresses, given.shape, DTYPES["float32"], output_bytes=result.nbytes, splits=splits)
    handle = core.submit(RequestBuffer.of(OPS[op], op, [tensor], offers=True))
    try:
        core.wait(handle)
        data, _ = core.take_result(handle, 0)
    finally:
        core.release(handle)
    return result if data is None else np.frombuffer(data, np.float32)


def scattered(core: Context, given: np.ndarray, count: int) -> np.ndarray:
    """This rank's ``count`` numbers of the sum, in the place of its own."""
    result = given[core.rank * count :][:count]
    tensor = Tensor(given.ctypes.data, result.ctypes.data, given.shape, DTYPES["float32"])
    core.run(RequestBuffer.of(OPS["reducescatter"], "s", [tensor], reduce_op=REDUCE_OPS["sum"], sync=True))
    return result


def broadcast(core: Context, array: np.ndarray, root: int) -> np.ndarray:
    """In place."""
    tensor = Tensor(array.ctypes.data, array.ctypes.data, array.shape, DTYPES["float32"])
    core.run(RequestBuffer.of(OPS["broadcast"], f"b{root}", [tensor], root_rank=root, sync=True))
    return array


def main() -> None:
    job = bootstrap.start()
    core, rank, size = job.context, job.rank, job.size
    calls = 0

    def kill_in_a_call() -> None:
        while calls < CALLS_BEFORE:
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    if sys.argv[2:] == [str(rank)]:
        threading.Thread(target=kill_in_a_call, daemon=True).start()
    for turn in range(int(sys.argv[1])):
        for count in (5, 30_000, 700_001):
            base = np.arange(count, dtype=np.float32) + turn
            result = gathered(core, "allgather", base * (rank + 1), size * count)
            assert np.array_equal(result, np.concatenate([base * (r + 1) for r in range(size)]))
            calls += 1
            given = np.concatenate([base + 3 * rank + to for to in range(size)])
            result = gathered(core, "alltoall", given, size * count, (count,) * size)
            assert np.array_equal(result, np.concatenate([base + 3 * r + rank for r in range(size)]))
            calls += 1
            share = scattered(core, np.concatenate([base * (rank + 1)] * size), count)
            assert np.array_equal(share, base * (size * (size + 1) // 2))
            calls += 1
            root = turn % size
            assert np.array_equal(broadcast(core, base * (rank + 1), root), base * (root + 1))
            calls += 1
    print("all is right")
    job.close()


if __name__ == "__main__":
    main()
