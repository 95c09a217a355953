"""Starting a job: every rank ends with the right descriptors, or with an error that names who is at fault."""

import os
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
from fabric import close_setup
from jobs import open_descriptors, wait_until
from joining import check_wiring, environments, join_all, run_threads, serving

from horo.bootstrap import job as job_module
from horo.bootstrap import links as links_module
from horo.bootstrap import running_rank
from horo.bootstrap.auth.handshake import HandshakeError
from horo.bootstrap.host import arena as arena_module
from horo.bootstrap.job import start
from horo.bootstrap.launchers.variables import Place, read_launch
from horo.bootstrap.net.addresses import Endpoint
from horo.bootstrap.rendezvous import Rendezvous
from horo.bootstrap.running_rank import Connection
from horo.bootstrap.store.server import StoreServer
from horo.config.table import read_config
from horo.errors import AbortedError, HoroError, MismatchError, ResourceError, UsageError


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with serving() as running:
        yield running


@contextmanager
def joined(results: Sequence[Connection | BaseException]) -> Iterator[list[Connection]]:
    """The connections of all ranks, which are closed in the end; an error of any rank is raised."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    connections = [result for result in results if isinstance(result, Connection)]
    yield connections
    for connection in connections:
        close_setup(connection.setup)


@pytest.mark.parametrize("sockets", [1, 3])
@pytest.mark.parametrize("host_of_rank", [[0, 0], [0, 1], [0, 0, 0, 0], [0, 1, 0, 1], [0, 1, 1, 2, 0, 1, 3]])
def test_ranks_that_share_a_label_share_memory_and_the_others_are_linked(host_of_rank: list[int], sockets: int) -> None:
    """Each has so many streams for data to each."""
    before = open_descriptors()
    with serving() as server:
        common, hosts = {"HORO_SOCKETS_PER_PEER": str(sockets)}, [f"machine {host}" for host in host_of_rank]
        results = join_all(environments(server, len(host_of_rank), common, hosts))
    with joined(results) as connections:
        seen = [list(connection.setup.host_of_rank) for connection in connections]
        assert seen == [host_of_rank] * len(host_of_rank)
        assert {connection.setup.sockets_per_peer for connection in connections} == {sockets}
        assert connections[0].setup.host_name_of_rank == [f"name{rank}" for rank in range(len(host_of_rank))]
        check_wiring([connection.setup for connection in connections])
    assert open_descriptors() <= before


def test_places_are_counted_where_the_launcher_does_not_give_them(server: StoreServer) -> None:
    with joined(join_all(environments(server, 5, hosts="abaab"))) as connections:
        places = [connection.place for connection in connections]
        assert places == [Place(0, 3, 0, 2), Place(0, 2, 1, 2), Place(1, 3, 0, 2), Place(2, 3, 0, 1), Place(1, 2, 1, 2)]
        assert not any(connection.is_homogeneous for connection in connections)
        assert connections[3].hosts == ((0, 2, 3), (1, 4))
    environs = environments(server, 2)
    for rank, environ in enumerate(environs):
        environ |= {"HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1"}
        environ |= {"HOROVOD_CROSS_RANK": str(rank), "HOROVOD_CROSS_SIZE": "2"}
    with joined(join_all(environs)) as connections:
        assert [connection.place for connection in connections] == [Place(0, 1, 0, 2), Place(0, 1, 1, 2)]
        assert all(connection.is_homogeneous for connection in connections)
        assert connections[0].hosts == ((0, 1),)


def test_settings_reach_the_core_in_its_units(server: StoreServer) -> None:
    common = {
        "HORO_SEGMENT_BYTES": "8192", "HOROVOD_FUSION_THRESHOLD": "1000", "HOROVOD_CACHE_CAPACITY": "0",
        "HOROVOD_CYCLE_TIME": "2.5", "HOROVOD_STALL_CHECK_TIME_SECONDS": "1.5",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "7", "HORO_PEER_TIMEOUT": "4", "HOROVOD_LOG_LEVEL": "error",
    }  # fmt: skip
    with joined(join_all(environments(server, 2, common))) as connections:
        setup = connections[1].setup
        assert (setup.segment_bytes, setup.fusion_bytes) == (8192, 1000)
        assert (setup.cache_capacity, setup.cycle_time_us) == (0, 2500)
        assert (setup.stall_warning_ms, setup.stall_shutdown_ms, setup.peer_timeout_ms) == (1500, 7000, 4000)
        assert setup.log_level == 4


OF_TIMES = [
    (
        dict.fromkeys(["HORO_STALL_CHECK_TIME_SECONDS", "HORO_STALL_SHUTDOWN_TIME_SECONDS"], "0.0001"),
        (1, 1),
    ),  # not: none
    ({"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "7"}, (0, 0)),
]


@pytest.mark.parametrize(("environ", "times"), OF_TIMES)
def test_the_shortest_times_and_none_at_all(environ: dict[str, str], times: tuple[int, int]) -> None:
    with joined(join_all([environ])) as (connection,):
        assert (connection.setup.stall_warning_ms, connection.setup.stall_shutdown_ms) == times


@pytest.mark.parametrize(("host_ids", "segment_bytes"), [("aa", 1 << 18), ("ab", 1 << 20)])
def test_segments_inside_a_host_are_small(server: StoreServer, host_ids: str, segment_bytes: int) -> None:
    with joined(join_all(environments(server, 2, hosts=host_ids))) as connections:
        assert [connection.setup.segment_bytes for connection in connections] == [segment_bytes] * 2


def test_member_that_cannot_take_the_memory_is_a_host_of_its_own(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = arena_module.receive_descriptors
    victims = iter([True])

    def fail_once(connection: socket.socket, count: int) -> list[int]:
        received = real(connection, count)
        if next(victims, False):
            for number in received:
                os.close(number)
            raise ResourceError("no descriptor left")
        return received

    monkeypatch.setattr(arena_module, "receive_descriptors", fail_once)
    before = open_descriptors()
    with joined(join_all(environments(server, 4))) as connections:
        assert sorted(map(len, connections[0].hosts)) == [1, 3]
        assert len({connection.hosts for connection in connections}) == 1
        check_wiring([connection.setup for connection in connections])
        assert "talks to it as to another host: no descriptor left" in caplog.text
    wait_until(lambda: open_descriptors() <= before, "no descriptor is left")


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (arena_module._ArenaServer, "listen", ResourceError("cannot listen on an abstract unix socket: not permitted")),
        (arena_module, "check_user", HandshakeError("it belongs to user 1, this rank to user 0")),
    ],
    ids=["leader without a socket", "process of another user"],
)
def test_ranks_that_get_no_memory_are_hosts_of_their_own(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, error: Exception
) -> None:
    monkeypatch.setattr(owner, name, Mock(side_effect=error))
    with joined(join_all(environments(server, 3))) as connections:
        assert connections[0].hosts == ((0,), (1,), (2,))
        check_wiring([connection.setup for connection in connections])


def test_many_descriptors_pass_in_pieces() -> None:
    count = 400  # two messages and more; both ends are here, and the usual limit of open files is 1024
    near, far = socket.socketpair()
    pipes = [os.eventfd(number) for number in range(1, count + 1)]
    thread = threading.Thread(target=arena_module.send_descriptors, args=(near, pipes))
    thread.start()
    far.settimeout(10)
    received = arena_module.receive_descriptors(far, count)
    thread.join(10)
    assert [os.eventfd_read(number) for number in received] == list(range(1, count + 1))
    assert not any(map(os.get_inheritable, received))
    for number in (*pipes, *received):
        os.close(number)
    near.close()
    far.close()


def test_descriptors_cut_short_are_an_error_without_a_leak() -> None:
    before = open_descriptors()
    near, far = socket.socketpair()
    near.sendall((300).to_bytes(4, "big"))
    socket.send_fds(near, [b"D"], [0] * 250)
    near.close()
    far.settimeout(10)
    with pytest.raises(ResourceError, match="only 250 of 300"):
        arena_module.receive_descriptors(far, 300)
    far.close()
    assert open_descriptors() <= before


def told(results: Sequence[Connection | BaseException]) -> list[HoroError]:
    errors = [result for result in results if isinstance(result, HoroError)]
    assert len(errors) == len(results), results
    return errors


def test_rank_that_does_not_come_is_named_to_all(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("horo.bootstrap.rendezvous._WARNING_INTERVAL_S", 0.05)
    before = open_descriptors()
    environs = environments(server, 4)
    results: list[Connection | BaseException] = []
    thread = threading.Thread(target=lambda: results.extend(join_all([environs[2]])))
    thread.start()
    # It is there before the time of rank 0 begins.
    wait_until(lambda: "rank 2 (name2) has waited" in caplog.text, "its wait is in the log")
    results += join_all([{**environs[0], "HORO_START_TIMEOUT": "0.2"}])
    thread.join(30)
    errors = told(results)
    assert all("rank 1, rank 3 have not called horo.torch.init() within 0.2 s" in str(error) for error in errors)
    assert sorted(type(error).__name__ for error in errors) == ["AbortedError", "TimeoutError"]
    errors.clear()
    results.clear()
    wait_until(lambda: open_descriptors() <= before, "no descriptor is left")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("HORO_SEGMENT_BYTES", "4096"), ("HOROVOD_FUSION_THRESHOLD", "5"), ("HOROVOD_CACHE_CAPACITY", "7"),
        ("HORO_TRANSPORT", "tcp"), ("HORO_SOCKETS_PER_PEER", "2"), ("HOROVOD_GRADIENTS_READY", "step"),
    ],
)  # fmt: skip
def test_settings_that_must_be_equal_are_compared(server: StoreServer, variable: str, value: str) -> None:
    environs = environments(server, 3)
    environs[2][variable] = value
    for error in told(join_all(environs)):
        assert isinstance(error, MismatchError)
        assert re.search(r"the setting [a-z_]+ is \S+ \(default\) on rank 0 \(name0\) and", str(error))
        assert f"and {value} ({variable}) on rank 2 (name2)" in str(error)


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)])
def test_ranks_that_disagree_about_the_size_both_get_the_error(server: StoreServer, sizes: tuple[int, int]) -> None:
    environs = environments(server, 2)
    for environ, size in zip(environs, sizes, strict=True):
        environ["HOROVOD_SIZE"] = str(size)
    for error in told(join_all(environs)):
        assert isinstance(error, MismatchError)
        assert f"the job's size is {sizes[0]} on rank 0 (name0) and {sizes[1]} on rank 1 (name1)" in str(error)


def test_rank_started_twice_is_refused(server: StoreServer) -> None:
    environs = environments(server, 3, {"HORO_START_TIMEOUT": "5"})
    errors = told(join_all([environs[0], environs[1], environs[1]]))
    assert all("rank 1 (name1) was started twice" in str(error) for error in errors)
    assert sum(isinstance(error, UsageError) for error in errors) == 1


def test_others_stop_waiting_with_the_reason_of_a_failure(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    environs = environments(server, 3)
    environs[1]["HORO_HOST_ID"] = "elsewhere"
    environs[0]["HORO_NETWORK_INTERFACES"] = "no-such-interface"
    before = open_descriptors()
    errors = told(join_all(environs))
    assert isinstance(errors[0], UsageError)
    for error in errors[1:]:
        assert isinstance(error, AbortedError)
        assert "rank 0 (name0): HORO_NETWORK_INTERFACES='no-such-interface' matches no interface" in str(error)
    del errors
    wait_until(lambda: open_descriptors() <= before, "no descriptor is left")


@pytest.mark.parametrize(
    ("first", "fact"),
    [
        (0, "rank 1 (name1) did not connect to rank 0 (name0) at 127.0.0.1:"),
        (1, "rank 0 (name0) could not be reached from rank 1 (name1)"),
    ],
)
def test_host_that_cannot_be_reached_is_named_with_its_address(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch, first: int, fact: str
) -> None:
    """``first``: the rank that gives up first. Its time is short from where it is the other's address that counts."""
    listen, wait, dial = links_module._IncomingLinks.listen, links_module.Links.wait, links_module._dial_link
    dead = socket.socket()
    dead.bind(("127.0.0.1", 0))  # and not listening: nobody else gets the port

    def publish_a_dead_port(self: links_module._IncomingLinks, *arguments: Any) -> object:
        listen(self, *arguments)
        return [Endpoint(*dead.getsockname())]

    def shorten(group: object) -> None:
        assert isinstance(group, Rendezvous)
        if group.rank == first:
            group.timeout_s = 0.2

    def wait_shortly(self: links_module.Links) -> None:
        shorten(self._group)
        wait(self)

    def dial_shortly(group: links_module.LinkGroup, *others: Any) -> socket.socket:
        shorten(group)
        return dial(group, *others)

    monkeypatch.setattr(links_module._IncomingLinks, "listen", publish_a_dead_port)
    monkeypatch.setattr(links_module.Links, "wait", wait_shortly)
    monkeypatch.setattr(links_module, "_dial_link", dial_shortly)
    environs = environments(server, 2)
    environs[1]["HORO_HOST_ID"] = "elsewhere"
    with dead:
        errors = told(join_all(environs))
    for error in errors:
        assert fact in str(error)
        assert "HORO_NETWORK_INTERFACES" in str(error)
        assert "`hororun --check-hosts -H HOST,HOST` tries the connections between hosts" in str(error)


def test_nothing_of_past_starts_piles_up_in_the_store(server: StoreServer) -> None:
    environs = environments(server, 3, hosts="aab")
    sizes = []
    leftovers: list[list[str]] = [[], [], []]
    for epoch in range(1, 5):

        def joiner(rank: int, epoch: int = epoch) -> Connection:
            launch = read_launch(environs[rank])
            return job_module.connect(launch, read_config(environs[rank]), epoch, leftovers[rank])

        with joined(run_threads([lambda rank=rank: joiner(rank) for rank in range(3)])):  # type: ignore[misc]
            sizes.append(len(server._values))
    assert sizes == [5, 5, 5, 5]  # "ready" of each rank, the word of rank 0 that all are, and a counter


def test_failed_context_closes_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_rank, "Context", Mock(side_effect=ResourceError("no memory")))
    before = open_descriptors()
    with pytest.raises(ResourceError, match="no memory"):
        start({})
    assert open_descriptors() <= before
