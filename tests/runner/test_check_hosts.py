"""Hosts that a job names: how many ranks each gets, and what ``--check-hosts`` says of them."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import closing
from pathlib import Path

import pytest
from jobs import Hororun, make_remote_shell

from horo import __version__
from horo.runner.network import listen, unreachable


def test_hosts_that_are_well_are_a_line_each(hororun: Hororun) -> None:
    done = hororun.run("--check-hosts", where="localhost,one,two:3")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["localhost", "one", "two"]
    assert all(f": ok: horo {__version__}, Python {sys.version.split()[0]}, " in line for line in lines)


def test_every_host_that_is_not_is_told_why(hororun: Hororun, tmp_path: Path) -> None:
    script = """case "$*" in
        *" two "*) echo 'ssh: connect to host two port 22: No route to host' >&2; exit 255;;
        *" three "*) exec sleep 60;;
    esac"""
    hororun.remote_shell = make_remote_shell(tmp_path, script)
    done = hororun.run("--check-hosts", "--start-timeout", "5", where="one,two,three")
    assert done.returncode == 69
    lines = done.stdout.splitlines()
    assert lines[0].startswith("one: ok: ")
    assert lines[1] == "two: cannot reach host two: ssh: connect to host two port 22: No route to host"
    assert lines[2].startswith("three: no answer within 5 s from three")


def test_a_version_and_a_directory_that_are_not_the_same_are_named(hororun: Hororun, tmp_path: Path) -> None:
    python = tmp_path / "python"
    run = "import runpy; runpy.run_module('horo.runner.agent', run_name='__main__', alter_sys=True)"
    python.write_text(f"#!{sys.executable}\nimport horo.version; horo.version.__version__ = '9.9'\n{run}\n")
    python.chmod(0o755)
    done = hororun.run("--check-hosts", "--remote-python", str(python), where="localhost,one")
    assert done.returncode == 78
    assert "one: host one has horo 9.9 but this host has" in done.stdout
    python.write_text(f"#!{sys.executable}\nimport pathlib; pathlib.Path.is_dir = lambda _: False\n{run}\n")
    done = hororun.run("--check-hosts", "--remote-python", str(python), where="localhost,one", cwd=tmp_path)
    assert done.returncode == 78
    assert f"one: there is no directory {tmp_path}, in which ranks would start\n" in done.stdout


def test_an_interface_that_is_not_there_is_named(hororun: Hororun) -> None:
    done = hororun.run("--check-hosts", "--network-interfaces", "nosuch0", where="localhost,one")
    assert done.returncode == 69
    assert done.stdout.count("--network-interfaces nosuch0: none of them has an address") == 2


def test_peers_that_do_not_answer_are_told_apart() -> None:
    with closing(listen()) as listener, socket.socket() as closed:
        port = listener.getsockname()[1]
        closed.bind(("127.0.0.1", 0))  # bound, but not listening: nobody else gets the port
        shut = closed.getsockname()[1]
        peers = {
            "a": [("127.0.0.1", port)],
            "b": [("127.0.0.1", shut)],
            "c": [("127.0.0.1", shut), ("127.0.0.1", port)],
        }
        assert unreachable(peers, 20) == {"b": f"127.0.0.1 port {shut}: Connection refused"}


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
