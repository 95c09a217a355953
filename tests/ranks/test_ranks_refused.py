"""Ranks that disagree, and calls that one rank refuses: all get a sentence with the ranks, and the job goes on."""

import copy
import functools
import re
import threading
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from jobs import wait_until
from rank_pool import on, on_own
from torch.autograd import forward_ad
from torch.distributed import ReduceOp

import horo.torch as hvd
from horo.errors import AbortedError, DeadlockError, UnsupportedError, UsageError
from horo.torch.engine import runtime

ONES, INTEGERS = torch.ones(2), torch.ones(2, dtype=torch.int32)


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


def _with_tangent(operation: Any, *options: Any) -> Callable[[Any, str | None], Any]:
    """A call whose tensor has a tangent if it is of zeros."""

    def call(x: torch.Tensor, name: str | None) -> Any:
        with forward_ad.dual_level():
            given = x if x.any() else forward_ad.make_dual(x, torch.ones_like(x))
            return operation([given] if "grouped" in operation.__name__ else given, *options, name=name)

    return call


_NAMES = "allgather allreduce allreduce_ alltoall broadcast broadcast_ grouped_allreduce reducescatter"
WITH_TANGENT = {
    f"tangent, {name}": _with_tangent(getattr(hvd, name), *([0] if "broadcast" in name else []))
    for name in _NAMES.split()
}
CALLS: dict[str, Callable[[Any, str | None], Any]] = {
    "adasum": lambda x, name: hvd.allreduce(x, op=hvd.Adasum, name=name),
    "allgather": lambda x, name: hvd.allgather(x, name=name),
    "allreduce": lambda x, name: hvd.allreduce(x, name=name),
    "allreduce_": lambda x, name: hvd.allreduce_(x, name=name),
    "alltoall": lambda x, name: hvd.alltoall(x, name=name),
    "average": lambda x, name: hvd.allreduce(torch.ones(2), x, name=name),
    "average and op": lambda x, name: hvd.allreduce_(torch.ones(2), average=x, op=hvd.Sum, name=name),
    "broadcast_": lambda x, name: hvd.broadcast_(x, 0, name=name),
    "compression": lambda x, name: hvd.allreduce(torch.ones(2), compression=x, name=name),
    "compression to scatter": lambda x, name: hvd.grouped_reducescatter([torch.ones(2)], compression=x, name=name),
    "func.grad": lambda x, name: (
        hvd.allgather(x, name=name) if x.any() else torch.func.grad(lambda y: hvd.allgather(y, name=name).sum())(x)
    ),
    "group": lambda x, name: hvd.grouped_allreduce([torch.ones(2), x], name=name),
    "grouped_allgather": lambda x, name: hvd.grouped_allgather(x, name=name),
    "grouped_allreduce": lambda x, name: hvd.grouped_allreduce(x, name=name),
    "grouped_reducescatter": lambda x, name: hvd.grouped_reducescatter(x, name=name),
    "max": lambda x, name: hvd.allreduce(x, op=hvd.Max, name=name),
    "op": lambda x, name: hvd.allreduce(torch.ones(2), op=x, name=name),
    "op to scatter": lambda x, name: hvd.reducescatter(torch.ones(2), op=x, name=name),
    "parameters": lambda x, _: hvd.broadcast_parameters({"a": x}, 0),
    "postscale": lambda x, name: hvd.reducescatter(torch.ones(2), postscale_factor=x, name=name),
    "prescale": lambda x, name: hvd.allreduce(torch.ones(2), prescale_factor=x, name=name),
    "reducescatter": lambda x, name: hvd.reducescatter(x, name=name),
    "root": lambda x, name: hvd.broadcast(torch.ones(2), x, name=name),
    "root of an object": lambda x, name: hvd.broadcast_object(1, x, name=name),
    "root of parameters": lambda x, _: hvd.broadcast_parameters({"a": torch.ones(2)}, x),
    "root of state": lambda x, _: hvd.broadcast_optimizer_state(
        torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1), x
    ),
    "sparse": lambda x, name: hvd.sparse_allreduce_async(x, name=name, op=hvd.Sum)(),
    "splits": lambda x, name: hvd.alltoall(torch.ones(2), x, name=name),
    "vmap": lambda x, name: (
        hvd.allreduce(x, name=name) if x.any() else torch.func.vmap(lambda row: hvd.allreduce(row, name=name))(x)
    ),
    **WITH_TANGENT,
}
_NO_RULE = "torch.func (vmap, grad, jvp and others) has no rule for what all ranks do together; call it outside of the"
REFUSALS: list[tuple[str, Any, Any, str]] = [
    # the call, what is right, what is wrong (functions: what they return), and the reason
    ("adasum", ONES, INTEGERS, "Adasum is for floats"),
    ("allreduce", ONES, torch.ones(2, dtype=torch.bool), "bool can be reduced with Sum, Max"),
    ("max", ONES, torch.ones(2, dtype=torch.complex64), "complex numbers can be reduced with Sum, Average or Product"),
    ("allreduce", ONES, lambda: torch.empty(2, dtype=torch.float8_e5m2), "float8_e5m2 cannot be reduced"),
    ("allreduce", ONES, [1.0], "expected a torch.Tensor, not list"),
    ("allreduce", ONES, lambda: torch.ones(2, device="meta"), "meta"),
    ("allreduce", ONES, _nested, "another shape on each rank; use torch.nested.to_padded_tensor(tensor, 0.0)"),
    ("vmap", ONES, torch.zeros(1, 2), _NO_RULE),
    ("func.grad", ONES, torch.zeros(2), _NO_RULE),
    *((call, ONES, torch.zeros(2), "forward-mode autograd (make_dual) has no rule") for call in WITH_TANGENT),
    ("allreduce", ONES, _fake, "(FakeTensor) has no memory of its own, so there is nothing to send; call it with the"),
    ("alltoall", ONES, _nested, "nested tensors are not supported here"),
    ("broadcast_", torch.ones(3), _cut, "needs 16 bytes, and its storage has 8"),
    (
        "allreduce_",
        torch.ones(3, 2),
        lambda: torch.ones(4).unfold(0, 2, 1),
        "whose elements overlap in memory cannot be",
    ),
    ("group", ONES, lambda: torch.ones(2).to_sparse(), "sparse"),
    ("splits", [1, 1], [1, 1, 1], "splits; 2 ranks take part"),
    ("splits", lambda: torch.tensor([1, 1]), ONES, "it must be a 1-D tensor of integers"),
    ("alltoall", ONES, torch.ones(3), "3 rows cannot be split evenly"),
    *((call, ONES, torch.tensor(1.0), "a scalar has no first dimension") for call in ("allgather", "reducescatter")),
    ("root", 1, True, "root_rank True is not a rank of this job"),
    ("op", hvd.Sum, 99, "op=99 is not a reduction"),
    ("op", hvd.Sum, True, "op=True is not a reduction"),
    ("op", hvd.Sum, lambda: ReduceOp.BAND, "op=torch.distributed.ReduceOp.BAND is not offered"),
    ("op to scatter", hvd.Sum, 1.0, "op=1.0 is not a reduction"),
    ("op to scatter", hvd.Sum, 99, "op=99 is not a reduction"),
    ("average", None, "loss", "average='loss' is neither True nor False"),
    ("average", None, hvd.Sum, "average=hvd.Sum is neither True nor False"),
    ("average and op", None, True, "op and average were both given"),
    ("prescale", 1.0, None, "prescale_factor must be one real number, not None"),
    ("postscale", 1.0, 1j, "postscale_factor must be one real number, not 1j"),
    ("compression", hvd.Compression.fp16, 3, "compression must be a Compressor"),
    ("compression to scatter", hvd.Compression.none, 3, "compression must be a Compressor"),
    *(
        (f"grouped_{call}", [ONES], [], "list of tensors is empty")
        for call in ("allreduce", "allgather", "reducescatter")
    ),
    ("sparse", lambda: torch.ones(2).to_sparse(), ONES, "expected a sparse tensor in COO form"),
    *((f"root{of}", 0, 7, "root_rank 7 is not a") for of in ("", " of an object", " of parameters", " of state")),
    ("parameters", ONES, "word", "'a' is no tensor but str"),
]


@pytest.mark.parametrize("name", ["x", None])
@pytest.mark.parametrize(
    ("call", "right", "wrong", "reason"),
    [(CALLS[row[0]], *row[1:]) for row in REFUSALS],
    ids=[f"{row[0]}: {row[3]}" for row in REFUSALS],
)
@on("ranks2")
def test_all_ranks_get_the_rank_and_its_reason_and_go_on(
    call: Callable[[Any, str | None], Any], right: Any, wrong: Any, reason: str, name: str | None
) -> None:
    def take_part(given: Any) -> None:
        call(given() if isinstance(given, FunctionType) else copy.deepcopy(given), name)

    for refuses in (0, 1, 1, 0):
        with pytest.raises(UsageError) as caught:
            take_part(wrong if hvd.rank() == refuses else right)
        text = str(caught.value)
        assert reason in text
        assert bool(re.match(rf"rank {refuses} \(.+\) has refused it: ", text)) == (hvd.rank() != refuses)
        take_part(right)  # the name can be used again, and calls without a name are still those of the others
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]


@on("ranks4")
def test_in_a_process_set_its_members_get_the_error_and_nobody_else_waits() -> None:
    pair = hvd.add_process_set([1, 3])
    if pair.included():
        told = "^allreduce" if hvd.rank() == 3 else r"^rank 3 \(.*Adasum is for fl"
        with pytest.raises(UnsupportedError, match=told):
            tensor = INTEGERS if hvd.rank() == 3 else torch.ones(2)
            hvd.allreduce(tensor, op=hvd.Adasum, name="x", process_set=pair)
        assert hvd.allreduce(torch.ones(2), name="x", op=hvd.Sum, process_set=pair).tolist() == [2.0, 2.0]
    assert hvd.allreduce(torch.ones(2), name="x", op=hvd.Sum).tolist() == [4.0, 4.0]
    hvd.remove_process_set(pair)


@on("ranks2")
def test_a_handle_gets_the_error_of_the_rank_that_refused_and_a_call_of_one_rank_stops_nobody() -> None:
    with pytest.raises(UnsupportedError, match="Adasum is for floats"):
        tensor = INTEGERS if hvd.rank() else torch.ones(2)
        hvd.synchronize(hvd.allreduce_async_(tensor, op=hvd.Adasum, name="x"))
    if hvd.rank() == 1:
        with pytest.raises(UnsupportedError):
            hvd.allreduce(INTEGERS, op=hvd.Adasum, name="nobody else's")
    assert hvd.allreduce(torch.ones(2), name="x", op=hvd.Sum).tolist() == [2.0, 2.0]


@on("ranks2")
def test_a_name_is_taken_until_its_handle_is_synchronized_polled_or_gone() -> None:
    refused = pytest.raises(ValueError, match=r"'allreduce\.taken': a tensor of this name is being processed")
    for free in ("synchronize", "poll", "garbage"):
        tensor = torch.ones(3)
        handle = hvd.allreduce_async_(tensor, name="taken", op=hvd.Sum)
        hvd.barrier()  # it is done on all ranks: requests of a rank are done in their order
        del tensor
        kept = [handle]
        assert isinstance(handle, int)
        assert handle > 0
        with refused:
            hvd.allreduce_async(torch.ones(3), name="taken")
        with refused:
            hvd.allreduce(torch.ones(3), name="taken")
        del handle
        with refused:
            hvd.allreduce(torch.ones(3), name="taken")
        if free == "poll":
            wait_until(functools.partial(hvd.poll, kept[0]), "the operation is done", deadline_s=60)
        if free == "synchronize":
            assert hvd.synchronize(kept[0]).tolist() == [2.0] * 3
        if free == "garbage":
            kept.clear()
        assert hvd.allreduce(torch.ones(1), name="taken").tolist() == [1.0]
        assert hvd.synchronize(hvd.allreduce_async(torch.ones(1), name="taken")).tolist() == [1.0]
        hvd.barrier()


@pytest.mark.parametrize("by_thread", [False, True])
@on_own(2, HORO_DEADLOCK_TIME_SECONDS="0.5")
def test_ranks_that_wait_for_a_call_that_was_refused_for_its_name_are_told(by_thread: bool) -> None:
    thread = threading.Thread(target=_fail)
    if hvd.rank() == 0 and by_thread:
        thread.start()
        wait_until(lambda: runtime.current().core.counters()["requests"], "its name is taken", deadline_s=60)
    elif not by_thread:
        handle = hvd.allreduce_async(torch.ones(3), name="twice", op=hvd.Sum)
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match="is being processed already"):
            hvd.allreduce(torch.ones(3), name="twice")
    elif not by_thread:
        hvd.synchronize(handle)
    name = "other" if hvd.rank() == 0 else "later" if by_thread else "twice"
    with pytest.raises(DeadlockError) as error:
        hvd.allreduce(torch.ones(3), name=name)
    if thread.ident is not None:
        thread.join()
    told = str(error.value)
    assert re.search(r"\(\S+:\d+; a second 'allreduce\.twice' was refused before\)", told), told
    assert re.search(r"rank 1 for 'allreduce\.\w+' \(\S+:\d+\)", told), told


def _fail() -> None:
    with pytest.raises((DeadlockError, AbortedError)):
        hvd.allreduce(torch.ones(3), name="twice")


@on("ranks2")
def test_an_old_handle_does_not_free_the_name_of_a_later_operation() -> None:
    first = hvd.allreduce_async(torch.ones(1), name="again", op=hvd.Sum)
    wait_until(lambda: hvd.poll(first), "the first is done", deadline_s=60)
    second = hvd.allreduce_async(torch.ones(1), name="again", op=hvd.Sum)
    assert hvd.synchronize(first).tolist() == [2.0]
    with pytest.raises(ValueError, match=r"'allreduce\.again': a tensor of this name"):
        hvd.allreduce(torch.ones(1), name="again")
    assert hvd.synchronize(second).tolist() == [2.0]
