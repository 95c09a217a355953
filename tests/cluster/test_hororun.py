"""Two hosts: hororun over real ssh; mpirun, mpiexec and torchrun, which starts all ranks again when one fails."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from jobs import TORCH_S, Flags, kill_all, parent_of, wait_until
from mpis import Mpi
from namespaces import Cluster
from places import PLACE, PROGRAM, expected, written
from torchrun_rounds import PROGRAM as TRAINING
from torchrun_rounds import check

EXCHANGE = """
import os
from horo.bootstrap.net.addresses import parse_endpoints
from horo.bootstrap.store.client import StoreClient

first, *others = parse_endpoints(os.environ["HORO_STORE"])
client = StoreClient(first.address, first.port, bytes.fromhex(os.environ["HORO_SECRET"]), 20, others)
client.set("k" + os.environ["HOROVOD_RANK"], client.local_address.encode())
print(*[client.get(f"k{rank}", 20).decode() for rank in range(int(os.environ["HOROVOD_SIZE"]))])
"""
STUBBORN = """
trap '' TERM INT HUP; (trap '' TERM; exec setsid sleep 300) & echo $HORO_SECRET > {folder}/draft.$HOROVOD_RANK
mv {folder}/draft.$HOROVOD_RANK {folder}/up.$HOROVOD_RANK; while :; do sleep 0.2; done
"""


def start_stubborn(cluster: Cluster, flags: Flags, *words: str) -> tuple[int, Callable[[], CompletedProcess[str]]]:
    """Two ranks on each host that only SIGKILL ends; returns hororun's pid and what waits for the end of all."""
    script = STUBBORN.format(folder=flags.folder)
    job = cluster.start("-np", "4", "--grace-seconds", "0.2", *words, "--", "sh", "-c", script)
    flags.wait([f"up.{rank}" for rank in range(4)])
    return job.process.pid, job.finish


def test_ranks_run_where_they_should_and_know_it(cluster: Cluster) -> None:
    a, b = cluster.hosts
    script = "echo $HOROVOD_RANK $(hostname) $HOROVOD_HOSTNAME $HOROVOD_LOCAL_RANK $HOROVOD_CROSS_RANK $MASTER_ADDR"
    done = cluster.run("-np", "4", "--no-prefix", "--", "sh", "-c", script)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [
        f"0 {a.name} {a.name} 0 0 {a.address}",
        f"1 {a.name} {a.name} 1 0 {a.address}",
        f"2 {b.name} {b.name} 0 1 {a.address}",
        f"3 {b.name} {b.name} 1 1 {a.address}",
    ]


SPELLINGS = ["{name}:2", "[{address6}]:2", "root@{name}:2", "{name}:2:port=22", "{address}:2"]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_ranks_connect_at_addresses_that_others_reach_however_it_is_spelled(cluster: Cluster, spelling: str) -> None:
    a, b = cluster.hosts
    where = f"{a.name}:1,{spelling.format(name=b.name, address=b.address, address6=b.address6)}"
    done = cluster.run("-np", "3", "--no-prefix", sys.executable, "-c", EXCHANGE, where=where)
    family = (a.address6, b.address6) if "[" in spelling else (a.address, b.address)
    assert set(done.stdout.splitlines()) == {f"{family[0]} {family[1]} {family[1]}"}, done.stderr


def test_kill_9_of_hororun_leaves_nothing_on_either_host(cluster: Cluster, flags: Flags) -> None:
    """Each host had one connection, and no secret on a command line."""
    pid, finish = start_stubborn(cluster, flags)
    b = cluster.hosts[1]
    assert len(cluster.connections(b)) == 1
    secret = flags.read("up.0").strip()
    assert len(secret) == 64
    assert not cluster.processes(b, secret)
    os.kill(pid, signal.SIGKILL)
    finish()
    assert not cluster.connections(b)


@pytest.mark.parametrize("side", ["ssh", "sshd", "agent"])
def test_a_connection_that_is_cut_leaves_nothing_on_either_host(cluster: Cluster, flags: Flags, side: str) -> None:
    a, b = cluster.hosts
    _, finish = start_stubborn(cluster, flags)
    victims = {
        "ssh": [pid for pid in cluster.processes(a, "ServerAliveInterval") if b"ssh\0" in command(pid)[:5]],
        "sshd": cluster.connections(b),
        "agent": [pid for pid in cluster.processes(b, "horo.runner.agent") if b"sshd" in command(parent_of(pid))],
    }[side]
    assert victims
    kill_all(victims)
    done = finish()
    assert done.returncode == 69
    assert f"rank 2 on {b.name} was lost with its host" in done.stderr


def command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_host_whose_cable_is_cut_is_lost_on_both_sides(cluster: Cluster, flags: Flags) -> None:
    b = cluster.hosts[1]
    # No process is held up for so long before the cable is cut; when it is, only silence can tell.
    _, finish = start_stubborn(cluster, flags, "--host-timeout", "6")
    cluster.cut(b)
    wait_until(lambda: not cluster.processes(b, "horo.runner.agent"), f"the agent on {b.name} has left")
    done = finish()
    assert done.returncode == 69
    assert f"rank 2 on {b.name} was lost with its host" in done.stderr


def test_an_outage_below_half_of_the_host_timeout_is_survived(cluster: Cluster, flags: Flags) -> None:
    script = f": > {flags.folder}/up.$HOROVOD_RANK; until test -e {flags.folder}/go; do sleep 0.1; done; echo well"
    words = ["-np", "4", "--host-timeout", "10", "--no-prefix", "--", "sh", "-c", script]
    job = cluster.start(*words)
    flags.wait([f"up.{rank}" for rank in range(4)])
    for host in cluster.hosts:
        cluster.deafen(host)
    begin_s = time.monotonic()
    wait_until(lambda: time.monotonic() - begin_s > 3, "the outage has lasted")
    for host in cluster.hosts:
        cluster.unlimit(host)
    (flags.folder / "go").touch()
    done = job.finish()
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["well"] * 4, "")


@pytest.mark.parametrize(
    ("words", "where", "code", "facts"),
    [
        ([], "{a}:1,no-such-host:1", 69, ["cannot reach host no-such-host", "resolve"]),
        ([], "{a}:1,{b}:1:port=1", 69, ["cannot reach host {b}", "Connection refused"]),
        ([], "{a}:1,10.213.7.99:1", 69, ["cannot reach host 10.213.7.99"]),
        (["--ssh-args=-F /dev/null"], "{a}:1,{b}:1", 69, ["cannot reach host {b}", "Host key verification failed"]),
        (["--remote-python", "/no/such/python"], "{a}:1,{b}:1", 78, ["host {b}", "there is no /no/such/python"]),
        (["--remote-python", "/etc/passwd"], "{a}:1,{b}:1", 78, ["host {b}", "cannot execute /etc/passwd"]),
        (["--remote-python", "/usr/bin/python3"], "{a}:1,{b}:1", 78, ["host {b}", "has no module horo"]),
    ],
)
def test_a_bad_host_is_a_sentence(cluster: Cluster, words: list[str], where: str, code: int, facts: list[str]) -> None:
    if "/usr/bin/python3" in words and not Path("/usr/bin/python3").exists():
        pytest.skip("there is no second Python at /usr/bin/python3 (`apt install python3`)")
    names = {"a": cluster.hosts[0].name, "b": cluster.hosts[1].name}
    done = cluster.run("-np", "2", "--start-timeout", "10", *words, "true", where=where.format(**names))
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    for fact in facts:
        assert fact.format(**names) in done.stderr


def test_a_directory_that_only_this_host_has_is_named(cluster: Cluster, tmp_path: Path) -> None:
    script = f'mount -t tmpfs tmpfs {tmp_path} && mkdir {tmp_path}/here && cd {tmp_path}/here && exec "$@"'
    done = cluster.run("-np", "4", "true", prefix=["sh", "-c", script, "sh"])
    assert done.returncode == 78, done.stderr
    assert f"host {cluster.hosts[1].name} has no directory {tmp_path}/here" in done.stderr


def test_hosts_that_cannot_connect_to_each_other_are_told_before_the_job(clusters: Callable[[int], Cluster]) -> None:
    cluster = clusters(3)
    _, b, c = cluster.hosts
    where = ",".join(host.name for host in cluster.hosts)
    try:
        done = cluster.run("--check-hosts", where=where)
        assert (done.returncode, done.stderr) == (0, "")
        assert [line.rpartition(", ")[2] for line in done.stdout.splitlines()] == ["this host", b.address, c.address]
        assert cluster.run("--check-hosts", "--network-interfaces", "eth0", where=where).returncode == 0
        words = ["ip", "route", "add", "unreachable", c.address]
        assert cluster.run_on(b, words).returncode == 0
        done = cluster.run("--check-hosts", where=where)
        cluster.run_on(b, ["ip", "route", "delete", "unreachable", c.address])
        assert done.returncode == 69
        assert f"{b.name}: cannot connect to {c.name} ({c.address} port " in done.stdout
        assert "No route to host" in done.stdout
    finally:
        cluster.clean_up()


def where(cluster: Cluster, layout: str) -> str:
    return ",".join(f"{host.name}:{layout.count(letter)}" for letter, host in zip("ab", cluster.hosts, strict=True))


@pytest.mark.parametrize("layout", ["aaab", "abab"])
def test_ranks_start_with_the_right_places(cluster: Cluster, mpi: Mpi, tmp_path: Path, layout: str) -> None:
    passed = [mpi.pass_on, "HORO_TRANSPORT"] if mpi.pass_on else []
    cyclic = mpi.cyclic if layout == "abab" else ()
    words = [mpi.starter, mpi.hosts, where(cluster, layout), "-np", "4", *passed, *cyclic, *PLACE, str(tmp_path)]
    done = cluster.start_on(cluster.hosts[0], words, environment=mpi.environment).finish()
    assert done.returncode == 0, done.stderr
    assert written(tmp_path) == expected(layout, cluster, mpi.library)


def test_hororun_has_mpirun_start_the_ranks(cluster: Cluster, mpi: Mpi, tmp_path: Path) -> None:
    words = ["--mpi", "-np", "4", "--oversubscribe", *PLACE, str(tmp_path)]
    done = cluster.run(*words, where=where(cluster, "aaab"), environment=mpi.environment)
    assert done.returncode == 0, done.stderr
    assert written(tmp_path) == expected("aaab", cluster, mpi.library)


def test_torchrun_on_two_hosts_with_a_static_rendezvous(cluster: Cluster, tmp_path: Path) -> None:
    first = [f"--master-addr={cluster.hosts[0].name}", "--master-port=29500"]
    jobs = []
    for node, host in enumerate(cluster.hosts):
        torchrun = ["torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}", *first]
        command = [sys.executable, "-m", *torchrun, *PROGRAM, str(tmp_path)]
        jobs.append(cluster.start_on(host, command, environment={"OMP_NUM_THREADS": "1"}))
    for job in jobs:
        done = job.finish(TORCH_S)
        assert done.returncode == 0, done.stderr
    assert written(tmp_path) == expected("aabb", cluster)


def test_the_next_round_goes_on_from_the_commit(cluster: Cluster, tmp_path: Path) -> None:
    """Its ranks find each other at once. (test_elastic_torchrun.py has rank 0 as the victim.)"""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=2"]
    at = ["--rdzv-backend=c10d", f"--rdzv-endpoint={cluster.hosts[0].address}:29500"]
    words = [*torchrun, *at, str(TRAINING), str(tmp_path), "1"]
    jobs = [cluster.start_on(host, [*words, host.name], environment={"OMP_NUM_THREADS": "1"}) for host in cluster.hosts]
    all_done = [job.finish(3 * TORCH_S) for job in jobs]
    shown = "".join(done.stdout + done.stderr for done in all_done)
    assert [done.returncode for done in all_done] == [0, 0], shown
    check("".join(done.stdout for done in all_done))
