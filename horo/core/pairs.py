"""Sends and receives between two ranks, outside the order of collectives."""

from __future__ import annotations

from typing import Any

from horo.core.binding import ffi, lib
from horo.core.log_lines import LogLines
from horo.core.request_buffer import RequestBuffer, Tensor, pack
from horo.core.words import error_buffer

__all__ = ["Pairs"]


class Pairs:
    """The part of a context that moves a tensor from one rank to another."""

    _context: Any
    log_lines: LogLines

    def send(
        self,
        tensor: Tensor,
        peer: int,
        tag: int = 0,
        *,
        sync: bool = False,
        timeout_ms: int = 0,
        buffer: RequestBuffer | None = None,
    ) -> int:
        """Sends the input of a tensor in host memory to another rank; never blocks.

        Args:
            tensor: contiguous. Its memory must stay valid and unchanged until the request is finished, which is when
                the receiver has all of it.
            peer: Who receives it.
            tag: 0 to 2^31 - 1. Sends to one rank with one tag are received in their order.
            sync: the calling thread waits for it next.
            timeout_ms: ends the group, with TimeoutError, if it is not done by then; 0: never.
            buffer: its ``last_handle`` receives the handle before a signal handler can run.

        Returns:
            A handle, as from ``submit``.

        Raises:
            UsageError: no such rank, this rank, or no such tag.
            HoroError: as ``submit``. The request fails with MismatchError if the receiver has another dtype or count.
        """
        return self._begin(lib.horo_send, tensor, (peer, tag, lib.HORO_SUBMIT_SYNC * sync, timeout_ms), buffer)

    def receive(
        self,
        tensor: Tensor,
        peer: int | None,
        tag: int = 0,
        *,
        sync: bool = False,
        timeout_ms: int = 0,
        buffer: RequestBuffer | None = None,
    ) -> int:
        """Receives into the output of a tensor what another rank sends with this tag; the rest as of ``send``.

        Args:
            peer: Who sends it; None: whoever does so first.
        """
        from_whom = -1 if peer is None else peer
        return self._begin(lib.horo_receive, tensor, (from_whom, tag, lib.HORO_SUBMIT_SYNC * sync, timeout_ms), buffer)

    def source(self, handle: int) -> int:
        """The rank whose send a receive has taken, before ``release``; negative if the handle is none of a receive."""
        return int(lib.horo_answer(self._context, handle))

    def _begin(
        self, function: Any, tensor: Tensor, call: tuple[int, int, int, int], buffer: RequestBuffer | None
    ) -> int:
        handle = ffi.new("int64_t *") if buffer is None else buffer.handle_out
        error, memory = error_buffer(), pack([tensor])
        native = ffi.cast("horo_tensor *", memory)
        status = function(self._context, native, *call, handle, error, lib.HORO_MESSAGE_MAX)
        self.log_lines.check(status, error)
        return int(handle[0])
