"""The discovery of hosts: what answers mean, and that the script runs beside the event loop."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from jobs import wait_until

from horo.runner.agent.ranks import reap
from horo.runner.elastic import discovery
from horo.runner.elastic.discovery import Discovery, parse_answer
from horo.runner.hosts import HostsError, HostSpec
from horo.runner.loop import Loop


def test_lines_are_hosts_in_their_order() -> None:
    hosts, repeated = parse_answer("\n# all\nb:2\n  a # one\n\n", 3)
    assert list(hosts.values()) == [HostSpec("b", slots=2), HostSpec("a", slots=3)] and not repeated


def test_slots_of_a_host_that_is_there_twice_are_added_up() -> None:
    hosts, repeated = parse_answer("a:2\nb:1\na:3\n", None)
    assert hosts["a"].slots == 5 and list(hosts) == ["a", "b"] and repeated == ["a"]


def test_a_host_without_slots_reports_them_itself() -> None:
    assert parse_answer("a\n", None)[0] == {"a": HostSpec("a")}


def test_a_line_that_is_no_host_is_an_error() -> None:
    with pytest.raises(HostsError, match="--option"):
        parse_answer("--option\n", None)


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or waits for its parent."""
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


class Script:
    """A script that writes what is in a file, and what has come of it."""

    def __init__(self, folder: Path, loop: Loop) -> None:
        self.file = folder / "hosts"
        self.loop = loop
        self.found: list[list[str]] = []
        self.failures: list[str] = []
        self.warnings: list[str] = []
        self.discovery = self.of(f"cat {self.file}")
        loop.on_signal(signal.SIGCHLD, lambda _number: reap([self.discovery.on_child]))

    def of(self, words: str) -> Discovery:
        return Discovery(
            self.loop,
            words,
            os.environ,
            slots_per_host=None,
            found=lambda hosts: self.found.append([f"{each.name}:{each.slots}" for each in hosts]),
            failed=self.failures.append,
            say=self.warnings.append,
        )

    def answer(self, *answers: str) -> None:
        """The script gives each of the answers, once."""
        for answer in answers:
            self.file.write_text(answer)
            if self.discovery.pid is None:
                self.discovery.run()
            self.end()

    def end(self) -> None:
        """Waits until the script has ended."""
        self.loop.run_until(lambda: self.discovery.pid is None)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    monkeypatch.setattr(discovery, "_EVERY_S", 1000.0)
    with closing(Loop()) as loop:
        yield Script(tmp_path, loop)


def test_a_host_that_comes_is_there_at_once(script: Script) -> None:
    script.answer("a:1", "a:1", "a:1\nb:2")
    assert script.found == [["a:1"], ["a:1", "b:2"]]


def test_a_host_has_gone_once_two_answers_are_without_it(script: Script) -> None:
    script.answer("a:1\nb:2", "a:1", "a:1\nb:2", "a:1", "a:1")
    assert script.found == [["a:1", "b:2"], ["a:1"]]


def test_so_have_slots(script: Script) -> None:
    script.answer("a:4", "a:2", "a:4", "a:2", "a:3", "a:2")
    assert script.found == [["a:4"], ["a:3"]]


def test_nothing_at_all_is_an_answer(script: Script) -> None:
    script.answer("", "a:1", "", "")
    assert script.found == [[], ["a:1"], []]


def test_the_first_run_has_to_succeed(script: Script) -> None:
    script.discovery = script.of("echo no such cluster >&2; exit 3")
    script.discovery.run()
    script.end()
    assert len(script.failures) == 1 and script.failures[0].endswith("ended with code 3: no such cluster")


def test_the_last_answer_stays_when_a_later_run_fails(script: Script) -> None:
    script.answer("a:1")
    script.file.unlink()
    for _ in range(2):
        script.discovery.run()
        script.end()
    assert script.found == [["a:1"]] and not script.failures
    assert len(script.warnings) == 1 and "the hosts stay as they were" in script.warnings[0]
    script.answer("a:1\n-x")
    assert len(script.warnings) == 1
    script.answer("a:1", "a:1\n-x")
    assert len(script.warnings) == 2 and "writes a line that is no host: '-x'" in script.warnings[1]


def test_a_script_that_does_not_end_is_killed_with_what_it_has_started(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_TIMEOUT_S", 0.5)
    child = script.file.with_name("child")
    script.discovery = script.of(f"sleep 1000 & echo $! > {child}; wait")
    script.discovery.run()
    script.end()
    assert "has not ended within 0.5 s" in script.failures[0]
    wait_until(lambda: has_ended(int(child.read_text())), "the end of the child")


def test_what_the_script_leaves_behind_does_not_delay_its_answer_and_is_killed(script: Script) -> None:
    child = script.file.with_name("child")
    script.discovery = script.of(f"echo a:1; sleep 1000 & echo $! > {child}")
    script.discovery.run()
    script.end()
    assert script.found == [["a:1"]]
    wait_until(lambda: has_ended(int(child.read_text())), "the end of the child")


def test_a_script_that_cannot_be_killed_is_left(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_KILLED_S", 0.1)
    monkeypatch.setattr(Discovery, "_kill", lambda _discovery, _pid: None)
    script.discovery = script.of("exec sleep 1000")
    script.discovery.run()
    pid = script.discovery.pid
    assert pid is not None
    try:
        script.discovery.stop()
        script.end()
    finally:
        os.kill(pid, signal.SIGKILL)
    assert len(script.warnings) == 1 and f"process {pid}" in script.warnings[0]


def test_a_flood_is_no_answer(script: Script) -> None:
    script.discovery = script.of("head -c 3000000 /dev/zero")
    script.discovery.run()
    script.end()
    assert "writes more than 1 MiB" in script.failures[0]


def test_the_script_runs_again_by_itself(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_EVERY_S", 0.01)
    script.file.write_text("a:1")
    script.discovery.run()
    script.loop.run_until(lambda: len(script.found) == 1)
    script.file.write_text("a:1\nb:1")
    script.loop.run_until(lambda: len(script.found) == 2)
    script.discovery.stop()
    script.end()
