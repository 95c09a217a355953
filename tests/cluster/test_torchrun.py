"""horo under torchrun on two hosts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from jobs import TORCH_S
from namespaces import Cluster
from places import PROGRAM, expected, written

RENDEZVOUS = {
    "static": ["--node-rank={node}", "--master-addr={first}", "--master-port=29500"],
    "c10d": ["--rdzv-backend=c10d", "--rdzv-endpoint={first}:29500", "--rdzv-id=train"],
}


@pytest.mark.parametrize(("rendezvous", "layout"), [("static", "aabb"), ("c10d", "ab")])
def test_torchrun_on_two_hosts(cluster: Cluster, tmp_path: Path, rendezvous: str, layout: str) -> None:
    jobs = []
    for node, host in enumerate(cluster.hosts):
        options = [option.format(node=node, first=cluster.hosts[0].name) for option in RENDEZVOUS[rendezvous]]
        torchrun = ["torch.distributed.run", "--nnodes=2", f"--nproc-per-node={layout.count('a')}", *options]
        command = [sys.executable, "-m", *torchrun, *PROGRAM, str(tmp_path)]
        jobs.append(cluster.start_on(host, command, environment={"OMP_NUM_THREADS": "1"}))
    for job in jobs:
        done = job.finish(TORCH_S)
        assert done.returncode == 0, done.stderr
    assert written(tmp_path) == expected(layout, cluster)
