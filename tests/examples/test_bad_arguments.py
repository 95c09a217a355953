"""A wrong argument of a benchmark or an example is one sentence that names it."""

from __future__ import annotations

import importlib
import runpy
import sys

import pytest
from example_runs import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

BENCHMARKS = [
    ("allreduce --np 0", "--np 0: at least 1"),
    ("allreduce --turn-limit-s nan", "--turn-limit-s nan: must be more than 0"),
    ("allreduce --min 8 --max 4", "--max 4 is below --min 8"),
    ("allreduce --peers horo,nccl", "'horo,nccl' knows no 'nccl'; known are horo, gloo, openmpi, mpich, horovod"),
    ("allreduce --peers gloo,gloo", "'gloo,gloo' names one twice"),
    ("allreduce --beside -1", "--beside -1: not below 0"),
    ("allreduce --max 4T", "'4T' is not a size"),
    ("autotune --rate bananas", "--rate"),
    ("autotune --steps 0", "--steps"),
    ("collectives --operation alltoall,gossip", "'alltoall,gossip' knows no 'gossip'; known are reducescatter, allt"),
    ("gpu_step --models vgg", "--models: no 'vgg'"),
    ("gpu_gradients --device cpu --np 3", "--np 3: there is a GPU each for 1 to 2 ranks"),
    ("gpu_staging --sizes 6", "'6': float32 takes 4 bytes each"),
    ("gpu_shared --batch 0", "--batch 0: at least 1"),
    ("negotiation --layouts 1x9999999", "open files in one process"),
    ("negotiation --layouts 4x0", "is not a layout; write hosts x ranks per host"),
    ("negotiation --tensors 1,0", "'1,0' is not a list of counts"),
    ("startup --warm-up -1", "--warm-up -1: at least 0"),
    ("idle --seconds 0", "--seconds 0: must be more than 0"),
    ("footprint --np 0", "--np 0: at least 1"),
    ("two_hosts --hosts 1", "--hosts 1: there is no link with less than 2"),
    ("two_hosts --rates 1gbps", "'1gbps' is not a rate"),
    ("two_hosts --size 6", "--size 6: float32 takes 4 bytes each"),
    ("suite alreduce", "'alreduce'"),
    ("check alreduce", "'alreduce'"),
]
EXAMPLES = [
    ("accumulation --batches-per-step 0", "--batches-per-step 0: at least 1"),
    ("digits --lr nan", "--lr nan: more than 0"),
    ("digits --epochs 0", "--epochs 0: at least 1"),
    ("gan --batch-size 0", "--batch-size 0: at least 1"),
    ("imagenet --warmup-epochs -1", "--warmup-epochs -1: at least 0"),
    ("imagenet --base-lr -1", "--base-lr -1.0: more than 0"),
    ("imagenet --checkpoint /not/there/run.pt", "--checkpoint /not/there/run.pt: there is no folder /not/there"),
    ("mixed_precision --steps 0", "--steps 0: at least 1"),
    ("synthetic_benchmark --num-warmup-batches -1", "--num-warmup-batches -1: at least 0"),
    ("synthetic_benchmark --model vgg", "invalid choice: 'vgg'"),
]


@pytest.mark.parametrize(("command", "said"), BENCHMARKS, ids=[command for command, _ in BENCHMARKS])
def test_a_bad_argument_of_a_benchmark_is_named(command: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    script, *words = command.split()
    with pytest.raises(SystemExit):
        importlib.import_module(script).parse_arguments(words)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("command", "said"), EXAMPLES, ids=[command for command, _ in EXAMPLES])
def test_a_bad_argument_of_an_example_is_named(
    command: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", command.split())
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / f"{sys.argv[0]}.py"))["parse_arguments"]()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
