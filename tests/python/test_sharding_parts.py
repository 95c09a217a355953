"""Parts of sharding without ranks: who owns what, and how a file reaches another process."""

import os
import socket
import threading
from typing import Any

import pytest
import torch

from horo.bootstrap.auth.handshake import HandshakeError
from horo.bootstrap.host import passed_file
from horo.bootstrap.host.passed_file import FileAddress, FileGiver, take_file
from horo.core.memory import create_memory
from horo.errors import ResourceError, UnsupportedError
from horo.torch.optimizer.sharding.hosts import arithmetic, is_compared, refuse_unlike
from horo.torch.optimizer.sharding.owners import LOAD_OF_TENSOR, share_out


def test_owners_have_about_equal_loads_and_frozen_parameters_none() -> None:
    loads = [0, 0, 0]
    sizes = [1 << 20] * 7 + [100] * 50 + [0] * 4
    owners = share_out(sizes, loads)
    assert max(loads) - min(loads) <= (1 << 20) + LOAD_OF_TENSOR
    assert sum(loads) == sum(size + LOAD_OF_TENSOR for size in sizes if size)
    assert share_out(sizes, [0, 0, 0]) == owners
    later = share_out([100], loads)
    assert loads[later[0]] == min(loads) + 100 + LOAD_OF_TENSOR or loads[later[0]] <= max(loads) + LOAD_OF_TENSOR + 100


def _give(giver: FileGiver, takers: int, **options: Any) -> None:
    memory = create_memory(4096)
    try:
        giver.give(memory, takers, options.get("timeout_s", 20.0), options.get("check", lambda: None))
    finally:
        os.close(memory)
        giver.close()


def test_strangers_get_nothing_and_takers_the_file() -> None:
    giver = FileGiver()
    thread = threading.Thread(target=_give, args=(giver, 2))
    thread.start()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(giver.address.name)
        stranger.sendall(bytes(32))
        assert stranger.recv(1) == b""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(giver.address.name)
    for _ in range(2):
        taken = take_file(giver.address, 20.0)
        assert os.fstat(taken).st_size == 4096
        os.close(taken)
    thread.join()
    with pytest.raises(ResourceError, match=r"^shared memory did not come from the first rank of this host: "):
        take_file(giver.address, 20.0)


def test_a_giver_gives_up() -> None:
    with pytest.raises(ResourceError, match=r"^3 of 3 ranks did not come for shared memory$"):
        _give(FileGiver(), 3, timeout_s=0.0)

    def ended() -> None:
        raise ResourceError("the job has ended")

    with pytest.raises(ResourceError, match=r"^the job has ended$"):
        _give(FileGiver(), 3, check=ended)


def test_a_process_of_another_user_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: socket.socket) -> None:
        raise HandshakeError("it belongs to user 7")

    giver = FileGiver()
    monkeypatch.setattr(passed_file, "check_user", refuse)
    with pytest.raises(ResourceError, match="it belongs to user 7"):
        take_file(giver.address, 20.0)
    giver.close()


def test_no_socket_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    giver = FileGiver()
    monkeypatch.setattr(passed_file.secrets, "token_hex", lambda _: giver.address.name.decode().removeprefix("\0horo-"))
    with pytest.raises(ResourceError, match=r"^cannot listen on an abstract unix socket: Address already in use$"):
        FileGiver()
    giver.close()
    with pytest.raises(ResourceError, match="did not come"):
        take_file(FileAddress(b"\0horo-nobody", b""), 1.0)


def test_hosts_compare_now_and_then_and_must_be_alike() -> None:
    assert [step for step in range(1, 4000) if is_compared(step)] == [*(2**n for n in range(11)), 2048, 3072]
    own = arithmetic()
    assert own[0] == torch.__version__
    refuse_unlike({0: own, 3: own})
    with pytest.raises(UnsupportedError, match=r"processor .* at rank 0, another at rank 3, so hosts may compute diff"):
        refuse_unlike({0: own, 3: (*own[:2], "another")})
