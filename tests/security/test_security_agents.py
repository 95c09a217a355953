"""Hostile words: what agents and ranks send is right or refused; none ends hororun, holds it up or changes its code."""

import json
import os
import signal
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import Hororun, make_remote_shell

from horo import __version__
from horo.runner.agent import checks
from horo.runner.agent.machine import Binding
from horo.runner.agent.protocol import MAGIC, Kind, Message, MessageError, encode, encode_json
from horo.runner.agent.rank_reports import Note, NoteReader
from horo.runner.agent.ranks import Exited, NotStarted, Started
from horo.runner.config import Job, JobError
from horo.runner.hosts import HostSpec
from horo.runner.job.output import LineSplitter, Writer
from horo.runner.job.remote import RemoteHost
from horo.runner.job.report import Ending, awaited, report, root_cause
from horo.runner.loop import Loop

INFO = {
    "version": __version__, "python": "3.11.1", "cores": 4, "gpus": 0, "pid": 5, "connection": "", "network": "n",
    "free_port": 4000
}  # fmt: skip
ENDED = {"code": 0, "signal": 0, "asked": False, "overdue": False}
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
names = [*INFO, *ENDED, "number", "bound", "message", "error", "port", "addresses", "failures"]
objects = st.dictionaries(st.sampled_from(names), values) | values
payloads = objects.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40)


def message(kind: Kind, value: object, rank: int = 0) -> Message:
    return Message(kind, rank, json.dumps(value).encode())


@given(st.sampled_from(Kind), st.integers(0, 2**32 - 1), payloads)
def test_any_payload_is_right_or_refused(kind: Kind, rank: int, payload: bytes) -> None:
    message = Message(kind, rank, payload)
    for check in (
        checks.version, checks.host_info, checks.failure, checks.listening, checks.reached, checks.signalled
    ):  # fmt: skip
        try:
            check(message)
        except MessageError as error:
            assert str(error).isprintable()
    for about in (checks.started, checks.exited, checks.not_started):
        try:
            assert about(message, {0, 1}).rank in (0, 1)
        except MessageError as error:
            assert str(error).isprintable()


def test_what_agents_say_is_taken() -> None:
    assert checks.host_info(message(Kind.HOST_INFO, INFO))["cores"] == 4
    assert checks.started(message(Kind.STARTED, {"pid": 7, "bound": "0-3"}, 2), {2}) == Started(2, 7, "0-3")
    assert checks.exited(message(Kind.EXITED, {**ENDED, "signal": 9}, 2), {2}) == Exited(2, 0, 9, False)
    failure = {"message": "no\x1b[2J", "code": 127}
    assert checks.not_started(message(Kind.NOT_STARTED, failure, 2), {2}) == NotStarted(2, "no\\x1b[2J", 127)
    assert checks.failure(message(Kind.FAILED, {"message": "no\x1b[2J", "code": 70})) == ("no\\x1b[2J", 70)
    assert checks.remained(message(Kind.REMAINED, {"processes": ["7 (a\x1b[2J)"]})) == ("7 (a\\x1b[2J)",)
    known = message(Kind.HOST_INFO, {**INFO, "connection": "10.0.0.1 5 10.0.0.2 22"})
    assert checks.host_info(known)["connection"] == "10.0.0.1 5 10.0.0.2 22"
    unknown = message(Kind.HOST_INFO, {**INFO, "connection": "UNKNOWN 5 UNKNOWN 22"})
    assert checks.host_info(unknown)["connection"] == ""


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Kind.HOST_INFO, {**INFO, "cores": 0}),
        (Kind.HOST_INFO, {**INFO, "cores": "4"}),
        (Kind.HOST_INFO, {**INFO, "gpus": 1 << 40}),
        (Kind.HOST_INFO, {**INFO, "free_port": 65536}),
        (Kind.HOST_INFO, {**INFO, "free_port": True}),
        (Kind.EXITED, {**ENDED, "code": 256}),
        (Kind.EXITED, {**ENDED, "signal": -9}),
        (Kind.EXITED, {**ENDED, "asked": 1}),
        (Kind.FAILED, {"message": "all is well", "code": 0}),
        (Kind.LISTENING, {"error": "", "code": 70, "port": 1, "addresses": ["name.invalid"]}),
        (Kind.REACHED, {"failures": {"h": 1}}),
        (Kind.REMAINED, {"processes": [7]}),
        (Kind.REMAINED, {"processes": "7"}),
    ],
)
def test_a_number_out_of_range_or_of_another_type_is_refused(kind: Kind, value: object) -> None:
    check = {
        Kind.HOST_INFO: checks.host_info, Kind.FAILED: checks.failure, Kind.LISTENING: checks.listening,
        Kind.REACHED: checks.reached, Kind.REMAINED: checks.remained,
        Kind.EXITED: lambda message: checks.exited(message, {0})
    }[kind]  # fmt: skip
    with pytest.raises(MessageError, match=f"a {kind.name} message has "):
        check(message(kind, value))


class Launcher:
    """A ``RemoteLauncher`` whose agent is a script."""

    name = "ssh"
    program = sys.executable
    ends_on_sigterm = False
    unset = ()

    def extra_variables(self, _environment: dict[str, str]) -> dict[str, str]:
        return {}

    def __init__(self, said: Path) -> None:
        self._said = said

    def command(self, _host: HostSpec) -> list[str]:
        return ["sh", "-c", f"cat {self._said}; exec sleep 60"]

    def environment(self, environ: dict[str, str]) -> dict[str, str]:
        return dict(environ)

    def cause(self, lines: list[str]) -> str:
        return lines[-1] if lines else ""

    def explain_failure(self, host: str, code: int, _stderr: bytes) -> JobError:
        return JobError(f"{host} {code}")


GOOD = MAGIC + encode_json(Kind.HOST_INFO, INFO)
NONSENSE = {
    "deep": MAGIC + encode(Kind.HOST_INFO, 0, b"[" * 100000),
    "digits": MAGIC + encode(Kind.HOST_INFO, 0, b'{"version": ' + b"9" * 5000 + b"}"),
    "types": MAGIC + encode_json(Kind.HOST_INFO, {**INFO, "cores": [4]}),
    "missing": MAGIC + encode_json(Kind.HOST_INFO, {"version": __version__}),
    "twice": GOOD + encode_json(Kind.HOST_INFO, INFO),
    "for-agents": GOOD + encode(Kind.KILL),
    "kill-all": GOOD + encode_json(Kind.SIGNALLED, {"number": 9}),
    "unasked": GOOD + encode_json(Kind.REACHED, {"failures": {}}),
    "rank-of-another-host": GOOD + encode(Kind.STDOUT, 1, b"I am rank 1\n"),
    "end-of-another": GOOD + encode_json(Kind.EXITED, ENDED, 1),
    "ends-twice": GOOD + encode_json(Kind.EXITED, ENDED, 0) * 2,
    "starts-twice": GOOD + encode_json(Kind.STARTED, {"pid": 5, "bound": ""}, 0) * 2,
    "fails-alone": GOOD + encode_json(Kind.NOT_STARTED, {"message": "no", "code": 127}, 0),
    "no-message": GOOD + b"\xff" * 100,
}


@pytest.mark.parametrize("said", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_ends_the_connection_with_a_sentence_that_names_the_host(tmp_path: Path, said: bytes) -> None:
    (tmp_path / "said").write_bytes(said)
    loop = Loop()
    events: list[object] = []
    remote = RemoteHost(loop, HostSpec("h7"), events.append, lambda: None)

    def reap(_number: int) -> None:
        pid, status = os.waitpid(-1, os.WNOHANG)
        remote.on_child(pid, status)

    try:
        loop.on_signal(signal.SIGCHLD, reap)
        late: list[bool] = []
        loop.call_later(30, lambda: late.append(True))
        remote.connect(Launcher(tmp_path / "said"), host_timeout_s=60)
        remote.send_job(Job(1, ("true",)), {}, {0: {}}, mark="m", binding=Binding())
        loop.run_until(lambda: remote.finished or bool(late))
    finally:
        loop.close()
    assert remote.finished
    assert str(remote.error).startswith("host h7: the agent sent an invalid message: ")
    assert str(remote.error).isprintable()
    assert not any(getattr(event, "rank", 0) for event in events)


def test_what_ssh_and_agents_say_moves_no_cursor(hororun: Hororun, tmp_path: Path) -> None:
    """Neither ssh's last words nor an agent's version nor its sentence have their control characters in hororun's."""
    evil = "\x1b]0;title\x07\x9b2J\x08\u202e"
    says = "cat said; exec cat"
    said = {"ssh": f"printf '%s\\n' 'no route{evil}' >&2; exit 255", "version": says, "failed": says}
    messages = {
        "version": MAGIC + encode_json(Kind.HOST_INFO, {**INFO, "version": f"9.9{evil}\ud800\nhororun: all is well"}),
        "failed": GOOD + encode_json(Kind.FAILED, {"message": f"no{evil}\ud800\nhororun: all is well", "code": 70}),
    }
    for case, script in said.items():
        hororun.remote_shell = make_remote_shell(tmp_path, f"cd {tmp_path}\n{script}")
        (tmp_path / "said").write_bytes(messages.get(case, b""))
        done = hororun.run("-np", "1", "true", where="one:1")
        assert done.returncode in (69, 70, 78), done.stderr
        assert done.stderr.removesuffix("\n").isprintable(), (case, done.stderr)
        assert "\\x1b]0;title\\x07\\x9b2J" in done.stderr, case


DIGITS = b"9" * 5000


@pytest.mark.parametrize("digits", [DIGITS, b"9" * 12, b"7"])
def test_a_rank_that_points_at_a_number_which_no_rank_has_is_the_cause_itself(digits: bytes) -> None:
    ending = Ending(0, "h", code=3, stderr_tail=b"PeerLostError: rank " + digits + b" is gone\n")
    other = Ending(1, "h", signal=15, asked=True)
    assert root_cause([ending, other]) == ending
    assert b"exited with code 3" in report(ending, [ending, other])
    awaited([ending, other], {})


@given(st.binary(max_size=300) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_any_note_is_taken_or_passed_over(line: bytes | str) -> None:
    reader = NoteReader()
    reader.feed((line.encode() if isinstance(line, str) else line) + b"\n")
    for name in ("joined", "error", "where", "points_at"):
        reader.feed(b'{"%s": %s}\n' % (name.encode(), line.encode() if isinstance(line, str) else b"[]"))
    ending = Ending(0, "h", code=3, note=reader.note)
    assert root_cause([ending]) == ending
    report(ending, [ending])


@pytest.mark.parametrize(
    "line",
    [b"[" * 60000, b'{"points_at": ' + DIGITS + b"}", b'{"points_at": true}', b'{"points_at": -1}', b'{"x": NaN}'],
    ids=["deep", "digits", "bool", "negative", "nan"],
)
def test_a_note_that_is_none_is_passed_over(line: bytes) -> None:
    reader = NoteReader()
    reader.feed(line + b"\n")
    assert reader.note == Note()
    reader.feed(b'{"joined": true}\n')
    assert reader.note == Note(joined=True)


FLOOD = (
    "import os, signal\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "if os.fork(): os._exit(5)\n"
    "while True: os.write(1, b'y\\n' * 2000)\n"
)
PIECE = b"ab"
COUNT = 20_000
TOLD_BYTES = PIECE * COUNT


@pytest.mark.parametrize("where", ["localhost:1", "one:1"], ids=["direct", "agent"])
def test_the_end_of_a_rank_is_known_although_what_it_left_behind_writes_on(hororun: Hororun, where: str) -> None:
    words = ["-np", "1", "--grace-seconds", "0.3", sys.executable, "-S", "-c", FLOOD]
    with Path(os.devnull).open("wb") as nowhere:
        done = hororun.run(*words, where=where, stdout=nowhere)
    assert done.returncode == 5
    assert "exited with code 5" in done.stderr


def held_bytes(base: int) -> int:
    return tracemalloc.get_traced_memory()[0] - base


def test_a_line_of_many_small_writes_is_held_once() -> None:
    splitter = LineSplitter()
    tracemalloc.start()
    try:
        base = tracemalloc.get_traced_memory()[0]
        for _ in range(COUNT):
            splitter.feed(bytearray(PIECE))
        assert held_bytes(base) < 2 * len(TOLD_BYTES)
    finally:
        tracemalloc.stop()
    assert splitter.finish()[0].text == TOLD_BYTES


@pytest.mark.parametrize("streams", [1, 2])
def test_what_is_queued_counts_with_what_it_costs(streams: int) -> None:
    """A pipe that nobody reads takes 64 KiB; the rest of many small writes to it, and between two, waits in memory."""
    pipes = [os.pipe() for _ in range(streams)]
    writer = Writer(lambda: None)
    for _, fd in pipes:
        writer.put(fd, b"x" * (1 << 20))
    tracemalloc.start()
    try:
        base = tracemalloc.get_traced_memory()[0]
        put = 0
        while not writer.full and put < COUNT:
            writer.put(pipes[put % streams][1], bytes(bytearray(PIECE)))
            put += 1
        held = held_bytes(base)
        counted = writer._pending_bytes - streams * (1 << 20)
        assert held < (4 * len(TOLD_BYTES) if streams == 1 else 3 * counted)
    finally:
        tracemalloc.stop()
    for read_fd, _ in pipes:
        os.close(read_fd)  # ends the writer's waiting
