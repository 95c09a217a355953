"""The short examples train on two ranks and say what a page that shows them says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from example_runs import ROOT, forked, launcher, start


def output_of(script: str, *arguments: str, expected_code: int = 0) -> list[str]:
    """What the script prints."""
    path = str(ROOT / "examples" / script)
    done = start([*launcher("hororun", 2), path, *arguments], expected_code=expected_code)
    return (done.stdout if expected_code == 0 else done.stderr).splitlines()


def forked_output_of(script: str, *arguments: str) -> list[str]:
    """What it prints in ranks that are forked."""
    ends, texts = zip(*forked(script, *arguments), strict=True)
    assert ends == (0, 0), ends
    return "".join(texts).splitlines()


def numbers(line: str) -> list[float]:
    return [float(text) for text in re.findall(r"[-+]?\d+\.\d+", line)]


def test_a_resumed_job_takes_the_steps_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    checkpoint = ["--checkpoint", str(tmp_path / "run.pt")]
    whole = output_of("imagenet.py", "--epochs", "3")
    assert [line.split()[1] for line in whole] == ["1/3", "2/3", "3/3"]
    losses = [numbers(line)[0] for line in whole]
    assert losses[2] < losses[1] < losses[0]
    first = forked_output_of("imagenet.py", *checkpoint, "--epochs", "2")
    second = forked_output_of("imagenet.py", *checkpoint, "--epochs", "3")
    assert [line.split()[1] for line in first + second] == ["1/2", "2/2", "3/3"]
    assert [numbers(line)[0] for line in first + second] == losses
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]


def test_accumulated_gradients_fit_the_line() -> None:
    (line,) = forked_output_of("accumulation.py", "--batches-per-step", "3")
    assert line.startswith("96 samples per step: y = ")
    slope, offset = numbers(line)
    assert slope == pytest.approx(3, abs=0.1)
    assert offset == pytest.approx(-1, abs=0.1)


def test_too_few_images_for_a_batch_of_each_rank_are_named() -> None:
    ends = [end for end, _ in forked("imagenet.py", "--images", "63")]
    assert ends == ["imagenet.py: --images 63 is less than one batch of 32 per rank"] * 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_learns(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    if dtype == "float16" and not hasattr(torch.amp, "GradScaler"):
        said = output_of("mixed_precision.py", "--dtype", dtype, expected_code=1)
        assert any("has no GradScaler for the CPU" in line for line in said)
        return
    (line,) = forked_output_of("mixed_precision.py", "--dtype", dtype)
    assert line.startswith(f"{dtype}: ")
    begin, end = numbers(line)
    assert end < begin / 2


def test_the_gan_learns_the_bell_curve() -> None:
    (line,) = forked_output_of("gan.py")
    assert line.startswith("2000 samples: ")
    mean, deviation = numbers(line)
    assert mean == pytest.approx(4, abs=0.5)
    assert 0.1 < deviation < 1
