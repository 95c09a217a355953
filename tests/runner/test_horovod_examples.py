"""Scripts in the shape of Horovod's examples for PyTorch run as they are: digits, in plain and in mixed precision."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from jobs import IMPORT_TORCH_SILENTLY, TORCH_S, Hororun

pytest.importorskip("torch")

DIGITS = """
import argparse

import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
import torch.utils.data.distributed

import horovod
import horovod.torch as hvd

class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.conv = nn.Conv2d(1, 4, kernel_size=3)
        self.drop = nn.Dropout2d(0.1)
        self.fc = nn.Linear(144, 10)

    def forward(self, x):
        x = F.relu(self.drop(self.conv(x))).view(-1, 144)
        return F.log_softmax(self.fc(x), dim=1)

def main(args):
    def train_mixed_precision(epoch, scaler):
        model.train()
        train_sampler.set_epoch(epoch)
        for batch_idx, (data, target) in enumerate(train_loader):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.nll_loss(model(data).float(), target)
            scaler.scale(loss).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()

    def train_epoch(epoch):
        model.train()
        train_sampler.set_epoch(epoch)
        for batch_idx, (data, target) in enumerate(train_loader):
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()

    def metric_average(val, name):
        tensor = torch.tensor(val)
        avg_tensor = hvd.allreduce(tensor, name=name)
        return avg_tensor.item()

    def test():
        model.eval()
        test_loss, correct = 0.0, 0.0
        for data, target in test_loader:
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            pred = output.data.max(1, keepdim=True)[1]
            correct += pred.eq(target.data.view_as(pred)).cpu().float().sum()
        test_loss = metric_average(test_loss / len(test_sampler), "avg_loss")
        accuracy = metric_average(float(correct / len(test_sampler)), "avg_accuracy")
        if hvd.rank() == 0:
            print("loss %.3f accuracy %.0f%%" % (test_loss, 100.0 * accuracy))

    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    kwargs = {}
    if kwargs.get("num_workers", 0) > 0 and "forkserver" in mp.get_all_start_methods():
        kwargs["multiprocessing_context"] = "forkserver"
    target = torch.arange(120) % 10
    dataset = torch.utils.data.TensorDataset(torch.eye(10)[target].repeat(1, 7)[:, :64].reshape(-1, 1, 8, 8), target)
    train_sampler = torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = torch.utils.data.DataLoader(dataset, batch_size=args.batch_size, sampler=train_sampler, **kwargs)
    test_sampler = torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    test_loader = torch.utils.data.DataLoader(dataset, batch_size=60, sampler=test_sampler, **kwargs)
    model = Net()
    lr_scaler = hvd.size() if not args.use_adasum else 1
    optimizer = optim.SGD(model.parameters(), lr=args.lr * lr_scaler, momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(optimizer,
                                         named_parameters=model.named_parameters(),
                                         compression=compression,
                                         op=hvd.Adasum if args.use_adasum else hvd.Average,
                                         gradient_predivide_factor=args.gradient_predivide_factor)
    scaler = torch.amp.GradScaler("cpu") if args.use_mixed_precision else None
    for epoch in range(1, args.epochs + 1):
        if scaler:
            train_mixed_precision(epoch, scaler)
        else:
            train_epoch(epoch)
    test()

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--fp16-allreduce", action="store_true", default=False)
    parser.add_argument("--use-mixed-precision", action="store_true", default=False)
    parser.add_argument("--use-adasum", action="store_true", default=False)
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    parser.add_argument("--num-proc", type=int)
    args = parser.parse_args()
    if args.num_proc:
        horovod.run(main, args=(args,), np=args.num_proc)
    else:
        main(args)
"""


def job(hororun: Hororun, script: str, folder: Path, *words: str) -> list[str]:
    """What a script of Horovod's shape prints; its word ``--num-proc`` has it start its own ranks."""
    (folder / "script.py").write_text(IMPORT_TORCH_SILENTLY + script)
    command = ["-m", "horo.runner", "--horovod", "-H", "localhost:8", "--no-prefix", "-np", "2", "script.py"]
    command = ["-m", "horo.horovod", "script.py"] if "--num-proc" in words else command
    done = hororun.launch([sys.executable, *command, *words], cwd=folder).finish(TORCH_S)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_digits(hororun: Hororun, tmp_path: Path) -> None:
    (line,) = job(hororun, DIGITS, tmp_path, "--gradient-predivide-factor", "2", "--fp16-allreduce")
    assert line.endswith("accuracy 100%")


def test_digits_with_mixed_precision_by_horovod_run(hororun: Hororun, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch.amp, "GradScaler"):
        pytest.skip("torch.amp.GradScaler for the CPU came with torch 2.3 (`make test TORCH=torch==2.13.0`)")
    (line,) = job(hororun, DIGITS, tmp_path, "--use-mixed-precision", "--num-proc", "2")
    assert line.startswith("[0]<stdout>:loss ")
    assert line.endswith("accuracy 100%")
