"""Checks of the messages of an agent, made once at their arrival: its host may run any program instead."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection, Mapping
from reprlib import repr as repr_shortened
from typing import Any

from horo.runner.agent.protocol import Message, MessageError
from horo.runner.agent.ranks import Exited, NotStarted, Started
from horo.runner.processes import PASSED_ON_BY_AGENTS
from horo.runner.text import printable

__all__ = [
    "exited",
    "failure",
    "host_info",
    "listening",
    "not_started",
    "rank_of",
    "reached",
    "remained",
    "signalled",
    "started",
    "version",
]

_JSON_MAX_BYTES = 1 << 20
_TEXT_MAX = 1 << 16
_COUNT_MAX = 1 << 20
_PORT_MAX = (1 << 16) - 1
_PID_MAX = 1 << 31
_CODE_MAX = 255
_SIGNAL_MAX = 64

_Check = Callable[[object], bool]


def rank_of(message: Message, ranks: Collection[int]) -> int:
    """The rank that the message is about.

    Raises:
        MessageError: it is none of ``ranks``.
    """
    if message.rank not in ranks:
        raise MessageError(f"a {message.kind.name} message is about rank {message.rank}, which is not there")
    return message.rank


def version(message: Message) -> str:
    """The version of horo in a HOST_INFO message. The rest of it may be as that version has it.

    Raises:
        MessageError: there is none.
    """
    return printable(str(_values(message, {"version": _is_text})["version"]))


def host_info(message: Message) -> dict[str, Any]:
    """The values of a HOST_INFO message; ``connection`` is empty where no addresses can be learnt from it.

    Raises:
        MessageError: one is missing or out of its range.
    """
    checks = {
        "version": _is_text,
        "python": _is_text,
        "cores": _from_to(1, _COUNT_MAX),
        "gpus": _from_to(0, _COUNT_MAX),
        "connection": _is_text,
        "network": _is_text,
        "free_port": _from_to(1, _PORT_MAX),
    }
    values = _values(message, checks)
    if not _is_connection(values["connection"]):
        values["connection"] = ""  # sshd behind a proxy says UNKNOWN
    return values


def started(message: Message, ranks: Collection[int]) -> Started:
    """The event of a STARTED message.

    Raises:
        MessageError: it has another form, or names none of ``ranks``.
    """
    values = _values(message, {"pid": _from_to(1, _PID_MAX), "bound": _is_text})
    return Started(rank_of(message, ranks), values["pid"], printable(values["bound"]))


def exited(message: Message, ranks: Collection[int]) -> Exited:
    """The event of an EXITED message.

    Raises:
        MessageError: it has another form, or names none of ``ranks``.
    """
    code, signal = _from_to(0, _CODE_MAX), _from_to(0, _SIGNAL_MAX)
    values = _values(message, {"code": code, "signal": signal, "asked": _is_flag, "overdue": _is_flag})
    return Exited(rank_of(message, ranks), values["code"], values["signal"], values["asked"], values["overdue"])


def not_started(message: Message, workers: Collection[int]) -> NotStarted:
    """The event of a NOT_STARTED message.

    Raises:
        MessageError: it has another form, or names none of ``workers``.
    """
    return NotStarted(rank_of(message, workers), *failure(message))


def failure(message: Message) -> tuple[str, int]:
    """The sentence and the exit code of a FAILED message, or a NOT_STARTED one.

    Raises:
        MessageError: it has none.
    """
    values = _values(message, {"message": _is_text, "code": _from_to(1, _CODE_MAX)})
    return printable(values["message"]), values["code"]


def signalled(message: Message) -> int:
    """The number in a SIGNALLED message.

    Raises:
        MessageError: it has another form, or the signal is not passed on.
    """
    number: int = _values(message, {"number": _from_to(1, _SIGNAL_MAX)})["number"]
    if number not in PASSED_ON_BY_AGENTS:
        raise MessageError(f"signal {number} is not one that is passed on")
    return number


def listening(message: Message) -> dict[str, Any]:
    """The values of a LISTENING message.

    Raises:
        MessageError: one is missing or out of its range.
    """
    checks: dict[str, _Check] = {
        "error": _is_text,
        "code": _from_to(1, _CODE_MAX),
        "port": _from_to(0, _PORT_MAX),
        "addresses": lambda value: isinstance(value, list) and all(map(_is_address, value)),
    }
    return _values(message, checks)


def reached(message: Message) -> dict[str, Any]:
    """The values of a REACHED message.

    Raises:
        MessageError: one is missing or of another type.
    """
    return _values(message, {"failures": lambda value: isinstance(value, dict) and all(map(_is_text, value.values()))})


def remained(message: Message) -> tuple[str, ...]:
    """The processes of a REMAINED message.

    Raises:
        MessageError: they are no texts.
    """
    values = _values(message, {"processes": lambda value: isinstance(value, list) and all(map(_is_text, value))})
    return tuple(map(printable, values["processes"]))


def _values(message: Message, checks: Mapping[str, _Check]) -> dict[str, Any]:
    if len(message.payload) > _JSON_MAX_BYTES:
        raise MessageError(f"a {message.kind.name} message has {len(message.payload)} bytes")
    values = message.json()
    for name, is_right in checks.items():
        if name not in values:
            raise MessageError(f"a {message.kind.name} message has no {name!r}")
        if not is_right(values[name]):
            raise MessageError(f"a {message.kind.name} message has {name} = {printable(repr_shortened(values[name]))}")
    return {name: values[name] for name in checks}


def _from_to(low: int, high: int) -> _Check:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _TEXT_MAX


def _is_address(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return False
    return True


def _is_connection(value: str) -> bool:
    """Whether it is an address and a port, twice, as ssh has them."""
    words = value.split()
    return len(words) == 4 and _is_address(words[0]) and _is_address(words[2])
