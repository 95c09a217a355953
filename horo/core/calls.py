"""The module ``horo._calls``, of native/python, which lies in the extension of the core: calls of one crossing."""

from __future__ import annotations

from collections.abc import Hashable
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from typing import TYPE_CHECKING, Any

from horo.core.binding import path

__all__ = ["Caller", "Slot", "know_torch", "repeat"]

if TYPE_CHECKING:

    class Slot:
        """The part in C of a ``CachedRequest``: its request, and what the tensors of the next call must look like."""

        key: Hashable
        """Its key in ``Caller.kept``. ``repeat`` compares types of a tuple's items, too: ``True`` equals ``Sum``."""
        is_taken: bool
        """A call uses it."""
        is_ready: bool
        """It has learned what tensors look like."""

        def bind(self, request: int, handle: int, is_automatic: bool, /) -> None:
            """Tells the addresses of its request and of the request's handle; and whether ``label`` gives a name."""

        def take(self) -> bool:
            """Sets ``is_taken``; whether it was not set."""

        def learn(self, tensor: Any, result: Any, tensor_bytes: int, result_bytes: int, /) -> None:
            """Makes ready for tensors like this one, and results like that one."""

        def set_tensor(self, tensor: Any, in_place: bool, out: Any = None, /) -> Any:
            """Sets the only tensor of the request, if it looks as the one that was learned.

            The result goes to ``out`` if that looks right, and lies elsewhere; without it into a new one.

            Returns:
                The tensor for the result; None if the caller has to use ``set_tensors``.
            """

    class Caller:
        """The part in C of a ``Runtime``."""

        kept: dict[Hashable, Any]
        active_calls: dict[object, object]
        abandoned: dict[int, object]
        taken_names: dict[str | None, Any]
        ended: bool
        is_joining: bool

        def use(self, place: int, /) -> None:
            """Is the one of ``repeat`` from now on. ``place``: ``Context.place``, which lives as long."""

        def execute(self, slot: Slot, memory: object, /) -> None:
            """Submits the request of a slot and waits for it. ``memory``: what the core then reads and writes.

            Raises:
                HoroError: The error of the request.
                BaseException: The exception of a signal handler; ``abandoned`` has the memory then.
            """

    def repeat(key: Hashable, tensor: Any, in_place: bool, out: Any, /) -> Any:
        """Repeats the last call with the same key, if the tensor looks as that one did.

        Args:
            key: As for ``RequestCache.take``.
            tensor: Anything.
            in_place: Write the result into ``tensor``.
            out: Else write it here; None: into a new one.

        Returns:
            The tensor with the result. None, and nothing is done, where there is no such call, or ``out`` will not do.
            For an allgather or alltoall ``expect_again`` must have been called. If the other ranks give other rows now,
            the result is in memory of the core, or copied to ``out``: a UsageError if that has other rows.
        """

    def know_torch(tensor_type: type, exchange: Any, profiling: Any, count_change: Any, forward_mode: Any, /) -> None:
        """Tells what of torch the others need. ``exchange``: the capsule of DLPack's table, or None."""

else:
    _loader = ExtensionFileLoader("horo._calls", path)
    _calls = module_from_spec(spec_from_loader("horo._calls", _loader))
    _loader.exec_module(_calls)
    Caller, Slot, know_torch, repeat = _calls.Caller, _calls.Slot, _calls.know_torch, _calls.repeat
