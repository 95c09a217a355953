"""The benchmarks on GPUs, as far as they run without one: on the CPU, and beside a double of a GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_double
import gpu_shared
import gpu_staging
import gpu_step
import gpus
import pytest
import torch
from contest import ContestError, Turn
from doubles import CUDA, NCCL, build_double
from example_runs import ROOT, start
from rank_pool import RankPool
from rounds import Case, Heat, Result
from workloads import gradients, staging

import horo.torch as hvd

FOLDER = ROOT / "benchmarks"
SHORT = ["--device", "cpu", "--rounds", "1", "--turn-ms", "1"]


needs_no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="torch sees a GPU here; `make gpu-bench` runs the scripts on it"
)


def result_of(case: str, parameters: dict[str, Any], *heats: dict[str, float]) -> Result:
    """A result with these heats: everybody's microseconds."""
    result = Result(Case(case, parameters), dict.fromkeys(heats[0], 1))
    for times in heats:
        result.heats.append(Heat((1.0, 1.0), {name: Turn(micros, []) for name, micros in times.items()}))
    return result


def run(script: str, words: list[str], tmp_path: Path) -> tuple[list[dict[str, Any]], str]:
    """The rows that it has written, and what it has printed."""
    file = tmp_path / "out.json"
    done = start([sys.executable, str(FOLDER / f"{script}.py"), *SHORT, *words, "--json", str(file)])
    document = json.loads(file.read_text())
    assert document["benchmark"] == script
    assert document["gpu"] == {}
    assert all(row["wrong"] == "" for row in document["rows"])
    assert "\non no GPU, torch " in done.stdout
    return document["rows"], done.stdout


def test_ranks_that_share_a_place_train_to_the_parameters_of_one(tmp_path: Path) -> None:
    rows, said = run("gpu_shared", ["--model", "resnet50-tiny", "--batch", "4"], tmp_path)
    assert [(row["ranks"], row["contestant"]) for row in rows] == [(2, "ceiling"), (2, "horo")]
    assert said.splitlines()[-1].startswith("ok    resnet50-tiny on one GPU, 2 ranks")


@needs_no_gpu
def test_without_a_gpu_a_script_says_so_and_ends_well(tmp_path: Path) -> None:
    script, file = "gpu_step", tmp_path / "out.json"
    done = start([sys.executable, str(FOLDER / f"{script}.py"), "--json", str(file)])
    assert done.stdout == f"{script}.py: skipped: no GPU: torch {torch.__version__} sees none\n"
    assert not file.exists()


def test_the_cost_of_a_step_is_held_to_one_percent() -> None:
    times = {"ceiling": 100.0, "ceiling, again": 99.8, "horo": 100.9, "DDP": 103.0}
    met = gpu_step.row_for(result_of("resnet50-128", {}, times))
    assert (met.figure, met.ok) == (pytest.approx(0.9), True)
    assert met.note.endswith("a second plain one -0.20 %")
    assert not gpu_step.row_for(result_of("resnet50-128", {}, {**times, "horo": 101.1})).ok


def test_staging_is_held_to_a_share_of_the_copies() -> None:
    def row(horo: float) -> Any:
        return gpu_staging.row_for(result_of("64 MiB", {"counts": [1 << 24]}, {"ceiling": 80.0, "horo": horo}))

    assert (row(100.0).figure, row(100.0).ok, row(101.0).ok) == (80.0, True, False)
    result = result_of("64 MiB", {"counts": [1 << 24]}, {"ceiling": 80.0, "horo": 100.0})
    line = gpus.as_table([gpus.Round([result], 2)], gpu_staging.SHOWN).splitlines()[3]
    assert " ".join(line.split()) == "horo 100 us 100 us 100 us 1.250 (1.250 to 1.250) 1342.2 ok"


def test_wrong_parameters_are_short_and_break_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    result = result_of("resnet50", {}, {"ceiling": 1.0, "horo": 2.0})
    result.wrong["horo"] = "rank 0: parameters are 1 off after moving by 1"
    assert not gpu_shared.row_for(result, 2).ok
    monkeypatch.setattr(gpus, "why_not", lambda _device: "")
    arguments = gpu_shared.parse_arguments(["--device", "cpu"])
    with pytest.raises(ContestError, match=r"wrong results of resnet50: .* parameters are 1 off"):
        gpus.check_rows("gpu_shared", arguments, lambda _: [gpus.Round([result], 2)], gpu_shared.SHOWN)


@pytest.fixture
def pool() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


def test_staged_sums_beside_a_double_of_a_gpu(pool: RankPool, tmp_path: Path) -> None:
    def add_up(path: str) -> None:
        gpu = gpu_double.load(path)
        place: Any = SimpleNamespace(is_gpu=True, put=gpu.put, finish=lambda: None)
        library: Any = SimpleNamespace(kind="horo", module=hvd, rank=hvd.rank(), size=hvd.size())
        tensors = [place.put(torch.zeros(count)) for count in (5, 0, 70_000)]
        place.finish = lambda: [gpu.read(tensor) for tensor in tensors]
        work = staging.of_horo(library, tensors, place)
        assert work.check() == ""
        work.call()
        assert not any(gpu.read(tensor).any() for tensor in tensors)

    pool.run(add_up, str(build_double(CUDA, tmp_path, DELAYS=20)))


def put_gradients(gpu: gpu_double.Gpu, number: int, parameters: Iterable[torch.Tensor]) -> None:
    """Has autograd put gradients on the double, where it would put them on a GPU."""

    def put(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = gpu.put(parameter.grad, number)

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(put)  # type: ignore[no-untyped-call]


@pytest.mark.skipif(
    NCCL in Path("/proc/self/maps").read_text(),
    reason="this torch has loaded an NCCL of its own, which goes before the double "
    "(`make test TORCH=/path/of/a/build/for/CPUs.whl`)",
)
@pytest.mark.parametrize("form", ["grouped", "optimizer"])
def test_gradients_by_doubles_of_a_gpu_and_of_nccl(tmp_path: Path, form: str) -> None:
    def average(form: str, *paths: str) -> None:
        gpu, r = gpu_double.load(*paths), hvd.rank()

        class Holder(gradients.Holder):
            def __init__(self, values: list[torch.Tensor]) -> None:
                super().__init__(values)
                put_gradients(gpu, r, self.values)

        place: Any = SimpleNamespace(is_gpu=True, put=lambda tensor: gpu.put(tensor, r))
        place.finish = lambda: gpu.read(gpu.put(torch.zeros(1), r))
        library: Any = SimpleNamespace(kind="horo", module=hvd, rank=r, size=hvd.size())
        gradients.place_of = lambda parameters, rank: place  # type: ignore[assignment]
        gradients.Holder = Holder  # type: ignore[misc]
        work = gradients.prepare(library, {"model": "transformer-tiny", "form": form, "device": "cuda"})
        assert work.check() == ""
        work.call()
        assert gpu.launched() == 2 * len(gradients.shapes_of("transformer-tiny"))
        assert gpu.lib.double_copies() == 0, "some were staged"

    def begin(*paths: str) -> None:
        gpu_double.load(*paths)
        hvd.init()

    cuda = build_double(CUDA, tmp_path, DELAYS=20, DEVICES=2)
    nccl = build_double(NCCL, tmp_path, CUDA_DOUBLE=f'"{cuda}"', DELAYS=5)
    pool = RankPool(2, init=False, environment={"HORO_GPU_OPERATIONS": "nccl"})
    try:
        pool.run(begin, str(cuda), str(nccl))
        pool.run(average, form, str(cuda), str(nccl))
    finally:
        pool.close()
