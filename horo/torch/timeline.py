"""A timeline of this rank's operations, as a file for Perfetto and chrome://tracing, from any time to any other."""

from __future__ import annotations

import os

from horo.bootstrap.timeline_file import start_timeline as _start
from horo.errors import UsageError
from horo.torch.engine.runtime import current

__all__ = ["start_timeline", "stop_timeline"]


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Records this rank's operations from now on in a file of Chrome's trace events.

    The file is empty until the timeline ends; ``python -m horo.timeline FILE`` shows the events so far. Does not block:
    each rank starts with its own call. A timeline that is being written to another file ends first. If it is the same
    file, the timeline goes on, and only ``mark_cycles`` changes.

    Args:
        file_path: Of the file, which is emptied. With ``{rank}`` in it, each rank that calls this writes its own file;
            ``python -m horo.timeline merge`` joins them. Without, rank 0 writes, and the call does nothing on others.
        mark_cycles: Whether the beginning of each batch is marked, as ``CYCLE_START``.

    Raises:
        NotInitializedError: Before ``init()``.
        UsageError: The file cannot be written, or this is a forked child.
        AbortedError: After ``shutdown()`` in another thread.

    Example:
        hvd.start_timeline("/tmp/timeline.json")
        hvd.allreduce(torch.ones(4), name="x")
        hvd.stop_timeline()
    """
    path = _path_of(file_path)
    runtime = current()
    runtime.inside("start_timeline", lambda: _start(runtime.job, path, marks_cycles=bool(mark_cycles)))


def stop_timeline() -> None:
    """Ends the timeline of this rank, whoever has started it; without one, does nothing. ``shutdown()`` does so, too.

    Blocks until the file is written and closed. Does not wait for other ranks.

    Raises:
        NotInitializedError: Before ``init()``.
        UsageError: This is a forked child.
        AbortedError: After ``shutdown()`` in another thread.

    Example:
        hvd.start_timeline("/tmp/timeline-{rank}.json", mark_cycles=True)
        hvd.barrier()
        hvd.stop_timeline()
    """
    runtime = current()
    runtime.inside("stop_timeline", runtime.core.stop_timeline)


def _path_of(file_path: object) -> str:
    path = os.fspath(file_path) if isinstance(file_path, os.PathLike) else file_path
    if not isinstance(path, str) or not path or "\0" in path:
        raise UsageError(f"start_timeline(file_path={file_path!r}): expected the path of a file")
    return path
