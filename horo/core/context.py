"""Binds the native core: one Python object per ``horo_context``."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horo.core.binding import ffi, lib
from horo.core.events import Event, event_of
from horo.core.log_lines import LogLines
from horo.core.pairs import Pairs
from horo.core.request_buffer import DTYPES, OP_NAMES, OPS, REDUCE_OPS, RequestBuffer, TakenResult, Tensor, Words
from horo.core.setup import KNOBS, Setup, close_all, native_setup, native_team
from horo.core.timeline import CoreTimeline
from horo.core.watch import Watch
from horo.core.words import STATUS_NAMES, as_words, check, error_buffer, text_of
from horo.diagnostics.deadlock import describe_blocked
from horo.errors import AbortedError, HoroError, ResourceError, UnsupportedError, UsageError, error_from_status

__all__ = [
    "DTYPES",
    "EVENTS",
    "NAME_MAX",
    "OPS",
    "REDUCE_OPS",
    "Context",
    "Event",
    "RequestBuffer",
    "TakenResult",
    "Tensor",
    "change_name",
    "simd_name",
    "version",
]

NAME_MAX: int = lib.HORO_NAME_MAX  # bytes of the name of an operation

EVENTS: dict[int, str] = {
    getattr(lib, f"HORO_EVENT_{name.upper()}"): name
    for name in ("submitted", "agreed", "begun", "ended", "failed", "left", "lost")
}
"""Name of each kind of event by its number."""

_REFUSALS: dict[type[HoroError], int] = {
    UnsupportedError: lib.HORO_ERR_UNSUPPORTED,
    UsageError: lib.HORO_ERR_USAGE,
    ResourceError: lib.HORO_ERR_RESOURCE,
}


def version() -> str:
    """Version of the native core with its protocol number; ranks must agree on it."""
    return text_of(lib.horo_version())


def change_name() -> str:
    """The name of the requests that add or remove a team."""
    return text_of(lib.horo_change_name())


def simd_name() -> str:
    """``"avx512"``, ``"avx2"``, ``"neon"`` or ``"scalar"``: the instructions of the reductions on this machine."""
    return text_of(lib.horo_simd_name())


_MESSAGE_MAX = lib.HORO_MESSAGE_MAX
_OK = lib.HORO_OK
_NULL, _submit, _run, _finish = ffi.NULL, lib.horo_submit, lib.horo_run, lib.horo_finish  # looked up once, not per call
_words = Words()


class Context(Pairs):
    """The native context of one rank. Thread-safe, except that no method may run during or after ``destroy``."""

    _is_aborted = False

    def __init__(self, setup: Setup, *, is_logged: bool = False) -> None:
        """``is_logged``: messages of the core become records of the logger ``horo.engine``, else lines on stderr."""
        keep: list[Any] = []  # keeps the targets of the pointers in native alive until horo_create has copied them
        native = native_setup(setup, keep, ffi)
        self._context: Any = _NULL
        self.log_lines, self._watch = LogLines(self.callers, is_logged=is_logged), Watch()
        native.log_queue = self.log_lines.queue
        out, error = ffi.new("horo_context **"), error_buffer()
        try:
            native.watch = self._watch.begin(setup.life_fds)
            check(lib.horo_create(native, out, error, _MESSAGE_MAX), error)
        except BaseException:
            self._watch.close()
            self.log_lines.close()
            raise
        self.rank, self.size = setup.rank, setup.size
        self._context, self._place = out[0], out
        self.place = int(ffi.cast("uintptr_t", out))
        """The place of the address of the native context; NULL is there once it is destroyed."""
        self.step = ffi.new("int64_t *")
        """The step of its training that the program is in, counted from 1; 0: in none. Messages name it."""
        lib.horo_show_step(self._context, self.step)
        self.blocked_after_s = _BLOCKED_AFTER_S
        """Seconds for which a thread waits before it reports that; deadlocks between ranks are found in the reports."""
        self.is_alone = False
        """Whether this is the only rank in this process, so that all threads of the process belong to it."""
        self.duplicate = ""
        """The last name that was refused since it was in use; messages about a wait of this rank have it."""
        self._given_up: threading.Thread | None = None
        self._kept: dict[int, object] = {}
        self._final_counters: dict[str, int] = {}
        self._timeline = CoreTimeline()

    def submit(self, buffer: RequestBuffer) -> int:
        """Hands one request to the core and returns its handle (positive); never blocks.

        The memory of the tensors must stay valid until the request is finished; the buffer can be used again at once.

        Raises:
            UsageError, ResourceError, GroupError: as ``horo_submit`` of the native core.
        """
        if _submit(self._context, buffer.request, buffer.handle_out, _NULL, 0) != _OK:
            self._submit_again(buffer)
        return buffer.last_handle[0]

    def run(self, buffer: RequestBuffer) -> None:
        """``submit`` and ``finish`` in one, and quicker than the two; for an allgather only into its outputs.

        Of a buffer that ``offers``: if ``last_handle`` is not 0 afterwards, the request is done, and a result that did
        not fit is there for ``take_result``, then ``release``.

        If a signal handler raises, the request stays in progress, and its memory must stay valid.

        Raises:
            HoroError, BaseException: as ``submit`` and ``wait`` do.
        """
        if _run(self._context, buffer.request, _SIGNAL_CHECK_MS, buffer.handle_out, _NULL, 0) != _OK:
            self.go_on(buffer)

    def go_on(self, buffer: RequestBuffer) -> None:
        """The rest of ``run`` where ``horo_run`` has returned another status than HORO_OK."""
        if buffer.last_handle[0] == 0:
            self._submit_again(buffer)
        if buffer.offers:
            self._release_failed(self.wait, buffer.last_handle[0])
        else:
            self.finish(buffer.last_handle[0])
            buffer.last_handle[0] = 0

    def _submit_again(self, buffer: RequestBuffer) -> None:
        """Submits a refused request again with a buffer for the message; the other members get the refusal."""
        error = error_buffer()
        status = _submit(self._context, buffer.request, buffer.handle_out, error, _MESSAGE_MAX)
        if is_told := status in {lib.HORO_ERR_USAGE, lib.HORO_ERR_UNSUPPORTED, lib.HORO_ERR_RESOURCE}:
            lib.horo_refuse(self._context, buffer.request.team, buffer.request.name, status, error)
        elif status == lib.HORO_ERR_DUPLICATE_NAME:
            self.duplicate = ffi.string(buffer.request.name).decode()
        self.log_lines.check(status, error, is_told)

    def refuse(self, team: int, name: str | None, reason: UsageError | ResourceError) -> None:
        """Lets calls of this name (None: of the next number) on other ranks fail; see ``horo_refuse``. Never blocks."""
        status = next(number for kind, number in _REFUSALS.items() if isinstance(reason, kind))
        named, words = _NULL if name is None else name.encode("utf-8", "replace"), as_words(str(reason))
        lib.horo_refuse(self._context, team, named, status, words)

    def add_team(
        self, ranks: Sequence[int], *, control_fds: Sequence[int] | None = None, data_fds: Sequence[int] | None = None
    ) -> int:
        """Adds a team, which is a set of ranks that do collectives among themselves; all ranks of the job call it.

        Blocks, with the GIL released, until all ranks have called it. Only one call, of this or of ``remove_team``, may
        be in progress at a time.

        Args:
            ranks: ranks of the job, ascending; the same on all ranks.
            control_fds, data_fds: for members on several hosts, as in ``horo_team_setup``. They are taken over, also
                if this raises.

        Returns:
            The id of the team, the same on all ranks, and never that of another team.

        Raises:
            HoroError: the error of the native core; MismatchError if the ranks differ.
            BaseException: the exception of a signal handler, as from ``wait``.
        """
        native, _keep = native_team(ranks, control_fds, data_fds, ffi)
        out, error = ffi.new("int64_t *"), error_buffer()
        status = lib.horo_add_team(self._context, native, out, error, _MESSAGE_MAX)
        if status != _OK:
            close_all((*(control_fds or ()), *(data_fds or ())))
        self.log_lines.check(status, error)
        self._release_failed(self.wait, out[0])
        team = int(lib.horo_answer(self._context, out[0]))
        self.release(out[0])
        return team

    def remove_team(self, team: int) -> None:
        """Removes a team; all ranks call it, and nothing of the team may be pending. Blocks as ``add_team`` does.

        Raises:
            HoroError: the error of the native core; UsageError if the team does not exist or has pending requests here,
                MismatchError if the ranks name different teams.
            BaseException: the exception of a signal handler, as from ``wait``.
        """
        out, error = ffi.new("int64_t *"), error_buffer()
        self.log_lines.check(lib.horo_remove_team(self._context, team, out, error, _MESSAGE_MAX), error)
        self.finish(out[0])

    def start_join(self, team: int, buffer: RequestBuffer | None = None) -> int:
        """Joins a team: submits nothing more until all members have joined, and then the handle is finished.

        Meanwhile the core takes part in the operations of the others. Never blocks. ``buffer.last_handle`` receives the
        handle before a signal handler can run.

        Raises:
            UsageError: this rank has joined and others have not, is no member, or waits for a change of teams.
            HoroError: as ``submit``.
        """
        buffer, error = buffer or RequestBuffer(), error_buffer()
        self.log_lines.check(lib.horo_join(self._context, team, buffer.handle_out, error, _MESSAGE_MAX), error)
        return int(buffer.last_handle[0])

    def joined_last(self, handle: int) -> int:
        """The rank that joined last, by a handle of ``start_join`` that is finished; negative for any other."""
        return int(lib.horo_answer(self._context, handle))

    def _release_failed(self, wait: Callable[[int], None], handle: int) -> None:
        """Waits, and releases the handle if its request failed."""
        try:
            wait(handle)
        except HoroError:  # an error of the core; after an exception of a signal handler, the request stays in progress
            self.release_if_done(handle)
            raise

    def poll(self, handle: int) -> bool:
        """Whether the request is finished, successfully or not; never blocks.

        Raises:
            UsageError: There is no such handle.
        """
        status = lib.horo_poll(self._context, handle)
        if status == lib.HORO_ERR_HANDLE:
            raise error_from_status(STATUS_NAMES[status], self._message(handle))
        return bool(status != lib.HORO_IN_PROGRESS)

    def wait(self, handle: int, within_s: float = threading.TIMEOUT_MAX) -> None:
        """Blocks, with the GIL released, until the request is finished; a signal handler may run meanwhile.

        The handle stays valid (``release`` it), also when this raises. Several threads may wait for one handle: each
        gets what has become of the request, also where another one releases it meanwhile.

        Raises:
            HoroError: the error of the request; UsageError: it has been released; AbortedError: it is late.
            BaseException: the exception of a signal handler (KeyboardInterrupt after Ctrl-C). The request continues in
                the background, and its memory must stay valid until it is done.
        """
        status = lib.horo_wait(self._context, handle, _SIGNAL_CHECK_MS, _words.chars, _MESSAGE_MAX)
        if status == lib.HORO_IN_PROGRESS:
            status = self._wait_long(handle, end_s=time.monotonic() + within_s)
        if status != _OK:
            self.log_lines.check(status, _words.chars)

    def wait_any(self, handles: Sequence[int]) -> None:
        """Blocks, as ``wait``, until one of several requests is finished, successfully or not."""
        self._wait_long(handles[0], handles[1:])
        lib.horo_report_blocked(self._context, _NULL, 0, 0, b"")  # no report of this wait is true any longer

    def _wait_long(self, handle: int, others: Sequence[int] = (), *, end_s: float = threading.TIMEOUT_MAX) -> int:
        """Continues a wait, for one request or for any of several, and reports it to the core at intervals.

        ``describe_blocked`` recognizes a waiting thread by the frame of this function.
        """
        look_s = time.monotonic() + self.blocked_after_s
        handles = ffi.new("int64_t[]", [handle, *others])
        try:
            while (status := self._wait_once(handles)) == lib.HORO_IN_PROGRESS:
                if threading.current_thread() is self._given_up:
                    raise AbortedError("horo was shut down")
                if time.monotonic() >= end_s:
                    raise AbortedError("not all ranks have come in time")
                if lib.horo_blocked_question(self._context) or time.monotonic() >= look_s:
                    with contextlib.suppress(RecursionError):  # a wait must not fail because of its report
                        self._report_blocked()
                    look_s = time.monotonic() + _BLOCKED_EVERY_S
        except BaseException:  # from a signal handler: the report is no longer true
            lib.horo_report_blocked(self._context, _NULL, 0, 0, b"")
            raise
        return int(status)

    def _wait_once(self, handles: Any) -> int:
        if len(handles) == 1:
            return int(lib.horo_wait(self._context, handles[0], _SIGNAL_CHECK_MS, _words.chars, _MESSAGE_MAX))
        return int(lib.horo_wait_any(self._context, handles, len(handles), _SIGNAL_CHECK_MS))

    def _report_blocked(self) -> None:
        """Reports to the core the requests for which the threads of this context wait."""
        question = lib.horo_blocked_question(self._context)  # frames that are read from here on answer it
        callers = self.callers()
        blocked = describe_blocked(self, self._wait_long.__code__, callers, self.duplicate, is_alone=self.is_alone)
        others = blocked.others or ("one of many threads" if len(callers) == lib.HORO_CALLERS_MAX else "")
        places = [ffi.new("char[]", wait.place.encode("utf-8", "replace")) for wait in blocked.waits]
        waits = ffi.new("horo_waiting[]", len(places))
        for native, wait, place in zip(waits, blocked.waits, places, strict=True):
            native.handle, native.place = wait.handle, place
        lib.horo_report_blocked(self._context, waits, len(places), question, others.encode("utf-8", "replace"))

    def finish(self, handle: int) -> None:
        """``wait`` and ``release`` in one; for an allgather only into its outputs.

        Raises:
            HoroError: the error of the request; its handle is released.
            BaseException: the exception of a signal handler, as from ``wait``; then the handle stays valid.
        """
        self._release_failed(self.finish_or_keep, handle)

    def finish_or_keep(self, handle: int) -> None:
        """As ``finish``, but the handle of a request that has failed stays valid."""
        status = _finish(self._context, handle, _SIGNAL_CHECK_MS, _words.chars, _MESSAGE_MAX)
        if status == lib.HORO_IN_PROGRESS:
            status = self._wait_long(handle)
            if status == _OK:
                lib.horo_release(self._context, handle)  # unless another thread has
        if status != _OK:
            self.log_lines.check(status, _words.chars)

    def callers(self) -> list[int]:
        """The threads that have called the core, at most HORO_CALLERS_MAX of them."""
        threads = ffi.new("uint64_t[]", lib.HORO_CALLERS_MAX)
        count = lib.horo_callers(self._context, threads, lib.HORO_CALLERS_MAX)
        return list(threads[0 : max(0, min(count, lib.HORO_CALLERS_MAX))])

    def release(self, handle: int) -> None:
        """Releases the handle of a finished request."""
        status = lib.horo_release(self._context, handle)
        if status != lib.HORO_OK:
            raise error_from_status(STATUS_NAMES[status], self._message(handle))

    def release_if_done(self, handle: int) -> bool:
        """Releases the handle if its request is finished; never blocks.

        Returns:
            Whether the core no longer uses the memory: the request is finished, or the handle was released before.
        """
        if self.in_progress(handle):
            return False
        lib.horo_release(self._context, handle)
        return True

    def release_or_keep(self, handle: int, memory: object) -> None:
        """Releases the handle if its request is finished; else keeps ``memory`` until the request is. Never blocks."""
        self._kept[handle] = memory
        for kept in list(self._kept):
            if self.release_if_done(kept):
                self._kept.pop(kept, None)

    def give_up_waits(self, thread: threading.Thread) -> None:
        """Ends the waits of a thread, now and later, with AbortedError within a moment. One thread per context."""
        self._given_up = thread

    def succeeded(self, handle: int) -> bool:
        """Whether the request is finished without an error, and its handle valid; never blocks or raises."""
        return bool(lib.horo_poll(self._context, handle) == _OK)

    def in_progress(self, handle: int) -> bool:
        """Whether the request is not finished yet, so that the core may use its memory; never blocks or raises."""
        return bool(lib.horo_poll(self._context, handle) == lib.HORO_IN_PROGRESS)

    def take_result(self, handle: int, index: int, taken: TakenResult | None = None) -> tuple[Any, list[int]]:
        """The gathered tensor ``index`` of a finished allgather; ``taken`` is for calls that may have to be repeated.

        Returns:
            A writable buffer over the bytes, which live as long as the buffer, or None if they are in the tensor's
            output; and the first extent of each member of the request's team. The team may have been removed since.
        """
        taken = taken or TakenResult(self.size)
        if not taken.is_there():
            status = lib.horo_take_result(self._context, handle, index, taken.data, taken.bytes, taken.first_dims)
            if status != lib.HORO_OK and not taken.is_there():  # else a signal handler has taken it in between
                raise error_from_status(STATUS_NAMES[status], self._message(handle))
        return taken.buffer(), taken.extents()

    def health(self) -> HoroError | None:
        """None while no rank is lost, else the error that every request now gets."""
        error = error_buffer()
        status = lib.horo_health(self._context, error, lib.HORO_MESSAGE_MAX)
        return None if status == lib.HORO_OK else error_from_status(STATUS_NAMES[status], text_of(error))

    def tuning(self) -> tuple[dict[str, int], bool]:
        """The values of the next operation of all ranks, by ``KNOBS`` (0: as ever), and whether they are final."""
        values, is_final = ffi.new("uint64_t[]", len(KNOBS)), ffi.new("int32_t *")
        check(lib.horo_read_tuning(self._context, values, is_final), error_buffer())
        return dict(zip(KNOBS, values, strict=True)), bool(is_final[0])

    def propose_tuning(self, values: Mapping[str, int], *, is_final: bool = False) -> None:
        """Rank 0: all ranks change over to these in front of the next batch. UsageError: the job cannot have them."""
        error, native = error_buffer(), ffi.new("uint64_t[]", [values[knob] for knob in KNOBS])
        check(lib.horo_propose_tuning(self._context, native, is_final, error, lib.HORO_MESSAGE_MAX), error)

    def counters(self) -> dict[str, int]:
        """Counts since creation by the names of ``horo_counters``: requests, batches, bytes, link_bytes, sleeps, ...

        After ``destroy``: the final counts.
        """
        native = ffi.new("horo_counters *")
        if self._context == _NULL:  # no call comes between this and the next one, in which a signal handler destroys it
            return dict(self._final_counters)
        lib.horo_read_counters(self._context, native)
        return {name: int(getattr(native, name)) for name, _ in ffi.typeof("horo_counters").fields or ()}

    def work(self) -> tuple[int, int, int, int, int]:
        """Of ``counters``, what is read at each step: blocked_ns, moved_ns, bytes, tensors, batches."""
        native = ffi.new("horo_counters *")
        if self._context != _NULL:
            lib.horo_read_counters(self._context, native)
        return native.blocked_ns, native.moved_ns, native.bytes, native.tensors, native.batches

    def events(self) -> list[Event]:
        """The last events of this rank, at most ``HORO_EVENTS_MAX``, the oldest first. Thread-safe; never blocks.

        Raises:
            UsageError: after ``destroy``, or in a forked child.
        """
        native = ffi.new("horo_event[]", lib.HORO_EVENTS_MAX)
        count = lib.horo_read_events(self._context, native, lib.HORO_EVENTS_MAX)
        if count < 0:
            raise error_from_status(STATUS_NAMES[count], self._message(0))
        return [event_of(native[i], text_of(native[i].name), EVENTS, OP_NAMES, STATUS_NAMES) for i in range(count)]

    def start_timeline(self, path: str, about: Mapping[str, Any] | None = None, *, marks_batches: bool = False) -> None:
        """Records this rank's operations from now on for a file of Chrome's trace events, which is made at the end.

        Args:
            path: of the file, which is emptied, unless it is being written already; another one ends first.
            about: more arguments of its first event.
            marks_batches: it has the beginning of each batch.

        Raises:
            UsageError: the file cannot be written; what is being written goes on. Or this is a forked child.
        """
        self.events()  # raises in a forked child
        self._timeline.start(self._context, path, {"rank": self.rank, **(about or {})}, marks_batches=marks_batches)

    def stop_timeline(self) -> None:
        """Makes the file of the timeline. Does nothing without one."""
        if (status := self._timeline.stop(self._context)) != _OK:
            raise error_from_status(STATUS_NAMES[status], self._message(0))

    def after_fork(self) -> None:
        """Closes the parent's descriptors in a forked child; every later call raises UsageError."""
        if self._context != ffi.NULL:
            lib.horo_after_fork(self._context)
            self._timeline.after_fork()

    def end(self, words: str, *, has_failed: bool = True) -> None:
        """Leaves the group behind what all ranks have agreed on; other ranks get an error with ``words`` for the rest.

        Blocks as ``destroy``, which is to follow. The error is PeerLostError, or AbortedError if nothing has failed.
        """
        status = lib.HORO_ERR_PEER_LOST if has_failed else lib.HORO_ERR_ABORTED
        lib.horo_leave(self._context, status, as_words(words))

    def count_of(self, *ops: str) -> int:
        """The number of operations of these kinds that this rank has submitted; their names are in ``OPS``."""
        return sum(int(lib.horo_count_of(self._context, OPS[op])) for op in ops)

    def abort(self, words: str) -> None:
        """Ends the group at once, here and for all others, whose requests fail with ``words``; never waits for them.

        Other threads may wait meanwhile, and call afterwards: they get AbortedError. All but memory is given back, and
        that is when nobody refers to the context any more.
        """
        lib.horo_abort(self._context, as_words(words))
        self._is_aborted = True
        self.log_lines.forget_context()

    def destroy(self) -> None:
        """Leaves the group and frees everything; idempotent. After an exception of a signal handler, call it again."""
        self._final_counters = self.counters()
        self.log_lines.forget_context()
        context, self._context, self._place[0] = self._context, ffi.NULL, ffi.NULL
        lib.horo_destroy(context)
        self._timeline.finish()
        self._watch.close()
        self.log_lines.close()
        self._kept.clear()

    def __del__(self) -> None:
        if self._is_aborted:
            with contextlib.suppress(Exception):  # at the end of Python, anything may be gone
                self.destroy()

    def _message(self, handle: int) -> str:
        lib.horo_error(self._context, handle, error := error_buffer(), lib.HORO_MESSAGE_MAX)
        return text_of(error)


_SIGNAL_CHECK_MS = 100
_BLOCKED_AFTER_S = 0.8
_BLOCKED_EVERY_S = 0.5
