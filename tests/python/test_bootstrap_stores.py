"""Stores that rank 0 or torch serves, rounds of torchrun, and what many ranks that start together read and say."""

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from fabric import close_setup
from jobs import DEADLINE_S, open_descriptors, port_for_later, wait_until
from joining import SECRET, environments, join_all, run_threads, serving
from rank_pool import RankPool

from horo.bootstrap import torch_rounds
from horo.bootstrap.host.grouping import group_ranks
from horo.bootstrap.host.identity import Identity, read_identity
from horo.bootstrap.launchers.torch_store import TorchStore
from horo.bootstrap.launchers.variables import Launch
from horo.bootstrap.net.interfaces import is_loopback
from horo.bootstrap.peer_info import PeerInfo, exchange_peer_info
from horo.bootstrap.rendezvous import Rendezvous
from horo.bootstrap.running_rank import Connection
from horo.bootstrap.store.client import StoreClient
from horo.bootstrap.store.protocol import StoreAbandonedError, StoreTimeoutError, prefixed
from horo.bootstrap.store.served import ServedStore, choose_server_addresses
from horo.bootstrap.store.server import StoreServer
from horo.bootstrap.store.signed import signed
from horo.bootstrap.torch_rounds import in_round
from horo.config.table import Config
from horo.errors import PeerLostError, TimeoutError, UsageError


def test_hosting_ends_when_all_others_have_disconnected_and_withdraws_the_address() -> None:
    before = open_descriptors()
    withdrawn: list[str] = []
    server = StoreServer(["127.0.0.1"], SECRET)
    own = ServedStore(server, SECRET, 3, 60, lambda: withdrawn.append("address"))
    others = [StoreClient(*server.endpoints[0], SECRET, 10, served_by="rank 0") for _ in range(2)]
    closing = threading.Thread(target=own.close)
    closing.start()
    others[0].close()
    others[1].set("key", b"still there")
    assert others[1].get("key", 10) == b"still there"
    assert withdrawn == []
    others[1].close()
    closing.join(60)
    assert withdrawn == ["address"]
    assert open_descriptors() <= before


def test_a_client_that_has_not_connected_is_awaited_for_a_short_time() -> None:
    with StoreServer(["127.0.0.1"], SECRET) as server:
        assert server.wait_for_disconnects(0, 60, 0)
        assert not server.wait_for_disconnects(1, 60, 0.01)
        with StoreClient(*server.endpoints[0], SECRET, 10):
            assert not server.wait_for_disconnects(1, 0.01, 60)
        assert server.wait_for_disconnects(1, 60, 0)


def test_addresses_are_loopback_where_all_are_near() -> None:
    assert choose_server_addresses(None, near=True, far=False) == ["127.0.0.1"]
    assert choose_server_addresses(None, near=False, far=False) == ["127.0.0.1"]
    with pytest.raises(UsageError, match="no-such-interface"):
        choose_server_addresses("no-such-interface", near=True, far=True)


def test_addresses_for_others_leave_loopback_to_those_nearby(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.1.2.3"], "ib0": ["10.9.2.3"]}
    monkeypatch.setattr("horo.bootstrap.store.served.interface_addresses", lambda: found)
    assert choose_server_addresses(None, near=True, far=True) == ["10.1.2.3", "10.9.2.3", "127.0.0.1"]
    far = choose_server_addresses("ib0,lo", near=False, far=True)
    assert far == ["10.9.2.3"]
    assert not any(map(is_loopback, far))


torch_distributed: Any = pytest.importorskip("torch.distributed")


@pytest.fixture
def torch_server(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch_rounds, "_rounds", {})
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


@pytest.fixture(params=["horo's", "torch's", "torch's without check"])
def clients(request: pytest.FixtureRequest, torch_server: Any) -> Iterator[Callable[[], Any]]:
    """Makes a client of a store: each kind keeps the same promises."""
    if "torch" in request.param:
        yield lambda: torch_client_of(torch_server, older="without" in request.param)
        return
    with StoreServer(["127.0.0.1"], SECRET) as server, ExitStack() as stack:
        yield lambda: stack.enter_context(StoreClient(*server.endpoints[0], SECRET, 10))


def client(server: Any, timeout_s: float = DEADLINE_S) -> Any:
    timeout = timedelta(seconds=timeout_s)
    return torch_distributed.TCPStore(
        "127.0.0.1", server.port, is_master=False, timeout=timeout, wait_for_workers=False
    )


def torch_client_of(server: Any, *, older: bool = False) -> TorchStore:
    return TorchStore(WithoutCheck(client(server)) if older else client(server), "127.0.0.1")


def test_waiting_for_a_late_rank_writes_nothing(torch_server: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """torch's own wait writes two lines whenever its time is over, to the descriptor."""
    with pytest.raises(StoreTimeoutError):
        torch_client_of(torch_server).get("late", 0.05)
    assert capfd.readouterr() == ("", "")


def test_values_counters_and_deletion(clients: Callable[[], Any]) -> None:
    one, other = clients(), prefixed(clients(), "p/")
    one.set("a", b"of another")
    one.set("p/a", b"\x00\xff")
    one.set("p/empty", b"")
    # torch's store answers no set(): another client may look before the value is there.
    assert other.get_many(["a", "empty"], 10) == [b"\x00\xff", b""]
    assert [other.add("n", 2), one.add("p/n", -1)] == [2, 1]
    other.delete(["a", "unknown"])
    with pytest.raises(StoreTimeoutError) as caught:
        other.get_many(["a", "empty", "b"], 0.05)
    assert caught.value.missing == ["a", "b"]
    assert (other.get("empty", 1), one.get("a", 1)) == (b"", b"of another")


def test_wait_ends_with_the_values_or_with_the_unless_key(clients: Callable[[], Any]) -> None:
    reader, writer = clients(), clients()
    found: list[Any] = []

    def read() -> None:
        found.append(reader.get_many(["late", "later", "late"], 10, unless="failed"))
        try:
            reader.get("never", 10, unless="failed")
        except StoreAbandonedError as error:
            found.append(error.value)

    thread = threading.Thread(target=read)
    thread.start()
    writer.set("later", b"2")
    writer.set("late", b"1")
    wait_until(lambda: found == [[b"1", b"2", b"1"]], "they are found")
    writer.set("failed", b"rank 3")
    thread.join(20)
    assert found[1:] == [b"rank 3"]
    with pytest.raises(StoreAbandonedError):  # as it is there already
        writer.get("never", 10, unless="failed")


def test_store_that_is_gone_is_a_lost_peer() -> None:
    server = torch_distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = torch_client_of(server)
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
            wait_until(lambda: said in caplog.text, "it is in the log")
        real(self, topic, value)

    monkeypatch.setattr(Rendezvous, "publish", publish)
    stores = [signed(torch_client_of(torch_server), b"5a" * 16) for _ in range(2)]
    ranks = [Rendezvous(store, rank, 2, "h", 20) for rank, store in enumerate(stores)]

    def gather(rank: Rendezvous) -> list[bytes]:
        rank.enter()
        rank.publish("topic", b"%d" % rank.rank)
        return rank.gather("topic")

    assert run_threads([lambda rank=rank: gather(rank) for rank in ranks]) == [[b"0", b"1"]] * 2  # type: ignore[misc]


def start_beside_gloo(place: dict[str, str]) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """What a rank that torch's variables place finds, with a process group of torch's beside it."""
    from horo.bootstrap.job import start  # noqa: PLC0415 - in a rank

    rank = os.environ["HOROVOD_RANK"]
    for name in [name for name in os.environ if name.startswith("HORO")]:
        del os.environ[name]
    os.environ.update(place, RANK=rank)
    job = start()
    torch_distributed.init_process_group("gloo")
    torch_distributed.barrier()
    torch_distributed.destroy_process_group()
    job.close()
    return job.rank, job.hosts


def test_rank_0_hosts_where_no_agent_does_and_init_process_group_shares_the_port() -> None:
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port_for_later())}
    with RankPool(2, init=False) as pool:
        assert pool.run(start_beside_gloo, place) == [(rank, ((0, 1),)) for rank in range(2)]


INFO = PeerInfo.of(Launch("none", 0, 1, "h"), Config(), read_identity(None), "10.0.0.1", "1+abi1")


@contextmanager
def rendezvous(server: StoreServer, rank: int, size: int, host: str, timeout_s: float = 20) -> Iterator[Rendezvous]:
    with StoreClient(*server.endpoints[0], SECRET, 20) as store:
        yield Rendezvous(prefixed(store, "job/1/"), rank, size, host, timeout_s)


def reply_bytes(size: int) -> int:
    """Of a start of so many ranks, two on each host."""

    def start(rank: int) -> None:
        host = f"node{rank // 2:04}"
        identity = Identity(f"{rank // 2:036}", 7, 0, "")
        cpus = 3 << 2 * (rank % 2)
        info = replace(INFO, size=size, host=host, identity=identity, local=(rank % 2, 2), cpus=cpus)
        with rendezvous(server, rank, size, host) as own:
            own.enter()
            peers = exchange_peer_info(own, info)
            assert peers[rank] == replace(info, identity=peers[rank].identity, sources={})
            assert group_ranks([peer.identity for peer in peers]).host_of_rank == tuple(r // 2 for r in range(size))
            own.finish()

    with serving() as server:
        assert run_threads([lambda rank=rank: start(rank) for rank in range(size)]) == [None] * size  # type: ignore[misc]
        return server.reply_bytes


def test_what_ranks_read_grows_with_their_number_not_with_its_square() -> None:
    few, many = reply_bytes(16), reply_bytes(64)
    assert few > 16 * len(INFO.encode())  # rank 0 reads that of all, the others that of rank 0
    assert many < 5 * few


def test_of_the_ranks_of_one_host_one_warns_each_time() -> None:
    with serving() as server, ExitStack() as stack:
        ranks = [stack.enter_context(rendezvous(server, rank, 4, host)) for rank, host in enumerate("aaab")]
        first = [rank._speaks_for_host("topic/0", 1) for rank in ranks]
        again = [rank._speaks_for_host("topic/0", 2) for rank in reversed(ranks)]
    assert first == [True, False, False, True]
    assert again == [True, True, False, False]  # another one, since the first may have what it waited for


def test_a_rank_that_waits_for_rank_0_names_those_for_whom_that_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "horo")
    monkeypatch.setattr("horo.bootstrap.rendezvous._WARNING_INTERVAL_S", 0.05)
    said = re.compile(r"^rank 2 \(name2\) has waited \d+ s in init\(\): rank 1 has not called horo\.torch\.init\(\)$")
    with serving() as server:
        environs = environments(server, 3)
        early: list[Connection | BaseException] = []
        thread = threading.Thread(target=lambda: early.extend(join_all([environs[0], environs[2]])))
        thread.start()
        wait_until(lambda: any(said.match(record.getMessage()) for record in list(caplog.records)), "it is in the log")
        late = join_all(environs[1:2])
        thread.join(30)
    for connection in (*early, *late):
        assert isinstance(connection, Connection), connection
        close_setup(connection.setup)


def test_ranks_listen_on_the_ports_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[bytes] = []
    real = Rendezvous.publish

    def publish(self: Rendezvous, topic: str, value: bytes) -> None:
        if topic == "listen":
            published.append(value)
        real(self, topic, value)

    monkeypatch.setattr(Rendezvous, "publish", publish)
    with serving() as server:
        for connection in join_all(environments(server, 3, {"HORO_PORT_RANGE": "21000-21040"}, "abc")):
            assert isinstance(connection, Connection), connection
            close_setup(connection.setup)
    assert len(published) == 2  # rank 2 dials both of the others
    for where in published:
        assert int(where.rpartition(b":")[2]) in range(21000, 21041)


SIZE = 4


class Interrupted:
    """Another client deletes the keys that say who asks, right before one call of this one."""

    def __init__(self, store: Any, other: Any, call: int) -> None:
        self._store, self._other, self._left = store, other, call

    def __getattr__(self, name: str) -> Any:
        self._left -= 1
        if self._left == 0:
            for rank in range(1, SIZE):
                self._other.delete_key(f"horo/job/rounds/round/{rank}")
        return getattr(self._store, name)


def launch(rank: int) -> Launch:
    return Launch("torchrun", rank, SIZE, "h", job_id="job")


@pytest.mark.parametrize("call", range(1, 9))
def test_rank_0_waits_for_no_key_of_a_rank_that_may_have_its_answer(torch_server: Any, call: int) -> None:
    asking = client(torch_server)
    for rank in range(1, SIZE):
        asking.set(f"horo/job/rounds/round/{rank}", str(100 + rank))
        asking.add("horo/job/rounds/progress count", 1)
    store = TorchStore(Interrupted(client(torch_server, 0.2), asking, call), "127.0.0.1")
    in_round(launch(0), store, DEADLINE_S)
    store.set("here", b"")
    for look in store.meanwhile:
        look()
    assert store.get("here", DEADLINE_S) == b""


def test_each_round_has_a_name_that_all_its_ranks_get_and_leaves_no_more_keys(torch_server: Any) -> None:
    names: list[dict[int, str]] = []
    for _ in range(3):
        torch_rounds._rounds.clear()
        found: dict[int, str] = {}
        stores = [torch_client_of(torch_server) for _ in range(SIZE)]

        def ask(rank: int, found: dict[int, str] = found, stores: list[TorchStore] = stores) -> None:
            found[rank] = in_round(launch(rank), stores[rank], DEADLINE_S).job_id

        threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(1, SIZE)]
        ask(0)
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            stores[0].meanwhile[0]()
            threads[0].join(0.001)
        names.append(found)
        assert len(found) == SIZE
        assert len(set(found.values())) == 1
        keys = {f"horo/job/rounds/{key}" for key in ("progress count", *(f"round/{rank}" for rank in range(1, SIZE)))}
        assert torch_server.num_keys() - len(keys) <= 1  # torch's own
        assert torch_server.check(sorted(keys))
    assert len({found[0] for found in names}) == 3


def test_where_rank_0_does_not_come_the_error_names_it_and_no_rank_that_asks(torch_server: Any) -> None:
    stores = [torch_client_of(torch_server) for _ in range(SIZE)]
    errors: list[str] = []

    def ask(rank: int) -> None:
        with pytest.raises(TimeoutError) as caught:
            in_round(launch(rank), stores[rank], 0.5)
        errors.append(str(caught.value))

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(errors) == 3
    assert all(error.startswith("rank 0 has not called horo.torch.init()") for error in errors), errors
