"""The module horo._calls, on ranks that are threads: so the sanitizers see it, too."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from ranks import SUM, Rank, describe, on_ranks

from horo.core import context
from horo.core.calls import Caller, Gradient, Numbers, Ready, Slot, changed, is_shared, note_sharing, pick, repeat
from horo.errors import HoroError

torch = pytest.importorskip("torch")
pytest.importorskip("horo.torch.optimizer.shared_gradients")  # tells what the module needs to know of torch


class Kept(Slot):
    def __init__(self, name: str, tensor: Any, numbers: Numbers | None = None) -> None:
        super().__init__()
        array = tensor.detach().numpy()
        self.buffer = context.RequestBuffer.of(
            context.OPS["allreduce"], name, describe([array], [array]), reduce_op=SUM
        )
        self.bind(*self.buffer.places(), numbers, len(name))
        self.learn(tensor, tensor, tensor.nbytes, tensor.nbytes)


class Job(Caller):
    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self.core = rank.context
        self.kept, self.active_calls, self.abandoned, self.taken_names = {}, {}, {}, {}
        self.use(rank.context.place)

    def submit_again(self, kept: Kept) -> None:
        self.core.submit(kept.buffer)

    def release_abandoned(self) -> None:
        """After a call that has failed."""

    def go_on(self, kept: Kept) -> None:
        self.core.go_on(kept.buffer)


class Bucket(Ready):
    def __init__(self) -> None:
        super().__init__()
        self.states, self.room, self.run, self.full = [], 2, 0, 0  # outside backward, the run is -1

    def admit(self, gradient: Gradient) -> bool:
        return gradient.held_at is None

    def submit(self) -> None:
        self.full += 1


def _gradients(count: int) -> tuple[list[Any], Bucket]:
    bucket = Bucket()
    made = []
    for at in range(count):
        gradient = Gradient()
        gradient.parameter = torch.nn.Parameter(torch.zeros(at + 1))
        gradient.parameter.grad = torch.full((at + 1,), float(at))
        gradient.again = [Kept(f"{at}", gradient.parameter.grad), None]
        gradient.weight = 1
        gradient.bind(bucket)
        made.append(gradient)
    return made, bucket


@on_ranks([2])
def test_gradients_go_through_hooks_and_loops(rank: Rank) -> None:
    job = Job(rank)
    gradients, bucket = _gradients(5)
    for _ in range(3):
        for gradient in gradients[:3]:
            gradient.hook(gradient.parameter)
            gradient.hook(gradient.parameter)  # it is held already
        assert bucket.states == gradients[:3]
        assert not note_sharing(gradients)
        begun, tensors, others = pick(tuple(gradients), False, gradients[4])
        assert (begun, others) == (gradients[:4], gradients[4:])
        assert all(tensor is each.parameter.grad for tensor, each in zip(tensors, begun, strict=True))
        job.submit_each(begun, False, bucket)
        assert all(each.pending is bucket and each.handle > 0 for each in begun)
        assert pick(gradients, True, None)[0] == []
        assert job.finish_each(begun, 0) == 4
        assert changed(begun, bucket, 1) == [0, 1, 2, 3]  # the results are not counted
        assert changed(begun, bucket, 0) == []
        torch._C._increment_version(tensors)
        assert changed(begun, bucket, 1) == changed(begun, None, 1) == []
        begun[1].parameter.grad = torch.zeros(2)
        assert changed(begun, bucket, 1) == [1]
        for gradient in gradients:
            gradient.pending = gradient.held = gradient.held_at = None
        bucket.states.clear()
        bucket.room = 2
    assert bucket.full == 6
    assert gradients[3].parameter.grad.tolist() == [3.0 * 8] * 4


@on_ranks([2])
def test_what_is_refused_or_fails_leaves_the_others(rank: Rank) -> None:
    job = Job(rank)
    gradients, bucket = _gradients(4)
    picked, _, _ = pick(gradients, False, None)
    tensor = torch.zeros(3)
    if rank.rank == 1:
        rank.await_mark("refused")
    first = job.core.submit(Kept("2", tensor).buffer)  # takes the name
    if rank.rank == 0:
        with pytest.raises(HoroError, match="'2'"):
            job.submit_each(picked, False, bucket)
        rank.mark("refused")
    else:
        job.submit_each(picked[:2], False, bucket)
    assert (
        [each.handle > 0 for each in picked] == [each.pending is bucket for each in picked] == [True] * 2 + [False] * 2
    )
    assert job.finish_each(picked, 0) == 2
    job.core.finish(first)


def test_what_hooks_refer_to_is_collected() -> None:
    gradients, bucket = _gradients(2)
    gradients[0].pending = gradients[0].group = gradients
    gradients[0].parameter.hook = gradients[0].hook  # garbage of torch's own hooks torch itself does not find
    left = weakref.ref(gradients[0].parameter)
    del gradients, bucket
    gc.collect()
    assert left() is None


def test_shared_memory_is_known() -> None:
    whole = torch.zeros(4)
    assert not is_shared(whole)
    view = whole[:2]
    assert is_shared(view)
    assert not is_shared(view.clone())
    assert not is_shared(whole.to_sparse())


@on_ranks([2])
def test_a_call_repeats(rank: Rank) -> None:
    if rank.rank == 0:
        job = Job(rank)
        tensor = torch.ones(3)
        job.kept["key"] = kept = Kept("r", tensor)
        kept.key = "key"
        for _ in range(3):
            assert repeat("key", tensor, True, None) is tensor
        assert repeat("key", torch.ones(4), True, None) is None
        assert tensor.tolist() == [8.0] * 3
    else:
        other = np.ones(3, np.float32)
        for scale in (1, 2, 4):
            rank.allreduce(other * scale, "r")


@on_ranks([2])
def test_calls_without_a_name_count(rank: Rank) -> None:
    if rank.rank == 0:
        job, tensor, numbers = Job(rank), torch.ones(3), Numbers()
        job.kept["key"] = kept = Kept("r.noname.", tensor, numbers)
        kept.key, numbers.next = "key", 99
        for _ in range(2):
            assert repeat("key", tensor, True, None) is tensor
        assert (kept.buffer.name(), numbers.take()) == ("r.noname.100", 101)
        job.is_joining = True
        with pytest.raises(AttributeError, match="label"):  # which settles that before
            repeat("key", tensor, True, None)
    else:
        for number in (99, 100):
            rank.allreduce(np.ones(3, np.float32), f"r.noname.{number}")
