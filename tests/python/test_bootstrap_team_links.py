"""Links of a team: the right ones on every member, or an error on every rank of the job that says who is at fault."""

import errno
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import open_descriptors, wait_until
from joining import SECRET, check_links, run_threads
from plain_ranks import PlainRanks

from horo.bootstrap import team_links
from horo.bootstrap.auth.frames import pack_fields
from horo.bootstrap.auth.handshake import Purpose
from horo.bootstrap.directory import Directory, PeerAddress
from horo.bootstrap.host.grouping import Grouping, group_ranks
from horo.bootstrap.links import Links
from horo.bootstrap.team_links import TeamLinks, _TeamSetup, connect_team
from horo.errors import AbortedError, HoroError, MismatchError, PeerLostError, TimeoutError, UsageError

Outcome = TeamLinks | BaseException | None


class Board:
    """The exchange of a job whose ranks are threads: everybody writes, then everybody reads."""

    def __init__(self, size: int) -> None:
        self._said: list[bytes] = [b""] * size
        self._barrier = threading.Barrier(size)
        self.calls = [0] * size

    def exchange(self, rank: int, mine: bytes) -> list[bytes]:
        self.calls[rank] += 1
        self._said[rank] = mine
        self._meet()
        answers = list(self._said)
        self._meet()
        return answers

    def end(self) -> None:
        """Ends the wait of those who are in an exchange, and of those who come."""
        self._barrier.abort()

    def _meet(self) -> None:
        try:
            self._barrier.wait(20)
        except threading.BrokenBarrierError:
            raise TimeoutError("not all ranks came to the exchange") from None


def directories(host_of_rank: Sequence[int], **options: object) -> list[Directory]:
    """Of ranks on one machine that pose as ranks of several hosts."""
    grouping = group_ranks(host_of_rank)
    common = Directory(
        rank=0,
        grouping=grouping,
        peers=[PeerAddress(("this boot", 1), None)] * grouping.size,
        host_names=[f"h{host}" for host in grouping.host_of_rank],
        secret=SECRET,
        epoch=1,
        timeout_s=20,
    )
    return [replace(common, rank=rank, **options) for rank in range(grouping.size)]  # type: ignore[arg-type]


def connect_all(
    known: Sequence[Directory],
    members: Sequence[int],
    *,
    board: Board | None = None,
    exchanges: Mapping[int, Callable[[bytes], Sequence[bytes]]] | None = None,
    check: Callable[[], None] = lambda: None,
    teams: Sequence[tuple[int, list[int]]] = (),
) -> list[Outcome]:
    """What every rank got, or the error that it raised; ``teams``: for each, where they differ."""
    table = Board(len(known)) if board is None else board

    def connect(rank: int) -> TeamLinks | None:
        exchange = (exchanges or {}).get(rank) or (lambda mine: table.exchange(rank, mine))
        number, own = teams[rank] if teams else (7, members)
        return connect_team(known[rank], number, own, exchange, check)

    return run_threads([lambda rank=rank: connect(rank) for rank in range(len(known))])  # type: ignore[misc]


def check_team(outcomes: Sequence[Outcome], members: Sequence[int], host_of_rank: Sequence[int], sockets: int) -> None:
    """Every member has its links, numbered as the team counts, and nobody else has any; closes them."""
    made = []
    for rank, outcome in enumerate(outcomes):
        if rank in members:
            assert isinstance(outcome, TeamLinks), outcome
            made.append(outcome)
        else:
            assert outcome is None
    hosts = list(dict.fromkeys(host_of_rank[member] for member in members))
    grouping = Grouping(tuple(hosts.index(host_of_rank[member]) for member in members))
    assert [links.rank for links in made] == list(range(len(members)))
    assert {(links.members, links.grouping) for links in made} == {(tuple(members), grouping)}
    check_links(grouping, [links.control_fds for links in made], [links.data_fds for links in made], sockets)
    for links in made:
        links.close()


def failures(outcomes: Sequence[Outcome]) -> list[HoroError]:
    errors = [outcome for outcome in outcomes if isinstance(outcome, HoroError)]
    assert len(errors) == len(outcomes), outcomes
    return errors


@pytest.fixture
def tight() -> Iterator[None]:
    """Nothing is left open."""
    before, threads = open_descriptors(), threading.active_count()
    yield
    wait_until(
        lambda: open_descriptors() <= before and threading.active_count() <= threads,
        "no descriptor and no thread is left",
    )


@settings(max_examples=25)
@given(data=st.data())
def test_any_members_on_any_hosts_are_linked_as_a_job_of_their_own_would_be(data: st.DataObject) -> None:
    host_of_rank = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=10), "hosts")
    ranks = st.sets(st.integers(0, len(host_of_rank) - 1), min_size=1)
    members, sockets = sorted(data.draw(ranks, "members")), data.draw(st.sampled_from([1, 3]), "sockets")
    known = directories(host_of_rank, sockets_per_peer=sockets)
    check_team(connect_all(known, members), members, host_of_rank, sockets)


def test_a_team_has_links_for_data_also_where_that_of_all_ranks_goes_by_mpi(tight: None) -> None:
    outcomes = connect_all(directories([0, 1], data_by_mpi=True), [0, 1])
    for other, links in zip((1, 0), outcomes, strict=True):
        assert isinstance(links, TeamLinks)
        assert [host for host, fd in enumerate(links.control_fds) if fd >= 0] == [other]
        assert [host for host, fd in enumerate(links.data_fds) if fd >= 0] == [other]
        links.close()


def test_two_teams_may_be_made_at_once(tight: None) -> None:
    """By different threads of the same ranks: the number of each team keeps their connections apart."""
    hosts, members = [0, 1, 2], {1: [0, 1, 2], 2: [0, 2]}
    known = directories(hosts)
    boards = {number: Board(3) for number in members}

    def maker(number: int, rank: int) -> Callable[[], TeamLinks | None]:
        exchange = boards[number].exchange
        return lambda: connect_team(known[rank], number, members[number], lambda mine: exchange(rank, mine))

    outcomes = run_threads([maker(number, rank) for number in members for rank in range(3)])
    check_team(outcomes[:3], members[1], hosts, 1)
    check_team(outcomes[3:], members[2], hosts, 1)


def test_a_connection_of_one_team_does_not_pass_for_one_of_another(tight: None) -> None:
    near, far = directories([0, 1], timeout_s=0.3)
    to_far, to_near = near.grouping.links(0)[0], far.grouping.links(1)[0]
    assert to_far.purpose is Purpose.CONTROL
    waiting = [pack_fields([b"", b"waits"])] * 2
    listening = Links(_TeamSetup(near, 1, [0, 1], lambda _: waiting, lambda: None), near, [to_far], 0, team=1)
    dialing = Links(_TeamSetup(far, 2, [0, 1], lambda _: waiting, lambda: None), far, [to_near], 1, team=2)
    endpoints = listening.listen()
    with pytest.raises(TimeoutError, match=r"rank 0 \(h0\) could not be reached from rank 1 \(h1\)"):
        dialing.dial(lambda rank: endpoints)
    dialing.abort()
    listening.abort()


def test_a_member_with_another_secret_is_an_error_on_all_ranks(tight: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Links.wait

    def wait_once_rank_3_is_there(self: Links) -> None:
        if self._directory.rank == 0:
            wait_until(lambda: any(link.peer == 3 for link in self._incoming._connected), "rank 3 has connected")
        real(self)

    monkeypatch.setattr(Links, "wait", wait_once_rank_3_is_there)
    monkeypatch.setattr(team_links, "_REPORT_S", 60)  # rank 2 is told of rank 0's failure behind its own
    known = directories([0, 1, 2, 3], timeout_s=0.4)
    known[2] = replace(known[2], secret=bytes(reversed(SECRET)))
    errors = failures(connect_all(known, [0, 2, 3]))
    assert isinstance(errors[1], AbortedError)
    assert "the ranks 0, 2, 3 were given up because another rank failed: rank 0 (h0): rank 2 (h2)" in str(errors[1])
    assert isinstance(errors[2], TimeoutError)
    assert "rank 0 (h0) could not be reached from rank 2 (h2) (HORO_START_TIMEOUT)" in str(errors[2])
    assert "does not know the job's secret" in str(errors[2])
    assert "did not connect to rank 0 (h0) at 127.0.0.1:" in str(errors[0])


def test_a_member_that_never_connects_is_named_to_all(tight: None) -> None:
    """Rank 1 hangs after the first exchange, until the others have given up."""
    board = Board(3)
    given_up = threading.Event()

    def hang(mine: bytes) -> list[bytes]:
        answers = board.exchange(1, mine)
        if board.calls[1] == 1:
            assert given_up.wait(20)
        return answers

    def leave(mine: bytes) -> list[bytes]:
        if board.calls[0] == 1:
            given_up.set()
        return board.exchange(0, mine)

    known = directories([0, 1, 2], timeout_s=0.3)
    errors = failures(connect_all(known, [0, 1], board=board, exchanges={0: leave, 1: hang}))
    assert isinstance(errors[0], TimeoutError)
    for error in errors:
        assert "rank 1 (h1) did not connect to rank 0 (h0) at 127.0.0.1:" in str(error)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_cannot_connect_tells_all_why(tight: None, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    """Long before the timeout of 20 s, at which the others would speak of a firewall."""
    real = Links.dial

    def dial(self: Links, find: Callable[[int], object]) -> None:
        if self._directory.rank == failing:
            raise OSError(errno.EMFILE, "Too many open files")
        real(self, find)  # type: ignore[arg-type]

    monkeypatch.setattr(Links, "dial", dial)
    outcomes = connect_all(directories([0, 1, 2, 3]), [0, 1, 2])
    assert isinstance(outcomes[failing], OSError)
    for outcome in outcomes[:failing] + outcomes[failing + 1 :]:
        assert isinstance(outcome, AbortedError)
        assert f"rank {failing} (h{failing}): OSError: [Errno {errno.EMFILE}] Too many open files" in str(outcome)


@pytest.mark.parametrize("missing_exchange", [1, 2])
def test_a_rank_that_stays_away_from_an_exchange_leaves_nothing_open(tight: None, missing_exchange: int) -> None:
    board = Board(3)

    def stay_away(mine: bytes) -> list[bytes]:
        if board.calls[1] + 1 == missing_exchange:
            board.end()
            raise PeerLostError("gone")
        return board.exchange(1, mine)

    errors = failures(connect_all(directories([0, 1, 2]), [0, 1, 2], board=board, exchanges={1: stay_away}))
    assert [type(error) for error in errors] == [TimeoutError, PeerLostError, TimeoutError]
    assert "not all ranks came to the exchange" in str(errors[0])


def test_news_of_a_loss_ends_the_wait_for_connections(tight: None) -> None:
    """Long before the timeout of 20 s: the member that is waited for would never connect."""
    board = Board(2)
    told = threading.Event()

    def check() -> None:
        told.set()
        raise PeerLostError("rank 1 (h1) is lost")

    def hang(mine: bytes) -> list[bytes]:
        answers = board.exchange(1, mine)
        if board.calls[1] == 1:
            assert told.wait(15)
        return answers

    errors = failures(connect_all(directories([0, 1]), [0, 1], board=board, exchanges={1: hang}, check=check))
    assert [type(error) for error in errors] == [PeerLostError, PeerLostError]
    assert "rank 0 (h0): rank 1 (h1) is lost" in str(errors[1])


def test_ranks_that_speak_of_different_teams_all_hear_it(tight: None) -> None:
    for error in failures(connect_all(directories([0, 1, 2]), [], teams=[(1, [0, 1]), (1, [0, 1]), (1, [0, 2])])):
        assert isinstance(error, MismatchError)
        told = "rank 0 (h0) adds the process set of the ranks 0, 1, rank 2 (h2) adds the process set of the ranks 0, 2"
        assert told in str(error)


@pytest.mark.parametrize(
    ("number", "members", "told"),
    [
        (0, [0, 1], "a team's number is 1 to 4294967295, not 0"),
        (1 << 32, [0, 1], "a team's number is 1 to 4294967295, not 4294967296"),
        (1, [], "ascending order, each once, not ()"),
        (1, [1, 0], "ascending order, each once, not (1, 0)"),
        (1, [0, 0], "ascending order, each once, not (0, 0)"),
        (1, [-1, 0], "has members that a job of 2 ranks does not have"),
        (1, [1, 2], "has members that a job of 2 ranks does not have"),
    ],
)
def test_a_team_that_cannot_be_is_refused(tight: None, number: int, members: list[int], told: str) -> None:
    for error in failures(connect_all(directories([0, 1]), [], teams=[(number, members)] * 2)):
        assert isinstance(error, UsageError)
        assert told in str(error)


@pytest.mark.parametrize("hosts", ["aaaa", "aabb", "abcd", "abbb"])
def test_teams_are_added_used_and_removed_without_a_trace(tmp_path: Path, hosts: str) -> None:
    sets = [[0, 1], [1, 2], [2, 3], [0, 3], [1, 2, 3]]

    def wanted(ranks: Sequence[int]) -> list[float]:
        return [float(sum(rank + 1 for rank in ranks))] * 2

    with PlainRanks(tmp_path, hosts) as ranks:
        ranks.all("start")
        ranks.all("allreduce", "warm", 10)
        before = ranks.all("descriptors")
        teams = [ranks.all("add_team", members) for members in sets]
        assert teams == [[number] * 4 for number in range(1, 6)]
        for step, members in enumerate(sets):
            for count in (1, 200_000):
                sums = ranks.all("sum_in", step + 1, f"t{count}", count, ranks=members)
                assert sums == [wanted(members)] * len(members)
        assert ranks.all("allreduce", "world", 1000) == [wanted(range(4))] * 4
        for number in range(1, 6):
            ranks.all("remove_team", number)
        assert ranks.all("descriptors") == before
        assert ranks.all("add_team", [0, 2]) == [1 + 256] * 4
        assert ranks.all("sum_in", 1 + 256, "again", 5000, ranks=[0, 2]) == [wanted([0, 2])] * 2
        assert ranks.finish() == [0] * 4
