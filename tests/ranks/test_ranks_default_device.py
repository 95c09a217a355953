"""torch's default device is not that of the tensors: results and what horo sends by itself are in host memory."""

from __future__ import annotations

import torch
from rank_pool import RankPool

import horo.torch as hvd


def test_results_are_where_their_tensors_are(ranks2: RankPool) -> None:
    """Memory on ``meta`` has no address. Calls that are repeated use what is kept of the first ones."""

    def check() -> None:
        r, n = hvd.rank(), hvd.size()
        given = torch.arange(2.0 * n).reshape(n, 2) + r
        whole = given - r
        with torch.device("meta"):
            for turn in range(4):
                assert torch.equal(hvd.allreduce(given, op=hvd.Sum, name="sum"), whole * n + 1)
                (grouped,) = hvd.grouped_allreduce([given], op=hvd.Max, name=f"max{turn}")
                assert torch.equal(grouped, whole + 1)
                assert torch.equal(hvd.broadcast(given, 1, name="root"), whole + 1)
                assert torch.equal(hvd.allgather(given, name="rows"), torch.cat([whole, whole + 1]))
                assert hvd.allgather(given[:0], name="none").shape == (0, 2)
                assert torch.equal(hvd.alltoall(given, name="for all"), torch.stack([whole[r], whole[r] + 1]))
                assert torch.equal(hvd.reducescatter(given, op=hvd.Sum, name="share"), whole[r : r + 1] * n + 1)
                rows, counts = hvd.alltoall(given, splits=[1, 1], name="split")
                assert rows.tolist() == [whole[r].tolist(), (whole[r] + 1).tolist()]
                assert counts.tolist() == [1, 1]

    ranks2.run(check)


def test_what_travels_beside_tensors_is_in_host_memory(ranks2: RankPool) -> None:
    def check() -> None:
        r = hvd.rank()
        model = torch.nn.Linear(2, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()  # older torch makes Adam's state on the default device and cannot use it then
        with torch.device("meta"):
            assert hvd.broadcast_object({"rank": r}, 1) == {"rank": 1}
            assert hvd.allgather_object(r) == [0, 1]
            hvd.broadcast_parameters(model.state_dict(), 0)
            average = hvd.MetricAverage("loss")
            average.update(2, loss=r + 1.0)
            assert average.compute() == {"loss": 1.5}
            model(torch.ones(3, 2, device="cpu")).sum().backward()
            optimizer.step()
            hvd.broadcast_optimizer_state(optimizer, 0)
        everyone = hvd.allgather(torch.cat([p.detach().reshape(-1) for p in model.parameters()])[None])
        assert torch.equal(everyone[0], everyone[1])

    ranks2.run(check)
