"""The store of ranks that srun has started: real processes in Slurm's environment, with MUNGE, a file or a secret."""

import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from descriptors import open_descriptors
from joining import SECRET

from horo.bootstrap.auth.credential_file import CredentialFile
from horo.bootstrap.auth.munge import decode, encode
from horo.bootstrap.launchers.slurm_store import candidate_ports, open_slurm_store
from horo.bootstrap.launchers.variables import read_launch
from horo.bootstrap.net.addresses import Endpoint
from horo.bootstrap.net.advertisement import fetch
from horo.config.table import read_config
from horo.errors import ResourceError

JOB = str(os.getpid())
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


def step(rank: int, nodes: Sequence[int], job: str = JOB) -> dict[str, str]:
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
        assert f"rank 1 did not find rank 0 of Slurm's step {JOB}.0.0 on localhost (ports " in errors
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
