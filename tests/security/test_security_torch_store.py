"""Under torchrun everybody who reaches torch's store can write to it; with ``HORO_SECRET`` that is of no use."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from fabric import close_setup
from joining import join_all
from wiring import check_wiring

from horo.bootstrap.launchers.torch_store import TorchStore
from horo.bootstrap.running_rank import Connection
from horo.bootstrap.store.protocol import Store, StoreAbandonedError, prefixed
from horo.bootstrap.store.signed import signed
from horo.errors import GroupError, HoroError

torch_distributed: Any = pytest.importorskip("torch.distributed")

SECRET = bytes(range(32)).hex()
LIMIT_S = 60


@pytest.fixture
def server() -> Any:
    return torch_distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client(server: Any) -> Any:
    return torch_distributed.TCPStore(
        "127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=10), wait_for_workers=False
    )


def view(server: Any, job: str = "job/1/", secret: str = SECRET) -> Store:
    return prefixed(signed(TorchStore(client(server), "127.0.0.1"), secret.encode()), job)


def test_values_come_as_they_were_set(server: Any) -> None:
    one, other = view(server), view(server)
    one.set("a", b"\x00\xff")
    one.set("empty", b"")
    assert other.get_many(["a", "empty"], 10) == [b"\x00\xff", b""]
    assert other.add("n", 2) == 2
    one.set("failed", b"rank 3")
    with pytest.raises(StoreAbandonedError) as caught:
        other.get("never", 10, unless="failed")
    assert caught.value.value == b"rank 3"
    other.delete(["a", "empty"])
    one.close()


@pytest.mark.parametrize(
    "attack",
    [
        lambda raw: raw.set("job/1/listen/0", b"10.6.6.6:666"),
        lambda raw: raw.set("job/1/listen/0", b""),
        lambda raw: raw.set("job/1/listen/0", bytes(raw.get("job/1/listen/1"))),
        lambda raw: raw.set("job/1/listen/0", bytes(raw.get("job/0/listen/0"))),
        lambda raw: raw.set("job/1/listen/0", bytes(raw.get("job/1/listen/0")) + b"x"),
        lambda raw: raw.set("job/1/listen/0", bytes(raw.get("job/1/listen/0"))[:-1]),
    ],
    ids=["replaced", "emptied", "of-another-rank", "of-another-start", "longer", "shorter"],
)
def test_a_changed_value_is_refused(server: Any, attack: Callable[[Any], None]) -> None:
    view(server).set("listen/0", b"10.0.0.1:1000")
    view(server).set("listen/1", b"10.0.0.2:1000")
    view(server, "job/0/").set("listen/0", b"10.0.0.3:1000")
    assert view(server).get("listen/0", 10) == b"10.0.0.1:1000"
    attack(client(server))
    with pytest.raises(GroupError, match=r"'job/1/listen/0' .* was not written by a rank of this start"):
        view(server).get("listen/0", 10)


def test_no_traceback_shows_bytes_that_were_refused(server: Any) -> None:
    client(server).set("job/1/failed", b"\x1b]0;title\x07")
    with pytest.raises(GroupError, match=r"'job/1/failed' .* was not written by a rank of this start") as caught:
        view(server).get("never", 10, unless="failed")
    assert "\x1b" not in "".join(traceback.format_exception(caught.value))


def test_a_value_of_another_job_with_the_same_name_and_secret_is_refused(server: Any) -> None:
    """Whoever reaches two stores could join ranks of two jobs by copying values from one to the other."""
    other = torch_distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    view(other).set("nonce/0", b"1")
    assert view(other).get("nonce/0", 10) == b"1"
    client(server).set("job/1/nonce/0", client(other).get("job/1/nonce/0"))
    with pytest.raises(GroupError, match=r"'job/1/nonce/0' .* was not written by a rank of this start"):
        view(server).get("nonce/0", 10)


def test_nodes_with_different_secrets_are_told_so(server: Any) -> None:
    view(server).set("a", b"1")
    with pytest.raises(GroupError, match="is HORO_SECRET the same on all nodes"):
        view(server, secret=bytes(32).hex()).get("a", 10)


def environs(server: Any) -> list[dict[str, str]]:
    return [
        {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "TORCHELASTIC_RUN_ID": "r",
            "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True",
            "HORO_HOST_ID": str(rank), "HORO_START_TIMEOUT": "10", "HORO_SECRET": SECRET
        }
        for rank in range(2)
    ]  # fmt: skip


def test_ranks_with_a_secret_start(server: Any) -> None:
    ends = join_all(environs(server))
    whole = [end for end in ends if isinstance(end, Connection)]
    assert len(whole) == 2, ends
    check_wiring([connection.setup for connection in whole])
    for connection in whole:
        close_setup(connection.setup)


def test_a_secret_on_some_nodes_only_is_told_as_that(server: Any) -> None:
    with_secret, without = environs(server)
    del without["HORO_SECRET"]
    ends = join_all([with_secret, without])
    assert all(isinstance(end, HoroError) and "HORO_SECRET" in str(end) for end in ends), ends
    assert all(str(end).isprintable() for end in ends), ends


Tamper = Callable[[str, bytes], bytes]


@pytest.fixture
def tampering() -> Iterator[Callable[[Tamper], None]]:
    """Puts what a function returns in place of each value that is written to the store."""
    patch, real = pytest.MonkeyPatch(), TorchStore.set

    def begin(tamper: Tamper) -> None:
        patch.setattr(TorchStore, "set", lambda self, key, value: real(self, key, tamper(key, value)))

    yield begin
    patch.undo()


def test_an_address_of_the_attackers_is_not_dialed(server: Any, tampering: Callable[[Tamper], None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0)
        where = f"127.0.0.1:{trap.getsockname()[1]}".encode()
        tampering(lambda key, value: value[: -len(where)] + where if key.endswith("listen/0") else value)
        ends = join_all(environs(server))
        assert all(isinstance(end, HoroError) for end in ends), ends
        assert any("was not written by a rank of this start" in str(end) for end in ends)
        with pytest.raises(BlockingIOError):
            trap.accept()


@pytest.mark.parametrize("replayed", ["listen/0", "/0", ""], ids=["address", "all-of-rank-0", "all"])
def test_values_of_an_earlier_job_with_the_same_name_and_secret_are_refused(
    server: Any, tampering: Callable[[Tamper], None], replayed: str
) -> None:
    """Somebody has kept what the ranks of the earlier job wrote, and now listens where rank 0 did then."""
    kept: dict[str, bytes] = {}

    def keep(key: str, value: bytes) -> bytes:
        return kept.setdefault(key, value)

    tampering(keep)
    for connection in join_all(environs(server)):
        assert isinstance(connection, Connection), connection
        close_setup(connection.setup)
    port = next(value for key, value in kept.items() if key.endswith("listen/0")).rpartition(b"127.0.0.1:")[2]
    later = torch_distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket.create_server(("127.0.0.1", int(port))) as trap:
        trap.settimeout(0)
        tampering(lambda key, value: kept.get(key, value) if replayed in key else value)
        ends = join_all(environs(later))
        assert all(isinstance(end, HoroError) for end in ends), ends
        assert any("was not written by a rank of this start" in str(end) for end in ends), ends
        with pytest.raises(BlockingIOError):
            trap.accept()
