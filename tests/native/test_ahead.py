"""Two hosts that make the record of a small allreduce alike: one host is played by the test, message by message."""

from __future__ import annotations

import random
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import wire_oracle as oracle
from fabric import close_setup, make_setups
from ranks import Rank, run_ranks, wait_for
from test_link import framed

from horo import _core
from horo._core import Context
from horo.errors import HoroError

SUM = _core.REDUCE_OPS["sum"]
LIMIT_S = 30
X, Y = 4, 5
"""The ids of the tensors of that name: the first two after the capacity of the cache."""
ONE, TWO, THREE = (struct.pack("<f", value) for value in (1, 2, 3))


class Peer:
    """The other of two hosts of one rank each; ``place`` is how much of the log it has seen or made."""

    def __init__(self, plays: int) -> None:
        setups = make_setups([1, 1], cache_capacity=4)
        self._setup = setups[plays]
        host = 1 - plays
        self._control, self._data = (
            socket.socket(fileno=fds[host]) for fds in (self._setup.control_fds, self._setup.data_fds)
        )
        for link in (self._control, self._data):
            link.setblocking(True)
            link.settimeout(LIMIT_S)
        self.is_root = plays == 0
        self.place = 0
        self.rank = Rank(Context(setups[host]))

    def send(self, message: bytes) -> None:
        self._control.sendall(framed(message))

    def write(self, record: bytes) -> None:
        """As the root: a record, handed down."""
        self.send(record)
        self.place += len(framed(record))

    def receive(self) -> bytes:
        bytes_left = int.from_bytes(self._control.recv(4, socket.MSG_WAITALL), "little")
        return self._control.recv(bytes_left, socket.MSG_WAITALL)

    def expect(self, message: bytes) -> None:
        assert self.receive() == message

    def take(self, record: bytes) -> None:
        """As the child: this record must come."""
        self.expect(record)
        self.place += len(framed(record))

    def make(self, record: bytes) -> None:
        """A record that both hosts make."""
        self.place += len(framed(record))

    def expect_silence(self) -> None:
        """What a rank has sent before its request was done is here by then."""
        assert not select.select([self._control], [], [], 0)[0]

    def exchange(self, data: bytes) -> bytes:
        self._data.sendall(data)
        return self._data.recv(len(data), socket.MSG_WAITALL)

    def introduce(self, name: str) -> None:
        """The first allreduce of a tensor of one float32: it gets an id, and the sum of 1 and 2 is exchanged."""
        body = oracle.request(oracle.Request(name, reduce_op=SUM, tensors=(oracle.Tensor(7, (1,)),)))
        record = oracle.batch_message([({"x": X, "y": Y}[name], name.encode())])
        if self.is_root:
            handle, array = submit(self, name)
            self.expect(oracle.request_message(1, 0, b"", body))
            self.write(record)
        else:
            self.send(oracle.request_message(1, 0, b"", body))
            handle, array = submit(self, name)
            self.take(record)
        assert self.exchange(TWO) == ONE
        finish(self, handle, array)

    def data(self, number: int = X, at: int | None = None, value: bytes = TWO) -> bytes:
        return oracle.data_message(oracle.DATA, number, value, self.place if at is None else at)

    def ahead(self, number: int = X, at: int | None = None, value: bytes = TWO) -> bytes:
        return oracle.data_message(oracle.AHEAD, number, value, self.place if at is None else at)

    def result(self, number: int = X, at: int | None = None) -> bytes:
        return oracle.data_message(oracle.RESULT, number, THREE, self.place if at is None else at)

    def release(self) -> bytes:
        return oracle.position_message(oracle.RELEASE, self.place)

    def recall(self) -> bytes:
        return oracle.position_message(oracle.RECALL, self.place)

    def close(self) -> None:
        for link in (self._control, self._data):
            link.close() if link.fileno() < 0 else link.shutdown(socket.SHUT_RDWR)
        self.rank.context.destroy()
        for link in (self._control, self._data):
            link.detach()
        close_setup(self._setup)


def submit(peer: Peer, name: str = "x") -> tuple[int, np.ndarray]:
    array = np.ones(1, np.float32)
    return peer.rank.submit("allreduce", name, [array], reduce_op=SUM), array


def finish(peer: Peer, handle: int, array: np.ndarray) -> None:
    """The rank has given 1, the peer 2 or, by the data link, nothing that this looks at."""
    peer.rank.finish(handle)
    assert array[0] == 3


@pytest.fixture
def child() -> Iterator[Peer]:
    """The test is the child host, the rank leads the agreement."""
    peer = Peer(plays=1)
    try:
        peer.introduce("x")
        yield peer
    finally:
        peer.close()


@pytest.fixture
def root() -> Iterator[Peer]:
    """The test is the root, the rank is alone on the child host."""
    peer = Peer(plays=0)
    try:
        peer.introduce("x")
        yield peer
    finally:
        peer.close()


# ---- the rank is the root --------------------------------------------------------------------------------------------


def test_the_root_makes_the_record_of_its_own_and_the_answer(child: Peer) -> None:
    for _ in range(3):
        handle, array = submit(child)
        child.expect(child.ahead(value=ONE))
        child.send(child.data())
        finish(child, handle, array)
        child.make(child.result())
        child.expect_silence()


def test_data_that_crosses_ahead_is_its_answer(child: Peer) -> None:
    for _ in range(50):
        child.send(child.data())
        handle, array = submit(child)
        finish(child, handle, array)
        answer = child.receive()
        assert answer in (child.ahead(value=ONE), child.result())
        child.make(child.result())
    child.expect_silence()


def test_the_root_recalls_ahead_when_something_else_was_announced(child: Peer) -> None:
    handle, array = submit(child)
    child.expect(child.ahead(value=ONE))
    child.send(oracle.ids_message([X]))  # without data, and before AHEAD was here
    child.expect(child.recall())
    child.send(child.release())
    child.take(oracle.batch_message([(X, b"")]))
    assert child.exchange(TWO) == ONE
    finish(child, handle, array)


def test_a_released_round_is_handed_down(child: Peer) -> None:
    handle, array = submit(child)
    child.expect(child.ahead(value=ONE))
    child.send(child.release())
    child.send(child.data())
    child.take(child.result())
    finish(child, handle, array)
    handle, array = submit(child)
    child.expect(child.ahead(value=ONE))
    child.send(child.data())
    finish(child, handle, array)


def test_data_for_an_earlier_place_is_no_answer(child: Peer) -> None:
    handle, array = submit(child)
    child.expect(child.ahead(value=ONE))
    child.send(child.data(at=child.place - 1))
    child.expect(child.recall())
    child.send(child.release())
    child.take(child.result())
    finish(child, handle, array)


def test_a_mismatch_is_told_behind_ahead(child: Peer) -> None:
    handle, _ = submit(child)
    child.expect(child.ahead(value=ONE))
    other = oracle.request(oracle.Request("x", reduce_op=SUM, tensors=(oracle.Tensor(7, (2,)),)))
    child.send(child.release())
    child.send(oracle.request_message(1, 0, b"", other))
    with pytest.raises(HoroError, match="'x'"):
        child.rank.finish(handle)
    assert child.receive()[0] == oracle.FAIL


@pytest.mark.parametrize("answers", ["release", "data"])
def test_a_root_that_leaves_recalls_first(child: Peer, answers: str) -> None:
    _, array = submit(child)
    child.expect(child.ahead(value=ONE))
    leaving = threading.Thread(target=child.rank.context.destroy)
    leaving.start()
    child.expect(child.recall())
    if answers == "data":  # it was on the way when RECALL was sent, which finds nothing then
        child.send(child.data())
        child.make(child.result())
    else:
        child.send(child.release())
    child.expect(oracle.leave_message(0))
    child.send(oracle.done_message(1))
    leaving.join(LIMIT_S)
    assert not leaving.is_alive()
    assert array[0] == (3 if answers == "data" else 1)


@pytest.mark.parametrize(
    "message",
    [
        lambda peer: oracle.position_message(oracle.RELEASE, peer.place + 1),
        lambda peer: peer.ahead(),
        lambda peer: peer.recall(),
    ],
    ids=["release-elsewhere", "ahead", "recall"],
)
def test_a_root_refuses_what_no_correct_host_sends(child: Peer, message: Callable[[Peer], bytes]) -> None:
    handle, _ = submit(child)
    child.expect(child.ahead(value=ONE))
    child.send(message(child))
    with pytest.raises(HoroError):
        child.rank.finish(handle)
    assert child.receive()[0] == oracle.LOST


def test_a_root_refuses_a_release_of_nothing(child: Peer) -> None:
    child.send(child.release())
    assert child.receive()[0] == oracle.LOST


# ---- the rank is the other host --------------------------------------------------------------------------------------


def test_what_was_kept_is_answered_by_data_and_ends_at_once(root: Peer) -> None:
    for _ in range(3):
        root.send(root.ahead())
        handle, array = submit(root)
        finish(root, handle, array)
        root.expect(root.data(value=ONE))
        root.make(root.result())
        root.expect_silence()


def test_data_sent_before_is_the_answer(root: Peer) -> None:
    for _ in range(3):
        handle, array = submit(root)
        root.expect(root.data(value=ONE))
        root.send(root.ahead())
        finish(root, handle, array)
        root.make(root.result())
        root.expect_silence()


def test_a_record_in_place_of_ahead_is_as_good(root: Peer) -> None:
    for turn in range(6):
        handle, array = submit(root)
        root.expect(root.data(value=ONE))
        if turn % 2:
            root.send(root.ahead())
            root.make(root.result())
        else:
            root.write(root.result())
        finish(root, handle, array)


def test_ahead_is_given_back_in_front_of_another_announcement(root: Peer) -> None:
    root.introduce("y")
    root.send(root.ahead(Y))
    handle, array = submit(root)
    answers = [root.receive(), root.receive()]
    # AHEAD may have come before the announcement or after it
    assert sorted(answers) == sorted([root.release(), root.data(value=ONE)])
    root.write(root.result())
    finish(root, handle, array)


def test_ahead_that_comes_behind_an_announcement_is_given_back(root: Peer) -> None:
    root.introduce("y")
    handles = [submit(root), submit(root, "y")]  # two at once carry nothing
    announced: set[int] = set()
    while announced != {X, Y}:
        message = root.receive()
        announced |= {int.from_bytes(message[at : at + 4], "little") for at in (range(5, len(message), 4))} & {X, Y}
        announced |= {X} if message[0] == oracle.DATA else set()
    if message[0] == oracle.DATA:
        pytest.fail("two requests at once carried data")
    root.send(root.ahead(Y, at=root.place))
    root.expect(root.release())
    root.write(oracle.batch_message([(X, b""), (Y, b"")]))
    assert len(root.exchange(TWO + TWO)) == 8
    for handle, array in handles:
        finish(root, handle, array)


def test_recall_takes_back_what_is_kept_and_nothing_else(root: Peer) -> None:
    root.send(root.ahead())
    root.send(root.recall())
    root.expect(root.release())
    root.send(root.recall())  # has crossed the answer
    handle, array = submit(root)
    root.expect(root.data(value=ONE))
    root.write(root.result())
    finish(root, handle, array)
    root.send(oracle.position_message(oracle.RECALL, 0))  # long ago
    root.send(root.ahead())
    handle, array = submit(root)
    finish(root, handle, array)
    root.expect(root.data(value=ONE))


@pytest.mark.parametrize(
    "messages",
    [
        lambda peer: [peer.ahead(at=peer.place + 1)],
        lambda peer: [peer.ahead(at=0)],
        lambda peer: [peer.ahead(), peer.ahead()],
        lambda peer: [oracle.position_message(oracle.RECALL, peer.place + 1)],
        lambda peer: [oracle.position_message(oracle.RELEASE, peer.place)],
    ],
    ids=["later", "earlier", "twice", "recall-later", "release"],
)
def test_a_child_refuses_what_no_correct_root_sends(root: Peer, messages: Callable[[Peer], list[bytes]]) -> None:
    for message in messages(root):
        root.send(message)
    wait_for(lambda: root.receive()[0] == oracle.LOST)


def test_a_result_for_another_place_is_refused(root: Peer) -> None:
    handle, _ = submit(root)
    root.expect(root.data(value=ONE))
    root.send(root.result(at=root.place + 1))
    with pytest.raises(HoroError):
        root.rank.finish(handle)


def test_more_data_than_can_be_carried_is_given_back(root: Peer) -> None:
    root.send(root.ahead(value=bytes(1 << 16)))
    root.expect(root.release())
    handle, array = submit(root)
    root.expect(root.data(value=ONE))
    root.write(root.result())
    finish(root, handle, array)


# ---- both are real ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [[1, 1], [2, 1], [1, 3], [2, 2]], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_programs_of_lone_and_crowded_operations_have_known_answers(hosts: list[int], seed: int) -> None:
    """All ranks submit the same tensors, each in an order and at a pace of its own."""
    size = sum(hosts)

    def body(rank: Rank) -> list[bytes]:
        shared, own = random.Random(seed), random.Random(seed * 1000 + rank.rank)
        bits = []
        for step in range(150):
            names = [f"x{shared.randrange(6)}"] if shared.random() < 0.7 else [f"x{i}" for i in range(3)]
            arrays = {name: np.full(1 + 7 * int(name[1:]), 0.1 * (rank.rank + step), np.float32) for name in names}
            order = own.sample(names, len(names))
            for _ in range(own.choice([0, 0, 3000])):
                pass
            handles = [rank.submit("allreduce", name, [arrays[name]], reduce_op=SUM) for name in order]
            if own.random() < 0.2 and step % 10:
                rank.context.poll(handles[0])
            for handle in handles:
                rank.finish(handle)
            for name in names:
                np.testing.assert_allclose(arrays[name], 0.1 * (size * step + size * (size - 1) / 2), rtol=1e-5)
                bits.append(arrays[name].tobytes())
        return bits

    results = run_ranks(body, hosts)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("hosts", [[1, 1], [2, 2]], ids=str)
@pytest.mark.parametrize("leaver", [0, 1])
def test_ranks_leave_while_others_wait(hosts: list[int], leaver: int) -> None:
    """The last call of the others ends with an error, or with its result where the leaver took part in it."""
    ends: list[Any] = [None] * sum(hosts)

    def body(rank: Rank) -> None:
        for _ in range(30):
            rank.allreduce(np.ones(4, np.float32), "x")
        if rank.rank == leaver:
            rank.context.destroy()
            return
        try:
            rank.allreduce(np.ones(4, np.float32), "x")
        except HoroError as error:
            ends[rank.rank] = error

    run_ranks(body, hosts)
    assert all(end is not None for number, end in enumerate(ends) if number != leaver)
