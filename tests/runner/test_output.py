"""Lines, prefixes and the writer; and what hororun shows and keeps of what ranks write."""

import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import Flags, Hororun, wait_until

from horo.runner.job.output import LineSplitter, Piece, Printer, Writer
from horo.runner.job.rank_files import RankFiles

text = st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n", b"\xff\xfe", "é".encode(), b" "])).map(b"".join)


def split(chunks: list[bytes]) -> list[Piece]:
    splitter = LineSplitter()
    return [piece for chunk in chunks for piece in splitter.feed(chunk)] + splitter.finish()


@given(text, st.lists(st.integers(0, 6)))
def test_lines_do_not_depend_on_how_the_stream_arrives(data: bytes, cuts: list[int]) -> None:
    chunks, rest = [], data
    for size in cuts:
        chunks.append(rest[:size])
        rest = rest[size:]
    assert split([*chunks, rest]) == split([data])


@given(text.map(lambda data: data.replace(b"\r", b"")))
def test_nothing_is_lost_and_nothing_invented(data: bytes) -> None:
    lines = data.split(b"\n")
    assert [piece.text for piece in split([data])] == (lines[:-1] if not lines[-1] else lines)


def test_a_carriage_return_ends_an_update_and_a_line_without_end_is_cut() -> None:
    pieces = [Piece(b"10%", True), Piece(b"20%", False), Piece(b"30%", True), Piece(b"end", False)]
    assert split([b"\r10%\r20%\r", b"\n30%\rend"]) == pieces
    splitter = LineSplitter(line_max_bytes=1000)
    pieces = [piece for _ in range(10) for piece in splitter.feed(b"x" * 300)] + splitter.finish()
    assert b"".join(piece.text for piece in pieces) == b"x" * 3000
    assert max(len(piece.text) for piece in pieces) <= 1300


ERASED = b"\x1b[2K"


def updated(text: bytes) -> bytes:
    """An update on a terminal, in one row of it however narrow that is."""
    return b"\x1b[?7l" + text + b"\r\x1b[?7h"


class Screen:
    """Keeps what a printer writes."""

    def __init__(self) -> None:
        self.streams = {1: b"", 2: b""}

    def write(self, stream: int, data: bytes) -> None:
        self.streams[stream] += data


def test_prefixes_are_as_wide_as_the_highest_rank_and_without_them_lines_stay_whole() -> None:
    screen = Screen()
    printer = Printer(screen.write, 11)
    printer.feed(3, 1, b"a\n\xff\xfe\nunfinished", 0.0)
    printer.feed(10, 1, b"b\n", 0.0)
    printer.feed(10, 2, b"c\n", 0.0)
    printer.finish(3, 0.0)
    assert screen.streams == {1: b"[ 3] a\n[ 3] \xff\xfe\n[10] b\n[ 3] unfinished\n", 2: b"[10] c\n"}
    screen = Screen()
    printer = Printer(screen.write, 2, prefix=False)
    printer.feed(0, 1, b"on", 0.0)
    printer.feed(1, 1, b"two\n", 0.0)
    printer.feed(0, 1, b"e\n", 0.0)
    assert screen.streams[1] == b"two\none\n"


def test_off_a_terminal_one_update_per_second_is_shown_and_on_one_all_are_redrawn_in_place() -> None:
    screen = Screen()
    printer = Printer(screen.write, 1)
    for tenths in range(25):
        printer.feed(0, 2, b"\r%d" % tenths, tenths / 10)
    printer.feed(0, 2, b"\n", 2.5)
    assert screen.streams[2] == b"[0] 0\n[0] 10\n[0] 20\n[0] 24\n"
    screen = Screen()
    printer = Printer(screen.write, 2, terminals=frozenset({1, 2}), coloured=frozenset({2}))
    printer.feed(0, 2, b"\r1%\r2%\r", 0.0)
    printer.feed(1, 1, b"line\n", 0.0)
    printer.close()
    start = b"\x1b[36m[0]\x1b[0m "
    assert screen.streams[2] == updated(start + b"1%") + start + b"2%\n"
    assert screen.streams[1] == b"\x1b[2K[1] line\n"


def test_a_timestamp_begins_each_line_also_of_a_script_of_horovods() -> None:
    screen = Screen()
    Printer(screen.write, 1, timestamp=True).feed(0, 1, b"a\n", 0.0)
    stamp, rest = screen.streams[1].split(b" ", 1)
    assert len(stamp) == len(b"2025-01-31T12:34:56.789")
    assert rest == b"[0] a\n"
    screen = Screen()
    Printer(screen.write, 1, streams=True, timestamp=True).feed(0, 1, b"a\n", 0.0)
    stamp, rest = screen.streams[1].split(b"[0]", 1)
    assert time.strptime(stamp.decode(), "%a %b %d %H:%M:%S %Y")
    assert rest == b"<stdout>:a\n"


def test_the_writer_keeps_order_and_says_when_it_is_full_and_idle() -> None:
    changed = threading.Event()
    writer = Writer(changed.set)
    read_fd, write_fd = os.pipe()
    parts = [b"%d," % number * 1000 for number in range(4000)]
    for part in parts:
        writer.put(write_fd, part)
    assert writer.full
    assert not writer.idle
    got = b""
    while len(got) < sum(map(len, parts)):
        got += os.read(read_fd, 1 << 20)
    assert got == b"".join(parts)
    assert changed.wait(10)
    os.close(read_fd)
    os.close(write_fd)


def test_files_of_ranks_sort_by_rank(tmp_path: Path) -> None:
    files = RankFiles(str(tmp_path / "logs"), ["h"] * 11, named=False)
    os.write(files.fd(3, 2), b"err")
    assert (tmp_path / "logs" / "rank.03" / "stderr").read_bytes() == b"err"
    assert (tmp_path / "logs" / "rank.10" / "stdout").read_bytes() == b""
    assert files.name_of(files.fd(3, 2)) == "stderr of rank 3"


PYTHON = (sys.executable, "-S", "-c")


def test_lines_of_any_length_are_never_mixed_and_none_is_lost(hororun: Hororun, where: str) -> None:
    script = (
        "import os; r = os.environ['HOROVOD_RANK']\n"
        "for n in range(200):\n"
        "    line = (r * (n * n * 7 % 30000) + '\\n').encode()\n"
        "    for start in range(0, len(line), 5000): os.write(1, line[start:start + 5000])\n"
    )
    done = hororun.run("-np", "3", *PYTHON, script, where=where)
    assert done.returncode == 0
    expected = Counter(f"[{rank}] {str(rank) * (n * n * 7 % 30000)}" for rank in range(3) for n in range(200))
    assert Counter(done.stdout.splitlines()) == expected


def test_files_of_ranks_hold_every_byte(hororun: Hororun, where: str, tmp_path: Path) -> None:
    words = ["-np", "2", "--output-filename", str(tmp_path / "logs"), "--prefix-timestamp"]
    hororun.run(
        *words, "--", "sh", "-c", r"printf '10%%\r20%%\r\n\377'$HOROVOD_RANK; echo $HOROVOD_RANK >&2", where=where
    )
    for rank in range(2):
        folder = tmp_path / "logs" / f"rank.{rank}"
        assert (folder / "stdout").read_bytes() == b"10%%\r20%%\r\n\xff%d" % rank
        assert (folder / "stderr").read_bytes() == b"%d\n" % rank


@pytest.mark.parametrize("where", ["localhost:1,one:1,seven:1", "one:1,localhost:1,seven:1"])
def test_lines_and_folders_can_name_the_host(hororun: Hororun, where: str, tmp_path: Path) -> None:
    words = ["-np", "3", "--prefix-host", "--output-filename", str(tmp_path / "logs")]
    done = hororun.run(*words, "--", "sh", "-c", "echo out $HOROVOD_RANK; echo err $HOROVOD_RANK >&2", where=where)
    assert done.returncode == 0, done.stderr
    hosts = [item.partition(":")[0] for item in where.split(",")]
    assert sorted(done.stdout.splitlines()) == [f"[{r} {name}] out {r}" for r, name in enumerate(hosts)]
    assert sorted(done.stderr.splitlines()) == [f"[{r} {name}] err {r}" for r, name in enumerate(hosts)]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [f"rank.{r}.{n}" for r, n in enumerate(hosts)]
    assert (tmp_path / "logs" / f"rank.2.{hosts[2]}" / "stdout").read_text() == "out 2\n"


def test_a_file_that_cannot_be_made_is_named(hororun: Hororun, tmp_path: Path) -> None:
    (tmp_path / "rank.0").touch()
    done = hororun.run("-np", "1", "--output-filename", str(tmp_path), "true")
    assert done.returncode == 2
    said = f"{tmp_path}/rank.0 is a file, and a folder is needed: name another"
    assert done.stderr == f"hororun: --output-filename {tmp_path}: {said}\n"


def test_verbose_says_what_is_done(hororun: Hororun) -> None:
    done = hororun.run("-np", "2", "--verbose", "true", where="localhost:1,one:1")
    assert "horo.runner.agent" in done.stderr
    assert re.search(r"rank 1 on one runs as process \d+", done.stderr)
    assert "key-value server at 127.0.0.1:" in done.stderr


FLOOD = "import os\nwhile True: os.write(1, b'x' * 99 + b'\\n')"


def test_a_reader_that_waits_makes_ranks_wait_and_loses_nothing(hororun: Hororun, where: str, flags: Flags) -> None:
    script = f"""
import os
for n in range(40000):
    os.write(1, b"%d " % n * 100 + b"\\n")
open({str(flags.folder)!r} + "/written." + os.environ["HOROVOD_RANK"], "w").close()
"""
    job = hororun.start("-np", "2", *PYTHON, script, where=where)
    assert job.process.stdout is not None
    beginning = os.read(job.process.stdout.fileno(), 1000)
    assert not (flags.folder / "written.0").exists()  # 45 MB do not fit between them and a reader who waits
    done = job.finish()
    lines = (beginning.decode() + done.stdout).splitlines()
    assert len(lines) == 80000
    for rank in range(2):
        mine = [line.partition("] ")[2] for line in lines if line.startswith(f"[{rank}]")]
        assert mine == [f"{n} " * 100 for n in range(40000)]


def test_a_blocked_stdout_does_not_keep_a_signal_from_ending_the_job(hororun: Hororun, where: str) -> None:
    read_fd, write_fd = os.pipe()
    job = hororun.start("-np", "2", "--grace-seconds", "0.5", *PYTHON, FLOOD, where=where, stdout=write_fd)
    os.close(write_fd)
    os.read(read_fd, 1)
    wait_until(lambda: len(os.listdir(f"/proc/{job.process.pid}/task")) > 1, "output flows")  # noqa: PTH208
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(30) == 143
    job.nothing_is_left()
    os.close(read_fd)


def test_a_reader_that_goes_ends_the_job(hororun: Hororun, where: str) -> None:
    read_fd, write_fd = os.pipe()
    job = hororun.start("-np", "2", *PYTHON, FLOOD, where=where, stdout=write_fd)
    os.close(write_fd)
    os.read(read_fd, 1)
    os.close(read_fd)
    done = job.finish()
    assert done.returncode == 141
    assert "nobody reads stdout" in done.stderr


def on_terminal(*words: str, keys: bytes = b"", after: bytes = b"", **environment: str) -> tuple[bytes, int]:
    """Runs hororun on a terminal of its own; types ``keys`` once ``after`` has appeared."""
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            os.execve(
                sys.executable,
                [sys.executable, "-m", "horo.runner", "-np", "1", *words],
                {**{k: v for k, v in os.environ.items() if k != "NO_COLOR"}, "TERM": "xterm", **environment},
            )
        finally:
            os._exit(99)
    shown = b""
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # how a terminal says that nobody has it open any more
            break
        shown += data
        if keys and after in shown:
            os.write(terminal, keys)
            keys = b""
        if not data:
            break
    os.close(terminal)
    return shown, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_terminal_gets_colours_and_redrawn_progress() -> None:
    shown, code = on_terminal("--", "printf", r"1%%\r2%%\rdone\n")
    assert code == 0
    start = b"\x1b[36m[0]\x1b[0m "
    assert shown == updated(start + b"1%") + ERASED + updated(start + b"2%") + ERASED + start + b"done\r\n"


def test_lines_of_rank_0_alone_leave_its_progress_as_it_is(tmp_path: Path) -> None:
    script = f"""
import os, pathlib, sys
done = pathlib.Path({str(tmp_path)!r}, "done")
if os.environ["HOROVOD_RANK"] == "1":
    print("noise"), print("more", file=sys.stderr)
    done.touch()
else:
    while not done.exists(): pass
    sys.stdout.write("1%\\r2%\\rdone\\n")
"""
    logs = str(tmp_path / "logs")
    words = ("-np", "2", "-H", "localhost:2", "--no-prefix", "--output", "rank0", "--output-filename", logs)
    shown, code = on_terminal(*words, *PYTHON, script)
    assert code == 0
    assert shown.startswith(
        updated(b"1%") + ERASED + updated(b"2%") + ERASED + b"done\r\nhororun: no rank called init()"
    )
    assert [(tmp_path / "logs" / "rank.1" / name).read_text() for name in ("stdout", "stderr")] == ["noise\n", "more\n"]


def test_a_rank_that_fails_unseen_shows_its_last_lines(hororun: Hororun, where: str) -> None:
    script = "import os\nif os.environ['HOROVOD_RANK'] == '1': raise ValueError('bad sample')\nprint('fine')"
    done = hororun.run("-np", "2", "--output", "rank0", *PYTHON, script, where=where)
    assert done.returncode == 1
    assert done.stdout in {"[0] fine\n", ""}
    assert "hororun: its last lines on stderr:\n  | Traceback (most recent call last):" in done.stderr
    assert "  | ValueError: bad sample\n" in done.stderr


@pytest.mark.parametrize("variable", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_without_colours_gets_none(variable: dict[str, str]) -> None:
    assert on_terminal("echo", "x", **variable)[0] == b"[0] x\r\n"


def test_ctrl_c_on_a_terminal_ends_the_job() -> None:
    script = "import signal, sys\ndef end(*_): print('saved'); sys.exit(0)\n"
    script += "signal.signal(signal.SIGINT, end); print('up', flush=True)\nwhile True: signal.pause()"
    shown, code = on_terminal(*PYTHON, script, keys=b"\x03", after=b"up")
    assert code == 130
    assert b"saved" in shown
    assert b"hororun: SIGINT: the job was ended" in shown


def test_a_closed_stderr_disturbs_nobody() -> None:
    command = [sys.executable, "-m", "horo.runner", "-np", "1", "sh", "-c", "echo gone >&2; echo here"]
    done = subprocess.run(["sh", "-c", '"$@" 2>&-', "sh", *command], capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"[0] here\n")
