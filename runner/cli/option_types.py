"""Functions from the text of an option to its value, for argparse."""

from __future__ import annotations

import argparse
import ipaddress
from collections.abc import Callable, Sequence

__all__ = ["at_least", "comma_list", "filled", "integer", "listening", "one_of", "port", "positive_seconds", "seconds"]


def one_of(words: Sequence[str]) -> Callable[[str], str]:
    """Makes the type of an option; ``choices`` of argparse says it otherwise in each version of Python."""

    def choose(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(words)}")
        return text

    return choose


def filled(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("its value is empty")
    return text


def comma_list(text: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of names separated by commas")
    return items


def integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def at_least(low: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if integer(text) < low:
            raise argparse.ArgumentTypeError(f"{text} is less than {low}")
        return int(text)

    return convert


def port(text: str) -> int:
    number = integer(text)
    if not 0 < number < 65536:
        raise argparse.ArgumentTypeError(f"{text} is no port: 1 to 65535")
    return number


def listening(text: str) -> tuple[str, int]:
    """A port of loopback, or the numeric address of another one, IPv6 in brackets, and a port of it."""
    address, colon, number = text.rpartition(":")
    address = address.removeprefix("[").removesuffix("]") if colon else "127.0.0.1"
    try:
        ipaddress.ip_address(address)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{address!r} is no numeric address, such as 0.0.0.0") from None
    return address, port(number)


def seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= number < 1e7:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return number


def positive_seconds(text: str) -> float:
    number = seconds(text)
    if number == 0:
        raise argparse.ArgumentTypeError(f"{text} must be more than 0")
    return number
