"""Teams of a running job, in processes: on one host, and on several that are one machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from plain_ranks import PlainRanks


def wanted(ranks: Sequence[int]) -> list[float]:
    return [float(sum(rank + 1 for rank in ranks))] * 2


@pytest.mark.parametrize("hosts", ["aaaa", "aabb", "abcd", "abbb"])
def test_teams_are_added_used_and_removed_without_a_trace(tmp_path: Path, hosts: str) -> None:
    sets = [[0, 1], [1, 2], [2, 3], [0, 3], [1, 2, 3]]
    with PlainRanks(tmp_path, hosts) as ranks:
        ranks.all("start")
        ranks.all("allreduce", "warm", 10)
        before = ranks.all("descriptors")
        teams = [ranks.all("add_team", members) for members in sets]
        assert teams == [[number] * 4 for number in range(1, 6)]
        for step, members in enumerate(sets):
            for count in (1, 200_000):
                sums = ranks.all("sum_in", step + 1, f"t{count}", count, ranks=members)
                assert sums == [wanted(members)] * len(members)
        assert ranks.all("allreduce", "world", 1000) == [wanted(range(4))] * 4
        for number in range(1, 6):
            ranks.all("remove_team", number)
        assert ranks.all("descriptors") == before
        assert ranks.all("add_team", [0, 2]) == [1 + 256] * 4
        assert ranks.all("sum_in", 1 + 256, "again", 5000, ranks=[0, 2]) == [wanted([0, 2])] * 2
        assert ranks.finish() == [0] * 4
