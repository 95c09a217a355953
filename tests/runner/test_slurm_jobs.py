"""Jobs of Slurm: agents that a stand-in for srun or ssh starts, and ranks that srun has started, with their store."""

import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from jobs import Hororun, open_descriptors
from joining import SECRET

from horo.bootstrap.auth.credential_file import CredentialFile
from horo.bootstrap.auth.munge import decode, encode
from horo.bootstrap.launchers.slurm_store import candidate_ports, open_slurm_store
from horo.bootstrap.launchers.variables import read_launch
from horo.bootstrap.net.addresses import Endpoint
from horo.bootstrap.net.advertisement import fetch
from horo.config.table import read_config
from horo.errors import ResourceError
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


def test_an_allocation_without_sense_is_one_sentence_unless_hosts_are_named(hororun: Hororun, slurm: Slurm) -> None:
    environment = {**slurm.environment, "SLURM_TASKS_PER_NODE": "two"}
    done = hororun.run("-np", "1", "true", where=None, environment=environment)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "SLURM_TASKS_PER_NODE='two'" in done.stderr
    assert hororun.run("-np", "1", "true", where="localhost:1", environment=environment).returncode == 0
    assert slurm.calls() == []


def test_hosts_that_are_named_win(hororun: Hororun, slurm: Slurm) -> None:
    done = hororun.run(
        "-np", "2", "--", "sh", "-c", "echo $HOROVOD_HOSTNAME", where="two:2", environment=slurm.environment
    )
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


def test_an_srun_that_refuses_is_quoted_and_a_host_that_does_not_answer_named(hororun: Hororun, slurm: Slurm) -> None:
    said = "srun: error: Unable to create step for job 7: Requested node configuration is not available"
    slurm.install(before=f'test $node = two && {{ echo "{said}" >&2; exit 1; }}')
    done = hororun.run("true", where=None, environment=slurm.environment)
    assert done.returncode == 69
    assert done.stderr == f"hororun: cannot start an agent on host two: srun: {said.removeprefix('srun: error: ')}\n"
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


def test_the_ssh_command_asks_nobody_and_the_srun_command_gives_one_task_a_host() -> None:
    launcher = SshLauncher(Ssh(port=22, identity_file="/k", arguments=("-v",)), "/a b/python", 30, 30)
    words = launcher.command(HostSpec("h1", "me", 2222))
    assert words[0] == "ssh"
    assert "BatchMode=yes" in words
    assert words[words.index("-p") + 1] == "2222"
    assert words[words.index("-i") + 1] == "/k"
    assert words[-3:] == ["-v", "me@h1", "cd / && exec '/a b/python' -m horo.runner.agent"]
    assert not any("StrictHostKeyChecking" in word for word in words)
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


def test_srun_is_not_told_what_was_meant_for_the_job_and_its_ranks_are() -> None:
    environ = {**VARIABLES, "SLURM_CPUS_PER_TASK": "2", "SRUN_CPUS_PER_TASK": "2", "SLURM_CPU_BIND": "cores",
               "MINE": "1", "SLURM_GPUS": "8", "SSH_CONNECTION": "1 2 3 4", "CUDA_VISIBLE_DEVICES": "0",
               "SLURM_CONF": "/c"}  # fmt: skip
    assert SRUN.environment(environ) == {"SLURM_JOB_ID": "7", "SLURM_CONF": "/c", "MINE": "1"}
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


JOB_ID = str(os.getpid())
"""As the number of the Slurm job: ports of tests that run beside each other differ."""

RANK = """
import os, resource, sys
import psutil
if "TEST_FILES" in os.environ:
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(os.environ["TEST_FILES"]),) * 2)
from horo.bootstrap.job import start
from horo.core.context import RequestBuffer
job = start()
for again in range(int(os.environ.get("TEST_STARTS", "1")) - 1):
    job.close()
    job = start()
handle = job.context.submit(RequestBuffer.of(3, "barrier"))
job.context.wait(handle)
job.context.release(handle)
listening = [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
sys.stdout.write(f"{job.rank}/{job.size} local {job.local_rank}/{job.local_size} cross {job.cross_rank}/"
    f"{job.cross_size} hosts {len(job.hosts)} listening {len(listening)}\\n")
sys.stdout.flush()
job.close()
"""

FAKE_MUNGE = """\
#!{python}
# Credentials that remember their uid and can be decoded once, as MUNGE's.
import os, pathlib, sys, base64, secrets
folder = pathlib.Path({folder!r})
payload = sys.stdin.buffer.read()
if pathlib.Path(sys.argv[0]).name == "munge":
    assert sys.argv[1:] == [f"--restrict-uid={{os.getuid()}}"], sys.argv
    name = secrets.token_hex(8)
    (folder / name).write_text(f"{{os.environ.get('FAKE_UID', os.getuid())}}")
    sys.stdout.write(f"MUNGE:{{name}}:{{base64.b64encode(payload).decode()}}:\\n")
else:
    assert sys.argv[1:] == ["--numeric"], sys.argv
    head, name, text, _ = payload.decode().split(":")
    try:
        uid = (folder / name).read_text()
        (folder / name).unlink()
    except OSError:
        sys.exit("unmunge: Error: Replayed credential")
    sys.stdout.write(f"STATUS:           0\\nUID:              {{uid}}\\nLENGTH:           9\\n\\n")
    sys.stdout.flush()
    sys.stdout.buffer.write(base64.b64decode(text))
"""


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A folder to be the only one in PATH: whether MUNGE is there is up to the test."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


@pytest.fixture
def fake_munge(bare_path: Path, tmp_path: Path) -> Path:
    """``bare_path`` with programs that stand for MUNGE's."""
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    for name in ("munge", "unmunge"):
        program = bare_path / name
        program.write_text(FAKE_MUNGE.format(python=sys.executable, folder=str(credentials)), encoding="utf-8")
        program.chmod(0o755)
    return bare_path


def step(rank: int, nodes: Sequence[int], job: str = JOB_ID) -> dict[str, str]:
    """What srun says to process ``rank`` of a step whose processes are on these nodes."""
    counts = [nodes.count(node) for node in sorted(set(nodes))]
    return {
        "SLURM_JOB_ID": job, "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(len(nodes)),
        "SLURM_NTASKS": "64", "SLURM_LOCALID": str(nodes[:rank].count(nodes[rank])), "SLURM_NODEID": str(nodes[rank]),
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, counts)), "HORO_HOST_ID": str(nodes[rank]),
        "SLURM_STEP_NODELIST": "localhost" if len(counts) == 1 else f"localhost,h[2-{len(counts)}]",
        "HORO_START_TIMEOUT": "30",
    }  # fmt: skip


def run_ranks(
    folder: Path, environs: Sequence[Mapping[str, str]], path: Path | None = None
) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of one process for each environment."""
    script = folder / "rank.py"
    script.write_text(textwrap.dedent(RANK), encoding="utf-8")
    base = {"PATH": str(path)} if path is not None else {"PATH": os.environ["PATH"]}
    words, pipes = [sys.executable, str(script)], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    base["HOME"] = str(folder)
    processes = [subprocess.Popen(words, env={**base, **environ}, **pipes) for environ in environs]
    ended = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=90)
            ended.append((process.returncode, output, errors))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return ended


def check_all_started(ended: Sequence[tuple[int, str, str]], nodes: Sequence[int]) -> None:
    for rank, (code, output, errors) in enumerate(ended):
        assert code == 0, errors
        local = nodes[:rank].count(nodes[rank])
        across = [node for node in sorted(set(nodes)) if nodes.count(node) > local]
        assert output == (
            f"{rank}/{len(nodes)} local {local}/{nodes.count(nodes[rank])} cross {across.index(nodes[rank])}/"
            f"{len(across)} hosts {len(set(nodes))} listening 0\n"
        )


@pytest.mark.parametrize("way", ["credential", "file", "secret"])
def test_ranks_start_and_nobody_listens_afterwards(way: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """With MUNGE; with a file, which is deleted then; with a secret, which needs neither."""
    nodes = [0, 0] if way == "secret" else [0, 0, 0]
    more = {"secret": {"HORO_SECRET": SECRET.hex(), "TEST_STARTS": "2"}, "file": {"TEST_STARTS": "3"}}.get(way, {})
    path = request.getfixturevalue("fake_munge" if way == "credential" else "bare_path")
    check_all_started(run_ranks(tmp_path, [step(rank, nodes) | more for rank in range(len(nodes))], path), nodes)
    if way == "file":
        assert list((tmp_path / ".horo").iterdir()) == []
        assert (tmp_path / ".horo").stat().st_mode & 0o777 == 0o700
    else:
        assert not (tmp_path / ".horo").exists()


def test_a_damaged_home_is_said_with_the_way_out(bare_path: Path, tmp_path: Path) -> None:
    (tmp_path / ".horo").write_text("a file")
    ((code, _, errors),) = run_ranks(tmp_path, [step(0, [0, 0])], bare_path)
    assert code == 1
    assert "cannot agree on a secret: MUNGE cannot be used" in errors
    assert "export HORO_SECRET=$(python3 -c" in errors


def test_rank_0_that_never_comes_is_named_with_where_it_was_looked_for(bare_path: Path, tmp_path: Path) -> None:
    short = step(1, [0, 0]) | {"HORO_START_TIMEOUT": "0.3"}
    environs = [short, short | {"HORO_SECRET": SECRET.hex()}]
    for code, _, errors in run_ranks(tmp_path, environs, bare_path):
        assert code == 1
        assert f"rank 1 did not find rank 0 of Slurm's step {JOB_ID}.0.0 on localhost (ports " in errors
        assert "HORO_START_TIMEOUT" in errors


def test_another_secret_does_not_get_in(bare_path: Path, tmp_path: Path) -> None:
    environs = [{**step(rank, [0, 0]), "HORO_SECRET": bytes([rank] * 16).hex()} for rank in range(2)]
    for environ in environs:
        environ["HORO_START_TIMEOUT"] = "2"
    first, second = run_ranks(tmp_path, environs, bare_path)
    assert first[0] == second[0] == 1
    assert "rank 1 has not called horo.torch.init()" in first[2]
    assert "HORO_SECRET is set here, so it must be on all ranks alike" in second[2]  # the ports depend on it


def test_a_node_without_address_is_named(fake_munge: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fake_munge))  # without MUNGE, ranks look for a file and ask for no address
    environ = {**step(1, [0, 1]), "SLURM_STEP_NODELIST": "no-such-host.invalid,h2"}
    before = open_descriptors()
    with pytest.raises(ResourceError, match=r"'no-such-host\.invalid', which SLURM_STEP_NODELIST names first"):
        open_slurm_store(read_launch(environ), read_config(environ), 1)
    assert open_descriptors() <= before


def test_ports_differ_between_starts_and_are_the_same_for_all_ranks() -> None:
    names = [f"712.{step}.0/{epoch}" for step in range(5) for epoch in range(1, 5)]
    ports = [candidate_ports(name) for name in names]
    assert ports == [candidate_ports(name) for name in names]
    assert len({tuple(some) for some in ports}) == len(names)
    assert all(len(set(some)) == 8 and min(some) >= 10_000 and max(some) < 32_768 for some in ports)
    few = range(40000, 40003)
    for own in (candidate_ports(name, ports=few) for name in names):
        assert 1 <= len(set(own)) == len(own) and set(own) <= set(few)


def test_a_credential_of_others_or_a_used_one_is_refused(fake_munge: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fake_munge))
    credential = encode(b"secret\n\nwith an empty line")
    assert decode(credential) == b"secret\n\nwith an empty line"
    with pytest.raises(ResourceError, match="unmunge: unmunge: Error: Replayed credential"):
        decode(credential)
    monkeypatch.setenv("FAKE_UID", str(os.getuid() + 1))
    with pytest.raises(ResourceError, match="made by another user"):
        decode(encode(b"x"))


def test_fetch_takes_the_first_usable_answer_and_leaves_nothing_open() -> None:
    before = open_descriptors()
    silent = socket.create_server(("127.0.0.1", 0))
    closed = socket.socket()
    closed.bind(("127.0.0.1", 0))  # and not listening: nobody else gets the port
    endpoints = [Endpoint(*server.getsockname()) for server in (silent, closed)]
    looked: list[int] = []

    def look() -> str | None:
        looked.append(1)
        return "elsewhere" if len(looked) == 4 else None

    assert fetch(endpoints, 20, lambda data: None, look) == "elsewhere"
    assert fetch(endpoints, 0.1, lambda data: None, lambda: None) is None
    silent.close()
    closed.close()
    assert open_descriptors() <= before


def test_a_secret_file_that_others_could_write_is_refused(tmp_path: Path) -> None:
    file = CredentialFile("7.0.0/1", tmp_path)
    assert file.read() is None
    file.write(b"one")
    file.write(b"two")
    assert file.read() == b"two"
    assert file.path.name == "slurm-7.0.0_1"
    file.path.chmod(0o640)
    with pytest.raises(ResourceError, match="chmod 700"):
        file.read()
    file.path.chmod(0o600)
    file.path.parent.chmod(0o755)
    for use in (file.read, lambda: file.write(b"x")):
        with pytest.raises(ResourceError, match="others could read or change it"):
            use()
    file.remove()
    file.remove()
    assert not file.path.exists()
