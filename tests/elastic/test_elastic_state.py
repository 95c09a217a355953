"""States, samplers and the loop, on one rank or with a job that is made up."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import horo.torch as hvd
from horo.elastic import commits
from horo.elastic.commits import Commit, CommitMemory
from horo.elastic.loop import run_elastic
from horo.elastic.state import HostsUpdatedInterrupt, HostUpdateResult, ObjectState
from horo.errors import DeadlockError, GroupError, MismatchError, NotInitializedError, PeerLostError, StalledError
from horo.torch.elastic import ElasticSampler, TorchState, run
from horo.torch.elastic.copies import Copies
from horo.torch.elastic.handlers import StateHandler, get_handler_registry, set_handler_registry
from horo.torch.engine import topology


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def made(**kwargs: Any) -> tuple[torch.nn.Sequential, Any, TorchState]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model.named_parameters())
    return model, optimizer, TorchState(model, optimizer, **kwargs)


def step(model: torch.nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()


def values(model: torch.nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """All tensors of both, copied."""
    found = [*model.state_dict().values()]
    for state in optimizer.state.values():
        found += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return [each.detach().clone() for each in found]


def test_restore_returns_to_the_commit_in_place() -> None:
    model, optimizer, state = made(epoch=0)
    for _ in range(2):
        step(model, optimizer)
    state.epoch = 1
    state.commit()
    before, parameters = values(model, optimizer), list(model.parameters())
    moments = [each["exp_avg"] for each in optimizer.state.values()]
    step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 7.0
    state.epoch = 2
    state.restore()
    assert state.epoch == 1
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert all(map(torch.equal, before, values(model, optimizer)))
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert all(one is each["exp_avg"] for one, each in zip(moments, optimizer.state.values(), strict=True))


def test_finished_steps_are_counted_from_the_last_commit_on() -> None:
    model, optimizer, state = made()
    assert state._steps_since_commit() == 0
    for forget in (state.save, state.restore, state.sync):
        step(model, optimizer)
        step(model, optimizer)
        assert state._steps_since_commit() == 2
        forget()
        assert state._steps_since_commit() == 0
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 // 0)
    assert state._steps_since_commit() == 0
    state.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state.other = torch.optim.SGD(model.parameters(), lr=0.1)
    state.optimizer.step()
    assert state._steps_since_commit() == 1
    assert TorchState(model)._steps_since_commit() is None


def test_restore_before_a_commit_returns_to_the_begin() -> None:
    model, optimizer, state = made(epoch=0)
    before = values(model, optimizer)
    step(model, optimizer)
    state.epoch = 5
    state.restore()
    assert state.epoch == 0
    assert not optimizer.state
    assert all(map(torch.equal, before, values(model, optimizer)))


def test_objects_are_kept_deeply() -> None:
    _, _, state = made(log=[[1]])
    state.log[0].append(2)
    state.commit()
    state.log[0].append(3)
    state.restore()
    assert state.log == [[1, 2]]
    state.log[0].append(4)
    state.restore()
    assert state.log == [[1, 2]]


def test_objects_without_torch_are_kept_deeply() -> None:
    state = ObjectState(lambda value: value, lambda: 0, log=[[1]])
    state.log[0].append(2)
    state.restore()
    assert state.log == [[1]]
    state.log[0].append(2)
    state.commit()
    state.log[0].append(3)
    state.restore()
    state.sync()
    assert state.log == [[1, 2]]


def test_schedulers_scalers_and_every_dtype_are_kept() -> None:
    model, optimizer, _ = made()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    other = torch.nn.Module()
    dtypes = (torch.bool, torch.bfloat16, torch.float64, torch.complex64, torch.int8)
    for number, dtype in enumerate(dtypes):
        other.register_buffer(f"b{number}", torch.ones(3).to(dtype))
    other.register_buffer("empty", torch.empty(0, 2))
    other.register_buffer("strided", torch.arange(6.0).view(2, 3).t())
    state = TorchState(model, optimizer, other=other, scheduler=scheduler)
    step(model, optimizer)
    scheduler.step()
    state.commit()
    for buffer in other.buffers():
        buffer.zero_()
    scheduler.step()
    state.restore()
    assert scheduler.last_epoch == 1
    for number, dtype in enumerate(dtypes):
        assert torch.equal(other.get_buffer(f"b{number}"), torch.ones(3).to(dtype))
    assert torch.equal(other.get_buffer("strided"), torch.arange(6.0).view(2, 3).t())


def test_a_validation_or_a_frozen_part_that_is_broken_off_leaves_no_mode_behind() -> None:
    model, _, state = made()
    model[0].bias.requires_grad_(False)
    model[1].eval()
    state.commit()
    model.eval().requires_grad_(False)
    state.restore()
    assert [module.training for module in model] == [True, False]
    assert [parameter.requires_grad for parameter in model.parameters()] == [True, False, True, True]


def test_commits_after_the_first_allocate_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, state = made()
    step(model, optimizer)
    state.commit()
    before = state._copies._views
    kept = [(id(memory), [view.data_ptr() for view in views]) for memory, _, views in before]
    for _ in range(4):
        step(model, optimizer)
        state.commit()
    after = [(id(memory), [view.data_ptr() for view in views]) for memory, _, views in state._copies._views]
    assert after == kept


def test_a_commit_that_cannot_be_pickled_leaves_the_one_before() -> None:
    model, optimizer, state = made(thing=1)
    step(model, optimizer)
    before = values(model, optimizer)
    state.commit()
    step(model, optimizer)
    state.thing = (each for each in ())
    with pytest.raises(TypeError, match="pickle"):
        state.commit()
    state.restore()
    assert state.thing == 1
    assert all(map(torch.equal, before, values(model, optimizer)))


def test_another_model_is_kept_from_its_assignment_on() -> None:
    _, _, state = made()
    state.model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        state.model.weight.zero_()
    state.restore()
    assert state.model.weight.any()


def test_a_list_of_models_is_refused() -> None:
    with pytest.raises(ValueError, match=r"TorchState\(models=\.\.\.\): it has a Linear in a list"):
        TorchState(models=[torch.nn.Linear(1, 1)])


def test_a_handler_of_the_user_keeps_its_values_itself() -> None:
    class Counter:
        count = 0

    class CounterHandler(StateHandler):
        def save(self) -> None:
            self.saved = self.value.count

        def restore(self) -> None:
            self.value.count = self.saved

        def sync(self) -> None:
            self.value.count = hvd.broadcast_object(self.value.count)

    before = list(get_handler_registry())
    set_handler_registry([(Counter, CounterHandler), *before])
    try:
        counter = Counter()
        state = TorchState(counter=counter)
        counter.count = 3
        state.sync()
        counter.count = 4
        state.restore()
        assert counter.count == 3
    finally:
        set_handler_registry(before)


# ---- The memory of a slot ----


def memory_with(fd: int) -> CommitMemory:
    return CommitMemory(os.dup(fd), b"s" * 16)


def test_the_next_worker_of_a_slot_has_the_commit_of_the_one_before() -> None:
    fd = commits.create()
    model, optimizer, state = made(epoch=0)
    assert not state._adopt(memory_with(fd))
    state._standing.generation = 2
    step(model, optimizer)
    state.epoch = 3
    state.commit()
    before = values(model, optimizer)
    later, its_optimizer, its_state = made(epoch=0)
    assert its_state._adopt(memory_with(fd))
    assert its_state.epoch == 3
    assert its_state._standing.commit == Commit(2, 1)
    assert all(map(torch.equal, before, values(later, its_optimizer)))


def test_a_commit_of_another_model_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    fd = commits.create()
    other = TorchState(torch.nn.Linear(2, 2))
    other._adopt(memory_with(fd))
    other._standing.generation = 1
    other.commit()
    model, optimizer, state = made(epoch=4)
    before = values(model, optimizer)
    with caplog.at_level("WARNING", "horo"):
        assert not state._adopt(memory_with(fd))
    assert "does not fit" in caplog.text
    assert all(map(torch.equal, before, values(model, optimizer)))
    state.epoch = 5
    state.restore()
    assert state.epoch == 4


class Hidden:
    def __setstate__(self, state: Any) -> None:
        raise ModuleNotFoundError("No module named 'theirs'")


def test_a_commit_that_no_longer_unpickles_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    fd = commits.create()
    hidden = Hidden()
    hidden.value = 1  # type: ignore[attr-defined]
    other = TorchState(hidden=hidden)
    other._copies = Copies(memory_with(fd))
    other._write(Commit(1, 1))
    state = TorchState(hidden=None)
    with caplog.at_level("WARNING", "horo"):
        assert not state._adopt(memory_with(fd))
    assert "does not fit this state: No module named 'theirs'" in caplog.text
    assert state.hidden is None


# ---- Samplers ----


def test_a_sampler_has_horovods_state_and_order() -> None:
    sampler = ElasticSampler(range(7), seed=2)
    assert len(sampler) == 7
    first = list(sampler)
    sampler.record_batch(0, 3)
    assert {key: sampler.state_dict()[key] for key in ("epoch", "processed_num")} == {"epoch": 0, "processed_num": 3}
    sampler.reset()
    assert list(sampler) == first[3:]
    sampler.record_batch(1, 30)
    assert sampler.processed_num == 7
    sampler.set_epoch(0)
    assert list(sampler) == first
    other = ElasticSampler(range(7), seed=2)
    other.load_state_dict({"epoch": 0, "processed_num": 5})
    assert list(other) == first[5:]


def test_an_epoch_that_a_commit_has_brought_back_goes_on_where_it_was() -> None:
    sampler = ElasticSampler(range(6), shuffle=False)
    sampler.load_state_dict({"epoch": 2, "processed_num": 4})
    sampler.set_epoch(2)  # at the begin of the loop, as scripts do
    assert list(sampler) == [4, 5]
    sampler.set_epoch(2)  # at the end of the epoch, as Horovod's examples do
    assert list(sampler) == list(range(6))


def test_indices_are_recorded_if_they_are_the_next_ones() -> None:
    sampler = ElasticSampler(range(5), shuffle=False)
    sampler.record_indices([0, 1])
    assert sampler.processed_num == 2
    with pytest.raises(ValueError, match=r"\[4\], but the next ones are \[2\]"):
        sampler.record_indices([4])


@pytest.mark.parametrize(
    ("options", "words"),
    [({"tail": "x"}, "tail='x'"), ({"tail": "exact"}, "give the loader's batch size")],
)
def test_a_sampler_refuses_what_it_cannot_do(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ElasticSampler(range(5), **options)


def test_a_dataset_of_another_length_is_refused() -> None:
    state = ElasticSampler(range(5)).state_dict()
    with pytest.raises(ValueError, match="has 6 samples, but the state is of one with 5"):
        ElasticSampler(range(6)).load_state_dict(state)


# ---- The loop ----


class Change:
    def __init__(self, *, added: bool = False, removed: bool = False, leave: bool = False) -> None:
        self.added, self.removed, self.leave = added, removed, leave


class Fake:
    """The driver and the job of one rank; ``rows``: what the other ranks answer, per sync."""

    def __init__(self, rows: Sequence[list[list[int]]] = ()) -> None:
        self.has_joined, self.generation = True, 1
        self.calls: list[str] = []
        self.course = ""
        self.asked: Change | None = None
        self.rows = list(rows)

    def join(self) -> None:
        self.calls.append("join")
        self.has_joined, self.generation, self.asked = True, self.generation + 1, None

    def begun(self) -> None:
        self.course += "begun "

    def done(self, *, is_kept: bool = False) -> None:
        self.course += "kept" if is_kept else "done"

    def leave(self, error: BaseException | None, steps_lost: int | None = None) -> None:
        self.calls.append(f"leave {type(error).__name__}")
        self.has_joined = False

    def change(self) -> Change | None:
        return self.asked

    def committed(self, number: int, *, is_kept: bool = False) -> None:
        self.calls.append(f"committed {number}")

    def place(self) -> tuple[int, int]:
        return 0, self.generation

    def gather(self, own: Sequence[int]) -> list[list[int]]:
        return [list(own), *(self.rows.pop(0) if len(own) > 1 and self.rows else [])]

    def adopt(self, state: Any) -> bool:
        return False

    def share_out(self, state: Any, generation: int) -> None:
        pass

    def forget(self, state: Any) -> None:
        self.calls.append("forget")

    def keep(self) -> None:
        self.calls.append("keep")


class Sent(ObjectState):
    """Notes from which rank it was synced."""

    def __init__(self, **kwargs: Any) -> None:
        self.roots: list[int] = []
        super().__init__(self.send, lambda: 0, **kwargs)

    def send(self, value: Any, root_rank: int = 0) -> Any:
        if isinstance(value, dict):
            self.roots.append(root_rank)
        return value


def looped(fake: Fake, state: ObjectState, function: Callable[[], Any]) -> Any:
    return run_elastic(function, state, fake, fake)


@pytest.mark.parametrize("error", [PeerLostError, StalledError, DeadlockError])
def test_an_error_of_the_group_goes_back_to_the_commit(error: type[GroupError]) -> None:
    fake, state, resets = Fake(), Sent(epoch=0), []
    state.register_reset_callbacks([lambda: resets.append(state.epoch)])

    def train() -> int:
        while state.epoch < 3:
            state.epoch += 1
            if state.epoch == 2:
                state.commit()
            if state.epoch == 3 and not resets:
                raise error("rank 1 was lost")
        return int(state.epoch)

    assert looped(fake, state, train) == 3
    leaving = ["committed 1", "committed 1", f"leave {error.__name__}", "join", "forget", "committed 1"]
    assert fake.calls == ["forget", "committed 0", *leaving]
    assert fake.course == "begun done"
    assert resets == [2]
    assert state.roots == [0]  # nothing is sent after the error: all have the state
    assert state._standing.commit == Commit(1, 1)


@pytest.mark.parametrize("error", [MismatchError("x"), NotInitializedError("x"), ValueError("x"), KeyboardInterrupt()])
def test_other_errors_come_out(error: BaseException) -> None:
    def train() -> None:
        raise error

    with pytest.raises(type(error)):
        looped(Fake(), Sent(), train)


@pytest.mark.parametrize("commits_it", [True, False])
def test_a_change_ends_the_function_at_a_commit_and_nothing_is_lost(commits_it: bool) -> None:
    fake, state = Fake(), Sent(epoch=0)

    def train() -> int:
        while state.epoch < 4:
            state.epoch += 1
            fake.asked = Change(added=True) if state.epoch == 2 else None
            (state.commit if commits_it else state.check_host_updates)()
        return int(state.epoch)

    assert looped(fake, state, train) == 4
    assert [call for call in fake.calls if "leave" in call] == ["leave NoneType"]
    assert state._standing.commit == ((2, 4) if commits_it else (1, 1))


@pytest.mark.parametrize("commits_it", [True, False])
def test_a_job_that_is_to_end_keeps_its_state_and_ends_well(commits_it: bool) -> None:
    fake, state = Fake(), Sent(epoch=0)

    def train() -> None:
        state.epoch = 1
        fake.asked = Change(leave=True)
        (state.commit if commits_it else state.check_host_updates)()

    with pytest.raises(SystemExit) as ended:
        looped(fake, state, train)
    assert ended.value.code == 0
    assert fake.calls[-1] == "keep" and fake.course == "begun kept"
    assert state._saved_state == {"epoch": 1}


@pytest.mark.parametrize(
    ("own", "others", "root", "commit"),
    [
        (Commit(0, 0), [[0, 0, 0]], 0, Commit(1, 0)),  # all are new
        (Commit(2, 5), [[2, 5, 1]], None, Commit(2, 5)),  # all have it
        (Commit(2, 5), [[2, 6, 1]], 1, Commit(2, 6)),  # one has finished a commit more
        (Commit(2, 5), [[2, 4, 1], [0, 0, 0]], 0, Commit(2, 5)),
        (Commit(2, 5), [[2, 5, 0]], 0, Commit(2, 5)),  # a newcomer with the memory of its slot
        (Commit(3, 5), [[2, 9, 0]], 0, Commit(3, 5)),  # one of before the others went on without it
        (Commit(1, 1), [[0, 0, 0], [2, 1, 1], [2, 1, 1]], 2, Commit(2, 1)),
    ],
)
def test_the_state_with_the_most_training_is_that_of_all(
    own: Commit, others: list[list[int]], root: int | None, commit: Commit
) -> None:
    fake, state = Fake([others]), Sent(epoch=0)
    state._standing.commit, state._standing.is_synced = own, own.generation > 0
    looped(fake, state, lambda: None)
    assert state.roots == ([] if root is None else [root])
    assert state._standing.commit == commit
    assert state._standing.is_synced


def test_a_program_may_wait_for_a_change_as_with_horovod() -> None:
    fake, state = Fake(), Sent()
    seen = []

    def train() -> None:
        seen.append(state._host_messages.empty())
        if len(seen) == 1:
            fake.asked = Change(added=True)
            seen.append(state._host_messages.empty())
            state.commit()

    looped(fake, state, train)
    assert seen == [True, False, True]
    state.on_hosts_updated(1, HostUpdateResult.added)
    assert not state._host_messages.empty()


def test_an_interrupt_has_horovods_flag() -> None:
    state = Sent()
    state.check_host_updates()
    state.on_hosts_updated(1, HostUpdateResult.added)
    state.on_hosts_updated(1, HostUpdateResult.removed)  # in the same second
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.commit()
    assert not caught.value.skip_sync
    state.on_hosts_updated(2, HostUpdateResult.removed)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.check_host_updates()
    assert caught.value.skip_sync
    state.check_host_updates()


def test_without_a_driver_the_function_is_called_once() -> None:
    calls = []

    @run
    def train(state: TorchState, more: int) -> int:
        calls.append(state)
        raise PeerLostError("rank 1 was lost")

    state = TorchState()
    with pytest.raises(PeerLostError):
        train(state, 1)
    assert calls == [state]


def test_a_state_that_no_file_keeps_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HORO_ELASTIC_DIR", str(tmp_path / "kept"))
    with caplog.at_level("WARNING", "horo"):
        assert run(lambda state: state.step)(ObjectState(hvd.broadcast_object, hvd.rank, step=3)) == 3
    assert "this ObjectState is another state, and a later job begins it anew" in caplog.text


def test_under_mpi_one_line_has_the_reason_why_the_function_is_called_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(topology, "is_under_mpi", lambda: True)
    assert run(lambda state: state.epoch)(TorchState(epoch=3)) == 3
    (line,) = [each.message for each in caplog.records if "hvd.elastic.run" in each.message]
    assert line.startswith("MPI has started this job, which cannot go on without one of its ranks")
