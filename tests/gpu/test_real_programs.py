"""Whole programs on the GPUs of this machine: scripts, examples, benchmarks, libraries; and how they end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from gpu_checks import RealGpu
from rank_pool import RankPool

import horo.torch as hvd
from horo.errors import PeerLostError

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_S = 300


def hororun(words: Sequence[str], *, code: int = 0, **environment: str) -> str:
    """Runs a job; returns what it has written."""
    command, env = [sys.executable, "-m", "horo.runner", *words], {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S, env=env)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_without_a_number_there_is_a_rank_on_each_gpu(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nimport horo.torch as hvd\nhvd.init()\ntorch.cuda.set_device(hvd.local_rank())\n"
        "x = hvd.allreduce(torch.ones(3, device='cuda'), op=hvd.Sum)\n"
        "assert x.tolist() == [hvd.size()] * 3\nprint('on GPU', torch.cuda.current_device())\n"
    )
    said = hororun(["--no-prefix", str(script)])
    assert sorted(re.findall(r"on GPU (\d+)", said)) == sorted(map(str, range(torch.cuda.device_count())))


def test_bound_ranks_have_gpus_of_their_own_or_share_one(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nimport torch\nimport horo.torch as hvd\nhvd.init()\n"
        "print('sees', torch.cuda.device_count(), os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "x = hvd.allreduce(torch.ones(3, device='cuda:0'), op=hvd.Sum)\nassert x.tolist() == [hvd.size()] * 3\n"
    )
    there = torch.cuda.device_count()
    said = hororun(["-np", str(2 * there), "--oversubscribe", "--no-prefix", "--bind-gpus", str(script)])
    seen = re.findall(r"sees (\d+) (\S+)", said)
    assert [count for count, _ in seen] == ["1"] * 2 * there
    assert len({name for _, name in seen}) == there


@pytest.mark.parametrize("words", [[], ["--fp16-allreduce"], ["--use-adasum"], ["--gpu-operations", "nccl"]], ids=str)
def test_the_synthetic_benchmark_as_users_of_horovod_run_it(words: list[str]) -> None:
    own, its = (words, []) if "--gpu-operations" in words else ([], words)
    short = ["--model", "tiny", "--num-warmup-batches", "1", "--num-batches-per-iter", "2", "--num-iters", "2"]
    example = str(ROOT / "examples" / "synthetic_benchmark.py")
    said = hororun([*own, "-np", "2", "--oversubscribe", "--no-prefix", example, *short, *its])
    assert "Number of GPUs: 2\n" in said
    assert re.search(r"Total img/sec on 2 GPU\(s\): \d+\.\d \+-\d+\.\d", said)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("gpu_step", ["--models", "mlp-tiny,resnet50-tiny"]),
        ("gpu_gradients", []),
        ("gpu_staging", ["--sizes", "64K,16M"]),
        ("gpu_shared", ["--model", "resnet50-tiny", "--batch", "4"]),
    ],
)
def test_the_benchmarks_measure_and_their_results_are_right(script: str, words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    command = [sys.executable, str(ROOT / "benchmarks" / f"{script}.py"), "--rounds", "2", "--turn-ms", "20", *words]
    done = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(file.read_text())
    assert document["gpu"]["gpu"] == torch.cuda.get_device_name(0)
    assert document["rows"] and all(row["wrong"] == "" for row in document["rows"])


def test_a_rank_that_is_killed_while_values_are_copied_is_lost_to_the_other_at_once(device: torch.device) -> None:
    def check() -> tuple[str, float]:
        gpu, r = RealGpu(), hvd.rank()
        x = torch.ones(1 << 24, device=gpu.device)
        hvd.allreduce_(x, op=hvd.Sum)
        if r == 1:
            hvd.allreduce_async_(x, op=hvd.Sum, name="lost")
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(PeerLostError) as caught:
            for _ in range(1000):
                hvd.allreduce_(x, op=hvd.Sum, name="lost")
        took = time.monotonic() - begin
        (x + 1).sum().item()  # the GPU is of use, whatever was under way
        return str(caught.value), took

    with RankPool(2) as pool:
        said, took = pool.run_each(check, [()] * 2, lost=[1])[0]
    assert said.startswith("rank 1 (")
    assert took < 10.0


@pytest.mark.parametrize("operations", ["staged", "nccl"])
def test_a_script_that_ends_without_shutdown_ends(operations: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nimport horo.torch as hvd\nhvd.init()\n"
        "torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())\n"
        "x = torch.ones(1 << 20, device='cuda')\n"
        "for _ in range(20):\n    hvd.allreduce_(x)\nhvd.allreduce_async_(x, name='left')\n"
        "hvd.barrier()  # behind the call of each: what a rank begins when another one has left is refused\n"
        "print('last line')\n"
    )
    count = str(torch.cuda.device_count() if operations == "nccl" else 2)
    begin = time.monotonic()
    said = hororun(["-np", count, "--oversubscribe", "--gpu-operations", operations, str(script)])
    assert said.count("last line") == int(count)
    assert time.monotonic() - begin < 90.0


def test_nccl_is_that_of_torch() -> None:
    if not torch.distributed.is_nccl_available():
        pytest.skip(f"torch {torch.__version__} has no NCCL; `pytest tests/gpu` with a torch that has one runs this")
    major, minor, patch = torch.cuda.nccl.version()[:3]
    assert hvd.nccl_built() == major * 10000 + minor * 100 + patch


def test_check_build_counts_the_devices() -> None:
    words = [sys.executable, "-m", "horo.runner", "--check-build"]
    shown = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300).stdout
    assert f", {torch.cuda.device_count()} devices" in shown
