"""The counts of the ranks for Prometheus, in its text format, at an address of this host (``--metrics-port``)."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from typing import TYPE_CHECKING, Any

from horo.runner.agent.rank_summary import RankSummary
from horo.runner.config import JobError
from horo.version import __version__

if TYPE_CHECKING:
    from horo.runner.loop import Loop, Timer

__all__ = ["MetricsServer", "exposition"]

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_REQUEST_S = 5.0
_REQUEST_BYTES = 1 << 14
_END_OF_REQUEST = re.compile(rb"\n\r?\n")
_CLIENTS_MAX = 16
"""At once; the one that has been there for longest goes when another one comes."""
_NS = 1e-9
_METRICS: tuple[tuple[str, str, str, float, str], ...] = (
    ("horo_steps_total", "counter", "steps", 1, "Steps that the {word} has done."),
    ("horo_measured_steps_total", "counter", "measured", 1, "Steps that the times are sums over: all but the first."),
    ("horo_step_seconds_total", "counter", "ns", _NS, "Time of these steps."),
    ("horo_waiting_seconds_total", "counter", "waiting", _NS, "Time blocked until the last {word} had come."),
    ("horo_moving_seconds_total", "counter", "moving", _NS, "Time blocked while data moved between {word}s."),
    ("horo_loading_seconds_total", "counter", "loading", _NS, "Time in which the script waited for a DataLoader."),
    ("horo_exchanged_bytes_total", "counter", "bytes", 1, "Size of the tensors that were exchanged."),
    ("horo_exchanged_tensors_total", "counter", "tensors", 1, "Tensors that were exchanged."),
    ("horo_exchanges_total", "counter", "batches", 1, "Exchanges that the tensors were fused into."),
    ("horo_resident_memory_bytes", "gauge", "peak", 1, "Memory of the process of the {word} now."),
)
"""Name, type, the count that it shows, its unit, and the help."""


def exposition(counts: Mapping[int, RankSummary], names: Mapping[int, str], word: str) -> str:
    """The page that Prometheus reads.

    Args:
        counts: the latest of each rank that runs and has counted something.
        names: the host of each rank.
        word: the name for a process.
    """
    lines = [
        "# HELP horo_info Version of hororun.",
        "# TYPE horo_info gauge",
        f'horo_info{{version="{__version__}"}} 1',
    ]
    labels = {rank: f'{word}="{rank}",host="{_escaped(names.get(rank, ""))}"' for rank in sorted(counts)}
    for name, kind, count, unit, words in _METRICS:
        lines += [f"# HELP {name} {words.format(word=word)}", f"# TYPE {name} {kind}"]
        for rank, label in labels.items():
            value = getattr(counts[rank], count)
            lines.append(f"{name}{{{label}}} {value if unit == 1 else repr(round(value * unit, 9))}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


@dataclass
class _Client:
    """``held``: of its request, then of the answer."""

    timer: Timer
    held: bytearray = field(default_factory=bytearray)


class MetricsServer:
    """Serves the latest page: each client sends one request, has a few seconds for it, and holds up nobody else.

    Args:
        loop: calls back.
        address: to listen at.
        port: to listen at.

    Raises:
        JobError: that cannot be.
    """

    def __init__(self, loop: Loop, address: str, port: int) -> None:
        self.text = exposition({}, {}, "rank")
        self._loop = loop
        self._clients: dict[socket.socket, _Client] = {}
        shown = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        self.url = f"http://{shown}/metrics"
        self._listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((address, port))
            self._listener.listen()
        except OSError as error:
            self._listener.close()
            raise JobError(f"--metrics-port {shown}: {error.strerror or error}") from None
        self._listener.setblocking(False)
        loop.watch(self._listener.fileno(), read=self._accept)

    def show(self, counts: Mapping[int, RankSummary], names: Mapping[int, str], word: str) -> None:
        """Replaces the page; the arguments are those of ``exposition``."""
        self.text = exposition(counts, names, word)

    def close(self) -> None:
        """Closes the port and all connections."""
        self._loop.watch(self._listener.fileno())
        self._listener.close()
        for client in list(self._clients):
            self._drop(client)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            client, _ = self._listener.accept()
            client.setblocking(False)
            if len(self._clients) == _CLIENTS_MAX:
                self._drop(next(iter(self._clients)))
            self._clients[client] = _Client(self._loop.call_later(_REQUEST_S, lambda: self._drop(client)))
            self._loop.watch(client.fileno(), read=lambda: self._read(client))

    def _read(self, client: socket.socket) -> None:
        held = self._clients[client].held
        try:
            data = client.recv(_REQUEST_BYTES)
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                self._drop(client)
            return
        held += data
        if not data or _END_OF_REQUEST.search(held) or len(held) >= _REQUEST_BYTES:
            self._clients[client].held = bytearray(_Request(bytes(held), self.text).answer)
            self._loop.watch(client.fileno(), write=lambda: self._write(client))

    def _write(self, client: socket.socket) -> None:
        held = self._clients[client].held
        with contextlib.suppress(BlockingIOError):
            try:
                del held[: client.send(held)]
            except (BrokenPipeError, ConnectionResetError):
                held.clear()
        if not held:
            self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        self._clients.pop(client).timer.cancel()
        self._loop.watch(client.fileno())
        client.close()


class _Request(BaseHTTPRequestHandler):
    """The answer to the bytes of a request; the server it is for does its input and output."""

    def __init__(self, request: bytes, page: str) -> None:
        self.rfile, self.wfile = BytesIO(request), BytesIO()
        self._page = page.encode()
        self.handle()
        self.answer = self.wfile.getvalue()

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in ("/", "/metrics"):
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", _CONTENT_TYPE)
        self.send_header("Content-Length", str(len(self._page)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(self._page)

    do_HEAD = do_GET

    def log_message(self, format: str, *arguments: Any) -> None:
        """No line per request."""
