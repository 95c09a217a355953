"""Messages between launcher and agent."""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from horo.runner.agent.protocol import MAGIC, Kind, Message, MessageError, MessageReader, encode, encode_json

messages = st.lists(st.builds(Message, st.sampled_from(Kind), st.integers(0, 2**32 - 1), st.binary(max_size=300)))


@given(messages, st.binary(max_size=50), st.lists(st.integers(1, 40)))
def test_messages_survive_any_cutting_and_noise_before(sent: list[Message], noise: bytes, cuts: list[int]) -> None:
    assume((noise + MAGIC).find(MAGIC) == len(noise))
    stream = noise + MAGIC + b"".join(encode(*message) for message in sent)
    reader = MessageReader(magic=True)
    got: list[Message] = []
    for size in [*cuts, len(stream)]:
        got += reader.feed(stream[:size])
        stream = stream[size:]
    assert not reader.waiting
    assert got == sent


def test_every_message_ends_its_line_and_one_that_does_not_is_an_error() -> None:
    message = encode(Kind.STDOUT, 3, b"no end")
    assert message.endswith(b"\n")
    with pytest.raises(MessageError, match="does not end where it should"):
        MessageReader(magic=False).feed(message[:-1] + b"x")


@given(st.binary(max_size=2000))
def test_any_bytes_are_messages_or_an_error(data: bytes) -> None:
    try:
        for message in MessageReader(magic=False).feed(data):
            message.json()
    except MessageError:
        pass


def test_bytes_of_the_environment_that_are_no_text_survive() -> None:
    value = {"X": b"\xff\xfe".decode("utf-8", "surrogateescape")}
    assert Message(Kind.JOB, 0, encode_json(Kind.JOB, value)[9:-1]).json() == value


@pytest.mark.parametrize("payload", [b"", b"{", b"[1]", b"\xff", json.dumps("x").encode()])
def test_a_payload_that_is_no_object_is_an_error(payload: bytes) -> None:
    with pytest.raises(MessageError):
        Message(Kind.HOST_INFO, 0, payload).json()


def test_a_shell_that_prints_without_end_is_given_up() -> None:
    reader = MessageReader(magic=True)
    with pytest.raises(MessageError):
        for _ in range(40):
            reader.feed(b"x" * 65536)
