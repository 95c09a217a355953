"""Scripts in the shape of Horovod's examples for PyTorch run as they are: digits, ImageNet, Adasum."""

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

IMAGENET = """
import argparse
import math
import os

import torch
import torch.nn.functional as F
import torch.optim as optim

import horovod.torch as hvd
from horovod.torch.functions import broadcast_optimizer_state, broadcast_parameters

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint-format", default="./checkpoint-{epoch}.pth.tar")
parser.add_argument("--batches-per-allreduce", type=int, default=2)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--base-lr", type=float, default=0.0125)
parser.add_argument("--warmup-epochs", type=float, default=2)
args = parser.parse_args()
allreduce_batch_size = 4 * args.batches_per_allreduce

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
resume_from_epoch = 0
for try_epoch in range(args.epochs, 0, -1):
    if os.path.exists(args.checkpoint_format.format(epoch=try_epoch)):
        resume_from_epoch = try_epoch
        break
resume_from_epoch = hvd.broadcast(torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch").item()

def labels(x):
    return (x.mean(dim=(1, 2, 3)) > 0).long()

images = torch.randn(64, 3, 4, 4)
dataset = torch.utils.data.TensorDataset(images, labels(images))
sampler = torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(dataset, batch_size=allreduce_batch_size, sampler=sampler)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(),
                            torch.nn.Linear(16, 2))
optimizer = optim.SGD(model.parameters(), lr=args.base_lr * args.batches_per_allreduce * hvd.size(), momentum=0.9,
                      weight_decay=0.00005)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(),
    compression=hvd.Compression.none,
    backward_passes_per_step=args.batches_per_allreduce,
    op=hvd.Average,
    gradient_predivide_factor=1.0)
if resume_from_epoch > 0 and hvd.rank() == 0:
    checkpoint = torch.load(args.checkpoint_format.format(epoch=resume_from_epoch))
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
broadcast_parameters(model.state_dict(), root_rank=0)
broadcast_optimizer_state(optimizer, root_rank=0)

def adjust_learning_rate(epoch, batch_idx):
    if epoch < args.warmup_epochs:
        epoch += float(batch_idx + 1) / len(loader)
        lr_adj = 1. / hvd.size() * (epoch * (hvd.size() - 1) / args.warmup_epochs + 1)
    else:
        lr_adj = 1.
    for param_group in optimizer.param_groups:
        param_group["lr"] = args.base_lr * hvd.size() * args.batches_per_allreduce * lr_adj

class Metric(object):
    def __init__(self, name):
        self.name, self.sum, self.n = name, torch.tensor(0.), torch.tensor(0.)

    def update(self, val):
        self.sum += hvd.allreduce(val.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n

for epoch in range(resume_from_epoch, args.epochs):
    model.train()
    sampler.set_epoch(epoch)
    train_loss = Metric("train_loss")
    for batch_idx, (data, target) in enumerate(loader):
        adjust_learning_rate(epoch, batch_idx)
        optimizer.zero_grad()
        for i in range(0, len(data), 4):
            data_batch, target_batch = data[i:i + 4], target[i:i + 4]
            loss = F.cross_entropy(model(data_batch), target_batch)
            train_loss.update(loss)
            loss.div_(math.ceil(float(len(data)) / 4))
            loss.backward()
        optimizer.step()
    if hvd.rank() == 0:
        print("epoch %d loss %.4f" % (epoch + 1, train_loss.avg.item()), flush=True)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()},
                   args.checkpoint_format.format(epoch=epoch + 1))
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
    (line,) = job(hororun, DIGITS, tmp_path, "--use-mixed-precision", "--use-adasum", "--num-proc", "2")
    assert line.startswith("[0]<stdout>:loss ")
    assert line.endswith("accuracy 100%")


def test_imagenet_goes_on_from_its_checkpoint(hororun: Hororun, tmp_path: Path) -> None:
    whole = job(hororun, IMAGENET, tmp_path)
    assert [line.split()[1] for line in whole] == ["1", "2", "3", "4"]
    for epoch in (3, 4):
        (tmp_path / f"checkpoint-{epoch}.pth.tar").unlink()
    assert job(hororun, IMAGENET, tmp_path) == whole[2:]
