"""Who joined last, in every order, with and without operations pending, on one and two hosts, in process sets."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from fabric import make_team_links
from ranks import Group, Rank, wait_for

from horo.core import context

SUM = context.REDUCE_OPS["sum"]
MORE_THAN_TRAVELS_WITH_ITS_ANNOUNCEMENT = 5000

FOUR = [[0, 1, 2, 3], [1, 2, 3, 0], [3, 2, 1, 0], [0, 1, 3, 2], [0, 3, 1, 2], [2, 3, 0, 1], [3, 0, 2, 1], [1, 0, 2, 3]]
ORDERS = [
    ([3], None, [list(order) for order in itertools.permutations(range(3))]),
    ([2, 2], None, FOUR),
    ([1, 1, 2], None, FOUR),
    ([4], [1, 2, 3], [list(order) for order in itertools.permutations([1, 2, 3])]),
    ([2, 3], [1, 2, 3, 4], [[rank + 1 for rank in order] for order in FOUR]),
]


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize(("hosts", "members", "orders"), ORDERS, ids=str)
def test_it_is_the_last_one(
    hosts: list[int], members: list[int] | None, orders: list[list[int]], pending: bool
) -> None:
    """A rank joins once the one before has called, and the root has heard of that if it is on another host."""
    ranks = members or list(range(sum(hosts)))
    called = {(turn, place): threading.Event() for turn in range(len(orders)) for place in range(len(ranks))}

    host_of_rank = [host for host, size in enumerate(hosts) for _ in range(size)]
    links = make_team_links(host_of_rank, members) if members and len(hosts) > 1 else {}

    with Group(hosts) as group:
        root = group.contexts[ranks[0]]

        def join_in_turn(rank: Rank, team: int, turn: int, place: int) -> int:
            """Several hosts: the root tells the others of each rank that joins, by a message."""
            if place > 0:
                assert called[turn, place - 1].wait(60)
            handles = []
            if pending:
                array = np.ones(MORE_THAN_TRAVELS_WITH_ITS_ANNOUNCEMENT)
                handles.append(rank.submit("allreduce", "x", [array], reduce_op=SUM, team=team))
            before = root.counters()["messages_sent"]
            joined = rank.context.start_join(team)
            if len(hosts) > 1:
                wait_for(lambda: root.counters()["messages_sent"] > before)
            called[turn, place].set()
            for handle in handles:
                rank.finish(handle)
                assert np.all(array == len(ranks))
            rank.context.wait(joined)
            last = rank.context.joined_last(joined)
            rank.context.release(joined)
            return last

        def body(rank: Rank) -> list[int]:
            team = rank.context.add_team(members, **links.get(rank.rank, {})) if members else 0
            lasts = []
            for turn, order in enumerate(orders):
                rank.barrier(f"turn {turn}")
                if rank.rank in order:
                    lasts.append(join_in_turn(rank, team, turn, order.index(rank.rank)))
            return lasts

        lasts = group.run(body)
    assert [lasts[rank] for rank in ranks] == [[order[-1] for order in orders]] * len(ranks)
