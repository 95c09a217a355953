"""Training goes on when ranks die anywhere: equal models, and each sample in them once."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_training import EPOCHS, SAMPLES, Plan, die, train
from seats import Seats

import horo.torch as hvd
from horo.bootstrap.elastic import membership
from horo.elastic.commit_file import CommitFile
from horo.errors import UsageError


def run(folder: Path, plan: Plan, size: int, *, replace: bool = False, agents: int = 1) -> tuple[dict[int, Any], Seats]:
    """The results of the workers that have come to the end, by worker; all others have died."""
    with Seats(train, str(folder), plan, replace=replace, agents=agents) as seats:
        statuses = seats.run(size)
        words = seats.logs()
    found = {int(path.suffix[1:]): json.loads(path.read_text()) for path in folder.glob("result.*")}
    for worker, status in statuses.items():
        assert status == (-9 if worker in plan.deaths else 0), (worker, words)
        assert (status == 0) == (worker in found), words
    assert found
    assert len({result["digest"] for result in found.values()}) == 1, words
    for result in found.values():
        seen = Counter(map(tuple, result["seen"]))
        assert seen == Counter((epoch, sample) for epoch in range(EPOCHS) for sample in range(SAMPLES)), words
    return found, seats


@pytest.mark.parametrize(
    ("place", "victim"), [("backward", 0), ("reduced", 1), ("stepped", 0), ("recorded", 1), ("commit", 0)]
)
def test_a_job_goes_on_without_a_rank_that_is_killed(tmp_path: Path, place: str, victim: int) -> None:
    found, seats = run(tmp_path, Plan({victim: (3, place)}), 3)
    survivors = [worker for worker in range(3) if worker != victim]
    assert seats.generations == [[0, 1, 2], survivors]
    assert sorted(found) == survivors
    assert all(result["sizes"] == [3, 2] and result["resets"] == 1 for result in found.values())


@pytest.mark.parametrize("place", ["commit", "own record"])
def test_a_sharded_job_goes_on_from_the_last_commit_of_which_all_shares_are_there(tmp_path: Path, place: str) -> None:
    found, seats = run(tmp_path, Plan({1: (4, place)}, every=2, sharding="optimizer"), 3)
    assert sorted(found) == [0, 2]
    assert all(result["own_bytes"] == 0 for result in found.values())  # two ranks, a share each
    told = {(report["commit"], report["steps"]) for _, report in seats.reports if "waits" in report}
    assert told <= ({(1, 2)} if place == "commit" else {(1, 2), (2, 0)})  # a rank may look before the others are done


def test_a_sharded_job_whose_ranks_all_die_in_a_commit_goes_on_from_the_memory_of_their_host(tmp_path: Path) -> None:
    plan = Plan({0: (8, "commit"), 1: (8, "own record")}, every=4, sharding="optimizer")
    found, _ = run(tmp_path, plan, 2, replace=True)
    assert found.keys() == {2, 3}
    for result in found.values():
        assert result["resets"] == 1  # it begins with the commit
        assert result["commit"][1] < 20  # else training has begun anew


def test_a_sharded_job_goes_on_when_all_ranks_of_an_agent_die_in_a_commit(tmp_path: Path) -> None:
    deaths = {1: (4, "commit"), 3: (4, "own record")}
    found, _ = run(tmp_path, Plan(deaths, every=2, sharding="optimizer"), 4, agents=2)
    assert sorted(found) == [0, 2]
    assert all(result["own_bytes"] == 0 for result in found.values())


def test_a_sharded_job_goes_on_when_a_rank_dies_while_owners_write(tmp_path: Path) -> None:
    found, _ = run(tmp_path, Plan({1: (6, "inside step")}, every=4, sharding="optimizer"), 3)
    assert sorted(found) == [0, 2]
    assert all(result["own_bytes"] == 0 for result in found.values())


@pytest.mark.parametrize("place", ["backward", "commit"])
def test_a_dead_rank_is_replaced_and_the_newcomer_has_the_state_of_the_others(tmp_path: Path, place: str) -> None:
    found, seats = run(tmp_path, Plan({0: (3, place)}, every=3, awaits=1), 2, replace=True)
    assert seats.generations[:2] == [[0, 1], [1]]
    assert seats.generations[2:] == [[1, 2]]
    assert found[1]["sizes"] == [2, 1, 2]
    assert found[1]["resets"] == 2
    assert found[2]["sizes"] == [2]
    assert found[2]["resets"] == 1  # its place is not the planned one


def test_a_newcomer_that_dies_while_it_gets_the_state_disturbs_nobody(tmp_path: Path) -> None:
    found, seats = run(tmp_path, Plan({0: (3, "backward"), 2: (4, "sync")}, awaits=1), 2, replace=True)
    assert [0, 1] in seats.generations
    assert [1, 2] in seats.generations
    assert sorted(found) == [1, 3]


def test_the_only_rank_with_the_state_dies_while_it_gives_that(tmp_path: Path) -> None:
    found, seats = run(tmp_path, Plan({0: (3, "backward"), 1: (4, "sync")}, awaits=1), 2, replace=True)
    assert [1, 2] in seats.generations
    assert sorted(found) == [2, 3]


@pytest.mark.parametrize(("victim", "sharding"), [(0, None), (2, None), (2, "optimizer")])
def test_parameters_after_a_death_are_those_of_a_job_of_the_same_sizes_without(
    tmp_path: Path, victim: int, sharding: str | None
) -> None:
    kept, folder = {"HORO_ELASTIC_DIR": str(tmp_path / "kept")}, tmp_path / "without"
    folder.mkdir()
    with Seats(train, str(folder), Plan(sharding=sharding), replace=False, environment=kept) as seats:
        seats.leaves = True
        assert seats.run(3) == {0: 0, 1: 0, 2: 0}, seats.logs()
    left = CommitFile(kept["HORO_ELASTIC_DIR"]).read()
    assert left is not None
    with Seats(train, str(folder), Plan(), replace=False, environment=kept) as seats:
        assert seats.run(2) == {0: 0, 1: 0}, seats.logs()
    expected = json.loads((folder / "result.0").read_text())["digest"]
    found, _ = run(tmp_path, Plan({victim: (left.commit.number, "backward")}, sharding=sharding), 3)
    assert {result["digest"] for result in found.values()} == {expected}


def test_a_job_whose_ranks_all_die_goes_on_from_the_memory_of_their_slots(tmp_path: Path) -> None:
    found, _ = run(tmp_path, Plan({0: (9, "recorded"), 1: (9, "recorded")}, every=4), 2, replace=True)
    for worker in (2, 3):
        assert found[worker]["sizes"] == [2]
        assert found[worker]["resets"] == 1
        assert found[worker]["commit"][1] < 20  # else training has begun anew


@pytest.mark.parametrize(
    ("ready", "passes", "is_rich", "places"),
    [
        ("backward", 2, False, [(4, "begun"), (5, "backward")]),
        ("step", 1, False, [(5, "backward")]),
        ("backward", 2, True, [(4, "begun"), (5, "backward"), (5, "unscaled")]),
    ],
)
def test_nothing_of_the_broken_steps_is_left_wherever_gradients_are_cleared(
    tmp_path: Path, ready: str, passes: int, is_rich: bool, places: list[tuple[int, str]]
) -> None:
    digests = set()
    for clears, place in itertools.product(("before backward", "after step"), places):
        folder = tmp_path / f"{clears} {place}"
        folder.mkdir()
        plan = Plan({0: place}, clears, ready, passes, every=2, is_rich=is_rich)  # the last commit is that of step 4
        found, seats = run(folder, plan, 2)
        digests.add(found[1]["digest"])
        waits = next(report for worker, report in seats.reports if worker == 1 and "waits" in report)
        assert (waits["commit"], waits["steps"]) == (2, place[0] - 4)
    assert len(digests) == 1


def commit_what_is_no_longer_equal(folder: str, what: str) -> None:
    """The program of a worker that commits while ranks have other values, or another number of commits."""
    hvd.init()
    model = torch.nn.Linear(2, 3, bias=False)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), sharding="optimizer")
    state = hvd.elastic.TorchState(model, optimizer, epoch=0)
    sizes = []

    def train_on() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2)).sum().backward()
            optimizer.step()

    def keeps(value: torch.Tensor) -> bool:
        """Whether a restored commit has a tensor as it is now."""
        before = value.tolist()
        sizes.append(next(state._copies._memory.whole()).data_bytes)
        state.restore()
        return bool(value.tolist() == before)

    @hvd.elastic.run
    def train(state: Any) -> None:
        train_on()
        state.commit()
        assert keeps(model.weight)
        state.epoch = 1
        if hvd.rank() == 0 and what == "number":
            state.save()  # of this rank alone
            assert (keeps(model.weight), state.epoch) == (True, 1)
        for _ in range(3):
            train_on()
            changed: torch.Tensor = model.weight
            if what == "state":
                changed = torch.full((100,), float(hvd.rank()))
                optimizer.state[model.weight]["of rank"] = changed
            elif what == "parameter":
                with torch.no_grad():
                    changed.add_(hvd.rank())
            state.commit()
            assert keeps(changed)
            if what == "parameter":
                with torch.no_grad():
                    changed.zero_()

    train(state)
    Path(folder, f"sizes.{hvd.rank()}").write_text(json.dumps(sizes))
    hvd.shutdown()


@pytest.mark.parametrize(("what", "size"), [("parameter", 128), ("state", 576), ("number", 128)])
def test_ranks_that_do_not_have_the_same_values_commit_all_of_theirs(tmp_path: Path, what: str, size: int) -> None:
    with Seats(commit_what_is_no_longer_equal, str(tmp_path), what, replace=False) as seats:
        assert seats.run(2) == {0: 0, 1: 0}, seats.logs()
    sizes = [json.loads((tmp_path / f"sizes.{rank}").read_text()) for rank in range(2)]
    assert sizes == [[0, *[128] * (what == "number"), *[size] * 3], [0, *[size] * 3]]


class Opened(torch.utils.data.Dataset[tuple[int, list[str]]]):
    """A sample is the process that makes it, with what that has open."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, list[str]]:
        return os.getpid(), opened()


def opened() -> list[str]:
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one of the listing
            found.append(str(fd.readlink()))
    return found


def train_two_states(folder: str) -> None:
    """The program of a worker that runs a state twice, and then another one."""
    hvd.init()
    train = hvd.elastic.run(lambda state: hvd.allreduce(torch.ones(1), name="step").item() + state.epoch)
    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, epoch=1)
    assert [train(state), train(state)] == [2, 2]
    for other in (hvd.elastic.TorchState(epoch=0), hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, epoch=0)):
        with pytest.raises(UsageError, match=r"elastic job has one state.*phase=0"):
            train(other)
    Path(folder, f"refused {hvd.rank()}").touch()
    hvd.shutdown()


def test_a_second_state_is_refused(tmp_path: Path) -> None:
    with Seats(train_two_states, str(tmp_path), replace=False) as seats:
        assert seats.run(2) == {0: 0, 1: 0}, seats.logs()
    assert len(list(tmp_path.glob("refused *"))) == 2


def load(folder: str) -> None:
    """The program of a worker with a data loader whose process has been forked in the first generation."""
    hvd.init()
    member = membership()
    assert member is not None
    options: dict[str, Any] = {"persistent_workers": True, "multiprocessing_context": "fork"}
    loader = torch.utils.data.DataLoader(Opened(), batch_size=None, num_workers=1, **options)
    before = [each for each in opened() if "socket:" in each]
    seen = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        for pid, names in loader:
            seen.append((hvd.size(), pid, names))
            if (member.worker, len(seen)) == (0, 3):
                die()
            hvd.allreduce(torch.ones(1), name="step")

    train(hvd.elastic.TorchState(epoch=0))
    Path(folder, "seen").write_text(json.dumps([before, seen]))
    hvd.shutdown()


def test_processes_of_a_data_loader_go_on_and_hold_nothing_of_the_old_generation(tmp_path: Path) -> None:
    with Seats(load, str(tmp_path), replace=False) as seats:
        assert seats.run(2) == {0: -signal.SIGKILL, 1: 0}, seats.logs()
    before, seen = json.loads((tmp_path / "seen").read_text())
    assert before
    assert [size for size, _, _ in seen][-8:] == [1] * 8
    assert seen[0][0] == 2
    assert len({pid for _, pid, _ in seen}) == 1
    for _, _, names in seen:
        assert not set(names) & set(before)
        assert not [each for each in names if "eventfd" in each or "horo-arena" in each]
