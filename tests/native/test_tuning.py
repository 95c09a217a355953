"""What operations run with, changed while they run: ranks as threads, on one host and on several.

Rank 0 draws other values after every batch here, so every operation has other segments, pieces, sockets, algorithms and
batches than the one before. What ranks get must be right, and equal to the bit, whatever they have run with.
"""

from __future__ import annotations

import csv
import itertools
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import native_build
import numpy as np
import pytest
from fabric import close_setup, make_setups, make_team_links
from known_answers import collectives
from ranks import Group, Rank, run_ranks

from horo._core import Context
from horo._core_setup import KNOBS, Autotune
from horo.errors import HoroError, PeerLostError, UsageError

HOSTS = [[1], [2], [3], [1, 1], [2, 2], [3, 1, 2], [1, 1, 1, 1, 1]]
STEPS = 20 if native_build.FLAVOUR else 60
SLOT = 1 << 16
SEED = random.SystemRandom().getrandbits(31) | 1


def shuffled(hosts: list[int], seed: int, **options: Any) -> dict[str, Any]:
    """Options of a group whose values change after every batch."""
    print("seed", seed, "hosts", hosts)
    sockets = 4 if len(hosts) > 1 else 1
    start = {"sockets": 1, "segment": 1 << 14, "cycle": 200, "overlap": 2}
    autotune = Autotune(start=start, defaults={"segment": SLOT}, shuffle=seed)
    return {"segment_bytes": SLOT, "sockets_per_peer": sockets, "autotune": autotune, **options}


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("seed", [1, 2, pytest.param(SEED, id="fresh")])
def test_results_are_right_whatever_they_run_with(hosts: list[int], seed: int) -> None:
    def body(rank: Rank) -> int:
        seen = set()
        for step in range(STEPS):
            collectives(rank, step)
            seen.add(tuple(rank.context.tuning()[0].values()))
        return len(seen)

    seen = run_ranks(body, hosts, **shuffled(hosts, seed))
    assert min(seen) > STEPS / 4


@pytest.mark.parametrize("hosts", [[2], [1, 1], [2, 2], [1, 1, 1]], ids=str)
def test_all_ranks_hold_the_same_bits(hosts: list[int]) -> None:
    """Sums whose rounding depends on the order."""

    def body(rank: Rank) -> list[bytes]:
        chance = np.random.default_rng(rank.rank)
        results = []
        for step in range(STEPS):
            array = chance.standard_normal((100, 5000, 40_000)[step % 3]).astype(np.float32)
            results.append(rank.allreduce(array, f"x{step % 3}").tobytes())
        return results

    by_rank = run_ranks(body, hosts, **shuffled(hosts, SEED))
    for of_step in zip(*by_rank, strict=True):
        assert len(set(of_step)) == 1


@pytest.mark.parametrize("hosts", [[1, 1], [2, 1]], ids=str)
def test_lone_small_tensors_are_right_in_a_stream(hosts: list[int]) -> None:
    """Two hosts make the record of such a tensor alike; a record of new values comes between."""

    def body(rank: Rank) -> None:
        for step in range(300):
            array = np.full(16 << (step % 9), rank.rank + step, np.float32)
            assert set(rank.allreduce(array, f"x{step % 9}")) == {rank.size * step + rank.size * (rank.size - 1) / 2}

    run_ranks(body, hosts, **shuffled(hosts, SEED))


def test_process_sets_run_with_the_first_values_until_the_search_ends() -> None:
    """They are made, used and removed while the values of all ranks change."""
    hosts, members = [2, 2], [0, 1, 3]
    links = [make_team_links([0, 0, 1, 1], members, sockets=4) for _ in range(6)]

    def body(rank: Rank) -> None:
        for step, made in enumerate(links):
            team = rank.context.add_team(members, **made.get(rank.rank, {}))
            for turn in range(5):
                collectives(rank, step * 5 + turn)
                if rank.rank in members:
                    array = np.full(30_000, rank.rank, np.float32)
                    assert set(rank.allreduce(array, "t", team=team)) == {4}
            rank.context.remove_team(team)

    run_ranks(body, hosts, **shuffled(hosts, SEED))


def search(folder: Path, hosts: list[int], **options: Any) -> tuple[dict[str, Any], Path]:
    """Options of a group that really searches, and its log."""
    log = folder / "tuning.csv"
    sockets = 2 if len(hosts) > 1 else 1
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
    autotune = Autotune(
        start={"sockets": 1, "segment": 4096, "fusion": 0},
        defaults={"sockets": 1, "segment": SLOT},
        **{"warmup_samples": 1, "steps_per_sample": 2, "max_samples": 12, "log_fd": fd, **options},
    )
    return {"segment_bytes": SLOT, "sockets_per_peer": sockets, "autotune": autotune}, log


def only_on_rank_0(group_options: dict[str, Any], hosts: list[int]) -> Group:
    """The log is that of rank 0."""

    def rewire(setups: list[Any]) -> list[Any]:
        return [setups[0], *(replace(s, autotune=replace(s.autotune, log_fd=-1)) for s in setups[1:])]

    return Group(hosts, rewire=rewire, **group_options)


@pytest.mark.parametrize("hosts", [[1], [2], [2, 1]], ids=str)
def test_a_search_ends_everywhere_with_the_same_values_and_a_log(tmp_path: Path, hosts: list[int]) -> None:
    options, log = search(tmp_path, hosts)

    def body(rank: Rank) -> tuple[dict[str, int], int]:
        for step in itertools.count():
            for k in range(3):
                rank.allreduce(np.ones(20_000, np.float32), f"x{k}")
            values, is_final = rank.context.tuning()
            rank.barrier()
            if is_final:
                return values, step
        raise AssertionError

    with only_on_rank_0(options, hosts) as group:
        ends = group.run(body)
        assert all(end[0] == ends[0][0] for end in ends)
        rows = list(csv.DictReader(log.open()))
        assert [row["stage"] for row in rows][:3] == ["warmup", "first", "defaults"]
        assert [row["stage"] for row in rows][-2:] == ["final", "best"]
        assert all(float(row["score"]) > 0 for row in rows)
        assert (rows[1]["segment_bytes"], rows[1]["tensor_fusion_threshold"]) == ("4096", "0")
        values = ends[0][0]
        assert rows[-1]["segment_bytes"] == str(values["segment"])
        assert rows[-1]["tensor_fusion_threshold"] == str(values["fusion"])
        before = log.read_bytes()
        group.run(lambda rank: [rank.allreduce(np.ones(20_000, np.float32), "x0") for _ in range(20)])
        assert log.read_bytes() == before


def test_a_process_set_gets_the_end_of_the_search(tmp_path: Path) -> None:
    """One that exists by then, and one that is made later; both go on working."""
    hosts, members = [2, 1], [1, 2]
    options, _ = search(tmp_path, hosts)
    links = [make_team_links([0, 0, 1], members, sockets=2) for _ in range(2)]

    def both(rank: Rank, team: int) -> None:
        if rank.rank in members:
            assert set(rank.allreduce(np.full(50_000, rank.rank, np.float32), "t", team=team)) == {3}

    def body(rank: Rank) -> None:
        teams = [rank.context.add_team(members, **links[0].get(rank.rank, {}))]
        while not rank.context.tuning()[1]:
            rank.allreduce(np.ones(20_000, np.float32), "x")
            both(rank, teams[0])
            rank.barrier()
        teams.append(rank.context.add_team(members, **links[1].get(rank.rank, {})))
        for _ in range(5):
            for team in teams:
                both(rank, team)
        rank.barrier()

    with only_on_rank_0(options, hosts) as group:
        group.run(body)


@pytest.mark.parametrize("hosts", [[2], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("lost", [0, 1])
def test_the_loss_of_a_rank_in_the_middle_ends_all(hosts: list[int], lost: int) -> None:
    with Group(hosts, **shuffled(hosts, SEED)) as group:

        def body(rank: Rank) -> str:
            try:
                for step in range(10_000):
                    rank.allreduce(np.ones(3000 + 100 * (step % 3), np.float32), f"x{step % 3}")
                    if step == 50 and rank.rank == lost:
                        group.kill(lost)
                        return ""
            except HoroError as error:
                assert isinstance(error, PeerLostError)
                return str(error)
            raise AssertionError

        said = group.run(body)
    assert all(f"rank {lost}" in text for rank, text in enumerate(said) if rank != lost), said


def test_without_a_search_nothing_is_said() -> None:
    assert run_ranks(lambda rank: rank.context.tuning(), [2]) == [(dict.fromkeys(KNOBS, 0), False)] * 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"steps_per_sample": 0}, "steps_per_sample must be 1 to 1000, not 0"),
        ({"steps_per_sample": 1001}, "steps_per_sample must be 1 to 1000, not 1001"),
        ({"warmup_samples": -1}, "warmup_samples not negative, not -1"),
        ({"max_samples": 0}, "max_samples positive, not 0"),
        ({"start": {"segment": 1 << 20}}, "values that this job cannot have"),
        ({"start": {"segment": 5000}}, "values that this job cannot have"),
        ({"start": {"sockets": 2}}, "values that this job cannot have"),
        ({"defaults": {"overlap": 3}}, "values that this job cannot have"),
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, Any], said: str) -> None:
    (setup,) = make_setups([1], segment_bytes=SLOT, autotune=Autotune(**wrong))
    with pytest.raises(UsageError, match=said):
        Context(setup)
    close_setup(setup)


def test_a_log_that_cannot_be_written_ends_without_harm(tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY | os.O_CLOEXEC)
    options, _ = search(tmp_path, [1], log_fd=full)

    def body(rank: Rank) -> None:
        log = Path("/proc/self/fd", str(full))
        assert not log.exists() or str(log.readlink()) != "/dev/full"  # nothing is tried again
        while not rank.context.tuning()[1]:
            assert (rank.allreduce(np.full(20_000, 3.0, np.float32), "x") == 3.0).all()

    run_ranks(body, [1], **options)
