"""Groups of the backend "horo": how they begin and end, beside one another and one after the other."""

from __future__ import annotations

import gc
import os
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from jobs import open_descriptors, run_python, wait_until
from rank_pool import RankPool, on
from torch.utils.data import DataLoader, TensorDataset

from horo.errors import AbortedError, HoroError, MismatchError, NotInitializedError, PeerLostError

ROOT = Path(__file__).resolve().parents[2]


@on("group3")
def test_groups_of_some_ranks() -> None:
    rank = dist.get_rank()
    pairs = [dist.new_group([a, b]) for a, b in ((0, 1), (1, 2), (0, 2))]
    alone = dist.new_group([1])
    for members, pair in zip(((0, 1), (1, 2), (0, 2)), pairs, strict=True):
        if rank in members:
            tensor = torch.tensor([rank])
            dist.all_reduce(tensor, group=pair)
            assert tensor.item() == sum(members)
            tensor = torch.tensor([rank])
            dist.broadcast(tensor, src=members[1], group=pair)
            assert tensor.item() == members[1]
    if rank == 1:
        tensor = torch.tensor([5.0])
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=alone)
        gathered = [torch.zeros(1)]
        dist.all_gather(gathered, tensor, group=alone)
        found: list[Any] = [None]
        dist.all_gather_object(found, "alone", group=alone)
        dist.barrier(group=alone)
        assert (tensor.item(), gathered[0].item(), found) == (5.0, 5.0, ["alone"])
        result, place = torch.zeros(2), torch.tensor([7.0, 7.0])
        for value in (1.0, 2.0, 3.0):  # the same call, with other memory
            given = torch.full((2,), value)
            dist.all_gather_into_tensor(result, given, group=alone)
            assert result.tolist() == [value] * 2
            dist.reduce_scatter_tensor(place, given, op=dist.ReduceOp.AVG, group=alone)
            assert place.tolist() == [value] * 2
            before = given._version
            work = dist.all_reduce(given, group=alone, async_op=True)
            assert work is not None
            assert work.wait()
            assert work.get_future().wait()[0] is given
            assert given._version > before
            dist.barrier(group=alone)
    for group in (*pairs, alone):
        dist.destroy_process_group(group)


@on("group3")
def test_groups_that_only_their_members_make_in_any_order() -> None:
    rank = dist.get_rank()
    wanted = [[0, 1], [1, 2], [0, 2]]
    order = {0: (0, 2), 1: (1, 0), 2: (2, 1)}[rank]  # every rank begins with another one
    made: dict[int, Any] = {}

    def make(index: int) -> None:
        made[index] = dist.new_group(wanted[index], use_local_synchronization=True)

    threads = [threading.Thread(target=make, args=(index,)) for index in order]  # else they wait for one another
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in sorted(order):
        tensor = torch.tensor([rank])
        dist.all_reduce(tensor, group=made[index])
        assert tensor.item() == sum(wanted[index])
    for index in sorted(order):
        dist.destroy_process_group(made[index])


@on("fresh_group8", deadline_s=300)
def test_a_mesh_of_three_dimensions() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pipe", "data", "model"))
    for name, step in (("pipe", 4), ("data", 2), ("model", 1)):
        rank = dist.get_rank()
        tensor = torch.tensor([rank])
        dist.all_reduce(tensor, group=mesh.get_group(name))
        assert tensor.item() == 2 * rank + (step if not rank & step else -step)


@on("group2")
def test_meshes() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "model"))
    assert [mesh.get_group(name).size() for name in ("data", "model")] == [2, 1]
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=mesh.get_group("data"))
    dist.all_reduce(tensor, group=mesh.get_group("model"))
    assert tensor.tolist() == [2.0, 2.0]


@on("fresh_group2", deadline_s=120)
def test_destroy_and_init_again_leave_nothing() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    process = psutil.Process()
    path = f"{tempfile.gettempdir()}/again-{os.environ['HORO_STORE'].rpartition(':')[2]}"

    def cycle(i: int) -> None:  # a file each: torch's FileStore finds the last cycle's keys where a rank still has it
        dist.init_process_group("horo", init_method=f"file://{path}-{i}", rank=rank, world_size=size)
        group = dist.new_group([0, 1])
        tensor = torch.full((100,), float(i))
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work.get_future().wait()[0][0].item() == 2.0 * i
        dist.barrier()
        dist.destroy_process_group()

    for i in range(3):
        cycle(i)
    gc.collect()
    descriptors, threads = process.num_fds(), process.num_threads()
    for i in range(3, 13):
        cycle(i)
    gc.collect()
    wait_until(lambda: process.num_threads() <= threads, "the threads of the groups have ended")
    assert process.num_fds() <= descriptors


@on("group2")
def test_one_more_group_costs_a_thread_and_five_descriptors_even_with_futures() -> None:
    process = psutil.Process()
    dist.barrier()
    descriptors, threads = process.num_fds(), process.num_threads()
    groups = [dist.new_group([0, 1]) for _ in range(20)]
    futures = [dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future() for group in groups]
    assert [future.wait()[0].item() for future in futures] == [2.0] * len(groups)
    dist.barrier()
    assert process.num_fds() - descriptors <= 5 * len(groups)  # as gloo's
    wait_until(lambda: process.num_threads() - threads <= len(groups) + 2, "at most two idle threads stay")
    for group in groups:
        dist.destroy_process_group(group)
    dist.barrier()
    assert process.num_fds() <= descriptors
    wait_until(lambda: process.num_threads() <= threads + 2, "the threads of the groups have ended")


@on("fresh_group4", deadline_s=300)
def test_a_hundred_groups_work_and_do_nothing_when_idle() -> None:
    process = psutil.Process()
    descriptors = process.num_fds()
    most = descriptors + 100 * 4 + 48  # what torch and the start of a group need beside
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    groups = [dist.new_group([0, 1, 2, 3]) for _ in range(100)]
    tensors = [torch.full((3,), float(i)) for i in range(len(groups))]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in zip(tensors, groups, strict=True)]
    for i, work in enumerate(works):
        work.wait()
        assert tensors[i].tolist() == [4.0 * i] * 3
    dist.barrier()
    own = threading.get_native_id()

    def count_switches() -> int:
        counts = 0
        for thread in Path("/proc/self/task").iterdir():
            if int(thread.name) != own:
                counts += sum(int(line.split()[1]) for line in (thread / "status").open() if "_switches" in line)
        return counts

    deadline = time.monotonic() + 60
    before, now = -1, count_switches()
    while before != now and time.monotonic() < deadline:
        time.sleep(1.0)  # a second without a switch: what has spun has come to rest
        before, now = now, count_switches()
    assert before == now
    dist.barrier()  # others would be woken by a group that ends
    for group in groups:
        dist.destroy_process_group(group)
    groups.clear()
    dist.barrier()
    assert process.num_fds() <= descriptors


@on("fresh_group2")
def test_a_group_for_which_there_are_no_descriptors_leaves_nothing() -> None:
    rank = dist.get_rank()
    process = psutil.Process()
    before = process.num_fds(), process.num_threads()
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] + 45, before[0] + 45))
    groups = []
    with pytest.raises(HoroError, match=r"a group of 2 ranks needs \d+ open files, .* raise its limit"):
        while True:
            groups.append(dist.new_group([0, 1]))
    assert 0 < len(groups) < 45
    for group in groups:
        dist.barrier(group=group)
        dist.destroy_process_group(group)
    dist.barrier()
    assert (process.num_fds(), process.num_threads()) <= before
    dist.destroy_process_group(dist.new_group([0, 1]))


@on("fresh_group2")
def test_one_thread_watches_the_other_ranks_for_all_groups() -> None:
    """It ends with the last group, and a forked child keeps none of its descriptors."""

    def count_watches() -> int:
        return sum("eventpoll" in kind for _, kind in open_descriptors())

    dist.new_group([0, 1])
    assert count_watches() == 1
    if (child := os.fork()) == 0:
        os._exit(count_watches())
    assert os.waitpid(child, 0)[1] == 0
    dist.barrier()
    dist.destroy_process_group()
    assert count_watches() == 0


@on("group2")
def test_workers_of_a_data_loader_do_not_disturb_the_group() -> None:
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, num_workers=2)
    total = torch.zeros(1)
    for (batch,) in loader:
        total += batch.sum()
        dist.all_reduce(total)
    dist.barrier()


@on("group2")
def test_a_difference_between_ranks_is_told_to_all_and_the_group_goes_on() -> None:
    rank = dist.get_rank()
    calls = [lambda: dist.all_reduce(torch.ones(2)), lambda: dist.broadcast(torch.ones(2), 1)]
    for call in calls if rank == 0 else calls[::-1]:
        with pytest.raises(MismatchError, match=r"call \d+: rank 0 .* (allreduce|broadcast)\(.*, rank 1 .* calls "):
            call()
    with pytest.raises(MismatchError, match=r"rank 0 .*\(float32 \[2\], Sum\), rank 1 .*\(float32 \[3\], Sum\)"):
        dist.all_reduce(torch.ones(2 + rank))
    work = dist.all_reduce(torch.ones(2 + rank), async_op=True)
    with pytest.raises(RuntimeError, match=r"float32 \[3\]"):
        work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), MismatchError)
    future = dist.all_reduce(torch.ones(2 + rank), async_op=True).get_future()
    with pytest.raises(RuntimeError, match=r"float32 \[3\]"):
        future.wait()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == 2.0


@on("group2")
def test_a_wait_that_is_over_leaves_the_operation_in_progress() -> None:
    if dist.get_rank() == 0:
        tensor = torch.ones(1)
        work = dist.all_reduce(tensor, async_op=True)
        with pytest.raises(TimeoutError, match="the operation is not done; it goes on"):
            work.wait(timedelta(milliseconds=50))
        dist.distributed_c10d._get_default_store().set("waited", "")
        assert work.wait()
        assert tensor.item() == 2.0
    else:
        dist.distributed_c10d._get_default_store().wait(["waited"])
        dist.all_reduce(torch.ones(1))


CALLS = {
    "barrier": lambda group, options: group.barrier(options),
    "allreduce": lambda group, options: group.allreduce([torch.ones(1)], options),
    "allgather": lambda group, options: group._allgather_base(torch.ones(3), torch.ones(1), options),
    "gather": lambda group, options: group.gather(
        [[torch.ones(1)] * 3] * (group.rank() == 0), [torch.ones(1)], options
    ),
}


def stop_waiting(timeout: timedelta, call: str, *, by_options: bool) -> None:
    """Ranks 0 and 2 wait for rank 1, which calls nothing."""
    group, begin = dist.distributed_c10d._get_default_group(), CALLS[call]
    options = getattr(dist.distributed_c10d, call.capitalize() + "Options")()
    if call == "gather":
        options.rootRank = 0
    begin(group, options).wait()
    if by_options:
        options.timeout = timeout
    else:
        group._set_default_timeout(timeout)
    began = time.monotonic()  # before any rank begins what will be late
    dist.barrier()
    if dist.get_rank() != 1:
        with pytest.raises(TimeoutError, match=rf"rank 1 \(.*\) has not called {call} .* within the timeout of 1 s"):
            begin(group, options).wait()
        assert 0.99 <= time.monotonic() - began < 30
        with pytest.raises(TimeoutError, match="rank 1 "):
            dist.all_reduce(torch.ones(1))
    else:
        while (error := dist.group.WORLD._exchange.job.context.health()) is None:  # as one that computes
            time.sleep(0.01)
        assert isinstance(error, TimeoutError)
    dist.destroy_process_group()


@pytest.mark.parametrize("by_options", [False, True])
@pytest.mark.parametrize("call", CALLS)
@on("fresh_group3")
def test_an_operation_that_is_late_ends_the_group_on_all_ranks_and_the_late_rank_is_named(
    call: str, by_options: bool
) -> None:
    stop_waiting(timedelta(seconds=1), call, by_options=by_options)


@on("group2")
def test_what_ends_a_group_is_its_timeout_and_not_that_of_stalls() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HORO_STALL_CHECK_TIME_SECONDS", "0.1")
        patch.setenv("HORO_STALL_SHUTDOWN_TIME_SECONDS", "0.1")
        group = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank() == 0:
        with pytest.raises(TimeoutError, match=r"rank 1 \(.*\) has not called barrier"):
            dist.barrier(group)
    else:
        while (error := group._exchange.job.context.health()) is None:  # as one that computes
            time.sleep(0.01)
        assert "has not called barrier" in str(error)
    dist.destroy_process_group(group)


def lose(victim: int) -> str:
    """Awaits, in all ways, what a rank that is killed does not do."""
    works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(3)] if dist.get_rank() != victim else []
    futures = [work.get_future() for work in works]
    dist.distributed_c10d._get_default_store().add("begun", 1)
    if dist.get_rank() == victim:
        while dist.distributed_c10d._get_default_store().add("begun", 0) < dist.get_world_size():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    for wait in [*(work.wait for work in works), *(future.wait for future in futures), dist.barrier]:
        with pytest.raises(RuntimeError, match=rf"rank {victim} \(.*\) is gone: its process ended"):
            wait()
    assert time.monotonic() - began < 2
    with pytest.raises(PeerLostError):
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    return "fine"


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_lost_rank_ends_works_and_futures(fresh_group3: RankPool, victim: int) -> None:
    results = fresh_group3.run_each(lose, [(victim,)] * 3, lost=[victim])
    assert results == ["fine" if rank != victim else None for rank in range(3)]


def abort_while_threads_wait() -> None:
    """On rank 0, whose threads wait in all ways, while rank 1 does something else."""
    store = dist.distributed_c10d._get_default_store()
    said: list[str] = []

    def note(wait: Callable[[], object]) -> None:
        with pytest.raises(RuntimeError) as error:
            wait()
        said.append(str(error.value))

    works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(3)]
    waits = (works[0].wait, works[1].get_future().wait, lambda: dist.all_reduce(torch.ones(1)))
    threads = [threading.Thread(target=note, args=(wait,)) for wait in waits]
    for thread in threads:
        thread.start()
    core = dist.group.WORLD._exchange.pending.core
    while len(core.callers()) < 4:
        time.sleep(0.001)
    dist.group.WORLD.abort()
    for thread in threads:
        thread.join(10)
    assert len(said) == 3
    assert all("this rank has aborted the group: abort() of process group" in text for text in said), said
    with pytest.raises(AbortedError, match="this rank has aborted the group"):
        works[2].wait()
    assert isinstance(works[2].exception(), AbortedError)
    with pytest.raises(NotInitializedError, match=r"process group .*: it has been aborted"):
        dist.all_reduce(torch.ones(1))
    dist.group.WORLD.abort()
    store.set("aborted", "")


@on("fresh_group2")
def test_abort_ends_what_is_in_progress_here_and_elsewhere_at_once() -> None:
    if dist.get_rank() == 0:
        abort_while_threads_wait()
    else:
        dist.distributed_c10d._get_default_store().wait(["aborted"])
        with pytest.raises(AbortedError, match=r"rank 0 \(.*\) has aborted the group: abort\(\) of process group"):
            dist.barrier()
    dist.destroy_process_group()


@on("fresh_group2", deadline_s=120)
def test_groups_that_are_made_again_after_aborts_leave_nothing() -> None:
    """As torchft does with each change of its quorum: an operation is under way, and the store has a new prefix."""
    dist.destroy_process_group()
    rank = int(os.environ["HOROVOD_RANK"])
    process = psutil.Process()
    counts = []
    store = dist.FileStore(f"{tempfile.gettempdir()}/quorum-{os.environ['HORO_STORE'].rpartition(':')[2]}", 2)
    for i in range(20):
        dist.init_process_group("horo", store=dist.PrefixStore(f"quorum {i}", store), rank=rank, world_size=2)
        tensor = torch.full((100,), float(i))
        dist.all_reduce(tensor)
        assert tensor[0].item() == 2.0 * i
        if rank == i % 2:
            works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(3)]
            works[0].get_future()
        store.set(f"{rank} aborts {i}", "")
        store.wait([f"{other} aborts {i}" for other in range(2)])
        if i % 3:
            dist.group.WORLD.abort()
            dist.destroy_process_group()
        else:
            dist.distributed_c10d._abort_process_group()
        works = []
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == "horo futures":  # it ends by itself
                thread.join(10)
        deadline = time.monotonic() + 20
        while i >= 10 and process.num_threads() > max(counts[2:10])[1] and time.monotonic() < deadline:
            time.sleep(0.01)
        counts.append((process.num_fds(), process.num_threads()))
    assert max(counts[10:]) <= max(counts[2:10]), counts


def test_without_an_import_of_horo_by_torchrun_and_alone(tmp_path: Path) -> None:
    """And by hororun in test_distributed_steps.py."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('horo')\n"
        "tensor = torch.ones(2)\n"
        "dist.all_reduce(tensor)\n"
        # in one write: torchrun's ranks are unbuffered and share a pipe
        "sys.stdout.write(f'sum {tensor.tolist()} {\"horo.torch\" in sys.modules}\\n')\n"
    )
    done = run_python("-m", "torch.distributed.run", "--nproc-per-node", "2", str(script))
    assert (done.returncode, done.stdout.count("sum [2.0, 2.0] True")) == (0, 2), done.stderr
    assert "horo" not in done.stderr
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = run_python(str(script), environment=alone)
    assert (done.stdout, done.stderr) == ("sum [1.0, 1.0] True\n", "")


BROKEN = {
    "horo cannot be imported where it is needed": "sys.modules['horo.torch'] = None",
    "torch has another register_backend": "torch.distributed.Backend = types.SimpleNamespace(_plugins={})",
    "registering fails": "torch.distributed.Backend.register_backend = None",
    "torch was built without torch.distributed": "torch.distributed.is_available = lambda: False",
}


def test_import_torch_loads_nothing_of_horo_but_the_entry_point_which_never_raises() -> None:
    code = (
        "import os, sys, types, torch\n"
        "print(*sorted(name for name in sys.modules if name.partition('.')[0] == 'horo'), flush=True)\n"
        "torch.distributed.Backend._plugins.pop('HORO')\n"
        "from horo.torch_backend import register\n"
        f"for what, broken in {BROKEN!r}.items():\n"
        "    if os.fork() == 0:\n"
        "        exec(broken)\n"
        "        print(what, register(), sep=': ', flush=True)\n"
        "        os._exit(0)\n"
        "    assert os.wait()[1] == 0, what\n"
    )
    done = run_python("-c", code, check=True)
    loaded, *registers = done.stdout.splitlines()
    assert loaded == "horo horo.import_path horo.torch_backend horo.version"
    assert registers == [f"{what}: {what.startswith('horo')}" for what in BROKEN]
    assert done.stderr == ""
