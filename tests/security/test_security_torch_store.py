"""Stores that all can reach: torch's, and the ports of Slurm; who writes or squats there gains nothing."""

import contextlib
import json
import os
import re
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fabric import close_setup
from joining import join_all

from horo.bootstrap.launchers import slurm_store
from horo.bootstrap.launchers.slurm_store import _publish_secret, _StoreInfo, candidate_ports, open_slurm_store
from horo.bootstrap.launchers.torch_store import TorchStore
from horo.bootstrap.launchers.variables import Launch, read_launch
from horo.bootstrap.net import advertisement
from horo.bootstrap.net.addresses import Endpoint, bind_all
from horo.bootstrap.net.advertisement import AdvertisementServer, Stock, fetch
from horo.bootstrap.running_rank import Connection
from horo.bootstrap.store.protocol import Store, prefixed
from horo.bootstrap.store.signed import signed
from horo.config.table import Config, read_config
from horo.errors import GroupError, HoroError, ResourceError
from horo.errors import TimeoutError as HoroTimeoutError

torch_distributed: Any = pytest.importorskip("torch.distributed")

SECRET = bytes(range(32)).hex()


@pytest.fixture
def server() -> Any:
    return torch_distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client(server: Any) -> Any:
    return torch_distributed.TCPStore(
        "127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=10), wait_for_workers=False
    )


def view(server: Any, job: str = "job/1/", secret: str = SECRET) -> Store:
    return prefixed(signed(TorchStore(client(server), "127.0.0.1"), secret.encode()), job)


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


def test_a_secret_on_some_nodes_only_is_told_as_that(server: Any) -> None:
    with_secret, without = environs(server)
    del without["HORO_SECRET"]
    ends = join_all([with_secret, without])
    assert all(isinstance(end, HoroError) and "HORO_SECRET" in str(end) for end in ends), ends
    assert all(str(end).isprintable() for end in ends), ends


Tamper = Callable[[str, bytes], bytes]


def test_an_answer_that_names_no_round_is_refused(server: Any, tampering: Callable[[Tamper], None]) -> None:
    tampering(lambda key, value: b"\x1b]0;" if re.search("rounds/[0-9]+$", key) else value)
    ends = join_all(environs(server))
    assert any("is no answer of rank 0: somebody else writes to it" in str(end) for end in ends), ends
    assert all(isinstance(end, HoroError) and str(end).isprintable() for end in ends), ends


@pytest.fixture
def tampering(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tamper], None]:
    """Puts what a function returns in place of each value that is written to the store."""
    real = TorchStore.set

    def begin(tamper: Tamper) -> None:
        monkeypatch.setattr(TorchStore, "set", lambda self, key, value: real(self, key, tamper(key, value)))

    return begin


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

    def place(key: str) -> str:
        return re.sub(r"[0-9a-f]{32}", "the round", key)

    tampering(lambda key, value: kept.setdefault(place(key), value))
    for connection in join_all(environs(server)):
        assert isinstance(connection, Connection), connection
        close_setup(connection.setup)
    port = next(value for key, value in kept.items() if key.endswith("listen/0")).rpartition(b"127.0.0.1:")[2]
    later = torch_distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket.create_server(("127.0.0.1", int(port))) as trap:
        trap.settimeout(0)
        tampering(lambda key, value: kept.get(place(key), value) if replayed in key and "rounds/" not in key else value)
        ends = join_all(environs(later))
        assert all(isinstance(end, HoroError) for end in ends), ends
        assert any("was not written by a rank of this start" in str(end) for end in ends), ends
        with pytest.raises(BlockingIOError):
            trap.accept()


JOB = f"5{os.getpid()}"
JOB_SECRET = bytes(range(32))


def step(rank: int, **extra: str) -> tuple[Launch, Config]:
    environ = {
        "SLURM_JOB_ID": JOB, "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost", "HORO_START_TIMEOUT": "30", **extra
    }  # fmt: skip
    return read_launch(environ), read_config(environ)


def start(**extra: str) -> list[bytes]:
    """Two ranks find each other and close again; the secret of each."""

    def run(rank: int) -> bytes:
        store, secret = open_slurm_store(*step(rank, **extra), 1)
        store.close()
        return secret

    with ThreadPoolExecutor() as pool:
        return [future.result(60) for future in [pool.submit(run, rank) for rank in range(2)]]


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
    ports = [set(candidate_ports(name, secret)) for secret in (None, JOB_SECRET, JOB_SECRET[::-1])]
    assert candidate_ports(name, JOB_SECRET) == candidate_ports(name, JOB_SECRET)
    assert all(len(some) == 8 for some in ports)
    assert len(ports[0] | ports[1] | ports[2]) > 20


def test_neither_squatting_nor_an_open_home_folder_stops_a_job_with_a_secret(home: Path) -> None:
    (home / ".horo").mkdir(mode=0o755)
    with squatting(public_ports()):
        first, second = start(HORO_SECRET=JOB_SECRET.hex())
    assert first == second
    assert list((home / ".horo").iterdir()) == []


@pytest.mark.parametrize("secret", ["", JOB_SECRET.hex()])
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
        launch, config = step(1, HORO_SECRET=JOB_SECRET.hex(), HORO_START_TIMEOUT="0.3")
        info = {"name": f"{JOB}.0.0/1", "endpoints": [trap.getsockname()], "secret": ""}
        slurm_store.CredentialFile(f"{JOB}.0.0/1", home).write(bytes(32) + json.dumps(info).encode())
        with pytest.raises(HoroTimeoutError, match="does not know this rank's HORO_SECRET"):
            open_slurm_store(launch, config, 1)
        with pytest.raises(BlockingIOError):
            trap.accept()


def test_neither_ports_nor_home_is_said(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / ".horo").write_text("a file")
    monkeypatch.setattr(slurm_store, "candidate_ports", lambda name, secret=None, ports=None: public_ports())
    with squatting(public_ports()), pytest.raises(ResourceError, match=r"none of the ports .* nor .*\.horo"):
        open_slurm_store(*step(0, HORO_SECRET=JOB_SECRET.hex()), 1)


NAME = f"munge{os.getpid()}.0.0/1"  # the ports follow from it: other runs of the tests have others
INFO = _StoreInfo(NAME, [Endpoint("127.0.0.1", 4711)], bytes(32))


def test_advertisements_are_made_at_a_bounded_rate() -> None:
    made: list[bytes] = []

    def make() -> bytes:
        made.append(b"%d" % len(made))
        return made[-1]

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


def test_many_visitors_start_few_processes_and_a_rank_gets_its_credential(monkeypatch: pytest.MonkeyPatch) -> None:
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
