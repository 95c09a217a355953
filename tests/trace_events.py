"""A strict reader of Chrome's trace events, as the "Trace Event Format" of Google and Perfetto's importer have them.

What a viewer would pass over in silence is an error here: members that are unknown or missing, of the wrong type, an
end without a beginning, a beginning without an end, times that fall, a row without a name, two rows of one name.
``write`` makes timelines of ranks by hand.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from horo.timeline.recording import finish

_NUMBER = (int, float)
_ANY = {"ph": str, "pid": int, "tid": int}
_KINDS: dict[str, dict[str, Any]] = {
    "M": {"name": str, "args": dict}, "B": {"name": str, "ts": _NUMBER}, "E": {"ts": _NUMBER},
    "X": {"name": str, "ts": _NUMBER, "dur": _NUMBER}, "i": {"name": str, "ts": _NUMBER, "s": str},
    "s": {"name": str, "ts": _NUMBER, "cat": str, "id": int},
    "f": {"name": str, "ts": _NUMBER, "cat": str, "id": int, "bp": str},
}  # fmt: skip
"""By phase, what an event must have beside ``ph``, ``pid`` and ``tid``. All but M may have ``args``, and no more."""
_METADATA = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}
_OF_THREADS = ("thread_name", "thread_sort_index")


def parse_timeline(path: Path, *, is_ended: bool = True) -> list[dict[str, Any]]:
    """The events of a file, checked."""
    return check_events(path.read_bytes(), is_ended=is_ended)


def look_at(path: Path) -> dict[str, list[str]]:
    """What is begun in a timeline that is being written, as ``rows_of``."""
    finish(str(path), shows_now=True)
    return rows_of(parse_timeline(path, is_ended=False))


def check_events(text: bytes, *, is_ended: bool = True) -> list[dict[str, Any]]:
    """The events of a JSON array, checked; AssertionError says which is wrong.

    Args:
        text: the array.
        is_ended: whether all that is begun must be ended.
    """
    events = json.loads(text.decode("utf-8"), parse_constant=_refuse, object_pairs_hook=_members)
    assert isinstance(events, list), type(events)
    assert events, "an empty timeline"
    for event in events:
        _check_members(event)
    times = [event["ts"] for event in events if "ts" in event]
    assert times == sorted(times), "times fall"
    _check_names(events)
    open_rows = _check_nesting(events)
    assert len(arrows_of(events)) == sum(event["ph"] in "sf" for event in events) / 2, "half an arrow"
    assert not (is_ended and open_rows), f"not ended: {open_rows}"
    return events


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    assert len(made) == len(pairs), f"a member twice: {pairs}"
    return made


def _check_members(event: dict[str, Any]) -> None:
    assert isinstance(event, dict), event
    kind = event.get("ph")
    assert kind in _KINDS, event
    needed = _ANY | _KINDS[kind]
    assert needed.keys() <= event.keys() <= needed.keys() | {"args"}, event
    for name, types in needed.items():
        assert isinstance(event[name], types), event
        assert not isinstance(event[name], bool), event
    assert isinstance(event.get("args", {}), dict), event
    for name in ("ts", "dur"):
        assert math.isfinite(event.get(name, 0)), event
        assert event.get(name, 0) >= 0, event
    assert event["pid"] >= 0, event
    assert event["tid"] >= 0, event
    if kind == "M":
        member, types = _METADATA[event["name"]]
        assert isinstance(event["args"][member], types), event
    if kind == "i":
        assert event["s"] in ("g", "p", "t"), event


def _check_names(events: Sequence[dict[str, Any]]) -> None:
    """Each row that is used has one name, and no two of a process have the same."""
    names: dict[tuple[str, int, int], str] = {}
    for event in events:
        if event["ph"] == "M":
            key = (event["name"], event["pid"], event["tid"] if event["name"] in _OF_THREADS else 0)
            assert key not in names, f"named twice: {event}"
            names[key] = str(event["args"].get("name", event["args"].get("sort_index")))
    used = {event["pid"] for event in events}
    named = {pid for kind, pid, _ in names if kind == "process_name"}
    assert used == named, (used, named)
    threads = {key[1:] for key in names if key[0] == "thread_name"}
    if threads:
        assert {(event["pid"], event["tid"]) for event in events if event["ph"] != "M"} <= threads


def _check_nesting(events: Sequence[dict[str, Any]]) -> dict[tuple[int, int], list[str]]:
    """What is begun and not ended, by row."""
    stacks: dict[tuple[int, int], list[str]] = defaultdict(list)
    for event in events:
        stack = stacks[event["pid"], event["tid"]]
        if event["ph"] == "B":
            stack.append(event["name"])
        elif event["ph"] == "E":
            assert stack, f"ends what has not begun: {event}"
            stack.pop()
        elif event["ph"] in ("s", "f"):
            assert stack, f"an arrow that is bound to nothing: {event}"
    return {row: stack for row, stack in stacks.items() if stack}


def arrows_of(events: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """From which process to which each arrow leads."""
    begins = {event["id"]: event["pid"] for event in events if event["ph"] == "s"}
    return [(begins[event["id"]], event["pid"]) for event in events if event["ph"] == "f"]


def names_of_rows(events: Sequence[dict[str, Any]]) -> dict[int, str]:
    """The names of rows, by pid."""
    return {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}


def rows_of(events: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """What is begun, indented by its depth, by the name of the row."""
    names = names_of_rows(events)
    found: dict[str, list[str]] = defaultdict(list)
    depth: dict[int, int] = defaultdict(int)
    for event in events:
        if event["ph"] == "B":
            found[names[event["pid"]]].append("  " * depth[event["pid"]] + event["name"])
            depth[event["pid"]] += 1
        elif event["ph"] == "E":
            depth[event["pid"]] -= 1
    return found


Clock = Callable[[float], float]
"""What a clock shows, in microseconds, at a true time."""


def write(
    path: Path, rank: int, clock: str, shows: Clock, steps: Sequence[Sequence[float]], *, size: int = 2, name: str = "x"
) -> str:
    """A timeline of allreduces; of each: when this rank has submitted it, begun it and ended it, in true time."""
    zero = shows(0.0)
    head = {"name": f"rank {rank}", "start_time_since_epoch_in_micros": 10**15, "monotonic_ns": int(zero * 1000)}
    head |= {"rank": rank, "size": size, "host": f"h{clock}", "clock": clock}
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": head},
        {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": name}},
    ]

    def add(kind: str, true_us: float, name: str = "", **args: Any) -> None:
        event = {"ph": kind, "ts": round(shows(true_us) - zero, 3), "pid": 1, "tid": 0}
        events.append(event | ({"name": name} if name else {}) | ({"args": args} if args else {}))

    for number, (submitted, begun, ended) in enumerate(steps):
        add("B", submitted, "NEGOTIATE_ALLREDUCE")
        add("E", begun)
        add("B", begun, "ALLREDUCE")
        add("B", begun, "TCP_ALLREDUCE")
        add("E", ended)
        add("E", ended, team=0, record=100 * number + 40)
    lines = ",\n".join(json.dumps(event) for event in events)
    path.write_text(f"[\n{lines}\n]\n")
    return str(path)
