"""What users see of a job while it runs: ``--live`` on a terminal and off it, ``--attach`` and ``--metrics-port``."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from unittest.mock import Mock

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import DEADLINE_S, Hororun, Launched, port_for_later, run_python, wait_until

from horo.runner.agent.rank_reports import NoteReader
from horo.runner.agent.rank_summary import RankSummary
from horo.runner.agent.ranks import Noted
from horo.runner.config import Job
from horo.runner.job.live import Progress, line
from horo.runner.job.metrics import exposition
from horo.runner.job.output import Printer
from horo.runner.job.watching import RanksSeen, Watching
from horo.runner.loop import Timer

MS = 1_000_000
COLUMNS, ROWS = 80, 30


def after(steps: int, waiting_ms: int = 10, **counts: int) -> RankSummary:
    """A rank with so many steps of 100 ms, of which it waits for some."""
    sums = {"measured": steps, "ns": 100 * MS * steps, "waiting": waiting_ms * MS * steps, "moving": 5 * MS * steps}
    return RankSummary(steps=steps, **{**sums, **counts})


def progress_of(*waiting_ms: int, **counts: int) -> Progress:
    progress = Progress()
    for rank, each in enumerate(waiting_ms):
        progress.update(rank, after(20, each, **counts), 0.0)
    return progress


# The line


def test_the_line_names_the_step_the_pace_and_the_late_rank_of_the_last_steps() -> None:
    progress = progress_of(30, 30, 0, peak=2 << 30)
    text = line(progress, 1.0, 200)
    assert text == "step 20 | 10 steps/s | waiting 20 % | rank 2 late by 30.0 ms | 2.0 GiB each | [▆▆█]"
    assert line(progress, 1.0, 200, plain=True).endswith(" | [668]")
    progress = progress_of(30, 30)
    assert progress.late() is None
    for second in range(1, 9):
        progress.update(0, after(20 + 10 * second, 30, waiting=600 * MS + second * 500 * MS), float(second))
        progress.update(1, after(20 + 10 * second, 30, waiting=600 * MS), float(second))
    late = progress.late()
    assert late is not None and late.rank == 1 and late.behind_s == pytest.approx(0.05)
    progress.ended(1)
    assert line(progress, 9.0, 200) == "step 100 | 10 steps/s"


@pytest.mark.parametrize("waiting", [(10, 10, 10), (10, 6, 10), (10,)])
def test_a_rank_is_late_only_if_that_costs_time(waiting: tuple[int, ...]) -> None:
    assert progress_of(*waiting).late() is None


def test_steps_that_do_not_end_are_told_with_the_place_of_each_rank() -> None:
    progress = progress_of(10, 10, 10)
    progress.update(1, after(20, within=21), 1.0)
    assert "no step" not in line(progress, 4.0, 200)
    assert line(progress, 90.0, 200) == "step 21 | no step for 1m 30s: ranks 0,2 after step 20, rank 1 in step 21"


def test_a_later_job_of_a_process_begins_anew_and_one_without_steps_has_no_line() -> None:
    progress = progress_of(10, 10)
    progress.update(0, after(2, 50), 1.0)
    assert progress.paces()[0].steps == 2
    assert line(Progress(), 0.0, 80) == ""
    starts = Progress()
    starts.update(0, RankSummary(within=1), 0.0)
    assert line(starts, 0.0, 80) == "step 1"


@given(st.integers(1, 120), st.integers(1, 70))
def test_the_line_fits(width: int, ranks: int) -> None:
    progress = progress_of(*range(ranks), peak=3 << 30)
    for now_s in (1.0, 500.0):
        assert len(line(progress, now_s, width)) <= width


# On a terminal

pieces = st.sampled_from([b"line\n", b"bar\r", b"\rlong bar " + 200 * b"#" + b"\r", b"half", b"\x1b[A2\r", b"\n"])
acts = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([1, 2]), pieces) | st.sampled_from([b"live", b"said"]))


class Terminal:
    """Shows what a printer writes; a terminal begins a new line at its left."""

    def __init__(self) -> None:
        self.screen = pyte.HistoryScreen(COLUMNS, ROWS, history=10_000)
        self.stream = pyte.ByteStream(self.screen)

    def write(self, _stream: int, data: bytes) -> None:
        self.stream.feed(data.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))

    @property
    def lines(self) -> list[str]:
        """All, also those that have left the screen."""
        above = ["".join(row[x].data for x in range(COLUMNS)) for row in self.screen.history.top]
        return [each.rstrip() for each in (*above, *self.screen.display)]


@given(acts)
def test_the_live_line_is_below_all_others_and_leaves_no_trace(happens: list[tuple[int, int, bytes] | bytes]) -> None:
    with_line, terminal = Terminal(), frozenset({1, 2})
    shown, printer = 1, Printer(with_line.write, 2, terminals=terminal)
    printer.show_live(b"live 1 " + 200 * b"=")
    plain: list[bytes] = []
    lines = Printer(lambda _stream, data: plain.append(data), 2)
    for each in happens:
        if each == b"live":
            shown += 1
            printer.show_live(b"live %d " % shown + 200 * b"=")
        elif each == b"said":
            printer.say(b"hororun: said\n")
            lines.say(b"hororun: said\n")
        else:
            rank, stream, data = each  # type: ignore[misc]
            printer.feed(rank, stream, data, 0.0)
            lines.feed(rank, stream, data, 0.0)
        rows = [row for row in with_line.lines if row]
        assert rows[-1].startswith(f"live {shown} ="), rows
        assert sum(row.startswith("live") or row.startswith("=") for row in rows) == 1
    printer.show_live(b"")
    assert not any(row.startswith("live") or "==" in row for row in with_line.lines)
    is_whole = re.compile(r"\[\d\] (half)*line|hororun: said")
    told = [row for row in b"".join(plain).decode().splitlines() if is_whole.fullmatch(row)]
    assert [row for row in with_line.lines if is_whole.fullmatch(row)] == told


def test_a_progress_bar_stays_above_the_line_and_goes_on_when_it_is_gone() -> None:
    terminal = Terminal()
    printer = Printer(terminal.write, 1, terminals=frozenset({1, 2}))
    printer.feed(0, 2, b"\r10%\r20%\r", 0.0)
    printer.show_live(b"live 1")
    assert [row for row in terminal.lines if row] == ["[0] 10%", "live 1"]
    printer.feed(0, 2, b"25%\r", 0.0)
    printer.feed(0, 1, b"loss\n", 0.0)
    printer.feed(0, 2, b"30%\r40%\r", 0.0)
    assert [row for row in terminal.lines if row] == ["[0] loss", "[0] 30%", "live 1"]
    printer.show_live(b"")
    assert [row for row in terminal.lines if row] == ["[0] loss", "[0] 30%"]
    printer.feed(0, 2, b"50%\n", 0.0)
    printer.close()
    assert [row for row in terminal.lines if row] == ["[0] loss", "[0] 50%"]


def test_an_inner_bar_is_drawn_in_its_place_below_the_outer_one() -> None:
    terminal = Terminal()
    printer = Printer(terminal.write, 1, terminals=frozenset({1, 2}))
    printer.show_live(b"live 1")
    printer.feed(0, 2, b"\router: 0%", 0.0)
    for percent in (10, 20, 30, 40):
        printer.feed(0, 2, b"\n\rinner: %d%%\x1b[A" % percent, 0.0)
    assert [row for row in terminal.lines if row] == ["[0] outer: 0%", "[0] inner: 30%", "live 1"]
    printer.feed(0, 2, b"\router: 1%\n", 0.0)
    assert [row for row in terminal.lines if row] == ["[0] outer: 0%", "[0] outer: 1%", "live 1"]


# Jobs: ranks without torch, which count as a rank does

LINE = "hororun: step 7 | 10 steps/s | waiting 15 % | rank 0 late by 30.0 ms | "

RANK = """
import os, sys, time
from horo.diagnostics.on_signal import show_stack_on_signal
from horo.diagnostics.page import Page
rank, flags = int(os.environ["HOROVOD_RANK"]), sys.argv[1]
show_stack_on_signal()
page = Page(os.environ["HORO_COUNTS_FD"])
page.begin(size=2, cores=2, ranks_here=2, via="shared memory")
def stands_here():
    while not os.path.exists(os.path.join(flags, "go")):
        print("\\r50%", end="\\r", file=sys.stderr, flush=True)
        time.sleep(0.01)
for step in range(1, 8):
    page.step_begins(step)
    page.step_ends(step, step - 1, 100_000_000 * (step - 1), 30_000_000 * (step - 1) * rank, 0, 0, 5 << 10, 4, 2)
print("rank", rank, "has come", flush=True)
stands_here()
print("\\r100%", file=sys.stderr, flush=True)
"""


@contextlib.contextmanager
def terminal_of(
    launch: Callable[[int], Launched],
) -> Iterator[tuple[Launched, Callable[[Callable[[str], object]], str]]]:
    """A job whose stdout and stderr are a terminal, and a function that reads until its text is right."""
    main, other = pty.openpty()
    fcntl.ioctl(main, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS + 40, 0, 0))
    launched = launch(other)
    os.close(other)
    screen = pyte.HistoryScreen(COLUMNS + 40, ROWS, history=1000)
    stream = pyte.ByteStream(screen)

    def read(is_right: Callable[[str], object]) -> str:
        deadline = time.monotonic() + DEADLINE_S
        while not is_right(text := "\n".join(row.rstrip() for row in screen.display)):
            assert time.monotonic() < deadline, text
            if select.select([main], [], [], 0.1)[0]:
                try:
                    stream.feed(os.read(main, 65536))
                except OSError:  # the other end is closed
                    text = "\n".join(row.rstrip() for row in screen.display)
                    assert is_right(text), text
        return text

    try:
        yield launched, read
    finally:
        os.close(main)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(RANK)
    return str(path)


def test_a_job_has_its_line_until_its_card(hororun: Hororun, where: str, script: str, tmp_path: Path) -> None:
    """Asked for by the option, and of agents by the variable."""
    environment = {"TERM": "xterm", "PYTHONIOENCODING": "utf-8", "LC_ALL": "C.UTF-8"}
    asked = ["--live"] if "localhost" in where else []
    if not asked:
        environment["HORO_LIVE"] = "1"
    words = ("-np", "2", *asked, "--summary", script, str(tmp_path))
    with terminal_of(lambda fd: hororun.start(*words, where=where, stdout=fd, stderr=fd, environment=environment)) as (
        job,
        read,
    ):
        read(re.compile(rf"^\[[01]\] 50%\n{re.escape(LINE)}.* MiB each \| \[█▆\]\n*\Z", re.MULTILINE).search)
        (tmp_path / "go").touch()
        text = read(lambda text: "  traffic  " in text)
        assert "hororun: step" not in text and "rank 0 has come" in text and "100%" in text
        assert "hororun: done in " in text
        job.process.wait(DEADLINE_S)
    job.nothing_is_left()


def test_a_line_that_nobody_wants_is_not_there(hororun: Hororun, script: str, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    done = hororun.run("-np", "2", "--live", script, str(tmp_path))
    assert done.returncode == 0 and "step" not in done.stderr and "\x1b" not in done.stderr


# --attach


def attach(*words: str, **options: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "horo.runner", "--attach", *words]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, **pipes)  # type: ignore[call-overload, no-any-return]


@contextlib.contextmanager
def started(hororun: Hororun, where: str, script: str, folder: Path) -> Iterator[Launched]:
    """A job of two ranks, which ends well after the block."""
    log = (folder / "out").open("wb")
    job = hororun.start("-np", "2", script, str(folder), where=where, stdout=log, stderr=subprocess.STDOUT)
    wait_until(lambda: (folder / "out").read_bytes().count(b"has come") == 2, "both ranks")
    try:
        yield job
    finally:
        (folder / "go").touch()
    assert job.process.wait(DEADLINE_S) == 0


def test_another_terminal_shows_the_line_and_the_stacks_of_a_running_job(
    hororun: Hororun, where: str, script: str, tmp_path: Path
) -> None:
    with started(hororun, where, script, tmp_path) as job:
        stacks = attach(str(job.process.pid), "--stacks")
        out, error = stacks.communicate(timeout=DEADLINE_S)
        assert stacks.returncode == 0, error
        shown = out.decode()
        for rank in (0, 1):
            assert re.search(rf"^\[{rank}\]   File .*train.py\", line \d+ in stands_here$", shown, re.MULTILINE), shown
        viewer = attach(str(job.process.pid))
        assert viewer.stdout is not None and viewer.stderr is not None
        assert viewer.stdout.readline().decode().startswith("step 7 | 10 steps/s | waiting 15 % | rank 0 late by ")
        with attach(str(job.process.pid)) as other:
            assert other.stdout is not None and other.stdout.readline().startswith(b"step 7 | ")
            other.send_signal(signal.SIGINT)
            assert other.wait(DEADLINE_S) == 130
        (tmp_path / "go").touch()
        assert viewer.wait(DEADLINE_S) == 0
        assert viewer.stderr.read().decode() == f"hororun: the job of process {job.process.pid} is over\n"
    late = attach(str(job.process.pid))
    _, error = late.communicate(timeout=DEADLINE_S)
    assert late.returncode == 69 and b"no hororun that can be attached to runs here under this number" in error


OTHER_USER = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
s = socket.socket(socket.AF_UNIX); s.settimeout(30)
s.connect(f"\\0horo/hororun/{sys.argv[1]}")
try:
    s.sendall(b"stacks\\n")
    print("got", s.recv(100))
except OSError as error:
    print("refused", error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_another_user_is_refused(hororun: Hororun, script: str, tmp_path: Path) -> None:
    with started(hororun, "localhost:2", script, tmp_path) as job:
        done = run_python("-c", OTHER_USER, str(job.process.pid), check=True)
        assert done.stdout == "got b''\n" or done.stdout.startswith("refused "), done.stdout
        assert b"stands_here" not in (tmp_path / "out").read_bytes()


def test_what_is_no_request_ends_the_connection_and_not_the_job(hororun: Hororun, script: str, tmp_path: Path) -> None:
    with started(hororun, "localhost:2", script, tmp_path) as job:
        for request in (b"watch\nmore", b"\xff", b"stacks!"):
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(DEADLINE_S)
                client.connect(f"\0horo/hororun/{job.process.pid}")
                client.sendall(request)
                with contextlib.suppress(ConnectionResetError):
                    assert client.recv(100) == b""


OTHER_END = """
import os, socket
listener = socket.socket(socket.AF_UNIX)
listener.bind(f"\\0horo/hororun/{os.getpid()}")
listener.listen()
print(os.getpid(), flush=True)
client, _ = listener.accept()
client.recv(100)
client.sendall(b"[0]   \\x1b]0;title\\x07 \\xe2\\x96\\x88\\n")
"""


def attach_to_other_end(*words: str, **options: object) -> tuple[int, bytes | None, bytes]:
    """The exit status of the view, its output and its errors."""
    with subprocess.Popen([sys.executable, "-c", OTHER_END], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        shown = attach(other.stdout.readline().strip(), *words, **options)
        return (shown.wait(DEADLINE_S), *shown.communicate())


@pytest.mark.parametrize("words", [(), ("--stacks",)])
def test_what_any_program_sends_moves_no_cursor_and_is_shown_in_any_locale(words: tuple[str, ...]) -> None:
    code, out, error = attach_to_other_end(*words, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert code == 0, error
    assert out == b"[0]   \\x1b]0;title\\x07 ?\n"


@pytest.mark.parametrize("words", [(), ("--stacks",)])
def test_a_reader_that_leaves_ends_the_view_without_a_word(words: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as stdout:
        code, _, error = attach_to_other_end(*words, stdout=stdout)
    assert (code, error) == (128 + signal.SIGPIPE, b"")


# --metrics-port

SAMPLE = re.compile(r'(horo_[a-z_]+)\{rank="(\d+)",host="((?:[^"\\]|\\.)*)"\} ([0-9.e+-]+)')


def test_the_page_follows_the_format_of_prometheus() -> None:
    page = exposition({1: after(20, peak=5), 0: after(10)}, {0: 'a"b\\c', 1: "b"}, "rank")
    typed: dict[str, str] = {}
    values: dict[tuple[str, str], float] = {}
    for row in page.splitlines():
        if row.startswith("# TYPE "):
            _, _, name, kind = row.split()
            assert name not in typed, "all samples of a metric stand together"
            typed[name] = kind
        elif not row.startswith("# HELP ") and not row.startswith("horo_info"):
            found = SAMPLE.fullmatch(row)
            assert found is not None, row
            assert found[1] == list(typed)[-1]
            values[found[1], found[2]] = float(found[4])
    assert page.endswith("\n") and r'host="a\"b\\c"' in page
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in typed.items())
    assert values["horo_steps_total", "1"] == 20 and values["horo_waiting_seconds_total", "1"] == pytest.approx(0.2)
    assert values["horo_resident_memory_bytes", "1"] == 5 and values["horo_step_seconds_total", "0"] == 1


def test_a_running_job_serves_its_metrics_here_alone(hororun: Hororun, where: str, script: str, tmp_path: Path) -> None:
    free_port = port_for_later()
    url = f"http://127.0.0.1:{free_port}"
    job = hororun.start("-np", "2", "--metrics-port", str(free_port), script, str(tmp_path), where=where)

    def text() -> str:
        with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(f"{url}/metrics", timeout=5) as page:
            assert page.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            return str(page.read().decode())
        return ""

    try:
        wait_until(lambda: 'horo_steps_total{rank="1"' in text(), "metrics of rank 1", every_s=0.1)
        assert re.search(r'^horo_waiting_seconds_total\{rank="1",host="\w+"\} 0\.18$', text(), re.MULTILINE)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/other", timeout=5)
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=5) as head:
            assert int(head.headers["Content-Length"]) > 1000 and head.read() == b""
        listening = Path("/proc/net/tcp").read_text()
        assert f"0100007F:{free_port:04X}" in listening and f"00000000:{free_port:04X}" not in listening
    finally:
        (tmp_path / "go").touch()
    done = job.finish()
    assert done.returncode == 0 and f"hororun: metrics at {url}/metrics\n" in done.stderr


NO_REQUESTS = [b"", b"GET / HTTP/1.1\r\nX: ", b"\0\xff\r\n\r\n", b"X" * 100_000]


def test_clients_that_ask_for_nothing_hold_up_neither_others_nor_the_end(
    hororun: Hororun, script: str, tmp_path: Path
) -> None:
    free_port = port_for_later()
    job = hororun.start("-np", "1", "--metrics-port", str(free_port), script, str(tmp_path), where="localhost:1")
    try:
        with contextlib.ExitStack() as others:
            wait_until(lambda: is_open(free_port), "the port", every_s=0.1)
            for number, asked in enumerate(NO_REQUESTS):
                for _ in range(40):
                    other = others.enter_context(socket.create_connection(("127.0.0.1", free_port), DEADLINE_S))
                    with contextlib.suppress(ConnectionError):
                        other.sendall(asked)
                with urllib.request.urlopen(f"http://127.0.0.1:{free_port}", timeout=4) as page:
                    assert page.read().startswith(b"# HELP horo_info"), number
            (tmp_path / "go").touch()
            assert job.finish().returncode == 0
    finally:
        (tmp_path / "go").touch()


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_a_port_that_is_taken_is_named_before_any_rank_starts(hororun: Hororun) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = hororun.run("-np", "1", "--metrics-port", str(port), "true")
    assert done.returncode == 2
    assert done.stderr == f"hororun: --metrics-port 127.0.0.1:{port}: Address already in use\n"


# Off a terminal


def test_off_a_terminal_there_is_a_line_every_30_seconds() -> None:
    calls: list[Callable[[], None]] = []
    loop, console, reader = Mock(now_s=0.0), Mock(columns=0), NoteReader()
    loop.call_later = lambda _delay_s, call: calls.append(call) or Timer(0.0, 0, call)
    job = Job(size=1, command=("cmd",), live=True)
    watching = Watching(loop, job, console, RanksSeen({0: reader}, {0: "a"}, list, "rank"))
    for second in range(1, 62):
        summary = {**asdict(after(2 * second)), "samples": [[], [], []], "unused": []}
        data = json.dumps({"now": summary}).encode() + b"\n"
        reader.feed(data)
        watching.on_event(Noted(0, data))
        loop.now_s += 1
        calls.pop(0)()
    assert [each.args for each in console.say.call_args_list] == [("step 60 | 10 steps/s",), ("step 120 | 10 steps/s",)]
    assert not any(each.args[0] for each in console.show_live.call_args_list)
    watching.close()
