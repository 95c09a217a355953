"""The counts of the ranks for Prometheus, in its text format, at an address of this host (``--metrics-port``)."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from horo.runner.agent.rank_summary import RankSummary
from horo.runner.config import JobError
from horo.version import __version__

__all__ = ["MetricsServer", "exposition"]

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_REQUEST_S = 5.0
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


class MetricsServer(HTTPServer):
    """Serves the latest page in a thread; one request at a time, each for a few seconds at most.

    Args:
        address: to listen at.
        port: to listen at.

    Raises:
        JobError: that cannot be.
    """

    def __init__(self, address: str, port: int) -> None:
        self.text = exposition({}, {}, "rank")
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        shown = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        self.url = f"http://{shown}/metrics"
        try:
            super().__init__((address, port), _Request)
        except OSError as error:
            raise JobError(f"--metrics-port {shown}: {error.strerror or error}") from None
        threading.Thread(target=self.serve_forever, name="hororun-metrics", daemon=True).start()

    def server_bind(self) -> None:
        """Takes the address without a look-up of the name of this host, which may take long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that leaves is none of the user's business."""

    def close(self) -> None:
        """Ends the thread and closes the port."""
        self.shutdown()
        self.server_close()


class _Request(BaseHTTPRequestHandler):
    timeout = _REQUEST_S
    server: MetricsServer

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in ("/", "/metrics"):
            self.send_error(404)
            return
        page = self.server.text.encode()
        self.send_response(200)
        self.send_header("Content-Type", _CONTENT_TYPE)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *arguments: Any) -> None:
        """No line per request."""
