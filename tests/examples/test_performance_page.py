"""The tables of docs/performance.md, made of results of known numbers, and pictures of terminals."""

import importlib
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pyte
import pytest
from measured import Document

Rows = list[dict[str, Any]]


@pytest.fixture
def chapters(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pictures = SimpleNamespace(Curve=lambda *_: None)
    pictures.draw_curves = pictures.draw_bars = lambda *_, **__: None
    monkeypatch.setitem(sys.modules, "pictures", pictures)
    monkeypatch.setitem(sys.modules, "chapters", None)  # so that the module made here goes afterwards
    del sys.modules["chapters"]
    return importlib.import_module("chapters")


def times(**micros: float) -> Rows:
    """Rows of three rounds each, by contestant."""
    return [
        {"contestant": name, "dtype": "float32", "ranks": 2, "states": ["sharing"] * 3, "rounds_us": [value] * 3}
        for name, value in micros.items()
    ]


def collectives() -> Rows:
    sizes = ((8, 1.0), (64, 1.0), (1024, 3.0), (4096, 3.0))
    return [
        {**row, "operation": operation, "bytes": size}
        for operation in ("alltoall", "broadcast")
        for size, peer in sizes
        for row in times(horo=2.0, MPICH=peer)
    ]


LINK = {"hosts": 2, "per_host": 1, "rate": "1gbit", "bytes": 64 << 20, "data_share": 0.95, "right": True}
LAYOUT = {
    "hosts": 2,
    "ranks": 8,
    "kind": "cached",
    "hops": 2,
    "hops_bound": 2,
    "wire_bytes": 29,
    "cpu_us_per_rank": 1.5,
}
LAYOUT |= {"memory_idle_bytes": 1024, "memory_used_bytes": 2048, "descriptors": 71}
MEMORY = {"what": "after init", "ranks": 2, "in_flight_bytes": 0, "allowed_bytes": 16 << 20}
TABLES: dict[str, tuple[Rows, list[str]]] = {
    "two_hosts": (
        [{**LINK, "contestant": "gloo"}, {**LINK, "contestant": "horo", "right": False}],
        ["| hosts | ranks per host | rate | tensor | gloo | horo |", "| 2 | 1 | 1gbit | 64 MiB | 0.95 | wrong |"],
    ),
    "negotiation": (
        [
            {**LAYOUT, "tensors": 1, "messages": 2, "latency_us": 64.0},
            {**LAYOUT, "tensors": 100, "messages": 71, "latency_us": 737.0, "hops": None},
            {**LAYOUT, "ranks": 64, "tensors": 1, "messages": 2, "latency_us": 64.0, "hops": 3},
            {**LAYOUT, "ranks": 64, "tensors": 100, "messages": 71, "latency_us": 737.0, "hops": None},
        ],
        ["| 2 | 8 | 2 | 2 | 71 | 29 | 29 | 64.0 us | 737 us | ", "| 2 | 64 | 3, not 2 | 2 | 71 | "],
    ),
    "footprint": (
        [
            {**MEMORY, "place": "one host", "extra_bytes": 3_055_616},
            {**MEMORY, "place": "a host per rank", "extra_bytes": 7 << 20},
        ],
        ["| what | in flight | one host | a host per rank | allowed |", "| after init | 0 | 2.91 | 7 | 16 |"],
    ),
    "training_step": (
        [{**row, "model": "mlp", "cpu_us": 442_000.0, "switches": 65.0} for row in times(ceiling=2e5, horo=2.5e5)],
        ["| mlp | horo | 250 (250 to 250) | 80.0 |  |  | 442 | 65 |"],
    ),
    "collectives": (
        collectives(),
        ["| 8 B | 2.00 us | **1.00 us** | 0.00 | 0.50 |\n| 1 KiB | **2.00 us** | 3.00 us | 0.26 | 1.50 |"],
    ),
}


@pytest.mark.parametrize("benchmark_name", TABLES)
def test_a_case_has_one_row_and_what_is_wrong_shows(chapters: ModuleType, benchmark_name: str) -> None:
    rows, wanted = TABLES[benchmark_name]
    document = Document(benchmark_name, {"benchmark": benchmark_name, "rows": rows, "options": {}})
    page = "\n".join(chapters.make(document, Path("performance")).lines)
    assert [line for line in wanted if line not in page] == [], page


def test_faster_peers_have_a_line_per_place(chapters: ModuleType) -> None:
    document = Document("collectives", {"benchmark": "collectives", "rows": collectives(), "options": {}})
    (line,) = chapters.make(document, Path("performance")).ahead
    assert line == "* float32, 2 ranks: alltoall 8 B to 64 B 2.00 (MPICH); broadcast 8 B to 64 B 2.00 (MPICH)"
    document = Document("allreduce", {"benchmark": "allreduce", "rows": collectives()[:8], "options": {}})
    (line,) = chapters.make(document, Path("performance")).ahead
    assert line == "* allreduce of float32, 2 ranks: 8 B to 64 B 2.00 (MPICH)"


def test_a_picture_has_the_texts_of_a_terminal_and_is_xml() -> None:
    picture = runpy.run_path(str(Path(__file__).resolve().parents[2] / "docs" / "screens.py"))["picture"]
    screen = pyte.Screen(40, 5)
    pyte.ByteStream(screen).feed("\x1b[36m[0]\x1b[0m a < b & █\r\n\r\nend".encode())
    texts = ElementTree.fromstring(picture(screen)).iter("{http://www.w3.org/2000/svg}text")
    assert ["".join(text.itertext()) for text in texts] == ["[0] a < b & █", "end"]
