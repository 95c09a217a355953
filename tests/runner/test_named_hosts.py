"""Jobs on hosts of which the user has not said how many ranks each may have."""

from __future__ import annotations

import os

import pytest
from jobs import Hororun

CORES = len(os.sched_getaffinity(0))
WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": ""}
SHOW = ["--no-prefix", "--", "sh", "-c", "echo $HOROVOD_RANK $HOROVOD_HOSTNAME"]


def test_hosts_that_get_no_rank_are_named_where_slots_were_left_open(hororun: Hororun) -> None:
    done = hororun.run("-np", "1", "true", where="one,two,three:1")
    assert done.returncode == 0
    assert done.stderr.startswith("hororun: no rank runs on two, three: the hosts named before have slots for all")
    assert hororun.run("-np", "1", "true", where="one:1,two:1").stderr == ""
    done = hororun.run("-np", "2", "true", where="one,two,three")
    assert (done.returncode, done.stderr) == (0, "hororun: no rank runs on three: there are more hosts than ranks\n")


@pytest.mark.parametrize("where", ["one,two,three", "one,localhost,two"])
def test_every_host_gets_its_part_where_no_slots_are_said(hororun: Hororun, where: str) -> None:
    done = hororun.run("-np", "3", *SHOW, where=where, environment=WITHOUT_GPUS)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [f"{rank} {name}" for rank, name in enumerate(where.split(","))]


@pytest.mark.parametrize(
    ("where", "ranks"),
    [
        (None, ["localhost"] * 3),
        ("one,two", ["one"] * 3 + ["two"] * 3),
        ("one:1,localhost,two", ["one"] + ["localhost"] * 3 + ["two"] * 3),
    ],
    ids=str,
)
def test_without_a_number_there_is_a_rank_for_each_slot_or_gpu(
    hororun: Hororun, where: str | None, ranks: list[str]
) -> None:
    if where is None:
        hororun.remote_shell = ""  # which is for remote hosts
    done = hororun.run(*SHOW, where=where, environment={"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"})
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [f"{rank} {host}" for rank, host in enumerate(ranks)]


@pytest.mark.parametrize("where", [None, "one"], ids=str)
def test_a_number_of_cores_is_no_number_of_ranks(hororun: Hororun, where: str | None) -> None:
    if where is None:
        hororun.remote_shell = ""
    done = hororun.run("true", where=where, environment=WITHOUT_GPUS)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("hororun: how many ranks? say -np N")


def test_what_needs_the_number_beforehand_asks_for_it(hororun: Hororun) -> None:
    words = ["--timeline-merge", "all.json", "--timeline-filename", "t-{rank}.json", "true"]
    done = hororun.run(*words, where="one", environment={"CUDA_VISIBLE_DEVICES": "0"})
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--timeline-merge needs the number of ranks before the job starts: say -np N" in done.stderr


def test_slots_that_only_the_host_knows_are_asked_of_it(hororun: Hororun) -> None:
    words = ["-np", str(CORES + 1), "--no-prefix", "--", "sh", "-c", "echo $HOROVOD_HOSTNAME"]
    done = hororun.run(*words, where="one,two:1,three:1", environment=WITHOUT_GPUS)
    assert sorted(done.stdout.split()) == ["one"] * CORES + ["two"]
    for where, there in (("one", CORES), ("one,two", 2 * CORES)):
        done = hororun.run("-np", str(there + 1), "true", where=where, environment=WITHOUT_GPUS)
        assert done.returncode == 2
        assert f"{there + 1} ranks but there are {there} slots" in done.stderr


def test_prefixes_are_as_wide_as_ranks_that_came_later_need(hororun: Hororun) -> None:
    gpus = ",".join(f"GPU-{number}" for number in range(11))
    done = hororun.run("sh", "-c", "echo here", where="one", environment={"CUDA_VISIBLE_DEVICES": gpus})
    assert sorted(done.stdout.splitlines()) == [f"[{rank:2}] here" for rank in range(11)], done.stderr
