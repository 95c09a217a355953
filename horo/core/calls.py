"""The module ``horo._calls``, of native/python, which lies in the extension of the core: calls of one crossing."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from typing import TYPE_CHECKING, Any

from horo.core.binding import BUILD, path

__all__ = [
    "Caller",
    "Gradient",
    "Numbers",
    "Ready",
    "Slot",
    "changed",
    "is_shared",
    "know_gradients",
    "know_torch",
    "note_sharing",
    "pick",
    "repeat",
]

if TYPE_CHECKING:

    class Numbers:
        """The numbers of automatic names, from 0 on."""

        next: int

        def take(self) -> int:
            """The next number, which is counted."""

    class Slot:
        """The part in C of a ``CachedRequest``: its request, and what the tensors of the next call must look like."""

        key: Hashable
        """Its key in ``Caller.kept``. ``repeat`` compares types of a tuple's items, too: ``True`` equals ``Sum``."""
        is_taken: bool
        """A call uses it."""
        is_ready: bool
        """It has learned what tensors look like."""

        def bind(self, request: int, handle: int, numbers: Numbers | None, number_at: int, /) -> None:
            """Tells the addresses of its request and of the request's handle.

            Args:
                request: With its name.
                handle: Is written by each call.
                numbers: Each call has a name with the next of these; None: they have one name.
                number_at: The number of bytes in front of it. There is room for any number behind them.
            """

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

        def submit_each(self, gradients: list[Any], sync: bool, pending: object, /) -> None:
            """Submits the requests of gradients in their order; never blocks. Those that it submits are ``pending``.

            Args:
                gradients: Of ``pick``, as is ``sync``.
                pending: What their reduction is for Python. Each is there before a signal handler can run.

            Raises:
                UsageError, ResourceError, GroupError: Of the first that is refused; no later one is submitted.
            """

        def finish_each(self, gradients: list[Any], at: int, /) -> int:
            """Waits for gradients in their order, from number ``at`` on, and releases their handles.

            Returns:
                The first that has failed or takes long; their number if there is none.
            """

    class Ready:
        """The part in C of ``ReadyGradients``, of which it calls ``admit`` and ``submit``."""

        states: list[Any]
        run: int
        room: int
        overlaps: bool

    class Gradient:
        """The part in C of a ``ParameterState``."""

        parameter: Any
        pending: Any
        held: Any
        held_at: Any
        again: Any
        group: Any
        summed: Any
        weight: int
        shares: bool
        was_unused: bool
        handle: int
        """The core's, of its last request; 0: that was not submitted."""

        def bind(self, ready: Ready, /) -> None:
            """Lets ``hook`` hold the gradient there."""

        def hook(self, parameter: Any, /) -> None:
            """Called by autograd when the gradient of a parameter is there: holds it until there is a bucket of them.

            It asks ``Ready.admit`` first, unless this is the only gradient of a parameter in a run that is known.
            """

    def pick(gradients: Sequence[Any], sync: bool, but: object, /) -> tuple[list[Any], list[Any], list[Any]]:
        """Sets those of the gradients that are not pending in their requests, and holds them.

        Args:
            gradients: A sequence of ``Gradient``. ``shares`` is known.
            sync: The caller waits at once.
            but: One that is not to be picked.

        Returns:
            Those picked, their tensors, and those that need more of Python.
        """

    def changed(gradients: list[Any], pending: object, times: int, /) -> list[int]:
        """The places of those ``pending`` whose gradients were replaced, or not changed so many times."""

    def is_shared(grad: Any, /) -> bool:
        """Whether another tensor may have the memory of a gradient. A sparse one has no storage."""

    def note_sharing(gradients: Sequence[Any], /) -> bool:
        """Sets ``shares`` of those that are not pending; whether any does."""

    def know_gradients(strided: Any, owners: Any, alone: int, run: Callable[[], int], /) -> None:
        """Tells what of torch the others need: ``torch.strided``, the number of the run in progress, and owners.

        Args:
            strided: Is not of the others.
            owners: The function that counts the owners of a storage; None: there is none.
            alone: Its result for one that no other tensor has.
            run: The number of autograd's run.
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
    try:
        Caller, Slot, know_torch, repeat = _calls.Caller, _calls.Slot, _calls.know_torch, _calls.repeat
        Numbers = _calls.Numbers
        Gradient, Ready, pick, changed = _calls.Gradient, _calls.Ready, _calls.pick, _calls.changed
        is_shared, note_sharing, know_gradients = _calls.is_shared, _calls.note_sharing, _calls.know_gradients
    except AttributeError as error:
        raise ImportError(f"{path} was built from older source, as {error}: {BUILD}", path=path) from None
