"""Processes that a rank starts: those that inherit its place are refused, those with a place of their own work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(240)

HEAD = """
import multiprocessing, os, subprocess, sys
import torch
import horo.torch as hvd

def refused():
    try:
        hvd.init()
    except ValueError as error:
        return str(error)
    return f"joined as rank {hvd.rank()} of {hvd.size()}"

def tell(queue):
    queue.put(refused())

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1
    def __getitem__(self, index):
        return refused()

"""
PLAIN = f"""
import multiprocessing, os, socket, subprocess, sys
sys.path.insert(0, {str(Path(__file__).resolve().parent.parent)!r})
from plain_rank import Rank

def refused():
    try:
        return "joined as %d of %d" % tuple(Rank().start())
    except ValueError as error:
        return str(error)

def tell(queue):
    queue.put(refused())

"""
"""For ranks that need no torch, which takes longer to start than all else here."""
SPAWN = """
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    child = multiprocessing.get_context("spawn").Process(target=tell, args=(queue,))
    child.start()
    said = queue.get()
    child.join()
"""
BODIES = {
    "spawn": SPAWN,
    "forkserver": """
    queue = multiprocessing.get_context("forkserver").SimpleQueue()
    child = multiprocessing.get_context("forkserver").Process(target=tell, args=(queue,))
    child.start()
    said = queue.get()
    child.join()
""",
    "program": """
    code = "import runpy; print(runpy.run_path(%r, run_name='child')['refused']())" % __file__
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
""",
    "program of a program": """
    code = "import runpy; print(runpy.run_path(%r, run_name='child')['refused']())" % __file__
    said = subprocess.run(["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", code], capture_output=True, text=True)
    said = said.stdout.strip()
""",
}
DATA_LOADER = """
    loader = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context="spawn")
    said = next(iter(loader))[0]
"""
SAY = """
    # One write: torchrun's ranks share a pipe, and print() to an unbuffered stdout writes the newline apart.
    os.write(1, f"{os.environ.get('WAY')}: {os.getpid()} hears: {said}\\n".encode())
"""
FOOT = f"{SAY}    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0\n"


def run(script: Path, text: str, size: int = 2, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    script.write_text(text)
    place = ["-m", "horo.runner", "-np", str(size), "--oversubscribe", "--no-prefix", sys.executable]
    command = [sys.executable, *(launcher or place), str(script)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def are_refused(lines: list[str], ways: list[str]) -> None:
    assert sorted(line.split(": ")[0] for line in lines) == sorted(ways), lines
    for line in lines:
        pid = line.split(": ")[1].split()[0]
        assert f"(process {pid}), has inherited its environment and is not a rank itself" in line
        assert "if __name__ == '__main__'" in line
        assert "hororun -np 1" in line


def test_what_inherits_a_ranks_place_is_refused_and_the_job_goes_on(tmp_path: Path) -> None:
    text = PLAIN + "if __name__ == '__main__':\n    rank = Rank()\n    rank.start()\n"
    for way, body in BODIES.items():
        text += f"    os.environ['WAY'] = {way!r}\n{body}{SAY}    assert rank.allreduce('x') == [3.0, 3.0]\n"
    are_refused(run(tmp_path / "train.py", text + "    rank.close()\n").stdout.splitlines(), [*BODIES, *BODIES])


def test_a_worker_of_a_data_loader_is_refused_and_the_job_goes_on(tmp_path: Path) -> None:
    text = HEAD + f"if __name__ == '__main__':\n    hvd.init()\n    os.environ['WAY'] = 'worker'\n{DATA_LOADER}{FOOT}"
    are_refused(run(tmp_path / "train.py", text).stdout.splitlines(), ["worker", "worker"])


def test_a_script_without_a_guard_says_so_in_the_child(tmp_path: Path) -> None:
    text = (
        HEAD.replace("def tell", "hvd.init()\n\ndef tell")
        + """
if hvd.rank() == 0:
    child = multiprocessing.get_context("spawn").Process(target=tell, args=(None,))
    child.start()
    child.join()
    assert child.exitcode == 1
hvd.barrier()
"""
    )
    assert (
        "A worker of a DataLoader or of multiprocessing does not call init()" in run(tmp_path / "train.py", text).stderr
    )


def test_torchruns_ranks_refuse_what_they_spawn(tmp_path: Path) -> None:
    text = HEAD + "if __name__ == '__main__':\n    hvd.init()\n" + SPAWN + FOOT
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    lines = run(tmp_path / "train.py", text, launcher=torchrun).stdout.splitlines()
    assert sum("is not a rank itself" in line for line in lines) == 2


INNER = {
    "hororun": [sys.executable, "-m", "horo.runner", "-np", "2", "--oversubscribe", "--no-prefix", sys.executable],
    "hororun -np 1": [sys.executable, "-m", "horo.runner", "-np", "1", "--no-prefix", sys.executable],
    "without variables": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}


TELL = """
rank = Rank()
place = rank.start()
os.write(1, f"inner {place}\\n".encode())  # one write, see SAY
rank.close()
"""


@pytest.mark.parametrize("way", INNER)
def test_a_rank_may_start_jobs(tmp_path: Path, way: str) -> None:
    inner = tmp_path / "inner.py"
    inner.write_text(PLAIN + TELL)
    text = f"""{PLAIN}
rank = Rank()
if rank.start()[0] == 0:
    environment = dict(os.environ)
    if {way!r} == "without variables":
        for name in [*environment]:
            if name.startswith("HORO") and not name.endswith("PROCESS"):
                del environment[name]
    subprocess.run({[*INNER[way], str(inner)]!r}, env=environment, check=True)
rank.allreduce("the end")
rank.close()
"""
    size = 2 if way in ("hororun", "torchrun") else 1
    assert sorted(run(tmp_path / "train.py", text).stdout.splitlines()) == [f"inner {[r, size]}" for r in range(size)]


BY_HAND = """
rank = Rank()
if rank.start()[0] == 1:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(some.getsockname()[1]), "WORLD_SIZE": "2"}
    inner = [subprocess.Popen([sys.executable, INNER], env={**os.environ, **master, "RANK": str(r)}) for r in (0, 1)]
    assert [each.wait() for each in inner] == [0, 0]
rank.allreduce("the end")
rank.close()
"""
INNER_BY_HAND = """
if __name__ == "__main__":
    for time in range(2):
        rank = Rank()
        place = rank.start()
        assert "HOROVOD_RANK" not in os.environ and "HORO_HOST_MARK" in os.environ
        os.write(1, f"inner {place} {rank.allreduce('x')}\\n".encode())
        rank.close()
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    child = multiprocessing.get_context("spawn").Process(target=tell, args=(queue,))
    child.start()
    assert f"process {os.getpid()}), has inherited" in queue.get()
    child.join()
"""


def test_a_rank_may_give_places_by_torchs_variables(tmp_path: Path) -> None:
    inner = tmp_path / "inner.py"
    inner.write_text(PLAIN + INNER_BY_HAND)
    lines = run(tmp_path / "train.py", PLAIN + BY_HAND.replace("INNER", repr(str(inner)))).stdout.splitlines()
    assert sorted(lines) == ["inner [0, 2] [3.0, 3.0]"] * 2 + ["inner [1, 2] [3.0, 3.0]"] * 2


def test_a_rank_that_replaces_its_program_is_still_the_rank(tmp_path: Path) -> None:
    text = (
        PLAIN
        + """
if "again" not in sys.argv:
    from horo.bootstrap.launchers.inherited import name_rank
    from horo.bootstrap.launchers.variables import read_launch
    name_rank(os.environ, read_launch(os.environ))
    assert os.environ["HORO_RANK_PROCESS"]
    os.execv(sys.executable, [sys.executable, __file__, "again"])
rank = Rank()
print(rank.start())
rank.close()
"""
    )
    assert sorted(run(tmp_path / "train.py", text).stdout.splitlines()) == ["[0, 2]", "[1, 2]"]


def test_the_children_of_a_job_of_one_are_jobs_of_one(tmp_path: Path) -> None:
    text = PLAIN + "if __name__ == '__main__':\n    rank = Rank()\n    rank.start()\n" + SPAWN + "    print(said)\n"
    assert run(tmp_path / "train.py", text, size=1).stdout == "joined as 0 of 1\n"
    assert "HORO_RANK_PROCESS" not in os.environ
