"""Makes Chrome's trace events (Google's "Trace Event Format"), under Horovod's names, of the rows that the core writes.

Each tensor has a row of the view, as a process of the format: its negotiation from the first announcement known here
until all have agreed, then the operation, within it what moves the data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from struct import Struct
from typing import Any, NamedTuple

__all__ = ["MAGIC", "ROW", "events_of"]

MAGIC = b"horo timeline rows 1 "
"""Begins the first line of a file, before a JSON object: members of the head, and ``words`` for the core's numbers."""
ROW = Struct("=qqiiiii36s")
"""``horo_event``: time in ns, bytes, kind, operation, status, team, number, name. A file has them behind its head."""

_NAME_BYTES = 32
_AUTOMATIC = re.compile(r"(.*?\.noname)\.[0-9]*", re.DOTALL)
_VIAS = {1: "SHM", 2: "TCP", 3: "MPI", 4: "NCCL"}
"""``enum hr_via``; 0: no data moves."""
_PHASES = (
    "MEMCPY_IN_FUSION_BUFFER",
    "ADASUM_ALLTOALL",
    "ADASUM_DOT_PRODUCTS",
    "ADASUM_SUM_OF_PRODUCTS",
    "ADASUM_COMBINE",
    "ADASUM_ALLGATHER",
    "MEMCPY_OUT_FUSION_BUFFER",
)
"""``enum hr_adasum_phase``."""
_FAILED, _LEFT = 4, 5
"""Of ``enum horo_event_kind``. All kinds are in the order of ``_Translation``; ``enum hr_traced_kind`` continues it."""
_IDLE, _NEGOTIATING, _RUNNING = range(3)


class _Event(NamedTuple):
    time_ns: int
    value: int  # its ``bytes``
    kind: int
    op: int
    status: int
    team: int
    number: int
    name: bytes


class _Row:
    """Of a tensor; of requests with automatic names, of any of them, one at a time."""

    def __init__(self, pid: int, name: str, team: int, *, is_shared: bool) -> None:
        self.pid, self.name, self.team, self.is_shared = pid, name, team, is_shared
        self.key = (0, 0)
        self.state = _IDLE
        self.op = ""
        self.team_id: int | None = None
        self.is_adasum = False
        self.has_phase = False
        self.via = ""
        self.record = 0
        self.details: dict[str, str] = {}

    @property
    def title(self) -> str:
        """The operation as Horovod has it; there, Adasum is one of its own."""
        return "ADASUM" if self.does_adasum else self.op

    @property
    def does_adasum(self) -> bool:
        return self.is_adasum and self.op == "ALLREDUCE"


def events_of(head: Mapping[str, Any], rows: Iterable[tuple[Any, ...]]) -> Iterator[str]:
    """The events of a timeline, each as a JSON object.

    Args:
        head: of the file.
        rows: as ``ROW`` unpacks them, in the order in which they were written.
    """
    about = {name: value for name, value in head.items() if name != "words"}
    about = {"name": f"rank {head['rank']}", **about}
    yield json.dumps({"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": about})
    yield _sort_index(0)
    translation = _Translation(head)
    for row in rows:
        yield from translation.take(_Event._make(row))


def _sort_index(pid: int) -> str:
    return json.dumps({"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0, "args": {"sort_index": pid}})


class _Translation:
    def __init__(self, head: Mapping[str, Any]) -> None:
        words = head["words"]
        self._ops = {int(number): str(name).upper() for number, name in words["ops"].items()}
        self._statuses = {int(number): str(name) for number, name in words["statuses"].items()}
        self._begin_ns = self._last_ns = int(head["monotonic_ns"])
        self._rows: list[_Row] = []
        self._by_request: dict[tuple[int, int], _Row] = {}
        self._free: dict[tuple[str, int], list[_Row]] = {}
        self._via, self._record = "", 0
        self._text, self._text_whole, self._text_of = b"", 0, 0
        self._out: list[str] = []
        takers: tuple[Callable[[_Event], None], ...] = (
            self._on_submitted,
            self._on_agreed,
            self._on_batch,
            self._on_done,
            self._on_done,
            self._on_end,
            self._on_end,
            self._on_announced,
            self._on_text,
            self._on_record,
            self._on_phase,
            self._on_gap,
            self._on_stopped,
        )
        self._takers = dict(enumerate(takers))

    def take(self, event: _Event) -> list[str]:
        """The events that one row of the file makes."""
        self._out = []
        taker = self._takers.get(event.kind)
        if taker is not None:
            taker(event)
        return self._out

    # What is written

    def _at_us(self, time_ns: int) -> str:
        self._last_ns = max(self._last_ns, time_ns)  # times never fall
        return f"{(self._last_ns - self._begin_ns) / 1e3:.3f}"

    def _begin(self, row: _Row, name: str, time_ns: int) -> None:
        time = self._at_us(time_ns)
        self._out.append(f'{{"name": "{name}", "ph": "B", "ts": {time}, "pid": {row.pid}, "tid": 0}}')

    def _end(self, row: _Row, time_ns: int, args: Mapping[str, object] | None = None) -> None:
        more = f', "args": {json.dumps(args, ensure_ascii=False)}' if args else ""
        self._out.append(f'{{"ph": "E", "ts": {self._at_us(time_ns)}, "pid": {row.pid}, "tid": 0{more}}}')

    def _mark(self, name: str, time_ns: int, args: Mapping[str, object]) -> None:
        self._out.append(
            f'{{"name": "{name}", "ph": "i", "s": "g", "ts": {self._at_us(time_ns)}, "pid": 0, "tid": 0, '
            f'"args": {json.dumps(args)}}}'
        )

    def _close_phase(self, row: _Row, time_ns: int) -> None:
        if row.has_phase:
            self._end(row, time_ns)
            row.has_phase = False

    def _close(self, row: _Row, time_ns: int, args: Mapping[str, object] | None = None) -> None:
        if row.state == _IDLE:
            return
        self._close_phase(row, time_ns)
        if row.state == _RUNNING and row.via:
            self._end(row, time_ns)
        self._end(row, time_ns, args)
        row.state = _IDLE

    def _finish(self, row: _Row, time_ns: int, args: Mapping[str, object] | None = None) -> None:
        """The same; the next request with an automatic name may take the row."""
        if row.state != _IDLE and row.is_shared:
            del self._by_request[row.key]
            self._free.setdefault((row.name, row.team), []).append(row)
        self._close(row, time_ns, args)

    def _finish_all(self, time_ns: int) -> None:
        for row in self._rows:
            self._finish(row, time_ns)

    # Rows

    def _add(self, name: str, key: tuple[int, int]) -> _Row:
        _, team = key
        automatic = _AUTOMATIC.fullmatch(name)
        shown = automatic[1] if automatic else name
        free = self._free.get((shown, team)) if automatic else None
        if free:
            row = free.pop()
        else:
            row = _Row(len(self._rows) + 1, shown, team, is_shared=automatic is not None)
            self._rows.append(row)
            label = json.dumps(f"process set {team}: {shown}" if team else shown, ensure_ascii=False)
            self._out.append(
                f'{{"name": "process_name", "ph": "M", "pid": {row.pid}, "tid": 0, "args": {{"name": {label}}}}}'
            )
            self._out.append(_sort_index(row.pid))
        row.key = key
        self._by_request[key] = row
        return row

    def _named(self, event: _Event) -> _Row:
        """By the text that came before: the team's id, name, then, if there is a tensor, dtype, shape, is it Adasum."""
        key = (event.number, event.team)
        row = self._by_request.get(key)
        is_whole = self._text_whole > 0 and self._text_of == event.number and len(self._text) == self._text_whole
        self._text_whole = 0
        if not is_whole:
            return row or self._add(_text(event.name), key)
        team_id, name, dtype, shape, adasum = ([_text(part) for part in self._text.split(b"\0")] + [""] * 5)[:5]
        row = row or self._add(name, key)
        row.team_id = int(team_id) if team_id.isdecimal() else None
        row.details = {"dtype": dtype, "shape": shape} if dtype else {}
        row.is_adasum = bool(adasum)
        return row

    # What has happened

    def _on_text(self, event: _Event) -> None:
        offset, whole = event.value & 0xFFFFFFFF, event.value >> 32
        if offset == 0:
            self._text, self._text_whole, self._text_of = b"", whole, event.number
        if self._text_of != event.number or offset != len(self._text):
            self._text_whole = 0
            return
        self._text += event.name[: min(_NAME_BYTES, whole - offset)]

    def _on_submitted(self, event: _Event) -> None:
        row = self._named(event)
        if row.state == _RUNNING:
            self._close(row, event.time_ns)  # its end is not known
        if row.state == _IDLE:
            row.op = self._op(event)
            row.state = _NEGOTIATING
            self._begin(row, f"NEGOTIATE_{row.title}", event.time_ns)

    def _on_announced(self, event: _Event) -> None:
        """A rank is ready; before this rank is, for a name that it does not know yet, it is not shown."""
        row = self._by_request.get((event.number, event.team))
        if row is not None:
            time = self._at_us(event.time_ns)
            self._out.append(
                f'{{"name": "{event.value}", "ph": "X", "ts": {time}, "dur": 0, "pid": {row.pid}, "tid": 0}}'
            )

    def _on_record(self, event: _Event) -> None:
        self._via, self._record = _VIAS.get(event.number, ""), event.value

    def _on_agreed(self, event: _Event) -> None:
        key = (event.number, event.team)
        row = self._by_request.get(key) or self._add(_text(event.name), key)
        if row.state == _NEGOTIATING:
            self._end(row, event.time_ns)
        elif row.state == _RUNNING:
            self._close(row, event.time_ns)
        row.op, row.state, row.via, row.record = self._op(event), _RUNNING, self._via, self._record
        self._begin(row, row.title, event.time_ns)
        if row.via:
            suffix = "_ALLREDUCE" if row.does_adasum else ""
            self._begin(row, f"{row.via}_{row.title}{suffix}", event.time_ns)

    def _on_phase(self, event: _Event) -> None:
        """Of all rows of the batch: no other one of the team is running."""
        if not 0 <= event.number < len(_PHASES):
            return
        for row in self._rows:
            if row.state == _RUNNING and row.does_adasum and row.team == event.team:
                self._close_phase(row, event.time_ns)
                self._begin(row, _PHASES[event.number], event.time_ns)
                row.has_phase = True

    def _on_done(self, event: _Event) -> None:
        row = self._by_request.get((event.number, event.team))
        if row is None or row.state == _IDLE:
            return
        args: dict[str, object] = {**row.details, "bytes": event.value, "tensor": _text(event.name)}
        if row.state == _RUNNING and row.team_id is not None:
            args |= {"team": row.team_id, "record": row.record}
        if event.kind == _FAILED:
            args["error"] = self._status(event)
        self._finish(row, event.time_ns, args)

    def _on_batch(self, event: _Event) -> None:
        args = {"process_set": event.team, "requests": event.number, "bytes": event.value}
        self._mark("CYCLE_START", event.time_ns, args)

    def _on_end(self, event: _Event) -> None:
        self._finish_all(event.time_ns)
        reason = "shutdown" if event.kind == _LEFT else self._status(event)
        self._mark("HORO_END", event.time_ns, {"rank": event.number, "reason": reason})

    def _on_gap(self, event: _Event) -> None:
        """So many events are missing: what is in progress is unknown."""
        self._via = ""
        self._finish_all(self._last_ns)
        for row in self._rows:
            row.team_id = None
        self._mark("EVENTS_LOST", self._last_ns, {"count": event.value})

    def _on_stopped(self, event: _Event) -> None:
        self._finish_all(event.time_ns)

    def _op(self, event: _Event) -> str:
        return self._ops.get(event.op, "UNKNOWN_OPERATION")

    def _status(self, event: _Event) -> str:
        return self._statuses.get(event.status, "unknown")


def _text(name: bytes) -> str:
    return name.partition(b"\0")[0].decode("utf-8", "replace")
