"""Random schedules over the whole core, ranks as threads, checked by arithmetic: `stress.py [--seed N] [--seconds S]`.

A seed gives who is where, with which options, which operations, teams and joins there are, and whether a rank leaves or
dies. All ranks know the schedule; the order of what they submit at once is their own.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from known_answers import Proposals
from ranks import Group, Links, Rank, describe, rows_of

from horo.core import context as _core
from horo.core.setup import close_all
from horo.errors import AbortedError, HoroError, MismatchError, PeerLostError, UsageError

DTYPES = ["float32", "float32", "float64", "int32", "int64", "uint8", "float16", "complex64", "complex128"]
INTEGERS = {"uint8", "int32", "int64"}
FLOATS = {"float16": 2e-3, "float32": 1e-6, "float64": 1e-14}
"""What the division of an average may lose, as that of WIRES; all else is exact."""
WIRES = {None: 0.0, "float16": 2e-3, "bfloat16": 2e-2}
REDUCERS = {"sum": np.add, "average": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}
GIVES = {"allgather", "alltoall"}
CHANGES = {"add", "remove"}
BUNCH, NAMES = 24, 150


@dataclass
class Operation:
    """One operation as all ranks know it."""

    kind: str
    name: str
    team: int = 0
    members: Sequence[int] = ()
    joined: Sequence[int] = ()
    """Members that have joined by then."""
    salt: int = 0
    dtype: str = "float32"
    wire: str | None = None
    reduce: str = "sum"
    counts: Sequence[int] = (0,)
    root: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    apart: bool = False
    transient: bool = False
    odd: int = -1
    """The rank that does something else: ``how``, or adds or removes the team ``other``."""
    how: str = ""
    other: int = 0
    outcomes: dict[int, str] = field(default_factory=dict)

    @property
    def is_reduction(self) -> bool:
        return self.kind in {"allreduce", "reducescatter"}

    @property
    def active(self) -> list[int]:
        return [rank for rank in self.members if rank not in self.joined]

    @property
    def errors(self) -> set[str]:
        """How it may end, as all have agreed."""
        if self.kind in CHANGES:
            return {"mismatch" if self.odd >= 0 else "ok"}
        reduces_oddly = self.kind == "allreduce" and self.reduce in {"min", "max", "product"} and self.prescale != 1
        impossible = self.kind in {"reducescatter", "alltoall"} or reduces_oddly
        impossible |= self.kind == "broadcast" and self.root in self.joined
        ends = {"mismatch"} if self.joined and impossible else set()
        if self.odd in self.active and self.how == "refused":
            return ends | {"refused"}
        return ends or ({"mismatch"} if self.odd in self.active and len(self.active) > 1 else {"ok"})

    def given(self, rank: int, tensor: int) -> Any:
        """What a rank has: what is common to all plus, times or turned by what is its own."""
        common = (np.arange(self.counts[tensor]) + self.salt + tensor) % 7 - 3 * (self.dtype != "uint8")
        own = random.Random(f"{self.salt} {tensor} {rank}").randrange(5)
        if self.reduce == "adasum":
            return common
        if self.reduce == "product" and self.kind != "broadcast":
            value = 1 + common % 2 if (rank + self.salt) % 8 < 1 else np.ones_like(common)
            return value * 1j**own if self.dtype.startswith("complex") else value
        return common + own

    @functools.cached_property
    def wanted(self) -> list[Any]:
        """Of a reduction, tensor by tensor."""
        results = []
        for tensor in range(len(self.counts)):
            inputs = [self.given(rank, tensor) for rank in self.active]
            total = inputs[0] if self.reduce == "adasum" else functools.reduce(REDUCERS[self.reduce], inputs)
            factor = self.postscale * (self.prescale if self.reduce != "product" else 1.0)
            result = total * factor / (len(self.members) if self.reduce == "average" else 1)
            results.append(np.trunc(result) if self.dtype in INTEGERS else result)
        return results

    def rows(self, origin: int, destination: int) -> int:
        """That a rank has for another one."""
        pair = (origin, destination if self.kind == "alltoall" else 0)
        return random.Random(f"{self.salt} {pair}").randrange(self.counts[0] + 1)

    def block(self, origin: int, destination: int) -> np.ndarray:
        values = (
            np.arange(self.rows(origin, destination) * 3) % 50 + origin + 2 * destination * (self.kind == "alltoall")
        )
        return values.reshape(-1, 3).astype(self.dtype)


class Schedule:
    """What all ranks do."""

    def __init__(
        self,
        seed: int,
        operations: int = 400,
        hosts: int = 4,
        *,
        together: bool = False,
        host_of_rank: Sequence[int] = (),
        **options: Any,
    ) -> None:
        """``host_of_rank`` and ``options`` of ``Group`` are given, or drawn."""
        self.seed, self.left = seed, operations
        chance = self.chance = random.Random(seed)
        common = chance.randrange(1, 6)
        sizes = [common if seed % 2 else chance.randrange(1, 6) for _ in range(chance.randrange(1, hosts + 1))]
        self.host_of_rank = [host for host, size in enumerate(sizes) for _ in range(size)]
        if chance.random() < 0.25:
            chance.shuffle(self.host_of_rank)
        self.host_of_rank = list(host_of_rank) or self.host_of_rank
        self.size = len(self.host_of_rank)
        self.options: dict[str, Any] = {
            "segment_bytes": chance.choice([4096, 8192, 1 << 16, 1 << 18]),
            "fusion_bytes": chance.choice([0, 4096, 1 << 16, 1 << 20, 128 << 20]),
            "direct_bytes": chance.choice([0, 1, 1, 500, 8192]), "cache_capacity": chance.choice([0, 4, 64, 4096]),
            "spin_us": chance.choice([0, 50, 1000]), "cycle_time_us": chance.choice([0, 0, 0, 100, 500]),
            "tuned": chance.choice([None, {}]), **options,
        }  # fmt: skip
        self.joins_in = chance.choice([0, 0, 3, 15])
        self.is_hasty = self.size < 9 and chance.random() < 0.5
        """Ranks report as blocked as soon as a wait lasts a moment: many reports, and of states that pass."""
        apart = self.size > 1 and not together and not self.joins_in
        self.ending = chance.choice(["together", "together", "leaves", "dies"]) if apart else "together"
        self.victim = chance.randrange(self.size) if self.ending != "together" else -1
        self.teams: list[list[int]] = [list(range(self.size))]
        self.bunches: list[list[Operation]] = []
        self.joins: dict[int, tuple[dict[int, int], int]] = {}
        """By team: after which bunch each member joins, and in which one all wait for that."""
        self.joined_after: list[tuple[int, int, int]] = []
        """Rank, bunch, team of each join before the last bunch."""
        self.refused: set[tuple[int, str]] = set()
        """Names of teams that have been refused: a rank that joins drops a refusal that stands behind another."""
        live, churn, most = [], chance.choice([1, 3, 10]), chance.randrange(4)
        while self.left > 0:
            self._bunch(live, churn, most)
        while self.joins:
            self._bunch(live, churn, 0)
        self.bunches.append([self._operation(0, "the last one")])
        self.bunches[-1][0].odd = -1
        bunches = len(self.bunches)
        self.victim_bunch = bunches - 1 - chance.randrange(1 + bunches // 2)

    def __str__(self) -> str:
        end = f"{self.ending}: rank {self.victim} in bunch {self.victim_bunch} of {len(self.bunches)}"
        return f"seed {self.seed}, hosts {self.host_of_rank}, {self.options}, {end}"

    def _bunch(self, live: list[int], churn: int, most: int) -> None:
        chance, number = self.chance, len(self.bunches)
        self._begin_joins(live)
        bunch = [] if self.joins else self._change(live, churn, most)
        ending = [team for team, (_, last) in self.joins.items() if last == number]
        bunch += [Operation("join", f"join {team}.{number}", team, self.teams[team]) for team in ending]
        busy = {*ending, *(team for each in bunch for team in (each.team, each.other) if each.kind in CHANGES and team)}
        usable = [team for team in [0, 0, *live] if team not in busy]
        for _ in range(chance.choice([1, chance.randrange(1, BUNCH)]) if usable else 0):
            team, name = chance.choice(usable), f"layers.{chance.randrange(NAMES)}.weight"
            is_taken = (team, name) in self.refused or any((each.team, each.name) == (team, name) for each in bunch)
            if chance.random() < 0.4 or is_taken:
                name = f"once {number}.{len(bunch)} ".ljust(chance.randrange(140), "n")  # messages of any length
            bunch.append(self._operation(team, name))
            if bunch[-1].how == "refused":
                self.refused.add((team, name))
            if team in self.joins:
                bunch[-1].joined = [rank for rank, after in self.joins[team][0].items() if after < number]
        for team in ending:
            after, last = self.joins.pop(team)
            self.joined_after += [(rank, when, team) for rank, when in after.items() if when < last]
        for each in bunch:
            if each.odd < 0 and each.kind in CHANGES:
                (live.append if each.kind == "add" else live.remove)(each.team)
        self.left -= len(bunch)
        self.bunches.append(bunch)

    def _begin_joins(self, live: list[int]) -> None:
        chance, number = self.chance, len(self.bunches)
        if not self.joins_in or self.left <= 0 or chance.randrange(self.joins_in) > 0:
            return
        for team in chance.choice([[0, *live], [chance.choice([0, *live])]]):
            length = chance.randrange(1, 8)
            after = {rank: number + chance.randrange(length + 1) for rank in self.teams[team]}
            self.joins.setdefault(team, (after, number + length))

    def _change(self, live: list[int], churn: int, most: int) -> list[Operation]:
        """A team goes or comes, or nothing; now and then a rank means another one."""
        chance, number, everyone = self.chance, len(self.bunches), self.teams[0]
        differs = self.size > 1 and chance.random() < 0.25
        if live and chance.randrange(2 * churn) == 0:
            team = chance.choice(live)
            other = next((each for each in live if each != team), team)
            odd = chance.choice(everyone) if differs and other != team else -1
            return [Operation("remove", f"remove {number}", team, everyone, odd=odd, other=other if odd >= 0 else 0)]
        if len(live) >= most or chance.randrange(churn) > 0:
            return []
        self.teams.append(sorted(chance.sample(everyone, chance.randrange(1, self.size + 1))))
        added = Operation("add", f"add {number}", len(self.teams) - 1, everyone)
        if differs:
            one = chance.randrange(self.size)
            self.teams.append(sorted({*self.teams[-1]} ^ {one}) or [(one + 1) % self.size])
            added.odd, added.other = chance.choice(everyone), len(self.teams) - 1
        return [added]

    def _operation(self, team: int, name: str) -> Operation:
        """Under a name that comes again mostly the same."""
        chance = self.chance
        is_once = not name.startswith("layers")
        if not is_once:
            variant = chance.choice([0] * 11 + [1])
            chance = random.Random(f"{self.seed} {team} {name} {variant}")
        members = self.teams[team]
        kinds = ["allreduce"] * 10 + ["reducescatter"] * 3 + ["broadcast", "allgather", "alltoall"] * 2 + ["barrier"]
        kind, dtype = chance.choice(kinds), chance.choice(DTYPES)
        made = Operation(kind, name, team, members, (), chance.randrange(1 << 16), dtype)
        made.apart, made.root = chance.random() < 0.5 or kind == "reducescatter", chance.choice(members)
        made.transient = is_once and chance.random() < 0.5
        most = chance.choice([1, *[17] * 8, *[1500] * 5, 20_000])
        most = most // len(members) + 1 if kind in GIVES else most
        made.counts = [chance.randrange(most) for _ in range(chance.choice([1, 1, 1, 4]) if made.is_reduction else 1)]
        is_complex = dtype.startswith("complex")
        if made.is_reduction:
            made.reduce = "product" if is_complex else chance.choice(["sum", *REDUCERS])
            if kind == "allreduce" and dtype in FLOATS and chance.random() < 0.1:
                made.reduce = "adasum"
            if dtype in {"float32", "float64"} and chance.random() < 0.2:
                made.wire = chance.choice(["float16", "bfloat16"])
            if chance.random() < 0.25 and dtype != "uint8":
                factors = [0.25, 0.5, 2.0] if dtype in FLOATS else [2.0]
                made.prescale = chance.choice(factors) if made.reduce != "product" else 1.0
                made.postscale = chance.choice(factors)
        differs = self.chance.random() < 1 / 30 and len(members) > 1 and kind != "barrier"
        others = [rank for rank in members if rank != self.victim]
        if differs and others:
            hows = ["shape", "refused"] if made.reduce == "adasum" else ["shape", "dtype", "refused"]
            made.odd, made.how = self.chance.choice(others), self.chance.choice(hows)
        return made


class Player:
    """One rank in a schedule."""

    def __init__(self, run: Run, rank: Rank) -> None:
        self.run, self.rank, self.me = run, rank, rank.rank
        self.chance = random.Random(f"{run.schedule.seed} {self.me}")
        self.ids = {0: 0}
        self.joins: dict[int, int] = {}
        self.kept: list[Any] = []
        run.kept.append(self.kept)

    def play(self) -> None:
        schedule, ends = self.run.schedule, 0
        for number, bunch in enumerate(schedule.bunches):
            goes = self.me == schedule.victim and number == schedule.victim_bunch
            there = [each for each in bunch if each.kind == "add" or each.team in self.ids]
            mine = [each for each in there if self.me in each.members and self.me not in each.joined]
            self.chance.shuffle(mine)
            if goes:
                mine = [each for each in mine if each.kind not in {"add", "remove", "join"}]
                mine = mine[: self.chance.randrange(len(mine) + 1)]
            begun = [(each, self.begin(each, len(mine) == 1 and not goes)) for each in mine]
            if goes:
                self.run.end()
                return
            self.chance.shuffle(begun)
            joins_at = self.chance.choice([0, len(begun)])  # with all of the bunch pending, or none
            for place, (operation, handle) in enumerate([*begun, (None, None)]):
                if place == joins_at:
                    self.join_after(number)
                if operation is not None:
                    outcome = operation.outcomes[self.me] = self.finish(operation, handle)
                    self.run.judge(operation, outcome, self.me)
            ends += ends > 0 or any(operation.outcomes[self.me] == "ended" for operation, _ in begun)
            if ends > 2:
                return

    def join_after(self, number: int) -> None:
        for rank, bunch, team in self.run.schedule.joined_after:
            if (rank, bunch) == (self.me, number):
                self.joins[team] = self.rank.context.start_join(self.ids[team])

    def begin(self, operation: Operation, is_lone: bool) -> Any:
        """A handle with what its result is checked by, or the error."""
        if self.run.proposals and self.chance.random() < 0.2:
            self.run.proposals.propose(self.rank)
        try:
            return getattr(self, f"begin_{operation.kind}", self.begin_tensors)(operation, is_lone)
        except HoroError as error:
            return error

    def begin_add(self, operation: Operation, _: bool) -> Any:
        team = operation.other if operation.odd == self.me else operation.team
        made = self.run.links_of(self.me, team, operation.name)
        self.ids[team] = self.rank.context.add_team(self.run.schedule.teams[team], **made)
        return 0, [], []

    def begin_remove(self, operation: Operation, _: bool) -> Any:
        self.rank.context.remove_team(self.ids[operation.other if operation.odd == self.me else operation.team])
        return 0, [], []

    def begin_join(self, operation: Operation, _: bool) -> Any:
        handle = self.joins.pop(operation.team, 0) or self.rank.context.start_join(self.ids[operation.team])
        return handle, [], []

    def begin_tensors(self, operation: Operation, is_lone: bool) -> Any:
        rank, is_odd, team = self.rank, operation.odd == self.me, self.ids[operation.team]
        if is_odd and operation.how == "refused":
            rank.context.refuse(team, operation.name, UsageError("it is refused here"))
            return None
        tensors = range(len(operation.counts) if operation.kind != "barrier" else 0)
        if operation.kind in GIVES:
            to = operation.members if operation.kind == "alltoall" else [0]
            inputs = [np.concatenate([operation.block(self.me, each) for each in to])]
        else:
            inputs = [operation.given(self.me, tensor).astype(operation.dtype) for tensor in tensors]
        if is_odd and operation.how == "dtype":
            inputs = [np.ones(each.shape, "int32" if operation.dtype != "int32" else "float32") for each in inputs]
        wires = [None if is_odd and operation.how == "dtype" else operation.wire] * len(inputs)
        if is_odd and operation.how == "shape" and inputs:
            inputs[0] = np.concatenate([inputs[0], inputs[0][:1]]) if inputs[0].ndim == 1 else inputs[0][:, :1].copy()
            inputs[0] = np.ones(7, inputs[0].dtype) if not inputs[0].size and inputs[0].ndim == 1 else inputs[0]
        outputs = [np.full_like(each, 7) for each in inputs] if operation.apart else inputs
        # a rank that differs gets what it has itself where all others have joined
        into = operation.kind in GIVES and operation.apart and not is_odd
        if into:
            outputs = [np.concatenate([operation.block(each, self.me) for each in operation.active]) * 0]
        elif operation.kind == "reducescatter":
            outputs = [each[self.rows(operation, each)].copy() for each in inputs]
        described = describe(inputs, outputs, wires)
        if operation.kind == "alltoall":
            splits = tuple(operation.rows(self.me, each) for each in operation.members)
            described = [described[0]._replace(splits=splits)]
        self.kept.append((inputs, outputs))
        options: dict[str, Any] = {"root_rank": operation.root} if operation.kind == "broadcast" else {}
        if operation.is_reduction:
            options = {"reduce_op": _core.REDUCE_OPS[operation.reduce], "prescale": operation.prescale}
            options["postscale"] = operation.postscale
        sync = is_lone and operation.kind not in GIVES and self.chance.random() < 0.5
        request = _core.RequestBuffer.of(
            _core.OPS[operation.kind], operation.name, described, team=team, into=into, sync=sync,
            transient=operation.transient, **options,
        )  # fmt: skip
        if sync:
            rank.context.run(request)
            return 0, inputs, outputs
        return rank.context.submit(request), inputs, outputs

    def rows(self, operation: Operation, array: np.ndarray) -> slice:
        """Of a reduce-scatter, what falls to this rank."""
        return rows_of(len(array), len(operation.members), operation.members.index(self.me))

    def finish(self, operation: Operation, begun: Any) -> str:
        """``ok``, or how it has failed."""
        try:
            if isinstance(begun, HoroError):
                raise begun
            if begun is None:
                return "mine"
            handle, inputs, outputs = begun
            before = [each.tobytes() for each in inputs] if operation.apart else []
            if handle:
                self.await_one(operation, handle, outputs)
            assert before == [each.tobytes() for each in inputs[: len(before)]], "the input has changed"
            self.check(operation, outputs)
        except (AbortedError, PeerLostError) as error:
            self.run.expect_end(error)
            return "ended"
        except MismatchError:
            return "mismatch"
        except UsageError as error:
            assert "has refused it: it is refused here" in str(error), error
            return "refused"
        return "ok"

    def await_one(self, operation: Operation, handle: int, outputs: list[np.ndarray]) -> None:
        context = self.rank.context
        if self.chance.random() < 0.2:
            while not context.poll(handle):
                time.sleep(0)
        if operation.kind not in GIVES | {"join"}:
            context.finish(handle)
            return
        try:
            context.wait(handle)
            if operation.kind == "join":
                self.run.agree(operation.name, context.joined_last(handle))
                return
            data, rows = context.take_result(handle, 0)
            there = [0 if each in operation.joined else operation.rows(each, self.me) for each in operation.members]
            assert rows == there, (rows, there)
            if data is not None:
                outputs[:] = [np.frombuffer(data, outputs[0].dtype).reshape(-1, outputs[0].shape[1])]
        finally:
            with suppress(HoroError):
                context.release(handle)

    def check(self, operation: Operation, outputs: list[np.ndarray]) -> None:
        is_known = operation.errors == {"ok"} and operation.odd != self.me  # alone it gets what it has
        for tensor, output in enumerate(outputs if is_known else ()):
            if operation.kind in GIVES:
                wanted = np.concatenate([operation.block(each, self.me) for each in operation.active])
            elif operation.kind == "broadcast":
                wanted = operation.given(operation.root, tensor)
            else:
                wanted = operation.wanted[tensor]
                wanted = wanted[self.rows(operation, wanted)] if operation.kind == "reducescatter" else wanted
            loss = max(FLOATS.get(operation.dtype, 0), WIRES[operation.wire]) if operation.reduce == "average" else 0
            assert output.shape == wanted.shape, (output, wanted)
            assert np.all(np.abs(output - wanted) <= loss * np.abs(wanted)), (output, wanted)


class Run:
    """A schedule as it is played."""

    group: Group
    player = Player

    def __init__(self, schedule: Schedule) -> None:
        sockets = schedule.options.get("sockets_per_peer", 1)
        self.schedule, self.links = schedule, Links(schedule.host_of_rank, sockets)
        self.handed: set[tuple[str, int, int]] = set()
        self.going = threading.Event()
        self.agreed: dict[str, int] = {}
        self.kept: list[Any] = []
        slot = schedule.options["segment_bytes"]
        self.proposals = None if schedule.options["tuned"] is None else Proposals(schedule.seed, slot, sockets)

    def play(self, rank: Rank) -> None:
        """A rank, whose failure ends the others."""
        try:
            self.player(self, rank).play()
        except BaseException:
            rank.context.end("this schedule has failed")
            raise

    def links_of(self, rank: int, team: int, key: str) -> dict[str, list[int]]:
        self.handed.add((key, team, rank))
        return self.links.of(rank, self.schedule.teams[team], (key, team))

    def close_links(self) -> None:
        """Those that no rank has handed over."""
        for ((key, team), _), made in self.links._made.items():  # type: ignore[misc]
            for rank, by_kind in made.items():
                if (key, team, rank) not in self.handed:
                    close_all([fd for fds in by_kind.values() for fd in fds])

    def end(self) -> None:
        """The victim goes."""
        self.going.set()
        if self.schedule.ending == "dies":
            self.group.kill(self.schedule.victim, self.links.sockets_of(self.schedule.victim))
        else:
            self.group.leave(self.schedule.victim)

    def expect_end(self, error: HoroError) -> None:
        assert self.going.is_set(), error
        assert isinstance(error, {"dies": PeerLostError, "leaves": AbortedError}[self.schedule.ending]), error
        assert f"rank {self.schedule.victim} (" in str(error), error

    def judge(self, operation: Operation, outcome: str, me: int) -> None:
        if outcome == "mine":
            assert operation.odd == me
        elif outcome != "ended":
            assert outcome in operation.errors, (operation, outcome)

    def agree(self, name: str, value: int) -> None:
        assert self.agreed.setdefault(name, value) == value and value >= 0, (name, value)

    def check_whole(self) -> None:
        """What one rank has got, all have, but what a team has done beside a rank that leaves."""
        for operation in (each for bunch in self.schedule.bunches for each in bunch):
            others = [rank for rank in operation.active if rank not in (self.schedule.victim, operation.odd)]
            got = {operation.outcomes.get(rank, "ended") for rank in others}
            is_loose = self.schedule.ending == "dies" or (self.schedule.ending == "leaves" and operation.team != 0)
            assert len(got) < 2 or (is_loose and len(got - {"ended"}) < 2), (operation, got)


def play(schedule: Schedule, deadline_s: float = 60) -> int:
    """How many operations of ranks there were; raises what is wrong, and prints how to do that again."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            if schedule.is_hasty:
                patch.setattr(_core, "_SIGNAL_CHECK_MS", 1)
                patch.setattr(_core, "_BLOCKED_EVERY_S", 0.0)
            with Group(host_of_rank=schedule.host_of_rank, teams=8, log_level=5, **schedule.options) as group:
                run = Run(schedule)
                run.group = group
                for context in group.contexts:
                    context.blocked_after_s = 0.0 if schedule.is_hasty else math.inf
                group.run(run.play, deadline_s)
        run.close_links()
        run.check_whole()
    except BaseException:
        print(schedule)
        raise
    return sum(len(operation.outcomes) for bunch in schedule.bunches for operation in bunch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--schedules", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.0, help="instead of a number of schedules")
    parser.add_argument("--operations", type=int, default=400)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--together", action="store_true", help="no rank leaves early or dies")
    given = parser.parse_args()
    begin_s, seed, done = time.monotonic(), given.seed, 0
    while time.monotonic() - begin_s < given.seconds or seed < given.seed + given.schedules:
        done += play(Schedule(seed, given.operations, given.hosts, together=given.together))
        seed += 1
    print(f"stress: seeds {given.seed} to {seed - 1}: {done} operations of ranks in {time.monotonic() - begin_s:.1f} s")


if __name__ == "__main__":
    main()
