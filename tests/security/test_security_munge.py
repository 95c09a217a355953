"""Visitors of the port at which rank 0 offers MUNGE credentials cost no process each, and take nothing from ranks."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from horo.bootstrap.launchers import slurm_store
from horo.bootstrap.launchers.slurm_store import _publish_secret, _StoreInfo, candidate_ports
from horo.bootstrap.net import advertisement
from horo.bootstrap.net.addresses import Endpoint, bind_all
from horo.bootstrap.net.advertisement import AdvertisementServer, Stock, fetch
from horo.errors import ResourceError

NAME = "munge.0.0/1"
INFO = _StoreInfo(NAME, [Endpoint("127.0.0.1", 4711)], bytes(32))


def counting() -> tuple[list[bytes], Callable[[], bytes]]:
    made: list[bytes] = []

    def make() -> bytes:
        made.append(b"%d" % len(made))
        return made[-1]

    return made, make


def test_advertisements_are_made_at_a_bounded_rate() -> None:
    made, make = counting()
    now = 100.0
    stock = Stock(make, 10, clock=lambda: now)
    assert [stock.take() for _ in range(10)] == made
    assert [stock.take() for _ in range(1000)] == [b"9"] * 1000
    now += 1.0
    taken = [stock.take() for _ in range(1000)]
    assert len(set(taken)) == 10  # never more than the stock, however long nobody has come
    assert len(made) == 20
    now += 1.01 / advertisement.FRESH_PER_S
    assert [stock.take(), stock.take()] == [b"20", b"20"]


def test_an_advertisement_that_cannot_be_made_is_not_tried_for_every_visitor() -> None:
    tried = []

    def fail() -> bytes:
        tried.append(1)
        raise ResourceError("munge: no daemon")

    stock = Stock(fail, 3, clock=lambda: 0.0)
    for _ in range(3):
        with pytest.raises(ResourceError):
            stock.take()
    assert [stock.take() for _ in range(100)] == [b""] * 100
    assert len(tried) == 3


def test_a_crowd_that_gets_no_credential_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> bytes:
        raise ResourceError("munge: no daemon")

    (listener,) = bind_all(["127.0.0.1"])
    server = AdvertisementServer([listener], fail)
    try:
        for _ in range(50):
            with socket.create_connection(listener.getsockname()) as visitor:
                visitor.settimeout(30)
                assert visitor.recv(1) == b""
    finally:
        server.close()
    assert [record.getMessage() for record in caplog.records] == [
        "refused a connection from 127.0.0.1: the job's secret cannot be given away: munge: no daemon"
    ]


def test_a_crowd_of_visitors_starts_few_processes_and_a_rank_gets_its_credential(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[bytes] = []

    def encode(payload: bytes) -> bytes:
        made.append(payload)
        return b"%d:" % len(made) + payload

    monkeypatch.setattr(advertisement, "FRESH_PER_S", 0.0)
    monkeypatch.setattr(slurm_store.munge, "encode", encode)
    monkeypatch.setattr(slurm_store.munge, "decode", lambda credential: credential.partition(b":")[2])
    withdraw = _publish_secret(["127.0.0.1"], candidate_ports(NAME), INFO, 4)
    try:
        endpoints = [Endpoint("127.0.0.1", port) for port in candidate_ports(NAME)]
        for _ in range(300):
            with socket.create_connection(endpoints[0]) as visitor:
                visitor.settimeout(30)
                assert visitor.recv(1 << 16)
        found = fetch(endpoints[:1], 30, lambda data: data.partition(b":")[2], lambda: None)
    finally:
        withdraw()
    assert found == INFO.encode()
    assert len(made) == 1 + 2 * 4  # one tells whether MUNGE works
