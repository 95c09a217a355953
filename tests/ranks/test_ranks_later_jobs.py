"""Jobs and process sets come and go: optimizers and names meet again, and calls that an exception has left go on."""

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from interrupts import LeftError, interrupt
from jobs import DEADLINE_S, wait_until
from rank_pool import RankPool, on, on_own
from small_model import assert_close, gradients_of, made, make_loss, make_model, mean_gradients, sgd, take_step, train

import horo.torch as hvd
from horo.core.signal_safe_call import ThreadCall
from horo.errors import AbortedError, DeadlockError, UsageError
from horo.torch.engine import runtime as _runtime


@pytest.fixture(scope="module", params=["backward", "step"])
def idle2(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Two ranks that are in no job: each test calls ``init()``, and ends with ``shutdown()``."""
    with RankPool(2, init=False, environment={"HORO_GRADIENTS_READY": request.param, "HORO_OVERLAP": "always"}) as pool:
        yield pool


def again() -> None:
    hvd.barrier()  # a rank that has left already would abort what others still do
    hvd.shutdown()
    hvd.init()


@on("idle2")
def test_a_call_that_came_again_in_a_job_comes_again_in_the_next_one() -> None:
    def call() -> None:
        for _ in range(3):
            assert hvd.allreduce_(torch.ones(2), op=hvd.Sum, name="again").tolist() == [2.0, 2.0]

    hvd.init()
    call()
    again()
    call()
    hvd.barrier()
    hvd.shutdown()
    with pytest.raises(hvd.NotInitializedError):
        call()


@on("idle2")
def test_an_optimizer_goes_on_after_shutdown_and_init_beside_a_new_one() -> None:
    hvd.init()
    model, optimizer = made()
    train(model, optimizer, 0)
    for _round in range(2):
        again()
        other = make_model(7)
        newer = sgd(other)
        for step in range(3):
            make_loss(other, hvd.rank(), step).backward()
            wanted = mean_gradients(other, 2, step)
            train(model, optimizer, step)
            newer.step()
            assert_close(gradients_of(other), wanted)
            newer.zero_grad()
    hvd.shutdown()


@on("idle2")
def test_a_rank_that_goes_on_meets_one_that_begins() -> None:
    """What an elastic job does: survivors keep their optimizers, and new ranks make theirs."""
    hvd.init()
    rank = hvd.rank()
    models = [make_model(1), make_model(2)]
    optimizers: list[Any] = [sgd(model) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 0)
    hvd.barrier()
    hvd.shutdown()
    if rank == 0:
        hvd.init(comm=[0])
        assert hvd.size() == 1
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, 1)
        hvd.shutdown()
        hvd.init()
    else:
        del optimizers, optimizer
        models = [make_model(1), make_model(2)]
        hvd.init()
        optimizers = [sgd(model) for model in models]
    for model in models:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(2, 4):
        for model, optimizer in list(zip(models, optimizers, strict=True))[::-1]:
            train(model, optimizer, step)
    hvd.shutdown()


@pytest.mark.parametrize("op", ["average", "sum"])
@on("idle2")
def test_gradients_of_an_earlier_job_are_reduced_anew(op: str) -> None:
    hvd.init()
    model, optimizer = made(op=hvd.Sum if op == "sum" else hvd.Average)
    make_loss(model, hvd.rank()).backward()
    optimizer.synchronize()
    found = [g.clone() for g in gradients_of(model) if g is not None]
    again()
    optimizer.step()
    if op == "average":
        assert_close(gradients_of(model), found)
    optimizer.zero_grad()
    again()
    optimizer.synchronize()
    hvd.shutdown()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("clears", [True, False])
@on("idle2")
def test_a_backward_between_two_jobs_says_so_and_the_next_job_goes_on(clears: bool) -> None:
    hvd.init()
    model, optimizer = made()
    train(model, optimizer, 0)
    rank = hvd.rank()
    hvd.barrier()
    hvd.shutdown()
    for _ in range(2):
        with pytest.raises(hvd.HoroError, match=r"not initialized; call hvd\.init\(\)"):
            make_loss(model, rank).backward()
    with pytest.raises(hvd.HoroError, match=r"not initialized; call hvd\.init\(\)"):
        optimizer.step()
    if clears:
        optimizer.zero_grad()
        hvd.init()
    else:
        hvd.init()
        model.zero_grad()
    for step in range(1, 3):
        train(model, optimizer, step)
    hvd.shutdown()


@on("idle2")
def test_parameters_are_compared_again_in_a_new_job() -> None:
    hvd.init()
    model, optimizer = made()
    train(model, optimizer, 0)
    again()
    if hvd.rank() == 1:
        with torch.no_grad():
            model[0].weight += 1
    with pytest.raises(ValueError, match=r"parameter '0\.weight' is not equal on all ranks"):
        take_step(model, optimizer)
    hvd.shutdown()


@on("ranks2_in_each_order")
def test_an_optimizer_more_on_one_rank_shifts_no_names() -> None:
    if hvd.rank() == 0:
        tried = make_model(9)
        finder: Any = sgd(tried)
        with finder.no_sync(), finder.skip_synchronize():
            make_loss(tried, 0).backward()
            before = tried[0].weight.detach().clone()
            finder.step()
            assert not torch.equal(before, tried[0].weight)
            finder.zero_grad()
    model, optimizer = made()
    train(model, optimizer, 0)
    if hvd.rank() == 1:
        unused = hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1))
        assert unused.param_groups
    second = make_model(4)
    optimizer2 = sgd(second)
    for step in range(1, 3):
        train(model, optimizer, step)
        train(second, optimizer2, step)


@pytest.mark.parametrize("is_model_first", [True, False])
@pytest.mark.parametrize("groups", [None, 2])
@on("ranks2_in_each_order")
def test_a_deep_copy_of_model_and_optimizer_trains_like_the_original(is_model_first: bool, groups: int | None) -> None:
    model = make_model()
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model, groups=groups)
    train(model, optimizer, 0)
    if is_model_first:
        model2, optimizer2 = copy.deepcopy((model, optimizer))
    else:
        optimizer2, model2 = copy.deepcopy((optimizer, model))
    for step in range(1, 4):
        train(model2, optimizer2, step)
        train(model, optimizer, step)
    assert_close(model2.parameters(), model.parameters())
    assert type(optimizer2) is torch.optim.Adam
    model3, optimizer3 = copy.deepcopy((model2, optimizer2))
    del model2, optimizer2
    train(model3, optimizer3, 4)


@on("ranks2_in_each_order")
def test_a_copy_keeps_the_options_and_goes_with_its_last_reference() -> None:
    model, optimizer = made(op=hvd.Sum, backward_passes_per_step=2)
    gc.disable()  # no cycle may keep the hooks of a copy alive
    try:
        copied: Any
        model2, copied = copy.deepcopy((model, optimizer))
        assert (copied.op, copied.backward_passes_per_step) == (hvd.Sum, 2)
        copied.set_backward_passes_per_step(1)
        assert optimizer.backward_passes_per_step == 2
        wanted = [hvd.size() * g for g in mean_gradients(model2, hvd.size())]
        take_step(model2, copied)
        assert_close(gradients_of(model2), wanted)
        watched = weakref.ref(copied)
        del copied
        assert watched() is None
        assert all(not p._post_accumulate_grad_hooks for p in model2.parameters())
    finally:
        gc.enable()


@on("ranks2_in_each_order")
def test_an_optimizer_is_not_saved_whole_and_the_sentence_names_its_state() -> None:
    model, optimizer = made()
    train(model, optimizer, 0)
    for attempt in (
        lambda: pickle.dumps(optimizer),
        lambda: pickle.dumps((model, optimizer)),
        lambda: torch.save(optimizer, io.BytesIO()),
        lambda: copy.copy(optimizer),
    ):
        with pytest.raises(ValueError, match=r"SGD.*(pickled|copied).*optimizer\.state_dict\(\)"):
            attempt()
    train(model, optimizer, 1)


def leave(call: Callable[[], Any]) -> None:
    """Does a call that waits for other ranks, and leaves the wait by an exception of a signal handler."""
    interrupt(call, LeftError, lambda: bool(_runtime.current().active_calls), 0.01)


@on("three")
def test_a_backward_after_the_removal_of_its_set_is_refused() -> None:
    """Also when another set has the number by then."""
    for ranks in ([0, 1, 2][: hvd.size() - 1], [1, 2]):
        first = hvd.add_process_set(ranks)
        results = []
        if first.included():
            given = torch.full((3, 2), 1.0, requires_grad=True)
            results = [
                hvd.allreduce(given, op=hvd.Sum, process_set=first),
                hvd.grouped_allreduce([given, given], process_set=first)[1],
                hvd.allreduce(given, op=hvd.Max, process_set=first),
                hvd.allgather(given, process_set=first),
                hvd.broadcast(given, ranks[0], process_set=first),
            ]
        hvd.remove_process_set(first)
        for _ in range(2):
            for result in results:
                with pytest.raises(UsageError, match="process set 1 has been removed"):
                    result.sum().backward(retain_graph=True)
            second = hvd.add_process_set([0, 2])
            assert second.process_set_id == 1
            for result in results:
                with pytest.raises(UsageError, match="process set 1 has been removed"):
                    result.sum().backward(retain_graph=True)
            hvd.remove_process_set(second)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3


@on("three")
def test_a_copy_is_the_set_itself_and_a_pickled_one_is_not_registered() -> None:
    members = hvd.add_process_set([0, 1])
    for copied in (copy.copy(members), copy.deepcopy(members), copy.deepcopy({"of": members})["of"]):
        assert copied is members
    again = pickle.loads(pickle.dumps(members))
    assert (again.ranks, again.process_set_id, members.process_set_id) == ([0, 1], None, 1)
    if members.included():
        with pytest.raises(UsageError, match="has not been registered"):
            hvd.barrier(process_set=again)
    for make in (copy.copy, copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))):
        assert make(hvd.global_process_set) is hvd.global_process_set
    hvd.remove_process_set(members)
    assert hvd.add_process_set(again) is again
    assert (again.process_set_id, members.process_set_id) == (1, None)
    assert not hvd.remove_process_set(members)
    assert hvd.remove_process_set(again)


@on("three")
def test_threads_that_add_and_remove_lose_no_set() -> None:
    """One thread removes the set whose number the set of another gets."""
    for _ in range(8):
        first = hvd.add_process_set([0, 1])
        removal = threading.Thread(target=hvd.remove_process_set, args=(first,))
        removal.start()
        wait_until(lambda first=first: _runtime.current().active_calls or first.process_set_id is None, "it waits")
        second = hvd.add_process_set([1, 2])
        removal.join(DEADLINE_S)
        assert not removal.is_alive()
        assert (first.process_set_id, second.process_set_id) == (None, 1)
        if second.included():
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=second).item() == 2
        with pytest.raises(UsageError, match="a duplicate process set"):
            hvd.add_process_set([2, 1])
        assert hvd.remove_process_set(second)


@on("three")
def test_a_call_that_an_exception_has_left_goes_on() -> None:
    for turn in range(6):
        late = turn % 3
        members = hvd.ProcessSet([0, 1] if turn < 3 else [1, 2])
        if hvd.rank() == late:
            hvd.barrier()
            hvd.add_process_set(members)
        else:
            leave(lambda members=members: hvd.add_process_set(members))
            assert members.process_set_id is None
            hvd.barrier()
            assert hvd.add_process_set(members) is members
        assert members.process_set_id == 1
        if members.included():
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=members).item() == 2
        hvd.barrier()
        if hvd.rank() == late:
            hvd.barrier()
            assert hvd.remove_process_set(members)
        else:
            leave(lambda members=members: hvd.remove_process_set(members))
            assert members.process_set_id == 1
            hvd.barrier()
            assert not hvd.remove_process_set(members)
        assert members.process_set_id is None
    other = hvd.add_process_set([0, 2])
    assert other.process_set_id == 1
    hvd.remove_process_set(other)


@on("three")
def test_a_call_that_an_exception_has_left_at_its_end_has_added_the_set() -> None:
    members = hvd.ProcessSet([0, 1])

    def interrupted(call: ThreadCall) -> None:
        raise LeftError

    with pytest.MonkeyPatch.context() as patch:
        if hvd.rank() == 1:
            patch.setattr(ThreadCall, "result", interrupted)
            with pytest.raises(LeftError):
                hvd.add_process_set(members)
        else:
            hvd.add_process_set(members)
    if hvd.rank() == 1:
        assert hvd.add_process_set(members) is members
    assert members.process_set_id == 1
    with pytest.raises(UsageError, match="a duplicate process set"):
        hvd.add_process_set([0, 1])
    hvd.remove_process_set(members)


def _leave_and_start_again() -> None:
    for _ in range(2):
        members = hvd.ProcessSet([0])
        if hvd.rank() == 0:
            leave(lambda members=members: hvd.add_process_set(members))
            hvd.shutdown()
        else:
            with pytest.raises(AbortedError):
                hvd.allreduce(torch.ones(1))
            hvd.shutdown()
        assert members.process_set_id is None
        hvd.init()
        hvd.remove_process_set(hvd.add_process_set(members))
    hvd.shutdown()


@pytest.mark.parametrize("ranks_per_host", [2, 1])
def test_a_job_ends_though_an_exception_has_left_a_change(ranks_per_host: int) -> None:
    with RankPool(2, ranks_per_host=ranks_per_host) as pool:
        pool.run(_leave_and_start_again)


@on_own(2, HORO_DEADLOCK_TIME_SECONDS="0.5")
def test_a_thread_that_waits_for_its_turn_counts_as_waiting() -> None:
    """Rank 0 adds in one thread and then in another, rank 1 waits for something else: nobody can go on."""
    others = []
    if hvd.rank() == 0:
        for ranks in ([0], [1]):
            others.append(threading.Thread(target=_swallow, args=(ranks,)))
            others[-1].start()
    with pytest.raises(DeadlockError) as error:
        hvd.allreduce(torch.ones(1), name=f"of {hvd.rank()}")
    for thread in others:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    for told in ("'add_process_set'", "'allreduce.of 0'"):
        assert f"{told} (test_ranks_later_jobs.py:" in str(error.value)


def _swallow(ranks: list[int]) -> None:
    with pytest.raises((DeadlockError, AbortedError)):
        hvd.add_process_set(ranks)


class Communicator:
    """As far as a process set needs one of mpi4py: the ranks of the job that have the same color."""

    def __init__(self, color: int | None) -> None:
        colors = hvd.allgather_object(color)
        self._ranks = [rank for rank, other in enumerate(colors) if other == color and color is not None]

    def __bool__(self) -> bool:
        return bool(self._ranks)  # MPI.COMM_NULL is false

    def Get_rank(self) -> int:
        return self._ranks.index(hvd.rank())

    def allgather(self, value: int) -> list[int]:
        assert value == hvd.rank()
        return self._ranks[::-1]


@on("three")
def test_communicators_of_a_split_are_registered_and_removed_together() -> None:
    comm = Communicator(hvd.rank() % 2)
    own = hvd.ProcessSet(comm)
    assert (own.ranks, own.process_set_id) == (None, None)
    for _ in range(2):
        assert hvd.add_process_set(own) is own
        assert own.ranks == ([0, 2] if hvd.rank() % 2 == 0 else [1])
        assert own.process_set_id == 1 + hvd.rank() % 2
        assert str(own) == f"ProcessSet(process_set_id={own.process_set_id}, ranks={own.ranks}, mpi_comm={comm})"
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=own).item() == len(own.ranks or [])
        with pytest.raises(UsageError, match="a duplicate process set"):
            hvd.add_process_set([0, 2])
        assert hvd.remove_process_set(own)
        assert own.process_set_id is None


@on("three")
def test_a_process_that_is_in_no_communicator_takes_part_in_the_change() -> None:
    pair = hvd.add_process_set(hvd.ProcessSet(Communicator(0 if hvd.rank() < 2 else None)))
    assert (pair.ranks, pair.included()) == ([0, 1], hvd.rank() < 2)
    if pair.included():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() == 2
    assert hvd.remove_process_set(pair)
    hvd.shutdown()
    hvd.init()
    split = hvd.ProcessSet(Communicator(hvd.rank() // 2))
    hvd.shutdown()
    hvd.init(process_sets=[split])
    assert split.ranks == ([0, 1] if hvd.rank() < 2 else [2])
    assert hvd.remove_process_set(split)
