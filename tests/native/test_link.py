"""The control link between two leaders: messages of every length, and bytes that no leader sends."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import wire_oracle as oracle
from fabric import close_setup, make_setups
from ranks import Group, Rank, on_ranks

from horo.core.context import Context
from horo.errors import InternalError, PeerLostError

FRAME_MAX = 64 << 20
NOISE = random.Random(3)
GATHER = oracle.request(oracle.Request("g", op=oracle.ALLGATHER, tensors=(oracle.Tensor(7, (0, 5)),) * 2))


@on_ranks([1, 1], [2, 1, 1])
def test_messages_of_every_length_pass_between_hosts(rank: Rank) -> None:
    """First requests, which carry their name, then ids: four bytes more for each that is submitted at once."""
    for _ in range(2):
        for length in range(1, 140):
            rank.finish(rank.submit("barrier", "n" * length, []))
    for count in range(1, 40):
        arrays = [np.full(1, float(i)) for i in range(count)]
        handles = [rank.submit("allreduce", f"a{i}", [a], reduce_op=1) for i, a in enumerate(arrays)]
        rank.finish(*handles)
        assert arrays == [rank.size * i for i in range(count)]


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(4, "little") + message


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(framed(b""), id="nothing"),
        pytest.param((FRAME_MAX + 1).to_bytes(4, "little"), id="too long"),
        pytest.param(b"\xff" * 8, id="much too long"),
        pytest.param(framed(b"\xff" * 8), id="no message"),
        pytest.param(framed(oracle.lost_message(0, -40, 255)), id="a loss with an unknown reason"),
        pytest.param(framed(oracle.lost_message(-2, -40, 1)), id="a loss of no rank"),
        pytest.param(framed(oracle.lost_message(2, -40, 1)), id="a loss of a rank beyond the last"),
        pytest.param(framed(oracle.request_message(1, 0, b"", GATHER, [7, 7, 7])), id="rows of too many ranks"),
        pytest.param(framed(oracle.request_message(1, 0, b"", GATHER)), id="no rows"),
        pytest.param(framed(oracle.request_message(77, 0, b"", GATHER, [7, 7])), id="a request of no rank"),
        pytest.param(framed(oracle.batch_message([(9, b"")])), id="a batch of what was never announced"),
        *(pytest.param(framed(NOISE.randbytes(length)), id=f"noise of {length}") for length in (9, 60, 61, 5000)),
    ],
)
@pytest.mark.parametrize("sender", [0, 1])
def test_bytes_that_are_no_message_end_the_job(said: bytes, sender: int, capfd: pytest.CaptureFixture[str]) -> None:
    with Group([1, 1]) as group:
        group.say(sender, said)

        def body(rank: Rank) -> None:
            with pytest.raises(InternalError):
                while True:  # the root may be done with the first before the other can tell
                    rank.barrier()

        group.run(body)
    assert "the engine stops: internal error" in capfd.readouterr().err


SILENT, CLOSED = 3, 2
TOLD = {
    SILENT: (
        r"rank 1 \(host1\) is out of reach: no answer for \d+ s, seen from rank 2 \(host2\)",
        r"this rank is out of reach of rank 2 \(host2\): no answer for \d+ s",
    ),
    CLOSED: (
        r"rank 1 \(host1\) is gone: the connection to it was closed, seen from rank 2 \(host2\)",
        r"the connection of rank 2 \(host2\) to this rank was closed",
    ),
}


@pytest.mark.parametrize("reason", [SILENT, CLOSED])
def test_all_are_told_between_which_two_ranks_a_connection_is_broken(reason: int) -> None:
    with Group([1, 1, 1]) as group:

        def body(rank: Rank) -> str:
            with pytest.raises(PeerLostError) as error:
                rank.barrier(f"of {rank.rank}")  # which no other rank calls
            return str(error.value)

        group.say(0, framed(oracle.lost_message(1, -40, reason, 2)))  # to rank 1, which passes it on
        told = group.run(body)
    seen, own = TOLD[reason]
    for text, expected in zip(told, (seen, own, seen), strict=True):
        assert re.match(expected, text), text


def test_a_leader_that_reads_nothing_is_out_of_reach() -> None:
    """Nobody is at the other end, which stays open: a process that is stopped."""
    nobody, setup = make_setups([1, 1], tcp=True, peer_timeout_ms=1000)
    try:
        context = Context(setup)
        rank = Rank(context)
        arrays = [np.zeros((1,) * 64)] * (1 << 15)  # 512 bytes each in the announcement: more than a connection buffers
        handle = rank.submit("allreduce", "x", arrays, reduce_op=1)
        with pytest.raises(
            PeerLostError, match=r"rank 0 \(host0\) is out of reach: no answer for 1 s, seen from rank 1 "
        ):
            rank.finish(handle)
        context.destroy()
    finally:
        close_setup(nobody)
