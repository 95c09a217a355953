"""Mistakes and unusual uses of a distributed optimizer, and torch.compile: they work, or a message names what to do."""

from __future__ import annotations  # ranks get functions without what classes in them are annotated by

import warnings
from pathlib import Path
from typing import Any

import pytest
import small_model as small
import torch
from jobs import run_python
from rank_pool import on, one_of

import horo.torch as hvd
from horo.torch.optimizer.at_backward import BackwardReducer


@on("ranks2_in_step")
def test_skip_synchronize_without_synchronize_is_an_error_in_horovods_order() -> None:
    model, optimizer = small.made()
    wanted = small.mean_gradients(model, hvd.size())
    before = [p.detach().clone() for p in model.parameters()]
    small.make_loss(model, hvd.rank()).backward()
    with (
        optimizer.skip_synchronize(),
        pytest.raises(ValueError, match=r"gradients are not averaged.*optimizer\.synchronize\(\) first"),
    ):
        optimizer.step()
    small.assert_close(model.parameters(), before)
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    small.assert_close(small.gradients_of(model), wanted)
    optimizer.zero_grad()
    with optimizer.skip_synchronize():
        optimizer.step()  # there is no gradient


@pytest.mark.parametrize("mode", ["synchronized", "plain"])
@on("ranks2_in_each_order")
def test_skip_synchronize_with_a_closure_wants_averaged_gradients(mode: str) -> None:
    model, optimizer = small.made()
    wanted = small.mean_gradients(model, hvd.size())

    def closure() -> Any:
        optimizer.zero_grad()
        loss = small.make_loss(model, hvd.rank())
        loss.backward()
        if mode == "synchronized":
            optimizer.synchronize()
        return loss

    with optimizer.skip_synchronize():
        if mode == "synchronized" or isinstance(optimizer._reducer, BackwardReducer):
            optimizer.step(closure)
            small.assert_close(small.gradients_of(model), wanted)
        else:
            with pytest.raises(ValueError, match="gradients are not averaged"):
                optimizer.step(closure)
            optimizer.synchronize()


@on("ranks2_in_each_order")
def test_gradients_made_inside_no_sync_are_not_skipped_unless_both_are_around_the_step() -> None:
    model, optimizer = small.made()
    with optimizer.no_sync():
        small.make_loss(model, hvd.rank()).backward()
    with optimizer.skip_synchronize(), pytest.raises(ValueError, match=r"not averaged.*no_sync\(\)"):
        optimizer.step()
    wanted = small.mean_gradients(model, hvd.size())
    optimizer.step()
    small.assert_close(small.gradients_of(model), wanted)
    optimizer.zero_grad()
    with optimizer.no_sync(), optimizer.skip_synchronize():
        small.make_loss(model, hvd.rank()).backward()
        own = [g.clone() for g in small.gradients_of(model) if g is not None]
        optimizer.step()
    small.assert_close(small.gradients_of(model), own)


COMPRESSORS = {
    "the memory that it was given": small.compressor(lambda t: t.detach(), lambda t, _: t),
    "a view": small.compressor(lambda t: t.view(-1), lambda t, shape: t.view(shape)),
    "the memory without the count of its changes": small.compressor(lambda t: t.data.view(-1), torch.Tensor.view),
    "a view that is not contiguous": small.compressor(lambda t: t.t(), lambda t, _: t.t()),
    "the tensor, changed in place and back": small.compressor(lambda t: t.mul_(0.5), lambda t, _: t.mul_(2)),
}


@pytest.mark.parametrize("kind", COMPRESSORS)
@pytest.mark.parametrize("groups", [None, 1])
@on("ranks2_in_each_order")
def test_a_compressor_may_return_the_memory_it_was_given(kind: str, groups: int | None) -> None:
    model, optimizer = small.made(compression=COMPRESSORS[kind], groups=groups)
    for step in range(3):
        wanted = small.mean_gradients(model, hvd.size(), step)
        small.make_loss(model, hvd.rank(), step).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        small.assert_close(small.gradients_of(model), wanted)
        optimizer.zero_grad(set_to_none=bool(step))
    tensor = torch.full((2, 3), hvd.rank() + 1.0)
    assert hvd.allreduce(tensor, compression=COMPRESSORS[kind]).eq(1.5).all()


@on("ranks2_in_step")
def test_a_gradient_changed_under_a_compressor_that_returns_a_view_is_still_found() -> None:
    for kind in list(COMPRESSORS)[1:3]:
        model, optimizer = small.made(compression=COMPRESSORS[kind])
        small.make_loss(model, hvd.rank()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with pytest.raises(ValueError, match="was changed while it was being reduced"):
            optimizer.step()


@on("ranks2_in_each_order")
def test_of_two_optimizers_over_one_parameter_the_older_says_so() -> None:
    model = small.make_model()
    older = small.sgd(model)
    newer: Any = small.sgd(model)
    wanted = small.mean_gradients(model, hvd.size())
    small.make_loss(model, hvd.rank()).backward()
    for call in (older.step, older.synchronize):
        with pytest.raises(ValueError, match=r"parameter '0\.weight' is also in a DistributedOptimizer.*later"):
            call()
    newer.step()
    small.assert_close(small.gradients_of(model), wanted)
    newer.zero_grad()
    keeper: dict[str, Any] = {"optimizer": newer}
    keeper["self"] = keeper  # garbage that only the collector finds
    del newer, keeper
    small.train(model, older, 1)


class Lookahead(torch.optim.Optimizer):
    """As often written: it wraps an optimizer and takes its groups, but does not call ``Optimizer.__init__``."""

    def __init__(self, optimizer: Any, k: int = 2, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha, self.count = optimizer, k, alpha, 0
        self.param_groups = optimizer.param_groups
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        self.count += 1
        if self.count % self.k == 0:
            fast = [p for group in self.param_groups for p in group["params"]]
            with torch.no_grad():
                for slow, parameter in zip(self.slow, fast, strict=True):
                    parameter.copy_(slow.lerp_(parameter, self.alpha))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Outside:
    """Wraps an optimizer without being one."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


class ProperLookahead(Lookahead):
    """Calls ``Optimizer.__init__``."""

    def __init__(self, optimizer: Any) -> None:
        torch.optim.Optimizer.__init__(self, optimizer.param_groups, {})
        groups = self.param_groups
        Lookahead.__init__(self, optimizer)
        self.param_groups = groups


class ClearsAlone(torch.optim.SGD):
    """Has a ``zero_grad`` that takes no argument."""

    def zero_grad(self) -> None:
        super().zero_grad(set_to_none=False)


@on("ranks2_in_each_order")
def test_an_optimizer_decides_which_arguments_its_methods_take() -> None:
    model = small.make_model()
    optimizer = hvd.DistributedOptimizer(ClearsAlone(model.parameters(), lr=0.1), model)
    small.take_step(model, optimizer)
    optimizer.zero_grad()
    assert all(gradient is not None and not gradient.any() for gradient in small.gradients_of(model))
    with pytest.raises(TypeError, match=r"ClearsAlone\.zero_grad\(\) got an unexpected keyword"):
        optimizer.zero_grad(set_to_none=True)


@on("ranks2")
def test_a_parameter_without_a_shape_is_refused_by_name() -> None:
    model = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.Linear(3, 2))
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    later = hvd.DistributedOptimizer(torch.optim.SGD(model[1].parameters(), lr=0.1), model[1])
    weight = model[0].weight
    end = r": UninitializedParameter has no shape yet; run one forward pass of the model first"
    for what, call in (
        (r"DistributedOptimizer: parameter '0\.weight'", lambda: hvd.DistributedOptimizer(plain, model)),
        (r"DistributedOptimizer: parameter '0\.weight'", lambda: hvd.DistributedOptimizer(plain, model, op=hvd.Adasum)),
        ("DistributedOptimizer: parameter '.*'", lambda: later.add_param_group({"params": [weight]})),
        (r"broadcast_parameters '0\.weight'", lambda: hvd.broadcast_parameters(model.named_parameters(), 0)),
        ("broadcast_optimizer_state: group 0 parameter 0", lambda: hvd.broadcast_optimizer_state(plain, 0)),
        ("allreduce 'w'", lambda: hvd.allreduce(weight, name="w")),
        ("allgather 'w'", lambda: hvd.allgather(weight, name="w")),
        ("alltoall 'w'", lambda: hvd.alltoall(weight, name="w")),
        ("broadcast 'w'", lambda: hvd.broadcast_(weight, 0, name="w")),
    ):
        with pytest.raises(ValueError, match=what + end):
            call()
    model(torch.ones(1, 4))
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


@on("ranks2_in_each_order")
def test_an_optimizer_around_another_is_refused_or_works() -> None:
    def plain(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    model = small.make_model()
    for wrapper in (Lookahead, Outside):
        with pytest.raises(ValueError, match=rf"{wrapper.__name__}\(hvd\.DistributedOptimizer\("):
            hvd.DistributedOptimizer(wrapper(plain(model)))
    kept = small.sgd(model)
    with pytest.raises(ValueError, match="its attribute 'optimizer' is a distributed optimizer already"):
        hvd.DistributedOptimizer(ProperLookahead(kept), model.named_parameters())
    del kept
    alone = small.make_model()
    alone_optimizer = Lookahead(plain(alone))
    inner, outer = small.make_model(), small.make_model()
    optimizers: list[Any] = [
        Lookahead(hvd.DistributedOptimizer(plain(inner), inner)),
        hvd.DistributedOptimizer(ProperLookahead(plain(outer)), outer),
    ]
    for step in range(5):
        for parameter, gradient in zip(alone.parameters(), small.mean_gradients(alone, hvd.size(), step), strict=True):
            parameter.grad = gradient
        alone_optimizer.step()
        for model, optimizer in zip((inner, outer), optimizers, strict=True):
            optimizer.zero_grad()
            small.take_step(model, optimizer, step)
            small.assert_close(model.parameters(), alone.parameters())


@on("ranks2_in_step")
def test_a_gan_in_horovods_order_is_told_of_no_sync() -> None:
    generator, critic = torch.nn.Linear(4, 4).double(), small.make_model()
    for parameter in generator.parameters():
        hvd.broadcast_(parameter.data, 0)
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(generator.parameters(), lr=0.1), generator)
    optimizer2: Any = small.sgd(critic)
    critic(generator(small.make_batch(hvd.rank()))).square().mean().backward()
    optimizer.step()
    with pytest.raises(AssertionError, match=r"generator's is in a GAN, run it inside no_sync\(\)"):
        optimizer2.zero_grad()
    with pytest.raises(AssertionError, match=r"those for another optimizer, inside optimizer\.no_sync\(\)"):
        critic(small.make_batch(hvd.rank())).square().mean().backward()
    with pytest.raises(ValueError, match="was changed while it was being reduced"):
        optimizer2.synchronize()
    optimizer2.zero_grad()
    optimizer.zero_grad()
    for step in range(3):
        with optimizer2.no_sync():
            critic(generator(small.make_batch(hvd.rank(), step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer2.zero_grad()
        small.train(critic, optimizer2, step)


ranks2_each = one_of("ranks2_always", "ranks2_step_never")
"""Each order of calls, and reductions during backward and after it."""
DEADLINE_S = 240.0


def warnings_about_horo(caught: list[warnings.WarningMessage]) -> list[str]:
    """By their words, or the file that they point at. The project, and torch with it, may be in a folder named horo."""
    package = Path(hvd.__file__).parents[1]
    return [
        f"{warning.filename}: {warning.message}"
        for warning in caught
        if Path(warning.filename).is_relative_to(package)
        or any(word in str(warning.message) for word in ("Dynamo", "horo"))
    ]


@on("ranks2_step_never", deadline_s=DEADLINE_S)
def test_compiled_functions_that_communicate_warn_of_nothing() -> None:
    model, optimizer = small.made()

    def step(number: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = small.make_loss(model, hvd.rank(), number)
        loss.backward()
        optimizer.step()
        return hvd.allreduce(loss.detach(), name="loss")

    def collectives(x: torch.Tensor) -> torch.Tensor:
        hvd.synchronize(hvd.allreduce_async(x))
        hvd.grouped_allreduce([x, x])
        return hvd.allgather(hvd.broadcast(hvd.allreduce(x, op=hvd.Sum), 0)) * hvd.size()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled, compiled2 = (torch.compile(f, backend="eager") for f in (step, collectives))
        for number in range(3):
            wanted = small.mean_gradients(model, hvd.size(), number)
            compiled(number)
            small.assert_close(small.gradients_of(model), wanted)
            assert compiled2(torch.ones(2)).tolist() == [4.0] * 4
        whole = torch.compile(lambda x: x * hvd.size() + hvd.rank(), backend="eager", fullgraph=True)
        assert whole(torch.ones(1)).item() == 2 + hvd.rank()
    assert warnings_about_horo(caught) == []


_LATE = """
import sys, torch, horo.torch as hvd
hvd.init()
assert "torch._dynamo" not in sys.modules

@torch.compile(backend="eager")
def collective(x):
    return hvd.synchronize(hvd.allreduce_async(x * 2, op=hvd.Sum, name="late")) + 1

for _ in range(3):
    assert collective(torch.ones(3)).tolist() == [3.0] * 3
"""


def test_torch_compile_that_is_loaded_after_init_warns_of_nothing() -> None:
    """Without an optimizer, nothing has loaded it before."""
    ended = run_python("-W", "always", "-c", _LATE, timeout=DEADLINE_S)
    assert ended.returncode == 0, ended.stderr
    assert "Dynamo" not in ended.stderr and "horo" not in ended.stderr, ended.stderr


@on("ranks2_always", deadline_s=DEADLINE_S)
def test_a_compiled_model_trains_as_alone() -> None:
    model, optimizer = small.made()
    compiled = torch.compile(model, backend="aot_eager")
    for number in range(3):
        wanted = small.mean_gradients(model, hvd.size(), number)
        compiled(small.make_batch(hvd.rank(), number)).square().mean().backward()
        optimizer.step()
        small.assert_close(small.gradients_of(model), wanted)
        optimizer.zero_grad()


@on("ranks2_each")
def test_a_step_whose_hooks_torch_has_taken_away_calls_them_again() -> None:
    """As torch 2.1 does for its own classes when torch.compile is used for the first time."""

    class Descent(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad, alpha=0.1)

    kind: Any = Descent
    model, other = small.make_model(), small.make_model()
    optimizer: Any = hvd.DistributedOptimizer(kind(model.parameters(), lr=0.1), model.named_parameters())
    for number in range(4):
        if number in {1, 2}:
            kind.step = kind.step.__wrapped__
            kind.step.hooked = True
        if number == 2:
            optimizer = hvd.DistributedOptimizer(kind(other.parameters(), lr=0.1), other.named_parameters())
            model = other
        small.train(model, optimizer, number)


_COMPILED_AUTOGRAD = Path(torch.__file__).with_name("_dynamo") / "compiled_autograd.py"


@pytest.mark.skipif(
    not _COMPILED_AUTOGRAD.exists() or "def _enable(" not in _COMPILED_AUTOGRAD.read_text(),
    reason="this torch has another compiled autograd (`make test TORCH=torch==2.13.0`)",
)
@on("ranks2_each", deadline_s=DEADLINE_S)
def test_compiled_autograd_works_in_horovods_order_and_is_refused_in_the_other() -> None:
    from torch._dynamo.compiled_autograd import _enable  # noqa: PLC0415 - it takes a second

    model, optimizer = small.made()
    if isinstance(optimizer._reducer, BackwardReducer):
        with (
            _enable(torch.compile(backend="eager")),
            pytest.raises(ValueError, match=r"compiled autograd .*gradients_ready='step'"),
        ):
            small.make_loss(model, hvd.rank()).backward()
        optimizer.zero_grad()
        return
    for number in range(3):
        wanted = small.mean_gradients(model, hvd.size(), number)
        with _enable(torch.compile(backend="eager")):
            small.make_loss(model, hvd.rank(), number).backward()
        optimizer.step()
        small.assert_close(small.gradients_of(model), wanted)
        optimizer.zero_grad()
