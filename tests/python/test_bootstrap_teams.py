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


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_ranks_that_mean_different_teams_are_told_and_go_on(tmp_path: Path, hosts: str) -> None:
    with PlainRanks(tmp_path, hosts) as ranks:
        ranks.all("start")
        ranks.tell(0, "add_team", [0, 1])
        ranks.tell(1, "add_team", [1])
        for rank in range(2):
            answer = ranks.answer(rank)
            assert answer["error"] == "MismatchError"
            assert "adds the process set of the ranks 0, 1" in answer["text"]
        assert ranks.all("add_team", [0, 1]) == [1, 1]
        assert ranks.all("sum_in", 1, "x", 1000) == [wanted([0, 1])] * 2
        for adding in range(2):
            ranks.tell(adding, "add_team", [0, 1])
            ranks.tell(1 - adding, "remove_team", 1)
            for rank in range(2):
                answer = ranks.answer(rank)
                assert answer["error"] == "MismatchError"
                assert "all ranks must add and remove the same process sets in the same order" in answer["text"]
                assert f"rank {adding} (" in answer["text"].partition("add_process_set")[0]
        assert ranks.all("add_team", [0, 1]) == [2, 2]
        assert ranks.all("sum_in", 1, "y", 1000) == [wanted([0, 1])] * 2
        assert ranks.all("sum_in", 2, "z", 1000) == [wanted([0, 1])] * 2
        assert ranks.finish() == [0, 0]


@pytest.mark.parametrize("hosts", ["aaa", "abb", "abc"])
def test_a_team_goes_on_while_another_rank_is_away_and_hears_of_its_death(tmp_path: Path, hosts: str) -> None:
    with PlainRanks(tmp_path, hosts) as ranks:
        ranks.all("start")
        ranks.all("add_team", [1, 2])
        for step in range(5):  # rank 0 reads its next command meanwhile
            assert ranks.all("sum_in", 1, f"x{step}", 3000, ranks=[1, 2]) == [wanted([1, 2])] * 2
        ranks.tell(1, "sum_in", 1, "last", 3000)
        ranks.kill(0)
        answer = ranks.answer(1)
        assert answer["error"] == "PeerLostError"
        assert "rank 0 " in answer["text"]
