"""The synthetic benchmark trains, prints the lines that Horovod users know, and chooses the device of a rank."""

from __future__ import annotations

import re
import runpy

import pytest
import torch
from example_runs import ROOT, forked, launcher, start

SCRIPT = str(ROOT / "examples" / "synthetic_benchmark.py")
TINY = ["--no-cuda", "--model", "tiny", "--image-size", "32", "--batch-size", "2"]
SHORT = ["--num-warmup-batches", "1", "--num-batches-per-iter", "1", "--num-iters", "2"]


@pytest.mark.parametrize(
    ("launcher_name", "ranks", "options"),
    [("forked", 1, []), ("hororun", 2, ["--fp16-allreduce"]), ("forked", 2, ["--use-adasum"])],
)
def test_prints_the_lines_in_order(launcher_name: str, ranks: int, options: list[str]) -> None:
    words = [*TINY, *SHORT, *options]
    if launcher_name == "forked":
        ends, texts = zip(*forked("synthetic_benchmark.py", *words, ranks=ranks), strict=True)
        assert ends == (0,) * ranks
        printed = "".join(texts)
    else:
        printed = start([*launcher(launcher_name, ranks), SCRIPT, *words]).stdout
    number = r"\d+\.\d"
    expected = [
        "Model: tiny",
        "Batch size: 2",
        f"Number of CPUs: {ranks}",
        r"Running warmup\.\.\.",
        r"Running benchmark\.\.\.",
        rf"Iter #0: {number} img/sec per CPU",
        rf"Iter #1: {number} img/sec per CPU",
        rf"Img/sec per CPU: {number} \+-{number}",
        rf"Total img/sec on {ranks} CPU\(s\): {number} \+-{number}",
    ]
    lines = printed.splitlines()
    assert len(lines) == len(expected), printed
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), f"{line!r} is not {pattern!r}"


def test_ranks_take_gpus_in_turn_and_the_cpu_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    module = runpy.run_path(SCRIPT)
    choose_device, hvd = module["choose_device"], module["hvd"]
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    for local_rank in range(3):
        monkeypatch.setattr(hvd, "local_rank", lambda local_rank=local_rank: local_rank)
        assert choose_device(False) == torch.device("cuda", local_rank % 2)
    assert chosen == [torch.device("cuda", number) for number in (0, 1, 0)]
    assert choose_device(True) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(False) == torch.device("cpu")
    assert len(chosen) == 3


def test_resnet50_has_its_published_number_of_parameters() -> None:
    build_model = runpy.run_path(SCRIPT)["build_model"]
    assert sum(parameter.numel() for parameter in build_model("resnet50").parameters()) == 25_557_032
