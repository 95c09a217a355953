"""The synthetic benchmark trains, prints the lines that Horovod users know, and refuses what it cannot do."""

from __future__ import annotations

import re
import runpy
import sys

import pytest
from example_runs import ROOT, launcher, start

SCRIPT = str(ROOT / "examples" / "synthetic_benchmark.py")
TINY = ["--no-cuda", "--model", "tiny", "--image-size", "32", "--batch-size", "2"]
SHORT = ["--num-warmup-batches", "1", "--num-batches-per-iter", "1", "--num-iters", "2"]


@pytest.mark.parametrize(
    ("launcher_name", "ranks", "options"),
    [("python", 1, []), ("hororun", 2, ["--fp16-allreduce"]), ("hororun", 2, ["--use-adasum"])],
)
def test_prints_the_lines_in_order(launcher_name: str, ranks: int, options: list[str]) -> None:
    done = start([*launcher(launcher_name, ranks), SCRIPT, *TINY, *SHORT, *options])
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
    lines = done.stdout.splitlines()
    assert len(lines) == len(expected), done.stdout
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), f"{line!r} is not {pattern!r}"


def test_resnet50_has_its_published_number_of_parameters() -> None:
    build_model = runpy.run_path(SCRIPT)["build_model"]
    assert sum(parameter.numel() for parameter in build_model("resnet50").parameters()) == 25_557_032


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", "0"], "--batch-size 0: at least 1"),
        (["--num-iters", "-1"], "--num-iters -1: at least 1"),
        (["--num-warmup-batches", "-1"], "--num-warmup-batches -1: at least 0"),
        (["--model", "vgg"], "invalid choice: 'vgg'"),
    ],
)
def test_bad_argument_is_named(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [SCRIPT, *arguments])
    with pytest.raises(SystemExit):
        runpy.run_path(SCRIPT)["parse_arguments"]()
    assert message in capsys.readouterr().err
