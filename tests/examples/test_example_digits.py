"""The digits example reaches the same accuracy on any number of ranks and under any launcher."""

from __future__ import annotations

import functools
import re
import sys

import pytest
from example_runs import ROOT, forked, launcher, start, whole
from jobs import as_users_start

SCRIPT = str(ROOT / "examples" / "digits.py")


@functools.cache
def lines_of(launcher_name: str, ranks: int) -> tuple[str, ...]:
    """Progress and result of three epochs; the first line, which names the ranks, is left out."""
    command = [*launcher(launcher_name, ranks), SCRIPT, "--epochs", "3"]
    done = start(command, environment=as_users_start())
    return tuple(line for line in done.stdout.splitlines() if line.startswith(("epoch", "test accuracy")))


def test_one_process_learns_the_digits() -> None:
    *progress, result = lines_of("python", 1)
    assert [line.split()[1] for line in progress] == ["1/3", "2/3", "3/3"]
    match = re.fullmatch(r"test accuracy: (0\.\d{4}) \((\d+) of 360 images\)", result)
    assert match
    # A tenth is chance; three passes are enough for nine tenths.
    assert float(match.group(1)) > 0.9
    assert float(match.group(1)) == pytest.approx(int(match.group(2)) / 360, abs=1e-4)


@pytest.mark.parametrize(("launcher_name", "ranks"), [("hororun", 2), pytest.param("torchrun", 2, marks=whole)])
def test_ranks_print_the_lines_of_one_process(launcher_name: str, ranks: int) -> None:
    assert lines_of(launcher_name, ranks) == lines_of("python", 1)


def test_batch_larger_than_the_data_is_refused() -> None:
    ((end, _),) = forked("digits.py", "--batch-size", "5000", ranks=1)
    assert end == "digits.py: --batch-size 5000 is more than the 1437 training images"


def test_batch_that_ranks_cannot_share_is_refused() -> None:
    ends = [end for end, _ in forked("digits.py", "--batch-size", "97")]
    assert ends == ["digits.py: --batch-size 97 is not a multiple of the 2 ranks"] * 2


def test_missing_scikit_learn_is_one_sentence() -> None:
    # Without numpy, too: a torch that cannot use the one that is installed writes pages about that.
    hidden = "sys.modules['sklearn'] = sys.modules['numpy'] = None"
    code = f"import runpy, sys; {hidden}; runpy.run_path({SCRIPT!r}, run_name='__main__')"
    done = start([sys.executable, "-W", "ignore", "-c", code], expected_code=1)
    assert done.stderr.startswith("digits.py: scikit-learn, which brings the images, is not installed")
    assert len(done.stderr.splitlines()) == 1
