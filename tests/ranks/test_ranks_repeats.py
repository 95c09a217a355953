"""Operations called again: the request that is kept from the last call must fit the tensors of this one."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from rank_pool import RankPool

import horo.torch as hvd
from horo.torch import _runtime


def test_a_name_serves_tensors_that_look_different_from_call_to_call(ranks: RankPool) -> None:
    def check() -> None:
        grid = torch.arange(12.0).reshape(3, 4)
        looks = [grid, grid, grid.t(), grid.double(), grid[:, ::2], grid.reshape(-1), torch.tensor(5.0), torch.empty(0)]
        looks += [grid.to(torch.int32), torch.nn.Parameter(grid), grid.clone()]
        for given in [*looks, *reversed(looks)]:
            own = given.detach().clone()
            for name in ("one", None):
                assert torch.equal(hvd.allreduce(given, op=hvd.Sum, name=name), own * hvd.size())
            (grouped,) = hvd.grouped_allreduce([given], op=hvd.Max, name="group")
            assert torch.equal(grouped, own)
            assert torch.equal(given, own)  # nothing but the results was written
            handle = hvd.broadcast_async(given, root_rank=1, name="root")
            assert torch.equal(hvd.synchronize(handle), own)
            if own.dim():
                assert torch.equal(hvd.allgather(given, name="rows"), torch.cat([own] * hvd.size()))

    ranks.run(check)


def test_the_memory_of_each_call_is_used_and_no_other(ranks: RankPool) -> None:
    def check() -> None:
        tensors = [torch.full((5,), float(hvd.rank())) for _ in range(4)]
        total = float(sum(range(hvd.size())))
        for turn, tensor in enumerate(tensors):
            assert hvd.allreduce_(tensor, op=hvd.Sum, name="turn") is tensor
            for index, other in enumerate(tensors):
                assert other.tolist() == [total if index <= turn else float(hvd.rank())] * 5
        outputs = [hvd.allreduce(tensors[0], op=hvd.Sum, name="out") for _ in range(3)]
        assert len({tensor.data_ptr() for tensor in [tensors[0], *outputs]}) == 4

    ranks.run(check)


def test_every_call_counts_as_one_change_for_autograd(ranks2: RankPool) -> None:
    def check() -> None:
        plain, other, strided = torch.ones(3), torch.ones(4), torch.ones(4, 4)[:, ::2]
        with torch.inference_mode():
            frozen = torch.ones(2)
        for _ in range(3):
            before = [tensor._version for tensor in (plain, other, strided)]
            hvd.grouped_allreduce_([plain, other, strided, frozen], name="mixed")
            hvd.grouped_allreduce_([plain, other], name="alike")
            after = [tensor._version for tensor in (plain, other, strided)]
            assert [new - old for new, old in zip(after, before, strict=True)] == [2, 2, 1]
        assert frozen.tolist() == [1.0, 1.0]

    ranks2.run(check)


def test_what_is_refused_is_refused_again_and_leaves_the_name_usable(ranks2: RankPool) -> None:
    def check() -> None:
        good = torch.ones(3)
        for _ in range(2):
            hvd.allreduce_(good, op=hvd.Max, name="x")
            with pytest.raises(ValueError, match=r"requires grad"):
                hvd.allreduce_(torch.ones(3, requires_grad=True) * 2, op=hvd.Max, name="x")
            with pytest.raises(hvd.HorovodInternalError, match=r"float64"):
                hvd.allreduce_(
                    torch.ones(3, dtype=torch.float64 if hvd.rank() else torch.float32), op=hvd.Max, name="x"
                )
            with pytest.raises(ValueError, match=r"not a Tensor|torch.Tensor"):
                hvd.allreduce_([1.0], op=hvd.Max, name="x")  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=r"name must be a string"):
                hvd.allreduce_(good, op=hvd.Max, name=["x"])  # type: ignore[arg-type]
        assert good.tolist() == [1.0] * 3

    ranks2.run(check)


def test_factors_are_those_of_each_call(ranks2: RankPool) -> None:
    def check() -> None:
        changing, fixed = torch.tensor(1.0), np.array(2.0)
        for turn in range(3):
            changing.fill_(turn)
            for call in (hvd.allreduce, hvd.allreduce_):
                tensor = torch.ones(2)
                kept = call(tensor, op=hvd.Sum, name="factor", prescale_factor=changing, postscale_factor=fixed)
                assert kept.tolist() == [4.0 * turn] * 2
                whole = call(torch.ones(2), op=hvd.Sum, name="factor", prescale_factor=turn, postscale_factor=2)
                assert whole.tolist() == [4.0 * turn] * 2

    ranks2.run(check)


def test_requests_that_are_kept_hold_no_tensor(ranks2: RankPool) -> None:
    def check() -> None:
        seen = []
        for _ in range(3):
            tensor = torch.ones(1000)
            hvd.allreduce_(tensor, name="kept")
            seen += [weakref.ref(tensor), weakref.ref(hvd.allreduce(tensor, name="kept too"))]
            hvd.synchronize(hvd.allreduce_async_(tensor, name="kept as well"))
        del tensor
        gc.collect()
        assert [reference() for reference in seen] == [None] * 6

    ranks2.run(check)


def test_more_names_than_are_kept_go_on_working(ranks2: RankPool) -> None:
    def check() -> int:
        for turn in range(2):
            for index in range(4500):
                tensor = torch.full((2,), float(index + turn))
                assert hvd.allreduce_(tensor, op=hvd.Max, name=f"many {index}").tolist() == [index + turn] * 2
        group = [torch.ones(1)] * 3
        many = [torch.full((1,), float(index)) for index in range(41_000)]
        for _ in range(2):
            assert all(t.item() == 1 for t in hvd.grouped_allreduce(group, op=hvd.Max, name="few"))
            result = hvd.grouped_allreduce(many, op=hvd.Max, name="too many")
            assert [t.item() for t in result] == list(range(41_000))
        return len(_runtime.current().request_cache._kept)

    kept = ranks2.run(check)
    assert all(0 < count < 4000 for count in kept), kept


def test_threads_use_one_form_of_call_at_once(ranks2: RankPool) -> None:
    def check() -> None:
        def work(index: int) -> list[float]:
            tensors = [torch.full((1,), float(index)) for _ in range(50)]
            return [hvd.allreduce(tensor, op=hvd.Max, name=f"{index}").item() for tensor in tensors] + [
                hvd.synchronize(hvd.allreduce_async(torch.ones(1), op=hvd.Max)).item() for _ in range(50)
            ]

        with ThreadPoolExecutor(4) as threads:
            for index, values in enumerate(threads.map(work, range(4))):
                assert values == [float(index)] * 50 + [1.0] * 50

    ranks2.run(check)


def test_what_horo_does_for_itself_has_no_public_handle(ranks2_always: RankPool) -> None:
    def check() -> None:
        model = torch.nn.Linear(3, 3)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), gradients_ready="step"
        )
        model(torch.ones(1, 3)).sum().backward()
        numbers = list(_runtime.current().requests)
        assert numbers
        for number in numbers:
            for ask in (hvd.poll, hvd.synchronize):
                with pytest.raises(ValueError, match=f"Handle {number} was not created"):
                    ask(number)
        optimizer.step()

    ranks2_always.run(check)
