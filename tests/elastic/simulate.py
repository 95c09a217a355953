"""Elastic jobs on virtual time: the driver, with workers and agents as state machines, and faults anywhere.

``python tests/elastic/simulate.py --schedules 100000 --seed 1`` runs random schedules of deaths, hung workers, lost
hosts, cut links and lost, late and doubled messages. In each of them, no two generations are at work at once, and the
job ends in bounded time.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from simulated_hosts import Machines

from horo.bootstrap.generations import Change
from horo.runner.config import Elastic
from horo.runner.elastic.driver import begin, deadline_s, step
from horo.runner.elastic.state import (
    Action,
    Announce,
    Committed,
    Connect,
    Disconnect,
    Dismiss,
    Done,
    DriverState,
    ElasticEvent,
    Ended,
    Fail,
    Finish,
    Kill,
    Leave,
    Phase,
    Reach,
    Ready,
    Refused,
    Slot,
    StartWorker,
    Tick,
    Waits,
    Within,
    WriteSeats,
)

STEP_S = 0.5
BOUND_S = 3000.0
"""Of virtual time: longer than all deadlines and all work together."""


@dataclass
class Process:
    """The process of a worker. ``mode``: importing, waiting, forming, working, done, or dead."""

    worker: int
    slot: Slot
    mode: str = "importing"
    seats: list[int] = field(default_factory=list)
    taken: int = 0
    generation: int = 0
    is_hung: bool = False
    steps: int = 0
    """Those that it has taken in its generation."""
    commit: int | None = None
    """The last commit that it has made, or got from others, or found in its slot; None: it has no state."""
    is_synced: bool = False
    """It has had the state of the others."""


class Simulation:
    """One schedule."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        size = self.random.randint(1, 4)
        count = self.random.choice([1, 1, 2, 3])
        self.limits = Elastic(
            size,
            self.random.randint(1, size),
            size + self.random.randint(0, 2),
            self.random.choice([None, None, 0, 2]),
            elastic_timeout_s=100.0,
            start_timeout_s=40.0,
            gather_timeout_s=20.0,
            script="s" if count > 1 and self.random.random() < 0.7 else "",
            cooldown_s=(2.0, 30.0),
            on_failure=self.random.choice(["slot", "host"]),
            join=self.random.choice(["ready", "now"]),
            keeps=self.random.random() < 0.5,
        )
        self.is_lossy = self.random.random() < 0.5
        self.now_s = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.queued = 0
        self.processes: dict[int, Process] = {}
        self.members: dict[int, tuple[int, ...]] = {}
        self.failed: set[int] = set()
        self.left: set[tuple[int, int]] = set()
        self.announced: dict[int, Change] = {}
        self.memories: dict[Slot, int] = {}
        """The commit in the memory of a slot, which outlives its workers, in a job that has such."""
        self.has_memories = self.random.random() < 0.5
        self.restored = -1
        """The commit from which the job has gone on when all ranks had failed."""
        self.commit_every = self.random.choice([1, 1, 1, 90])
        self.steps_left = self.random.randint(5, 60) if self.commit_every == 1 else self.random.randint(100, 250)
        self.steps = self.steps_left
        self.faults = self.random.choice([0, 1, 2, 5, 10])
        self.mistake = self.random.randint(1, self.steps) if self.random.random() < 0.1 else self.steps + 1
        """The step in which the script fails, each time."""
        self.committed = 0
        self.errors: set[int] = set()
        """The generations in which the script has failed since that commit."""
        self.finish: Finish | None = None
        self.ends_well: set[int] = set()
        self.has_trained = False
        """Whether the driver knows of a worker that has begun to train."""
        self.state: DriverState
        self.leaves_s = float("inf")
        self.machines = Machines(self.random, self.later, self.tell, self.end_host, self.come_back)
        for _ in range(count):
            most = self.limits.max_size
            self.machines.add(self.random.randint(1, most) if count > 1 else most + self.random.choice([0, 0, 1, 60]))
        self.machines.is_calm = not self.faults
        self.state, actions = begin(self.limits, self.machines.found(), 0.0, seed=seed)
        self.due_s = deadline_s(self.state)
        self.do(actions)
        first_s, last_s = self.random.choice([(0.0, 60.0), (9.0, 12.0)])
        for _ in range(self.faults):
            fault = self.fault if count == 1 else self.random.choice([self.fault, self.fault_of_host])
            self.later(self.random.uniform(first_s, last_s), fault)
        if self.faults and self.random.random() < 0.05:
            self.later(self.random.uniform(0, 60), self.leave_all)

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Calls ``call`` then."""
        self.queued += 1
        heapq.heappush(self.queue, (self.now_s + delay_s, self.queued, call))

    def run(self) -> None:
        """Runs to the end of the job.

        Raises:
            AssertionError: a promise is broken.
        """
        while self.finish is None:
            due_s = self.due_s
            if due_s is not None and (not self.queue or due_s <= self.queue[0][0]):
                self.now_s = due_s
                self.tell(Tick())
            else:
                assert self.queue, f"nothing happens any more: {self.state}"
                self.now_s, _, call = heapq.heappop(self.queue)
                call()
            assert self.now_s < BOUND_S, f"the job does not end: {self.state}"
            assert self.now_s < self.leaves_s + 1.0 or self.finish, "the job is not over when it has to be"
        assert self.state.phase is Phase.OVER
        room = sum(machine.slots for machine in self.machines.all.values())
        is_calm = not self.faults and not self.is_lossy and self.mistake > self.steps
        if is_calm and room >= self.limits.min_size:
            assert self.finish == Finish(), self.finish
            assert self.ends_well == set(self.state.members)

    # The driver

    def tell(self, event: ElasticEvent) -> None:
        """An event comes to the driver."""
        is_known = isinstance(event, Committed) and event.worker in self.state.workers  # else it comes after its end
        self.has_trained |= is_known
        if isinstance(event, Ended) and event.is_error and event.worker in self.state.members:
            self.errors.add(self.state.generation)
        self.state, actions = step(self.state, event, self.now_s)
        if self.state.now_s >= self.now_s:
            self.due_s = deadline_s(self.state)
            self.do(actions)

    def note(self, process: Process, event: ElasticEvent) -> None:
        """A message of a worker: it may be late, lost or doubled."""
        count = 1
        if self.is_lossy:
            count = self.random.choice([0, 1, 1, 1, 1, 1, 1, 2])
        for _ in range(count):
            late_s = self.random.choice([0.0, 0.01, 5.0, 50.0]) if self.is_lossy else self.random.uniform(0, 0.05)
            self.later(late_s, lambda: self.machines.pass_on(process.slot.host, lambda: self.tell(event)))

    def do(self, actions: list[Action]) -> None:
        """Carries out what the driver asks for."""
        for action in actions:
            if isinstance(action, Connect):
                self.machines.connect(action.host)
            elif isinstance(action, Disconnect):
                self.machines.disconnect(action.host)
            elif isinstance(action, StartWorker):
                self.start(action)
            elif isinstance(action, WriteSeats):
                self.check_seats(action)
                self.members[action.generation] = action.workers
                for worker in action.workers:
                    self.processes[worker].seats.append(action.generation)
                    self.take_seat(self.processes[worker])
            elif isinstance(action, Fail):
                self.failed.add(action.generation)
            elif isinstance(action, Announce):
                self.announced[action.generation] = action.change
            elif isinstance(action, (Kill, Dismiss)):
                process = self.processes[action.worker]
                self.check_end(action, process)
                self.machines.pass_on(process.slot.host, lambda process=process: self.end(process, True))
            elif isinstance(action, Finish):
                self.check_finish(action)
                self.finish = action

    def start(self, action: StartWorker) -> None:
        """A process is started, if the agent still is."""
        assert action.worker not in self.processes, "a number is used twice"
        in_slot = [each for each in self.living() if each.slot == action.slot]
        assert not in_slot, f"two workers have the slot {action.slot}"
        self.processes[action.worker] = process = Process(action.worker, action.slot, "dead")

        def run() -> None:
            if self.faults and self.random.random() < 0.02:
                refused = Refused(action.worker, "no", 127)
                self.later(0.01, lambda: self.machines.pass_on(action.slot.host, lambda: self.tell(refused)))
                return
            process.mode, process.commit = "importing", self.memories.get(action.slot)
            self.later(self.random.uniform(0.1, 8.0), lambda: self.come(process))

        self.machines.pass_on(action.slot.host, run)

    def check_seats(self, action: WriteSeats) -> None:
        """The members of a new generation are enough, and nobody is at work any more."""
        hosts = [self.processes[worker].slot.host for worker in action.workers]
        carries = any(not self.is_usable(self.processes[worker].slot) for worker in action.workers)
        assert self.limits.min_size <= len(action.workers) <= max(self.limits.max_size, 2 if carries else 1)
        assert len(set(action.workers)) == len(action.workers)
        changes = sum(first != second for first, second in pairwise(hosts))
        assert changes == len(set(hosts)) - 1, f"ranks of a host do not follow each other: {hosts}"
        if action.generation > 1:
            members = [self.processes[worker] for worker in action.workers]
            commits = [each.commit for each in members if each.commit is not None]
            assert commits or not self.state.has_learnt, f"nobody in generation {action.generation} has the state"
            if not any(each.is_synced for each in members):
                self.check_commit(action.generation, max(commits, default=0))
        at_work = self.at_work()
        assert not at_work, f"generation {action.generation} is seated while {at_work} are at work"

    def at_work(self) -> list[Process]:
        """The workers whose steps may end."""
        at_work = [each for each in self.living() if each.mode in ("working", "done")]
        return [each for each in at_work if not self.is_parted(each) and not self.is_left_behind(each)]

    def is_parted(self, process: Process) -> bool:
        """Whether members of its generation are out of reach, so that its steps do not end."""
        members = [self.processes[worker] for worker in self.members[process.generation]]
        return self.machines.are_parted({each.slot.host for each in members})

    def is_left_behind(self, process: Process) -> bool:
        """Whether its host does not answer, and others have left its generation, so that steps do not end."""
        machine = self.machines.all[process.slot.host]
        return (machine.is_stopped or bool(machine.waiting)) and any(
            (worker, process.generation) in self.left for worker in self.members[process.generation]
        )

    def check_end(self, action: Kill | Dismiss, process: Process) -> None:
        """No worker is killed that trains with all others of its generation."""
        trains = process.mode == "working" and not process.is_hung and not self.is_parted(process)
        if isinstance(action, Kill) and trains and not self.is_lossy and self.is_usable(process.slot):
            is_reached = not self.machines.all[process.slot.host].is_cut
            assert not is_reached or self.is_broken(process.generation) is not None, f"{process} is killed at work"
        if isinstance(action, Dismiss) and action.why.startswith("its place is for"):
            kept = self.state.kept
            assert kept.get(process.slot) != max(kept.values()), (
                f"{process} is to go on from the latest commit, and ends"
            )

    def is_usable(self, slot: Slot) -> bool:
        """Whether the driver may have workers there."""
        host = self.state.hosts.get(slot.host)
        return host is not None and host.is_listed and host.leaves_s is None and slot.number < (host.slots or 0)

    def usable_memories(self) -> list[int]:
        """The commits that the driver can use."""
        kept = self.memories.items()
        return [
            commit for slot, commit in kept if self.is_usable(slot) and self.state.hosts[slot.host].reach is Reach.UP
        ]

    def check_commit(self, generation: int, commit: int) -> None:
        """If all have failed, others go on from the latest commit, or the one before, whose report was on its way."""
        self.restored = commit
        is_learnt = any(each.is_synced for each in self.living())
        if not is_learnt and not self.is_lossy and not self.gives_up_waiting():
            latest = max([commit, *self.usable_memories()])
            assert commit >= latest - 1, f"generation {generation} goes on from commit {commit}, and there is {latest}"

    def check_finish(self, finish: Finish) -> None:
        """The job ends for a reason."""
        if "generations in a row" in finish.reason:
            assert self.limits.reset_limit is None
            assert self.is_lossy or len(self.errors) >= 5, f"it has failed in {self.errors} only"
        elif finish.failed is not None:
            assert not self.has_trained, (
                f"worker {finish.failed} ends the job with an error after the begin of training"
            )
        else:
            self.check_loss(finish)

    def check_loss(self, finish: Finish) -> None:
        """A job whose ranks have all failed does not end while memories have more than they had the last time."""
        is_lost = finish.code is None and not self.ends_well and not finish.reason.startswith("ranks cannot")
        at_limit = self.limits.reset_limit is not None and self.state.generation > self.limits.reset_limit
        if (
            is_lost
            and self.leaves_s == float("inf")
            and not self.is_lossy
            and not at_limit
            and self.state.generation > 0
        ):
            kept = max(self.usable_memories(), default=-1)
            assert kept <= self.restored + 1, f"the job ends, and commit {kept} is kept"

    def gives_up_waiting(self) -> bool:
        """Whether the time is over for which those with the latest commit are awaited."""
        return self.now_s >= self.state.since_s + self.limits.elastic_timeout_s

    def living(self) -> list[Process]:
        """The workers whose processes exist."""
        return [each for each in self.processes.values() if each.mode != "dead"]

    # Workers

    def come(self, process: Process) -> None:
        """The worker has imported all, and waits for a seat."""
        if process.mode == "importing" and not process.is_hung:
            process.mode = "waiting"
            self.ask(process, [Ready(process.worker)])
            self.take_seat(process)

    def ask(self, process: Process, events: list[ElasticEvent]) -> None:
        """The worker reports that it waits, again and again until it has a seat."""
        taken = process.taken

        def report() -> None:
            if process.mode == "waiting" and process.taken == taken and not process.is_hung:
                for event in events:
                    self.note(process, event)
                self.later(10.0, report)

        report()

    def take_seat(self, process: Process) -> None:
        """The worker takes its next seat, if it waits for one and has one."""
        is_cut = self.machines.all[process.slot.host].is_cut
        if process.mode == "waiting" and not process.is_hung and not is_cut and process.taken < len(process.seats):
            process.generation = process.seats[process.taken]
            process.taken += 1
            process.mode = "forming"
            self.later(self.random.uniform(0.01, 1.0), lambda: self.form(process, self.now_s + 40.0))

    def form(self, process: Process, until_s: float) -> None:
        """The worker is in ``init()``: it comes through once all members are there."""
        if process.mode != "forming" or process.is_hung:
            return
        generation = process.generation
        others = [self.processes[worker] for worker in self.members[generation]]
        gone = self.is_broken(generation)
        if generation in self.failed or gone is not None or self.now_s > until_s:
            self.leave(process, gone)
        elif all(other.generation == generation for other in others) and not self.is_parted(process):
            assert all(each.generation == generation for each in self.at_work()), "two generations are at work"
            process.mode, process.steps, process.is_synced = "working", 0, True
            commits = [other.commit for other in others if other.commit is not None]
            process.commit = max(commits, default=0)
            self.note(process, Within(process.worker, generation))
            self.later(STEP_S, lambda: self.work(process, generation))
        else:
            self.later(0.1, lambda: self.form(process, until_s))

    def work(self, process: Process, generation: int) -> None:
        """The worker takes a step, or sees that it cannot."""
        if process.mode != "working" or process.is_hung or process.generation != generation:
            return
        gone = self.is_broken(generation)
        is_cut = self.machines.all[process.slot.host].is_cut
        change = None if is_cut else self.announced.get(generation)
        if gone is not None:
            self.leave(process, gone)
        elif self.is_parted(process):
            self.later(self.random.choice([STEP_S, 5.0]), lambda: self.miss(process, generation))
        elif self.steps_left <= 0 or (change and change.leave):
            process.mode = "done"
            self.ends_well.add(process.worker)
            self.note(process, Done(process.worker, generation, self.steps_left > 0))
            self.later(self.random.choice([0.0, 1.0, 60.0]), lambda: self.end(process, False))
        elif change and (change.added or change.removed) and process.steps % self.commit_every == 0:
            self.leave(process, None)
        elif self.steps - self.steps_left >= self.mistake:
            self.end(process, True, is_error=True)
        else:
            process.steps += 1
            if process.worker == self.members[generation][0]:
                self.steps_left -= 1
            if process.steps % self.commit_every == 0:
                process.commit = self.steps - self.steps_left  # the first one is close to that of the begin, which is 0
                if process.commit > self.committed:
                    self.committed = process.commit
                    self.errors.clear()
                if self.has_memories:
                    self.memories[process.slot] = process.commit
                self.note(process, Committed(process.worker, process.commit, self.has_memories))
            self.later(STEP_S, lambda: self.work(process, generation))

    def miss(self, process: Process, generation: int) -> None:
        """The worker has waited for a member that is out of reach: it may still be so."""
        if self.is_parted(process) and process.mode == "working" and not process.is_hung:
            here = process.slot.host
            others = [each for each in self.members[generation] if self.processes[each].slot.host != here]
            self.leave(process, others[0])
        else:
            self.work(process, generation)

    def is_broken(self, generation: int) -> int | None:
        """A member that has died, hangs or has left; None: there is none."""
        for worker in self.members[generation]:
            process = self.processes[worker]
            has_left = (worker, generation) in self.left
            if has_left or process.is_hung or (process.mode == "dead" and worker not in self.ends_well):
                return worker
        return None

    def leave(self, process: Process, culprit: int | None) -> None:
        """The worker leaves its generation and waits for a seat."""
        generation = process.generation
        self.left.add((process.worker, generation))
        process.mode = "waiting"
        waits = Waits(process.worker, generation, culprit, process.is_synced)
        self.ask(process, [waits, Ready(process.worker)])
        self.take_seat(process)

    def end(self, process: Process, has_failed: bool, is_error: bool = False) -> None:
        """The process ends, and its agent reports that."""
        if process.mode != "dead":
            process.mode = "dead"
            ended = Ended(process.worker, has_failed, "ended", is_error)
            late_s = self.random.uniform(0.01, 0.5)
            self.later(late_s, lambda: self.machines.pass_on(process.slot.host, lambda: self.tell(ended)))

    def end_host(self, name: str) -> None:
        """The agent of a host has ended, with its workers and memories."""
        for process in self.living():
            if process.slot.host == name:
                process.mode = "dead"
        self.memories = {slot: commit for slot, commit in self.memories.items() if slot.host != name}

    def come_back(self, name: str) -> None:
        """The link of a host is there again: its workers see their seats."""
        for process in self.living():
            if process.slot.host == name:
                self.take_seat(process)

    def fault_of_host(self) -> None:
        """Something happens to a host, or to the list of hosts."""
        machines = self.machines
        machine = self.random.choice(list(machines.all.values()))
        faults = [machines.kill_agent, machines.power_off, machines.cut, machines.cut, machines.leave]
        faults.append(machines.stop_agent)
        if self.limits.is_discovered and self.random.random() < 0.4:
            machines.flap()
        else:
            self.random.choice(faults)(machine)

    def leave_all(self) -> None:
        """The job has to end soon."""
        within_s = self.random.choice([0.2, 5.0, 60.0])
        self.leaves_s = self.now_s + within_s
        self.tell(Leave(None, within_s))

    def fault(self) -> None:
        """A random worker is killed, or hangs from now on."""
        alive = self.living()
        if alive:
            process = self.random.choice(alive)
            with_it = [each for each in alive if each.generation == process.generation and not each.is_hung]
            if self.is_lossy and self.ends_well:  # who has seen one hang may be gone, and the message lost
                with_it = [process]
            # Where all hang, outside of horo, nobody can know.
            if self.random.random() < 0.3 and process.mode in ("forming", "working") and with_it != [process]:
                process.is_hung = True
            else:
                self.end(process, True, is_error=self.random.random() < 0.3)


def simulate(seed: int) -> Simulation:
    """Runs the schedule of a seed to its end."""
    simulation = Simulation(seed)
    try:
        simulation.run()
    except AssertionError as error:
        raise AssertionError(f"schedule {seed}: {error}") from error
    return simulation


def main() -> int:
    """Runs schedules and shows how jobs ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    ends: dict[str, int] = {}
    gc.set_threshold(200000)  # each schedule is a cycle
    began_s = time.process_time()
    for seed in range(given.seed, given.seed + given.schedules):
        simulation = simulate(seed)
        finish = simulation.finish
        well = finish == Finish() and simulation.ends_well >= set(simulation.state.members)
        how = "trained to the end" if well else (finish.reason[:40] if finish and finish.reason else "all have failed")
        ends[how] = ends.get(how, 0) + 1
    for how, count in sorted(ends.items(), key=lambda item: -item[1]):
        print(f"{count:8} {how}")
    print(f"{given.schedules / (time.process_time() - began_s):8.0f} schedules per CPU second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
