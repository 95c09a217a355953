"""The examples train on any number of ranks, and print the lines that a page that shows them has."""

import functools
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from example_runs import ROOT, forked, launcher, start
from skips import whole


def forked_output_of(script: str, *arguments: str) -> list[str]:
    """What it prints in ranks that are forked."""
    ends, texts = zip(*forked(script, *arguments), strict=True)
    assert ends == (0, 0), ends
    return "".join(texts).splitlines()


def numbers(line: str) -> list[float]:
    return [float(text) for text in re.findall(r"[-+]?\d+\.\d+", line)]


def test_a_resumed_job_takes_the_steps_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    checkpoint = ["--checkpoint", str(tmp_path / "run.pt")]
    whole = forked_output_of("imagenet.py", "--epochs", "3")
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


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("imagenet --images 63", "--images 63 is less than one batch of 32 per rank"),
        ("digits --batch-size 5000", "--batch-size 5000 is more than the 1437 training images"),
        ("digits --batch-size 97", "--batch-size 97 is not a multiple of the 2 ranks"),
    ],
)
def test_samples_that_ranks_cannot_share_are_named(command: str, said: str) -> None:
    script, *words = command.split()
    ends = [end for end, _ in forked(f"{script}.py", *words)]
    assert ends == [f"{script}.py: {said}"] * 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_learns(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    if dtype == "float16" and not hasattr(torch.amp, "GradScaler"):
        for end, _ in forked("mixed_precision.py", "--dtype", dtype):
            assert "has no GradScaler for the CPU" in str(end)
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


DIGITS = str(ROOT / "examples" / "digits.py")


@functools.cache
def lines_of(launcher_name: str, ranks: int) -> tuple[str, ...]:
    """Progress and result of three epochs; the first line, which names the ranks, is left out."""
    words = [DIGITS, "--epochs", "3"]
    if launcher_name == "forked":
        ((_, printed),) = forked(*words, ranks=ranks)
    else:
        printed = start([*launcher(launcher_name, ranks), *words]).stdout
    return tuple(line for line in printed.splitlines() if line.startswith(("epoch", "test accuracy")))


def test_one_process_learns_the_digits() -> None:
    *progress, result = lines_of("forked", 1)
    assert [line.split()[1] for line in progress] == ["1/3", "2/3", "3/3"]
    match = re.fullmatch(r"test accuracy: (0\.\d{4}) \((\d+) of 360 images\)", result)
    assert match
    # A tenth is chance; three passes are enough for nine tenths.
    assert float(match.group(1)) > 0.9
    assert float(match.group(1)) == pytest.approx(int(match.group(2)) / 360, abs=1e-4)


@pytest.mark.parametrize(("launcher_name", "ranks"), [("hororun", 2), pytest.param("torchrun", 2, marks=whole)])
def test_ranks_print_the_lines_of_one_process(launcher_name: str, ranks: int) -> None:
    assert lines_of(launcher_name, ranks) == lines_of("forked", 1)


def test_missing_scikit_learn_is_one_sentence() -> None:
    # Without numpy, too: a torch that cannot use the one that is installed writes pages about that.
    hidden = "sys.modules['sklearn'] = sys.modules['numpy'] = None"
    code = f"import runpy, sys; {hidden}; runpy.run_path({DIGITS!r}, run_name='__main__')"
    done = start([sys.executable, "-W", "ignore", "-c", code], expected_code=1)
    assert done.stderr.startswith("digits.py: scikit-learn, which brings the images, is not installed")
    assert len(done.stderr.splitlines()) == 1


@functools.cache
def lightning_line(launcher_name: str, ranks: int, *words: str) -> str:
    """The result of two epochs with Lightning, which two ranks reach alike, whoever has started them."""
    if find_spec("lightning_utilities") is None:
        pytest.skip("lightning is not installed")
    command = [*launcher(launcher_name, ranks), str(ROOT / "examples" / "lightning_digits.py"), "--epochs", "2", *words]
    lines = start(command).stdout.splitlines()
    (found,) = [line for line in lines if line.startswith("test accuracy")]
    return found


def test_lightning_learns_the_digits() -> None:
    match = re.fullmatch(r"test accuracy: (0\.\d{4}) of 360 images", lightning_line("python", 1, "--devices", "2"))
    assert match
    assert float(match.group(1)) > 0.9


@whole
@pytest.mark.parametrize("launcher_name", ["hororun", "torchrun"])
def test_lightning_learns_them_alike_under_other_launchers(launcher_name: str) -> None:
    assert lightning_line(launcher_name, 2) == lightning_line("python", 1, "--devices", "2")


SYNTHETIC = str(ROOT / "examples" / "synthetic_benchmark.py")
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
        printed = start([*launcher(launcher_name, ranks), SYNTHETIC, *words]).stdout
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
