"""A training under torchrun of which one rank ends at its fifth step, and what its two ranks have to show."""

import re
from pathlib import Path

PROGRAM = Path(__file__).parent / "elastic" / "elastic_torchrun.py"


def check(out: str) -> None:
    """All ranks go on from one commit, which the ranks of the first round have made."""
    begins = sorted(re.findall(r"rank (\d) begins at step (\d+) (.*)", out))
    first = [("0", "0", "[]"), ("1", "0", "[]")]
    assert all(each in begins for each in first), out
    later = [each for each in begins if each not in first]
    assert [rank for rank, _, _ in later] == ["0", "1"], out
    assert all(step in ("4", "5") and resets == "[2.0]" for _, step, resets in later), out
    assert len({step for _, step, _ in later}) == 1
