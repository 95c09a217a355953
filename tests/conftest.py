"""Around every run: a folder for what its processes leave behind, and what makes the tests run that were skipped."""

import gc
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from cases import some_of
from jobs import Flags, Hororun, make_remote_shell
from pytest import Config, Function, Item
from skips import ways_to_run

# Else a thread of numpy's that has nothing to do spins at the start of each process that imports numpy, for nearly a
# tenth of a second.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# What tests start imports torch at two thirds of the price: startup/sitecustomize.py says how.
_STARTUP = str(Path(__file__).with_name("startup"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_STARTUP, os.environ.get("PYTHONPATH")]))
# Else thousands of processes compile horo again, and each worker all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# What a program prints behind its last flush must not depend on the machine that runs the tests.
os.environ.pop("PYTHONUNBUFFERED", None)
hypothesis.settings.register_profile("horo", deadline=None)  # machines that do other things too make single calls slow
hypothesis.settings.load_profile("horo")


def pytest_configure(config: pytest.Config) -> None:
    """Everything that tests start has a ``TMPDIR`` of this run: many are killed, and what they leave goes at the end.

    Open MPI's mpirun fails where an earlier one with its process id was killed and left its folder.
    """
    # Of a background job of a script: what tests start would inherit it, and tests type Ctrl-C and Ctrl-\.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # it has that of the process that started it
    tempfile.gettempdir()  # remembered: this process and its workers go on with the folder that they were given
    folder = tempfile.TemporaryDirectory(prefix="horo-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    os.environ["TMPDIR"] = folder.name


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Thousands of tests are objects that stay to the end: no search for garbage looks at them again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: Config, items: list[Item]) -> None:
    """Of tests with many cases some run; `HORO_ALL_CASES=1`, `-k` and the name of a test take all.

    Tests that may take minutes start first, else the last worker has one alone.
    """
    longest = {item: mark.args[0] for item in items if (mark := item.get_closest_marker("timeout")) is not None}
    items.sort(key=lambda item: longest.get(item, 0) <= 300)
    if os.environ.get("HORO_ALL_CASES") == "1" or config.option.keyword or any("::" in each for each in config.args):
        return
    of_test: dict[str, list[Function]] = {}
    for item in items:
        if isinstance(item, Function) and hasattr(item, "callspec"):
            of_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: set[Item] = set()
    for cases in of_test.values():
        sanitizer = os.environ.get("HORO_SANITIZE", "")
        names = [mark.args[0] for mark in cases[0].iter_markers("parametrize")]
        rows = [each.replace(",", " ").split() if isinstance(each, str) else each for each in names]
        chosen = some_of([(case.name, case.callspec.params) for case in cases], sanitizer, rows)
        left_out |= {case for case in cases if case.name not in chosen}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def place_in_a_job() -> Iterator[None]:
    """A test whose process was a rank leaves neither its place nor its level of the log to the next."""
    yield
    os.environ.pop("HORO_RANK_PROCESS", None)
    logging.getLogger("horo").setLevel(logging.NOTSET)


@pytest.fixture
def hororun(tmp_path: Path) -> Iterator[Hororun]:
    """The launcher; hosts other than localhost are this one, through an agent. Ends what is left of its jobs."""
    launcher = Hororun(make_remote_shell(tmp_path))
    yield launcher
    launcher.clean_up()


@pytest.fixture
def flags(tmp_path: Path) -> Flags:
    folder = tmp_path / "flags"
    folder.mkdir()
    return Flags(folder)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    yield  # to pytest's own summary, which lists the reasons
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = [str(report.longrepr[2]) for report in skipped if isinstance(report.longrepr, tuple)]
    if reasons:
        terminalreporter.section("what makes skipped tests run")
        for line in ways_to_run(reasons):
            terminalreporter.line(line)
