"""torchrun's restarts: the next attempt goes on from the last commit, which any host may have in its own memory."""

from pathlib import Path

from jobs import TORCH_S, run_python
from torchrun_rounds import PROGRAM, check


def test_all_ranks_go_on_from_the_commit_that_one_host_has(tmp_path: Path) -> None:
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    words = [*torchrun, str(PROGRAM), str(tmp_path), "0"]
    done = run_python("-m", *words, environment={"OMP_NUM_THREADS": "1"}, timeout=2 * TORCH_S)
    assert done.returncode == 0, done.stderr
    check(done.stdout)
