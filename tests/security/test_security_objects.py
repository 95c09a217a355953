"""Pickled objects that were changed between two ranks are not unpickled."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from rank_pool import RankPool, on

import horo.torch as hvd
from horo.errors import MismatchError
from horo.torch.engine import runtime
from horo.torch.functions import object_mac


@pytest.fixture(scope="module")
def ranks2() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


OPERATIONS = ["broadcast", "allgather"]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("attack", ["replaced", "without-mac", "replayed", "replayed-with-headers", "of-another-rank"])
def test_a_changed_object_is_not_unpickled(ranks2: RankPool, tmp_path: Path, operation: str, attack: str) -> None:
    """What rank 0 has pickled is replaced behind its seal, as by somebody on the link."""
    ran = str(tmp_path / "ran")

    def check() -> None:
        real, real_init = object_mac.ObjectKey.seal, object_mac.ObjectKey.__init__
        evil = b"\0" + cloudpickle.dumps(Evil(ran))
        seals: list[bytes] = []
        earlier: list[bytes] = []
        objects = [(rank, bytes(1000)) for rank in range(2)]  # longer than the evil one
        whole = objects[0] if operation == "broadcast" else objects

        def run() -> object:
            if operation == "broadcast":
                return hvd.broadcast_object(objects[hvd.rank()], root_rank=0, name="x")
            return hvd.allgather_object(objects[hvd.rank()], name="x")

        def note(self: object_mac.ObjectKey, rank: int, data: bytes) -> bytes:
            seals.append(real(self, rank, data))
            return seals[-1]

        def note_headers(self: object_mac.ObjectKey, *arguments: Any, headers: bytes, **more: Any) -> None:
            earlier.append(headers)
            real_init(self, *arguments, headers=headers, **more)

        def tamper(self: object_mac.ObjectKey, rank: int, data: bytes) -> bytes:
            if hvd.rank() != 0:
                return real(self, rank, data)
            return {
                "replaced": lambda: real(self, rank, data)[:32] + evil,
                "without-mac": lambda: evil,
                "replayed": lambda: seals[0],
                "replayed-with-headers": lambda: seals[0],
                "of-another-rank": lambda: real(self, 1 - rank, evil),
            }[attack]().ljust(32 + len(data), b"\0")

        def tamper_headers(self: object_mac.ObjectKey, *arguments: Any, headers: bytes, **more: Any) -> None:
            if attack == "replayed-with-headers" and hvd.rank() == 1:
                headers = earlier[0]
            real_init(self, *arguments, headers=headers, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(object_mac.ObjectKey, "seal", note)
            patch.setattr(object_mac.ObjectKey, "__init__", note_headers)
            assert run() == whole
            patch.setattr(object_mac.ObjectKey, "seal", tamper)
            patch.setattr(object_mac.ObjectKey, "__init__", tamper_headers)
            if operation == "broadcast" and hvd.rank() == 0:
                assert run() == whole
            else:
                with pytest.raises(MismatchError, match="the object of rank 0 was not sent by it for this call"):
                    run()
        assert run() == whole

    ranks2.run(check)
    assert not Path(ran).exists()


@on("ranks2")
def test_calls_without_a_name_and_with_the_name_none_are_not_the_same() -> None:
    """Two threads call in another order on each rank."""
    found: dict[str | None, object] = {}

    def call(name: str | None) -> None:
        found[name] = hvd.allgather_object((name, hvd.rank()), name=name)

    names: list[str | None] = [None, "None"]
    threads = [threading.Thread(target=call, args=(name,)) for name in names[:: 1 if hvd.rank() == 0 else -1]]
    threads[0].start()
    deadline = time.monotonic() + 60
    while not runtime.current().requests:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    hvd.barrier()
    threads[1].start()
    for thread in threads:
        thread.join(60)
    assert found == {name: [(name, 0), (name, 1)] for name in names}
