"""Ranks without numpy, or whose Python lacks names of ``os`` and ``fcntl`` that an old libc does not have."""

import re
import sys
from pathlib import Path

from jobs import run_python

HORORUN = ("-m", "horo.runner", "-np", "2", "--oversubscribe", "--no-prefix", sys.executable)
SCRIPT = """
import sys
sys.modules["numpy"] = None  # import numpy is an ImportError from here on
import warnings
warnings.simplefilter("ignore")
import torch
import horo.torch as hvd
hvd.init()
rank, size = hvd.rank(), hvd.size()
try:
    torch.ones(1).numpy()
except RuntimeError:
    pass
else:
    raise AssertionError("this torch does not need numpy for numpy()")

assert hvd.broadcast_object({"epoch": 3, "rank": rank}) == {"epoch": 3, "rank": 0}
assert hvd.broadcast_object(b"x" * 100_000 if rank == 0 else None) == b"x" * 100_000
assert hvd.broadcast_object(None, name="named") is None
assert hvd.allgather_object(("r", rank)) == [("r", r) for r in range(size)]
for fault in (lambda: hvd.broadcast_object(x for x in ()), lambda: hvd.allgather_object(open(__file__))):
    try:
        fault()
    except Exception as error:
        print("refused:", type(error).__name__)
assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [float(size)] * 3
assert hvd.grouped_allreduce([torch.ones(2), torch.ones(())], op=hvd.Sum)[1].item() == size
assert hvd.allgather(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.bfloat16
assert hvd.broadcast(torch.full((2,), float(rank)), 0).tolist() == [0.0, 0.0]
hvd.barrier()

for scalar in (False, True):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    if scalar:
        model.register_parameter("scalar", torch.nn.Parameter(torch.tensor(1.0)))
        model.register_parameter("empty", torch.nn.Parameter(torch.ones(0)))
    optimizer = torch.optim.Adam(model.parameters())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    hvd.average_buffers(model)
hvd.shutdown()
print("done")
"""


def test_the_whole_api_works_where_numpy_cannot_be_imported(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = run_python(*HORORUN, str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("done") == 2


def test_an_installation_asks_for_no_numpy() -> None:
    root = Path(__file__).parents[2]
    wanted = next(line for line in (root / "pyproject.toml").read_text().splitlines() if "dependencies = [" in line)
    assert "numpy" not in wanted
    files = [path for folder in ("horo", "runner") for path in (root / folder).rglob("*.py")]
    assert [path for path in files if re.search(r"(import|from) numpy|[._]numpy\(", path.read_text())] == []


# memfd_create, the seals and the eventfds are there only where the libc of the build had them.
OLD_LIBC = f"""
import fcntl, os, sys
for module in (os, fcntl):
    for name in dir(module):
        if name.startswith(("memfd_", "MFD_", "eventfd", "EFD_", "F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_")):
            delattr(module, name)
assert not hasattr(os, "memfd_create")
sys.path.insert(0, {str(Path(__file__).resolve().parent.parent)!r})
from plain_rank import Rank
rank = Rank()
rank.start()
print("sum", rank.allreduce("x"))
rank.close()
"""


def test_ranks_start_where_os_has_no_memfd_and_no_eventfd() -> None:
    for total, launcher in ((1.0, ()), (3.0, HORORUN)):
        done = run_python(*launcher, "-c", OLD_LIBC)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [f"sum [{total}, {total}]"] * (2 if launcher else 1)
