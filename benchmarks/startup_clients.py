"""What many ranks read from the job's store while they start: all of them as threads of this process."""

from __future__ import annotations

import secrets
import threading
import time
import uuid
from dataclasses import replace
from typing import Any

from contest import ContestError

from horo.bootstrap.host.grouping import group_ranks
from horo.bootstrap.host.identity import read_identity
from horo.bootstrap.launchers.variables import Launch
from horo.bootstrap.net.open_files import make_room
from horo.bootstrap.packed import pack
from horo.bootstrap.peer_info import PeerInfo, exchange_peer_info
from horo.bootstrap.rendezvous import Rendezvous
from horo.bootstrap.store.client import StoreClient
from horo.bootstrap.store.protocol import prefixed
from horo.bootstrap.store.server import StoreServer
from horo.config.table import Config

__all__ = ["measure_clients"]

RANKS_PER_HOST = 8
LIMIT_S = 300.0
STACK_BYTES = 256 << 10


def start(server: StoreServer, secret: bytes, rank: int, size: int) -> None:
    """The steps of ``init()`` in which ranks talk through the store, on hosts of eight ranks each."""
    host, index = divmod(rank, RANKS_PER_HOST)
    name = f"node{host:04}.cluster.example"
    launch = Launch("hororun", rank, size, name, local=(index, RANKS_PER_HOST))
    identity = replace(read_identity(None), boot_id=str(uuid.uuid5(uuid.NAMESPACE_DNS, name)))
    with StoreClient(*server.endpoints[0], secret, LIMIT_S) as client:
        rendezvous = Rendezvous(prefixed(client, "horo/job/1/"), rank, size, name, LIMIT_S)
        rendezvous.enter()
        own = PeerInfo.of(launch, Config(), identity, f"10.{host >> 8}.{host & 255}.1", "1+abi1")
        peers = exchange_peer_info(rendezvous, own)
        leader = group_ranks([peer.identity for peer in peers]).members(rank)[0]
        rendezvous.share("joined", b"%d" % leader, lambda leaders: pack(group_ranks(leaders).host_of_rank))
        rendezvous.finish()


def measure_clients(size: int) -> dict[str, Any]:
    """The bytes of the replies to so many ranks, and the time until all have started.

    Raises:
        ContestError: this process may not open enough files, or a rank failed.
    """
    missing = make_room(2 * size)  # both ends of each connection
    if missing:
        raise ContestError(f"{size} clients need {missing}")
    secret = secrets.token_bytes(32)
    failures: list[str] = []

    def run(rank: int) -> None:
        try:
            start(server, secret, rank, size)
        except Exception as error:
            failures.append(f"rank {rank}: {error}")

    before = threading.stack_size(STACK_BYTES)
    with StoreServer(["127.0.0.1"], secret) as server:
        begin_s = time.monotonic()
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wall_s = time.monotonic() - begin_s
        threading.stack_size(before)
        if failures:
            raise ContestError(f"{len(failures)} of {size} clients failed; {failures[0]}")
        return {"clients": size, "reply_bytes": server.reply_bytes, "wall_s": round(wall_s, 2)}
