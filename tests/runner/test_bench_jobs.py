"""``horo bench``: its rates, options and lines; and as a job, which compares all results and ends as other jobs do."""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from jobs import TORCH_S, Hororun, wait_until
from rank_pool import RankPool

import horo.torch as hvd
from horo import command
from horo.bench.__main__ import main
from horo.bench.operations import OPERATIONS, Part, busbw_of, count_wrong, fill_pattern, pattern_factor
from horo.bench.options import BenchOptionError, command_of, read_options, split_words
from horo.bench.table import TITLES, Row, beside_line, best_lines, line_of, sizes_of
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
    done = job.end_by(signal.SIGINT)
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


@pytest.mark.parametrize("make", [np.zeros, torch.zeros], ids=["numpy", "torch"])
@pytest.mark.parametrize("count", [1, 1000])
def test_every_element_of_a_sum_is_compared(make: Any, count: int) -> None:
    values = make(count)
    fill_pattern(values, 7)
    assert values.tolist() == [7 * (place % 3 + 1) for place in range(count)]
    assert count_wrong(values, 7) == 0
    values[count - 1] += 1
    assert count_wrong(values, 7) == 1
    assert count_wrong(values, 100) == count


def moved_by(operation: str, jobs: list[Part], given: list[Any]) -> list[Any]:
    """What each rank gets, from what all give, by the definition of the operation."""
    if operation == "broadcast":
        return [given[0].copy() for _ in jobs]
    if operation == "allgather":
        return [np.concatenate(given) for _ in jobs]
    if operation == "allreduce":
        return [np.sum(given, axis=0) for _ in jobs]
    if operation == "reducescatter":
        return np.split(np.sum(given, axis=0), len(jobs))
    return [np.concatenate([np.split(array, len(jobs))[job.rank] for array in given]) for job in jobs]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("ranks", "part"), [(2, 1), (2, 500), (3, 4), (4, 10)])
def test_every_element_of_a_result_is_compared(operation: str, ranks: int, part: int) -> None:
    jobs = [Part(operation, rank, ranks, part * ranks) for rank in range(ranks)]
    given = [np.zeros(job.given) for job in jobs]
    for job, array in zip(jobs, given, strict=True):
        job.fill(array)
    for job, result in zip(jobs, moved_by(operation, jobs, given), strict=True):
        assert result.size == job.received
        assert job.count_wrong(result) == 0
        result[-1] += 1
        assert job.count_wrong(result) == 1
        assert job.count_wrong(np.zeros(job.received)) == job.received


def test_sums_are_exact_in_16_bits_with_any_number_of_ranks() -> None:
    total = sum(map(pattern_factor, range(4096)))
    values = torch.zeros(3, dtype=torch.bfloat16)
    fill_pattern(values, total)
    assert values.tolist() == [total, 2 * total, 3 * total]


@pytest.mark.parametrize(
    ("name", "ranks", "busbw"),
    [
        ("allreduce", 2, 1.0),
        ("allreduce", 4, 1.5),
        ("allreduce", 1, 0.0),
        ("allgather", 4, 0.75),
        ("reducescatter", 4, 0.75),
        ("alltoall", 4, 0.75),
        ("broadcast", 4, 1.0),
        ("broadcast", 1, 0.0),
    ],
)
def test_rates_are_those_of_nccl_tests(name: str, ranks: int, busbw: float) -> None:
    assert busbw_of(name, ranks, 1_000_000, 1000.0) == (1.0, busbw)  # 1 MB in 1 ms


def row(operation: str, size_bytes: int, *times_us: float, wrong: int = 0, ranks: int = 4) -> Row:
    return Row(operation, "float32", size_bytes, size_bytes // 4, ranks, times_us, wrong)


def test_a_line_stands_below_its_titles_and_the_end_has_rates_faults_and_a_comparison() -> None:
    line = line_of(row("allreduce", 4_000_000, 2000.0, 1000.0, 4000.0))
    assert line.split() == ["allreduce", "4000000", "1000000", "float32", "1000.0", "2000.0", "2.00", "3.00", "0"]
    first = TITLES.splitlines()[0]
    assert line[: first.index("median") + len("median")].endswith("2000.0")
    assert sizes_of(4, 100, 4) == [4, 16, 64]
    rows = [row("allreduce", 1 << 20, 1000.0), row("allreduce", 4 << 20, 2000.0), row("broadcast", 1 << 20, 1048.576)]
    assert best_lines(rows) == [
        "best busbw in GB/s: allreduce 3.15 at 4.0 MiB, broadcast 1.00 at 1.0 MiB",
        "all results are right",
    ]
    assert best_lines([row("allreduce", 4, 1.0, wrong=3), row("alltoall", 4, 1.0, wrong=2000)])[1] == (
        "WRONG: 2,003 elements"
    )
    assert best_lines([row("allreduce", 4, 1.0, ranks=1)])[0] == "one rank alone exchanges nothing: busbw is 0"
    rows = [row("allreduce", 1 << 20, 1000.0), row("allreduce", 16 << 20, 9000.0), row("broadcast", 8 << 20, 1.0)]
    job = {"file": "r.json", "bytes": float(64 << 20), "batches": 2.0, "moving": 0.05}
    assert beside_line(rows, job) == (
        "r.json: blocked for 50.0 ms a step while 64.0 MiB moved in 2 batches; here they take 36.0 ms, by the rate at "
        "16.0 MiB"
    )
    small = {**job, "bytes": 4096.0, "batches": 1.0, "moving": 1e-9}
    assert beside_line(rows, small).endswith("in 1 batch; here they take 1.0 ms, by the rate at 1.0 MiB")
    assert beside_line(rows[2:], job).endswith("; without allreduce among --operations there is nothing to compare")


REPORT = {"training": {"step": {"moving": 0.25}, "traffic": {"bytes": 100.5, "batches": 2.0, "via": "TCP"}}}


def test_a_report_is_read_where_hororun_runs(tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    report.write_text(json.dumps(REPORT))
    words = command_of(["--max", "1M", "--beside", str(report)])
    assert words[:4] == ["-m", "horo.bench", "--max", "1M"]
    assert command_of([f"--beside={report}", "--max", "1M"]) == words
    report.unlink()
    given = read_options(words[2:])
    assert given.max == 1 << 20
    assert given.beside == {"file": str(report), "bytes": 100.5, "batches": 2.0, "moving": 0.25}
    assert command_of([]) == ["-m", "horo.bench"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--min 5x", "argument --min: '5x' is no size: give bytes, like 4, 64K or 16M"),
        ("--min 0", "'0' is no size"),
        ("--max 4 --min 8", "bench: --max 4 is below --min 8"),
        ("--factor 1", "'1' is no whole number of at least 2"),
        ("--iterations -1", "'-1' is no whole number of at least 1"),
        (
            "--operations allreduce,reduce",
            "'reduce' is none of allreduce, allgather, reducescatter, alltoall, broadcast",
        ),
        ("--dtype int3", "invalid choice: 'int3'"),
        ("train.py", "bench: 'train.py' is no option"),
        ("allreduce,broadcast", "is no option; give --operations allreduce,broadcast"),
        ("--beside {}/none", "/none: cannot be read: No such file or directory"),
        ("--beside {}", "cannot be read: Is a directory"),
        ("--beside {}/text", "/text: is no report of hororun --json-report"),
        ("--beside {}/empty", "/empty: is no report of hororun --json-report"),
        ("--beside {}/list", "/list: is no report of hororun --json-report"),
        ("--beside {}/still", "/still: its job has exchanged nothing in steps"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, words: str, sentence: str) -> None:
    (tmp_path / "text").write_text("no JSON")
    (tmp_path / "empty").write_text("")
    (tmp_path / "list").write_text("[]")
    (tmp_path / "still").write_text(json.dumps({"training": {"step": None, "traffic": None}}))
    with pytest.raises(BenchOptionError) as caught:
        command_of(words.format(tmp_path).split())
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("words", "others", "own"),
    [
        ("-np 4", "-np 4", ""),
        ("-np 4 --max 4 -H a:2,b:2", "-np 4 -H a:2,b:2", "--max 4"),
        ("--iterations 4 -np 4 --min=4", "-np 4", "--iterations 4 --min=4"),
        ("-np 2 --verbose -- --max 1K", "-np 2 --verbose", "--max 1K"),
    ],
)
def test_words_go_to_hororun_or_to_the_measurement(words: str, others: str, own: str) -> None:
    assert split_words(words.split()) == (others.split(), own.split())


def test_a_wrong_word_of_the_command_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["bench", "-np", "2", "--max", "x"]) == 2
    assert capsys.readouterr().err.startswith("horo bench: argument --max: 'x' is no size")
    with pytest.raises(SystemExit):
        command.main(["bench", "--help"])
    assert "busbw" in capsys.readouterr().out
