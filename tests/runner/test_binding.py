"""Which CPUs each rank of a host is bound to."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import Hororun

from horo.runner.agent.machine import BindingError, Topology, bind, bind_gpus, read_topology, threads

# Two sockets of four cores with two threads each, numbered as Linux does: siblings are 8 apart.
CORES = tuple(frozenset({cpu, cpu + 8}) for cpu in range(8))
NODES = (frozenset({0, 1, 2, 3, 8, 9, 10, 11}), frozenset({4, 5, 6, 7, 12, 13, 14, 15}))
MACHINE = Topology(NODES, CORES)
ALL = range(16)
SHOW = [
    "-c",
    "import os; print(os.environ['HOROVOD_RANK'], sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])",
]
HERE = sorted(os.sched_getaffinity(0))


def test_cores_are_shared_out_whole_and_side_by_side() -> None:
    assert bind("core", [4, 5], ALL, MACHINE) == {4: NODES[0], 5: NODES[1]}
    assert bind("core", range(8), ALL, MACHINE) == dict(enumerate(CORES))
    assert [len(cpus) for cpus in bind("core", range(3), ALL, MACHINE).values()] == [4, 6, 6]


def test_only_cpus_that_this_process_may_use_are_given() -> None:
    assert bind("core", [0, 1], {1, 2, 9}, MACHINE) == {0: {1, 9}, 1: {2}}
    assert bind("numa", [0, 1], {1, 2, 5}, MACHINE) == {0: {1, 2}, 1: {5}}
    assert bind("numa", [0, 1], {1, 2}, MACHINE) == {0: {1, 2}, 1: {1, 2}}


def test_numa_nodes_go_to_ranks_in_order() -> None:
    assert bind("numa", range(4), ALL, MACHINE) == {0: NODES[0], 1: NODES[0], 2: NODES[1], 3: NODES[1]}
    assert bind("numa", [0], ALL, MACHINE) == {0: NODES[0] | NODES[1]}


def test_a_machine_that_does_not_tell_its_nodes_cannot_be_bound_to_them() -> None:
    with pytest.raises(BindingError, match="no NUMA node"):
        bind("numa", [0], ALL, Topology((), ()))
    assert bind("core", [0, 1], [0, 1, 2], Topology((), ())) == {0: {0}, 1: {1, 2}}


@given(st.sets(st.sampled_from(ALL), min_size=1), st.integers(1, 40), st.sampled_from(["core", "numa"]))
def test_every_rank_gets_something_and_nothing_is_left_over(allowed: set[int], count: int, how: str) -> None:
    bound = bind(how, range(count), allowed, MACHINE)
    assert list(bound) == list(range(count))
    assert all(cpus and cpus <= allowed for cpus in bound.values())
    assert frozenset().union(*bound.values()) == allowed
    shares = threads(bound)
    assert all(1 <= share <= len(bound[rank]) for rank, share in shares.items())


def test_the_machine_is_read_from_sys(tmp_path: Path) -> None:
    for node, text in enumerate(["0-1,4-5\n", "2-3,6-7\n", "\n"]):
        folder = tmp_path / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text)
    for cpu in range(8):
        folder = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    found = read_topology(tmp_path)
    assert found.nodes == (frozenset({0, 1, 4, 5}), frozenset({2, 3, 6, 7}))
    assert sorted(map(sorted, found.cores)) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert read_topology(tmp_path / "nowhere") == Topology((), ())


@pytest.mark.parametrize("how", ["core", "numa", "none"])
def test_ranks_run_where_they_are_bound(hororun: Hororun, where: str, how: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    prefix = ["env", "-u", "OMP_NUM_THREADS"]
    words = ["-np", "2", "--no-prefix", "--bind-to", how, "--verbose", "--", sys.executable, *SHOW]
    done = hororun.run(*words, where=where, prefix=prefix, environment=environment)
    assert done.returncode == 0, done.stderr
    bound = bind(how, [0, 1], HERE, read_topology()) or {0: HERE, 1: HERE}
    shares = threads(bound) if how != "none" else dict.fromkeys([0, 1], max(1, len(HERE) // 2))
    assert sorted(done.stdout.splitlines()) == [f"{rank} {sorted(bound[rank])} {shares[rank]}" for rank in (0, 1)]
    assert ("bound to CPU" in done.stderr) is (how != "none")


SHOW_GPUS = ["--no-prefix", "--", "sh", "-c", "echo $HOROVOD_RANK $CUDA_VISIBLE_DEVICES"]


def test_gpus_are_shared_out_side_by_side_and_by_several_ranks() -> None:
    names = ["3", "GPU-a", "MIG-b"]
    assert bind_gpus([4, 5, 6], names) == {4: "3", 5: "GPU-a", 6: "MIG-b"}
    assert bind_gpus([0], names) == {0: "3,GPU-a,MIG-b"}
    assert bind_gpus([0, 1], names) == {0: "3", 1: "GPU-a,MIG-b"}
    assert bind_gpus(range(4), names[:2]) == {0: "3", 1: "3", 2: "GPU-a", 3: "GPU-a"}
    with pytest.raises(BindingError, match="--bind-gpus: there is no NVIDIA GPU here"):
        bind_gpus([0], [])


@given(st.integers(1, 20), st.integers(1, 40))
def test_every_gpu_has_a_rank_and_every_rank_a_gpu(here: int, count: int) -> None:
    shares = [words.split(",") for words in bind_gpus(range(count), list(map(str, range(here)))).values()]
    assert {int(word) for share in shares for word in share} == set(range(here))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_each_rank_sees_its_share_of_the_gpus_of_its_host(hororun: Hororun, where: str) -> None:
    words = ["-np", "4", "--bind-gpus", "--verbose", *SHOW_GPUS]
    done = hororun.run(*words, where=where, environment={"CUDA_VISIBLE_DEVICES": "5,GPU-a"})
    assert done.returncode == 0, done.stderr
    shares = ["5", "5", "GPU-a", "GPU-a"] if "localhost" in where else ["5", "GPU-a"] * 2
    assert sorted(done.stdout.splitlines()) == [f"{rank} {share}" for rank, share in enumerate(shares)]
    assert done.stderr.count(", bound to GPU 5\n") == 2
    assert done.stderr.count(", bound to GPU-a\n") == 2


def test_a_host_without_gpus_is_an_error_that_names_it(hororun: Hororun, where: str) -> None:
    done = hororun.run("-np", "1", "--bind-gpus", "true", where=where, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert (done.returncode, done.stderr.count("\n")) == (78, 1)
    assert f"host {where[:3]}" in done.stderr
    assert "--bind-gpus: there is no NVIDIA GPU here" in done.stderr


def test_threads_that_the_user_has_set_stay(hororun: Hororun, where: str) -> None:
    words = ["-np", "1", "--no-prefix", "--bind-to", "core", "--", sys.executable, *SHOW]
    done = hororun.run(*words, where=where, environment={"OMP_NUM_THREADS": "7"})
    assert done.stdout == f"0 {HERE} 7\n", done.stderr


def test_dry_run_shows_where_ranks_would_be_bound(hororun: Hororun) -> None:
    done = hororun.run("-np", "2", "--bind-to", "core", "--dry-run", "true", where="localhost:1,one:1")
    assert f"rank 0 is bound to CPU{'s' if len(HERE) > 1 else ''} " in done.stdout
    assert "each rank elsewhere is bound to its share of the cores there" in done.stdout


def test_gpus_are_those_of_the_variable_that_ranks_get(hororun: Hororun, where: str) -> None:
    words = ["-np", "2", "--bind-gpus", "--bind-to", "core", "-x", "CUDA_VISIBLE_DEVICES=7,8", "--verbose", *SHOW_GPUS]
    done = hororun.run(*words, where=where.replace("2", "1"), environment={"CUDA_VISIBLE_DEVICES": "1"})
    shares = ["7", "8"] if "localhost" in where else ["7,8", "7,8"]
    assert sorted(done.stdout.splitlines()) == [f"{rank} {share}" for rank, share in enumerate(shares)], done.stderr
    assert " and GPU" in done.stderr
