"""Many ranks that start together: what they read and say, and where they listen."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
from fabric import close_setup
from joining import SECRET, environments, join_all, run_threads, serving, wait_until

from horo.bootstrap.host.grouping import group_ranks
from horo.bootstrap.host.identity import Identity, read_identity
from horo.bootstrap.launchers.variables import Launch
from horo.bootstrap.peer_info import PeerInfo, exchange_peer_info
from horo.bootstrap.rendezvous import Rendezvous
from horo.bootstrap.running_rank import Connection
from horo.bootstrap.store.client import StoreClient
from horo.bootstrap.store.protocol import prefixed
from horo.bootstrap.store.server import StoreServer
from horo.config.table import Config
from horo.errors import TimeoutError

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


TWO = ((0, "a", 0.4), (1, "b", 0.2))


def test_each_rank_names_those_missing_when_its_own_time_is_over() -> None:
    def come(own: Rendezvous) -> None:
        own.enter()
        own.share("topic", b"", lambda _: b"")

    with serving() as server, ExitStack() as stack:
        ranks = [stack.enter_context(rendezvous(server, rank, 3, host, time_s)) for rank, host, time_s in TWO]
        ends = run_threads([lambda own=own: come(own) for own in ranks])  # type: ignore[misc]
    for end, time_s in zip(ends, ("0.4", "0.2"), strict=True):
        assert isinstance(end, TimeoutError)
        said = f"rank 2 has not called horo.torch.init() within {time_s} s of any progress (HORO_START_TIMEOUT)"
        assert said in str(end)


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
        wait_until(lambda: any(said.match(record.getMessage()) for record in list(caplog.records)))
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
        environs = environments(server, 3, {"HORO_PORT_RANGE": "21000-21040"})
        for environ, host in zip(environs, "abc", strict=True):
            environ["HORO_HOST_ID"] = host
        for connection in join_all(environs):
            assert isinstance(connection, Connection), connection
            close_setup(connection.setup)
    assert len(published) == 2  # rank 2 dials both of the others
    for where in published:
        assert int(where.rpartition(b":")[2]) in range(21000, 21041)
