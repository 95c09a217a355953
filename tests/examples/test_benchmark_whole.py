"""Benchmarks that start many ranks, or need a GPU, as far as they run here; and what reads traces of calls."""

import json
import sys
from pathlib import Path
from typing import Any

import autotune
import footprint
import idle
import models
import pytest
import spaces
import startup
import torch
import two_hosts
import wakes
from devices import CPU
from example_runs import ROOT, start, why_gloo_cannot
from skips import whole
from workloads import training_step as workload

FOLDER = ROOT / "benchmarks"

SHORT = "--rounds 2 --turn-ms 1 --peers horo,gloo"
ON_CPU = "--device cpu --rounds 1 --turn-ms 1"


def run(script: str, folder: Path, *words: str) -> tuple[list[dict[str, Any]], str]:
    """The rows that it has written, and what it has printed."""
    file = folder / "out.json"
    said = start([sys.executable, str(FOLDER / f"{script}.py"), *words, "--json", str(file)]).stdout
    return json.loads(file.read_text())["rows"], said


MOVES = ("reducescatter", "alltoall", "allgather", "broadcast")
KEPT = "ceiling, memory kept"
LAYOUTS = "--layouts 2;1,1 --sizes 4K,64K --rounds 2 --turn-ms 5"
BY_LAYOUT = [("2", 4096), ("2", 65536), ("1,1", 4096), ("1,1", 65536)]
TREES = "TREE TREE --rounds 2"
RUNS: dict[str, tuple[str, str, list[tuple[Any, ...]], int]] = {
    # the script and its words: columns of its rows, what they hold, and how many lines end with "ok"
    "autotune --steps 3 --max-samples 3": ("job", [(job,) for job in autotune.JOBS], 0),
    f"teams {LAYOUTS}": ("layout bytes", BY_LAYOUT, 0),
    "timeline --models mlp-tiny --rounds 3 --turn-ms 20": ("model", [("mlp-tiny",)], 0),
    "timeline --of stats --models mlp-tiny --rounds 3 --turn-ms 20": ("model", [("mlp-tiny",)], 0),
    "elastic_commit --model resnet50-tiny --batch 2 --rounds 2 --steps 1": ("model", [("resnet50-tiny",)], 0),
    "elastic_kills --hosts 1 --peers horo --kills 3": (
        "victim moment",
        [("rank 0", "step"), ("another", "step"), ("rank 0", "sync"), ("none", "a newcomer joins")],
        0,
    ),
    f"collectives {SHORT} --max 4K --step 1024": (
        "operation bytes contestant",
        [(o, size, who) for o in MOVES for size in (4 if o == "broadcast" else 8, 4096) for who in ("horo", "gloo")],
        16,
    ),
    f"allreduce {SHORT} --max 4K --step 32 --hosts 2 --rate 1gbit": (
        "bytes contestant",
        [(size, who) for size in (4, 128, 4096) for who in ("horo", "gloo")],
        6,
    ),
    f"training_step {SHORT} --models mlp-tiny": (
        "contestant",
        [(who,) for who in ("ceiling", KEPT, f"{KEPT}, in step", "horo", "gloo", "gloo, memory kept")],
        6,
    ),
    "sharded_step --rounds 2 --turn-ms 1 --models mlp-tiny --optimizers sgd,adam": (
        "case contestant",
        [
            (f"mlp-tiny {kind}", who)
            for kind in ("sgd", "adam")
            for who in (f"{KEPT}, in step", "horo", "horo, sharded")
        ],
        6,
    ),
    "distributed_step --rounds 2 --turn-ms 1 --models mlp-tiny,resnet50-tiny --bucket-mb 1": (
        "model way contestant",
        [
            (model, way, who)
            for model in ("mlp-tiny", "resnet50-tiny")
            for way in ("ddp", "views", "fsdp2", "zero")
            for who in (("horo dist", "gloo", "horo") if way in ("ddp", "views") else ("horo dist", "gloo"))
        ],
        20,
    ),
    f"small_tensors {SHORT} --tensors 20 --size 64": (
        "form contestant",
        [("single", "horo"), ("single", "gloo"), ("grouped", "horo")],
        0,
    ),
    f"latency {SHORT} --peers horo,horo-dist,gloo --max 4": (
        "form contestant",
        [("complete", who) for who in ("horo", "horo dist", "gloo")] + [("submit", "horo"), ("poll", "horo")],
        0,
    ),
    "two_hosts --hosts 2 --per-host 1,2 --rates 1gbit --size 64K --rounds 2": (
        "per_host contestant right",
        [(per_host, who, True) for per_host in (1, 2) for who in two_hosts.CONTESTANTS],
        8,
    ),
    f"gpu_step {ON_CPU} --models mlp-tiny,transformer-tiny": (
        "model contestant",
        [(m, who) for m in ("mlp-tiny", "transformer-tiny") for who in ("ceiling", "ceiling, again", "horo", "DDP")],
        8,
    ),
    f"gpu_gradients {ON_CPU} --np 2 --model transformer-tiny": (
        "form contestant",
        [(form, who) for form in ("grouped", "optimizer") for who in ("ceiling", "horo", "DDP")],
        0,
    ),
    f"gpu_staging {ON_CPU} --sizes 4K,16M --model mlp-tiny": (
        "ranks case contestant",
        [(n, c, who) for n in (1, 2) for c in ("4 KiB", "16 MiB", "4 gradients") for who in ("ceiling", "horo")],
        0,
    ),
    f"builds {TREES} --layouts 2;1,1 --sizes 4K,64K --turn-ms 5 --models=": ("layout bytes", BY_LAYOUT, 0),
    f"builds {TREES} --layouts= --models mlp-tiny --step-turn-ms 5": ("model", [("mlp-tiny",)], 0),
    "wakes TREE TREE --rounds 1 --calls 80 --traced-calls 0 --seconds 0.1": (
        "situation",
        [(situation.name,) for situation in wakes.SITUATIONS for _ in range(3)],
        0,
    ),
}


@whole
@pytest.mark.parametrize("command", RUNS)
def test_a_benchmark_writes_a_row_for_each_case(tree: Path, tmp_path: Path, command: str) -> None:
    columns, expected, oks = RUNS[command]
    script, *words = command.replace("TREE", str(tree)).split()
    if (script == "autotune" or "--hosts" in words) and (why := spaces.why_not()):
        pytest.skip(why)
    if script == "collectives" and (why := why_gloo_cannot("reducescatter")):
        pytest.skip(why)
    rows, said = run(script, tmp_path, *words)
    assert [tuple(row[column] for column in columns.split()) for row in rows] == expected
    assert all(row.get("wrong", "") == "" for row in rows)
    assert said.count(" ok\n") >= oks


def test_a_rank_that_learns_something_else_is_found() -> None:
    class Broken(workload._AloneHere):
        kind = "horo"
        size = 2

        class module:
            @staticmethod
            def DistributedOptimizer(optimizer: object, named_parameters: object) -> object:
                return optimizer  # forgets the other rank

            @staticmethod
            def broadcast_parameters(state: object, root_rank: int) -> None:
                """All ranks begin alike."""

    assert "off after moving" in workload.check_learning(Broken(), models.RECIPES["mlp-tiny"], CPU)


@whole
def test_startup_measures_every_part(tmp_path: Path) -> None:
    written, _ = run("startup", tmp_path, "--rounds", "1", "--warm-up", "0")
    rows = {row["what"]: row for row in written}
    assert {target.what for target in startup.TARGETS} <= set(rows)
    assert all(len(row["rounds_ms"]) == 1 and row["rounds_ms"][0] > 0 for row in written)
    for launcher, library in (("hororun", "horo"), ("torchrun", "gloo")):
        parts = (f"{launcher} to the first line", f"{launcher}, imports", f"{launcher}, {library} init")
        total = rows[f"{launcher} to ready"]["median_ms"]
        assert sum(rows[part]["median_ms"] for part in parts) == pytest.approx(total, abs=0.1)


@whole
def test_idle_counts_nothing_for_horo(tmp_path: Path) -> None:
    rows = {row["job"]: row for row in run("idle", tmp_path, "--seconds", "0.5")[0]}
    assert set(rows) == set(idle.JOBS)
    assert rows["horo, one host"]["connections"] == 0
    assert rows["horo, a host per rank"]["connections"] == 4  # one for agreement and one for data, seen from both ends
    assert [rows[name]["packets"] for name in idle.OURS] == [0] * len(idle.OURS)


@whole
def test_footprint_keeps_its_promise(tmp_path: Path) -> None:
    rows, _ = run("footprint", tmp_path)
    assert {row["place"] for row in rows} == set(footprint.PLACES)
    for row in rows:
        assert row["extra_bytes"] == max(row["by_rank_bytes"])
        assert row["allowed_bytes"] == (16 << 20) + 2 * row["in_flight_bytes"] >= row["extra_bytes"], row


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Another tree, which is this one."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / ".venv").symlink_to(Path(sys.executable).parent.parent)  # whole: a Python finds its packages beside itself
    for name in ("tests", "horo", "runner"):
        (tree / name).symlink_to(ROOT / name)
    return tree


def test_calls_in_a_log_of_strace_are_those_between_the_marks_of_their_rank() -> None:
    mark = 'access("wakes {}", F_OK) = -1 ENOENT (No such file or directory)'
    lines = [
        "10 read(3, 0x1, 8) = 8",
        f"10 {mark.format('begin')}",
        "10 ppoll([{fd=4}], 1, NULL, NULL, 8 <unfinished ...>",
        "20 read(3, 0x1, 8) = 8",
        "11 write(4, 0x1, 8) = 8",
        "10 <... ppoll resumed>) = 1",
        "10 --- SIGCHLD {si_signo=SIGCHLD} ---",
        *(f"{rank} {mark.format(word)}" for rank, word in ((20, "begin"), (10, "end"))),
        *("20 sendmsg(5, 0x1, 0) = 4", "11 write(4, 0x1, 8) = 8", "30 write(4, 0x1, 8) = 8"),
    ]
    assert wakes.count_calls(lines, [[10, 11], [20]]) == 3


needs_no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="torch sees a GPU here; `make gpu-bench` runs the scripts on it"
)


@whole
def test_ranks_that_share_a_place_train_to_the_parameters_of_one(tmp_path: Path) -> None:
    rows, said = run("gpu_shared", tmp_path, *ON_CPU.split(), "--model", "resnet50-tiny", "--batch", "4")
    assert [(row["ranks"], row["contestant"], row["wrong"]) for row in rows] == [(2, "ceiling", ""), (2, "horo", "")]
    assert said.splitlines()[-1].startswith("ok    resnet50-tiny on one GPU, 2 ranks")


@needs_no_gpu
def test_without_a_gpu_a_script_says_so_and_ends_well(tmp_path: Path) -> None:
    script, file = "gpu_step", tmp_path / "out.json"
    done = start([sys.executable, str(FOLDER / f"{script}.py"), "--json", str(file)])
    assert done.stdout == f"{script}.py: skipped: no GPU: torch {torch.__version__} sees none\n"
    assert not file.exists()
