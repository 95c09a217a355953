"""Under Slurm the ports at which ranks find each other are known to everybody, unless there is a secret."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from horo.bootstrap.launchers import slurm_store
from horo.bootstrap.launchers.slurm_store import candidate_ports, open_slurm_store
from horo.bootstrap.launchers.variables import Launch, read_launch
from horo.config.table import Config, read_config
from horo.errors import ResourceError
from horo.errors import TimeoutError as HoroTimeoutError

JOB = f"5{os.getpid()}"
SECRET = bytes(range(32))


def step(rank: int, **extra: str) -> tuple[Launch, Config]:
    environ = {
        "SLURM_JOB_ID": JOB, "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost", "HORO_START_TIMEOUT": "30", **extra
    }  # fmt: skip
    return read_launch(environ), read_config(environ)


def start(**extra: str) -> list[bytes]:
    """Two ranks find each other and close again; the secret of each."""
    found: list[bytes | BaseException] = []

    def run(rank: int) -> None:
        try:
            store, secret = open_slurm_store(*step(rank, **extra), 1)
        except BaseException as error:
            found.append(error)
        else:
            found.append(secret)
            store.close()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return [result for result in found if isinstance(result, bytes)]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    return tmp_path


@contextlib.contextmanager
def squatting(ports: Sequence[int]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        yield


def public_ports() -> list[int]:
    return candidate_ports(f"{JOB}.0.0/1")


def test_ports_are_a_secret_where_there_is_one() -> None:
    name = f"{JOB}.0.0/1"
    ports = [set(candidate_ports(name, secret)) for secret in (None, SECRET, SECRET[::-1])]
    assert candidate_ports(name, SECRET) == candidate_ports(name, SECRET)
    assert all(len(some) == 8 for some in ports)
    assert len(ports[0] | ports[1] | ports[2]) > 20


def test_squatting_the_ports_of_a_job_with_a_secret_is_no_use(home: Path) -> None:
    with squatting(public_ports()):
        first, second = start(HORO_SECRET=SECRET.hex())
    assert first == second
    assert not (home / ".horo").exists()


@pytest.mark.parametrize("secret", ["", SECRET.hex()])
def test_where_no_port_is_free_the_home_folder_serves(home: Path, monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    monkeypatch.setattr(slurm_store.munge, "is_installed", lambda: True)
    monkeypatch.setattr(slurm_store.munge, "encode", lambda payload: payload)
    monkeypatch.setattr(slurm_store.munge, "decode", lambda credential: credential)
    seen: list[str] = []
    real = slurm_store.CredentialFile.write

    def write(self: slurm_store.CredentialFile, content: bytes) -> None:
        seen.append(content.decode("latin-1"))
        real(self, content)

    monkeypatch.setattr(slurm_store.CredentialFile, "write", write)
    monkeypatch.setattr(slurm_store, "candidate_ports", lambda name, secret=None, ports=None: public_ports())
    with squatting(public_ports()):
        first, second = start(**({"HORO_SECRET": secret} if secret else {}))
    assert first == second
    assert len(seen) == 1
    if secret:
        assert first.hex() not in seen[0]
    assert list((home / ".horo").iterdir()) == []


def test_a_forged_announcement_in_the_home_folder_is_not_believed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.setblocking(False)
        launch, config = step(1, HORO_SECRET=SECRET.hex(), HORO_START_TIMEOUT="0.3")
        info = {"name": f"{JOB}.0.0/1", "endpoints": [trap.getsockname()], "secret": ""}
        slurm_store.CredentialFile(f"{JOB}.0.0/1", home).write(bytes(32) + json.dumps(info).encode())
        with pytest.raises(HoroTimeoutError, match="does not know this rank's HORO_SECRET"):
            open_slurm_store(launch, config, 1)
        with pytest.raises(BlockingIOError):
            trap.accept()


def test_a_home_folder_that_is_open_to_others_does_not_stop_a_job_with_a_secret(home: Path) -> None:
    (home / ".horo").mkdir(mode=0o755)
    first, second = start(HORO_SECRET=SECRET.hex())
    assert first == second


def test_neither_ports_nor_home_is_said(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / ".horo").write_text("a file")
    monkeypatch.setattr(slurm_store, "candidate_ports", lambda name, secret=None, ports=None: public_ports())
    with squatting(public_ports()), pytest.raises(ResourceError, match=r"none of the ports .* nor .*\.horo"):
        open_slurm_store(*step(0, HORO_SECRET=SECRET.hex()), 1)
