"""Two hosts with networks of their own: ranks in two network namespaces joined by a cable."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SECRET = "5a" * 32

SERVER = """
import sys
from horo.bootstrap.store.server import StoreServer
with StoreServer(sys.argv[1].split(","), bytes.fromhex("5a" * 32)) as server:
    print(",".join(map(str, server.endpoints)), flush=True)
    sys.stdin.read()
"""

RANK = """
import json, os, socket, sys
from horo.bootstrap.job import connect
from horo.bootstrap.launchers.variables import read_launch
from horo.config.table import read_config
connection = connect(read_launch(os.environ), read_config(os.environ), 1, [])
setup = connection.setup
addresses = {}
for kind, numbers in (("control", setup.control_fds), ("data", setup.data_fds)):
    for host, number in enumerate(numbers):
        if number >= 0:
            stream = socket.socket(fileno=number)
            stream.setblocking(True)
            stream.settimeout(10)
            stream.sendall(bytes([setup.rank]))
            peer = stream.recv(1)[0]
            addresses[kind] = [stream.getsockname()[0], stream.getpeername()[0], peer]
# In one write: torchrun gives all ranks of a host the same pipe.
sys.stdout.write(json.dumps({"hosts": connection.hosts, "addresses": addresses}) + "\\n")
"""


@dataclass
class Cable:
    """Two namespaces with an address each."""

    namespaces: tuple[str, str]
    addresses: tuple[str, str]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def cable() -> Iterator[Cable]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("ip is not installed (`apt install iproute2`)")
    names = (f"horo-{os.getpid()}-a", f"horo-{os.getpid()}-b")
    addresses = ("10.213.77.1", "10.213.77.2")
    try:
        for name in names:
            try:
                _ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "name", "wire1", "netns", names[1])
        for name, device, address in zip(names, ("cable0", "wire1"), addresses, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            _ip("-n", name, "link", "set", device, "up")
        yield Cable(names, addresses)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _start(namespace: str, script: Path, *arguments: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["ip", "netns", "exec", namespace, sys.executable, str(script), *arguments],
        env={**os.environ, **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("interfaces", [None, "10.213.77.0/24"])
def test_ranks_on_two_hosts_find_the_addresses_that_lead_to_each_other(
    cable: Cable, tmp_path: Path, interfaces: str | None
) -> None:
    (tmp_path / "server.py").write_text(textwrap.dedent(SERVER), encoding="utf-8")
    (tmp_path / "rank.py").write_text(textwrap.dedent(RANK), encoding="utf-8")
    # Beside the store the first address that answers is loopback, which leads nowhere for the other host.
    server = _start(cable.namespaces[0], tmp_path / "server.py", f"127.0.0.1,{cable.addresses[0]}")
    if server.stdout is None:
        raise AssertionError("no pipe")
    endpoints = server.stdout.readline().strip()
    ranks = [
        _start(
            cable.namespaces[rank % 2],
            tmp_path / "rank.py",
            HOROVOD_RANK=str(rank),
            HOROVOD_SIZE="4",
            HORO_STORE=endpoints,
            HORO_SECRET=SECRET,
            HORO_START_TIMEOUT="30",
            HORO_NETWORK_INTERFACES=interfaces or "",
        )
        for rank in range(4)
    ]
    results = []
    for process in ranks:
        output, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, ""), errors
        results.append(json.loads(output))
    server.communicate("", timeout=20)
    near, far = cable.addresses
    assert [result["hosts"] for result in results] == [[[0, 2], [1, 3]]] * 4
    assert results[0]["addresses"] == {"control": [near, far, 1], "data": [near, far, 1]}
    assert results[1]["addresses"] == {"control": [far, near, 0], "data": [far, near, 0]}
    assert results[2]["addresses"] == {"data": [near, far, 3]}
    assert results[3]["addresses"] == {"data": [far, near, 2]}


def _check_ends(processes: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    results = []
    for process in processes:
        output, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
        results += [json.loads(line) for line in output.splitlines()]
    return results


def test_ranks_of_torchrun_on_two_hosts_start_through_its_store(cable: Cable, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "rank.py").write_text(textwrap.dedent(RANK), encoding="utf-8")
    agents = [
        _start(
            cable.namespaces[node],
            Path("-mtorch.distributed.run"),
            "--nnodes=2",
            f"--node-rank={node}",
            f"--nproc-per-node={2 - node}",
            f"--master-addr={cable.addresses[0]}",
            "--master-port=29517",
            str(tmp_path / "rank.py"),
            HORO_SECRET=SECRET,
            HORO_START_TIMEOUT="60",
            OMP_NUM_THREADS="1",
        )
        for node in range(2)
    ]
    near, far = cable.addresses
    results = sorted(_check_ends(agents), key=lambda result: len(result["addresses"]))
    assert [result["hosts"] for result in results] == [[[0, 1], [2]]] * 3
    assert results[0]["addresses"] == {}  # rank 1 has no counterpart on the other host
    assert [near, far, 2] in [result["addresses"]["data"] for result in results[1:]]
    assert [far, near, 0] in [result["addresses"]["data"] for result in results[1:]]


def test_ranks_of_srun_on_two_hosts_start_through_the_first_node(cable: Cable, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(textwrap.dedent(RANK), encoding="utf-8")
    nodes = [0, 1, 0]  # cyclic
    ranks = [
        _start(
            cable.namespaces[node],
            tmp_path / "rank.py",
            SLURM_JOB_ID=str(os.getpid()),
            SLURM_STEP_ID="0",
            SLURM_PROCID=str(rank),
            SLURM_STEP_NUM_TASKS="3",
            SLURM_NODEID=str(node),
            SLURM_LOCALID=str(rank // 2),
            SLURM_STEP_TASKS_PER_NODE="2,1",
            SLURM_STEP_NODELIST="10.213.77.[1-2]",
            HORO_SECRET=SECRET,
            HORO_START_TIMEOUT="30",
        )
        for rank, node in enumerate(nodes)
    ]
    near, far = cable.addresses
    results = _check_ends(ranks)
    assert [result["hosts"] for result in results] == [[[0, 2], [1]]] * 3
    assert results[0]["addresses"] == {"control": [near, far, 1], "data": [near, far, 1]}
    assert results[1]["addresses"] == {"control": [far, near, 0], "data": [far, near, 0]}
    assert results[2]["addresses"] == {}
