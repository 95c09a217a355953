"""The course of a job of ``horo.run`` in a notebook: one line below the cell, drawn again in its place."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from horo.runner.cli.attach import course_of
from horo.runner.cli.autotune_options import own_switch
from horo.runner.config import JobError

__all__ = ["viewer"]

_TRY_EVERY_S = 0.5


def viewer(process: subprocess.Popen[bytes], environment: Mapping[str, str]) -> Iterator[threading.Thread]:
    """A thread that shows the line until the job is over; none outside of notebooks, and with ``HORO_LIVE=0``.

    Args:
        process: the hororun.
        environment: of it.
    """
    ipython: Any = sys.modules.get("IPython")  # a notebook has imported it
    is_notebook = ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None
    if is_notebook and own_switch("live", environment) is not False:
        yield threading.Thread(target=_show, args=(process, ipython.display.display), daemon=True)


def _show(process: subprocess.Popen[bytes], display: Callable[..., Any]) -> None:
    handle: Any = None
    last = ""
    for text in _course(process):
        if text and handle is None:
            handle = display({"text/plain": text}, raw=True, display_id=True)
        elif text and text != last:
            handle.update({"text/plain": text}, raw=True)
        last = text or last
    if handle is not None:
        handle.update({"text/plain": f"over; last: {last}"}, raw=True)


def _course(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """As ``course_of``; waits for hororun to begin, and is empty if it shows none, as under MPI."""
    while True:
        try:
            yield from course_of(process.pid)
        except JobError:
            try:
                process.wait(_TRY_EVERY_S)
            except subprocess.TimeoutExpired:
                continue
        return
