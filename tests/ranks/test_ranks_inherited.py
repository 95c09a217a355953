"""Processes that a rank starts: an inherited place is refused; and jobs of torchrun, which names who failed first."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import run_python

pytestmark = pytest.mark.timeout(240)
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
