"""Sends and receives of torch.distributed between ranks of two hosts, with a network in between."""

import sys

import pytest
from namespaces import Cluster

pytest.importorskip("torch")

BEGIN = """
import os
import random
import signal
import torch
import torch.distributed as dist

dist.init_process_group("horo")
rank, size = dist.get_rank(), dist.get_world_size()
"""
SCHEDULE = """
chance = random.Random({seed})
moves = []
for number in range(120):
    source, target = chance.sample(range(size), 2)
    count = chance.choice([0, 1, 1000, 70_000, 400_000])
    moves.append((source, target, chance.randrange(3), count, number))
works = []
for source, target, tag, count, number in moves:
    if rank == source:
        works.append((dist.isend(torch.full((count,), float(number)), target, tag=tag), None, 0))
    if rank == target:
        tensor = torch.zeros(count)
        works.append((dist.irecv(tensor, source, tag=tag), tensor, number))
random.Random({seed} + rank).shuffle(works)
for work, tensor, number in works:
    work.wait()
    assert tensor is None or torch.equal(tensor, torch.full_like(tensor, float(number))), number
large = torch.full((2_500_000,), float(rank))
got = torch.zeros(2_500_000)
ring = [dist.P2POp(dist.isend, large, (rank + 2) % size), dist.P2POp(dist.irecv, got, (rank - 2) % size)]
for work in dist.batch_isend_irecv(ring):
    work.wait()
assert torch.equal(got, torch.full_like(got, float((rank - 2) % size)))
if rank == 0:
    found = []
    for _ in range(size - 1):
        tensor = torch.zeros(1)
        source = dist.recv(tensor, tag=9)
        assert tensor.item() == source
        found.append(source)
    assert sorted(found) == [1, 2, 3]
else:
    dist.send(torch.tensor([float(rank)]), 0, tag=9)
listed = ["x" * 50_000, {{"a": 1}}] if rank == 3 else [None, None]
if rank == 3:
    dist.send_object_list(listed, 1)
if rank == 1:
    dist.recv_object_list(listed, 3)
    assert listed == ["x" * 50_000, {{"a": 1}}]
print("well", flush=True)
dist.destroy_process_group()
"""
LOST = """
dist.barrier()
if rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.recv(torch.zeros(100_000), {{0: 3, 1: 2, 2: 0}}[rank])
except RuntimeError as error:
    print(error, flush=True)
"""


def test_every_byte_of_a_random_schedule_arrives(cluster: Cluster) -> None:
    seed = 20261129
    print("seed", seed)
    script = BEGIN + SCHEDULE.format(seed=seed)
    done = cluster.run("-np", "4", "--no-prefix", sys.executable, "-c", script)
    assert (done.returncode, done.stdout.split()) == (0, ["well"] * 4), done.stderr


def test_a_rank_that_is_killed_is_named_on_both_hosts(cluster: Cluster) -> None:
    script = BEGIN + LOST.format()
    done = cluster.run("-np", "4", "--no-prefix", "--grace-seconds", "5", sys.executable, "-c", script)
    lines = [line for line in done.stdout.splitlines() if "is gone" in line]  # perhaps before a receive has begun
    assert len(lines) == 3, done.stdout + done.stderr
    assert all(f"rank 3 ({cluster.hosts[1].name}) is gone" in line for line in lines), lines
