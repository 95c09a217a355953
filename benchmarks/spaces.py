"""Hosts on one machine: network namespaces joined by a switch, with cables of a chosen rate.

    with Spaces(2) as spaces:
        spaces.limit("1gbit")
        subprocess.run([*spaces.enter(0), "ip", "address"])

Needs root and iproute2. Names carry this process's id, addresses exist inside the namespaces only, and leaving the
context ends what still runs there and removes them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

LIMIT_S = 30.0
MTU = 1500
COUNT_MAX = 8
_SPACES = Path("/run/netns")  # where `ip netns add` keeps them
UNITS = {"kbit": 125, "mbit": 125_000, "gbit": 125_000_000}
# A host's own name, by which some libraries tell hosts apart, the names of all, and no shared memory with others.
_ENTER = 'mount --bind "$0" /etc/hosts && mount -t tmpfs tmpfs /dev/shm && hostname "$1" && shift && exec "$@"'
# What stands in for ssh: options, a host's name, and the words of a command.
_REMOTE_SHELL = """#!/bin/sh
while :; do
    case $1 in
        -o | -p | -i | -l) shift 2 ;;
        -*) shift ;;
        *) break ;;
    esac
done
host=$1
shift
exec ip netns exec "{tag}-$host" unshare --uts --mount --ipc sh -c '{enter}' "{hosts}" "$host" sh -c "$*"
"""


def rate_of(text: str) -> float:
    """Bytes per second of ``1gbit``, ``2.5gbit`` or ``100mbit``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", text)
    if found is None or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a rate; write 1gbit, 2.5gbit or 100mbit")
    return float(found[1]) * UNITS[found[2]]


def parse_rate(text: str) -> str:
    """For argparse: a text that ``rate_of`` and tc understand."""
    rate_of(text)
    return text


def why_not() -> str:
    """Why no namespaces can be made here, as a sentence; empty: they can."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    for program in ("ip", "tc", "hostname"):
        if shutil.which(program) is None:
            return f"{program} is not installed (`apt install {'hostname' if program == 'hostname' else 'iproute2'}`)"
    done = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return f"network namespaces are not allowed here: {done.stderr.strip()}" if done.returncode else ""


def congestion_control() -> str:
    """How TCP here decides how fast to send; new namespaces do the same."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


class Spaces:
    """``count`` hosts: ``names[i]`` has the address ``addresses[i]`` on its ``eth0``, which leads to all others."""

    def __init__(self, count: int) -> None:
        self._tag = f"horo-bench-{os.getpid()}"
        self.names = [f"space{number + 1}" for number in range(count)]
        self.addresses = [f"10.213.8.{number + 1}" for number in range(count)]
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Spaces:
        try:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="horo-bench-")))
            self._hosts = folder / "hosts"
            lines = [f"{address} {name}\n" for address, name in zip(self.addresses, self.names, strict=True)]
            self._hosts.write_text("".join(["127.0.0.1 localhost\n", *lines]))
            self.remote_shell = folder / "remote-shell"
            self.remote_shell.write_text(_REMOTE_SHELL.format(tag=self._tag, enter=_ENTER, hosts=self._hosts))
            self.remote_shell.chmod(0o700)
            self._make_space("switch")
            _do("ip", "-n", self._name("switch"), "link", "add", "br0", "type", "bridge")
            _do("ip", "-n", self._name("switch"), "link", "set", "br0", "up")
            for index, name in enumerate(self.names):
                self._make_space(name)
                self._plug_in(index, name)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def enter(self, index: int) -> list[str]:
        """The words before a command that make it run on a host."""
        name = self.names[index]
        apart = ["unshare", "--uts", "--mount", "--ipc", "sh", "-c", _ENTER, str(self._hosts), name]
        return ["ip", "netns", "exec", self._name(name), *apart]

    def slots(self, ranks: int) -> str:
        """``space1:2,space2:2``: so many ranks, in blocks."""
        return ",".join(f"{name}:{ranks // len(self.names)}" for name in self.names)

    def limit(self, rate: str) -> None:
        """Limits what each host is sent, like ``"1gbit"``; the kernel counts Ethernet, IP and TCP headers too."""
        shape = ["root", "tbf", "rate", rate, "burst", "256k", "latency", "50ms"]
        for index in range(len(self.addresses)):
            _do("tc", "-n", self._name("switch"), "qdisc", "replace", "dev", f"to-{index}", *shape)

    def processes(self, index: int, word: str) -> list[int]:
        """Those on a host whose command line has the word."""
        found = []
        for pid in map(int, _do("ip", "netns", "pids", self._name(self.names[index])).split()):
            with contextlib.suppress(OSError):
                if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def _name(self, which: str) -> str:
        return f"{self._tag}-{which}"

    def _make_space(self, which: str) -> None:
        self._stack.callback(self._remove_space, self._name(which))  # first: Ctrl-C may come while it is made
        _do("ip", "netns", "add", self._name(which))
        _do("ip", "-n", self._name(which), "link", "set", "lo", "up")

    def _plug_in(self, index: int, name: str) -> None:
        switch, space, cable = self._name("switch"), self._name(name), f"to-{index}"
        peer = ["peer", "name", "eth0", "mtu", str(MTU), "netns", space]
        _do("ip", "-n", switch, "link", "add", cable, "mtu", str(MTU), "type", "veth", *peer)
        _do("ip", "-n", switch, "link", "set", cable, "master", "br0", "up")
        _do("ip", "-n", space, "address", "add", f"{self.addresses[index]}/24", "dev", "eth0")
        _do("ip", "-n", space, "link", "set", "eth0", "up")

    @staticmethod
    def _remove_space(name: str) -> None:
        if not (_SPACES / name).exists():
            return
        deadline = time.monotonic() + LIMIT_S
        while (pids := _do("ip", "netns", "pids", name).split()) and time.monotonic() < deadline:
            for pid in map(int, pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        _do("ip", "netns", "delete", name)


def _do(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
