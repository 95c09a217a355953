"""Operations called again: the request that is kept from the last call must fit the tensors of this one."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from jobs import wait_until
from rank_pool import RankPool

import horo.torch as hvd
from horo.core import context
from horo.torch.engine import request_cache, runtime


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


def test_gathered_results_have_the_rows_of_each_call(ranks: RankPool) -> None:
    """The third call alike offers memory for a result as large as before; others may give other rows by then."""

    def check() -> None:
        r, n = hvd.rank(), hvd.size()
        for name in ("rows", None):
            for turn, rows in enumerate([2, 2, 2, 2, 5, 2, 2, 2, 0, 0, 0, 2, 2, 2]):
                mine = [rows if rank == n - 1 else 2 for rank in range(n)]  # the last rank alone changes
                given = torch.full((mine[r], 3), 10.0 * turn + r)
                whole = torch.cat([torch.full((mine[s], 3), 10.0 * turn + s) for s in range(n)])
                assert torch.equal(hvd.allgather(given, name=name), whole)
                even = torch.arange(n * 2.0).reshape(n, 2) + 100 * r + turn
                got = hvd.alltoall(even, name=name and f"{name} for all")
                assert torch.equal(got, torch.stack([torch.arange(2.0) + 2 * r + 100 * s + turn for s in range(n)]))
                share = hvd.reducescatter(even, op=hvd.Sum, name=name and f"{name} of sums")
                assert torch.equal(share, sum(torch.arange(2.0) + 2 * r + 100 * s + turn for s in range(n))[None])

    ranks.run(check)


def test_exchanges_without_splits_may_change_their_size(ranks: RankPool) -> None:
    def check() -> None:
        r, n = hvd.rank(), hvd.size()
        for name in ("size", None):
            for turn, rows in enumerate([1, 1, 1, 3, 3, 3, 3, 2, 2, 2, 2, 0, 0, 0, 1, 1, 1]):
                given = torch.arange(float(n)).repeat_interleave(rows) + 100 * r + turn
                whole = (torch.arange(float(n)) * 100 + r + turn).repeat_interleave(rows)
                assert torch.equal(hvd.alltoall(given, name=name), whole)

    ranks.run(check)


def test_an_exchange_of_other_splits_on_another_rank_gives_its_rows(ranks2: RankPool) -> None:
    """Rank 1 gives rank 0 more and less than before; rank 0's own splits and tensor stay the same."""

    def check() -> None:
        even = torch.arange(4.0)
        for turn in range(12):
            if hvd.rank() == 0:
                got = hvd.alltoall(even, name="uneven")
                to_me = 2 if turn % 4 else turn % 3
                assert got.tolist() == [0.0, 1.0, *[float(turn)] * to_me]
            else:
                to_other = 2 if turn % 4 else turn % 3
                got, rows = hvd.alltoall(torch.full((to_other + 1,), float(turn)), [to_other, 1], name="uneven")
                assert (got.tolist(), rows.tolist()) == ([2.0, 3.0, float(turn)], [2, 1])

    ranks2.run(check)


def test_gathered_results_are_new_memory_each_time(ranks2: RankPool) -> None:
    def check() -> None:
        given, seen = torch.ones(2, 300), []
        for _ in range(5):
            seen += [hvd.allgather(given, name="g"), hvd.alltoall(given, name="a"), hvd.reducescatter(given, name="s")]
        assert len({tensor.data_ptr() for tensor in [given, *seen]}) == 16
        assert all(bool((tensor == 1).all()) for tensor in seen)
        references = [weakref.ref(tensor) for tensor in [given, *seen]]
        del given, seen
        gc.collect()
        assert [reference() for reference in references] == [None] * 16

    ranks2.run(check)


def test_gathered_dtypes_and_graphs_change_from_call_to_call(ranks2: RankPool) -> None:
    def check() -> None:
        grid = torch.arange(8.0).reshape(2, 4)
        large = torch.ones(2, 1 << 19)  # results of 8 MiB, for which no memory is offered
        looks = [grid] * 3 + [grid.double()] * 3 + [grid.to(torch.complex64)] * 3 + [grid.bool()] * 3 + [large] * 3
        for given in [*looks, grid.t().contiguous().t(), grid.t(), *looks]:
            assert torch.equal(hvd.allgather(given, name="g"), torch.cat([given, given]))
            if given.shape[0] == 2:
                row = given[hvd.rank()]
                assert torch.equal(hvd.alltoall(given, name="a"), torch.stack([row, row]))
        for _ in range(4):
            leaf = torch.ones(2, 4, requires_grad=True)
            mine = torch.tensor([3.0, 5.0])[hvd.rank()]  # how each rank weighs what it gets
            (mine * hvd.allgather(leaf, name="g").sum() + mine * hvd.alltoall(leaf, name="a").sum()).backward()
            # of the gather: the mean of what both ranks want; of the exchange: row r is what rank r wants
            assert leaf.grad is not None and leaf.grad.tolist() == [[4.0 + 3.0] * 4, [4.0 + 5.0] * 4]
            hvd.allgather(grid, name="g"), hvd.alltoall(grid, name="a")

    ranks2.run(check)


def test_gathered_results_come_after_waits_of_any_length(ranks2: RankPool) -> None:
    """A wait ends now and then for signal handlers, and goes on."""

    def check() -> None:
        kept = context._SIGNAL_CHECK_MS
        try:
            for check_ms in (0, 1, 0):
                context._SIGNAL_CHECK_MS = check_ms
                for turn in range(60):
                    rows = 3 if turn % 20 else 2  # of rank 1
                    mine = torch.full((rows if hvd.rank() else 2, 2), turn + hvd.rank())
                    wanted = [turn] * 2 + [turn + 1] * rows
                    assert hvd.allgather(mine, name="late")[:, 0].tolist() == wanted
                    assert hvd.alltoall(mine[:2], name="later")[:, 1].tolist() == [turn, turn + 1]
        finally:
            context._SIGNAL_CHECK_MS = kept

    ranks2.run(check)


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


def test_results_that_nobody_can_ask_for_go_and_others_stay(ranks2: RankPool) -> None:
    def check() -> None:
        before, seen = len(runtime.current().requests), []
        handles = [hvd.allreduce_async(torch.full((3,), float(index)), op=hvd.Max) for index in range(70)]
        held = [*copy.deepcopy(handles[:35]), *map(copy.copy, handles[35:])]
        handles.clear()
        for _ in range(400):
            tensor = torch.ones(3)
            seen.append(weakref.ref(tensor))
            handle = hvd.allreduce_async_(tensor, name="polled")
            wait_until(partial(hvd.poll, handle), "done", every_s=0.0)
            del tensor, handle
        assert sum(reference() is not None for reference in seen) <= 170
        assert [hvd.synchronize(handle).tolist() for handle in held] == [[float(index)] * 3 for index in range(70)]
        handles = [hvd.allreduce_async(torch.ones(3)) for _ in range(400)]
        assert all(hvd.synchronize(handle).tolist() == [1.0] * 3 for handle in handles)
        assert len(runtime.current().requests) - before <= 170

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
        return len(runtime.current().request_cache._kept)

    kept = ranks2.run(check)
    assert all(0 < count < 4000 for count in kept), kept


def test_a_full_cache_loses_one_request_at_a_time_and_none_of_an_optimizer(ranks2_always: RankPool) -> None:
    def check() -> None:
        def made_by(call: Callable[[], object]) -> int:
            made.clear()
            call()
            return len(made)

        def step() -> None:
            optimizer.zero_grad()
            torch.stack([weight.sum() for weight in weights]).sum().backward()
            optimizer.step()

        made: list[None] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(request_cache, "_WEIGHT_MAX", 11 * 8)  # eight requests of one tensor each
            create = request_cache.CachedRequest.__init__
            patch.setattr(
                request_cache.CachedRequest,
                "__init__",
                lambda *each, **named: (create(*each, **named), made.append(None))[0],
            )
            gc.collect()  # optimizers of other tests
            runtime.current().request_cache.clear()
            for name in "abcdefghi":
                hvd.allreduce_(torch.ones(2), name=name)
            assert made_by(lambda: [hvd.allreduce_(torch.ones(2), name=name) for name in "bcdefghi"]) == 0
            assert made_by(lambda: hvd.allreduce_(torch.ones(2), name="a")) == 1
            assert made_by(lambda: [hvd.allreduce_(torch.ones(2), name=name) for name in "cdefghia"]) == 0
            weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(40)]
            named = [(f"room.{number}", weight) for number, weight in enumerate(weights)]
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=0.1), named)
            assert made_by(step) >= 40
            assert made_by(step) == 0

    ranks2_always.run(check)


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
        numbers = list(runtime.current().requests)
        assert numbers
        for number in numbers:
            for ask in (hvd.poll, hvd.synchronize):
                with pytest.raises(ValueError, match=f"Handle {number} was not created"):
                    ask(number)
        optimizer.step()

    ranks2_always.run(check)
