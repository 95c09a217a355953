"""The process of a rank: what its children inherit, what its Python may lack, and who connects to its ports."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from jobs import DEADLINE_S, PLAIN_RANK, Flags, Hororun, Launched, marked_processes, run_python, wait_until

from horo.bootstrap.auth.handshake import Claim, HandshakeError, Purpose, authenticate

pytestmark = pytest.mark.timeout(240)
PLAIN = f"""{PLAIN_RANK}
import multiprocessing, os, socket, subprocess

def refused():
    try:
        return "joined as %d of %d" % tuple(Rank().start())
    except ValueError as error:
        return str(error)

def tell(queue):
    queue.put(refused())

def start(method):
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    child = context.Process(target=tell, args=(queue,))
    child.start()
    said = queue.get()
    child.join()
    return said

def inner(*words):
    code = "import runpy; print(runpy.run_path(%r, run_name='child')['refused']())" % __file__
    return subprocess.run([*words, sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()

rank = Rank()
"""
"""For ranks that need no torch, which takes longer to start than all else here."""
MAIN = "if __name__ == '__main__':\n    rank.start()\n"
WAYS = {
    "spawn": "start('spawn')",
    "forkserver": "start('forkserver')",
    "program": "inner()",
    "program of a program": """inner("sh", "-c", '"$@"; true', "sh")""",
}
HORORUN = ("-m", "horo.runner", "--oversubscribe", "--no-prefix", "-np")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def run(script: Path, text: str, *launcher: str) -> subprocess.CompletedProcess[str]:
    """Runs a script, by default on two ranks of hororun."""
    script.write_text(text)
    done = run_python(*(launcher or (*HORORUN, "2", sys.executable)), str(script), timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def are_refused(lines: list[str], ways: list[str]) -> None:
    assert sorted(line.split(": ")[0] for line in lines) == sorted(ways), lines
    for line in lines:
        pid = line.split(": ")[1].split()[0]
        assert f"(process {pid}), has inherited its environment and is not a rank itself" in line
        assert "if __name__ == '__main__'" in line
        assert "hororun -np 1" in line


HEARS = "os.write(1, f'WAY: {os.getpid()} hears: {SAID}\\n'.encode())"
"""One write: torchrun's ranks share a pipe, and print() may write the newline apart."""


def test_what_inherits_a_ranks_place_is_refused_and_the_job_goes_on(tmp_path: Path) -> None:
    text = PLAIN + MAIN
    for way, start in WAYS.items():
        text += f"    said = {start}\n    {HEARS.replace('WAY', way).replace('SAID', 'said')}\n"
        text += "    assert rank.allreduce('x') == [3.0, 3.0]\n"
    are_refused(run(tmp_path / "train.py", text + "    rank.close()\n").stdout.splitlines(), [*WAYS] * 2)


def test_a_script_without_a_guard_says_so_in_the_child(tmp_path: Path) -> None:
    text = f"""{PLAIN}
if rank.start()[0] == 0:
    child = multiprocessing.get_context("spawn").Process(target=tell, args=(None,))
    child.start()
    child.join()
    assert child.exitcode == 1
rank.allreduce("the end")
rank.close()
"""
    said = run(tmp_path / "train.py", text).stderr
    assert "A worker of a DataLoader or of multiprocessing does not call init()" in said


INNER: dict[str, tuple[str, ...]] = {
    "hororun": (*HORORUN, "2", sys.executable),
    "hororun -np 1": (*HORORUN, "1", sys.executable),
    "without variables": (),
    "torchrun": (*TORCHRUN, "1"),
}


@pytest.mark.parametrize("way", INNER)
def test_a_rank_may_start_jobs(tmp_path: Path, way: str) -> None:
    inner = tmp_path / "inner.py"
    inner.write_text(PLAIN + "os.write(1, f'inner {rank.start()}\\n'.encode())\nrank.close()\n")
    text = f"""{PLAIN}
if rank.start()[0] == 0:
    environment = dict(os.environ)
    if {way!r} == "without variables":
        for name in [*environment]:
            if name.startswith("HORO") and not name.endswith("PROCESS"):
                del environment[name]
    subprocess.run({[sys.executable, *INNER[way], str(inner)]!r}, env=environment, check=True)
rank.allreduce("the end")
rank.close()
"""
    size = 2 if way == "hororun" else 1
    assert sorted(run(tmp_path / "train.py", text).stdout.splitlines()) == [f"inner {[r, size]}" for r in range(size)]


TRAIN = f"""{PLAIN}
import atexit, time
from horo.bootstrap import ending

ending._AFTER_CAUSE_S = 60  # until torchrun has seen the end of the cause, which may take long on a busy machine
if __name__ == "__main__":
    number, _ = rank.start()
    said = start("spawn")
    {HEARS.replace("WAY", "spawn").replace("SAID", "said")}
    rank.allreduce("first")
    if number == 1:
        atexit.register(time.sleep, 0.3)  # the stimulus: the cause is slower to end than its victim
        END
    try:
        rank.allreduce("second")
    except Exception:
        ANSWER
"""
RAISES, EXITS = "raise ValueError('bad sample in shard 7')", "sys.exit(7)"


@pytest.mark.parametrize(
    ("end", "answer", "code"),
    [(RAISES, "rank.close(); raise", "1"), (EXITS, "rank.close(); sys.exit(9)", "7")],
    ids=["an exception, and its victim leaves the job first", "sys.exit, and its victim has a code of its own"],
)
def test_of_torchruns_ranks_the_cause_is_the_first_failure(tmp_path: Path, end: str, answer: str, code: str) -> None:
    """And what inherits their place is refused."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN.replace("END", end).replace("ANSWER", answer))
    done = run_python(*TORCHRUN, "2", "--monitor-interval", "0.1", str(script), timeout=200)
    assert done.returncode != 0
    are_refused(done.stdout.splitlines(), ["spawn"] * 2)
    assert ("PeerLostError: rank 1 (" in done.stderr) == ("exit" not in answer)
    assert re.findall(r"failed \(exitcode: (\d+)\) local_rank: (\d)", done.stderr) == [(code, "1")], done.stderr


SCRIPT = """
import sys
sys.modules["numpy"] = None  # import numpy is an ImportError from here on
import warnings
warnings.simplefilter("ignore")
import torch
import horo.torch as hvd
hvd.init()
rank, size = hvd.rank(), hvd.size()
try:
    torch.ones(1).numpy()
except RuntimeError:
    pass
else:
    raise AssertionError("this torch does not need numpy for numpy()")

assert hvd.broadcast_object({"epoch": 3, "rank": rank}) == {"epoch": 3, "rank": 0}
assert hvd.broadcast_object(b"x" * 100_000 if rank == 0 else None) == b"x" * 100_000
assert hvd.broadcast_object(None, name="named") is None
assert hvd.allgather_object(("r", rank)) == [("r", r) for r in range(size)]
for fault in (lambda: hvd.broadcast_object(x for x in ()), lambda: hvd.allgather_object(open(__file__))):
    try:
        fault()
    except Exception as error:
        print("refused:", type(error).__name__)
assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [float(size)] * 3
assert hvd.grouped_allreduce([torch.ones(2), torch.ones(())], op=hvd.Sum)[1].item() == size
assert hvd.allgather(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.bfloat16
assert hvd.broadcast(torch.full((2,), float(rank)), 0).tolist() == [0.0, 0.0]
hvd.barrier()

for scalar in (False, True):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    if scalar:
        model.register_parameter("scalar", torch.nn.Parameter(torch.tensor(1.0)))
        model.register_parameter("empty", torch.nn.Parameter(torch.ones(0)))
    optimizer = torch.optim.Adam(model.parameters())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    hvd.average_buffers(model)
hvd.shutdown()
print("done")
"""


def test_the_whole_api_works_where_numpy_cannot_be_imported(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = run_python(*HORORUN, "2", sys.executable, str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("done") == 2


def test_an_installation_asks_for_no_numpy() -> None:
    root = Path(__file__).parents[2]
    wanted = next(line for line in (root / "pyproject.toml").read_text().splitlines() if "dependencies = [" in line)
    assert "numpy" not in wanted
    files = [path for folder in ("horo", "runner") for path in (root / folder).rglob("*.py")]
    assert [path for path in files if re.search(r"(import|from) numpy|[._]numpy\(", path.read_text())] == []


# memfd_create, the seals and the eventfds are there only where the libc of the build had them.
OLD_LIBC = f"""
import fcntl, os, sys
for module in (os, fcntl):
    for name in dir(module):
        if name.startswith(("memfd_", "MFD_", "eventfd", "EFD_", "F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_")):
            delattr(module, name)
assert not hasattr(os, "memfd_create")
{PLAIN_RANK}rank = Rank()
rank.start()
print("sum", rank.allreduce("x"))
rank.close()
"""


def test_ranks_start_where_os_has_no_memfd_and_no_eventfd() -> None:
    for total, launcher in ((1.0, ()), (3.0, (*HORORUN, "2", sys.executable))):
        done = run_python(*launcher, "-c", OLD_LIBC)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [f"sum [{total}, {total}]"] * (2 if launcher else 1)


WORK = """{plain}
import os, pathlib, time

flags, number = pathlib.Path({flags!r}), os.environ["HOROVOD_RANK"]
os.environ["HORO_HOST_ID"] = number  # every rank a host of its own, with a port for the others

def wait_for(name):
    deadline = time.monotonic() + {deadline_s}
    while not (flags / name).exists() and time.monotonic() < deadline:
        time.sleep(0.01)

real = bootstrap.connect_hosts
def connect_late(*arguments, **options):
    (flags / f"connecting.{{number}}").touch()
    if number != "0":
        wait_for("connect")
    return real(*arguments, **options)

bootstrap.connect_hosts = connect_late
rank = Rank()
rank.start()
(flags / f"ready.{{number}}").touch()
wait_for("work")
for _ in range(200):
    result = rank.allreduce("x", 100_000)
print(result)
rank.close()
"""


def listening_ports(job: Launched) -> dict[int, int]:
    """Port and process of every TCP listener of a job."""
    found = {}
    for pid in [job.process.pid, *marked_processes(job.mark)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in psutil.Process(pid).net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    found[each.laddr.port] = pid
    return found


def named_memory(job: Launched) -> list[str]:
    """Shared memory that has a name, which would outlive the job, in any of its processes."""
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in marked_processes(job.mark)]
    assert any("memfd:" in text for text in maps)
    return [line for text in maps for line in text.splitlines() if "/dev/shm" in line or "SYSV" in line]


def send_noise(stack: contextlib.ExitStack, port: int) -> None:
    """Noise, another protocol, silence, half a handshake and a wrong secret; the connections stay open."""

    def connect() -> socket.socket:
        return stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))

    for words in (os.urandom(4096), b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"", b"HORO\x01"):
        with contextlib.suppress(ConnectionError):  # refused in the middle of it
            connect().sendall(words)
    with pytest.raises(HandshakeError):
        authenticate(connect(), os.urandom(32), Claim(Purpose.DATA, 1, 0, 1), time.monotonic() + 10)


def test_who_lacks_the_secret_is_refused_and_reported_and_the_job_goes_on(hororun: Hororun, tmp_path: Path) -> None:
    script = WORK.format(plain=PLAIN_RANK, flags=str(tmp_path), deadline_s=DEADLINE_S)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    flags = Flags(tmp_path)
    with contextlib.ExitStack() as stack:
        job = hororun.start("-np", "3", sys.executable, "-c", script, environment={"TMPDIR": str(temporary)})
        flags.wait([f"connecting.{rank}" for rank in range(3)])
        wait_until(lambda: len(set(listening_ports(job).values())) > 1, "hororun listens, and a rank")
        ports = listening_ports(job)
        for port in ports:
            send_noise(stack, port)
        (tmp_path / "connect").touch()
        flags.wait([f"ready.{rank}" for rank in range(3)])
        assert listening_ports(job).keys() < ports.keys(), "ranks that are connected listen no more"
        for port in listening_ports(job):
            send_noise(stack, port)
        assert not named_memory(job)
        (tmp_path / "work").touch()
        done = job.finish()
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] [6.0, 6.0]" for rank in range(3)]
    assert "hororun: refused a connection from 127.0.0.1" in done.stderr, done.stderr
    assert "[0] horo [0] warning: refused a connection from 127.0.0.1" in done.stderr, done.stderr
    assert not list(temporary.iterdir())
