"""Elastic jobs on two hosts, over real ssh: what dies or cannot be reached is replaced or done without; hosts that a
script discovers come and go.
"""

import json
import os
import re
import signal
from collections import Counter
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from jobs import TORCH_S, Hororun, Launched, kill_all, parent_of, wait_until
from namespaces import Cluster, ClusterHost

TESTS = Path(__file__).parents[1]
WORKER = str(TESTS / "elastic" / "elastic_worker.py")
TRAINING = str(TESTS / "elastic" / "elastic_training.py")
FOREVER = "1000000"
PATIENCE_S = 4 * TORCH_S
PLACES = {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS / "elastic"), os.environ.get("PYTHONPATH", "")])}


def where(cluster: Cluster, slots: int) -> str:
    return ",".join(f"{host.name}:{slots}" for host in cluster.hosts)


def stop(job: Launched, path: Path) -> CompletedProcess[str]:
    """Ends the training of ``elastic_worker``."""
    path.touch()
    return finish(job)


def start(cluster: Cluster, *words: str, slots: int = 1, **environment: str) -> Launched:
    told = {**PLACES, **environment}
    return cluster.start(*words, where=where(cluster, slots), environment=told)


def finish(job: Launched, code: int = 0) -> CompletedProcess[str]:
    done = job.finish(PATIENCE_S)
    assert done.returncode == code, done.stderr
    return done


def ends(out: str) -> dict[int, int]:
    """The steps that each worker had at its end."""
    return {int(worker): int(steps) for worker, steps in re.findall(r"end (\d+) (\d+)$", out, re.M)}


def agents(cluster: Cluster, host: ClusterHost) -> list[int]:
    """The agent on a host, without its guard."""
    found = cluster.processes(host, "horo.runner.agent")
    return [pid for pid in found if b"sshd" in Path(f"/proc/{parent_of(pid)}/cmdline").read_bytes()]


def test_a_rank_that_is_killed_is_replaced_on_its_host(cluster: Cluster) -> None:
    a, b = cluster.hosts
    done = finish(
        start(cluster, "-np", "4", "--min-np", "4", WORKER, "30", "0:10:kill", "2:15:kill", "3:20:leave", slots=2)
    )
    assert ends(done.stdout) == {1: 30, 4: 30, 5: 30, 6: 30}
    assert f"hororun: worker 0 (rank 0) on {a.name} was killed by SIGKILL" in done.stderr
    assert f"hororun: worker 4 on {a.name} starts" in done.stderr
    assert re.search(rf"hororun: worker 3 \(rank \d\) on {b.name} was killed by SIGKILL", done.stderr)
    child = re.search(r"child (\d+)", done.stdout)
    assert child is not None and not Path(f"/proc/{child[1]}").exists()


@pytest.mark.parametrize("victim", ["agent", "workers"])
def test_the_other_host_goes_on_and_the_lost_one_is_used_again(cluster: Cluster, tmp_path: Path, victim: str) -> None:
    _, b = cluster.hosts
    limits = ("-np", "2", "--min-np", "1", "--blacklist-cooldown-range", "1", "1")
    job = start(cluster, *limits, WORKER, FOREVER, STOP_FILE=str(tmp_path / "stop"))
    job.said_until("worker 1 is 1 of 2")
    kill_all(agents(cluster, b) if victim == "agent" else cluster.processes(b, WORKER))
    job.said_until("worker 0 is 0 of 1")
    job.said_until("worker 2 is 1 of 2")
    done = stop(job, tmp_path / "stop")
    assert ends(done.stdout).keys() == {0, 2} and len(set(ends(done.stdout).values())) == 1
    assert f"worker 2 on {b.name} starts" in done.stderr
    if victim == "agent":
        assert re.search(rf"hororun: {b.name} is lost \(.*\); it is tried again after \d+ s", done.stderr)


def test_workers_of_an_agent_that_is_stopped_do_not_hold_the_others_up(cluster: Cluster, tmp_path: Path) -> None:
    a, b = cluster.hosts
    told = {"HORO_PEER_TIMEOUT": "60", "STOP_FILE": str(tmp_path / "stop")}
    limits = ("-np", "3", "--min-np", "1", "--host-timeout", "6", "--blacklist-cooldown-range", "1", "1")
    words = (*limits, WORKER, FOREVER)
    job = cluster.start(*words, where=f"{a.name}:1,{b.name}:2", environment={**PLACES, **told})
    job.said_until("worker 2 is 2 of 3")
    stopped, left = agents(cluster, b), cluster.processes(b, WORKER)
    kill_all(stopped, signal.SIGSTOP)
    try:
        job.said_until("worker 0 is 0 of 1")
        job.said_until(" of 3 at ")
        assert not set(left) & set(cluster.processes(b, WORKER))
    finally:
        kill_all(stopped, signal.SIGCONT)
    done = stop(job, tmp_path / "stop")
    assert ends(done.stdout).keys() == {0, 3, 4}


def test_others_train_on_with_workers_of_a_stopped_agent_until_they_commit(cluster: Cluster, tmp_path: Path) -> None:
    _, b = cluster.hosts
    limits = ("-np", "2", "--min-np", "1", "--host-timeout", "3", "--blacklist-cooldown-range", "1", "1")
    slow = ("-x", "LEAVE_EVERY=400")  # longer than until another agent would come
    job = start(cluster, *limits, *slow, WORKER, FOREVER, STOP_FILE=str(tmp_path / "stop"))
    job.said_until("worker 1 is 1 of 2")
    stopped = agents(cluster, b)
    kill_all(stopped, signal.SIGSTOP)
    try:
        said = job.said_until("worker 0 is 0 of 1")
    finally:
        kill_all(stopped, signal.SIGCONT)
    assert "error" not in said and re.search(r"worker 0 is 0 of 1 at \d*[02468]00$", said.strip())
    done = stop(job, tmp_path / "stop")
    assert f"{b.name} is lost" in done.stderr and "killed" not in done.stderr


def test_ranks_of_a_host_whose_agent_gets_sigterm_leave_in_order(cluster: Cluster, tmp_path: Path) -> None:
    _, b = cluster.hosts
    limits = ("-np", "2", "--min-np", "1", "--grace-seconds", "60")
    job = start(cluster, *limits, WORKER, FOREVER, STOP_FILE=str(tmp_path / "stop"))
    job.said_until("worker 1 is 1 of 2")
    kill_all(agents(cluster, b), signal.SIGTERM)
    said = job.said_until("worker 0 is 0 of 1")
    wait_until(lambda: not agents(cluster, b), "the agent has ended")
    done = stop(job, tmp_path / "stop")
    assert ends(done.stdout).keys() == {0}
    assert f"{b.name} has to end within 60 s (SIGTERM has come to its agent): its workers leave" in done.stderr
    assert "killed" not in done.stderr and "error" not in said + done.stdout


def test_the_half_that_hororun_reaches_goes_on_and_the_other_one_ends(cluster: Cluster, tmp_path: Path) -> None:
    _, b = cluster.hosts
    told = {"HORO_PEER_TIMEOUT": "4", "STOP_FILE": str(tmp_path / "stop")}
    job = start(cluster, "-np", "2", "--min-np", "1", "--host-timeout", "6", WORKER, FOREVER, **told)
    job.said_until("worker 1 is 1 of 2")
    cluster.cut(b)
    wait_until(lambda: not cluster.processes(b, WORKER), "the other half has ended")
    job.said_until("worker 0 is 0 of 1")
    done = stop(job, tmp_path / "stop")
    assert ends(done.stdout).keys() == {0}
    assert f"{b.name} is lost (host {b.name} has sent nothing for 6 s (--host-timeout))" in done.stderr


def test_a_host_that_cannot_be_reached_at_the_start_is_done_without(cluster: Cluster) -> None:
    a, _ = cluster.hosts
    words = ("-np", "2", "--min-np", "1", WORKER, "5")
    done = finish(cluster.start(*words, where=f"{a.name}:1,no-such-host:1", environment=PLACES))
    assert ends(done.stdout) == {0: 5}
    assert "hororun: no-such-host cannot be used (cannot reach host no-such-host" in done.stderr


def test_training_goes_on_from_the_last_commit_of_either_host(cluster: Cluster, tmp_path: Path) -> None:
    plan = {"deaths": {"0": (9, "recorded"), "1": (9, "stepped")}, "every": 4}
    finish(start(cluster, "-np", "2", "--min-np", "2", TRAINING, str(tmp_path), json.dumps(plan)))
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("result.*"))]
    assert len(found) == 2
    assert found[0]["digest"] == found[1]["digest"]
    for result in found:
        assert set(Counter(map(tuple, result["seen"])).values()) == {1}


def write(path: Path, text: str) -> None:
    """Writes the whole file at once, for one that reads it all the time."""
    beside = path.with_suffix(".new")
    beside.write_text(text)
    beside.replace(path)


def test_hosts_come_and_go(cluster: Cluster, tmp_path: Path) -> None:
    a, b = cluster.hosts
    hosts = tmp_path / "hosts"
    write(hosts, f"{a.name}:1\n")
    words = (f"--ssh-args={cluster.ssh_args}", "-x", f"STOP_FILE={tmp_path / 'stop'}", "--min-np", "1", "--max-np", "2")
    found = ("--host-discovery-script", f"cat {hosts}")
    prefix = cluster.on(a, ())
    job = Hororun.start(cluster, *words, *found, WORKER, FOREVER, where=None, prefix=prefix, environment=PLACES)
    job.said_until("worker 0 is 0 of 1")
    write(hosts, f"{a.name}:1\n{b.name}:1\n")
    job.said_until("worker 1 is 1 of 2")
    write(hosts, f"# {b.name} goes\n{a.name}:1\n")
    job.said_until("worker 0 is 0 of 1")
    wait_until(lambda: not agents(cluster, b), "the agent of the host has ended")
    write(hosts, f"{b.name}:1\n{a.name}:1\n")
    job.said_until("worker 2 is 1 of 2")
    write(hosts, f"{b.name}:1\n")  # the state is with the rank that stays
    job.said_until("worker 2 is 0 of 1")
    done = stop(job, tmp_path / "stop")
    assert ends(done.stdout).keys() == {2}
    assert f"hororun: {b.name} was found" in done.stderr
    assert f"hororun: {b.name} is not found any more: its workers leave" in done.stderr
