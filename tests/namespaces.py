"""Hosts on one machine: network namespaces joined by a bridge, each with its own name and a real sshd.

Needs root, ``ip`` and ``sshd``; ``why_not`` says what is missing. Names are unique to the run,
addresses exist only inside the namespaces, and all of it is removed at the end.
"""

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jobs import DEADLINE_S, Hororun, Launched, kill_all, parent_of, wait_until
from skips import apt_install

_SSHD = "/usr/sbin/sshd"
_PROGRAMS = {
    "ip": "iproute2", "tc": "iproute2", "ssh": "openssh-client", _SSHD: "openssh-server", "unshare": "util-linux",
    "hostname": "hostname",
}  # fmt: skip
_SSHD_CONFIG = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile {folder}/{name}.pid
ListenAddress {address}
ListenAddress {address6}
StrictModes no
PasswordAuthentication no
PermitRootLogin yes
AcceptEnv HORO_TEST_MARK
SetEnv TMPDIR={folder}/tmp
"""
_SSH_CONFIG = """
Host *
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking yes
  SendEnv HORO_TEST_MARK
"""
# Inside the namespaces: the host's own /etc/hosts, /run and name, and keys that plain ssh uses; then the command.
_ENTER = """
mount --bind "$1/hosts" /etc/hosts && mount --bind "$1/ssh_config" /etc/ssh/ssh_config &&
mount --bind "$1/$2.run" /run && hostname "$2" && shift 2 && exec "$@"
"""


@dataclass(frozen=True)
class ClusterHost:
    """One host: the name to give to ``-H``, its addresses, the far end of its cable."""

    name: str
    address: str
    address6: str
    cable: str


@dataclass
class Cluster(Hororun):
    """Hosts that know each other by name, and hororun on the first of them.

    ``start`` and ``run`` are those of :class:`jobs.Hororun`, but run on the first host, and by default with two slots
    on every host. In each host ``eth0`` leads to all others.
    """

    folder: Path = Path()
    hosts: list[ClusterHost] = field(default_factory=list)
    switch: str = ""

    @property
    def ssh_args(self) -> str:
        """What makes ssh use this cluster's keys; ``start`` gives it to ``--ssh-args``."""
        return f"-F {self.folder}/ssh_config"

    def on(self, host: ClusterHost, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv`` on a host; its process becomes that of ``argv``."""
        enter = ["ip", "netns", "exec", host.name, "unshare", "--uts", "--mount", "sh", "-c", _ENTER]
        return [*enter, "sh", str(self.folder), host.name, *argv]

    def run_folder(self, host: ClusterHost) -> Path:
        """What is ``/run`` on a host."""
        return self.folder / f"{host.name}.run"

    def run_on(
        self, host: ClusterHost, argv: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs ``argv`` on a host to its end; ``environment`` is added to this process's."""
        told = {**os.environ, **(environment or {})}
        return subprocess.run(
            self.on(host, argv), capture_output=True, text=True, check=False, timeout=DEADLINE_S, env=told
        )

    def start_on(self, host: ClusterHost, argv: Sequence[str], **options: object) -> Launched:
        """Starts any command on a host; what it starts, on whatever host, carries its mark."""
        return self.launch(self.on(host, argv), **options)

    def start(self, *words: str, where: str = "", prefix: Sequence[str] = (), **options: object) -> Launched:
        """Starts ``hororun -H where words`` on the first host; ``prefix`` comes before it there."""
        hosts = where or ",".join(f"{host.name}:2" for host in self.hosts)
        inside = self.on(self.hosts[0], prefix)
        return super().start(f"--ssh-args={self.ssh_args}", *words, where=hosts, prefix=inside, **options)

    def run(self, *words: str, where: str = "", **options: object) -> subprocess.CompletedProcess[str]:
        """Runs it to its end."""
        return self.start(*words, where=where, **options).finish()  # type: ignore[arg-type]

    def cut(self, host: ClusterHost) -> None:
        """Takes the cable of a host out: no packet passes, no socket is closed."""
        _ip("-n", self.switch, "link", "set", host.cable, "down")

    def mend(self, host: ClusterHost) -> None:
        """Puts it in again."""
        _ip("-n", self.switch, "link", "set", host.cable, "up")

    def limit(self, host: ClusterHost, rate: str) -> None:
        """Limits the rate at which a host is sent to, like ``"1gbit"``."""
        shape = ["root", "tbf", "rate", rate, "burst", "256k", "latency", "50ms"]
        _do("tc", "-n", self.switch, "qdisc", "replace", "dev", host.cable, *shape)

    def deafen(self, host: ClusterHost) -> None:
        """Drops all that is sent to a host; what it sends itself arrives."""
        shape = ["root", "tbf", "rate", "8bit", "burst", "1", "limit", "1"]
        _do("tc", "-n", self.switch, "qdisc", "replace", "dev", host.cable, *shape)

    def unlimit(self, host: ClusterHost) -> None:
        """Takes the limit away."""
        _do("tc", "-n", self.switch, "qdisc", "delete", "dev", host.cable, "root")

    def processes(self, host: ClusterHost, word: str = "") -> list[int]:
        """Processes on a host whose command line has the word."""
        found = []
        for pid in map(int, _do("ip", "netns", "pids", host.name).split()):
            with contextlib.suppress(OSError):
                if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def connections(self, host: ClusterHost) -> list[int]:
        """The sshd processes that serve a connection to the host: children of the one that listens."""
        listener = int((self.folder / f"{host.name}.pid").read_text())
        return [pid for pid in self.processes(host) if parent_of(pid) == listener]


def why_not() -> str:
    """Why hosts cannot be made here; empty: they can."""
    if os.geteuid() != 0:
        return "making them needs root"
    missing = apt_install(_PROGRAMS)
    if missing:
        return missing
    probe = f"horo-{os.getpid()}-probe"
    command = ["unshare", "--net", "--uts", "--mount", "sh", "-c", f"hostname {probe} && mount -t tmpfs tmpfs /run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"namespaces are not allowed here: {done.stderr.strip()}" if done.returncode else ""


def make_cluster(stack: contextlib.ExitStack, folder: Path, count: int, kind: str = "") -> Cluster:
    """Makes ``count`` hosts; ``stack`` takes how to remove each thing, as it is made.

    ``kind``: part of their names, for clusters of as many hosts in one run.
    """
    tag = f"horo-{os.getpid()}-{kind}{count}"
    hosts = [
        ClusterHost(f"{tag}-{number}", f"10.213.7.{number}", f"fd13:7::{number}", f"to-{number}")
        for number in range(1, count + 1)
    ]
    cluster = Cluster(folder=folder, hosts=hosts, switch=f"{tag}-switch")
    (folder / "tmp").mkdir()
    _make_keys(cluster)
    _make_space(stack, cluster.switch)
    _ip("-n", cluster.switch, "link", "add", "br0", "type", "bridge")
    _ip("-n", cluster.switch, "link", "set", "br0", "up")
    for host in hosts:
        _make_space(stack, host.name)
        _plug_in(cluster, host)
        _start_sshd(stack, cluster, host)
    return cluster


def _make_keys(cluster: Cluster) -> None:
    folder = cluster.folder
    for name in ("host_key", "key"):
        _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    kind, key, *_ = (folder / "host_key.pub").read_text().split()
    known = [f"{host.name},{host.address},{host.address6} {kind} {key}\n" for host in cluster.hosts]
    (folder / "known_hosts").write_text("".join(known))
    (folder / "ssh_config").write_text(_SSH_CONFIG.format(folder=folder))
    names = [f"{host.address} {host.name}\n" for host in cluster.hosts]
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))


def _make_space(stack: contextlib.ExitStack, name: str) -> None:
    _ip("netns", "add", name)
    stack.callback(_ip, "netns", "delete", name)
    _ip("-n", name, "link", "set", "lo", "up")


def _plug_in(cluster: Cluster, host: ClusterHost) -> None:
    _ip("-n", cluster.switch, "link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns", host.name)
    _ip("-n", cluster.switch, "link", "set", host.cable, "master", "br0", "up")
    _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
    _ip("-n", host.name, "address", "add", f"{host.address6}/64", "dev", "eth0", "nodad")
    _ip("-n", host.name, "link", "set", "eth0", "up")


def _start_sshd(stack: contextlib.ExitStack, cluster: Cluster, host: ClusterHost) -> None:
    config = cluster.folder / f"{host.name}.sshd_config"
    pid_file = cluster.folder / f"{host.name}.pid"
    (cluster.run_folder(host) / "sshd").mkdir(parents=True)
    config.write_text(
        _SSHD_CONFIG.format(folder=cluster.folder, name=host.name, address=host.address, address6=host.address6)
    )
    log = cluster.folder / f"{host.name}.log"
    _do(*cluster.on(host, [_SSHD, "-f", str(config), "-E", str(log)]))
    stack.callback(_end_all_on, cluster, host)
    wait_until(pid_file.exists, f"sshd of {host.name} listens ({log})")


def _end_all_on(cluster: Cluster, host: ClusterHost) -> None:
    kill_all(cluster.processes(host))
    wait_until(lambda: not cluster.processes(host), f"no process on {host.name}")


def _ip(*words: str) -> None:
    _do("ip", *words)


def _do(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
