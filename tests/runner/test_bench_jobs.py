"""``hororun --bench`` as a job: all operations are measured, results are compared, and it ends as other jobs do."""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch
from jobs import TORCH_S, Hororun, wait_until
from rank_pool import RankPool

import horo.torch as hvd
from horo.bench.__main__ import main
from horo.bench.operations import OPERATIONS
from horo.bench.options import command_of
from horo.runner.cli import parse
from horo.runner.config import JobError

LINE = re.compile(r"(\w+) +(\d+) +(\d+) +(\w+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +(\d+)")


def rows_in(stdout: str) -> list[tuple[str, ...]]:
    return [found.groups() for line in stdout.splitlines() if (found := LINE.fullmatch(line))]


def measure(words: list[str]) -> tuple[int, str]:
    """The exit code and the lines of a rank."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(words)
    return code, printed.getvalue()


def test_all_operations_are_measured_and_a_job_stands_beside(tmp_path: Path) -> None:
    training = {"step": {"moving": 0.25}, "traffic": {"bytes": 4096.0, "batches": 2.0}}
    report = tmp_path / "r.json"
    report.write_text(json.dumps({"training": training}))
    words = ["--max", "2K", "--factor", "64", "--iterations", "3", "--dtype", "bfloat16", "--beside", str(report)]
    with RankPool(3, init=False) as pool:
        (code, told), *others = pool.run(measure, command_of(words)[2:])
    assert (code, others) == (0, [(0, "")] * 2)
    rows = rows_in(told)
    assert [name for name, *_ in rows] == [name for name in OPERATIONS for _ in range(2)]
    assert {(dtype, wrong) for _, _, _, dtype, *_, wrong in rows} == {("bfloat16", "0")}
    sizes = {name: [int(size) for each, size, *_ in rows if each == name] for name in OPERATIONS}
    assert sizes["allreduce"] == sizes["broadcast"] == [4, 256]
    assert sizes["alltoall"] == [6, 252]  # equal parts of three ranks
    first, *_, best, right, beside = told.splitlines()
    assert re.fullmatch(r"horo \S+: 3 ranks on 1 host, shared memory, tensors of bfloat16 on cpu", first)
    assert best.startswith("best busbw in GB/s: allreduce ") and right == "all results are right"
    assert beside.startswith(f"{report}: blocked for 250.0 ms a step while 4.0 KiB moved in 2 batches; here they take ")


def measure_wrongly() -> tuple[int, str]:
    """In a job in which one result of rank 1 is wrong."""
    real = hvd.allgather

    def broken(tensor: torch.Tensor, name: str) -> torch.Tensor:
        result = real(tensor, name=name)
        if name.startswith("bench.allgather") and hvd.rank() == 1:
            result[-1] += 1
        return result

    with mock.patch.object(hvd, "allgather", broken):
        return measure(["--max", "64", "--iterations", "1", "--operations", "broadcast,allgather"])


def test_a_wrong_result_is_counted_and_fails() -> None:
    with RankPool(2, init=False) as pool:
        (first, told), (second, _) = pool.run(measure_wrongly)
    assert (first, second) == (1, 1)
    assert {(name, wrong) for name, *_, wrong in rows_in(told)} == {("broadcast", "0"), ("allgather", "1")}
    assert "WRONG: 3 elements" in told


def test_what_cannot_be_measured_is_one_sentence(hororun: Hororun) -> None:
    done = hororun.start("-np", "1", "--bench", "--", "--max", "900000G").finish(3 * TORCH_S)
    assert (done.returncode, done.stdout) == (2, "")
    assert "horo bench: --max 900,000.0 GiB: 1 rank on a host need 2,700,000.0 GiB, of which " in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_ends_it_without_a_traceback(hororun: Hororun, tmp_path: Path) -> None:
    words = ("--output-filename", str(tmp_path), "--bench", "--", "--iterations", "100000", "--operations", "allreduce")
    job = hororun.start("-np", "2", *words)
    out = tmp_path / "rank.0" / "stdout"
    wait_until(lambda: out.exists() and rows_in(out.read_text()), "a size is measured", deadline_s=3 * TORCH_S)
    job.process.send_signal(signal.SIGINT)
    done = job.finish()
    assert done.returncode == 130
    assert done.stderr == "hororun: SIGINT: ranks 0-1 were ended\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--bench --check-hosts", "--check-hosts starts no rank: leave out --bench"),
        ("-np 2 --min-np 1 --bench", "--bench is not for an elastic job"),
        ("-np 2 --bench train.py", "--bench: 'train.py' is no option"),
        ("--bench", "how many ranks?"),
    ],
)
def test_what_does_not_fit_is_refused(words: str, sentence: str) -> None:
    with pytest.raises(JobError, match=sentence.replace("?", "\\?")):
        parse(words.split(), environment={})
