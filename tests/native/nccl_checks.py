"""What holds of collectives by NCCL whichever way they go: as they are, packed by kernels, or in two levels."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from device_group import SUM, OnGpu
from ranks import Group, Rank, recorded_stderr

from horo import _core
from horo.errors import GroupError, PeerLostError

__all__ = [
    "DTYPES",
    "dies_at_any_time",
    "ends_with_words",
    "reduces_every_dtype",
    "sums_bfloat16",
]

DTYPES = ["uint8", "int8", "int32", "int64", "float16", "float32", "float64"]
ONES = np.ones(5, np.float32)


def reduces_every_dtype(hosts: Sequence[int], op: str, make: Callable[[Rank], OnGpu]) -> list[str]:
    """Up to four ranks; returns the dtypes that it has checked."""
    size = sum(hosts)
    numbers = [np.arange(50) % 5 * 4 + 4 * (r + 1) for r in range(size)]  # of which an average is exact in all dtypes
    chosen = [name for name in DTYPES if op != "product" or name not in ("uint8", "int8")]
    expected = {
        "sum": sum(numbers),
        "average": sum(numbers) / size,
        "min": np.min(numbers, axis=0),
        "max": np.max(numbers, axis=0),
        "product": np.prod(np.array(numbers) // 4, axis=0),
    }[op]

    def body(rank: Rank) -> list[np.ndarray]:
        own = make(rank)
        values = numbers[rank.rank] if op != "product" else numbers[rank.rank] // 4
        found = [own.allreduce(values.astype(name), name, op) for name in chosen]
        own.close()
        return found

    with Group(hosts) as group:
        results = group.run(body)
    for found in results:
        for name, values in zip(chosen, found, strict=True):
            tolerance = 2e-3 if name == "float16" and op == "average" else 1e-6
            np.testing.assert_allclose(values.astype(float), expected.astype(name), rtol=tolerance, err_msg=name)
    return chosen


def sums_bfloat16(hosts: Sequence[int], make: Callable[[Rank], OnGpu]) -> list[list[int]]:
    """On each rank the bits of 1 and 2, summed, then with factors of 0.5 before and 3 after."""

    def body(rank: Rank) -> list[int]:
        own = make(rank)
        found = []
        for factors in ({}, {"prescale": 0.5, "postscale": 3.0}):
            bits = np.array([0x3F80, 0x4000], np.int16)
            dtype = _core.DTYPES["bfloat16"]
            result = own.run("allreduce", f"b{len(found)}", bits, reduce_op=SUM, dtype=dtype, **factors)
            found.extend(result.view(np.uint16).tolist())
        own.close()
        return found

    with Group(hosts) as group:
        return group.run(body)


def dies_at_any_time(
    hosts: Sequence[int],
    seed: int,
    make: Callable[[Rank], OnGpu],
    begin: Callable[[OnGpu, int], int],
    **options: Any,
) -> None:
    """One rank, after a few calls; ``begin`` starts call number so many; ``options`` are those of ``Group``."""
    chance = random.Random(seed)
    victim = chance.randrange(sum(hosts))
    calls = chance.choice([1, 2, 6])

    def body(rank: Rank) -> None:
        own = make(rank)
        with pytest.raises(PeerLostError, match="gone|this rank" if rank.rank == victim else f"^rank {victim} "):
            for number in range(1_000_000):
                handle = begin(own, number)
                if rank.rank == victim and number == calls:
                    for _ in range(random.Random(seed).randrange(200)):
                        own.context.poll(handle)
                    group.kill(victim)
                    own.context.end("its death")
                try:
                    own.context.wait(handle)
                finally:
                    own.context.release(handle)
        own.gpu.synchronize(own.stream)
        own.close()

    with recorded_stderr(), Group(hosts, **options) as group:
        group.run(body)


def ends_with_words(own: OnGpu, words: str, call: Callable[[int], object], error: type[GroupError]) -> None:
    """One of many calls, and each that comes later; what runs on the GPU fails when its call is over."""
    with pytest.raises(error, match=words):
        for number in range(10_000):
            call(number)
    own.gpu.synchronize(own.stream)
    with pytest.raises(PeerLostError, match=words):
        own.allreduce(ONES, "later")
    own.close()
