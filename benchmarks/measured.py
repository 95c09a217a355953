"""Result files read back: rows of one benchmark, split by the state of the cores, compared contestant by contestant."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rounds import STATES

Row = dict[str, Any]
HEATS_OF_STATE_MIN = 3


class BadResults(Exception):
    """A file of results cannot be read; the text is a sentence for the user."""


@dataclass(frozen=True)
class Document:
    """One file: its name without .json, and what report.document has put into it."""

    name: str
    content: dict[str, Any]

    @property
    def benchmark(self) -> str:
        return str(self.content["benchmark"])

    @property
    def where(self) -> str:
        """``" on 2 hosts, links of 10gbit"``; empty for one host."""
        options = self.content.get("options", {})
        return f" on {options['hosts']} hosts, links of {options['rate']}" if options.get("hosts", 1) != 1 else ""

    @property
    def rows(self) -> list[Row]:
        return list(self.content["rows"])


def read_folder(folder: Path) -> list[Document]:
    """All results in ``folder``, by name.

    Raises:
        BadResults: there are none, or one is not of a benchmark.
    """
    documents = []
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise BadResults(f"{path} is no JSON: {error}") from error
        if not isinstance(content, dict) or not {"benchmark", "rows", "machine", "versions"} <= set(content):
            raise BadResults(f"{path} was not written by a benchmark: it lacks benchmark, rows, machine or versions")
        documents.append(Document(path.stem, content))
    if not documents:
        raise BadResults(f"there is no result in {folder}; `make bench` writes some")
    return documents


def states_of(rows: Iterable[Row]) -> list[str]:
    """The states in which every row has enough rounds to speak of; [""] (all rounds) if there is no such state."""
    rows = list(rows)
    found = [s for s in STATES if all(row["states"].count(s) >= HEATS_OF_STATE_MIN for row in rows)]
    return found or [""]


def values_of(row: Row, state: str) -> list[float]:
    """The rounds' times of one row in microseconds, of one state or ("") of all."""
    pairs = zip(row["rounds_us"], row["states"], strict=True)
    return [value for value, in_state in pairs if not state or in_state == state]


def median_of(row: Row, state: str) -> float:
    return statistics.median(values_of(row, state))


def ratio_of(row: Row, horo: Row, state: str) -> float:
    """Median over heats of this contestant's time over horo's in the same heat: above 1, horo is faster."""
    pairs = zip(values_of(row, state), values_of(horo, state), strict=True)
    return statistics.median(mine / horos for mine, horos in pairs)


def grouped(rows: Sequence[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows that agree in ``keys``, in the order in which they come."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(key) for key in keys), []).append(row)
    return groups
