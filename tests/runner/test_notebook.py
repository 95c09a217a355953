"""``horo.run`` in a notebook: a function of a cell runs in ranks, and what they print appears under the cell."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient", reason="no Jupyter here: `pip install nbclient ipykernel`")
pytest.importorskip("ipykernel", reason="no Jupyter here: `pip install nbclient ipykernel`")
pytest.importorskip("torch")
import nbformat  # noqa: E402

CELLS = [
    "import horo\nfactor = 3\n\nclass Point:\n    def __init__(self, x):\n        self.x = x",
    """
def total(amount):
    import sys, warnings
    warnings.simplefilter("ignore")
    sys.modules["numpy"] = None  # a torch that cannot use the one that is installed writes pages about that
    import torch
    import horo.torch as hvd
    hvd.init()
    print("rank", hvd.rank(), "of", hvd.size())
    return Point(hvd.rank() * factor + float(hvd.allreduce(torch.ones(1) * amount, op=hvd.Sum)))

points = horo.run(total, (5,), np=2, options=["--oversubscribe"])
[point.x for point in points]
""",
    """
def fail():
    raise ValueError(f"no batch of {factor}")

try:
    horo.run(fail, np=1)
except ValueError as error:
    print("caught:", error)
    print(str(error.__cause__).splitlines()[0][:10])
""",
]


def outputs(notebook: Any, index: int) -> str:
    """What stands under a cell."""
    cell = notebook.cells[index]
    assert all(each.output_type != "error" for each in cell.outputs), cell.outputs
    return "".join(each.get("text") or each.data["text/plain"] for each in cell.outputs)


def test_a_notebook_calls_functions_of_its_cells_in_ranks(tmp_path: Path) -> None:
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in CELLS])
    environment = {"JUPYTER_PLATFORM_DIRS": "1", "IPYTHONDIR": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path)}
    client = nbclient.NotebookClient(
        made, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    done = client.execute(env={**os.environ, **environment})
    *printed, value = outputs(done, 1).splitlines()
    assert (sorted(printed), value) == (["[0] rank 0 of 2", "[1] rank 1 of 2"], "[10.0, 13.0]")
    said = outputs(done, 2)
    assert "caught: no batch of 3\nin rank 0 " in said
