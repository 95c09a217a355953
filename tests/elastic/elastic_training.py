"""A training function that dies where a test says so, and writes down what it has trained with."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jobs import wait_until

import horo.elastic.commits
import horo.torch as hvd
import horo.torch.elastic
import horo.torch.elastic.copies
import horo.torch.elastic.state
from horo.bootstrap.elastic import membership
from horo.errors import UsageError

SAMPLES = 22
EPOCHS = 2


@dataclass(frozen=True)
class Plan:
    """The deaths of a job, and how its script is written."""

    deaths: dict[int, tuple[int, str]] = field(default_factory=dict)
    """By worker, the step and the place of it."""
    clears: str = "before backward"
    gradients_ready: str = "backward"
    passes: int = 1
    every: int = 1
    """Steps between commits."""
    tail: str = "exact"
    is_rich: bool = False
    """Whether there are a batch norm, a scheduler, and a gradient scaler (where torch has one for the CPU), too."""
    sharding: str | None = None
    awaits: int = 0
    """The number of ranks with which training goes on only once a newcomer is ready."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Trainer:
    """One worker."""

    def __init__(self, folder: str, plan: Plan) -> None:
        self.folder, self.plan = Path(folder), plan
        member = membership()
        assert member is not None
        self.member, self.worker = member, member.worker
        self.sizes: list[int] = []
        self.resets = 0
        self.death: tuple[int, str] | None = plan.deaths.get(self.worker)

    def at(self, place: str, step: int) -> None:
        if self.death == (step, place):
            die()

    def dies_before(self, owner: Any, name: str, place: str, step: Callable[[], int]) -> None:
        """Has the worker die when it calls a function of horo."""
        function = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            self.at(place, step())
            return function(*args, **options)

        setattr(owner, name, call)

    def make(self) -> None:
        torch.manual_seed(7 + hvd.rank())  # ranks begin apart: the state makes them equal
        middle = [torch.nn.BatchNorm1d(5)] if self.plan.is_rich else []
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 5), *middle, torch.nn.Tanh(), torch.nn.Linear(5, 2))
        self.optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.Adam(self.model.parameters(), lr=0.05),
            self.model.named_parameters(),
            gradients_ready=self.plan.gradients_ready,
            backward_passes_per_step=self.plan.passes,
            sharding=self.plan.sharding,
        )
        tail: Any = self.plan.tail
        self.sampler = horo.torch.elastic.ElasticSampler(range(SAMPLES), tail=tail, batch_size=1)
        self.parts: dict[str, Any] = {"sampler": self.sampler}
        self.scaler: Any = None
        if self.plan.is_rich:
            self.parts["scheduler"] = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.7)
            if hasattr(torch.amp, "GradScaler"):
                self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
                self.parts["scaler"] = self.scaler
        self.state = horo.torch.elastic.TorchState(self.model, self.optimizer, epoch=0, step=0, seen=[], **self.parts)
        self.state.register_reset_callbacks([self.count_reset])
        self.model[0].weight.register_hook(self.in_backward)
        self.dies_before(horo.torch.elastic.copies.Copies, "_views_of", "commit", lambda: self.state.step)
        self.dies_before(horo.elastic.commits.CommitMemory, "write", "own record", lambda: self.state.step)
        self.dies_before(horo.torch.elastic.state, "overwrite", "sync", lambda: self.state.step)
        self.dies_before(sys.modules["torch.optim.adam"], "adam", "inside step", lambda: self.state.step)
        self.dies_before(self.member, "_begin", "init", lambda: self.state.step)

    def count_reset(self) -> None:
        self.resets += 1

    def in_backward(self, grad: torch.Tensor) -> None:
        self.at("backward", self.state.step)

    def step(self, sample: int) -> None:
        state, at = self.state, self.state.step
        if hvd.size() == self.plan.awaits:
            wait_until(self.member.change, "a newcomer")
        self.at("begun", at)
        x = torch.nn.functional.one_hot(torch.tensor([sample % 4]), 4).float() + sample / 100
        if self.plan.is_rich:
            x = torch.cat([x, x.square() + state.step])
        weight = self.sampler.weight()
        if self.plan.clears == "before backward":
            self.optimizer.zero_grad()
        for _ in range(self.plan.passes):
            loss = self.model(x).square().mean() * weight
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        self.at("reduced", at)
        self.update(at)
        self.at("stepped", at)
        if self.plan.clears == "after step":
            self.optimizer.zero_grad()
        self.sampler.record_batch(0, 1)
        own = torch.tensor([sample if weight else -1])
        state.seen += [[state.epoch, each] for each in hvd.allgather(own).tolist() if each >= 0]
        state.step += 1
        self.at("recorded", at)
        if state.step % self.plan.every == 0:
            state.commit()

    def update(self, at: int) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.unscale_(self.optimizer)
            self.at("unscaled", at)
            hvd.allreduce(torch.ones(1), name="norm")
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.plan.is_rich:
            self.parts["scheduler"].step()

    def train(self, state: Any) -> str:
        self.sizes.append(hvd.size())
        for state.epoch in range(state.epoch, EPOCHS):  # noqa: B020  (Horovod's way to count)
            self.sampler.set_epoch(state.epoch)
            for sample in self.sampler:
                self.step(sample)
        digest = hashlib.sha256()
        for value in self.model.state_dict().values():
            digest.update(value.numpy().tobytes())
        return digest.hexdigest()


def train(folder: str, plan: Plan) -> None:
    """The program of a worker."""
    torch.set_num_threads(1)
    hvd.init()
    trainer = Trainer(folder, plan)
    if trainer.member.is_newcomer:
        assert "horo.bootstrap.job" in sys.modules  # others do not wait until it is imported
        assert (hvd.rank(), hvd.size()) == (trainer.member.forecast.rank, len(trainer.member.forecast.workers))
        refused = ""
        try:
            hvd.allreduce(torch.ones(1))
        except UsageError as error:
            refused = str(error)
        assert "this process has come to a job that runs already" in refused
    trainer.make()
    digest = horo.torch.elastic.run(trainer.train)(trainer.state)
    result = {
        "digest": digest,
        "seen": trainer.state.seen,
        "sizes": trainer.sizes,
        "resets": trainer.resets,
        "commit": trainer.state._standing.commit,
        "own_bytes": next(trainer.state._copies._memory.whole()).data_bytes,
    }
    Path(folder, f"result.{trainer.worker}").write_text(json.dumps(result))
    hvd.shutdown()


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    train(sys.argv[1], Plan(**{**given, "deaths": {int(who): tuple(at) for who, at in given["deaths"].items()}}))
