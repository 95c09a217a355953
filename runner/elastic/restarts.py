"""Restarts after errors of the script, and of all ranks from memory, as a part of the driver of an elastic job."""

from __future__ import annotations

import re
from dataclasses import replace

from horo.runner.elastic.hosts import free_slots, free_time_s, open_slots
from horo.runner.elastic.state import Phase, Restart, Standing, Worker
from horo.runner.elastic.turn import Turn

__all__ = ["RestartTurn"]

_RESTARTS = 3
"""A script that fails alike so many times in a row, when ranks have gone on from memory, is not tried again."""
_GENERATIONS = 5
"""Nor one that has ended so many generations alike without a commit in between."""


class RestartTurn(Turn):
    """The part of one step that decides whether, and from which commit, others go on."""

    def _why_not_from_memory(self) -> str | None:
        """The reason why the next workers of slots do not go on from what was learnt; None: they do.

        They do not if that has led to no commit before, or several times to the same error and hardly a commit.
        """
        state = self.state
        latest = max(state.kept.values(), default=-1)
        last = state.restart
        is_over = state.phase is not Phase.SHORT and (latest <= last.commit or self._is_at_reset_limit())
        if is_over or not state.kept:
            return "no rank is left that has the state of the training" if self.workers else ""
        if latest > last.commit:
            error = _without_numbers(state.error)
            is_stuck = latest - last.commit <= state.generation - last.generation  # newcomers come in at a commit
            is_alike = is_stuck and error != "" and error == last.error
            state.restart = Restart(latest, state.generation, error, last.alike + 1 if is_alike else 0)
            if state.restart.alike == _RESTARTS:
                return (
                    f"{_RESTARTS} times in a row, ranks that went on from the last commit {state.error}, and no "
                    "generation of them came further than one commit: mend the script"
                )
            self._report(f"no rank is left: others go on from commit {latest}")
        return None

    def _why_not_again(self) -> str:
        """The reason why the job ends: the script has ended several generations alike, without a commit in between.

        Empty: it goes on, also where the user has set another limit.
        """
        state, last = self.state, self.state.failing
        if state.error and last.generation != state.generation:
            error = _without_numbers(state.error)
            is_alike = error == last.error and state.committed == last.commit
            state.failing = Restart(state.committed, state.generation, error, last.alike + 1 if is_alike else 1)
        if state.limits.reset_limit is None and state.failing.alike >= _GENERATIONS:
            return (
                f"{_GENERATIONS} generations in a row ended since a rank {state.error}, without a commit in between: "
                "mend the script, or set another limit with --reset-limit"
            )
        return ""

    def _has_state(self, ready: list[Worker]) -> bool:
        """Whether workers have the state, or the latest commit in memory; in the end, any commit there."""
        state = self.state
        if not state.has_learnt or any(worker.has_state for worker in ready):
            return True
        own = max((state.kept[worker.slot] for worker in ready if worker.slot in state.kept), default=-1)
        is_late = state.phase is Phase.SHORT and self._now_s >= state.since_s + state.limits.elastic_timeout_s
        latest = max(state.kept.values(), default=0)
        if own < latest and (own < 0 or not is_late):
            self._make_room_for(latest)
            return False
        if own < state.restart.commit:
            self._report(f"the slot with commit {state.restart.commit} has no worker: others go on from commit {own}")
            state.restart = replace(state.restart, commit=own)
            state.kept = {slot: number for slot, number in state.kept.items() if number <= own}
            state.committed, state.failing = own, Restart()
        return True

    def _make_room_for(self, latest: int) -> None:
        """Ends workers that fill the job while the slot with the latest commit has none, such as on a host that was not
        found for a time."""
        state = self.state
        youngest = [each for each in self.workers.values() if each.standing in (Standing.COMING, Standing.READY)]
        if any(state.kept.get(each.slot) == latest for each in youngest):
            return  # one that goes on from it is about to come
        is_open = any(
            state.kept.get(slot) == latest and free_time_s(state, slot) <= self._now_s for slot in open_slots(state)
        )
        while is_open and youngest and not free_slots(state):
            self._dismiss(youngest.pop(), f"its place is for one that goes on from commit {latest}")


def _without_numbers(error: str) -> str:
    """The words of an error. Numbers in them differ from time to time."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", error)
