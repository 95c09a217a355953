"""The end of every run: what makes the tests run that were skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from skips import ways_to_run


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    yield  # to pytest's own summary, which lists the reasons
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = [str(report.longrepr[2]) for report in skipped if isinstance(report.longrepr, tuple)]
    if reasons:
        terminalreporter.section("what makes skipped tests run")
        for line in ways_to_run(reasons):
            terminalreporter.line(line)
