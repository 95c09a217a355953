"""Random schedules over the whole core, checked by arithmetic: fixed seeds; `make stress` has fresh ones.

All collectives, dtypes, reductions, forms, factors, and what they travel as, come in them; so do process sets, joins,
and ranks that disagree, leave or die.
"""

from typing import Any

import pytest
from native_build import FLAVOUR
from ranks import over_every_layout
from slow_links import Relay
from stress import Schedule, play

OPERATIONS = {"": 400, "address": 120, "thread": 80}[FLAVOUR]
SCHEDULES = 1 if FLAVOUR else 2
DEADLINE_S = 150 if FLAVOUR else 100
"""Of a schedule, which takes a second or two; where other programs have the cores, each wait takes their turns, too."""


@pytest.mark.parametrize("seed", [*range(0, 8 * SCHEDULES, SCHEDULES)])
def test_ranks_get_what_arithmetic_says_whatever_happens(seed: int) -> None:
    for each in range(seed, seed + SCHEDULES):
        play(Schedule(each, OPERATIONS), DEADLINE_S)


@pytest.mark.parametrize("seed", [1000, 2000])
def test_one_host_gets_what_arithmetic_says(seed: int) -> None:
    for each in range(seed, seed + SCHEDULES):
        play(Schedule(each, OPERATIONS, hosts=1, together=True), DEADLINE_S)


WAYS: dict[str, dict[str, Any]] = {
    "by slots": {"direct_bytes": 0},
    "direct": {"direct_bytes": 1},
    "one by one": {"fusion_bytes": 0, "cache_capacity": 0},
    "TCP": {"tcp": True},
    "three sockets": {"sockets_per_peer": 3, "tcp": True, "spin_us": 0},
    "late control": {"relay": Relay(control_delay_s=0.004)},
    "late data": {"relay": Relay(data_delay_s=0.004)},
    "control in pieces": {"relay": Relay(control_chunk_bytes=7)},
    "data in pieces": {"relay": Relay(data_chunk_bytes=1009)},
    "late and in pieces": {
        "relay": Relay(control_delay_s=0.002, data_delay_s=0.003, control_chunk_bytes=61, data_chunk_bytes=5003)
    },
}
"""What ranks compute does not depend on them."""


@over_every_layout
@pytest.mark.parametrize("way", WAYS)
def test_every_layout_and_way_gives_what_arithmetic_says(host_of_rank: list[int], way: str) -> None:
    schedule = Schedule(len(host_of_rank), OPERATIONS // 4, host_of_rank=host_of_rank, together=True, **WAYS[way])
    play(schedule, DEADLINE_S)
