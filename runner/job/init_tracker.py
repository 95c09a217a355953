"""Notes the ranks that have called ``init()``: one that ends before does not make the others wait for it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from horo.errors import HoroError
from horo.runner.agent.command import is_for_python
from horo.runner.agent.rank_reports import Note
from horo.runner.job.report import Ending, how_it_ended

if TYPE_CHECKING:
    from horo.bootstrap.store.server import StoreServer

__all__ = ["Arrivals", "side_by_side"]

_TELL_S = 2.0


class Arrivals:
    """Tells ranks that wait in ``init()`` for all others of a rank that has ended before it called that.

    Args:
        store: where they wait.
        secret: of the job.
        job_id: names its keys.
        generation: the start of the job in which they wait.
    """

    def __init__(self, store: StoreServer, secret: bytes, job_id: str, generation: int = 1) -> None:
        self._store, self._secret, self._job_id, self._generation = store, secret, job_id, generation
        self._awaits_all = False
        self._absent: Ending | None = None
        self._told = False

    def on_note(self, note: Note) -> None:
        """A rank has said something."""
        self._awaits_all = self._awaits_all or note.awaits_all
        self._tell()

    def on_end(self, ending: Ending) -> None:
        """A rank has ended."""
        if not ending.note.joined and self._absent is None:
            self._absent = ending
        self._tell()

    def _tell(self) -> None:
        if self._told or not self._awaits_all or self._absent is None:
            return
        self._told = True
        from horo.bootstrap.rendezvous import rank_is_missing  # noqa: PLC0415 - --help does without
        from horo.bootstrap.store.client import StoreClient  # noqa: PLC0415

        absent = self._absent
        reason = f"rank {absent.rank} ({absent.host}) {how_it_ended(absent)} before it called init()"
        first, *others = self._store.endpoints
        with contextlib.suppress(HoroError):  # then the others learn it when their time is up
            client = StoreClient(first.address, first.port, self._secret, _TELL_S, others)
            client.set(*rank_is_missing(self._job_id, self._generation, reason))
            client.close()


def side_by_side(command: Sequence[str], endings: Sequence[Ending], store: StoreServer | None) -> str:
    """A sentence about a job of several Python ranks that ended well without ever calling ``init()``; else empty."""
    if "horo.runner.call" in command:
        return ""  # horo.run: its function may have another purpose
    runs_python = is_for_python(command) or Path(command[0]).name.startswith("python")
    none_came = store is not None and store.connected_count == 0 and not any(each.note.joined for each in endings)
    if len(endings) < 2 or not runs_python or not none_came or any(each.failed for each in endings):
        return ""
    copies = len(endings)
    return (
        f"no rank called init() of horo: for horo, {copies} copies ran side by side; is hvd.init() missing, or do they "
        "train by another backend of torch.distributed?"
    )
