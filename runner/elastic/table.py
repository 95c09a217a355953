"""The course of an elastic job: its generations, who came and who went; as a table at its end, and for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from horo.config.hosts import ranges
from horo.runner.elastic.state import Generation

__all__ = ["courses", "table"]

_ROWS = 20
_HEAD = ("generation", "ranks", "stood still", "steps lost", "came", "went")
_STEPS = _HEAD.index("steps lost")


def courses(
    history: Sequence[Generation], failed: Mapping[int, str], dismissed: Mapping[int, str]
) -> list[dict[str, Any]]:
    """The generations as JSON.

    Args:
        history: The generations that have trained.
        failed: How workers have failed, by number.
        dismissed: Why other workers had to end, by number.

    Returns:
        An object for each, with the workers by rank, those that have come with it, and those that have gone after it.
    """
    objects, before, reasons = [], frozenset[int](), {**dismissed, **failed}
    for index, each in enumerate(history):
        members = frozenset(each.members)
        is_last = index + 1 == len(history)
        went = members & reasons.keys() if is_last else members.difference(history[index + 1].members)
        objects.append(
            {
                "generation": each.number,
                "workers": list(each.members),
                "stood_still_s": each.still_s,
                "steps_lost": each.steps_lost if index else 0,
                "came": sorted(members - before),
                "went": [{"worker": worker, "why": reasons.get(worker)} for worker in sorted(went)],
            }
        )
        before = members
    return objects


def table(history: Sequence[Generation], failed: Mapping[int, str], dismissed: Mapping[int, str]) -> list[str]:
    """The lines of the table; arguments as for ``courses``.

    Returns:
        A head, a line for each of the last generations, and one for workers that failed and were in none.
    """
    rows = [_row(each) for each in courses(history, failed, dismissed)]
    rows[:1] = [(*row[:2], "", "", *row[4:]) for row in rows[:1]]  # nothing has stood still before it
    dropped = max(0, len(rows) - _ROWS)
    shown = [_HEAD, *rows[dropped:]]
    if not any(row[_STEPS] for row in rows):
        shown = [(*row[:_STEPS], *row[_STEPS + 1 :]) for row in shown]
    widths = [max(len(row[column]) for row in shown) for column in range(len(shown[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown]
    if dropped:
        lines.insert(1, f"({dropped} before these)")
    seen = {worker for each in history for worker in each.members}
    never = [f"{worker} ({how})" for worker, how in sorted(failed.items()) if worker not in seen]
    return [*lines, f"never joined: {', '.join(never)}"] if never else lines


def _row(course: Mapping[str, Any]) -> tuple[str, ...]:
    went = [f"{each['worker']} ({each['why']})" if each["why"] else str(each["worker"]) for each in course["went"]]
    steps = course["steps_lost"]
    return (
        str(course["generation"]),
        str(len(course["workers"])),
        f"{course['stood_still_s']:.1f} s",
        "" if steps is None else str(steps),
        ranges(course["came"]),
        ", ".join(went),
    )
