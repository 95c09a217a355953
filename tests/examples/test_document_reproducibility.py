"""What docs/how-to/reproducibility.md says about the order of additions."""

from __future__ import annotations

from pathlib import Path

import pytest
from example_runs import launcher, start

SCRIPT = """
import os
os.environ.update(HORO_OVERLAP="always")
if {split}:
    os.environ["HORO_HOST_ID"] = str(int(os.environ["HOROVOD_RANK"]) // 2)
import torch
import horo.torch as hvd

hvd.init()
assert hvd.cross_size() <= 2
torch.manual_seed(hvd.rank())
values = torch.randn(300_000)
alone = hvd.allreduce(values, op=hvd.Sum)
for count in (1, 1000, 100_003):  # where in a batch a value lies
    assert torch.equal(hvd.grouped_allreduce([torch.randn(count), values], op=hvd.Sum)[1], alone), count
for part in (slice(0, 1), slice(7, 5000)):
    assert torch.equal(hvd.allreduce(values[part], op=hvd.Sum), alone[part]), part
everyone = hvd.allgather(values[None])
total, second = everyone[0] + everyone[1], everyone[2] + everyone[3]
expected = total + second if {split} else total + everyone[2] + everyone[3]
assert torch.equal(alone, expected)
print("equal")
"""


@pytest.mark.parametrize("split", [False, True], ids=["one host", "two hosts"])
def test_contributions_are_added_in_the_order_of_ranks_on_each_host(tmp_path: Path, split: bool) -> None:
    path = tmp_path / "order.py"
    path.write_text(SCRIPT.format(split=split))
    assert start([*launcher("hororun", 4), str(path)]).stdout.splitlines() == ["equal"] * 4
