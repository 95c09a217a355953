"""The members of the next generation of an elastic job, as a part of its driver, and the changes that lead to it."""

from __future__ import annotations

from horo.bootstrap.generations import Change
from horo.runner.elastic.hosts import rank_order, stays
from horo.runner.elastic.state import DriverState, Reach, Standing, Worker

__all__ = ["awaited", "changes_of", "may_come", "next_members"]


def next_members(state: DriverState) -> list[Worker]:
    """The workers that can be seated, by rank. One that is to leave is among them if no other one has the state."""
    ready = sorted(_ready(state), key=lambda worker: (not worker.has_state, worker.number))
    most = state.limits.max_size
    chosen = [worker for worker in ready if stays(state, worker)][:most]
    carriers = [worker for worker in ready if worker.has_state and not stays(state, worker)]
    if chosen and carriers and not any(worker.has_state for worker in chosen):
        chosen = [*carriers[:1], *chosen[: max(1, most - 1)]]
    return rank_order(chosen)


def awaited(state: DriverState) -> list[Worker]:
    """The new workers for which others wait in their generation, instead of going on until these are ready."""
    if state.limits.join != "now" or state.generation == 0:
        return []
    return [each for each in state.workers.values() if may_come(state, each) and each.slot not in state.slots]


def may_come(state: DriverState, worker: Worker) -> bool:
    """Whether the worker is about to be ready, as far as one can expect."""
    in_time = state.now_s < worker.started_s + state.limits.start_timeout_s
    return worker.standing is Standing.COMING and in_time and stays(state, worker)


def changes_of(state: DriverState, *, can_grow: bool) -> Change:
    """The change of a generation at work for which its members are to leave it."""
    if state.leaves_s is not None:
        return Change(leave=True)
    members = [state.workers[number] for number in state.members if number in state.workers]
    staying = [worker for worker in members if stays(state, worker)]
    newcomers = [worker for worker in _ready(state) if stays(state, worker)]
    is_enough = len(staying) + len(newcomers) >= state.limits.min_size
    can_grow = can_grow and len(staying) < state.limits.max_size
    added = can_grow and bool((newcomers and is_enough) or awaited(state))
    if len(staying) == len(members):
        return Change(added)
    may_grow = any(may_come(state, each) for each in state.workers.values()) or any(
        host.reach is Reach.COMING for host in state.hosts.values()
    )
    if staying:  # others have the state, and there are enough of them or no more to come
        removed = any(worker.has_state for worker in staying) and (is_enough or not may_grow)
    else:
        removed = not newcomers and not may_grow
    return Change(added, removed)


def _ready(state: DriverState) -> list[Worker]:
    return [worker for worker in state.workers.values() if worker.standing is Standing.READY]
