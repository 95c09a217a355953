"""Scripts in the shape of Horovod's examples for PyTorch run as they are: digits, in plain and in mixed precision."""

import sys
from pathlib import Path

import pytest
from jobs import IMPORT_TORCH_SILENTLY, TORCH_S, Hororun

pytest.importorskip("torch")

DIGITS = """
import argparse

import torch
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
        self.fc = nn.Linear(144, 10)

    def forward(self, x):
        return F.log_softmax(self.fc(F.relu(self.conv(x)).view(-1, 144)), dim=1)

def main(args):
    def train(epoch):
        train_sampler.set_epoch(epoch)
        for batch_idx, (data, target) in enumerate(train_loader):
            optimizer.zero_grad()
            if scaler is None:
                F.nll_loss(model(data), target).backward()
                optimizer.step()
                continue
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.nll_loss(model(data).float(), target)
            scaler.scale(loss).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()

    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    target = torch.arange(120) % 10
    dataset = torch.utils.data.TensorDataset(torch.eye(10)[target].repeat(1, 7)[:, :64].reshape(-1, 1, 8, 8), target)
    train_sampler = torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = torch.utils.data.DataLoader(dataset, batch_size=10, sampler=train_sampler)
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(optimizer,
                                         named_parameters=model.named_parameters(),
                                         compression=compression,
                                         op=hvd.Average,
                                         gradient_predivide_factor=args.gradient_predivide_factor)
    scaler = torch.amp.GradScaler("cpu") if args.use_mixed_precision else None
    for epoch in range(1, 7):
        train(epoch)
    model.eval()
    correct = torch.stack([model(data).argmax(1).eq(target).sum() for data, target in train_loader]).sum() / 60.0
    accuracy = hvd.allreduce(correct, name="avg_accuracy").item()
    if hvd.rank() == 0:
        print("accuracy %.0f%%" % (100.0 * accuracy))

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fp16-allreduce", action="store_true", default=False)
    parser.add_argument("--use-mixed-precision", action="store_true", default=False)
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
    assert line == "accuracy 100%"


def test_digits_with_mixed_precision_by_horovod_run(hororun: Hororun, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch.amp, "GradScaler"):
        pytest.skip("torch.amp.GradScaler for the CPU came with torch 2.3 (`make test TORCH=torch==2.13.0`)")
    (line,) = job(hororun, DIGITS, tmp_path, "--use-mixed-precision", "--num-proc", "2")
    assert line == "[0]<stdout>:accuracy 100%"
