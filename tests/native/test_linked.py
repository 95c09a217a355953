"""Which hosts have connections with one another: the algorithms keep to the rule, and need all of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
from fabric import close_setup, make_setups
from hypothesis import given
from hypothesis import strategies as st
from links import CONTROL, DATA, create_tcp, socket_pair
from ranks import Rank, on_ranks

from horo.bootstrap.host.grouping import control_peers, data_peers
from horo.core.context import Context
from horo.core.setup import Setup
from horo.errors import HoroError, UsageError


@given(count=st.integers(1, 300), data=st.data())
def test_the_core_and_the_bootstrap_have_one_rule(native: ModuleType, count: int, data: st.DataObject) -> None:
    host = data.draw(st.integers(0, count - 1), "host")
    for channel, peers in ((CONTROL, control_peers), (DATA, data_peers)):
        linked = [other for other in range(count) if native.lib.shim_hosts_are_linked(channel, count, host, other)]
        assert linked == peers(host, count)


OK, INTERNAL = 0, -60


# With contexts, which have no other connections.


@pytest.mark.parametrize("sockets", [1, 2])
@pytest.mark.parametrize(
    ("channel", "rank", "host", "told"),
    [
        ("control_fds", 0, 4, "rank 0 on host 0 (host0) was given no connection for agreement to host 4 (host4)"),
        ("control_fds", 7, 6, "rank 7 on host 7 (host7) was given no connection for agreement to host 6 (host6)"),
        ("data_fds", 1, 5, "rank 1 on host 1 (host1) was given no connection for data to host 5 (host5)"),
        ("data_fds", 6, 0, "rank 6 on host 6 (host6) was given no connection for data to host 0 (host0)"),
    ],
)
def test_a_missing_connection_is_named_at_creation(channel: str, rank: int, host: int, told: str, sockets: int) -> None:
    setups = make_setups([1] * 8, sockets_per_peer=sockets)
    fds = list(getattr(setups[rank], channel))
    width = sockets if channel == "data_fds" else 1
    os.close(fds[(host + 1) * width - 1])
    fds[(host + 1) * width - 1] = -1
    setups[rank] = replace(setups[rank], **{channel: fds})
    with pytest.raises(UsageError) as error:
        Context(setups[rank])
    assert told in str(error.value)
    close_all_setups(setups)


def close_all_setups(setups: Sequence[Setup]) -> None:
    for setup in setups:
        close_setup(setup)


def test_a_leader_without_any_connection_for_agreement_is_refused_by_name() -> None:
    setups = make_setups([1, 1, 1])
    for fd in setups[2].control_fds:
        if fd >= 0:
            os.close(fd)
    setups[2] = replace(setups[2], control_fds=[])
    with pytest.raises(HoroError, match=r"host 2 has no connection for agreement to host 0 \(host0\)"):
        Context(setups[2])
    close_all_setups(setups)


def test_what_the_rule_does_not_ask_for_is_not_missed() -> None:
    setups = make_setups([1] * 8)
    assert [host for host, fd in enumerate(setups[0].data_fds) if fd < 0] == [0, 3, 5]
    contexts = [Context(setup) for setup in setups]
    for context in contexts[::-1]:
        context.destroy()


# Posting where there is no link.


def test_posting_to_a_missing_link_is_refused_and_the_others_go_on(native: ModuleType) -> None:
    near, far = socket_pair("tcp")
    with far:
        rank = create_tcp(native, [-1, -1, near.detach()], control_fds=[-1, -1, -1])
        for channel in (CONTROL, DATA):
            with pytest.raises(ValueError, match=f"posting returned {INTERNAL}"):
                rank.send(1, b"x", channel)
            with pytest.raises(ValueError, match=f"posting returned {INTERNAL}"):
                rank.recv(1, 1, channel)
        assert rank.idle
        assert rank.wait(rank.send(2, b"on")) == OK
        assert far.recv(2) == b"on"
        rank.destroy()


@on_ranks([1, 1, 1], data_links=False)
def test_without_any_links_for_data_what_moves_none_works(rank: Rank) -> None:
    """An operation that moves data is an error on all ranks, not a hang and not a crash."""
    rank.barrier()
    with pytest.raises(HoroError):
        rank.allreduce(np.ones(10), "x")
