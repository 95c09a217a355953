"""torch's store under the same protocol: the same promises, checked on a real TCPStore."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from joining import run_threads, wait_until

from horo.bootstrap.launchers.torch_store import TorchStore
from horo.bootstrap.rendezvous import Rendezvous
from horo.bootstrap.store.protocol import StoreAbandonedError, StoreTimeoutError, prefixed
from horo.bootstrap.store.signed import signed
from horo.errors import PeerLostError

torch_distributed: Any = pytest.importorskip("torch.distributed")


@pytest.fixture
def torch_server() -> Any:
    return torch_distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class WithoutCheck:
    """A store as that of torch 2.1, which has no check() and raises TimeoutError."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        try:
            self._store.wait(keys, timeout)
        except RuntimeError as error:
            raise TimeoutError(str(error)) from error

    def __getattr__(self, name: str) -> Any:
        if name == "check":
            raise AttributeError(name)
        return getattr(self._store, name)


@pytest.fixture(params=[False, True], ids=["check", "no-check"])
def older(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def client_of(server: Any, *, older: bool = False) -> TorchStore:
    store = torch_distributed.TCPStore(
        "127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=10), wait_for_workers=False
    )
    return TorchStore(WithoutCheck(store) if older else store, "127.0.0.1")


def test_waiting_for_a_late_rank_writes_nothing(torch_server: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """torch's own wait writes two lines whenever its time is over, to the descriptor."""
    with pytest.raises(StoreTimeoutError):
        client_of(torch_server).get("late", 0.05)
    assert capfd.readouterr() == ("", "")


def test_values_counters_and_deletion(torch_server: Any, older: bool) -> None:
    one, other = client_of(torch_server, older=older), prefixed(client_of(torch_server, older=older), "p/")
    one.set("p/a", b"\x00\xff")
    one.set("p/empty", b"")
    # torch's store answers no set(): another client may look before the value is there.
    assert other.get_many(["a", "empty"], 10) == [b"\x00\xff", b""]
    assert [other.add("n", 2), one.add("p/n", -1)] == [2, 1]
    other.delete(["a", "unknown"])
    with pytest.raises(StoreTimeoutError) as caught:
        other.get_many(["a", "empty", "b"], 0.05)
    assert caught.value.missing == ["a", "b"]
    assert other.get("empty", 1) == b""


def test_wait_ends_with_the_value_or_with_the_unless_key(torch_server: Any, older: bool) -> None:
    reader, writer = client_of(torch_server, older=older), client_of(torch_server)
    found: list[bytes] = []

    def read() -> None:
        found.append(reader.get("late", 10, unless="failed"))
        try:
            reader.get("never", 10, unless="failed")
        except StoreAbandonedError as error:
            found.append(error.value)

    thread = threading.Thread(target=read)
    thread.start()
    writer.set("late", b"1")
    wait_until(lambda: found == [b"1"])
    writer.set("failed", b"rank 3")
    thread.join(20)
    assert found == [b"1", b"rank 3"]


def test_store_that_is_gone_is_a_lost_peer() -> None:
    server = torch_distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = client_of(server)
    del server
    with pytest.raises(PeerLostError, match=r"torch's store at 127\.0\.0\.1 is gone"):
        client.get("a", 5)


def test_a_rank_that_waits_long_for_one_that_has_begun_says_so_and_goes_on(
    torch_server: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("horo.bootstrap.rendezvous._WARNING_INTERVAL_S", 0.05)
    said = "rank 0 has begun init() but not come through it"
    real = Rendezvous.publish

    def publish(self: Rendezvous, topic: str, value: bytes) -> None:
        if (self.rank, topic) == (0, "topic"):
            wait_until(lambda: said in caplog.text)
        real(self, topic, value)

    monkeypatch.setattr(Rendezvous, "publish", publish)
    stores = [signed(client_of(torch_server), b"5a" * 16) for _ in range(2)]
    ranks = [Rendezvous(store, rank, 2, "h", 20) for rank, store in enumerate(stores)]

    def gather(rank: Rendezvous) -> list[bytes]:
        rank.enter()
        rank.publish("topic", b"%d" % rank.rank)
        return rank.gather("topic")

    assert run_threads([lambda rank=rank: gather(rank) for rank in ranks]) == [[b"0", b"1"]] * 2  # type: ignore[misc]


def test_rank_0_hosts_where_no_agent_does_and_init_process_group_shares_the_port(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch.distributed as dist
            from horo.bootstrap.job import start
            job = start()
            dist.init_process_group("gloo")
            dist.barrier()
            dist.destroy_process_group()
            job.close()
            print(job.rank, job.hosts)
            """
        ),
        encoding="utf-8",
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(processes):
        output, errors = process.communicate(timeout=90)
        assert process.returncode == 0, errors
        assert output == f"{rank} ((0, 1),)\n"
