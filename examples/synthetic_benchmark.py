"""Images per second of a ResNet on random data, with the options and the printed lines that Horovod users know.

    hororun synthetic_benchmark.py                                                  a rank on each GPU of this machine
    hororun -np 2 synthetic_benchmark.py --no-cuda --batch-size 8 --num-iters 3     two on its cores

Every rank trains on one fixed random batch, so that only computation and the exchange of gradients are measured. The
numbers printed are of rank 0; the last line multiplies them by the number of ranks. More ranks than GPUs share them.
"""

from __future__ import annotations

import argparse
import statistics
import timeit
from collections.abc import Callable

import torch
from torch import nn

import horo.torch as hvd

CLASSES = 1000
EXPANSION = 4
# Blocks in each of the four stages, and channels of the first; "tiny" is there to try things out.
MODELS: dict[str, tuple[tuple[int, int, int, int], int]] = {
    "resnet50": ((3, 4, 6, 3), 64),
    "resnet101": ((3, 4, 23, 3), 64),
    "resnet152": ((3, 8, 36, 3), 64),
    "tiny": ((1, 1, 1, 1), 8),
}


def convolution(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution that keeps the extent (up to the stride), then batch normalisation."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(channels_out),
    )


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride) and 1x1 convolution beside a shortcut (He et al., Deep Residual Learning, 2015)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        channels_out = EXPANSION * channels
        self.path = nn.Sequential(
            convolution(channels_in, channels, 1),
            nn.ReLU(inplace=True),
            convolution(channels, channels, 3, stride),
            nn.ReLU(inplace=True),
            convolution(channels, channels_out, 1),
        )
        keeps_shape = stride == 1 and channels_in == channels_out
        self.shortcut = nn.Identity() if keeps_shape else convolution(channels_in, channels_out, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, channels_in, h, w] to [batch, 4 * channels, h / stride, w / stride]."""
        return nn.functional.relu(self.path(x) + self.shortcut(x))


def build_model(name: str) -> nn.Module:
    """The ResNet of that name in ``MODELS``: images [batch, 3, h, w] to scores [batch, 1000]."""
    blocks, width = MODELS[name]
    layers: list[nn.Module] = [convolution(3, width, 7, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    channels_in = width
    for stage, count in enumerate(blocks):
        channels = width << stage
        for block in range(count):
            layers.append(Bottleneck(channels_in, channels, stride=2 if stage > 0 and block == 0 else 1))
            channels_in = EXPANSION * channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, CLASSES))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Synthetic benchmark.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as 16-bit floats")
    parser.add_argument("--model", choices=sorted(MODELS), default="resnet50", help="model to train")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--image-size", type=int, default=224, help="height and width of an image")
    parser.add_argument("--num-warmup-batches", type=int, default=10, help="steps before anything is measured")
    parser.add_argument("--num-batches-per-iter", type=int, default=10, help="steps per measurement")
    parser.add_argument("--num-iters", type=int, default=10, help="measurements")
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    parser.add_argument("--use-adasum", action="store_true", help="combine the steps of ranks by Adasum")
    arguments = parser.parse_args()
    for option in ("batch_size", "image_size", "num_batches_per_iter", "num_iters"):
        if getattr(arguments, option) < 1:
            parser.error(f"--{option.replace('_', '-')} {getattr(arguments, option)}: at least 1")
    if arguments.num_warmup_batches < 0:
        parser.error(f"--num-warmup-batches {arguments.num_warmup_batches}: at least 0")
    return arguments


def choose_device(no_cuda: bool) -> torch.device:
    """The GPU of this rank, which becomes torch's current one, or the CPU."""
    if no_cuda or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = True
    return device


def prepare_step(arguments: argparse.Namespace, device: torch.device) -> Callable[[], None]:
    """Builds model, optimizer and one random batch; returns a function that takes one training step."""
    model = build_model(arguments.model).to(device)
    lr_scale = 1 if arguments.use_adasum else hvd.size()  # steps that differ add up with Adasum
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * lr_scale)
    compression = hvd.Compression.fp16 if arguments.fp16_allreduce else hvd.Compression.none
    op = hvd.Adasum if arguments.use_adasum else hvd.Average
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression, op=op
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    images = torch.randn(arguments.batch_size, 3, arguments.image_size, arguments.image_size, device=device)
    labels = torch.randint(CLASSES, (arguments.batch_size,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def say(text: str) -> None:
    """Prints on the first rank."""
    if hvd.rank() == 0:
        print(text, flush=True)


def main() -> None:
    arguments = parse_arguments()
    hvd.init()
    device = choose_device(arguments.no_cuda)
    unit = "CPU" if device.type == "cpu" else "GPU"
    step = prepare_step(arguments, device)

    def run(steps: int) -> None:
        for _ in range(steps):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()  # steps return before the GPU has done them

    say(f"Model: {arguments.model}")
    say(f"Batch size: {arguments.batch_size}")
    say(f"Number of {unit}s: {hvd.size()}")
    say("Running warmup...")
    run(arguments.num_warmup_batches)

    say("Running benchmark...")
    rates = []
    for number in range(arguments.num_iters):
        seconds = timeit.timeit(lambda: run(arguments.num_batches_per_iter), number=1)
        rates.append(arguments.batch_size * arguments.num_batches_per_iter / seconds)
        say(f"Iter #{number}: {rates[-1]:.1f} img/sec per {unit}")

    mean, spread = statistics.fmean(rates), 1.96 * statistics.pstdev(rates)
    say(f"Img/sec per {unit}: {mean:.1f} +-{spread:.1f}")
    say(f"Total img/sec on {hvd.size()} {unit}(s): {hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}")


if __name__ == "__main__":
    main()
