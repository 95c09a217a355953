"""The agent, spoken to directly, and its messages; hosts that a job names, and those that it cannot use."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jobs import Hororun, make_remote_shell, marked_processes

from horo import __version__
from horo.runner.agent.protocol import MAGIC, Kind, Message, MessageError, MessageReader, encode, encode_json
from horo.runner.network import listen, unreachable


class Agent:
    """One agent and the launcher's side of its pipes."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "horo.runner.agent"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
        self._reader = MessageReader(magic=True)
        self._messages: list[Message] = []

    def send(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)

    def message(self, *kinds: Kind) -> Message:
        """The next message of one of the kinds."""
        assert self.process.stdout is not None
        while True:
            while self._messages:
                message = self._messages.pop(0)
                if message.kind in kinds:
                    return message
            data = os.read(self.process.stdout.fileno(), 65536)
            assert data, f"the agent ended before {kinds}"
            self._messages += self._reader.feed(data)

    def line(self) -> bytes:
        """The next line of a rank."""
        said = b""
        while not said.endswith(b"\n"):
            said += self.message(Kind.STDOUT).payload
        return said

    def job(self, script: str = "exec sleep 300", **changed: object) -> None:
        value = {
            "host": "h", "mark": f"test.{os.getpid()}.{id(self)}", "marks_before": [], "cwd": "/",
            "command": ["sh", "-c", script],
            "environment": {}, "unset": [], "ranks": {"0": {}}, "grace_s": 0.2, "silence_s": 30.0, "master_port": 0,
            "binding": {"threads_set": False},
        }  # fmt: skip
        self.send(encode_json(Kind.JOB, {**value, **changed}))

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        self.process.wait(30)


@pytest.fixture
def agent() -> Iterator[Agent]:
    one = Agent()
    yield one
    one.close()


def test_it_runs_a_rank_and_sends_its_output_before_its_end(agent: Agent) -> None:
    agent.job("echo out; echo err >&2; exit 5")
    seen = [agent.message(Kind.STDOUT, Kind.STDERR, Kind.EXITED) for _ in range(3)]
    assert sorted(message.payload for message in seen[:2]) == [b"err\n", b"out\n"]
    assert seen[2].json() == {"code": 5, "signal": 0, "asked": False, "overdue": False}
    assert agent.process.wait(30) == 0


def test_ranks_do_not_find_what_they_shall_not(agent: Agent) -> None:
    agent.job(environment={"PATH": "/given"}, unset=["PATH", "HO*"], command=["/bin/sh", "-c", "echo $PATH.$HOME."])
    assert agent.message(Kind.STDOUT).payload == b"/given..\n"


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("is_elastic", [False, True])
def test_it_ends_its_ranks_when_nobody_listens_any_more(agent: Agent, is_elastic: bool) -> None:
    """Workers of an elastic job at once."""
    changed: dict[str, object] = {"ranks": {}, "grace_s": 600} if is_elastic else {}
    agent.job("trap '' TERM; while :; do sleep 0.1; done", **changed)
    if is_elastic:
        agent.send(encode_json(Kind.START, {"slot": 0, "environment": {}}, 0))
    pid = agent.message(Kind.STARTED).json()["pid"]
    agent.process.stdin.close()  # type: ignore[union-attr]
    assert agent.process.wait(30) == 0
    assert gone(pid)


def test_it_ends_its_ranks_on_sigterm_and_says_so(agent: Agent) -> None:
    agent.job()
    agent.message(Kind.STARTED)
    agent.process.terminate()
    assert "SIGTERM came to the agent" in agent.message(Kind.FAILED).json()["message"]
    assert agent.message(Kind.EXITED).json() == {"code": 0, "signal": 15, "asked": True, "overdue": False}
    assert agent.process.wait(30) == 0


@pytest.mark.parametrize(
    ("changed", "fact"),
    [
        ({"cwd": "/no/such/folder"}, "no directory /no/such/folder"),
        ({"command": ["no-such-command"]}, "command not found on h: 'no-such-command'"),
        ({"command": ["x\0y"]}, "cannot be started"),
        ({"ranks": {"zero": {}}}, "an invalid message"),
        ({"ranks": None}, "an invalid message"),
        ({"command": []}, "an invalid message"),
        *(
            ({"ranks": {}, "start": start}, "an invalid message")
            for start in ({"slot": "x", "environment": {}}, {"slot": 0}, {"slot": 0, "environment": {"A": 1}})
        ),
    ],
)
def test_it_says_why_a_job_or_a_worker_cannot_run(agent: Agent, changed: dict[str, object], fact: str) -> None:
    start = changed.pop("start", None)
    agent.job(**changed)
    if start is not None:
        agent.send(encode_json(Kind.START, start, 0))
    assert fact in agent.message(Kind.FAILED).json()["message"]
    assert agent.process.wait(30) == 0


def test_what_an_agent_before_has_left_is_gone_before_a_worker_starts(agent: Agent) -> None:
    mark = f"before.{os.getpid()}"
    with subprocess.Popen(["sleep", "300"], env={**os.environ, "HORO_HOST_MARK": mark}) as left:
        agent.job(ranks={}, marks_before=["none", mark])
        agent.send(encode_json(Kind.START, {"slot": 0, "environment": {}}, 1))
        agent.message(Kind.STARTED)
        assert left.wait(30) == -9
    agent.send(encode(Kind.TERMINATE))
    assert agent.process.wait(30) == 0


SHOW_MEMORY = """
memory=/proc/self/fd/${HORO_COMMIT_FD%:*}
head -c 3 $memory; printf %s $HORO_WORKER.. | dd of=$memory conv=notrunc 2> /dev/null
sh -c 'setsid sleep 300 & echo "of $HORO_WORKER $WHO" $!'; exec sleep 300
"""


@pytest.mark.parametrize("at_once", [True, False])
def test_workers_of_an_elastic_job_come_and_go_and_their_slot_keeps_its_memory(agent: Agent, at_once: bool) -> None:
    agent.job(SHOW_MEMORY, ranks={}, mark="this", environment={"HORO_HOST_MARK": "this"})
    agent.send(encode_json(Kind.START, {"slot": 3, "environment": {"WHO": "a"}}, 7))
    assert agent.message(Kind.STARTED).rank == 7
    line = agent.line()
    assert line.startswith(b"\0\0\0of 7 a ")
    left = int(line.split()[-1])
    agent.send(encode_json(Kind.END, {"at_once": at_once}, 7))
    ended = agent.message(Kind.EXITED)
    assert (ended.rank, ended.json()["signal"], ended.json()["asked"]) == (7, 9 if at_once else 15, False)
    assert not marked_processes("HORO_WORKER=7").keys() & {left}  # before the slot is used again
    agent.send(encode_json(Kind.START, {"slot": 3, "environment": {"WHO": "b"}}, 9))
    assert agent.line().startswith(b"7..of 9 b ")
    agent.send(encode(Kind.TERMINATE))
    assert agent.message(Kind.EXITED).rank == 9
    assert agent.process.wait(30) == 0


def test_a_worker_that_does_not_end_in_its_grace_time_is_killed(agent: Agent) -> None:
    agent.job("trap '' TERM; echo here; while :; do sleep 0.1; done", ranks={})
    agent.send(encode_json(Kind.START, {"slot": 0, "environment": {}}, 0))
    agent.line()
    agent.send(encode_json(Kind.END, {"at_once": False}, 0))
    assert agent.message(Kind.EXITED).json()["signal"] == 9


def test_a_worker_that_cannot_start_is_reported_and_the_agent_stays(agent: Agent) -> None:
    agent.job(ranks={}, command=["no-such-command"])
    for worker in (1, 2):
        agent.send(encode_json(Kind.START, {"slot": 0, "environment": {}}, worker))
        told = agent.message(Kind.NOT_STARTED)
        assert (told.rank, told.json()["code"]) == (worker, 127)
    agent.send(encode(Kind.TERMINATE))
    assert agent.process.wait(30) == 0


@pytest.mark.parametrize("comes_again", [True, False])
def test_sigterm_takes_the_workers_of_an_elastic_job_away_and_ends_those_that_stay(
    agent: Agent, comes_again: bool
) -> None:
    agent.job(ranks={})
    agent.send(encode_json(Kind.START, {"slot": 0, "environment": {}}, 7))
    pid = agent.message(Kind.STARTED).json()["pid"]
    agent.process.send_signal(signal.SIGTERM)
    agent.message(Kind.LEAVING)
    assert not gone(pid)
    if comes_again:  # else the grace time ends
        agent.process.send_signal(signal.SIGTERM)
    assert "SIGTERM came to the agent" in agent.message(Kind.FAILED).json()["message"]
    assert agent.message(Kind.EXITED).json()["signal"] == signal.SIGTERM
    assert agent.process.wait(30) == 0


def test_it_sends_signs_of_life_while_its_ranks_are_silent(agent: Agent) -> None:
    agent.job()
    agent.message(Kind.STARTED)
    for _ in range(2):
        agent.message(Kind.PING)


def python_that(tmp_path: Path, code: str) -> str:
    """A stand-in for the remote Python that runs ``code`` before the agent."""
    path = tmp_path / "python"
    run = "import runpy; runpy.run_module('horo.runner.agent', run_name='__main__', alter_sys=True)"
    path.write_text(f"#!{sys.executable}\nimport sys\n{code}\n{run}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("code", "exit_code", "fact"),
    [
        ("import horo.version; horo.version.__version__ = '9.9'", 78, f"has horo 9.9 but this host has {__version__}"),
        ("sys.modules['horo'] = None", 78, "has no module horo"),
        (
            "sys.stdout.write('\\nhororun agent 1\\nwhat?' * 9); sys.stdout.flush()",
            70,
            "the agent sent an invalid message",
        ),
        ("sys.exit(3)", 70, "the agent ended with code 3"),
        ("import os; os.kill(os.getpid(), 11)", 70, "the agent ended with code 139"),
    ],
)
def test_a_wrong_agent_is_explained(hororun: Hororun, tmp_path: Path, code: str, exit_code: int, fact: str) -> None:
    done = hororun.run("-np", "2", "--remote-python", python_that(tmp_path, code), "true", where="localhost:1,one:1")
    assert done.returncode == exit_code
    assert fact in done.stderr
    assert "one" in done.stderr
    assert done.stderr.count("\n") == 1


def test_all_hosts_that_cannot_be_used_are_named_each_with_its_reason(hororun: Hororun, tmp_path: Path) -> None:
    script = """case "$*" in
        *" two "*) echo 'ssh: connect to host two port 22: No route to host' >&2; exit 255;;
        *" three "*) sleep 0.3; echo 'ssh: Could not resolve hostname three' >&2; exit 255;;
        *" four "*) echo '/p: No module named horo' >&2; exit 1;;
    esac"""
    hororun.remote_shell = make_remote_shell(tmp_path, script)
    done = hororun.run("-np", "5", "true", where="localhost:1,one:1,two:1,three:1,four:1")
    assert (done.returncode, done.stdout) == (69, "")
    assert [line.partition(": /")[0] for line in done.stderr.splitlines()] == [
        "hororun: 3 of 5 hosts cannot be used, and no rank was started",
        "hororun: cannot reach host two: ssh: connect to host two port 22: No route to host",
        "hororun: cannot reach host three: ssh: Could not resolve hostname three",
        "hororun: host four",
    ]


messages = st.lists(st.builds(Message, st.sampled_from(Kind), st.integers(0, 2**32 - 1), st.binary(max_size=300)))


@given(messages, st.binary(max_size=50), st.lists(st.integers(1, 40)))
def test_messages_survive_any_cutting_and_noise_before(sent: list[Message], noise: bytes, cuts: list[int]) -> None:
    assume((noise + MAGIC).find(MAGIC) == len(noise))
    stream = noise + MAGIC + b"".join(encode(*message) for message in sent)
    reader = MessageReader(magic=True)
    got: list[Message] = []
    for size in [*cuts, len(stream)]:
        got += reader.feed(stream[:size])
        stream = stream[size:]
    assert not reader.waiting
    assert got == sent


def test_every_message_ends_its_line_in_time_and_bytes_that_are_no_text_survive() -> None:
    message = encode(Kind.STDOUT, 3, b"no end")
    assert message.endswith(b"\n")
    with pytest.raises(MessageError, match="does not end where it should"):
        MessageReader(magic=False).feed(message[:-1] + b"x")
    value = {"X": b"\xff\xfe".decode("utf-8", "surrogateescape")}
    assert Message(Kind.JOB, 0, encode_json(Kind.JOB, value)[9:-1]).json() == value
    reader = MessageReader(magic=True)
    with pytest.raises(MessageError):
        for _ in range(40):
            reader.feed(b"x" * 65536)


def test_hosts_that_are_well_are_a_line_each(hororun: Hororun) -> None:
    done = hororun.run("--check-hosts", where="localhost,one,two:3")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["localhost", "one", "two"]
    assert all(f": ok: horo {__version__}, Python {sys.version.split()[0]}, " in line for line in lines)


def test_every_host_that_is_not_is_told_why(hororun: Hororun, tmp_path: Path) -> None:
    script = """case "$*" in
        *" two "*) echo 'ssh: connect to host two port 22: No route to host' >&2; exit 255;;
    esac"""
    hororun.remote_shell = make_remote_shell(tmp_path, script)
    done = hororun.run("--check-hosts", where="one,two")
    assert done.returncode == 69
    one, two = done.stdout.splitlines()
    assert one.startswith("one: ok: ")
    assert two == "two: cannot reach host two: ssh: connect to host two port 22: No route to host"
    hororun.remote_shell = make_remote_shell(tmp_path, "exec sleep 60")
    done = hororun.run("--check-hosts", "--start-timeout", "1", where="three")
    assert done.stdout.startswith("three: no answer within 1 s from three")
    hororun.remote_shell = "/no/such/ssh"
    done = hororun.run("-np", "1", "true", where="one:1")
    assert (done.returncode, "/no/such/ssh" in done.stderr) == (78, True)


def test_a_directory_that_is_not_there_is_named(hororun: Hororun, tmp_path: Path) -> None:
    python = python_that(tmp_path, "import pathlib; pathlib.Path.is_dir = lambda _: False")
    done = hororun.run("--check-hosts", "--remote-python", python, where="localhost,one", cwd=tmp_path)
    assert done.returncode == 78
    assert f"one: there is no directory {tmp_path}, in which ranks would start\n" in done.stdout


def test_an_interface_that_is_not_there_is_named(hororun: Hororun) -> None:
    done = hororun.run("--check-hosts", "--network-interfaces", "nosuch0", where="localhost,one")
    assert done.returncode == 69
    assert done.stdout.count("--network-interfaces nosuch0: none of them has an address") == 2


def test_peers_that_do_not_answer_are_told_apart() -> None:
    with closing(listen()) as listener, socket.socket() as closed:
        port = listener.getsockname()[1]
        closed.bind(("127.0.0.1", 0))  # bound, but not listening: nobody else gets the port
        shut = closed.getsockname()[1]
        peers = {
            "a": [("127.0.0.1", port)],
            "b": [("127.0.0.1", shut)],
            "c": [("127.0.0.1", shut), ("127.0.0.1", port)],
        }
        assert unreachable(peers, 20) == {"b": f"127.0.0.1 port {shut}: Connection refused"}


CORES = len(os.sched_getaffinity(0))
WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": ""}
SHOW = ["--no-prefix", "--", "sh", "-c", "echo $HOROVOD_RANK $HOROVOD_HOSTNAME"]


def test_hosts_that_get_no_rank_are_named_where_slots_were_left_open(hororun: Hororun) -> None:
    done = hororun.run("-np", "1", "true", where="one,two,three:1")
    assert done.returncode == 0
    assert done.stderr.startswith("hororun: no rank runs on two, three: the hosts named before have slots for all")
    assert hororun.run("-np", "1", "true", where="one:1,two:1").stderr == ""
    done = hororun.run("-np", "2", "true", where="one,two,three")
    assert (done.returncode, done.stderr) == (0, "hororun: no rank runs on three: there are more hosts than ranks\n")


@pytest.mark.parametrize("where", ["one,two,three", "one,localhost,two"])
def test_every_host_gets_its_part_where_no_slots_are_said(hororun: Hororun, where: str) -> None:
    done = hororun.run("-np", "3", *SHOW, where=where, environment=WITHOUT_GPUS)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [f"{rank} {name}" for rank, name in enumerate(where.split(","))]


@pytest.mark.parametrize(
    ("where", "ranks"),
    [
        (None, ["localhost"] * 3),
        ("one,two", ["one"] * 3 + ["two"] * 3),
        ("one:1,localhost,two", ["one"] + ["localhost"] * 3 + ["two"] * 3),
    ],
    ids=str,
)
def test_without_a_number_each_slot_or_gpu_has_a_rank(hororun: Hororun, where: str | None, ranks: list[str]) -> None:
    if where is None:
        hororun.remote_shell = ""  # which is for remote hosts
    done = hororun.run(*SHOW, where=where, environment={"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"})
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [f"{rank} {host}" for rank, host in enumerate(ranks)]


@pytest.mark.parametrize("where", [None, "one"], ids=str)
def test_a_number_of_cores_is_no_number_of_ranks(hororun: Hororun, where: str | None) -> None:
    if where is None:
        hororun.remote_shell = ""
    done = hororun.run("true", where=where, environment=WITHOUT_GPUS)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("hororun: how many ranks? say -np N")


def test_what_needs_the_number_beforehand_asks_for_it(hororun: Hororun) -> None:
    words = ["--timeline-merge", "all.json", "--timeline-filename", "t-{rank}.json", "true"]
    done = hororun.run(*words, where="one", environment={"CUDA_VISIBLE_DEVICES": "0"})
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--timeline-merge needs the number of ranks before the job starts: say -np N" in done.stderr


def test_slots_that_only_the_host_knows_are_asked_of_it(hororun: Hororun) -> None:
    words = ["-np", str(CORES + 1), "--no-prefix", "--", "sh", "-c", "echo $HOROVOD_HOSTNAME"]
    done = hororun.run(*words, where="one,two:1,three:1", environment=WITHOUT_GPUS)
    assert sorted(done.stdout.split()) == ["one"] * CORES + ["two"]
    for where, there in (("one", CORES), ("one,two", 2 * CORES)):
        done = hororun.run("-np", str(there + 1), "true", where=where, environment=WITHOUT_GPUS)
        assert done.returncode == 2
        assert f"{there + 1} ranks but there are {there} slots" in done.stderr


def test_prefixes_are_as_wide_as_ranks_that_came_later_need(hororun: Hororun) -> None:
    gpus = ",".join(f"GPU-{number}" for number in range(11))
    done = hororun.run("sh", "-c", "echo here", where="one", environment={"CUDA_VISIBLE_DEVICES": gpus})
    assert sorted(done.stdout.splitlines()) == [f"[{rank:2}] here" for rank in range(11)], done.stderr
