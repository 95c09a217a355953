"""The benchmark of the agreement counts what a tree of hosts must send, and its relay finds the longest chain."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

from descriptors import open_descriptors
from example_runs import ROOT, start

FOLDER = ROOT / "benchmarks"
SCRIPT = str(FOLDER / "negotiation.py")

sys.path.insert(0, str(FOLDER))
import negotiation  # noqa: E402  (benchmarks/negotiation.py)
from negotiation import Layout  # noqa: E402
from relay import cut_in  # noqa: E402  (benchmarks/relay.py)


def test_messages_and_hops_are_those_of_a_tree(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    words = ["--layouts", "1x3,2x1,3x2,8x1", "--tensors", "1,3", "--rounds", "2", "--json", str(file)]
    done = start([sys.executable, SCRIPT, *words])
    document = json.loads(file.read_text())

    assert document["benchmark"] == "negotiation"
    assert document["options"] == {"layouts": ["1x3", "2x1", "3x2", "8x1"], "tensors": [1, 3], "rounds": 2}
    rows = document["rows"]
    assert [(row["ranks"], row["tensors"], row["kind"]) for row in rows] == [
        (ranks, tensors, kind) for ranks in (3, 2, 6, 8) for tensors in (1, 3) for kind in ("first", "cached")
    ]
    hops = {1: 0, 2: 2, 3: 2, 8: 6}  # of 3 hosts, two are children of the first
    most = {1: 0, 2: 1, 3: 2, 8: 3}
    for row in rows:
        hosts = row["hosts"]
        if row["tensors"] == 1:
            assert row["messages"] == 2 * (hosts - 1)
            assert row["messages_most"] == most[hosts]
            assert row["hops"] == hops[hosts] <= row["hops_bound"]
        assert row["messages"] >= 2 * (hosts - 1)
        assert (row["wire_bytes"] > 0) == (hosts > 1)
        assert len(row["latencies_us"]) == (1 if row["kind"] == "first" else 2)
        assert isinstance(row["memory_used_bytes"], int)  # of a few ranks it drowns in what the process frees meanwhile
    by_kind = {(row["hosts"], row["kind"]): row["wire_bytes"] for row in rows if row["tensors"] == 1}
    assert all(by_kind[hosts, "cached"] < by_kind[hosts, "first"] for hosts in (2, 3, 8))
    assert done.stderr == ""


def test_the_relay_counts_the_longest_chain() -> None:
    pairs = {link: socket.socketpair() for link in [(1, 0), (2, 1)]}
    relay, replaced = cut_in({link: near.detach() for link, (near, _) in pairs.items()})
    ends = {link: socket.socket(fileno=fd) for link, fd in replaced.items()}
    ends |= {(0, 1): pairs[1, 0][1], (1, 2): pairs[2, 1][1]}
    relay.start()

    def send(host: int, other: int, body: bytes) -> None:
        """One message, and waits until it has arrived."""
        message = len(body).to_bytes(4, "little") + body
        ends[host, other].sendall(message)
        received = b""
        while len(received) < len(message):
            received += ends[other, host].recv(100)
        assert received == message

    send(2, 1, b"up")  # chain 1
    send(0, 1, b"by itself")  # also 1
    send(1, 0, b"up")  # 2: host 1 has heard of both
    send(0, 1, b"")  # 3
    send(1, 2, b"down" * 20)  # 4
    assert relay.seen() == (5, 5 * 4 + 13 + 80, 4)
    relay.begin()
    send(1, 2, b"x")
    assert relay.seen() == (1, 5, 1)
    for end in ends.values():
        end.close()
    relay.join(20)
    assert not relay.is_alive()


def test_a_layout_opens_as_many_descriptors_as_it_says() -> None:
    layout = Layout(3, 4)
    before = open_descriptors()
    with negotiation.World(layout, relayed=True):
        opened = len(open_descriptors() - before)
    assert layout.ranks < opened <= layout.descriptors - negotiation.DESCRIPTORS_ASIDE
