"""Under Slurm, ports are known to everybody: who visits or takes them gains nothing, and takes nothing from ranks."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from horo.bootstrap.launchers import slurm_store
from horo.bootstrap.launchers.slurm_store import _publish_secret, _StoreInfo, candidate_ports, open_slurm_store
from horo.bootstrap.launchers.variables import Launch, read_launch
from horo.bootstrap.net import advertisement
from horo.bootstrap.net.addresses import Endpoint, bind_all
from horo.bootstrap.net.advertisement import AdvertisementServer, Stock, fetch
from horo.config.table import Config, read_config
from horo.errors import ResourceError
from horo.errors import TimeoutError as HoroTimeoutError

JOB = f"5{os.getpid()}"
SECRET = bytes(range(32))


def step(rank: int, **extra: str) -> tuple[Launch, Config]:
    environ = {
        "SLURM_JOB_ID": JOB, "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost", "HORO_START_TIMEOUT": "30", **extra
    }  # fmt: skip
    return read_launch(environ), read_config(environ)


def start(**extra: str) -> list[bytes]:
    """Two ranks find each other and close again; the secret of each."""
    found: list[bytes | BaseException] = []

    def run(rank: int) -> None:
        try:
            store, secret = open_slurm_store(*step(rank, **extra), 1)
        except BaseException as error:
            found.append(error)
        else:
            found.append(secret)
            store.close()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return [result for result in found if isinstance(result, bytes)]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    return tmp_path


@contextlib.contextmanager
def squatting(ports: Sequence[int]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        yield


def public_ports() -> list[int]:
    return candidate_ports(f"{JOB}.0.0/1")


def test_ports_are_a_secret_where_there_is_one() -> None:
    name = f"{JOB}.0.0/1"
    ports = [set(candidate_ports(name, secret)) for secret in (None, SECRET, SECRET[::-1])]
    assert candidate_ports(name, SECRET) == candidate_ports(name, SECRET)
    assert all(len(some) == 8 for some in ports)
    assert len(ports[0] | ports[1] | ports[2]) > 20


def test_squatting_the_ports_of_a_job_with_a_secret_is_no_use(home: Path) -> None:
    with squatting(public_ports()):
        first, second = start(HORO_SECRET=SECRET.hex())
    assert first == second
    assert not (home / ".horo").exists()


@pytest.mark.parametrize("secret", ["", SECRET.hex()])
def test_where_no_port_is_free_the_home_folder_serves(home: Path, monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    monkeypatch.setattr(slurm_store.munge, "is_installed", lambda: True)
    monkeypatch.setattr(slurm_store.munge, "encode", lambda payload: payload)
    monkeypatch.setattr(slurm_store.munge, "decode", lambda credential: credential)
    seen: list[str] = []
    real = slurm_store.CredentialFile.write

    def write(self: slurm_store.CredentialFile, content: bytes) -> None:
        seen.append(content.decode("latin-1"))
        real(self, content)

    monkeypatch.setattr(slurm_store.CredentialFile, "write", write)
    monkeypatch.setattr(slurm_store, "candidate_ports", lambda name, secret=None, ports=None: public_ports())
    with squatting(public_ports()):
        first, second = start(**({"HORO_SECRET": secret} if secret else {}))
    assert first == second
    assert len(seen) == 1
    if secret:
        assert first.hex() not in seen[0]
    assert list((home / ".horo").iterdir()) == []


def test_a_forged_announcement_in_the_home_folder_is_not_believed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.setblocking(False)
        launch, config = step(1, HORO_SECRET=SECRET.hex(), HORO_START_TIMEOUT="0.3")
        info = {"name": f"{JOB}.0.0/1", "endpoints": [trap.getsockname()], "secret": ""}
        slurm_store.CredentialFile(f"{JOB}.0.0/1", home).write(bytes(32) + json.dumps(info).encode())
        with pytest.raises(HoroTimeoutError, match="does not know this rank's HORO_SECRET"):
            open_slurm_store(launch, config, 1)
        with pytest.raises(BlockingIOError):
            trap.accept()


def test_a_home_folder_that_is_open_to_others_does_not_stop_a_job_with_a_secret(home: Path) -> None:
    (home / ".horo").mkdir(mode=0o755)
    first, second = start(HORO_SECRET=SECRET.hex())
    assert first == second


def test_neither_ports_nor_home_is_said(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / ".horo").write_text("a file")
    monkeypatch.setattr(slurm_store, "candidate_ports", lambda name, secret=None, ports=None: public_ports())
    with squatting(public_ports()), pytest.raises(ResourceError, match=r"none of the ports .* nor .*\.horo"):
        open_slurm_store(*step(0, HORO_SECRET=SECRET.hex()), 1)


NAME = "munge.0.0/1"
INFO = _StoreInfo(NAME, [Endpoint("127.0.0.1", 4711)], bytes(32))


def counting() -> tuple[list[bytes], Callable[[], bytes]]:
    made: list[bytes] = []

    def make() -> bytes:
        made.append(b"%d" % len(made))
        return made[-1]

    return made, make


def test_advertisements_are_made_at_a_bounded_rate() -> None:
    made, make = counting()
    now = 100.0
    stock = Stock(make, 10, clock=lambda: now)
    assert [stock.take() for _ in range(10)] == made
    assert [stock.take() for _ in range(1000)] == [b"9"] * 1000
    now += 1.0
    taken = [stock.take() for _ in range(1000)]
    assert len(set(taken)) == 10  # never more than the stock, however long nobody has come
    assert len(made) == 20
    now += 1.01 / advertisement.FRESH_PER_S
    assert [stock.take(), stock.take()] == [b"20", b"20"]


def test_an_advertisement_that_cannot_be_made_is_not_tried_for_every_visitor() -> None:
    tried = []

    def fail() -> bytes:
        tried.append(1)
        raise ResourceError("munge: no daemon")

    stock = Stock(fail, 3, clock=lambda: 0.0)
    for _ in range(3):
        with pytest.raises(ResourceError):
            stock.take()
    assert [stock.take() for _ in range(100)] == [b""] * 100
    assert len(tried) == 3


def test_a_crowd_that_gets_no_credential_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> bytes:
        raise ResourceError("munge: no daemon")

    (listener,) = bind_all(["127.0.0.1"])
    server = AdvertisementServer([listener], fail)
    try:
        for _ in range(50):
            with socket.create_connection(listener.getsockname()) as visitor:
                visitor.settimeout(30)
                assert visitor.recv(1) == b""
    finally:
        server.close()
    assert [record.getMessage() for record in caplog.records] == [
        "refused a connection from 127.0.0.1: the job's secret cannot be given away: munge: no daemon"
    ]


def test_a_crowd_of_visitors_starts_few_processes_and_a_rank_gets_its_credential(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[bytes] = []

    def encode(payload: bytes) -> bytes:
        made.append(payload)
        return b"%d:" % len(made) + payload

    monkeypatch.setattr(advertisement, "FRESH_PER_S", 0.0)
    monkeypatch.setattr(slurm_store.munge, "encode", encode)
    monkeypatch.setattr(slurm_store.munge, "decode", lambda credential: credential.partition(b":")[2])
    withdraw = _publish_secret(["127.0.0.1"], candidate_ports(NAME), INFO, 4)
    try:
        endpoints = [Endpoint("127.0.0.1", port) for port in candidate_ports(NAME)]
        for _ in range(300):
            with socket.create_connection(endpoints[0]) as visitor:
                visitor.settimeout(30)
                assert visitor.recv(1 << 16)
        found = fetch(endpoints[:1], 30, lambda data: data.partition(b":")[2], lambda: None)
    finally:
        withdraw()
    assert found == INFO.encode()
    assert len(made) == 1 + 2 * 4  # one tells whether MUNGE works
