"""The comparisons over all ranks that one optimizer makes beside the reductions of its gradients."""

from __future__ import annotations

import gc
import warnings
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from horo.errors import HoroError, MismatchError, UsageError
from horo.horovod import is_installed
from horo.torch.engine import runtime as _runtime
from horo.torch.engine.request import Request
from horo.torch.functions.objects import gather_objects
from horo.torch.ops.process_set import ProcessSet, global_process_set, resolve_process_set
from horo.torch.optimizer.comparison import Comparison, checksum, options_of
from horo.torch.optimizer.first_gradients import FirstGradients, warn_of_equal
from horo.torch.optimizer.membership import Membership
from horo.torch.optimizer.parameter_state import ParameterState
from horo.torch.optimizer.step_inputs import InputsCheck, StepInputs, scaler_of_step
from horo.torch.optimizer.unused_parameters import UsageCheck

__all__ = ["Consistency", "check_first", "check_state", "refuse_ddp", "refuse_ddp_model"]

_FIRST_COMPARED = 8
"""The first step whose inputs are compared."""
_MOST_BETWEEN = 128
"""The most steps from one whose inputs are looked at to the next."""
_PARAMETER = "parameter "
_STATE = "state "
_SCALER = "scaler"
_NAMES = ""
"""Sorts before all others, so that it stands at the same place on ranks that have different names."""


class _Running(NamedTuple):
    """The comparisons beside the reduction in progress."""

    first: FirstCheck | None = None
    usage: UsageCheck | None = None
    inputs: InputsCheck | None = None
    samples: Request | None = None


class Consistency:
    """Parameters and samples in the first steps, the use of parameters, the inputs of steps."""

    def __init__(self) -> None:
        self._running = _Running()
        self._scaler: weakref.ref[Any] | None = None
        """The GradScaler that has called ``step``."""
        self._inputs: StepInputs | None = None
        """The inputs of the last step, where the next reduction compares them over all ranks."""
        self._steps_before, self._next_look = 0, 1
        self.first_gradients: FirstGradients | None = None
        """The gradients of the first steps in this job; None after them, and where they are not compared."""

    def begin_job(self, steps: int) -> None:
        """Called at the beginning of a job, and when all ranks have joined, after so many steps of the optimizer."""
        self._steps_before, self._next_look, self._inputs = steps, 1, None
        self.first_gradients = FirstGradients() if _runtime.find() is not None and compares_first() else None

    def forget(self) -> None:
        """Drops the comparisons in progress: nobody waits for them."""
        self._running = _Running()

    def begin(self, member: Membership, due: Sequence[ParameterState]) -> Request | None:
        """Begins what is to be compared beside a reduction, behind its gradients; returns the last request.

        Args:
            member: That of the optimizer.
            due: The parameters of the reduction.
        """
        varying = [state for state in due if state.varies]
        inputs, self._inputs = self._inputs, None
        running = self._running = _Running(
            check_first(member, scaler=self._scaler and self._scaler()) if due and member.size > 1 else None,
            UsageCheck(member.label, member.team, varying) if varying else None,
            None
            if inputs is None or member.size == 1
            else InputsCheck(member.label, inputs, member.options.process_set),
            self._compare_samples(member),
        )
        member.note_checked()
        requests = [check.request for check in running[:3] if check is not None]
        return running.samples or (requests[-1] if requests else None)

    def finish(self, member: Membership, gradients: Iterator[Request]) -> Iterator[Request]:
        """Waits for gradients and for what is compared beside them; then raises the first failure.

        Args:
            member: That of the optimizer.
            gradients: Waits for them when it is iterated over.

        Yields:
            Each request before it waits for it.

        Raises:
            UsageError: Ranks train different parameters. Gradients that only some have would never come.
        """
        running, self._running = self._running, _Running()
        if running.first is not None:
            yield running.first.request
            running.first.wait()
        failure: HoroError | None = None
        try:
            yield from gradients
        except HoroError as error:
            failure = error
        if running.usage is not None:
            yield running.usage.request
            running.usage.finish()
        if running.samples is not None:
            yield running.samples
            runtime = _runtime.current()
            warn_of_equal(running.samples.wait()[0], runtime.teams.find(member.team).ranks, runtime.job.rank)
        try:  # also after a failure, which only this rank may have
            if running.inputs is not None:
                yield running.inputs.request
                running.inputs.finish()
            if running.first is not None:
                running.first.refuse_different_values()
        except HoroError as error:
            failure = failure or error
        if failure is not None:
            raise failure

    def look_at_step(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Finds the GradScaler that calls the step in progress, and has the next reduction compare what it steps by.

        That of the 1st, 2nd, 4th, ..., then of each 128th step in this job. It compares nothing in the first ones, so
        that short measurements of a step are not of this.
        """
        number = step - self._steps_before
        if number < self._next_look:
            return
        self._next_look += min(number, _MOST_BETWEEN)
        scaler = scaler_of_step()
        self._scaler = None if scaler is None else weakref.ref(scaler)
        if number >= _FIRST_COMPARED:
            self._inputs = StepInputs(scaler, optimizer)

    def _compare_samples(self, member: Membership) -> Request | None:
        """Begins to compare the gradients of the first steps when all of them are there."""
        first = self.first_gradients
        if first is None or member.size == 1:
            return None
        first.end_step()
        if not first.is_done:
            return None
        self.first_gradients = None
        return first.compare(member.label, member.team)


def check_first(member: Membership, *, has_own_state: bool = False, scaler: Any = None) -> FirstCheck | None:
    """Begins to compare the parameters that have not been compared in this job; None: there are none.

    Args:
        member: Has them.
        has_own_state: As for ``FirstCheck``.
        scaler: The GradScaler that has called the optimizer's ``step`` before.
    """
    optimizer = member.optimizer()
    if not member.has_unchecked or optimizer is None or not compares_first():
        return None
    return FirstCheck(
        member.label,
        member.unchecked(),
        optimizer,
        member.options.process_set,
        has_own_state=has_own_state,
        is_after_join=member.has_joined,
        scaler=StepInputs(scaler),
    )


def check_state(member: Membership, optimizer: torch.optim.Optimizer) -> None:
    """Compares the state and the options of an optimizer that steps the parameters of a distributed model.

    Raises:
        UsageError: They are not equal on all ranks.
    """
    if member.size == 1 or not compares_first():
        return
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    states = [state for parameter, state in member.states.items() if parameter in own]
    check = FirstCheck(member.label, states, optimizer, member.options.process_set, is_after_join=member.has_joined)
    check.wait()
    check.refuse_different_values()


def compares_first() -> bool:
    """Whether ranks compare their parameters and first gradients; equal on all ranks."""
    return bool(_runtime.current().job.settings.get("first_checks", True))


class FirstCheck:
    """Compares parameters, and the optimizer's state of each, over all ranks, in one small allreduce.

    Ranks that start from different ones stay apart for ever, since they add the same gradients to them. Frozen
    parameters are compared too: ranks would compute the gradients of different models.
    """

    def __init__(
        self,
        label: str,
        states: Sequence[ParameterState],
        optimizer: torch.optim.Optimizer,
        process_set: ProcessSet,
        *,
        has_own_state: bool = False,
        is_after_join: bool = False,
        scaler: StepInputs | None = None,
    ) -> None:
        """Begins the comparison.

        Args:
            label: What the name of the operation begins with.
            states: The parameters.
            optimizer: Has them, and its options and state of them.
            process_set: The ranks that take part.
            has_own_state: The optimizer's state of a parameter may differ between ranks, as each steps by itself.
            is_after_join: Ranks have joined before. As in Horovod, they may go on with different ones: it is a warning.
            scaler: The state of the GradScaler that has called the optimizer's ``step`` before.
        """
        self._is_after_join = is_after_join
        self._label = label
        self._process_set = process_set
        self._is_trained = {state.name: state.parameter.requires_grad for state in states}
        self._group_count = len(optimizer.param_groups)
        self._parameters = {f"{_PARAMETER}{state.name}": checksum(state.parameter) for state in states}
        optimizer_states = {
            f"{_STATE}{state.name}": checksum(_there(optimizer.state.get(state.parameter, {})))
            for state in ([] if has_own_state else states)
        }
        options = [{key: group[key] for key in optimizer.defaults if key in group} for group in optimizer.param_groups]
        names = {_NAMES: zlib.crc32(repr(sorted(self._is_trained.items())).encode())}
        values = names | self._parameters | optimizer_states | options_of(options)
        self._scaler = scaler or StepInputs(None)
        values[_SCALER] = self._scaler.checksum
        team = resolve_process_set(process_set, "DistributedOptimizer")
        self._comparison = Comparison(f"{label}.check", "parameters", values, team)
        self._different: list[str] = []
        self.request = self._comparison.request

    def wait(self) -> None:
        """Waits for the comparison.

        Raises:
            UsageError: Ranks have different sets of parameters; the sentence names the first difference.
        """
        try:
            self._different = self._comparison.finish()
        except MismatchError:  # other numbers of values
            self._different = [_NAMES]
        if _NAMES in self._different:
            self._refuse_different_sets()

    def refuse_different_values(self) -> None:
        """Raises or warns if the comparison has found a difference.

        Under Horovod's names it is a warning: Horovod lets ranks start from different parameters.

        Raises:
            UsageError: Ranks have different parameters, state or options, or their GradScalers have; the sentence
                names the first.
        """
        if _SCALER in self._different:
            self._different.remove(_SCALER)
            self._scaler.refuse(self._label, self._process_set)
        if self._different and self._is_after_join:
            warnings.warn(
                f"{self._different[0]!r} is not equal on all ranks after join(): ranks that joined early have missed "
                "steps of the others; call hvd.broadcast_parameters(model.state_dict(), last) and "
                "hvd.broadcast_optimizer_state(optimizer, last) with last = hvd.join(), the rank that joined last",
                stacklevel=2,
            )
            return
        if not self._different:
            return
        if not is_installed():
            raise UsageError(self._first_difference())
        warnings.warn(self._first_difference(), stacklevel=2)

    def _first_difference(self) -> str:
        """The first difference, and the call that removes it."""
        parameters = [name for name in self._different if name in self._parameters]
        if parameters:
            return (
                f"parameter {parameters[0].removeprefix(_PARAMETER)!r} is not equal on all ranks before the first step "
                f"({len(parameters)} of {len(self._parameters)} parameters are not); call "
                f"hvd.broadcast_parameters(model.state_dict(), {self._root()}) before training begins"
            )
        what = self._different[0]
        if what.startswith(_STATE):
            what = f"the optimizer's state of parameter {what.removeprefix(_STATE)!r}"
        return (
            f"{what}: not equal on all ranks before the first step, so they would do different steps; call "
            f"hvd.broadcast_optimizer_state(optimizer, {self._root()}) before training begins"
        )

    def _root(self) -> str:
        """The arguments of a broadcast to the ranks that take part."""
        if self._process_set is global_process_set:
            return "root_rank=0"
        return f"root_rank={(self._process_set.ranks or [0])[0]}, process_set=..."

    def _refuse_different_sets(self) -> NoReturn:
        own = self._is_trained, self._group_count
        everyone = gather_objects(own, f"{self._label}.check.names", self._process_set)
        first = next(iter(everyone))
        for rank, theirs in everyone.items():
            difference = _difference(everyone[first], theirs, first, rank)
            if difference:
                break
        raise UsageError(f"{difference}; make the same model and optimizer on all ranks, and freeze them alike")


def _there(state: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a parameter's state that are not None: SGD of torch 2.1 and 2.2 stores None for no momentum."""
    return {name: value for name, value in state.items() if value is not None}


def _difference(ours: tuple[dict[str, bool], int], theirs: tuple[dict[str, bool], int], first: int, rank: int) -> str:
    """The first difference between the optimizers of two ranks; empty if there is none.

    Args:
        ours: Of the rank ``first``: by name of a parameter, whether it requires grad; the number of parameter groups.
        theirs: Of the other rank, ``rank``.
    """
    words = {None: "not in the optimizer", True: "trained", False: "frozen"}
    for name in sorted(ours[0].keys() | theirs[0].keys()):
        here, there = ours[0].get(name), theirs[0].get(name)
        if here is not there:
            return f"parameter {name!r} is {words[here]} on rank {first}, but {words[there]} on rank {rank}"
    if ours[1] != theirs[1]:
        return f"the optimizer has {ours[1]} parameter groups on rank {first}, but {theirs[1]} on rank {rank}"
    return ""


def refuse_ddp_model(model: torch.nn.Module) -> None:
    """Refuses a model that averages its gradients itself.

    Raises:
        UsageError: It is a ``DistributedDataParallel``, or has one inside.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            raise _refusal("the model")


def refuse_ddp(states: Iterable[ParameterState]) -> None:
    """Refuses parameters of which a ``DistributedDataParallel`` anywhere in this process averages the gradients.

    Raises:
        UsageError: There is one.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return  # there can be none, and the search takes a while
    names = {state.parameter: state.name for state in states}
    for found in gc.get_objects():
        if issubclass(type(found), torch.nn.parallel.DistributedDataParallel):
            for parameter in found.parameters():
                if parameter in names:
                    raise _refusal(f"parameter {names[parameter]!r}")


def _refusal(what: str) -> UsageError:
    return UsageError(
        f"{what} is wrapped in DistributedDataParallel, which averages gradients itself; with DistributedOptimizer or "
        "distribute leave the model unwrapped, or use DistributedDataParallel and the plain optimizer"
    )
