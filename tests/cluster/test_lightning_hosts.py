"""Lightning on two hosts, by each launcher: ``strategy="horo"``, and Lightning's own DDP over the backend "horo"."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from jobs import Launched
from namespaces import Cluster
from places import written
from slurm import Slurm

PROGRAM = Path(__file__).parents[1] / "lightning" / "lightning_rank.py"
IMPORTS_S = 240.0
"""A deadline for the import of Lightning in both ranks on a machine that does other things, too."""

pytestmark = pytest.mark.skipif(find_spec("lightning_utilities") is None, reason="lightning is not installed")


def check(jobs: Sequence[Launched], folder: Path, cluster: Cluster) -> None:
    """There is one job of two hosts, which has one progress bar and one checkpoint per strategy."""
    all_done = [job.finish(IMPORTS_S) for job in jobs]
    shown = "".join(done.stdout + done.stderr for done in all_done)
    assert [done.returncode for done in all_done] == [0] * len(jobs), shown
    ranks = written(folder)
    for name, backend in (("horo", ""), ("ddp", "horo")):
        found = [ranks[rank][name] for rank in range(2)]
        assert [each["place"] for each in found] == [[2, n, n, 0, cluster.hosts[n].name] for n in range(2)]
        assert [each["backend"] for each in found] == [backend] * 2
        assert found[0]["weights"] == found[1]["weights"] == ranks[0]["horo"]["weights"]
        assert [each["shows"] for each in found] == [True, False]
        assert [each["saved"] for each in found] == [str(folder / name / "only.ckpt")] * 2
        assert [file.name for file in (folder / name).iterdir()] == ["only.ckpt"]
    assert shown.count("`Trainer.fit` stopped") == 2


@pytest.mark.parametrize("launcher", ["srun", "hororun", "torchrun"])
def test_lightning_on_two_hosts(request: pytest.FixtureRequest, tmp_path: Path, launcher: str) -> None:
    words = [str(PROGRAM), str(tmp_path), "2", "horo", "ddp"]
    if launcher == "srun":
        slurm: Slurm = request.getfixturevalue("slurm")
        job = slurm.start("srun", "--ntasks=2", "--ntasks-per-node=1", sys.executable, *words)
        check([job], tmp_path, slurm.cluster)
        return
    cluster: Cluster = request.getfixturevalue("cluster")
    if launcher == "hororun":
        where = ",".join(f"{host.name}:1" for host in cluster.hosts)
        check([cluster.start("-np", "2", "--no-prefix", sys.executable, *words, where=where)], tmp_path, cluster)
        return
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    at = ["--rdzv-backend=c10d", f"--rdzv-endpoint={cluster.hosts[0].address}:29500"]
    check([cluster.start_on(host, [*torchrun, *at, *words]) for host in cluster.hosts], tmp_path, cluster)
