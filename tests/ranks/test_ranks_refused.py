"""A call that one rank refuses fails on all ranks of the process set, with the rank and its reason."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch.distributed import ReduceOp

import horo.torch as hvd
from horo.errors import UnsupportedError, UsageError

INTEGERS = torch.ones(2, dtype=torch.int32)


def _nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, torch says
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def _fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415 - it takes a second

    with FakeTensorMode():
        return torch.ones(2)


def _cut() -> torch.Tensor:
    """A tensor whose storage has lost its end."""
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(8)
    return tensor


REFUSALS: dict[str, tuple[Callable[[bool, str | None], Any], str]] = {
    "integers under Adasum": (
        lambda wrong, name: hvd.allreduce(INTEGERS if wrong else torch.ones(2), op=hvd.Adasum, name=name),
        "Adasum is for floats",
    ),
    "bool under Average": (
        lambda wrong, name: hvd.allreduce(torch.ones(2, dtype=torch.bool if wrong else torch.float32), name=name),
        "bool can be reduced with Sum, Max",
    ),
    "a maximum of complex numbers": (
        lambda wrong, name: hvd.allreduce(
            torch.ones(2, dtype=torch.complex64 if wrong else torch.float32), op=hvd.Max, name=name
        ),
        "complex numbers can be reduced with Sum, Average or Product",
    ),
    "a dtype that is moved only": (
        lambda wrong, name: hvd.allreduce(
            torch.empty(2, dtype=torch.float8_e5m2 if wrong else torch.float32), name=name
        ),
        "float8_e5m2 cannot be reduced",
    ),
    "no tensor": (
        lambda wrong, name: hvd.allreduce([1.0] if wrong else torch.ones(2), name=name),
        "expected a torch.Tensor, not list",
    ),
    "a nested tensor": (
        lambda wrong, name: hvd.allreduce(_nested() if wrong else torch.ones(2), name=name),
        "their parts may have another shape on each rank; use torch.nested.to_padded_tensor(tensor, 0.0)",
    ),
    "a nested tensor to exchange": (
        lambda wrong, name: hvd.alltoall(_nested() if wrong else torch.ones(2), name=name),
        "nested tensors are not supported here",
    ),
    "a tensor that vmap has wrapped": (
        lambda wrong, name: (
            torch.func.vmap(lambda row: hvd.allreduce(row, name=name))(torch.ones(1, 2))
            if wrong
            else hvd.allreduce(torch.ones(2), name=name)
        ),
        "torch.func (vmap, grad, jvp and others) has no rule for what all ranks do together; call it outside of the",
    ),
    "a tensor that torch.func.grad follows": (
        lambda wrong, name: (
            torch.func.grad(lambda x: hvd.allgather(x, name=name).sum())(torch.ones(2))
            if wrong
            else hvd.allgather(torch.ones(2), name=name)
        ),
        "torch.func (vmap, grad, jvp and others) has no rule for what all ranks do together; call it outside of the",
    ),
    "a fake tensor": (
        lambda wrong, name: hvd.allreduce(_fake() if wrong else torch.ones(2), name=name),
        "(FakeTensor) has no memory of its own, so there is nothing to send; call it with the tensor that it",
    ),
    "less memory than the shape needs": (
        lambda wrong, name: hvd.broadcast_(_cut() if wrong else torch.ones(3), 0, name=name),
        "needs 16 bytes, and its storage has 8",
    ),
    "elements that overlap": (
        lambda wrong, name: hvd.allreduce_(
            torch.ones(4).unfold(0, 2, 1) if wrong else torch.ones(6).unfold(0, 2, 2), name=name
        ),
        "a tensor whose elements overlap in memory cannot be written in place",
    ),
    "a member of a group": (
        lambda wrong, name: hvd.grouped_allreduce(
            [torch.ones(2), torch.ones(2).to_sparse() if wrong else torch.ones(2)], name=name
        ),
        "sparse",
    ),
    "splits that are too many": (
        lambda wrong, name: hvd.alltoall(torch.ones(2), [1] * (hvd.size() + wrong), name=name),
        "splits; 2 ranks take part",
    ),
    "splits of another dtype": (
        lambda wrong, name: hvd.alltoall(torch.ones(2), torch.ones(2) if wrong else torch.tensor([1, 1]), name=name),
        "it must be a 1-D tensor of integers",
    ),
    "rows without splits": (
        lambda wrong, name: hvd.alltoall(torch.ones(3 if wrong else 2), name=name),
        "3 rows cannot be split evenly",
    ),
    "a scalar to gather": (
        lambda wrong, name: hvd.allgather(torch.tensor(1.0) if wrong else torch.ones(2), name=name),
        "a scalar has no first dimension",
    ),
    "a scalar to scatter": (
        lambda wrong, name: hvd.reducescatter(torch.tensor(1.0) if wrong else torch.ones(2), name=name),
        "a scalar has no first dimension",
    ),
    "a root that is no rank": (
        lambda wrong, name: hvd.broadcast(torch.ones(2), 7 if wrong else 0, name=name),
        "root_rank 7 is not a rank of this job",
    ),
    "no reduction": (
        lambda wrong, name: hvd.allreduce(torch.ones(2), op=99 if wrong else hvd.Sum, name=name),
        "op=99 is not a reduction",
    ),
    "a truth that is equal to a reduction": (
        lambda wrong, name: hvd.allreduce(torch.ones(2), op=True if wrong else hvd.Sum, name=name),
        "op=True is not a reduction",
    ),
    "a number that is equal to a reduction to scatter": (
        lambda wrong, name: hvd.reducescatter(torch.ones(2), op=1.0 if wrong else hvd.Sum, name=name),
        "op=1.0 is not a reduction",
    ),
    "a reduction that only torch has": (
        lambda wrong, name: hvd.allreduce(torch.ones(2), op=ReduceOp.BAND if wrong else hvd.Sum, name=name),
        "op=torch.distributed.ReduceOp.BAND is not offered",
    ),
    "a name in the place of average": (
        lambda wrong, name: hvd.allreduce(torch.ones(2), "loss" if wrong else None, name=name),
        "average='loss' is neither True nor False",
    ),
    "a reduction in the place of average": (
        lambda wrong, name: hvd.allreduce_(torch.ones(2), hvd.Sum if wrong else None, name=name),
        "average=hvd.Sum is neither True nor False",
    ),
    "a factor that is none": (
        lambda wrong, name: hvd.allreduce(torch.ones(2), prescale_factor=None if wrong else 1.0, name=name),
        "prescale_factor must be one real number, not None",
    ),
    "a complex factor to scatter": (
        lambda wrong, name: hvd.reducescatter(torch.ones(2), postscale_factor=1j if wrong else 1.0, name=name),
        "postscale_factor must be one real number, not 1j",
    ),
    "a truth that is equal to a root": (
        lambda wrong, name: hvd.broadcast(torch.ones(2), True if wrong else 1, name=name),
        "root_rank True is not a rank of this job",
    ),
    "two reductions": (
        lambda wrong, name: hvd.allreduce_(torch.ones(2), average=True if wrong else None, op=hvd.Sum, name=name),
        "op and average were both given",
    ),
    "no reduction to scatter": (
        lambda wrong, name: hvd.reducescatter(torch.ones(2), op=99 if wrong else hvd.Sum, name=name),
        "op=99 is not a reduction",
    ),
    "no compressor": (
        lambda wrong, name: hvd.allreduce(torch.ones(2), compression=3 if wrong else hvd.Compression.fp16, name=name),
        "compression must be a Compressor",
    ),
    "no compressor to scatter": (
        lambda wrong, name: hvd.grouped_reducescatter(
            [torch.ones(2)], compression=3 if wrong else hvd.Compression.none, name=name
        ),
        "compression must be a Compressor",
    ),
    "a group of nothing": (
        lambda wrong, name: hvd.grouped_allreduce([] if wrong else [torch.ones(2)], name=name),
        "the list of tensors is empty",
    ),
    "a group of nothing to gather": (
        lambda wrong, name: hvd.grouped_allgather([] if wrong else [torch.ones(2)], name=name),
        "the list of tensors is empty",
    ),
    "a group of nothing to scatter": (
        lambda wrong, name: hvd.grouped_reducescatter([] if wrong else [torch.ones(2)], name=name),
        "the list of tensors is empty",
    ),
    "a dense tensor instead of a sparse one": (
        lambda wrong, name: hvd.sparse_allreduce_async(
            torch.ones(2) if wrong else torch.ones(2).to_sparse(), name=name, op=hvd.Sum
        )(),
        "expected a sparse tensor in COO form",
    ),
    "a root of an object that is no rank": (
        lambda wrong, name: hvd.broadcast_object(1, 7 if wrong else 0, name=name),
        "root_rank 7 is not a rank of this job",
    ),
    "a root of parameters that is no rank": (
        lambda wrong, _: hvd.broadcast_parameters({"a": torch.ones(2)}, 7 if wrong else 0),
        "root_rank 7 is not a rank of this job",
    ),
    "a parameter that is no tensor": (
        lambda wrong, _: hvd.broadcast_parameters({"a": "word" if wrong else torch.ones(2)}, 0),
        "'a' is no tensor but str",
    ),
    "a root of the state of an optimizer that is no rank": (
        lambda wrong, _: hvd.broadcast_optimizer_state(
            torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1), 7 if wrong else 0
        ),
        "root_rank 7 is not a rank of this job",
    ),
}


@pytest.mark.parametrize("name", ["x", None])
@pytest.mark.parametrize("what", REFUSALS)
def test_all_ranks_get_the_rank_and_its_reason_and_go_on(ranks2: RankPool, what: str, name: str | None) -> None:
    def check(call: Callable[[bool, str | None], Any], name: str | None) -> list[str]:
        texts = []
        for wrong in (0, 1, 1, 0):
            with pytest.raises(UsageError) as caught:
                call(hvd.rank() == wrong, name)
            texts.append(str(caught.value))
            call(False, name)  # the name can be used again, and calls without a name are still those of the others
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]
        return texts

    call, reason = REFUSALS[what]
    for rank, texts in enumerate(ranks2.run(check, call, name)):
        for wrong, text in zip((0, 1, 1, 0), texts, strict=True):
            assert reason in text
            assert bool(re.match(rf"rank {wrong} \(.+\) has refused it: ", text)) == (rank != wrong)


def test_in_a_process_set_its_members_get_the_error_and_nobody_else_waits(ranks4: RankPool) -> None:
    def check() -> str:
        pair = hvd.add_process_set([1, 3])
        text = ""
        if pair.included():
            with pytest.raises(UnsupportedError) as caught:
                tensor = INTEGERS if hvd.rank() == 3 else torch.ones(2)
                hvd.allreduce(tensor, op=hvd.Adasum, name="x", process_set=pair)
            text = str(caught.value)
            assert hvd.allreduce(torch.ones(2), name="x", op=hvd.Sum, process_set=pair).tolist() == [2.0, 2.0]
        assert hvd.allreduce(torch.ones(2), name="x", op=hvd.Sum).tolist() == [4.0, 4.0]
        hvd.remove_process_set(pair)
        return text

    texts = ranks4.run(check)
    assert texts[0] == texts[2] == ""
    assert texts[1].startswith("rank 3 (")
    assert "Adasum is for floats" in texts[1]
    assert texts[3].startswith("allreduce")


def test_a_handle_gets_the_error_of_the_rank_that_refused(ranks2: RankPool) -> None:
    def check() -> str:
        try:
            tensor = INTEGERS if hvd.rank() else torch.ones(2)
            hvd.synchronize(hvd.allreduce_async_(tensor, op=hvd.Adasum, name="x"))
        except UnsupportedError as error:
            return str(error)
        return ""

    for text in ranks2.run(check):
        assert "Adasum is for floats" in text


def test_a_call_that_only_one_rank_makes_and_refuses_stops_nobody(ranks2: RankPool) -> None:
    def check() -> list[float]:
        if hvd.rank() == 1:
            with pytest.raises(UnsupportedError):
                hvd.allreduce(INTEGERS, op=hvd.Adasum, name="nobody else's")
        return hvd.allreduce(torch.ones(2), name="x", op=hvd.Sum).tolist()

    assert ranks2.run(check) == [[2.0, 2.0]] * 2
