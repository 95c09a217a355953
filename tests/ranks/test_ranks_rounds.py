"""Two optimizers of one loss, of which one rank's backward touches one only, and gradients need a second round."""

from __future__ import annotations

import pytest
import torch
from rank_pool import RankPool, one_of
from small_model import assert_close

import horo.torch as hvd

ranks2 = one_of("ranks2_always", "ranks2_never")
"""Two ranks that reduce gradients during backward or after it."""


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_a_second_round_of_one_optimizer_waits_for_no_other(ranks2: RankPool, first: int, sparse: bool) -> None:
    def check(first: int, sparse: bool) -> None:
        tables = [torch.nn.Embedding(4, 2, sparse=sparse).double() for _ in range(2)]
        other = torch.nn.Linear(2, 1, bias=False).double()
        for model in (*tables, other):
            for parameter in model.parameters():
                torch.nn.init.ones_(parameter)
        groups = [[*tables[0].parameters(), *tables[1].parameters()], list(other.parameters())]
        names = [[("b.0", groups[0][0]), ("b.1", groups[0][1])], [("ac"[first], groups[1][0])]]
        optimizers = [
            hvd.DistributedOptimizer(torch.optim.SGD(group, lr=1.0), named)
            for group, named in zip(groups, names, strict=True)
        ]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            # Rank 1 does not use the other optimizer, and each rank uses one table.
            rows = tables[(hvd.rank() + step) % 2](torch.tensor([0]))
            (rows.sum() if hvd.rank() else other(rows.detach()).sum() + rows.sum()).backward()
            if hvd.rank():
                optimizers[0].step()
            for optimizer in optimizers[hvd.rank() :]:
                optimizer.step()
            wanted = torch.ones(4, 2, dtype=torch.float64)
            wanted[0] -= 0.5 * (step + 1)
            assert_close([table.weight.detach() for table in tables], [wanted, wanted])

    ranks2.run(check, first, sparse)
