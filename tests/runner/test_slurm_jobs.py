"""Agents on other hosts: the commands that start them, and whole jobs of Slurm with a stand-in for srun."""

import os
from pathlib import Path

import pytest
from jobs import Hororun

from horo.runner.agent.command import without
from horo.runner.config import Ssh
from horo.runner.hosts import HostSpec
from horo.runner.network import connection
from horo.runner.start.remote_launcher import RemoteLauncher
from horo.runner.start.srun import SrunLauncher, knows_overlap
from horo.runner.start.ssh import SshLauncher

FAKE_SRUN = """#!/bin/sh
# Stands in for srun, as strict about its words as far as hororun is concerned.
test "$1" = --version && {{ echo slurm {version}; exit 0; }}
echo "$*" >> {folder}/calls
env | grep ^S[LR][U]*[UR][RMN]_ | sort > {folder}/environment
test "$SLURM_JOB_ID" = 7 || {{ echo "srun: error: no job" >&2; exit 1; }}
while :; do
    case $1 in
        --nodelist=*) node=${{1#*=}};;
        --nodes=1|--ntasks=1|--overlap|--cpu-bind=none|--mem=0|--mpi=none|--export=ALL|--chdir=/|--quiet) ;;
        --kill-on-bad-exit=0) ;;
        -*) echo "srun: unrecognized option '$1'" >&2; exit 1;;
        *) break;;
    esac
    shift
done
{before}
export SLURM_STEP_ID=3 SLURM_STEPID=3 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1 SLURM_STEP_NUM_TASKS=1
export SLURMD_NODENAME=$node SLURM_NODEID=0 SLURM_LAUNCH_NODE_IPADDR=127.0.0.1 SLURM_JOB_NODELIST=one,two
cd / && exec "$@"
"""
JOB = {
    **{"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "one,two"},
    **{"SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "2,1", "SLURM_JOB_CPUS_PER_NODE": "2(x2)"},
}


class Slurm:
    """A job of two hosts, one with two tasks and one with one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**JOB, "PATH": f"{folder}:{os.environ['PATH']}"}
        self.install()

    def install(self, before: str = "", version: str = "22.05.8") -> None:
        path = self.folder / "srun"
        path.write_text(FAKE_SRUN.format(folder=self.folder, before=before, version=version))
        path.chmod(0o755)

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return sorted(path.read_text().splitlines()) if path.exists() else []


@pytest.fixture
def slurm(hororun: Hororun, tmp_path: Path) -> Slurm:
    hororun.remote_shell = ""
    (tmp_path / "slurm").mkdir()
    return Slurm(tmp_path / "slurm")


def shell(script: str) -> list[str]:
    return ["--", "sh", "-c", script]


def test_an_allocation_without_sense_is_one_sentence_unless_hosts_are_named(hororun: Hororun, slurm: Slurm) -> None:
    environment = {**slurm.environment, "SLURM_TASKS_PER_NODE": "two"}
    done = hororun.run("-np", "1", "true", where=None, environment=environment)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "SLURM_TASKS_PER_NODE='two'" in done.stderr
    assert hororun.run("-np", "1", "true", where="localhost:1", environment=environment).returncode == 0
    assert slurm.calls() == []


def test_hosts_that_are_named_win(hororun: Hororun, slurm: Slurm) -> None:
    done = hororun.run("-np", "2", *shell("echo $HOROVOD_HOSTNAME"), where="two:2", environment=slurm.environment)
    assert done.stdout == "[0] two\n[1] two\n", done.stderr
    assert len(slurm.calls()) == 1
    ssh = slurm.folder / "ssh"
    ssh.write_text("#!/bin/sh\necho no such host >&2; exit 255\n")
    ssh.chmod(0o755)
    done = hororun.run("-np", "1", "true", where="elsewhere:1", environment=slurm.environment)
    assert done.returncode == 69  # not of the job: ssh was tried
    assert "cannot reach host elsewhere: ssh: no such host" in done.stderr
    assert len(slurm.calls()) == 1


def test_an_option_for_ssh_decides_for_ssh(hororun: Hororun, slurm: Slurm) -> None:
    done = hororun.run("--dry-run", "-p", "2222", "true", where=None, environment=slurm.environment)
    assert "ssh -T" in done.stdout
    done = hororun.run("--launcher", "slurm", "-p", "2222", "true", where=None, environment=slurm.environment)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "-p is for --launcher mpi and ssh" in done.stderr


def test_a_dry_run_shows_ranks_and_commands_and_starts_nothing(hororun: Hororun, slurm: Slurm) -> None:
    done = hororun.run("--dry-run", "python", "a b.py", where=None, environment=slurm.environment)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("hosts from the Slurm job 7")
    assert lines[1].startswith("ranks 0-1 on one: srun --nodes=1")
    assert lines[2].startswith("rank 2 on two: srun --nodes=1")
    assert lines[3] == "each rank: python 'a b.py'"
    assert slurm.calls() == []


def test_an_srun_that_refuses_is_quoted_and_ends_the_job(hororun: Hororun, slurm: Slurm) -> None:
    said = "srun: error: Unable to create step for job 7: Requested node configuration is not available"
    slurm.install(before=f'test $node = two && {{ echo "{said}" >&2; exit 1; }}')
    done = hororun.run("true", where=None, environment=slurm.environment)
    assert done.returncode == 69
    assert done.stderr == f"hororun: cannot start an agent on host two: srun: {said.removeprefix('srun: error: ')}\n"


def test_a_host_that_does_not_answer_is_named_with_what_to_try(hororun: Hororun, slurm: Slurm) -> None:
    slurm.install(before="test $node = two && exec sleep 60")
    done = hororun.run("--start-timeout", "0.5", "true", where=None, environment=slurm.environment)
    assert done.returncode == 69
    assert "two: try srun --overlap --nodelist=" in done.stderr


def test_an_srun_that_is_not_there_is_named(hororun: Hororun, slurm: Slurm, tmp_path: Path) -> None:
    (slurm.folder / "srun").unlink()
    environment = {**slurm.environment, "PATH": str(tmp_path)}
    done = hororun.run("--launcher", "slurm", "true", where=None, environment=environment)
    assert (done.returncode, done.stderr.count("\n")) == (78, 1)
    assert "srun cannot be started" in done.stderr


def test_the_ssh_command_asks_nobody_and_trusts_as_configured() -> None:
    launcher = SshLauncher(Ssh(port=22, identity_file="/k", arguments=("-v",)), "/a b/python", 30, 30)
    words = launcher.command(HostSpec("h1", "me", 2222))
    assert words[0] == "ssh"
    assert "BatchMode=yes" in words
    assert words[words.index("-p") + 1] == "2222"
    assert words[words.index("-i") + 1] == "/k"
    assert words[-3:] == ["-v", "me@h1", "cd / && exec '/a b/python' -m horo.runner.agent"]
    assert not any("StrictHostKeyChecking" in word for word in words)


def test_the_srun_command_gives_one_task_all_of_one_host() -> None:
    command = SrunLauncher("/a b/python").command(HostSpec("h1"))
    assert command[0] == "srun"
    options = {"--nodes=1", "--ntasks=1", "--nodelist=h1", "--overlap", "--cpu-bind=none", "--mem=0", "--mpi=none"}
    assert options <= set(command)
    assert command[-3:] == ["sh", "-c", "cd / && exec '/a b/python' -m horo.runner.agent"]
    assert "--unbuffered" not in command  # a terminal between would hold up what is no line
    assert "--overlap" not in SrunLauncher("p", overlap=False).command(HostSpec("h1"))


@pytest.mark.parametrize(
    ("version", "knows"),
    [("slurm 20.11.0\n", True), ("slurm 22.05.8", True), ("slurm 20.02.7", False), ("slurm 19.05", False), ("?", True)],
)
def test_steps_are_asked_to_overlap_where_slurm_knows_the_word(version: str, knows: bool) -> None:
    assert knows_overlap(version) is knows


SSH = SshLauncher(Ssh(), "/p/python", 30, 30)
SRUN = SrunLauncher("/p/python")
EXIT_3 = b"srun: error: h: task 0: Exited with exit code 3\n"
CHANGED = b"""@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@\r
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\r
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@\r
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!\r
Add correct host key in /k/.ssh/known_hosts to get rid of this message.\r
Offending ED25519 key in /k/.ssh/known_hosts:3\r
Host key for h has changed and you have requested strict checking.\r
Host key verification failed.\r
"""
UNKNOWN = (
    b"No ED25519 host key is known for h and you have requested strict checking.\r\nHost key verification failed.\r\n"
)
FAILURES = [
    (SSH, 255, CHANGED, 69, "has another key than line 3 of /k/.ssh/known_hosts says: remove that line if the"),
    (SSH, 255, UNKNOWN, 69, "verification failed. Its key is not known here: connect once by hand, ssh h"),
    (SSH, 255, b"Warning: x\nssh: connect to host h port 22: Connection refused\r\n", 69, "Connection refused"),
    (SSH, 127, b"sh: 1: exec: /p/python: not found\n", 78, "there is no /p/python"),
    (SSH, 126, b"sh: 1: exec: /p/python: Permission denied\n", 78, "cannot execute /p/python"),
    (SSH, 1, b"/p/python: No module named horo.runner\n", 78, "no module horo.runner"),
    (SSH, 1, b"/p/python: Error (ModuleNotFoundError: No module named 'horo')\n", 78, "no module horo"),
    (SSH, 3, b"", 70, "code 3"),
    (SRUN, 1, b"srun: error: Unable to create step for job 7: Invalid node name\n", 69, "srun: Unable to"),
    (SRUN, 1, b"srun: error: Task launch for 1.0 failed on node h: x\nsrun: error: x\n", 69, "failed on node h"),
    (SRUN, 1, b"srun: lacks support for cpu binding\nsrun: error: Invalid node\nsrun: error: x\n", 69, "srun: Invalid"),
    (SRUN, 1, b"srun: cluster configuration lacks support for cpu binding\n", 70, "h: the agent ended with code 1: no"),
    (SRUN, 143, b"srun: forcing job termination\n", 69, "srun: forcing"),
    (SRUN, 127, b"sh: 1: exec: /p/python: not found\n" + EXIT_3, 78, "there is no /p/python"),
    (SRUN, 1, b"/p/python: No module named horo.runner\n" + EXIT_3, 78, "no module horo.runner"),
    (SRUN, 3, EXIT_3, 70, "code 3"),
    (SRUN, 3, b"slurmstepd: error: x\nbroken\n" + EXIT_3, 70, "code 3: broken"),
]


@pytest.mark.parametrize(("launcher", "code", "stderr", "exit_code", "fact"), FAILURES)
def test_stderr_tells_why(launcher: RemoteLauncher, code: int, stderr: bytes, exit_code: int, fact: str) -> None:
    error = launcher.explain_failure("h", code, stderr)
    assert (error.code, fact in str(error)) == (exit_code, True), str(error)
    assert "host h" in str(error)


REMARK = "srun: cluster configuration lacks support for cpu binding"
CAUSES = [
    (SRUN, [REMARK], ""),
    (SRUN, ["srun: error: h: task 0: Killed", REMARK], "srun: error: h: task 0: Killed"),
    (SRUN, ["srun: error: Node failure on h", "srun: error: h: task 0: Killed", REMARK],
     "srun: error: Node failure on h"),
    (SRUN, [REMARK, "slurmstepd: error: *** STEP 7.0 ON h CANCELLED ***", "srun: Job step aborted"],
     "slurmstepd: error: *** STEP 7.0 ON h CANCELLED ***"),
    (SRUN, ["hororun has sent nothing for 4 s", "srun: error: h: task 0: Exited with exit code 1"],
     "hororun has sent nothing for 4 s"),
    (SRUN, [REMARK, "srun: forcing job termination"], "srun: forcing job termination"),
    (SSH, [], ""),
    (SSH, ["Connection to h closed by remote host.", "Warning: Permanently added 'h' to the list of known hosts."],
     "Connection to h closed by remote host."),
]  # fmt: skip


@pytest.mark.parametrize(("launcher", "lines", "cause"), CAUSES)
def test_what_says_why_a_connection_ended_is_found(launcher: RemoteLauncher, lines: list[str], cause: str) -> None:
    assert launcher.cause(lines) == cause


VARIABLES = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "a,b", "SLURM_SUBMIT_DIR": "/s"}


def test_srun_is_not_told_what_was_meant_for_the_job() -> None:
    environ = {**VARIABLES, "SLURM_CPUS_PER_TASK": "2", "SRUN_CPUS_PER_TASK": "2", "SLURM_CPU_BIND": "cores",
               "MINE": "1", "SLURM_GPUS": "8", "SSH_CONNECTION": "1 2 3 4", "CUDA_VISIBLE_DEVICES": "0",
               "SLURM_CONF": "/c"}  # fmt: skip
    assert SRUN.environment(environ) == {"SLURM_JOB_ID": "7", "SLURM_CONF": "/c", "MINE": "1"}


def test_ranks_of_a_slurm_job_find_the_job_and_not_the_step_of_their_agent() -> None:
    step = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "PMI_RANK": "0", "SLURM_JOB_ID": "7",
            "SLURM_CPUS_ON_NODE": "64", "PATH": "/bin"}  # fmt: skip
    here = {**VARIABLES, "SLURM_PROCID": "0", "SLURM_CPUS_ON_NODE": "2", "SLURM_JOB_GPUS": "3", "HOME": "/"}
    found = {**without(step, SRUN.unset), **SRUN.extra_variables(here)}
    assert found == {**VARIABLES, "SLURM_CPUS_ON_NODE": "64", "PATH": "/bin"}


def test_the_agent_knows_over_which_addresses_it_was_started() -> None:
    assert connection({"SSH_CONNECTION": "1 2 3 4", "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"}) == "1 2 3 4"
    assert connection({"SLURM_LAUNCH_NODE_IPADDR": "127.0.0.9"}).split() == ["127.0.0.9", "0", "127.0.0.1", "0"]
    assert connection({"SLURM_LAUNCH_NODE_IPADDR": "no address"}) == ""
    assert connection({}) == ""
