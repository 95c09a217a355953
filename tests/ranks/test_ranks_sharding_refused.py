"""``sharding="optimizer"``: what is refused, and what ranks see of parameters that one of them changes."""

from __future__ import annotations  # ranks get functions without what classes in them are annotated by

import copy
import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import on, on_own
from small_model import OwnOptimizer, bits_of, make_loss, make_model, make_pair, take_steps, train_pair

import horo.torch as hvd
from horo.errors import UnsupportedError, UsageError
from horo.torch.optimizer.shared_gradients import COUNTS_IN_HOOKS


def _made(kind: Any = torch.optim.SGD, sharding: str | None = "optimizer", **options: Any) -> tuple[Any, Any]:
    model = make_model()
    return model, hvd.DistributedOptimizer(kind(model.parameters(), lr=0.1), model, sharding=sharding, **options)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class Coupled(OwnOptimizer):
    """Divides by the norm of all gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        norm = sum(p.grad.square().sum() for p in self.trained()) ** 0.5
        self.move(self.param_groups[0]["lr"] / norm)


class Alone(OwnOptimizer):
    """Steps each parameter by itself; evaluates a closure twice; has state that is no tensor."""

    keep: Any = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for _ in range(0 if closure is None else 2):
            closure()
        with torch.no_grad():
            for parameter in self.trained():
                entries = self.state[parameter]
                entries["steps"] = entries.get("steps", 0) + 1
                if self.keep is not None:
                    entries["kept"] = self.keep
                parameter.sub_(self.param_groups[0]["lr"] / entries["steps"] * parameter.grad)


class Estimating(OwnOptimizer):
    """Takes longer steps while the gradients of all parameters keep their direction."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        found = self.trained()
        kept = [self.state[p].get("before", torch.zeros_like(p)) for p in found]
        norms = [sum(each.square().sum() for each in part) ** 0.5 for part in (kept, [p.grad for p in found])]
        cosine = sum((one * p.grad).sum() for one, p in zip(kept, found, strict=True)) / (norms[0] * norms[1] + 1e-9)
        for parameter in found:
            parameter.sub_(self.param_groups[0]["lr"] * (1 + max(0, cosine - 0.4)) * parameter.grad)
            self.state[parameter]["before"] = parameter.grad.clone()


class Keeping(torch.optim.Optimizer):
    """Has its momentum in an attribute of its own, where the momentum is not 0."""

    def __init__(self, parameters: Any, lr: float = 0.1, momentum: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})
        self.buffers: dict[Any, Any] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    kept = group["momentum"] * self.buffers.get(parameter, 0) + parameter.grad
                    parameter.sub_(group["lr"] * kept)
                    self.buffers[parameter] = kept


def _two_groups(parameters: Any, lr: float) -> Any:
    first, *others = parameters
    return Keeping([{"params": [first]}, {"params": others, "momentum": 0.9}], lr)


class Named(Alone):
    """Cannot be made from its defaults."""

    def __init__(self, parameters: Any, name: str, lr: float) -> None:
        super().__init__(parameters, lr)


class Exchanging(Alone):
    """Has other parameters for evaluation."""

    def eval(self) -> None:
        """Does nothing here."""


def _coupled_at_0(parameters: Any, lr: float) -> Any:
    """Its scheduler begins with a learning rate of 0, by which nothing moves yet."""
    optimizer = Coupled(parameters, lr=lr)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    return optimizer


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "gradients": (torch.optim.SGD, {"sharding": "gradients"}, r'sharding="gradients" is not offered'),
    "a word": (torch.optim.SGD, {"sharding": "all"}, "sharding must be None or 'optimizer', not 'all'"),
    "adasum": (torch.optim.SGD, {"op": hvd.Adasum}, "sharding= is not for op=Adasum"),
    "lbfgs": (
        torch.optim.LBFGS,
        {},
        r"LBFGS.step\(\) evaluates its closure several times and looks at all gradients together",
    ),
    "coupled": (Coupled, {}, "Coupled steps one by the gradients of others as well"),
    "coupled in a warm-up": (_coupled_at_0, {}, "Coupled steps one by the gradients of others as well"),
    "estimating": (Estimating, {}, "Estimating steps one by the gradients of others as well"),
    "attributes": (_two_groups, {}, r"all state of a parameter in optimizer\.state; Keeping keeps some elsewhere"),
    "values": (Exchanging, {}, r"Exchanging exchanges the values of parameters in train\(\) and eval\(\)"),
    "not made": (lambda p, lr: Named(p, "x", lr), {}, r"whether Named steps each parameter by itself, as .* TypeError"),
}


@pytest.mark.parametrize("case", REFUSED)
@on("ranks2")
def test_what_cannot_be_sharded_is_refused_where_it_is_made(case: str) -> None:
    kind, options, said = REFUSED[case]
    with pytest.raises(UsageError, match=said):
        _made(kind, **options)
    model, optimizer = _made(Alone)  # is one of a user, and can be
    take_steps(model, optimizer, range(1))


@on("ranks2")
def test_parameters_that_have_no_place() -> None:
    with pytest.raises(UnsupportedError, match=r"shape \[2\] is on meta; sharding= is for parameters in host memory"):
        _made_of(torch.empty(2, device="meta"))
    whole = torch.ones(6)
    for tensor, said in (
        (whole[2:], "is a part of a larger tensor, which would not follow it"),
        (torch.ones(3, 4)[:, ::2], r"has strides \(4, 2\) for shape \[3, 2\], which leave gaps or overlap"),
    ):
        parameter, optimizer = _made_of(tensor)
        parameter.sum().backward()
        with pytest.raises(UnsupportedError, match=f"sharding=: parameter 'w' {said}.* \\(rank 0\\)"):
            optimizer.step()
    parameter, optimizer = _made_of(torch.ones(6))
    alias = parameter.data
    parameter.sum().backward()
    if COUNTS_IN_HOOKS:
        with pytest.warns(UserWarning, match="parameter 'w' shares memory with another tensor, which keeps the old"):
            optimizer.step()
    else:
        optimizer.step()
    assert alias.tolist() == [1.0] * 6 != parameter.tolist()


def _made_of(tensor: torch.Tensor) -> tuple[torch.nn.Parameter, Any]:
    parameter = torch.nn.Parameter(tensor)
    return parameter, hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=0.1), [("w", parameter)], sharding="optimizer"
    )


@on("ranks2")
def test_a_torch_without_the_hooks_is_refused() -> None:
    kind: Any = torch.optim.Optimizer
    hook = kind.register_load_state_dict_post_hook
    try:
        del kind.register_load_state_dict_post_hook
        with pytest.raises(UnsupportedError, match=r"sharding= needs a torch whose optimizers have hooks around load"):
            _made()
    finally:
        kind.register_load_state_dict_post_hook = hook


@on("ranks2")
def test_plain_state_is_told_other_state_refused_and_a_closure_evaluated_twice() -> None:
    model, optimizer = _made(Alone)
    for step in range(3):
        take_steps(model, optimizer, range(step, step + 1))
        assert [entries["steps"] for entries in optimizer.state_dict()["state"].values()] == [step + 1] * 4
    optimizer.keep = [1]
    make_loss(model, hvd.rank()).backward()
    with pytest.raises(UnsupportedError, match=r"state 'kept' of parameter '.*' is a list, which ranks cannot share"):
        optimizer.step()
    model, optimizer = _made(Alone)

    def closure() -> torch.Tensor:
        loss = make_loss(model, hvd.rank())
        loss.backward()
        return loss

    with pytest.raises(UsageError, match=r"evaluates its closure several times, and with sharding= parameters of oth"):
        optimizer.step(closure)


@on_own(2)
def test_join_is_refused_while_there_is_one() -> None:
    model, optimizer = _made()
    said = rf"^join: rank {hvd.rank()} owns parameters of a DistributedOptimizer\(sharding=\.\.\.\), and a rank"
    with pytest.raises(UsageError, match=said):
        hvd.join()
    take_steps(model, optimizer, range(2))
    with pytest.raises(UsageError, match=said):
        hvd.join()
    del model, optimizer
    hvd.join()


@on("ranks2")
def test_a_step_of_one_rank_alone_is_refused_and_a_pickle() -> None:
    model, optimizer = _made()
    with optimizer.no_sync(), optimizer.skip_synchronize():
        make_loss(model, hvd.rank()).backward()
        with pytest.raises(UsageError, match=r"with sharding=, a step of this rank alone would change the parameters"):
            optimizer.step()
    with pytest.raises(UsageError, match="cannot be pickled"):
        copy.copy(optimizer)
    optimizer.zero_grad()
    take_steps(model, optimizer, range(1))


# -- changes of one rank ---------------------------------------------------------------------------------------------


@on("ranks2")
def test_changes_name_the_parameter_and_all_ranks_that_have_changed_it_and_can_be_taken_back() -> None:
    model, optimizer = _made()
    take_steps(model, optimizer, range(3))
    optimizer.zero_grad()
    make_loss(model, hvd.rank(), 5).backward()
    before = bits_of(model)
    if hvd.rank() == 1:
        with torch.no_grad():
            model[2].bias.add_(1)
    for _ in range(2):
        told = r"^parameter '2.bias' is not equal on .*: changed on rank 1 since step 3;"
        with pytest.raises(UsageError, match=told):
            optimizer.step()
    hvd.barrier()
    if hvd.rank() == 1:
        assert before != bits_of(model)
        with torch.no_grad():
            model[2].bias.sub_(1).copy_(torch.tensor(before[3], dtype=torch.float64))
    optimizer.step()
    told = hvd.allgather_object(bits_of(model))
    assert told[0] == told[1] != before
    with torch.no_grad():
        model[0].weight.add_(hvd.rank() + 1)
    make_loss(model, hvd.rank()).backward()
    with pytest.raises(UsageError, match=r"^parameter '0.weight' is not equal on .*: changed on rank 0, 1 since"):
        optimizer.step()


@on("ranks2")
def test_rank_0_evaluates_other_parameters_while_rank_1_is_in_forward() -> None:
    (model, _), (plain, _) = pair = make_pair(_sgd)
    train_pair(pair, range(2))
    inputs = torch.ones(4, dtype=torch.float64)
    wanted = model(inputs).tolist()
    hvd.barrier()
    if hvd.rank() == 0:
        kept = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        hvd.barrier()
        assert model(inputs).tolist() != wanted
        hvd.barrier()
        model.load_state_dict(kept)
    else:
        hvd.barrier()
        assert model(inputs).tolist() == wanted
        hvd.barrier()
    train_pair(pair, range(2, 4))
    assert bits_of(model) == bits_of(plain)


@on("ranks2")
def test_values_stay_those_of_the_step_before_until_all_ranks_step() -> None:
    model, optimizer = _made()
    take_steps(model, optimizer, range(2))
    optimizer.zero_grad()
    make_loss(model, hvd.rank(), 2).backward()
    before = bits_of(model)
    if hvd.rank() == 0:
        for _ in range(2000):
            assert bits_of(model) == before
    optimizer.step()
    assert bits_of(model) != before


@on("ranks2")
def test_a_parameter_that_has_left_on_one_rank() -> None:
    (model, optimizer), (plain, _) = pair = make_pair(_sgd)
    train_pair(pair, range(2))
    if hvd.rank() == 1:
        model[0].bias.data = model[0].bias.data.clone()  # has the same values, and comes back
    train_pair(pair, range(2, 4))
    assert bits_of(model) == bits_of(plain)
    if hvd.rank() == 1:
        model[0].bias.data = model[0].bias.data + 1
    make_loss(model, hvd.rank()).backward()
    said = r"^parameter '0.bias' has left the shared memory \(its data was reassigned\) on rank 1, and is not equal on"
    with pytest.raises(UsageError, match=said):
        optimizer.step()


@on_own(2, HORO_FIRST_CHECKS="0")
def test_they_are_compared_without_first_checks_as_well() -> None:
    model, optimizer = _made()
    with torch.no_grad():
        model[0].bias.add_(hvd.rank())
    make_loss(model, hvd.rank()).backward()
    with pytest.raises(UsageError, match=r"^parameter '0.bias' is not equal on all ranks before the first step; call"):
        optimizer.step()


@pytest.mark.parametrize("steps", [0, 1])
@on_own(2)
def test_memory_that_is_locked_is_refused(steps: int) -> None:
    """From the beginning, or after a step."""
    libc = ctypes.CDLL(None, use_errno=True)
    model, optimizer = _made()
    take_steps(model, optimizer, range(steps))
    if libc.mlockall(1 if steps else 2) != 0:  # MCL_CURRENT, MCL_FUTURE
        pytest.skip("mlockall is not allowed here")
    try:
        with pytest.raises(UnsupportedError, match=r"locks its memory \(mlockall\), which makes a private copy of ev"):
            take_steps(model, optimizer, range(steps, steps + 1))
    finally:
        libc.munlockall()


@on("ranks2")
def test_an_older_kernel_and_none_that_tells() -> None:
    from horo.torch.optimizer.sharding import pages  # noqa: PLC0415 - of the rank

    real = pages.fcntl.ioctl, pages._open_pagemap

    def refuse(*_: Any) -> Any:
        raise OSError("not here")

    try:
        pages.fcntl.ioctl = refuse
        (model, optimizer), (plain, _) = pair = make_pair(_sgd)
        for step in range(3):
            train_pair(pair, range(step, step + 1))
            for trained, _ in pair:
                with torch.no_grad():
                    for parameter in trained.parameters():
                        parameter.mul_(0.9)
        assert bits_of(model) == bits_of(plain)
        pages._open_pagemap = lambda: (_ for _ in ()).throw(pages._no_pagemap("not here"))
        model, optimizer = _made()
        make_loss(model, hvd.rank()).backward()
        with pytest.raises(UnsupportedError, match=r"/proc/self/pagemap is not readable \(not here\); leave sharding"):
            optimizer.step()
    finally:
        pages.fcntl.ioctl, pages._open_pagemap = real


@on("ranks4")
def test_members_of_a_process_set_and_a_size_of_one() -> None:
    two, one = hvd.add_process_set([1, 3]), hvd.add_process_set([2])
    for process_set in (two, one):
        if process_set.included():
            (model, _), (plain, _) = pair = make_pair(_sgd, process_set=process_set)
            train_pair(pair, range(3))
            assert bits_of(model) == bits_of(plain)
    hvd.remove_process_set(two)
    hvd.remove_process_set(one)


@on("ranks4")
def test_parameters_and_state_are_in_memory_once() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 512) for _ in range(8)))
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model, sharding="optimizer")

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    for _ in range(3):
        step()
    optimizer.state_dict()
    for parameter in model.parameters():
        parameter.sum().item()
    hvd.barrier()
    shared, private = (_sum_of(name, _largest_file()) for name in ("Pss", "Anonymous"))
    hvd.barrier()
    whole = hvd.allreduce(torch.tensor(float(shared)), op=hvd.Sum).item()
    assert private == 0
    assert 2.98 * size <= whole <= 3.05 * size + (1 << 16), (whole, size)


def _sum_of(name: str, file: str) -> int:
    """The bytes of a kind in all mappings of a file, by its number."""
    total, is_there = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            is_there = words[4] == file
        elif is_there and words[0] == f"{name}:":
            total += int(words[1]) << 10
    return total


def _largest_file() -> str:
    """The number of the file that has most memory mapped: that of this optimizer."""
    sizes: dict[str, int] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        words = line.split()
        if "memfd:horo" in line:
            start, end = (int(number, 16) for number in words[0].split("-"))
            sizes[words[4]] = sizes.get(words[4], 0) + end - start
    return max(sizes, key=lambda number: sizes[number])
