"""Another user of a host, who does to a job what every user can do: ``intruder.py REPORT PORTS [munge]``.

Becomes the user 65534; then connects to each port of the range PORTS (``10000-32000``) that begins to listen, stays
silent on half of the connections and sends nonsense on the others, keeps what it is sent, tries to decode that as
a credential of MUNGE, and reads what it can of all processes. With ``munge`` it comes again until it gets a credential.
Writes what it has found to REPORT as JSON, holds its connections and waits for its end.
"""

import contextlib
import encodings.idna  # noqa: F401 - for connect(): Python's own folder may be closed to other users
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

__all__: list[str] = []

_USER = 65534
_LISTENS = "0A"
_LIMIT_S = 60.0
_READ_S = 0.5


def _listening(first: int, last: int) -> set[int]:
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTENS}
    return {port for port in ports if first <= port <= last}


def _addresses() -> list[str]:
    said = subprocess.run(["ip", "-json", "-4", "address"], capture_output=True, text=True, check=True, timeout=20)
    return [entry["local"] for link in json.loads(said.stdout) for entry in link["addr_info"]]


def _visit(address: str, port: int, held: list[socket.socket]) -> bytes:
    """What a server sends; the connections stay open."""
    said = b""
    for greeting in (b"", b"HORO" + bytes(60), b"GET / HTTP/1.0\r\n\r\n", b""):
        with contextlib.suppress(OSError):
            connection = socket.create_connection((address, port), timeout=_READ_S)
            held.append(connection)
            connection.sendall(greeting)
            while data := connection.recv(1 << 16):
                said += data
    return said


def _decodes(said: bytes) -> bool:
    credential = said[: said.find(b"\0")] if b"\0" in said else said
    done = subprocess.run(["unmunge"], input=credential, capture_output=True, check=False, timeout=20)
    return done.returncode == 0


def _readable(name: str) -> dict[str, str]:
    """That file of each process of other users, where it can be read."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid != _USER:
                found[process.name] = (process / name).read_bytes().decode("utf-8", "replace")
    return found


def _main(report: str, ports: str, munge: str = "") -> None:
    first, last = map(int, ports.split("-"))
    with Path(report).open("w", encoding="utf-8") as file:
        os.setgroups([])
        os.setgid(_USER)
        os.setuid(_USER)
        before, held = _listening(first, last), list[socket.socket]()
        print("ready", flush=True)
        deadline = time.monotonic() + _LIMIT_S
        while not (found := _listening(first, last) - before) and time.monotonic() < deadline:
            time.sleep(0.01)
        credentials: list[bytes] = []
        while not credentials and time.monotonic() < deadline:
            said = [_visit(address, port, held) for port in found for address in _addresses()]
            credentials = [data for data in said if data.startswith(b"MUNGE:")]
            if not munge:
                break
        json.dump(
            {
                "ports": sorted(found),
                "connections": len(held),
                "credentials": len(credentials),
                "decoded": any(_decodes(credential) for credential in credentials),
                "decodes": bool(munge) and _decodes(subprocess.check_output(["munge", "--no-input"], timeout=20)),
                "environments": sorted(_readable("environ")),
                "commands": list(_readable("cmdline").values()),
            },
            file,
        )
    signal.pause()


if __name__ == "__main__":
    _main(*sys.argv[1:])
