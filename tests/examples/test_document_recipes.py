"""Recipes keep their promises: steps of one process, whole epochs, a debugger for each rank, a requeued job."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from document_blocks import HOW_TO, Block, blocks_of, python_blocks
from example_runs import LIMIT_SECONDS
from rank_pool import RankPool

import horo.torch as hvd

BATCHES, SAMPLES = 3, 4


def block_with(words: str, page: str) -> Block:
    (path,) = (path for path in HOW_TO if path.name == page)
    (block,) = (block for block in blocks_of(path) if words in block.code)
    return block


@pytest.fixture(scope="module")
def three() -> Iterator[RankPool]:
    """Three ranks: with two, a sum and a mean of the others' gradients are alike."""
    pool = RankPool(3)
    yield pool
    pool.close()


def train(code: object, api: Any, samples: slice) -> list[torch.Tensor]:
    """The parameters after the block, with these samples of each batch."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [(torch.randn(3 * SAMPLES, 4), torch.arange(3 * SAMPLES) % 2) for _ in range(BATCHES)]
        loader = [(inputs[samples], labels[samples]) for inputs, labels in batches]
        given = {"torch": torch, "nn": torch.nn, "hvd": api, "loader": loader, "model": model, "optimizer": optimizer}
        given["parameters"] = list(model.parameters())
        exec(code, given)
        return [parameter.detach() for parameter in given["model"].parameters()]
    finally:
        torch.set_default_dtype(torch.float32)


ALONE = SimpleNamespace(
    DistributedOptimizer=lambda optimizer, **_: optimizer,
    broadcast_parameters=lambda *_, **__: None,
    allgather=lambda tensor: tensor,
    rank=lambda: 0,
    size=lambda: 1,
    Sum=None,
)
"""What a recipe calls of horo, in a script for one process."""

WHOLE_LOSS = (
    ("* images @ gather(texts).T", "* gather(images) @ gather(texts).T"),
    ("* texts @ gather(images).T", "* gather(texts) @ gather(images).T"),
    (
        "labels = hvd.rank() * len(images) + torch.arange(len(images))",
        "labels = torch.arange(hvd.size() * len(images))",
    ),
)
"""Makes each rank compute the loss of all samples."""


@pytest.mark.parametrize(
    ("words", "changes"),
    [('reduction="sum"', ()), ("def gather(features)", ()), ("def gather(features)", WHOLE_LOSS)],
    ids=["sum", "contrastive", "contrastive, the whole loss on each rank"],
)
def test_a_recipe_takes_the_steps_of_one_process(
    three: RankPool, words: str, changes: tuple[tuple[str, str], ...]
) -> None:
    text = block_with(words, "recipes.md").code
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)

    def rank() -> list[torch.Tensor]:
        first = hvd.rank() * SAMPLES
        return train(text, hvd, slice(first, first + SAMPLES))

    wanted = train(text, ALONE, slice(None))
    for found in three.run(rank):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_job_goes_on_with_what_was_saved(three: RankPool, tmp_path: Path) -> None:
    save, load = (block_with(words, "checkpoints.md").code for words in ("def save(", "def load("))

    def prepare(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01 * seed), model)
        return {"torch": torch, "os": os, "hvd": hvd, "model": model, "optimizer": optimizer}

    def step(given: dict[str, Any]) -> None:
        given["optimizer"].zero_grad()
        given["model"](torch.arange(20.0).view(5, 4) ** (1 + hvd.rank())).square().mean().backward()
        given["optimizer"].step()

    def rank() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        os.chdir(tmp_path)
        first = prepare(1)
        step(first)
        exec(save, first)
        second = prepare(2 + hvd.rank())
        exec(load, second)
        assert second["epoch"] == 8
        step(first)
        step(second)
        os.chdir("/")
        return list(first["model"].state_dict().values()), list(second["model"].state_dict().values())

    for first, second in three.run(rank):
        torch.testing.assert_close(second, first, rtol=0, atol=0)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_ranks_in_terminals_of_their_own_have_a_debugger(tmp_path: Path) -> None:
    code = block_with("MASTER_PORT", "questions.md").code
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        code = code.replace("29500", str(chosen.getsockname()[1])).replace("python ", f"{sys.executable} ")
    (tmp_path / "train.py").write_text(
        "import torch, horo.torch as hvd\nhvd.init()\nif hvd.rank() == 0:\n    breakpoint()\n"
        "print('sum', hvd.allreduce(torch.tensor(hvd.rank() + 1), op=hvd.Sum).item())\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HORO", "SLURM_"))}
    ranks = [
        subprocess.Popen(
            ["sh", "-c", code.replace("RANK=0 LOCAL_RANK=0", f"RANK={rank} LOCAL_RANK={rank}")],
            cwd=tmp_path,
            env={**kept, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate("p 'rank', hvd.rank()\ncontinue\n", timeout=LIMIT_SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert "('rank', 0)" in outputs[0]
    assert [output.splitlines()[-1].removeprefix("(Pdb) ") for output in outputs] == ["sum 3"] * 2


def samplers(count: int, size: int) -> list[Any]:
    """The sampler of each rank, whose ``hvd`` knows its rank and the size of the job alone."""
    (page,) = (page for page in HOW_TO if page.name == "recipes.md")
    (block,) = (block for block in python_blocks(page) if "class ResumableSampler" in block.code)
    code = block.code[: block.code.index("\nsampler = ")]
    made = []
    for rank in range(size):
        here = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: size)
        given: dict[str, Any] = {"torch": torch, "hvd": here}
        exec(code, given)
        made.append(given["ResumableSampler"](range(count)))
    return made


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 13])
def test_an_epoch_has_every_sample_and_as_many_for_each_rank(count: int, size: int) -> None:
    ranks = samplers(count, size)
    lists = [list(sampler) for sampler in ranks]
    assert {len(own) for own in lists} == {len(ranks[0])} == {-(-count // size)}
    taken = [sample for own in lists for sample in own]
    assert set(taken) == set(range(count))
    for sampler in ranks:
        sampler.set_epoch(1)
    if count == 13:
        assert [list(sampler) for sampler in ranks] != lists
    for sampler in ranks:
        sampler.set_epoch(0)
    assert [list(sampler) for sampler in ranks] == lists


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 3)])
@pytest.mark.parametrize("batches", [0, 2, 7])
def test_a_resumed_epoch_takes_the_rest_with_any_number_of_ranks(before: int, after: int, batches: int) -> None:
    count, batch = 13, 2
    ranks = samplers(count, before)
    ranks[0].set_epoch(3)
    for sampler in ranks[1:]:
        sampler.set_epoch(3)
    taken = [sample for sampler in ranks for sample in list(sampler)[: batches * batch]]
    for sampler in ranks:
        for _ in range(batches):
            sampler.step(batch)
    others = samplers(count, after)
    for sampler in others:
        sampler.load_state_dict(ranks[0].state_dict())
    rest = [sample for sampler in others for sample in sampler]
    assert set(taken) | set(rest) == set(range(count))
    if batches * batch * before < count:
        assert set(taken).isdisjoint(rest)
    else:
        assert rest == []
    for sampler in others:
        sampler.set_epoch(4)
    assert {sample for sampler in others for sample in sampler} == set(range(count))


(PAGE,) = (page for page in HOW_TO if page.name == "preemption.md")
SCRIPTS = {block.mark: block.code for block in blocks_of(PAGE) if block.mark}


def prepare(folder: Path) -> dict[str, str]:
    """The scripts, and a Slurm and a hororun in PATH; returns the environment."""
    (folder / "train.py").write_text(SCRIPTS["script=train"])
    for name in ("batch", "srun"):
        (folder / f"{name}.sh").write_text(SCRIPTS[f"script={name}"])
    programs = folder / "bin"
    programs.mkdir()
    hororun = f'exec "{sys.executable}" -m horo.runner -np 2 -H localhost:2 --no-prefix "$@"'
    doubles = {
        "hororun": hororun,
        "python": f'exec "{sys.executable}" "$@"',
        "scontrol": f'echo "$@" >> "{folder}/scontrol.log"',
        "srun": f'echo $$ > "{folder}/srun.pid"\n[ "$1" = --kill-on-bad-exit=0 ] && shift && {hororun}',
    }
    for name, line in doubles.items():
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HORO", "SLURM_"))}
    return {**kept, "PATH": f"{programs}:{kept['PATH']}", "SLURM_JOB_ID": "42", "OMP_NUM_THREADS": "1"}


def run_until_told(folder: Path, environment: dict[str, str], script: str) -> int:
    """Starts the script, tells it or its step to stop once it trains, and returns the step at which it began."""
    process = subprocess.Popen(
        ["bash", f"{script}.sh"], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        match = re.fullmatch(r"begins at step (\d+)\n", process.stdout.readline())
        assert match
        told = process.pid if script == "batch" else int((folder / "srun.pid").read_text())
        os.kill(told, signal.SIGUSR1)
        process.stdout.read()
        assert process.wait(LIMIT_SECONDS) == 75
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
    return int(match.group(1))


def test_a_job_that_is_told_to_stop_saves_is_requeued_and_goes_on(tmp_path: Path) -> None:
    """First by the script for hororun, then by that for srun, whose step gets the signal."""
    environment = prepare(tmp_path)
    assert run_until_told(tmp_path, environment, "batch") == 0
    assert (tmp_path / "scontrol.log").read_text() == "requeue 42\n"
    assert run_until_told(tmp_path, environment, "srun") > 0
    assert (tmp_path / "scontrol.log").read_text() == "requeue 42\n" * 2
