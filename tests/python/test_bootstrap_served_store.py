"""A store that rank 0 hosts: it ends when all clients have disconnected, and not before."""

from __future__ import annotations

import threading

import pytest
from descriptors import open_descriptors
from joining import SECRET, run_threads

from horo.bootstrap.net.interfaces import is_loopback
from horo.bootstrap.store.client import StoreClient
from horo.bootstrap.store.served import ServedStore, choose_server_addresses
from horo.bootstrap.store.server import StoreServer
from horo.errors import UsageError


def test_hosting_ends_when_all_others_have_disconnected_and_withdraws_the_address() -> None:
    before = open_descriptors()
    withdrawn: list[str] = []
    server = StoreServer(["127.0.0.1"], SECRET)
    own = ServedStore(server, SECRET, 3, 60, lambda: withdrawn.append("address"))
    others = [StoreClient(*server.endpoints[0], SECRET, 10, served_by="rank 0") for _ in range(2)]
    closing = threading.Thread(target=own.close)
    closing.start()
    others[0].close()
    others[1].set("key", b"still there")
    assert others[1].get("key", 10) == b"still there"
    assert withdrawn == []
    others[1].close()
    closing.join(60)
    assert withdrawn == ["address"]
    assert open_descriptors() <= before


def test_a_client_that_has_not_connected_is_awaited_for_a_short_time() -> None:
    with StoreServer(["127.0.0.1"], SECRET) as server:
        assert server.wait_for_disconnects(0, 60, 0)
        assert not server.wait_for_disconnects(1, 60, 0.01)
        with StoreClient(*server.endpoints[0], SECRET, 10):
            assert not server.wait_for_disconnects(1, 0.01, 60)
        assert server.wait_for_disconnects(1, 60, 0)


def test_late_clients_that_connect_and_disconnect_end_the_wait() -> None:
    with StoreServer(["127.0.0.1"], SECRET) as server:

        def connect_and_close() -> bool:
            StoreClient(*server.endpoints[0], SECRET, 10).close()
            return True

        assert (
            run_threads([connect_and_close, lambda: server.wait_for_disconnects(2, 60, 60), connect_and_close])
            == [True] * 3
        )


def test_addresses_are_loopback_where_all_are_near() -> None:
    assert choose_server_addresses(None, near=True, far=False) == ["127.0.0.1"]
    assert choose_server_addresses(None, near=False, far=False) == ["127.0.0.1"]
    with pytest.raises(UsageError, match="no-such-interface"):
        choose_server_addresses("no-such-interface", near=True, far=True)


def test_addresses_for_others_leave_loopback_to_those_nearby(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.1.2.3"], "ib0": ["10.9.2.3"]}
    monkeypatch.setattr("horo.bootstrap.store.served.interface_addresses", lambda: found)
    assert choose_server_addresses(None, near=True, far=True) == ["10.1.2.3", "10.9.2.3", "127.0.0.1"]
    far = choose_server_addresses("ib0,lo", near=False, far=True)
    assert far == ["10.9.2.3"]
    assert not any(map(is_loopback, far))


def test_the_host_of_a_store_that_is_gone_is_named() -> None:
    server = StoreServer(["127.0.0.1"], SECRET)
    client = StoreClient(*server.endpoints[0], SECRET, 10, served_by="rank 0")
    server.close()
    with pytest.raises(Exception, match="did rank 0 end"):
        client.set("key", b"")
