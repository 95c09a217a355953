"""torchrun on two hosts starts all ranks again when one fails: the ranks of the next round find each other at once."""

import sys
from pathlib import Path

import pytest
from jobs import TORCH_S
from namespaces import Cluster
from torchrun_rounds import PROGRAM, check


@pytest.mark.parametrize("victim", [0, 1])
def test_the_next_round_goes_on_from_the_commit(cluster: Cluster, tmp_path: Path, victim: int) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=2"]
    at = ["--rdzv-backend=c10d", f"--rdzv-endpoint={cluster.hosts[0].address}:29500"]
    words = [*torchrun, *at, str(PROGRAM), str(tmp_path), str(victim)]
    jobs = [cluster.start_on(host, [*words, host.name], environment={"OMP_NUM_THREADS": "1"}) for host in cluster.hosts]
    all_done = [job.finish(3 * TORCH_S) for job in jobs]
    shown = "".join(done.stdout + done.stderr for done in all_done)
    assert [done.returncode for done in all_done] == [0, 0], shown
    check("".join(done.stdout for done in all_done))
