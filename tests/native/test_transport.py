"""The contract of every transport, the same tests for all."""

import random
import select
from collections.abc import Iterator
from types import ModuleType

import pytest
from links import CLOSED, CONTROL, DATA, KINDS, NONE, Fabric, Join, joining, poll_until, progress_until, run_ranks

PEER_LOST = -40
MIB = 1 << 20


@pytest.fixture(params=KINDS)
def join(request: pytest.FixtureRequest, native: ModuleType) -> Iterator[Join]:
    """join(hosts) makes a fabric of the kind under test."""
    yield from joining(native, request.param)


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def test_messages_of_a_link_arrive_in_order_and_channels_do_not_mix(join: Join) -> None:
    messages = [noise(size, seed) for seed, size in enumerate([1, 0, 7, 70_000, 0, 0, 3])]
    sender, receiver = join(2).ranks
    sends = [sender.send(1, message) for message in messages]
    receives = [receiver.recv(0, len(message)) for message in messages]
    progress_until([sender, receiver], *sends, *receives)
    assert [io.bytes() for io in receives] == messages
    assert all(io.done and io.done_bytes == io.size for io in (*sends, *receives))
    sends = [sender.send(1, b"data", DATA), sender.send(1, b"ctrl", CONTROL)]
    control = receiver.recv(0, 4, CONTROL)
    progress_until([sender, receiver], sends[1], control)
    data = receiver.recv(0, 4, DATA)
    progress_until([sender, receiver], sends[0], data)
    assert (control.bytes(), data.bytes()) == (b"ctrl", b"data")


def test_an_empty_message_is_done_but_not_before_its_turn(join: Join) -> None:
    sender, receiver = join(2).ranks
    first, empty = receiver.recv(0, 3), receiver.recv(0, 0)
    for _ in range(10):
        receiver.progress()
    assert first.posted and empty.posted
    sends = [sender.send(1, b"abc"), sender.send(1, b"")]
    progress_until([sender, receiver], *sends, first, empty)
    assert first.done and empty.done


def test_large_messages_both_ways_at_once_do_not_deadlock(join: Join) -> None:
    fabric = join(2)
    data = [noise(4 * MIB + 3, seed) for seed in range(2)]

    def body(me: int) -> bytes:
        rank = fabric.ranks[me]
        sent, received = rank.send(1 - me, data[me]), rank.recv(1 - me, len(data[me]))
        assert rank.wait(sent, received) == 0
        return received.bytes()

    assert run_ranks(2, body) == data[::-1]


def test_done_bytes_grow_while_a_message_comes(join: Join) -> None:
    sender, receiver = join(2).ranks
    data = noise(16 * MIB)
    sent, received = sender.send(1, data), receiver.recv(0, len(data))
    seen = [0]

    def step() -> bool:
        sender.progress()
        receiver.progress()
        if received.done_bytes != seen[-1]:
            seen.append(received.done_bytes)
            half = seen[-1] // 2
            assert received.data[half] == data[half : half + 1]
        return received.done

    poll_until(step, "the end of the message")
    progress_until([sender], sent)
    assert sent.done
    assert seen == sorted(seen) and seen[-1] == len(data)
    assert len(seen) > 2


def test_a_receive_of_some_takes_what_has_come_whatever_sends_it_is_of(join: Join) -> None:
    sender, receiver = join(2).ranks
    messages = [noise(size, seed) for seed, size in enumerate([3, 1, 0, 500, 70_000, 2])]
    sends = [sender.send(1, message, CONTROL) for message in messages]
    came = b""
    while len(came) < 70_506:
        got = receiver.recv_some(0, 4096)
        progress_until([sender, receiver], got)
        assert 0 < got.done_bytes <= 4096
        came += got.bytes()[: got.done_bytes]
    assert came == b"".join(messages)
    progress_until([sender, receiver], *sends)


def test_progress_says_whether_anything_moved(join: Join) -> None:
    sender, receiver = join(2).ranks
    assert not sender.progress()
    received = receiver.recv(0, 1)
    assert not receiver.progress()
    sent = sender.send(1, b"x")
    assert sender.progress() and sent.done
    poll_until(receiver.progress, "arrival")
    assert received.done
    assert not sender.progress() and not receiver.progress()


def test_posting_to_a_peer_without_a_link_is_refused_and_destroy_fails_what_is_posted(join: Join) -> None:
    rank = join(2).ranks[0]
    for peer in (0, -1, 2):
        with pytest.raises(ValueError, match="-60"):
            rank.send(peer, b"x")
        with pytest.raises(ValueError, match="-60"):
            rank.recv(peer, 1)
    posted = [rank.recv(1, 5), rank.recv(1, 0), rank.send(1, b"x", CONTROL)]
    rank.destroy()
    assert all(io.failed for io in posted)


def test_an_idle_link_names_nothing_to_sleep_on(join: Join) -> None:
    fabric = join(3)
    sender, receiver, _ = fabric.ranks
    assert sender.idle
    sent, received = sender.send(1, b"x"), receiver.recv(0, 1)
    assert not sender.idle
    progress_until([sender, receiver], sent, received)
    assert [rank.idle for rank in fabric.ranks] == [True, True, True]


def test_a_sleeper_sleeps_until_bytes_come(join: Join) -> None:
    sender, receiver = join(2).ranks
    received = receiver.recv(0, 1)
    receiver.progress()
    assert receiver.sleeps(timeout_ms=0)
    sent = sender.send(1, b"x")
    assert sender.wait(sent) == 0
    assert not receiver.sleeps()
    assert receiver.wait(received) == 0


def test_a_sender_sleeps_until_there_is_room(join: Join) -> None:
    sender, receiver = join(2).ranks
    sent = sender.send(1, bytes(16 * MIB))
    poll_until(lambda: not sender.progress() and sender.sleeps(timeout_ms=0), "a full link")
    received = receiver.recv(0, 16 * MIB)

    def has_room() -> bool:
        receiver.progress()  # of which the sender may hear a moment after the last byte that has come
        return not sender.sleeps(timeout_ms=1)

    poll_until(has_room, "room")
    progress_until([sender, receiver], sent, received)
    assert sent.done and received.done


def lose(fabric: Fabric, how: str, host: int, by: int) -> None:
    if how == "crash":
        fabric.crash(host)
    else:
        fabric.cut(by, host)


both_losses = pytest.mark.parametrize("how", ["crash", "cut"])


@both_losses
@pytest.mark.parametrize("action", ["send", "recv"])
def test_a_loss_while_idle_is_seen_by_the_next_message(join: Join, how: str, action: str) -> None:
    fabric = join(2)
    rank = fabric.ranks[0]
    lose(fabric, how, 1, by=0)
    for fd in fabric.data_fds(0):  # the kernel may deliver the end of a connection a moment later
        (poller := select.poll()).register(fd, select.POLLIN)
        assert poller.poll(20_000)
    assert rank.loss(1) == NONE
    io = rank.send(1, b"x") if action == "send" else rank.recv(1, 1)
    assert rank.wait(io) == PEER_LOST
    assert io.failed
    assert rank.loss(1) == CLOSED


@both_losses
def test_a_loss_wakes_and_fails_a_waiting_receive(join: Join, how: str) -> None:
    fabric = join(2)
    rank = fabric.ranks[0]
    received = rank.recv(1, 8)

    def body(me: int) -> int:
        if me == 0:
            return rank.wait(received)
        lose(fabric, how, 1, by=0)
        return 0

    assert run_ranks(2, body) == [PEER_LOST, 0]
    assert received.failed


@both_losses
def test_a_loss_in_the_middle_of_a_message_fails_both_directions(join: Join, how: str) -> None:
    fabric = join(2)
    rank, other = fabric.ranks
    sent, received = rank.send(1, bytes(16 * MIB)), rank.recv(1, 16 * MIB)
    partly, _ = other.recv(0, 16 * MIB), other.send(0, bytes(16 * MIB))

    def step() -> bool:
        rank.progress()
        other.progress()
        return partly.done_bytes > 0 and received.done_bytes > 0

    poll_until(step, "some bytes")
    lose(fabric, how, 1, by=0)
    assert rank.wait(sent, received) == PEER_LOST
    assert sent.failed and received.failed
    assert 0 < received.done_bytes < received.size


@both_losses
def test_after_a_loss_every_io_with_that_peer_fails_on_all_channels(join: Join, how: str) -> None:
    fabric = join(2)
    rank = fabric.ranks[0]
    posted = [rank.recv(1, 4, CONTROL), rank.recv(1, 4, DATA), rank.send(1, bytes(16 * MIB), DATA)]
    lose(fabric, how, 1, by=0)
    assert rank.wait(*posted) == PEER_LOST
    later = [rank.send(1, b"x", CONTROL), rank.recv(1, 1, DATA), rank.send(1, b"", DATA)]
    assert not rank.sleeps(timeout_ms=0)
    assert rank.progress()
    assert all(io.failed for io in (*posted, *later))
    assert rank.idle


@both_losses
def test_the_others_go_on_after_a_loss(join: Join, how: str) -> None:
    fabric = join(3)
    rank, other, _ = fabric.ranks
    lost_io = rank.recv(2, 1)
    received, sent = rank.recv(1, MIB), other.send(0, noise(MIB))
    lose(fabric, how, 2, by=0)
    assert rank.wait(lost_io) == PEER_LOST
    progress_until([rank, other], received, sent)
    assert received.bytes() == noise(MIB)
    again, answer = rank.send(1, b"still here"), other.recv(0, 10)
    progress_until([rank, other], again, answer)
    assert answer.bytes() == b"still here"
    assert rank.loss(2) != NONE


@pytest.mark.parametrize("channel", [CONTROL, DATA])
def test_last_words_of_a_peer_are_delivered(join: Join, channel: int) -> None:
    fabric = join(2)
    if channel == DATA and not fabric.buffers_sends:
        pytest.skip("a send that nobody has begun to receive is not done, and ends with its process")
    rank, other = fabric.ranks
    assert other.wait(other.send(0, b"good", channel), other.send(0, b"bye", channel)) == 0
    fabric.crash(1)
    first, second, third = rank.recv(1, 4, channel), rank.recv(1, 3, channel), rank.recv(1, 1, channel)
    assert rank.wait(first, second, third) == PEER_LOST
    assert (first.bytes(), second.bytes()) == (b"good", b"bye")
    assert first.done and second.done and third.failed


def test_last_words_are_delivered_to_a_rank_that_is_still_sending(join: Join) -> None:
    fabric = join(2)
    if not fabric.buffers_sends:
        pytest.skip("a send that nobody has begun to receive is not done, and ends with its process")
    rank, other = fabric.ranks
    sent = rank.send(1, bytes(16 * MIB))
    poll_until(lambda: not rank.progress(), "a full link")
    words = bytes(range(40))  # more messages than one system call receives
    assert other.wait(*(other.send(0, bytes([letter])) for letter in words)) == 0
    fabric.crash(1)
    heard = [rank.recv(1, 1) for _ in words]
    more = rank.recv(1, 1)
    assert rank.wait(sent, *heard, more) == PEER_LOST
    assert b"".join(each.bytes() for each in heard if each.done) == words
    assert sent.failed and more.failed


def test_an_abandoned_channel_lets_go_of_its_memory_and_refuses_more(join: Join) -> None:
    rank, other = join(2).ranks
    posted = [rank.recv(1, 16 * MIB), rank.send(1, bytes(16 * MIB)), rank.recv(1, 0)]
    sent = other.send(0, bytes(16 * MIB))
    poll_until(lambda: bool(other.progress() | rank.progress()) and posted[0].done_bytes > 0, "some bytes")
    rank.lib.shim_abandon(rank.transport, DATA)
    assert all(io.failed for io in posted)
    assert rank.idle
    with pytest.raises(ValueError, match="-43"):
        rank.send(1, b"x")
    with pytest.raises(ValueError, match="-43"):
        rank.recv(1, 1)
    # The peer sees no end, and the other channel goes on.
    assert sent.posted and rank.loss(1) == other.loss(0) == NONE
    told, heard = rank.send(1, b"cause", CONTROL), other.recv(0, 5, CONTROL)
    progress_until([rank, other], told, heard)
    assert heard.bytes() == b"cause"
