"""torch's own tests of torch.distributed, and what is built on it, over horo."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest
from jobs import TORCH_S, run_python
from rank_pool import RankPool
from skips import ALL_CASES, whole

HERE = Path(__file__).parent
CHOSEN = """
test_DistributedDataParallelCPU test_DistributedDataParallel_requires_grad test_all_gather_coalesced_complex
test_all_gather_full_group test_all_gather_object_subgroup test_all_reduce_coalesced_full_group_product
test_all_reduce_full_group_max test_all_reduce_sum_async test_all_reduce_sum_complex test_all_to_all_full_group
test_all_to_all_single_unequal_split_complex test_barrier_full_group test_broadcast_full_group test_ddp_create_graph
test_ddp_logging_data_cpu test_destroy_group test_gather_full_group test_gather_object test_get_backend test_get_future
test_get_rank_size_group test_reduce_full_group_sum test_reduce_sum_twice test_scatter_complex test_scatter_object_list
test_sparse_all_reduce_sum test_static_graph_api_cpu
"""
"""Tests that take two minutes in all; `make test-all` runs all that torch has."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("stands_for", "ranks", "least"),
    [
        ("horo", 2, 92),
        *(pytest.param(*each, marks=whole) for each in [("gloo", 2, 86), ("horo", 3, 114), ("mpi", 3, 87)]),
    ],
)
def test_torchs_own_tests(tmp_path: Path, stands_for: str, ranks: int, least: int) -> None:
    chosen = tmp_path / "chosen"
    chosen.write_text(CHOSEN)
    words = ["--ranks", str(ranks), "--as", stands_for, *([] if ALL_CASES else ["--list", str(chosen)])]
    done = run_python(str(HERE / "torch_suite.py"), *words, timeout=1700 if ALL_CASES else 280)
    failed = [line for line in done.stdout.splitlines() if not line.startswith(("pass", "skip"))]
    assert done.returncode == 0, "\n".join(failed)[-8000:] + done.stderr[-2000:]
    assert done.stdout.count("\npass ") + 1 >= (least if ALL_CASES else 20), done.stdout


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=whole), 3])
def test_what_is_built_on_it(request: pytest.FixtureRequest, ranks: int) -> None:
    names = re.findall(r"^def (recipe_\w+)", (HERE / "recipes.py").read_text(), re.MULTILINE)
    assert len(names) > 10
    pool: RankPool = request.getfixturevalue(f"fresh_group{ranks}")
    for name in names:
        pool.run(_run_recipe, name, deadline_s=2 * TORCH_S)


def _run_recipe(name: str) -> None:
    getattr(import_module("recipes"), name)()
