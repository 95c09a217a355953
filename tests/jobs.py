"""Real jobs: hororun as a process, with a mark by which all that it has started is found; what a process has open."""

import contextlib
import gc
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEADLINE_S = 30.0
TORCH_S = 90.0
"""A deadline for what imports torch several times on a machine that does other things, too."""
IMPORT_TORCH_SILENTLY = """import io, sys
sys.stderr = io.StringIO()
import torch
sys.stderr = sys.__stderr__
"""
"""For scripts of which every line on stderr counts: beside numpy 2, torch before 2.3 begins with a warning."""
PLAIN_RANK = f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom plain_rank import Rank, bootstrap\n"
"""How a script begins whose ranks need no torch."""
_STARTUP = Path(__file__).with_name("startup")
_REMOTE_SHELL = """#!/bin/sh
# Stands in for ssh: runs the last argument, the command, on this machine.
for command; do :; done
{before}
exec sh -c "$command"
"""


def as_users_start() -> dict[str, str]:
    """This process's environment without tests/startup, for what collects garbage or ends as a user's process does."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [folder for folder in folders if folder and Path(folder) != _STARTUP]
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**others, "PYTHONPATH": os.pathsep.join(kept)} if kept else others


def run_python(
    *words: str, check: bool = False, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a Python with these words; ``environment``: added to this process's. Other options are those of ``run``."""
    options = {"env": {**os.environ, **(environment or {})}, "timeout": TORCH_S, **options}
    return subprocess.run([sys.executable, *words], check=check, capture_output=True, text=True, **options)


def open_descriptors() -> set[tuple[str, str]]:
    """The number of each open descriptor and what it refers to; what only garbage holds is closed first.

    Nothing is left open where ``open_descriptors() <= before``: threads of earlier tests may have closed more.
    """
    gc.collect()
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that the folder was read with
            found.add((entry.name, str(entry.readlink())))
    return found


def in_child(act: Callable[[], Any]) -> Any:
    """What ``act()`` returns in a forked child, which must end well."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(writer, pickle.dumps(act()))
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        answer = stream.read()
    assert os.waitpid(child, 0) == (child, 0)
    return pickle.loads(answer)


def wait_until(true: Callable[[], object], what: str, every_s: float = 0.01, deadline_s: float = DEADLINE_S) -> None:
    """Waits, with a deadline, until ``true()``; looks every ``every_s`` seconds."""
    deadline = time.monotonic() + deadline_s
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {deadline_s:g} s still not: {what}")
        time.sleep(every_s)


def port_for_later() -> int:
    """A port below those from which systems choose, so that nobody gets it before its owner listens."""
    while True:
        port = random.SystemRandom().randrange(22_000, 30_000)
        with contextlib.suppress(OSError), socket.socket() as tried:
            tried.bind(("", port))
            return port


def marked_processes(mark: str) -> dict[int, str]:
    """Processes whose environment carries the mark, zombies left out, with their command lines."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark.encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def parent_of(pid: int) -> int:
    """The parent of a process; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def state_of(pid: int) -> str:
    """What ps shows of it: S sleeps, T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def kill_all(pids: Iterable[int], number: signal.Signals = signal.SIGKILL) -> None:
    """Sends all a signal, those also that end because another one has got it."""
    for pid in list(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@dataclass
class Launched:
    """One hororun that runs."""

    process: subprocess.Popen[bytes]
    mark: str

    def finish(self, deadline_s: float = DEADLINE_S) -> subprocess.CompletedProcess[str]:
        """Waits for its end; nothing it has started may be left then."""
        out, err = self.process.communicate(timeout=deadline_s)
        self.nothing_is_left()
        texts = [(text or b"").decode("utf-8", "replace") for text in (out, err)]
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, *texts)

    def end_by(self, number: int) -> subprocess.CompletedProcess[str]:
        """Sends hororun a signal, and waits for its end."""
        self.process.send_signal(number)
        return self.finish()

    def said_until(self, words: str) -> str:
        """Its output up to a line with the words."""
        said = ""
        while words not in said:
            line = self.process.stdout.readline().decode()  # type: ignore[union-attr]
            assert line, f"the job has ended before {words!r}"
            said += line
        return said

    def processes(self, word: str = "") -> list[int]:
        """Those of its processes whose command line has the word."""
        return [pid for pid, command in marked_processes(self.mark).items() if word in command]

    def agents(self) -> list[int]:
        """Those that it has started itself."""
        return [pid for pid in self.processes("horo.runner.agent") if parent_of(pid) == self.process.pid]

    def nothing_is_left(self) -> None:
        """Waits until no process that carries the mark exists."""
        wait_until(lambda: not marked_processes(self.mark), f"nothing left of {self.process.args}")

    def kill(self) -> None:
        """Ends whatever a test that failed has left."""
        kill_all(marked_processes(self.mark))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(DEADLINE_S)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


@dataclass
class Hororun:
    """Starts hororun, and other launchers, and cleans up after them."""

    remote_shell: str = ""
    launched: list[Launched] = field(default_factory=list)

    def start(
        self, *words: str, where: str | None = "localhost:8", prefix: Sequence[str] = (), **options: object
    ) -> Launched:
        """Starts ``hororun -H where words``; ``where`` other than localhost goes through the agent, None: no ``-H``.

        ``prefix``: words before the command. ``environment``: added to this process's. Other options are Popen's.
        """
        shell = ["--remote-shell", self.remote_shell] if self.remote_shell else []
        place = [] if where is None else ["-H", where]
        return self.launch([*prefix, sys.executable, "-m", "horo.runner", *place, *shell, *words], **options)

    def launch(self, command: Sequence[str], **options: object) -> Launched:
        """Starts any command, with ``environment`` and the options as for ``start``."""
        mark = f"HORO_TEST_MARK={uuid.uuid4().hex}"
        name, _, value = mark.partition("=")
        environment = {**os.environ, name: value, **options.pop("environment", {})}  # type: ignore[dict-item]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **options}
        process = subprocess.Popen(  # type: ignore[call-overload]
            command,
            env=environment,
            start_new_session=True,
            preexec_fn=_signals_as_in_a_shell,  # noqa: PLW1509 - no threads here
            **pipes,
        )
        self.launched.append(Launched(process, mark))
        return self.launched[-1]

    def run(
        self, *words: str, where: str | None = "localhost:8", **options: object
    ) -> subprocess.CompletedProcess[str]:
        """Runs it to its end."""
        return self.start(*words, where=where, **options).finish()

    def clean_up(self) -> None:
        """Ends whatever a test that failed has left."""
        for launched in self.launched:
            launched.kill()
        self.launched.clear()


def _signals_as_in_a_shell() -> None:
    # Whoever runs the tests may ignore SIGINT or SIGHUP (nohup, a shell's &), and hororun honours that.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def make_remote_shell(folder: Path, before: str = "") -> str:
    """A program that stands in for ssh; ``before``: shell commands it runs first. Returns its path."""
    shell = folder / "remote-shell"
    shell.write_text(_REMOTE_SHELL.format(before=before))
    shell.chmod(0o755)
    return str(shell)


@dataclass(frozen=True)
class Flags:
    """Files by which ranks say that they have come somewhere."""

    folder: Path

    def wait(self, names: Sequence[str]) -> None:
        wait_until(lambda: all((self.folder / name).exists() for name in names), f"{names} in {self.folder}")

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()


def shell(script: str, flags: Flags | None = None) -> list[str]:
    """A rank that runs ``script`` in sh; ``flag NAME`` in it makes the file NAME.<rank>."""
    folder = flags.folder if flags is not None else "/nonexistent"
    return ["--", "sh", "-c", f'flag() {{ : > "{folder}/$1.$HOROVOD_RANK"; }}\n{script}']
