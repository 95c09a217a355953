"""What the first reduction of an optimizer checks."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import small_model as small
import torch
from rank_pool import RankPool, on, on_own, one_of

import horo.torch as hvd
from horo.horovod import install
from horo.torch.engine import runtime
from horo.torch.optimizer.at_backward import BackwardReducer


@on("ranks2_in_most_orders")
def test_parameters_that_differ_between_ranks_are_named_once() -> None:
    model = small.make_model()
    if hvd.rank() == 1:
        with torch.no_grad():
            model[0].bias[2] += 1e-9
            model[2].weight[0, 0] = -model[2].weight[0, 0]
    optimizer, start = small.sgd(model), small.bits_of(model)
    told = r"parameter '0\.bias' is not equal on all ranks.*\(2 of 4.*broadcast_parameters"
    with pytest.raises(ValueError, match=told):
        small.take_step(model, optimizer)
    assert small.bits_of(model) == start
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer.zero_grad()
    small.train(model, optimizer, 0)


@on("ranks2_in_most_orders")
def test_a_state_without_value_is_no_state_and_a_frozen_parameter_that_differs_is_named() -> None:
    """SGD of torch 2.1 writes such a state in its first step; a rank that goes on may meet one that begins."""
    model = small.make_model()
    frozen = torch.nn.Parameter(torch.eye(3).to_sparse_csr(), requires_grad=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([frozen, *model.parameters()], lr=0.1))
    if hvd.rank() == 1:
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = None
    small.train(model, optimizer, 0)
    model = small.make_model()
    model[0].weight.requires_grad_(False)
    if hvd.rank() == 1:
        model[0].weight[0, 0] += 1
    optimizer = small.sgd(model)
    with pytest.raises(ValueError, match=r"parameter '0\.weight' is not equal on all ranks.*\(1 of 4"):
        small.take_step(model, optimizer)


@pytest.mark.parametrize("sharding", [None, "optimizer"])
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("state", r"the optimizer's state of parameter '0\.bias': not equal.*broadcast_optimizer_state"),
        ("options", r"the options of parameter group 0: not equal.*broadcast_optimizer_state"),
    ],
)
@on("ranks2_in_most_orders")
def test_state_or_options_that_one_rank_alone_has_loaded_are_an_error(
    what: str, told: str, sharding: str | None
) -> None:
    model = small.make_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if hvd.rank() == 0 and what == "state":
        for parameter in model.parameters():
            plain.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    if hvd.rank() == 0 and what == "options":
        plain.param_groups[0]["lr"] = 0.2
    optimizer = hvd.DistributedOptimizer(plain, model, sharding=sharding)
    with pytest.raises(ValueError, match=told):
        small.take_step(model, optimizer)
    optimizer.zero_grad()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for step in range(2):
        small.train(model, optimizer, step)
    assert hvd.allgather_object(small.bits_of(model)) == [small.bits_of(model)] * 2


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("more", "parameter 'extra' is not in the optimizer on rank 0, but trained on rank 1"),
        ("fewer", r"parameter '2\.bias' is trained on rank 0, but not in the optimizer on rank 1"),
        ("renamed", r"parameter '2\.bias' is trained on rank 0, but not in the optimizer on rank 1"),
        ("frozen", r"parameter '2\.bias' is trained on rank 0, but frozen on rank 1"),
        ("groups", "the optimizer has 1 parameter groups on rank 0, but 2 on rank 1"),
    ],
)
@on("ranks2_in_most_orders")
def test_ranks_that_train_different_parameters_name_the_first(what: str, sentence: str) -> None:
    model = small.make_model()
    named = list(model.named_parameters())
    last = named[-1][1]
    if hvd.rank() == 1:
        if what == "more":
            named.append(("extra", torch.nn.Parameter(torch.ones(2))))
        if what == "fewer":
            named.pop()
        if what == "renamed":
            named[-1] = "other", last
        last.requires_grad_(what != "frozen")
    trained = [p for _, p in named]
    groups = [{"params": trained}]
    if hvd.rank() == 1 and what == "groups":
        groups = [{"params": trained[:1]}, {"params": trained[1:]}]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1), named)
    with pytest.raises(ValueError, match=f"{sentence}; make the same model and optimizer on all ranks"):
        small.take_step(model, optimizer)
    hvd.barrier()
    hvd.shutdown()  # a gradient that only one rank has stays in progress
    hvd.init()


@on("ranks2_in_most_orders")
def test_the_checks_are_one_request_of_the_first_step_and_one_of_the_third() -> None:
    model = torch.nn.ParameterList(
        [
            torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16)),
            torch.nn.Parameter(torch.ones(3, 4).t()),
            torch.nn.Parameter(torch.tensor(2.0)),
            torch.nn.Parameter(torch.ones(0, 5)),
        ]
    )
    optimizer = small.sgd(model)
    counts = []
    for _ in range(4):
        before = runtime.current().core.counters()["requests"]
        torch.stack([p.float().sum() for p in model]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(runtime.current().core.counters()["requests"] - before)
    assert counts == [5, 4, 5, 4]


@on("ranks2_in_most_orders")
def test_a_model_in_ddp_is_named() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = small.make_model()
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="the model is wrapped in DistributedDataParallel"):
            hvd.DistributedOptimizer(plain, wrapped)
        optimizer: Any = hvd.DistributedOptimizer(plain, wrapped.named_parameters())
        with pytest.raises(ValueError, match=r"'module\.0\.weight' is wrapped in DistributedDataParallel"):
            wrapped(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
            optimizer.step()
        del wrapped
    finally:
        torch.distributed.destroy_process_group()
    hvd.barrier()


ranks1 = one_of("ranks1_always", "ranks1_never", "ranks1_step")


@on("ranks1")
def test_a_job_of_one_rank_refuses_what_more_ranks_refuse() -> None:
    table = torch.nn.Embedding(6, 2, sparse=True)
    optimizer = small.sgd(table, groups=1)
    with pytest.raises(ValueError, match="gradient of 'weight' is sparse: leave the parameter out of groups"):
        table(torch.tensor([1])).sum().backward()
        optimizer.step()
    tiny = torch.nn.Parameter(torch.ones(2).to(torch.float8_e5m2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([tiny], lr=0.1))
    with pytest.raises(ValueError, match=r"dtype torch\.float8_e5m2 cannot be reduced"):
        tiny.float().sum().backward()
        optimizer.step()
    model, optimizer = small.made()
    if isinstance(optimizer._reducer, BackwardReducer):
        model[0].register_full_backward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            small.make_loss(model, 0).backward()
        with pytest.raises(ValueError, match=r"the backward\(\) before did not come to its end"):
            optimizer.step()


@on("ranks1")
def test_a_job_of_one_rank_trains_as_plain_torch() -> None:
    """Also after a backward that raises, as in a notebook, whose next cell accumulates into what is there."""
    model, alone = small.make_model(), small.make_model()
    optimizer, plain = small.sgd(model), torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(3):
        for one, its in ((alone, plain), (model, optimizer)):
            if isinstance(optimizer._reducer, BackwardReducer):
                handle = one[0].register_full_backward_hook(lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    small.make_loss(one, 0, step + 7).backward()
                handle.remove()
            small.make_loss(one, 0, step).backward()
            its.step()
            its.zero_grad()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), alone.parameters(), strict=True))


def _warnings_of(train: Callable[[], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train()
    return [str(each.message) for each in seen]


def _train(batch: int, steps: int = 5, scale: float = 1.0, **options: Any) -> None:
    model, optimizer = small.made(**options)
    for step in range(steps):
        optimizer.zero_grad()
        (small.make_loss(model, batch, step) * scale).backward()
        optimizer.step()


@pytest.mark.parametrize("options", [{}, {"groups": 1}, {"op": hvd.Sum, "compression": hvd.Compression.fp16}])
@on("ranks2_in_most_orders")
def test_ranks_with_the_same_samples_are_told_once(options: dict[str, Any]) -> None:
    seen = _warnings_of(lambda: _train(0, **options))
    assert len(seen) == (hvd.rank() == 0)
    for sentence in seen:
        assert sentence.startswith("all ranks had exactly the same gradients in the first 3 steps")
        assert "torch.utils.data.DistributedSampler(dataset, hvd.size(), hvd.rank())" in sentence
        assert "torch.manual_seed(seed + hvd.rank())" in sentence


@on("ranks4")
def test_two_of_four_ranks_with_the_same_samples_are_named() -> None:
    seen = _warnings_of(lambda: _train([0, 1, 2, 1][hvd.rank()]))
    wanted = ["ranks 1, 3 had exactly the same gradients"] if hvd.rank() == 0 else []
    assert [sentence.partition(" in ")[0] for sentence in seen] == wanted


@on("ranks2_in_most_orders")
def test_ranks_that_differ_are_told_of_nothing() -> None:
    def other_rows() -> None:  # of one table, in which equal values come to different rows
        torch.manual_seed(1)
        table = torch.nn.Embedding(3000, 4)
        optimizer = small.sgd(table)
        for step in range(4):
            optimizer.zero_grad()
            table(torch.tensor([100 * step + 7 * hvd.rank()])).sum().backward()
            optimizer.step()

    def unused() -> None:
        optimizer = small.sgd(small.make_model())
        for _ in range(4):
            optimizer.step()

    def one_step_differs() -> None:
        model, optimizer = small.made()
        for step in range(4):
            optimizer.zero_grad()
            small.make_loss(model, hvd.rank() * (step == 1), step).backward()
            optimizer.step()

    scaled = [lambda scale=scale: _train(0, scale=scale) for scale in (0.0, float("nan"))]  # no gradient, no number
    for each in (lambda: _train(hvd.rank()), other_rows, unused, one_step_differs, *scaled):
        assert _warnings_of(each) == []


@on("ranks2_in_most_orders")
def test_sparse_gradients_of_the_same_rows_are_found() -> None:
    def train() -> None:
        table = torch.nn.Embedding(6, 2, sparse=True)
        hvd.broadcast_parameters(table.state_dict(), 0)
        optimizer = small.sgd(table)
        for step in range(4):
            optimizer.zero_grad()
            table(torch.tensor([step])).square().sum().backward()
            optimizer.step()

    assert len(_warnings_of(train)) == (hvd.rank() == 0)


@on_own(2, HORO_FIRST_CHECKS="0")
def test_the_first_checks_can_be_left_out() -> None:
    def train() -> None:
        model = small.make_model(seed=1 + hvd.rank())  # would be refused
        optimizer = small.sgd(model)
        for _ in range(4):
            optimizer.zero_grad()
            model[2](torch.ones(1, 6, dtype=torch.float64)).sum().backward()
            optimizer.step()

    counters = runtime.current().core.counters
    before = counters()["requests"]
    assert _warnings_of(train) == []
    assert counters()["requests"] - before == 4 * 4  # nothing but the gradients


@on_own(2)
def test_a_script_of_horovods_is_warned_once_where_ranks_begin_apart() -> None:
    def train() -> None:
        model = small.make_model(seed=hvd.rank())
        optimizer = small.sgd(model)
        for step in range(2):
            small.take_step(model, optimizer, step)
            optimizer.zero_grad()

    install()
    told = [each for each in _warnings_of(train) if "is not equal on all ranks before the first step" in each]
    assert len(told) == 1


@pytest.fixture(scope="module")
def checking2() -> Iterator[RankPool]:
    """Two ranks that would reduce gradients while backward runs, if they did not look at them first."""
    with RankPool(2, environment={"HORO_CHECK_NAN": "1", "HORO_OVERLAP": "always"}) as pool:
        yield pool


def _spoil(model: torch.nn.Module, name: str, value: float) -> Any:
    """Has the gradient of one parameter get a value, when it is computed."""

    def spoiled(grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        grad.view(-1)[-1] = value
        return grad

    return dict(model.named_parameters())[name].register_hook(spoiled)


@pytest.mark.parametrize("options", [{}, {"gradients_ready": "step"}, {"sharding": "optimizer"}])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@on("checking2")
def test_a_gradient_that_is_not_finite_is_an_error_on_all_ranks(value: float, options: dict[str, Any]) -> None:
    model, optimizer = small.made(**options)
    for step in range(4):
        optimizer.zero_grad()
        wanted = small.mean_gradients(model, 2, step)
        if step != 2:
            small.make_loss(model, hvd.rank(), step).backward()
        else:
            handles = [_spoil(model, name, value) for name in ("0.weight", "2.bias")] if hvd.rank() == 1 else []
            told = r"gradient of '2\.bias' has a value that is NaN or infinite on rank 1 in step 3 \(2 of 4 "
            before = small.bits_of(model)
            with pytest.raises(ValueError, match=told):
                small.take_step(model, optimizer, step)
            assert small.bits_of(model) == before
            own = [p.grad.isfinite().all().item() for p in model.parameters() if p.grad is not None]
            assert own == ([True] * 4 if hvd.rank() == 0 else [False, True, True, False])
            for handle in handles:
                handle.remove()
            optimizer.zero_grad()
            small.make_loss(model, hvd.rank(), step).backward()
        optimizer.step()
        small.assert_close(small.gradients_of(model), wanted)


@on("checking2")
def test_a_gradient_that_is_not_finite_is_found_before_adasum_combines_steps() -> None:
    model, optimizer = small.made(op=hvd.Adasum)
    if hvd.rank() == 0:
        _spoil(model, "0.bias", float("inf"))
    small.make_loss(model, hvd.rank()).backward()
    with pytest.raises(ValueError, match=r"gradient of '0\.bias' .* on rank 0 in step 1 \(1 of 4"):
        optimizer.step()
