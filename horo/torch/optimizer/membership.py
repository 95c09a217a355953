"""An optimizer's relation to the job and to the other optimizers: names that ranks share, common parameters."""

from __future__ import annotations

import copy
import gc
import itertools
import operator
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch

from horo.errors import AbortedError, UsageError
from horo.torch.compat.dynamo import keep_step_hooks
from horo.torch.engine import runtime as _runtime
from horo.torch.engine.operation import refuse_lazy
from horo.torch.ops.process_set import refuse_unregistered
from horo.torch.optimizer.advice import OF_MODEL, OF_OPTIMIZER
from horo.torch.optimizer.parameter_state import ParameterState, ReductionOptions

__all__ = ["HOOK_LOCK", "Membership", "Newer", "forget_all", "members_with", "states_of_all"]

HOOK_LOCK = threading.RLock()  # a signal handler may compute gradients, too
"""Held for what the first hook of a backward does: autograd has a thread for each device that gradients are on."""


class Follower(Protocol):
    """The strategy of an optimizer, as its membership needs it."""

    def hook(self, state: ParameterState) -> None:
        """Called once for each parameter that is found to require grad."""

    def leave_job(self) -> None:
        """Called when the job has ended, or the process set was removed: nothing is in progress any more."""

    def begin_job(self) -> None:
        """Called at the beginning of a job, and when all ranks have joined: ranks know nothing of each other."""

    def forget(self) -> None:
        """Called when gradients were removed, and nothing is in progress: the next backward is the first of a step."""


class Membership:
    """An optimizer's place among the others, and in the job, which may be another one later.

    Names are given when gradients are reduced for the first time in a job, and all ranks do that. So an optimizer that
    only one rank has made or copied or kept from an earlier job does not shift them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        options: ReductionOptions,
        names: dict[torch.Tensor, str],
        owner: str = "DistributedOptimizer",
    ) -> None:
        self.options = options
        self.owner = owner
        """The function of the API that has made it, for messages."""
        self.advice = OF_MODEL if owner == "hvd.distribute" else OF_OPTIMIZER
        self.follower: weakref.ref[Follower] | None = None
        """The strategy, which owns this object; None before that takes it over."""
        self.names = names
        """By parameter, equal on all ranks; those that the user has not named get one from their place."""
        self.hooked: set[torch.Tensor] = set()
        """The parameters that have been seen to require grad."""
        self.optimizer = weakref.ref(optimizer)
        """Its optimizer; None when that is gone."""
        self._process_set = options.process_set
        self._team: int | None = None
        """The id of the process set in the core; None while it is not registered."""
        self.states: dict[torch.Tensor, ParameterState] = {}
        """By parameter."""
        self._adopted: tuple[list[torch.Tensor], list[ParameterState]] = [], []
        """The parameters that the optimizer had when it was looked at last, and their states, in its order."""
        self.order = next(_orders)
        """Its place among all optimizers of this process."""
        self.newer = Newer()
        self.steps = 0
        """The number of steps of the optimizer after gradients were reduced."""
        self._is_in_step = False
        self._runtime: _runtime.Runtime | None = None
        """The runtime of the job that it has taken part in last."""
        self._rounds = 0
        """The number of times that all ranks of the job had joined when it took part last."""
        self.is_alone = False
        """Whether ``size`` is 1, for hooks: they would look it up for each bucket."""
        runtime = _runtime.find()
        self._made_in = None if runtime is None else weakref.ref(runtime)
        """The runtime of the job in which it was made, if any."""
        self._made_after = 0 if runtime is None else runtime.joining.rounds
        """The number of times that all ranks of that job had joined then."""
        self._are_named = False
        """Whether the gradients of all parameters have their names in this job."""
        self.checked = 0
        """The number of parameters, counted from the first, that have been compared over all ranks in this job."""

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes accumulate locally, from the next one on.

        Raises:
            UsageError: ``passes`` is not positive.
        """
        if passes <= 0:
            raise UsageError(f"backward_passes_per_step must be positive, not {passes}")
        self.options.passes = passes
        optimizer: Any = self.optimizer()
        if optimizer is not None:
            optimizer.backward_passes_per_step = passes

    def keep_step_hooks(self) -> None:
        """Called now and then before a step: torch.compile may have been used meanwhile."""
        optimizer = self.optimizer()
        if optimizer is not None:
            keep_step_hooks(optimizer)

    def adopt(self) -> list[ParameterState]:
        """Makes a state for every parameter that the optimizer has by now, and hooks those that require grad.

        Returns:
            The states, in the optimizer's order.
        """
        optimizer = self.optimizer()
        if optimizer is None:
            return []
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        before, states = self._adopted
        is_same = len(parameters) == len(before) and all(map(operator.is_, parameters, before))
        if is_same and len(self.hooked) == len(self.states):
            return states
        states = []
        is_larger = False
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                state = self.states.get(parameter)
                if state is None:
                    name = self.names.get(parameter) or f"allreduce.noname.{number}.{index}"
                    refuse_lazy(parameter, f"{self.owner}: parameter {name!r}")
                    self.names[parameter] = name
                    state = self.states[parameter] = ParameterState(parameter, name)
                    self._are_named, is_larger = False, True
                if parameter.requires_grad and parameter not in self.hooked:
                    self.hooked.add(parameter)
                    if (follower := self._follower()) is not None:
                        follower.hook(state)
                states.append(state)
        if is_larger:
            self.claim_parameters()
        self._adopted = parameters, states
        return states

    def _follower(self) -> Follower | None:
        return None if self.follower is None else self.follower()

    def copy_for(self, optimizer: torch.optim.Optimizer, twins: dict[torch.Tensor, torch.Tensor]) -> Membership:
        """A membership for a copy of the optimizer; ``twins``: its parameters by those of this one."""
        names = {twins[parameter]: name for parameter, name in self.names.items() if parameter in twins}
        return Membership(optimizer, copy.copy(self.options), names)

    def follow_runtime(self, *, forget: bool = False) -> None:
        """Begins anew if the job is another one than before, or the process set was removed and added again: nobody
        waits for the reductions that were in progress there.

        Args:
            forget: Gradients are about to be cleared.

        Raises:
            AbortedError: Gradients were in progress, and are not to be forgotten.
            UsageError: The process set is not registered, and gradients are not to be forgotten.
        """
        runtime = _runtime.find()
        team = self._process_set.team_in(runtime)
        if team is None and runtime is not None and not forget:
            refuse_unregistered(self._process_set, self.owner)
        rounds = 0 if runtime is None else runtime.joining.rounds
        if runtime is self._runtime and team == self._team and rounds == self._rounds:
            return
        with HOOK_LOCK:
            self._follow(runtime, team, rounds, forget=forget)

    def _follow(self, runtime: _runtime.Runtime | None, team: int | None, rounds: int, *, forget: bool) -> None:
        was_pending = any(state.pending is not None for state in self.states.values())
        if runtime is self._runtime and team == self._team:
            if rounds != self._rounds and not was_pending:  # pending reductions were begun before, and are done
                self._begin_anew(rounds)
            return
        if self._runtime is not None and (follower := self._follower()) is not None:
            follower.leave_job()
        self._begin_anew(rounds)
        self._runtime, self._team = runtime, team
        self.is_alone = runtime is not None and team is not None and runtime.teams.size_for(team) == 1
        if runtime is not None:
            runtime.course.find_unused = _find_unused
        if was_pending and not forget:
            raise AbortedError(
                "horo was shut down while gradients were being reduced, so they may be half of this rank and half of "
                "all; call optimizer.zero_grad() and compute them again"
            )

    def begin_step(self) -> None:
        """Called when a reduction for the next step begins."""
        self._is_in_step = True
        if self._runtime is not None:
            self._runtime.course.begin_step(self.steps)

    def end_step(self) -> None:
        """Called at the end of a step."""
        if self._is_in_step:  # else no gradient was reduced for it
            self._is_in_step = False
            self.steps += 1
            runtime = self._runtime
            if runtime is not None:
                runtime.course.end_step(self.steps, self.order)
                if runtime.job.is_searching and self._team == 0:
                    runtime.inside("optimizer.step()", lambda: runtime.job.end_step(self.order))

    def settle_join(self) -> None:
        """Ends, before gradients are submitted, a join that an exception has left, if all ranks have joined by now.

        The submission would do that, too, but then gradients would have names of before the end of the round.

        Raises:
            UsageError: This rank has joined, and others have not.
        """
        runtime = _runtime.find()
        if runtime is None or not runtime.is_joining:
            return
        team = self._process_set.team_in(runtime)
        if team is not None and runtime.teams.size_for(team) == 1:  # nothing will be submitted
            runtime.joining.settle()
        else:
            runtime.joining.settle_before(f"the gradients of {self.owner}")

    def _begin_anew(self, rounds: int) -> None:
        """Forgets all comparisons of ranks, since some of them may have been in another job, or joined."""
        self.checked = 0
        self._are_named = False
        for state in self.states.values():
            state.forget()
        self._rounds = rounds
        if (follower := self._follower()) is not None:
            follower.begin_job()

    @property
    def has_unchecked(self) -> bool:
        """Whether it has parameters that have not been compared over all ranks in this job."""
        return self.checked < len(self.states)

    def unchecked(self) -> list[ParameterState]:
        """The parameters that have not been compared."""
        return list(self.states.values())[self.checked :]

    def note_checked(self) -> None:
        """Notes that all parameters are being compared."""
        self.checked = len(self.states)

    @property
    def has_joined(self) -> bool:
        """Whether ranks have joined in this job since it was made, so that some may have missed steps of others."""
        is_job_of_making = self._made_in is not None and self._made_in() is self._runtime
        return self._rounds > (self._made_after if is_job_of_making else 0)

    @property
    def team(self) -> int:
        """The id of the process set in the core.

        Raises:
            UsageError: It is not registered.
        """
        if self._team is None:
            refuse_unregistered(self._process_set, self.owner)
        return self._team

    @property
    def is_registered(self) -> bool:
        """Whether its process set was registered when it was used last."""
        return self._team is not None

    @property
    def size(self) -> int:
        """The number of ranks that take part; 1 on a rank that is no member of the process set.

        Raises:
            NotInitializedError: There is no job.
            UsageError: The process set is not registered.
        """
        return _runtime.current().teams.size_for(self.team)

    def name_gradients(self) -> None:
        """Gives all gradients their names in this job."""
        if self._are_named:
            return
        runtime = _runtime.current()
        with HOOK_LOCK:
            for state in self.states.values():
                if state.kind is None:
                    state.kind = runtime.gradient_kind(state.name, self.team)
            runtime.request_cache.make_room(self, len(self.states))
            self._are_named = True

    def may_submit(self) -> bool:
        """Whether hooks may submit gradients: names are given, or can be whatever the order of the hooks is."""
        runtime = _runtime.current()
        if runtime.is_joining:  # the names may be those of before the join
            return False
        if runtime.job.settings.get("check_nan", False):  # all gradients are looked at first
            return False
        if self._are_named:
            return True
        if self._is_ambiguous(runtime):
            return False
        self.name_gradients()
        return True

    def claim_parameters(self) -> None:
        """Adds this one to the newer ones of each older one that has a common parameter, or the other way round."""
        own = self.states.keys()
        for other in list(_members):
            if other is not self and not own.isdisjoint(other.states):
                older, newer = sorted((self, other), key=lambda item: item.order)
                older.newer.add(newer)
        _members.add(self)

    def names_to_come(self, runtime: _runtime.Runtime) -> set[str]:
        """The names that its gradients have still to get in the job of ``runtime``, each unique in its process set."""
        return {state.name for state in self.states.values() if state.kind is None or self._runtime is not runtime}

    @property
    def label(self) -> str:
        """The prefix of the names of its other operations."""
        self.name_gradients()
        first = min(self.states.values(), key=lambda state: state.name)  # ranks may have other orders
        return f"{first.kind}.{first.name}"

    def _is_ambiguous(self, runtime: _runtime.Runtime) -> bool:
        """Whether another optimizer has no names yet in this job, but will have some that this one has.

        Then the order of the first hook calls must not decide which gets which: ranks may differ in it. An optimizer
        that is garbage gets none, and is collected first.
        """
        if not self._shares_names_to_come(runtime):
            return False
        gc.collect()
        return self._shares_names_to_come(runtime)

    def _shares_names_to_come(self, runtime: _runtime.Runtime) -> bool:
        names = {state.name for state in self.states.values()}
        others = (other for other in list(_members) if other is not self and other._process_set is self._process_set)
        return any(not names.isdisjoint(other.names_to_come(runtime)) for other in others)


class Newer:
    """The optimizers that have come after another one and have a parameter in common with it.

    Only one can average a gradient, and it is the newest, so that a script may make its optimizer again while the
    variable still holds the last one. The older ones come back when the newer are gone.
    """

    def __init__(self) -> None:
        self._found: list[weakref.ref[Membership]] = []
        self._is_swept = True

    def add(self, member: Membership) -> None:
        """Adds one, unless it is there."""
        if all(reference() is not member for reference in self._found):
            self._found.append(weakref.ref(member))
            self._is_swept = False

    def any(self) -> bool:
        """Whether one is alive. Garbage is collected first, once."""
        if not self._found:
            return False
        if not self._is_swept:
            self._is_swept = True
            gc.collect()
        self._found = [reference for reference in self._found if reference() is not None]
        return bool(self._found)

    def refuse(self, own: Membership, what: str) -> None:
        """Refuses a call of the optimizer that has a newer one beside it.

        Raises:
            UsageError: A newer one is alive.
        """
        self._is_swept = False
        if not self.any():
            return
        others = [other for reference in self._found if (other := reference()) is not None]
        common = next(
            state.name for other in others for parameter, state in own.states.items() if parameter in other.states
        )
        raise UsageError(
            f"{what}: parameter {common!r} is also in a DistributedOptimizer that was made later, and only that one "
            "averages its gradient; give each parameter to one DistributedOptimizer, or delete the later one first. "
            "A plain torch optimizer over the same parameters finds gradients averaged when backward() returns"
        )


def states_of_all() -> Iterator[ParameterState]:
    """The parameters of all optimizers of this process."""
    for member in list(_members):
        yield from member.states.values()


def members_with(parameters: Iterable[torch.Tensor]) -> Iterator[tuple[Membership, str]]:
    """Each optimizer or model that averages the gradient of one of these parameters already, and the name of that."""
    wanted = list(parameters)
    for member in list(_members):
        common = next((parameter for parameter in wanted if parameter in member.states), None)
        if common is not None:
            yield member, member.states[common].name


def _find_unused() -> list[str]:
    return sorted({state.name for state in states_of_all() if state.was_unused and state.parameter.requires_grad})


def forget_all() -> None:
    """Clears the optimizers of this process, their gradients too, after a step that was broken off.

    The job is another one than that of the step.
    """
    for member in list(_members):
        member.follow_runtime(forget=True)
        for parameter in member.states:
            parameter.grad = None
        if (follower := member._follower()) is not None:
            follower.forget()


_members: weakref.WeakSet[Membership] = weakref.WeakSet()
_orders = itertools.count()
