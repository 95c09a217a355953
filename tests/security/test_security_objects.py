"""Pickled objects that were changed between two ranks are not unpickled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_pool import RankPool

import horo.torch as hvd
from horo.errors import MismatchError


@pytest.fixture(scope="module")
def ranks2() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("operation", ["broadcast", "allgather"])
@pytest.mark.parametrize("attack", ["replaced", "without-mac", "replayed", "of-another-rank"])
def test_a_changed_object_is_not_unpickled(ranks2: RankPool, tmp_path: Path, operation: str, attack: str) -> None:
    """What rank 0 has pickled is replaced behind its seal, as by somebody on the link."""
    ran = str(tmp_path / "ran")

    def check() -> None:
        import cloudpickle  # noqa: PLC0415

        from horo.torch import _authentic  # noqa: PLC0415

        real = _authentic.ObjectKey.seal
        evil = b"\0" + cloudpickle.dumps(Evil(ran))
        earlier: list[bytes] = []

        def run() -> object:
            if operation == "broadcast":
                return hvd.broadcast_object(hvd.rank(), root_rank=0, name="x")
            return hvd.allgather_object(hvd.rank(), name="x")

        def tamper(self: _authentic.ObjectKey, rank: int, data: bytes) -> bytes:
            if hvd.rank() != 0:
                return real(self, rank, data)
            return {
                "replaced": lambda: real(self, rank, data)[:32] + evil,
                "without-mac": lambda: evil,
                "replayed": lambda: earlier[0],
                "of-another-rank": lambda: real(self, 1 - rank, evil),
            }[attack]()

        def note(self: _authentic.ObjectKey, rank: int, data: bytes) -> bytes:
            earlier.append(real(self, rank, data))
            return earlier[-1]

        try:
            _authentic.ObjectKey.seal = note  # type: ignore[method-assign]
            assert run() == (0 if operation == "broadcast" else [0, 1])
            _authentic.ObjectKey.seal = tamper  # type: ignore[method-assign]
            if operation == "broadcast" and hvd.rank() == 0:
                assert run() == 0
            else:
                with pytest.raises(MismatchError, match="the object of rank 0 was not sent by it for this call"):
                    run()
        finally:
            _authentic.ObjectKey.seal = real  # type: ignore[method-assign]
        assert run() == (0 if operation == "broadcast" else [0, 1])

    ranks2.run(check)
    assert not Path(ran).exists()


def test_objects_without_names_and_of_all_sizes_travel(ranks2: RankPool) -> None:
    def check() -> None:
        for size in (0, 1, 31, 1000, 1 << 20):
            assert hvd.broadcast_object(b"x" * size, 1) == b"x" * size
            assert hvd.allgather_object(bytes([hvd.rank()]) * size) == [bytes([rank]) * size for rank in range(2)]

    ranks2.run(check)
