"""What horo keeps of the operations that a program has done, as the page on memory promises."""

from __future__ import annotations

import ast
import sys

from jobs import TORCH_S, Hororun

PROGRAM = """
import gc
import torch
import horo.torch as hvd

def dirty_kib():
    gc.collect()
    return next(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("Private_Dirty:"))

def ones():
    return torch.ones(1 << 18)

FORMS = {
    "allreduce": lambda name: hvd.allreduce(ones(), name=name),
    "allreduce_async": lambda name: hvd.synchronize(hvd.allreduce_async(ones(), name=name)),
    "grouped_allreduce": lambda name: hvd.grouped_allreduce([ones(), ones()], name=name),
    "broadcast_": lambda name: hvd.broadcast_(ones(), 0, name=name),
    "allgather, repeated": lambda name: (ones(), [hvd.allgather(ones()[: 1 << 16], name=name) for _ in range(2)]),
    "reducescatter": lambda name: hvd.reducescatter(ones(), name=name),
    "alltoall": lambda name: hvd.alltoall(ones(), name=name),
}
hvd.init()
grown = {}
for form, call in FORMS.items():
    for number in range(10):
        call(None)
    call("x")
    before = dirty_kib()
    for number in range(64):  # names so short that what is kept of one fits into what malloc leaves behind a tensor
        call(f"{number}")
    grown[form] = dirty_kib() - before
print(grown, flush=True)
"""


def test_a_name_costs_no_tensor(hororun: Hororun) -> None:
    """1 MiB kept for each of 64 names would be eight times what is allowed."""
    done = hororun.start("-np", "2", "--no-prefix", sys.executable, "-c", PROGRAM).finish(TORCH_S)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
    for line in done.stdout.splitlines():
        assert {form: kib for form, kib in ast.literal_eval(line).items() if kib > 8 << 10} == {}
