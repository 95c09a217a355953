"""Elastic jobs whose hosts a script discovers, on two hosts, over real ssh."""

from pathlib import Path

from jobs import Hororun, Launched
from namespaces import Cluster
from test_elastic_hosts import FOREVER, PATIENCE_S, PLACES, WORKER, agents, ends, said_until, stop, wait_until

FLAPS = 2


def start(cluster: Cluster, script: str, *words: str, stop_file: Path = Path("/")) -> Launched:
    """Starts a job of ``elastic_worker`` on the first host, for which a script names the hosts."""
    own = (f"--ssh-args={cluster.ssh_args}", "-x", f"STOP_FILE={stop_file}", "--host-discovery-script", script)
    prefix = cluster.on(cluster.hosts[0], ())
    return Hororun.start(cluster, *own, *words, WORKER, FOREVER, where=None, prefix=prefix, environment=PLACES)


def write(path: Path, text: str) -> None:
    """Writes the whole file at once, for one that reads it all the time."""
    beside = path.with_suffix(".new")
    beside.write_text(text)
    beside.replace(path)


def test_hosts_come_and_go(cluster: Cluster, tmp_path: Path) -> None:
    a, b = cluster.hosts
    hosts = tmp_path / "hosts"
    write(hosts, f"{a.name}:1\n")
    job = start(cluster, f"cat {hosts}", "--min-np", "1", "--max-np", "2", stop_file=tmp_path / "stop")
    said_until(job, "worker 0 is 0 of 1")
    write(hosts, f"{a.name}:1\n{b.name}:1\n")
    said_until(job, "worker 1 is 1 of 2")
    write(hosts, f"# {b.name} goes\n{a.name}:1\n")
    said_until(job, "worker 0 is 0 of 1")
    wait_until(lambda: not agents(cluster, b), "the agent of the host has ended")
    write(hosts, f"{b.name}:1\n{a.name}:1\n")
    said_until(job, "worker 2 is 1 of 2")
    write(hosts, f"{b.name}:1\n")  # the state is with the rank that stays
    said_until(job, "worker 2 is 0 of 1")
    done = stop(job, tmp_path / "stop")
    assert ends(done.stdout).keys() == {2}
    assert f"hororun: {b.name} was found" in done.stderr
    assert f"hororun: {b.name} is not found any more: its workers leave" in done.stderr


def test_a_host_that_is_missing_once_stays(cluster: Cluster, tmp_path: Path) -> None:
    a, b = cluster.hosts
    asked = tmp_path / "asked"
    script = f"echo {a.name}:1; echo >> {asked}; test $(($(wc -l < {asked}) % 2)) = 0 || echo {b.name}:1"
    job = start(cluster, script, "--min-np", "2", stop_file=tmp_path / "stop")
    said_until(job, "worker 1 is 1 of 2")
    before = asked.stat().st_size
    wait_until(lambda: asked.stat().st_size > before + 2 * FLAPS, "the script has run several times")
    done = stop(job, tmp_path / "stop")
    assert ends(done.stdout).keys() == {0, 1}
    assert "is not found any more" not in done.stderr and "generations" not in done.stderr


def test_the_job_does_not_start_without_hosts(cluster: Cluster) -> None:
    done = start(cluster, "echo no such cluster >&2; exit 3", "--min-np", "1").finish(PATIENCE_S)
    assert done.returncode == 78
    assert done.stderr.endswith("ended with code 3: no such cluster\n")
