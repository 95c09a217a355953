"""Which CPUs and GPUs ranks of a host are bound to; their variables, and the addresses of the hosts."""

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import Hororun

from horo.runner import network as net
from horo.runner.agent.machine import BindingError, Topology, bind, bind_gpus, read_topology, threads, visible_gpus
from horo.runner.config import JobError
from horo.runner.hosts import HostSpec
from horo.runner.job.forwarded_variables import default_variables, forwarded, inherited, parse_exports, rank_variables
from horo.runner.job.host_addresses import HostAddresses, find_addresses, store_addresses
from horo.runner.job.placement import place, slots_of


def test_a_rank_is_told_its_place_in_both_dialects() -> None:
    slot = place([2, 2], 4)[3]
    told = rank_variables(
        slot, host="h2", mark="m", store="10.0.0.1:5", master=("10.0.0.1", 6), exports=(), cores=8, threads_set=False
    )
    assert told == {
        "HORO_HOST_MARK": "m", "HORO_STORE": "10.0.0.1:5", "HORO_HOSTNAME": "h2", "HORO_RANK": "3", "HORO_SIZE": "4",
        "HORO_LOCAL_RANK": "1", "HORO_LOCAL_SIZE": "2", "HORO_CROSS_RANK": "1", "HORO_CROSS_SIZE": "2",
        "HOROVOD_HOSTNAME": "h2", "HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "2", "HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2", "RANK": "3",
        "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "6", "OMP_NUM_THREADS": "4",
    }  # fmt: skip


KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
MOVE_RANKS = {"HORO_LEAVE_CROWDED_CORES": "1"}
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("MALLOC_ARENA_MAX", MOVE_RANKS | UNBUFFERED),
        ("GLIBC_TUNABLES", MOVE_RANKS | UNBUFFERED),
        ("HORO_LEAVE_CROWDED_CORES", KEEP_MEMORY | UNBUFFERED),
        ("HOROVOD_LEAVE_CROWDED_CORES", KEEP_MEMORY | UNBUFFERED),
        ("PYTHONUNBUFFERED", KEEP_MEMORY | MOVE_RANKS),
        ("PATH", KEEP_MEMORY | MOVE_RANKS | UNBUFFERED),
    ],
)
def test_a_variable_of_the_user_stays(name: str, rest: dict[str, str]) -> None:
    assert default_variables({name: "0"}, keep_memory=True) == rest
    assert default_variables({name: "0"}, keep_memory=False) == {
        key: value for key, value in rest.items() if key not in KEEP_MEMORY
    }


def test_ranks_inherit_no_place_of_another_job_and_nothing_that_belongs_to_one_host() -> None:
    mine = {"HORO_RANK": "7", "HOROVOD_SIZE": "9", "PATH": "p", "RANK": "3", "MASTER_ADDR": "h"}
    assert inherited(mine) == {"PATH": "p", "RANK": "3", "MASTER_ADDR": "h"}
    assert inherited(mine | {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4"}) == {"PATH": "p"}
    environment = {
        "PATH": "p", "HOROVOD_CYCLE_TIME": "1", "NCCL_DEBUG": "INFO", "PYTHONPATH": "x",
        "CUDA_VISIBLE_DEVICES": "0", "HOME": "/h", "AWS_SECRET_ACCESS_KEY": "s", "DISPLAY": ":0", "XPATH": "no",
    }  # fmt: skip
    assert sorted(forwarded(environment)) == ["HOROVOD_CYCLE_TIME", "NCCL_DEBUG", "PATH", "PYTHONPATH"]


def test_exports_take_values_given_or_present_and_a_wrong_one_is_named() -> None:
    assert parse_exports(["A=1=2", "B=", "C"], {"C": "here"}) == {"A": "1=2", "B": "", "C": "here"}
    for item in ("=1", "", "MISSING"):
        with pytest.raises(ValueError, match=item or "''"):
            parse_exports([item], {})


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        ("0,1", "0 1"), ("", ""), ("-1", ""), ("0,-1,1", "0"), ("2, 1", "2 1"), ("NoDevFiles", ""),
        ("GPU-1a, GPU-2b", "GPU-1a GPU-2b"), ("MIG-8f/1/0,MIG-4c", "MIG-8f/1/0 MIG-4c"),
    ],
)  # fmt: skip
def test_visible_gpus_are_those_that_cuda_would_take(visible: str, found: str, tmp_path: Path) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": visible}, tmp_path) == found.split()


def test_gpus_are_found_by_the_driver_or_by_the_devices_of_a_container(tmp_path: Path) -> None:
    assert visible_gpus({}, tmp_path) == []
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / "dev" / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1"]
    for address in ("0000:01:00.0", "0000:02:00.0", "0000:81:00.0"):
        (tmp_path / "proc" / "driver" / "nvidia" / "gpus" / address).mkdir(parents=True)
    assert visible_gpus({}, tmp_path) == ["0", "1", "2"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2,7,1"}, tmp_path) == ["2"]  # as CUDA does


def test_slots_default_to_gpus_then_cores_and_names_of_this_machine_are_local() -> None:
    host = HostSpec("h")
    assert [slots_of(host, 1, *here) for here in ((8, 2), (8, 0), (0, 0))] == [2, 8, 1]
    assert slots_of(replace(host, slots=3), 0, 8, 0) == 3
    assert slots_of(host, 0, 8, 2) == 2
    with pytest.raises(JobError, match=r"how many ranks\? say -np N; h has no GPU"):
        slots_of(host, 0, 8, 0)  # the number of its cores says nothing
    for name in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
        assert net.is_local(HostSpec(name))
    assert not net.is_local(HostSpec("192.0.2.1"))
    assert not net.is_local(HostSpec("no-such-host.invalid"))
    assert not net.is_local(HostSpec("localhost", port=2222))
    assert not net.is_local(HostSpec("localhost", user="somebody-else"))


def test_addresses_and_ports_that_are_not_there_are_named_and_ports_are_of_the_range() -> None:
    assert net.address_toward("127.0.0.1") == "127.0.0.1"
    with pytest.raises(net.NetworkError, match=r"none\.there"):
        net.interface_addresses(["none.there"])
    assert "127.0.0.1" in net.interface_addresses(["lo", "none.there"])
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(net.NetworkError, match=str(port)):
            net.free_port(port)
        for take in (lambda ports: net.free_port(0, ports), net.listen):
            with pytest.raises(net.NetworkError) as caught:
                take(range(port, port + 1))
            assert str(caught.value) == (
                f"none of the ports {port} to {port} (HORO_PORT_RANGE) is free here; name a range with one port for "
                "each rank of a host and two more"
            )
    only = range(21200, 21240)  # below those from which systems choose
    assert net.free_port(0, only) in only
    with net.listen(only) as listener:
        assert listener.getsockname()[1] in only


def host_info(network: str = "another", connection: str = "") -> dict[str, object]:
    return {"network": network, "connection": connection}


FOUND = [
    (host_info(connection="127.0.0.1 5 127.0.0.9 22"), HostAddresses(("127.0.0.1",), "127.0.0.9")),
    (host_info(connection="192.0.2.7 5 127.0.0.1 22"), HostAddresses(("127.0.0.1",), "127.0.0.1")),
    (host_info(net.network_identity()), HostAddresses(("127.0.0.1",), "127.0.0.1")),
]


@pytest.mark.parametrize(("info", "addresses"), FOUND, ids=["as ssh", "behind a jump host", "in one namespace"])
def test_addresses_that_lead_to_a_host(info: dict[str, object], addresses: HostAddresses) -> None:
    assert find_addresses("h", info, []) == addresses


def test_addresses_are_of_the_interfaces_that_the_user_names_and_not_loopback_on_several_hosts() -> None:
    info = host_info(connection="192.0.2.7 5 192.0.2.8 22")
    assert "127.0.0.1" in find_addresses("h", info, ["lo"]).launcher
    with pytest.raises(JobError, match="none0"):
        find_addresses("h", info, ["none0"])
    with pytest.raises(JobError, match=r"h\.invalid"):
        find_addresses("h.invalid", host_info(), [])
    addresses, by_host = store_addresses(
        [None, HostAddresses(("10.0.0.1",), "10.0.0.2"), HostAddresses(("10.1.0.1",), "10.1.0.2")]
    )
    assert addresses == ["10.0.0.1", "10.1.0.1"]
    assert by_host == [["10.0.0.1", "10.1.0.1"], ["10.0.0.1"], ["10.1.0.1"]]
    assert store_addresses([None]) == (["127.0.0.1"], [["127.0.0.1"]])


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


def test_cores_and_nodes_are_shared_out_whole_and_side_by_side() -> None:
    assert bind("core", [4, 5], ALL, MACHINE) == {4: NODES[0], 5: NODES[1]}
    assert bind("core", range(8), ALL, MACHINE) == dict(enumerate(CORES))
    assert [len(cpus) for cpus in bind("core", range(3), ALL, MACHINE).values()] == [4, 6, 6]
    assert bind("numa", range(4), ALL, MACHINE) == {0: NODES[0], 1: NODES[0], 2: NODES[1], 3: NODES[1]}
    assert bind("numa", [0], ALL, MACHINE) == {0: NODES[0] | NODES[1]}
    # Of those that this process may use.
    assert bind("core", [0, 1], {1, 2, 9}, MACHINE) == {0: {1, 9}, 1: {2}}
    assert bind("numa", [0, 1], {1, 2, 5}, MACHINE) == {0: {1, 2}, 1: {5}}
    assert bind("numa", [0, 1], {1, 2}, MACHINE) == {0: {1, 2}, 1: {1, 2}}
    # Of a machine that does not tell its nodes.
    assert bind("core", [0, 1], [0, 1, 2], Topology((), ())) == {0: {0}, 1: {1, 2}}
    with pytest.raises(BindingError, match="no NUMA node"):
        bind("numa", [0], ALL, Topology((), ()))


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


def test_each_rank_sees_its_share_of_the_gpus_of_its_host_and_none_is_an_error(hororun: Hororun, where: str) -> None:
    words = ["-np", "4", "--bind-gpus", "--verbose", *SHOW_GPUS]
    done = hororun.run(*words, where=where, environment={"CUDA_VISIBLE_DEVICES": "5,GPU-a"})
    assert done.returncode == 0, done.stderr
    shares = ["5", "5", "GPU-a", "GPU-a"] if "localhost" in where else ["5", "GPU-a"] * 2
    assert sorted(done.stdout.splitlines()) == [f"{rank} {share}" for rank, share in enumerate(shares)]
    assert done.stderr.count(", bound to GPU 5\n") == 2
    assert done.stderr.count(", bound to GPU-a\n") == 2
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
