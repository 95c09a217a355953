"""What the transport over MPI does when MPI fails, keeps what it got, or is gone; and what a setup must have."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from fabric import close_setup, make_setups
from links import CLOSED, NONE, PEER_TIMEOUT_MS, SILENT, Rank, poll_until

from horo.core.context import Context
from horo.core.setup import MPI_FUNCTIONS, MpiCalls, MpiUse
from horo.errors import UsageError

PEER_LOST = -40


class FakeMpi:
    """An MPI that does what a test tells it, and transports of two hosts over it."""

    def __init__(self, native: ModuleType) -> None:
        self.native = native
        self.state: Any = native.lib.shim_fake_reset()
        self.ranks: list[Rank] = []

    def rank(self, peer_timeout_ms: int = PEER_TIMEOUT_MS) -> Rank:
        ffi = self.native.ffi
        calls = ffi.new("horo_mpi *")
        self.native.lib.shim_fake_describe(calls, 2)
        peers = calls.rank_of_host = ffi.new("int32_t[]", [-1, 1])
        status, error = ffi.new("int *"), ffi.new("char[]", 1024)
        fds = ffi.new("int[]", [-1, -1])
        transport = self.native.lib.shim_mpi_create(fds, calls, len(peers), peer_timeout_ms, status, error)
        assert transport != ffi.NULL
        self.ranks.append(Rank(self.native, transport))
        return self.ranks[-1]


@pytest.fixture
def mpi(native: ModuleType) -> Iterator[FakeMpi]:
    fake = FakeMpi(native)
    yield fake
    fake.state.obeys_cancel = fake.state.completes = 1
    for rank in fake.ranks:
        rank.destroy()


def test_an_error_of_mpi_while_testing_loses_the_peer(mpi: FakeMpi) -> None:
    rank = mpi.rank()
    sent, received = rank.send(1, b"x"), rank.recv(1, 1)
    mpi.state.test_error = 7
    assert rank.wait(sent, received) == PEER_LOST
    assert sent.failed and received.failed
    assert rank.loss(1) == CLOSED
    mpi.state.test_error = 0
    later = rank.recv(1, 1)
    assert rank.wait(later) == PEER_LOST
    assert rank.idle


def test_an_error_of_mpi_while_posting_loses_the_peer(mpi: FakeMpi) -> None:
    rank = mpi.rank()
    mpi.state.post_error = 9
    sent = rank.send(1, b"x")
    assert sent.failed
    assert rank.loss(1) == CLOSED


def test_mpi_gets_a_few_messages_at_once(mpi: FakeMpi) -> None:
    rank = mpi.rank()
    ios = [rank.send(1, bytes(1024)) for _ in range(10)]
    assert mpi.state.posted == 8
    mpi.state.completes = 1
    assert rank.wait(*ios) == 0
    assert mpi.state.posted == 10


def test_mpi_gets_large_messages_in_parts(mpi: FakeMpi) -> None:
    rank = mpi.rank()
    ios = [rank.send(1, bytes(3 * 1024 + 1)) for _ in range(5)]
    mpi.state.completes = 1
    seen = [0]
    while not ios[0].done:
        assert rank.progress()
        seen.append(ios[0].done_bytes)
    assert seen == [0, 1024, 2048, 3072, 3073]
    assert rank.wait(*ios) == 0
    assert mpi.state.posted == 20
    assert all(io.done_bytes == io.size for io in ios)


def test_abandoned_receives_are_cancelled_and_given_back(mpi: FakeMpi) -> None:
    rank = mpi.rank()
    posted = [rank.recv(1, 10) for _ in range(3)]
    mpi.state.obeys_cancel = 1
    rank.lib.shim_abandon(rank.transport, 1)
    assert all(io.failed for io in posted)
    assert (mpi.state.cancelled, mpi.state.freed) == (3, 0)


def test_what_mpi_does_not_give_back_is_let_go_after_a_while(mpi: FakeMpi) -> None:
    rank = mpi.rank()
    posted = [rank.send(1, b"never received"), rank.recv(1, 5)]
    mpi.state.obeys_cancel = 1
    rank.lib.shim_abandon(rank.transport, 1)
    assert all(io.failed for io in posted)
    assert (mpi.state.cancelled, mpi.state.freed) == (1, 1)  # a send is not cancelled


def test_a_peer_that_begins_to_receive_nothing_is_lost_after_the_timeout(mpi: FakeMpi) -> None:
    rank = mpi.rank(peer_timeout_ms=50)
    received = rank.recv(1, 1)
    sent = rank.send(1, b"x")
    poll_until(lambda: rank.progress() or not sent.posted, "the timeout")
    assert sent.failed and received.failed
    assert rank.loss(1) == SILENT


def test_the_time_in_which_this_process_was_stopped_is_no_silence_of_a_peer(mpi: FakeMpi) -> None:
    rank = mpi.rank(peer_timeout_ms=1000)
    sent = rank.send(1, b"x")
    rank.progress()
    begin_s = time.monotonic()
    poll_until(lambda: time.monotonic() - begin_s > 1.5, "longer than the timeout without a look")
    rank.progress()
    assert sent.posted
    assert rank.loss(1) == NONE


def test_waiting_to_receive_is_no_reason_to_lose_a_peer(mpi: FakeMpi) -> None:
    rank = mpi.rank(peer_timeout_ms=1)
    received = rank.recv(1, 1)
    assert rank.wait(received, timeout_ms=100) != 0
    assert received.posted
    assert rank.loss(1) == NONE


@pytest.mark.parametrize("how", ["finalized", "forked"])
def test_an_mpi_that_must_not_be_called_is_not_called_at_the_end(mpi: FakeMpi, how: str) -> None:
    rank = mpi.rank()
    io = rank.recv(1, 5)
    before = mpi.state.calls
    if how == "forked":
        child = os.fork()
        if child == 0:
            rank.destroy()
            os._exit(mpi.state.calls - before)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert io.posted
    else:
        mpi.state.is_finalized = 1
        rank.destroy()
        assert mpi.state.calls == before
        assert io.failed


CALLS = MpiCalls(handle_bytes=8, status_bytes=24, size=2, communicator=1, byte=1, functions=[1] * len(MPI_FUNCTIONS))


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (MpiUse(replace(CALLS, handle_bytes=5)), "handles of 5 bytes; horo knows those of 4 and 8 bytes"),
        (MpiUse(replace(CALLS, status_bytes=0)), "an MPI_Status of 0 bytes; horo has room for 1 to 128"),
        (MpiUse(replace(CALLS, status_bytes=500)), "an MPI_Status of 500 bytes"),
        (MpiUse(CALLS, message_bytes=(1 << 30) + 1), "1 to 1073741824 bytes, not 1073741825"),
        (MpiUse(CALLS, message_bytes=0), "1 to 1073741824 bytes, not 0"),
        (MpiUse(replace(CALLS, functions=[1, 1, 0, *[1] * 3])), "the address of MPI_Test is missing"),
        (MpiUse(CALLS), "no ranks of other hosts are given"),
        (MpiUse(CALLS, rank_of_host=[-1, 2]), "for host 1 is to go to rank 2 of an MPI communicator of 2"),
        (MpiUse(CALLS, rank_of_host=[-1, -1]), "no rank of host 1 is given"),
    ],
)
def test_a_setup_that_names_no_usable_mpi_is_refused(use: MpiUse, sentence: str) -> None:
    setups = make_setups([1, 1])
    try:
        with pytest.raises(UsageError, match=sentence):
            Context(replace(setups[0], mpi=use))
    finally:
        for setup in setups:
            close_setup(setup)


def test_functions_have_the_order_of_the_core(native: ModuleType) -> None:
    assert [getattr(native.lib, "HORO_" + name.upper()) for name in MPI_FUNCTIONS] == list(range(len(MPI_FUNCTIONS)))
    assert len(MPI_FUNCTIONS) == native.lib.HORO_MPI_FUNCTION_COUNT
