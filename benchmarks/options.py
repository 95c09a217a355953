"""Options that all contests have."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import peers


def parse_peers(text: str) -> list[peers.Peer]:
    """``horo,gloo``: for argparse."""
    words = [word.strip().lower() for word in text.split(",")]
    unknown = [word for word in words if word not in peers.ALL]
    if unknown or len(set(words)) < len(words):
        reason = f"knows no '{unknown[0]}'" if unknown else "names one twice"
        raise argparse.ArgumentTypeError(f"'{text}' {reason}; known are {', '.join(peers.ALL)}")
    return [peers.ALL[word] for word in words]


def add(parser: argparse.ArgumentParser, *, contestants: str = ",".join(peers.ALL), rounds: int = 11) -> None:
    """Adds --np, --peers, --rounds, --turn-ms, --turn-limit-s and --json."""
    parser.add_argument("--np", type=int, default=2, help="ranks of every contestant (default: %(default)s)")
    parser.add_argument(
        "--peers", type=parse_peers, default=contestants, metavar="NAMES", help="who takes part (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=rounds, help="turns of everybody (default: %(default)s)")
    parser.add_argument("--turn-ms", type=float, default=20, help="aim for one turn (default: %(default)s)")
    parser.add_argument(
        "--turn-limit-s", type=float, default=120, help="a turn that takes longer ends the run (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="write all values there")


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parses and refuses what cannot be."""
    arguments = parser.parse_args(words)
    for name in ("np", "rounds"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} {getattr(arguments, name)}: at least 1")
    for name in ("turn_ms", "turn_limit_s"):
        if not getattr(arguments, name) > 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(arguments, name):g}: must be more than 0")
    return arguments


def as_json(arguments: argparse.Namespace) -> dict[str, Any]:
    """For report.document: plain values, peers by name."""
    values = {name: value for name, value in vars(arguments).items() if name not in ("json", "peers")}
    return {**values, "peers": [peer.name for peer in arguments.peers]}
