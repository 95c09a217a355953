"""The names of torch that it does not document, each with what is done where a torch lacks it.

No other module has one of them, but for ``READ_IN_PLACE``: a call for each gradient would cost more than these do.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad, profiler
from torch.autograd.graph import increment_version

__all__ = [
    "PRIVATE_NAMES",
    "READ_IN_PLACE",
    "BatchNorm",
    "begin_event",
    "calls_scaled_step",
    "change_counter",
    "code_of_function_backward",
    "code_of_hooked_step",
    "end_event",
    "end_event_with",
    "exchange_table",
    "fail_future",
    "forgets_works",
    "forward_mode",
    "has_step_hooks",
    "has_stepped",
    "has_tangent",
    "is_autograd_compiled",
    "is_step_hooked",
    "is_transformed",
    "is_unscaled",
    "keep_from_dynamo",
    "loader_iterators",
    "order_step_hooks",
    "outer_node",
    "owner_counter",
    "profiler_state",
    "queue_at_end",
    "rehook_step",
    "run_number",
    "sparse_indices",
    "sparse_values",
    "storage_key",
    "tells_end_of_backward",
    "transform_finder",
]

PRIVATE_NAMES = {
    "torch._C._current_graph_task_id": "gradients_ready='backward' is refused",
    "torch._C._current_autograd_node": "likewise",
    "torch.autograd.Variable._execution_engine.queue_callback": "likewise",
    "torch.autograd.function.BackwardCFunction.apply": "a nested backward is known by torch's own entries alone",
    "torch._C._functorch.is_functorch_wrapped_tensor": "an operation inside torch.func is refused in other words",
    "torch.autograd.forward_ad._current_level": "an operation drops the tangent of a tensor",
    "torch._C._increment_version": "tensors are marked as changed one at a time",
    "torch._C._storage_Use_Count": "every gradient counts as shared",
    "torch.UntypedStorage._cdata": "the address of the memory stands for it",
    "torch.Tensor._version": "none: every torch has it",
    "torch.Tensor._indices": "the tensor is coalesced",
    "torch.Tensor._values": "likewise",
    "torch.autograd.profiler._is_profiler_enabled": "the profiler shows no spans",
    "torch.autograd._record_function_with_args_enter": "the profiler shows no operations of torch.distributed",
    "torch.autograd._record_function_with_args_exit": "likewise",
    "torch._C.Future._set_unwrap_func": "none: every torch has it",
    "torch.optim.Optimizer.profile_hook_step": "a step that has lost its hooks does not get them again",
    "torch.optim.SGD.step.hooked": "each optimizer counts as one with hooks",
    "torch.optim.SGD._optimizer_step_pre_hooks": "likewise",
    "torch._C._dynamo.eval_frame._FrameExecStrategy": "torch.compile follows horo's functions, and warns",
    "torch._dynamo.decorators.disable._torchdynamo_disable": "likewise",
    "torch._dynamo.compiled_autograd.in_compiled_autograd_region": "compiled autograd is not refused",
    "torch.amp.GradScaler._maybe_opt_step": "a GradScaler is not seen; only an optimizer with a fused step shows it",
    "torch.nn.modules.batchnorm._BatchNorm": "the class that BatchNorm1d is made of",
    "torch.utils.data.dataloader._BaseDataLoaderIter": "waits for loaders are not told from computing",
}
"""Each name, and what is done without it."""

READ_IN_PLACE = ("_version", "_is_profiler_enabled", "_cdata", "_current_level")


# -- autograd ------------------------------------------------------------------------------------------------------


def tells_end_of_backward() -> bool:
    """Whether autograd can call back at the end of a backward, and tell which run is inside which."""
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    has_runs = hasattr(torch._C, "_current_graph_task_id") and hasattr(torch._C, "_current_autograd_node")
    return has_runs and hasattr(engine, "queue_callback")


def run_number() -> Callable[[], int]:
    """The function with the number of the autograd run that calls it; -1 outside, and where no run has one."""
    found: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
    return found


def outer_node() -> Any:
    """At the end of a run: the node that the run around it evaluates; None in the outermost."""
    return torch._C._current_autograd_node()


def queue_at_end(function: Callable[[], None]) -> None:
    """Has autograd call a function at the end of the run that calls this."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


def code_of_function_backward() -> CodeType | None:
    """The code that autograd runs for the backward of a ``torch.autograd.Function``."""
    function = getattr(torch.autograd.function, "BackwardCFunction", None)
    return getattr(getattr(function, "apply", None), "__code__", None)


def is_autograd_compiled() -> bool:
    """Whether torch's compiled autograd runs the backward that calls. It drops calls for the end of a backward."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    enabled = getattr(module, "compiled_autograd_enabled", False)  # older torch has only this one
    return bool(getattr(module, "in_compiled_autograd_region", enabled))


# -- tensors -------------------------------------------------------------------------------------------------------


def change_counter() -> Callable[[Sequence[torch.Tensor]], None]:
    """The function that marks tensors as changed for autograd.

    Every torch has ``increment_version``, but not every one accepts several tensors or tensors of inference mode. If it
    does, the internal function takes half the time.
    """
    beneath: Any = getattr(torch._C, "_increment_version", None)
    try:
        with torch.inference_mode():
            frozen = torch.empty(0, device="cpu")
        beneath([torch.empty(0, device="cpu"), frozen])
    except (RuntimeError, TypeError):
        return _count_singly
    counter: Callable[[Sequence[torch.Tensor]], None] = beneath
    return counter


def _count_singly(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        if not tensor.is_inference():
            increment_version(tensor)


def exchange_table() -> Any:
    """DLPack's table of functions by which C reads a tensor without Python; None: this torch has none."""
    return getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)


def transform_finder() -> Callable[[Any], bool]:
    """The function that finds whether ``torch.func`` has put a tensor into the place of the caller's."""
    functorch: Any = getattr(torch._C, "_functorch", None)
    finder: Callable[[Any], bool] = getattr(functorch, "is_functorch_wrapped_tensor", lambda _: False)
    return finder


is_transformed = transform_finder()


forward_mode: Any = forward_ad if hasattr(forward_ad, "_current_level") else SimpleNamespace(_current_level=-1)
"""Its ``_current_level`` is not negative while tensors may have tangents."""


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether forward-mode autograd follows a tensor."""
    unpack: Any = forward_ad.unpack_dual  # torch leaves it untyped
    return forward_mode._current_level >= 0 and unpack(tensor).tangent is not None


def owner_counter() -> Callable[[int], int] | None:
    """The function that counts the owners of a tensor's memory by ``storage_key``, where torch counts them."""
    found: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
    return found if hasattr(torch.UntypedStorage, "_cdata") else None


def storage_key(tensor: torch.Tensor) -> int:
    """A number that the storage of a tensor has as long as it lives, and no other has meanwhile."""
    storage = tensor.untyped_storage()
    return int(getattr(storage, "_cdata", None) or storage.data_ptr())


def sparse_indices(tensor: torch.Tensor) -> torch.Tensor:
    """The indices of a sparse tensor, as they are: one may be there twice."""
    return tensor._indices() if hasattr(tensor, "_indices") else tensor.coalesce().indices()


def sparse_values(tensor: torch.Tensor) -> torch.Tensor:
    """The values at ``sparse_indices``."""
    return tensor._values() if hasattr(tensor, "_values") else tensor.coalesce().values()


# -- profiler ------------------------------------------------------------------------------------------------------


def profiler_state() -> Any:
    """A thing whose ``_is_profiler_enabled`` is true while a profiler runs in this process."""
    return profiler if hasattr(profiler, "_is_profiler_enabled") else SimpleNamespace(_is_profiler_enabled=False)


def begin_event(name: str, inputs: Sequence[torch.Tensor]) -> Any:
    """Begins an event that the profiler shows with the shapes of its inputs; None: this torch cannot."""
    enter = getattr(torch.autograd, "_record_function_with_args_enter", None)
    return None if enter is None else enter(name, *inputs)


def end_event(event: Any) -> None:
    """Ends an event here."""
    torch.autograd._record_function_with_args_exit(event)  # type: ignore[attr-defined]


def end_event_with(event: Any, future: torch.futures.Future[Any]) -> Any:
    """Has a future end an event; a future that is complete after that."""
    return torch.ops.profiler._call_end_callbacks_on_jit_fut(event, future)


# -- torch.distributed ---------------------------------------------------------------------------------------------


def forgets_works() -> bool:
    """Whether C++ that gets a work of a group in Python does not keep the Python half of it."""
    return tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2]) < (2, 7)


class _Failure:
    """The value of a future that has failed. C++ of torch pickles it for its tensors, and raises what that raises."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> Any:
        raise self._error


def fail_future(future: torch.futures.Future[Any], error: Exception) -> None:
    """Ends a future by an error. After torch's own ``set_exception`` DDP crashes: its C++ takes tensors out of that."""

    def fail(_: _Failure) -> None:
        raise error

    future._set_unwrap_func(fail)
    future.set_result(_Failure(error))


# -- optimizers ----------------------------------------------------------------------------------------------------


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch calls hooks around the step of an optimizer. One that has never called torch's has none."""
    return _has_step_hooks(optimizer) or not _has_step_hooks(torch.optim.SGD([torch.zeros(1, device="cpu")], lr=0.1))


def _has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    return hasattr(optimizer, "_optimizer_step_pre_hooks") and is_step_hooked(type(optimizer))


def order_step_hooks(optimizer: Any, last_before: int, first_after: int) -> None:
    """Has two hooks of an optimizer run nearest to its step, by the ids of their handles.

    Args:
        optimizer: Has them.
        last_before: The pre-hook.
        first_after: The post-hook.
    """
    optimizer._optimizer_step_pre_hooks.move_to_end(last_before)
    optimizer._optimizer_step_post_hooks.move_to_end(first_after, last=False)


def is_step_hooked(kind: Any) -> bool:
    """Whether the step of a class of optimizers is marked as one with hooks around it."""
    return bool(getattr(kind.step, "hooked", False))


def code_of_hooked_step() -> CodeType | None:
    """The code that calls the hooks of a step, then the step."""
    hook: Any = getattr(torch.optim.Optimizer, "profile_hook_step", None)
    code: CodeType | None = None if hook is None else hook(lambda: None).__code__
    return code


def has_stepped(frame: FrameType) -> bool:
    """Whether the frame, of ``code_of_hooked_step``, has called the step, and calls post-hooks now."""
    return "out" in frame.f_locals


def rehook_step(kind: Any) -> None:
    """Puts the hooks around the step of a class of optimizers again."""
    kind.step = torch.optim.Optimizer.profile_hook_step(kind.step)
    kind.step.hooked = True


def calls_scaled_step(frame: FrameType) -> bool:
    """Whether the frame is of the method in which a GradScaler calls the step of an optimizer."""
    return frame.f_code.co_name == "_maybe_opt_step"


def is_unscaled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a GradScaler has passed its findings about the gradients to an optimizer with a fused step."""
    return getattr(optimizer, "found_inf", None) is not None


# -- loaders -------------------------------------------------------------------------------------------------------


def loader_iterators() -> Any:
    """The class of the iterators of ``DataLoader``; None: no loader has been made yet, or torch has no such class."""
    return getattr(sys.modules.get("torch.utils.data.dataloader"), "_BaseDataLoaderIter", None)


# -- torch.compile and layers --------------------------------------------------------------------------------------


def keep_from_dynamo(function: Any, codes: Sequence[CodeType]) -> None:
    """Has torch.compile run a function as it is, without loading it.

    Args:
        function: Where it is called by what torch.compile traces, that ends the graph.
        codes: Its code and that of functions inside it: torch.compile does not trace them by themselves.
    """
    function._torchdynamo_disable = True
    for code in codes:
        _skip_code(code)


def code_skipper() -> Callable[[CodeType], None]:
    """The function that has torch.compile never trace some code by itself; nothing has to be loaded for it."""
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if hasattr(frames, "skip_code"):  # an older torch
        older: Callable[[CodeType], None] = frames.skip_code
        return older
    if not hasattr(frames, "_FrameExecStrategy"):
        return lambda _: None
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    return lambda code: frames.set_code_exec_strategy(code, skip)


_skip_code = code_skipper()


def batch_norm() -> Any:
    """The base class of torch's layers for batch normalization."""
    return getattr(torch.nn.modules.batchnorm, "_BatchNorm", torch.nn.BatchNorm1d.__mro__[1])


if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
else:
    BatchNorm = batch_norm()
