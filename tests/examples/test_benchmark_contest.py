"""A contest ends in order or with a sentence, and leaves no process behind; its arithmetic is right."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from example_runs import ROOT

FOLDER = ROOT / "benchmarks"
LIMIT_SECONDS = 60.0

sys.path.insert(0, str(FOLDER))
import contest  # noqa: E402  (benchmarks/contest.py)
import peers  # noqa: E402  (benchmarks/peers.py)
import rounds  # noqa: E402  (benchmarks/rounds.py)

SOLO = peers.Peer("solo", "bare")
SLOW = [sys.executable, str(FOLDER / "allreduce.py"), "--peers", "horo"]
SLOW += ["--max", "4", "--rounds", "100000", "--turn-ms", "1"]


def solo(turn_limit_s: float = contest.TURN_LIMIT_S) -> contest.Contest:
    """Two ranks without any library, beside the probe's."""
    return contest.Contest([SOLO], 2, turn_limit_s=turn_limit_s)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_SECONDS:g} s: {what}"
        time.sleep(0.02)


def contestants_of(process: int, name: str = "") -> list[psutil.Process]:
    """The rank processes of one contestant (of all) among the descendants of a driver."""
    found = []
    for child in psutil.Process(process).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            words = child.cmdline()
            if any(word.endswith("contestant.py") for word in words[:2]) and (not name or name in words):
                found.append(child)
    return found


def has_begun(process: int) -> bool:
    """Whether rounds are being played: the probe sleeps before each of its turns, and seldom otherwise."""
    ranks = contestants_of(process, "probe")
    return bool(ranks) and ranks[0].num_ctx_switches().voluntary > 60


@pytest.fixture
def running() -> Iterator[subprocess.Popen[str]]:
    """A benchmark that would run for a long time; its rounds have begun."""
    with subprocess.Popen(SLOW, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as driver:
        try:
            until(lambda: driver.poll() is not None or has_begun(driver.pid), "rounds have begun")
            assert driver.poll() is None, driver.communicate()
            assert len(contestants_of(driver.pid)) == 4
            yield driver
        finally:
            driver.kill()


def end_of(driver: subprocess.Popen[str], left: list[psutil.Process]) -> tuple[int, str]:
    """Exit code and stderr, once the driver has ended; none of ``left`` may be there after it."""
    _, errors = driver.communicate(timeout=LIMIT_SECONDS)
    until(lambda: not any(process.is_running() for process in left), f"{left} are gone")
    return driver.returncode, errors


@pytest.mark.parametrize("name", ["horo", "probe"])
def test_a_killed_rank_ends_the_contest_with_a_sentence(running: subprocess.Popen[str], name: str) -> None:
    everybody = psutil.Process(running.pid).children(recursive=True)
    victim = contestants_of(running.pid, name)[1]
    victim.kill()
    code, errors = end_of(running, everybody)
    assert code == 1
    assert errors.startswith("allreduce.py: ")
    assert f"of {name} (process {victim.pid}) died" in errors or f"{name} ended with code" in errors


def test_a_signal_leaves_nothing(running: subprocess.Popen[str]) -> None:
    everybody = psutil.Process(running.pid).children(recursive=True)
    running.send_signal(signal.SIGINT)
    assert end_of(running, everybody) == (130, "")


def test_a_driver_that_is_killed_leaves_nothing(running: subprocess.Popen[str]) -> None:
    everybody = psutil.Process(running.pid).children(recursive=True)
    running.kill()
    end_of(running, everybody)


def test_a_turn_over_its_deadline_names_who_has_not_answered() -> None:
    expected = r"solo has not done prepare 'x' within 0\.5 s: ranks 0, 1 did not answer"
    with pytest.raises(contest.ContestError, match=expected), solo(turn_limit_s=0.5) as running:
        for rank in contestants_of(os.getpid(), "solo"):
            rank.suspend()
        running.prepare(SOLO, "probe", "x", {"descriptor": -1})


def test_what_a_workload_raises_is_told_with_rank_and_case() -> None:
    expected = r"rank \d of solo failed at prepare 'x': .*no_such_workload"
    with pytest.raises(contest.ContestError, match=expected), solo() as running:
        running.prepare(SOLO, "no_such_workload", "x", {})


def test_a_library_that_does_not_sleep_is_stopped_between_its_turns() -> None:
    restless = peers.Peer("solo", "bare", sleeps=False)
    with contest.Contest([restless], 2):
        ranks = contestants_of(os.getpid(), "solo")
        assert len(ranks) == 2
        until(lambda: all(rank.status() == psutil.STATUS_STOPPED for rank in ranks), "both are stopped")
    assert not any(rank.is_running() for rank in ranks)


def test_a_job_that_ends_at_once_is_told_with_its_last_words(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "mpirun").write_text("#!/bin/sh\necho no slots left\nexit 3\n")
    (folder / "mpirun").chmod(0o755)
    brief = peers.Peer("brief", "mpi", "mpirun", tmp_path)
    expected = r"brief ended with code 3 before it was ready\n +no slots left"
    with pytest.raises(contest.ContestError, match=expected), contest.Contest([brief], 2):
        pass


def test_a_peer_that_is_not_installed_is_told_how_to_get(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    absent = peers.Peer("Absent MPI", "mpi", "mpirun", tmp_path / "absent", how_to_get="make peers")
    assert peers.available([absent, peers.HORO]) == [peers.HORO]
    message = capsys.readouterr().err
    assert "Absent MPI does not take part: it is not installed in" in message
    assert "`make peers` does that" in message


def test_everybody_is_first_and_last_equally_often() -> None:
    four = [peers.Peer(name, "bare") for name in "abcd"]
    orders = [rounds.order_of(four, number) for number in range(8)]
    for place in range(4):
        assert sorted(order[place].name for order in orders) == sorted("abcd" * 2)


def test_ratios_are_taken_within_heats_and_by_state() -> None:
    fast = rounds.AREA_BYTES / rounds.SHARING_GBS / 1e3 / 2
    slow = fast * 4
    result = rounds.Result(rounds.Case("x", {}), {"horo": 1, "gloo": 1})
    for probes, horo, gloo in [
        ((fast, fast), 10.0, 20.0),
        ((fast, fast), 100.0, 400.0),
        ((slow, slow), 10.0, 90.0),
        ((fast, slow), 10.0, 10.0),
    ]:
        result.heats.append(rounds.Heat(probes, {"horo": contest.Turn(horo, []), "gloo": contest.Turn(gloo, [])}))
    assert result.states() == {"sharing": 2, "apart": 1, "changing": 1}
    assert result.ratio("gloo", state="sharing") == pytest.approx(3.0)
    assert result.ratio("gloo", state="apart") == pytest.approx(9.0)
    assert result.ratio("gloo") == pytest.approx(3.0)
    assert result.ratio("MPICH") is None
    assert result.median("horo", "sharing") == pytest.approx(55.0)


def test_a_turn_is_as_slow_as_its_slowest_rank() -> None:
    measured = contest.Turn(3.0, [{"calls_us": [1.0, 5.0], "cpu_s": 0.5}, {"calls_us": [3.0, 2.0], "cpu_s": 0.25}])
    assert measured.slowest_calls() == [3.0, 5.0]
    assert measured.total("cpu_s") == pytest.approx(0.75)
