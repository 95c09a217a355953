"""What ranks check with tensors on a device: a real GPU, a double of one, or to try the checks themselves, a CPU.

Each function runs on every rank of a job. Those that take a ``Device`` also run on a double (``gpu_double.Gpu`` has its
methods); those that take a ``torch.device`` are about what torch does there, which a double does not have.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

import horo.torch as hvd


class Device(Protocol):
    """Where tensors are put, and read from behind all that is on the current stream."""

    def put(self, tensor: torch.Tensor, number: int = 0) -> torch.Tensor: ...

    def read(self, tensor: torch.Tensor) -> torch.Tensor: ...


class RealGpu:
    """A GPU of this machine, which becomes torch's current one; ranks share those that there are."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(self.device)

    def put(self, tensor: torch.Tensor, number: int = 0) -> torch.Tensor:
        return tensor.to(self.device, copy=True)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()


def _put_of(gpu: Device, on_gpu: Sequence[int]) -> Any:
    return gpu.put if hvd.rank() in on_gpu else torch.Tensor.clone


def reductions(gpu: Device, on_gpu: Sequence[int]) -> None:
    r, put = hvd.rank(), _put_of(gpu, on_gpu)
    own = torch.tensor([1.0, 2.0, 3.0]) * (r + 1)
    for op, expected in ((hvd.Sum, [3, 6, 9]), (hvd.Average, [1.5, 3, 4.5]), (hvd.Max, [2, 4, 6])):
        for dtype in (torch.float32, torch.bfloat16, torch.int64 if op != hvd.Average else torch.float64):
            result = hvd.allreduce(put(own.to(dtype)), op=op)
            assert result.is_cuda == (r in on_gpu)
            assert gpu.read(result).tolist() == expected, (op, dtype)
    x = put(own)
    assert hvd.allreduce_(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5) is x
    assert gpu.read(x).tolist() == [3, 6, 9]
    narrow = hvd.allreduce(put(own), op=hvd.Sum, compression=hvd.Compression.fp16)
    assert gpu.read(narrow).tolist() == [3, 6, 9]
    adasum = hvd.allreduce(put(own), op=hvd.Adasum)
    assert gpu.read(adasum).tolist() == [1.5, 3, 4.5]  # of parallel vectors, their mean
    group = hvd.grouped_allreduce([put(own), put(torch.ones(2, 0)), put(own[:1])], op=hvd.Sum)
    assert [gpu.read(one).tolist() for one in group] == [[3, 6, 9], [[], []], [3]]
    rows = hvd.reducescatter(put(torch.arange(10.0).view(5, 2)), op=hvd.Sum)
    assert torch.equal(gpu.read(rows), 2 * torch.arange(10.0).view(5, 2)[slice(0, 3) if r == 0 else slice(3, 5)])


def large_reductions(gpu: Device, on_gpu: Sequence[int]) -> None:
    r, put = hvd.rank(), _put_of(gpu, on_gpu)
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.arange((5 << 20) // dtype.itemsize + 3).remainder(64).to(dtype)
        x, y = put(values + r), put(values)
        handle = hvd.allreduce_async(x, op=hvd.Sum, name="kept")
        hvd.allreduce_(y, op=hvd.Average, name="in place", prescale_factor=2.0)
        total = hvd.synchronize(handle)
        assert total.is_cuda == (r in on_gpu)
        assert torch.equal(gpu.read(total), 2 * values + 1), dtype
        assert torch.equal(gpu.read(y), 2 * values), dtype
        assert torch.equal(gpu.read(x), values + r), dtype


def moves(gpu: Device, on_gpu: Sequence[int]) -> None:
    r, put = hvd.rank(), _put_of(gpu, on_gpu)
    for root in (0, 1):
        sent = put(torch.full((3,), r + 1))
        assert gpu.read(hvd.broadcast(sent, root)).tolist() == [root + 1] * 3
        hvd.broadcast_(sent, root)
        assert gpu.read(sent).tolist() == [root + 1] * 3
    gathered = hvd.allgather(put(torch.full((r + 1, 2), r)))
    assert gathered.is_cuda == (r in on_gpu)
    assert gpu.read(gathered).tolist() == [[0, 0], [1, 1], [1, 1]]
    assert gpu.read(hvd.allgather(put(torch.empty(0, 2)))).shape == (0, 2)
    received, splits = hvd.alltoall(put(torch.arange(3) + 10 * r), torch.tensor([1, 2]))
    assert gpu.read(received).tolist() == ([0, 10] if r == 0 else [1, 2, 11, 12])
    assert splits.tolist() == [r + 1, r + 1]
    named = {"a": put(torch.full((2, 2), float(r))), "b": torch.full((3,), r), "c": put(torch.tensor(r))}
    hvd.broadcast_parameters(named, root_rank=1)
    assert [gpu.read(one).sum().item() for one in named.values()] == [4, 3, 1]


def _drawn(*shape: int, seed: int, device: torch.device, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The same on all devices."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).to(device)


def _close(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], **tolerance: float) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **(tolerance or {"rtol": 1e-9, "atol": 1e-11}))


def _equal_on_all_ranks(tensors: Sequence[torch.Tensor]) -> None:
    flat = torch.cat([tensor.detach().flatten().double() for tensor in tensors])[None]
    everybodys = hvd.allgather(flat)
    assert everybodys.device == flat.device
    assert all(torch.equal(row, flat[0]) for row in everybodys)


def _images() -> nn.Module:
    """Convolutions with memory in the order of channels, an unused parameter, and one that is used twice."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
            self.head, self.unused = nn.Linear(8, 5), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.second(torch.tanh(self.second(torch.relu(self.first(x))))))
            return self.head(x.mean((2, 3)))

    torch.manual_seed(5)
    return Net()


def trains_as_one_process(device: torch.device) -> None:
    """Gradients of ranks that are averaged during backward, in memory of any order."""
    size, rank = hvd.size(), hvd.rank()
    plain = _images().double().to(device, memory_format=torch.channels_last)
    model = copy.deepcopy(plain)
    alone = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    mine = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(mine, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(4):
        whole = _drawn(4 * size, 3, 6, 6, seed=step, device=device).to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        model(whole[rank::size]).square().mean().backward()
        alone.zero_grad()
        plain(whole).square().mean().backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        _close(found, [p.grad for p in plain.parameters() if p.grad is not None])
        assert all(grad.device == device for grad in found)
        optimizer.step()
        alone.step()
    _close(list(model.parameters()), list(plain.parameters()))
    _equal_on_all_ranks(list(model.parameters()))


def clipped_and_accumulated(device: torch.device) -> None:
    """Three passes for a step, two of them of this rank alone, then a norm of all gradients, which all ranks have."""
    size, rank = hvd.size(), hvd.rank()
    plain = _images().double().to(device)
    model = copy.deepcopy(plain)
    mine = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(mine, named_parameters=model.named_parameters())
    alone = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(2):
        batches = [_drawn(2 * size, 3, 6, 6, seed=10 * step + part, device=device) for part in range(3)]
        with optimizer.no_sync():
            for batch in batches[:2]:
                model(batch[rank::size]).square().mean().backward()
        model(batches[2][rank::size]).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        for batch in batches:
            plain(batch).square().mean().backward()
        _close([norm], [torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)])
        alone.step()
        alone.zero_grad()
    _close(list(model.parameters()), list(plain.parameters()), rtol=1e-6, atol=1e-9)


def autocast_and_a_scaler(device: torch.device) -> None:
    """bfloat16 without a scaler, and float16 with one, which on GPUs sees an overflow on one rank and skips on all."""
    size, rank = hvd.size(), hvd.rank()
    for dtype in (torch.bfloat16, torch.float16):
        model = _images().to(device)
        mine = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer: Any = hvd.DistributedOptimizer(mine, named_parameters=model.named_parameters())
        enabled = dtype == torch.float16 and device.type == "cuda"  # on CPUs few layers compute in float16
        scaling = {"init_scale": 1024.0, "enabled": enabled}
        is_old = not hasattr(torch.amp, "GradScaler")  # torch before 2.3
        scaler = torch.cuda.amp.GradScaler(**scaling) if is_old else torch.amp.GradScaler(device.type, **scaling)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for step in range(3):
            whole = _drawn(4 * size, 3, 6, 6, seed=step, device=device, dtype=torch.float32)
            optimizer.zero_grad()
            active = enabled or dtype == torch.bfloat16
            with torch.autocast(device.type, dtype if active else torch.bfloat16, enabled=active):
                loss = model(whole[rank::size]).float().square().mean()
            overflows = enabled and step == 1
            scaler.scale(loss * (float("inf") if overflows and rank == size - 1 else 1.0)).backward()
            kept = [parameter.detach().clone() for parameter in model.parameters()]
            scaler.step(optimizer)
            scaler.update()
            if overflows:
                assert all(torch.equal(one, other) for one, other in zip(kept, model.parameters(), strict=True))
                assert scaler.get_scale() == 512.0
        _equal_on_all_ranks(list(model.parameters()))
        moved = [not torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True)]
        assert sum(moved) == 6  # all but those of the unused layer
        assert all(parameter.isfinite().all() for parameter in model.parameters())


def not_contiguous(device: torch.device) -> None:
    """Tensors with strides, as they are, in place and as results of autograd."""
    size, rank = hvd.size(), hvd.rank()
    base = _drawn(6, 8, seed=1, device=device)
    ranks = size * (size + 1) / 2
    views: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        torch.Tensor.t, lambda x: x[:, ::2], lambda x: x[1::3, 2:5], lambda x: x.view(2, 3, 2, 4).permute(2, 0, 3, 1),
        lambda x: x[:1].expand(3, 8), torch.clone, torch._neg_view,
    )  # fmt: skip
    for view in views:
        own = view(base * (rank + 1))
        _close([hvd.allreduce(own, op=hvd.Sum)], [view(base) * ranks])
        assert torch.equal(hvd.allgather(view(base)), torch.cat([view(base)] * size))
        assert torch.equal(hvd.broadcast(own, root_rank=size - 1), view(base * size))
        if own.stride(0):  # its elements are apart
            layout = own.stride()
            assert hvd.allreduce_(own, op=hvd.Sum) is own and own.stride() == layout
            _close([own], [view(base) * ranks])
    area = torch.zeros(6, 8, dtype=torch.float64, device=device)
    area[:, ::2] = rank + 1
    part = area[:, ::2]
    assert hvd.allreduce_(part, op=hvd.Sum) is part
    assert area[:, ::2].eq(ranks).all() and area[:, 1::2].eq(0).all()  # nothing beside it was written
    rows = torch.full((6, 8), rank, dtype=torch.float64, device=device)
    hvd.broadcast_(rows.t()[1:4], root_rank=0)
    assert rows[:, 1:4].eq(0).all() and rows[:, 4:].eq(rank).all() and rows[:, 0].eq(rank).all()
    x = base.t().clone().requires_grad_()
    hvd.allreduce(x.t() * (rank + 1), op=hvd.Sum).sum().backward()
    assert x.grad is not None
    _close([x.grad], [torch.full_like(x, float(size * (rank + 1)))])


def sparse(device: torch.device) -> None:
    """Gradients of an embedding, and the function for sparse tensors."""
    size, rank = hvd.size(), hvd.rank()
    indices = torch.tensor([[0, 2, rank]], device=device)
    values = torch.arange(6.0, device=device).view(3, 2) + rank
    own = torch.sparse_coo_tensor(indices, values, (max(4, size), 2))
    summed = hvd.sparse_allreduce_async(own, name="sparse", op=hvd.Sum)()
    assert summed.device == device
    _close([summed.to_dense()], [hvd.allreduce(own.to_dense(), op=hvd.Sum)])
    torch.manual_seed(2)
    plain = nn.Embedding(20, 3, sparse=True).double().to(device)
    model = copy.deepcopy(plain)
    mine = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = hvd.DistributedOptimizer(mine, named_parameters=model.named_parameters())
    alone = torch.optim.SGD(plain.parameters(), lr=0.5)
    for step in range(3):
        words = torch.randint(20, (4 * size,), generator=torch.Generator().manual_seed(step)).to(device)
        optimizer.zero_grad()
        model(words[rank::size]).square().mean().backward()
        optimizer.step()
        alone.zero_grad()
        plain(words).square().mean().backward()
        alone.step()
    _close([model.weight], [plain.weight])


def synced_batches(device: torch.device) -> None:
    """SyncBatchNorm is BatchNorm over the batches of all ranks, of different sizes, and its statistics are, too."""
    size, rank = hvd.size(), hvd.rank()
    torch.manual_seed(7)
    plain = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4)).double().to(device)
    model: Any = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    counts = [number + 1 for number in range(size)]
    whole = _drawn(sum(counts), 3, 4, 4, seed=3, device=device)
    first = sum(counts[:rank])
    mine = whole[first : first + counts[rank]].clone().requires_grad_()
    wanted = whole.clone().requires_grad_()
    weights = _drawn(sum(counts), 4, 4, 4, seed=4, device=device)
    result, expected = model(mine), plain(wanted)
    _close([result], [expected[first : first + counts[rank]]])
    (result * weights[first : first + counts[rank]]).sum().backward()
    (expected * weights).sum().backward()
    assert mine.grad is not None and wanted.grad is not None
    _close([mine.grad], [wanted.grad[first : first + counts[rank]]], rtol=1e-7, atol=1e-9)
    _close([hvd.allreduce(p.grad, op=hvd.Sum) for p in model.parameters()], [p.grad for p in plain.parameters()],
           rtol=1e-7, atol=1e-9)  # fmt: skip
    for name, buffer in model.named_buffers():
        assert buffer.device == device
        if buffer.is_floating_point():
            _close([buffer], [plain.get_buffer(name)])
    model.eval()
    assert model(mine).device == device


def _described(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], tuple[Any, str]]:
    """Each value of its state, in host memory, and the kind of device that it is on."""
    return {
        (number, name): (value.cpu(), value.device.type) if isinstance(value, torch.Tensor) else (value, "")
        for number, entries in optimizer.state_dict()["state"].items()
        for name, value in entries.items()
    }


def optimizer_state(device: torch.device) -> None:
    """What rank 0 alone has trained is on all ranks afterwards, and on the kind of device where it was."""
    rank = hvd.rank()
    for make in (
        lambda p: torch.optim.Adam(p, lr=0.01 * (rank + 1)),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.01, capturable=device.type == "cuda"),
    ):
        model = _images().to(device)
        optimizer: Any = make(model.parameters())
        if rank == 0:
            for step in range(2):
                model(_drawn(2, 3, 6, 6, seed=step, device=device, dtype=torch.float32)).sum().backward()
                optimizer.step()
        own = _described(optimizer)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        wanted, found = hvd.broadcast_object(own, root_rank=0), _described(optimizer)
        assert found.keys() == wanted.keys()
        for key, (value, where) in wanted.items():
            assert found[key][1] == where, key
            assert torch.equal(found[key][0], value) if isinstance(value, torch.Tensor) else found[key][0] == value, key
        assert optimizer.param_groups[0]["lr"] == 0.01
        distributed = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        model(_drawn(2, 3, 6, 6, seed=rank, device=device, dtype=torch.float32)).sum().backward()
        distributed.step()
        _equal_on_all_ranks(list(model.parameters()))


def adasum_and_compression(device: torch.device) -> None:
    """Optimizers that send other things than gradients as they are."""
    for options in (
        {"op": hvd.Adasum},
        {"compression": hvd.Compression.fp16},
        {"compression": hvd.Compression.bf16, "gradient_predivide_factor": 2.0},
        {"num_groups": 2},
        {"backward_passes_per_step": 2},
    ):
        model = _images().to(device)
        mine = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer: Any = hvd.DistributedOptimizer(mine, named_parameters=model.named_parameters(), **options)
        for step in range(2):
            for part in range(int(options.get("backward_passes_per_step", 1))):
                seed = 100 * step + 10 * part + hvd.rank()
                loss = model(_drawn(4, 3, 6, 6, seed=seed, device=device, dtype=torch.float32)).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        _equal_on_all_ranks(list(model.parameters()))


def buffers_and_objects(device: torch.device) -> None:
    """Averages of buffers and metrics, and objects that contain tensors."""
    size, rank = hvd.size(), hvd.rank()
    layer = nn.BatchNorm1d(3).to(device)
    assert layer.running_mean is not None
    layer.running_mean.fill_(rank)
    hvd.average_buffers(layer)
    assert layer.running_mean.tolist() == [(size - 1) / 2] * 3
    sent = {"tensor": torch.full((2,), float(rank), device=device), "rank": rank}
    received = hvd.broadcast_object(sent, root_rank=size - 1)
    assert (received["rank"], received["tensor"].tolist()) == (size - 1, [size - 1.0] * 2)
    assert received["tensor"].device.type == device.type
    assert [each["rank"] for each in hvd.allgather_object(sent)] == list(range(size))
    metric = hvd.MetricAverage("loss")
    metric.update(loss=torch.tensor(float(rank), device=device))
    assert metric.compute() == {"loss": (size - 1) / 2}


ON_A_TORCH_DEVICE = (
    trains_as_one_process, clipped_and_accumulated, autocast_and_a_scaler, not_contiguous, sparse,
    synced_batches, optimizer_state, adasum_and_compression, buffers_and_objects,
)  # fmt: skip
