"""The table at the end of an elastic job: its generations, who came and who went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from horo.config.hosts import ranges
from horo.runner.elastic.state import Generation

__all__ = ["table"]

_ROWS = 20
_HEAD = ("generation", "ranks", "stood still", "came", "went")


def table(history: Sequence[Generation], failed: Mapping[int, str]) -> list[str]:
    """The lines of the table.

    Args:
        history: The generations that have trained.
        failed: How workers have failed, by number.

    Returns:
        A head, a line for each of the last generations, and one for workers that failed and were in none.
    """
    rows, before = [], frozenset[int]()
    for index, each in enumerate(history):
        members = frozenset(each.members)
        is_last = index + 1 == len(history)
        went = members & failed.keys() if is_last else members.difference(history[index + 1].members)
        names = [f"{worker} ({failed[worker]})" if worker in failed else str(worker) for worker in sorted(went)]
        still = f"{each.still_s:.1f} s" if index else ""
        came = ranges(sorted(members - before))
        rows.append((str(each.number), str(len(members)), still, came, ", ".join(names)))
        before = members
    dropped = max(0, len(rows) - _ROWS)
    shown = [_HEAD, *rows[dropped:]]
    widths = [max(len(row[column]) for row in shown) for column in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown]
    if dropped:
        lines.insert(1, f"({dropped} before these)")
    seen = {worker for each in history for worker in each.members}
    never = [f"{worker} ({how})" for worker, how in sorted(failed.items()) if worker not in seen]
    return [*lines, f"never joined: {', '.join(never)}"] if never else lines
