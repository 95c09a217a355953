"""Training steps, small tensors and single calls are measured, checked and written down."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from example_runs import ROOT, start, whole

FOLDER = ROOT / "benchmarks"
SHORT = ["--rounds", "2", "--turn-ms", "1", "--peers", "horo,gloo"]

sys.path.insert(0, str(FOLDER))
import models  # noqa: E402  (benchmarks/models.py)
from devices import CPU  # noqa: E402  (benchmarks/devices.py)
from workloads import training_step as workload  # noqa: E402  (benchmarks/workloads/training_step.py)


def test_models_are_what_their_names_say() -> None:
    def counts(model: torch.nn.Module) -> tuple[int, int]:
        parameters = list(model.parameters())
        return len(parameters), sum(parameter.numel() for parameter in parameters)

    assert counts(models.resnet50()) == (161, 25_557_032)  # as torchvision's
    assert counts(models.RECIPES["mlp"].make()) == (48, 24 * (1024 * 1024 + 1024))


@whole
def test_a_training_step_is_measured_beside_all_ceilings(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    script = str(FOLDER / "training_step.py")
    done = start([sys.executable, script, *SHORT, "--models", "mlp-tiny", "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    names = ["ceiling", "ceiling, memory kept", "ceiling, memory kept, in step", "horo", "gloo", "gloo, memory kept"]
    assert [(row["model"], row["contestant"]) for row in rows] == [("mlp-tiny", name) for name in names]
    assert all(row["wrong"] == "" and row["cpu_ms_per_rank"] > 0 for row in rows)
    assert [row["efficiency"] for row in rows if row["contestant"] == "ceiling"] == [1.0]
    assert done.stdout.count(" ok\n") == 6


def test_a_rank_that_learns_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(workload._AloneHere):
        kind = "horo"

        class module:
            @staticmethod
            def DistributedOptimizer(optimizer: object, named_parameters: object) -> object:
                return optimizer  # forgets the other rank

            @staticmethod
            def broadcast_parameters(state: object, root_rank: int) -> None:
                """All ranks begin alike."""

        size = 2

    assert "off after moving" in workload.check_learning(Broken(), models.RECIPES["mlp-tiny"], CPU)


@whole
def test_small_tensors_are_summed_both_ways(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    script = str(FOLDER / "small_tensors.py")
    start([sys.executable, script, *SHORT, "--tensors", "20", "--size", "64", "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert [(row["form"], row["contestant"], row["wrong"]) for row in rows] == [
        ("single", "horo", ""),
        ("single", "gloo", ""),
        ("grouped", "horo", ""),
    ]
    assert all((row["submit_us"] > 0) == (row["form"] == "single") for row in rows)


@whole
def test_latency_keeps_the_time_of_single_calls(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    start([sys.executable, str(FOLDER / "latency.py"), *SHORT, "--max", "16", "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert [(row["form"], row["bytes"], row["contestant"]) for row in rows] == [
        ("complete", 4, "horo"),
        ("complete", 4, "gloo"),
        ("submit", 4, "horo"),
        ("poll", 4, "horo"),
        ("complete", 16, "horo"),
        ("complete", 16, "gloo"),
    ]
    assert all(row["call_min_us"] <= row["call_median_us"] <= row["call_p99_us"] for row in rows)
