"""The figures of a trace; the trace itself takes a build of the whole core."""

from __future__ import annotations

import sys

from example_runs import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import call_trace


def test_figures_of_a_trace() -> None:
    entered = (("run", "context.c"), ("add", "base/map.c"), ("find", "base/map.c"), ("run", "context.c"))
    trace = call_trace.Trace((*entered, ("run", "engine/drive.c")))
    assert trace.figures() == {"calls": 5, "functions": 4, "files": 3, "changes of file": 3}
    assert trace.listing() == ["  context.c: run x2", "  base/map.c: add, find", "  engine/drive.c: run"]
