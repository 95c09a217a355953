"""Timelines and logs of real jobs: who writes what and when; and an idle job, in which nothing wakes."""

import gc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from jobs import DEADLINE_S, in_child, run_python
from rank_pool import RankPool, on, on_own
from trace_events import names_of_rows, parse_timeline, rows_of

import horo.torch as hvd
from horo import __version__
from horo.timeline import merge

ADASUM_PHASES = ("ALLTOALL", "DOT_PRODUCTS", "SUM_OF_PRODUCTS", "COMBINE", "ALLGATHER")
STEP = ["NEGOTIATE_ALLREDUCE", "ALLREDUCE", "  SHM_ALLREDUCE"]


@on("ranks2")
def test_rank_0_writes_what_all_have_done_with_horovods_names(tmp_path: Path) -> None:
    hvd.start_timeline(str(tmp_path / "t.json"), mark_cycles=True)
    hvd.barrier()
    hvd.allreduce(torch.ones(5, 1000), name="x")
    hvd.allgather(torch.ones(hvd.rank() + 1), name="x")
    hvd.broadcast(torch.ones(3), 0, name="x")
    hvd.alltoall(torch.ones(4), name="x")
    hvd.reducescatter(torch.ones(4), name="x")
    hvd.allreduce(torch.ones(2), op=hvd.Adasum, name="y")
    hvd.stop_timeline()
    hvd.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
    events = parse_timeline(tmp_path / "t.json")
    rows = rows_of(events)
    for kind in ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter"):
        phase = kind.upper()
        assert rows[f"{kind}.x"] == [f"NEGOTIATE_{phase}", phase, f"  SHM_{phase}"], rows
    assert rows["allreduce.y"][:3] == ["NEGOTIATE_ADASUM", "ADASUM", "  SHM_ADASUM_ALLREDUCE"], rows
    assert rows["allreduce.y"][3:] == [f"    ADASUM_{phase}" for phase in ADASUM_PHASES], rows
    assert sum(event["ph"] == "i" and event["name"] == "CYCLE_START" for event in events) >= 6
    head = events[0]["args"]
    assert head["start_time_since_epoch_in_micros"] == pytest.approx(time.time() * 1e6, abs=3600e6)
    assert (head["rank"], head["size"]) == (0, 2)
    # Both ranks are shown as ready within the negotiation of what both have submitted.
    ready = {event["name"] for event in events if event["ph"] == "X"}
    assert ready == {"0", "1"}


def test_every_rank_writes_a_file_of_its_own_and_they_merge(ranks4: RankPool, tmp_path: Path) -> None:
    def check(path: str) -> None:
        hvd.start_timeline(path)
        for step in range(10):
            hvd.allreduce(torch.ones(1000), name=f"t{step % 2}")
        hvd.barrier()
        hvd.stop_timeline()

    ranks4.run(check, str(tmp_path / "t-{rank}.json"))
    files = [tmp_path / f"t-{rank}.json" for rank in range(4)]
    assert sorted(tmp_path.iterdir()) == files
    for rank, path in enumerate(files):
        events = parse_timeline(path)
        assert events[0]["args"]["rank"] == rank
        assert rows_of(events)["allreduce.t1"] == STEP * 5
    out = tmp_path / "all.json"
    said = merge(str(out), [str(path) for path in files])
    assert len(said) == 1
    merged = parse_timeline(out)
    names = names_of_rows(merged)
    assert [names[rank].split(" on ")[0] for rank in range(4)] == [f"rank {rank}" for rank in range(4)]
    # No rank begins an operation before the last has submitted it: on one host, clocks are the same.
    begun, submitted = [[[e["ts"] for e in merged if e["ph"] == "B" and e["pid"] == rank and e["name"] == name]
                         for rank in range(4)] for name in ("ALLREDUCE", "NEGOTIATE_ALLREDUCE")]  # fmt: skip
    assert all(len(times) == 10 for times in begun + submitted)
    for step in range(10):
        slack_us = 50  # two looks at the processor's counter are set against two of the clock
        assert min(times[step] for times in begun) > max(times[step] for times in submitted) - slack_us


def test_operations_of_process_sets_have_rows_of_their_own(tmp_path: Path) -> None:
    def work(folder: Path) -> None:
        one, two = hvd.add_process_set([2]), hvd.add_process_set([0, 1])
        hvd.start_timeline(f"{folder}/{{rank}}.json")
        hvd.allreduce(torch.ones(3), name="x")
        for each in (one, two):
            if each.included():
                hvd.allreduce(torch.ones(3), name="x", process_set=each)
        hvd.barrier()
        hvd.remove_process_set(two)
        again = hvd.add_process_set([0, 1])
        assert again.process_set_id == 2
        if again.included():
            hvd.allreduce(torch.ones(3), name="x", process_set=again)
        hvd.barrier()
        hvd.stop_timeline()

    with RankPool(3) as pool:
        pool.run(work, tmp_path)
    first, second, third = (parse_timeline(tmp_path / f"{rank}.json") for rank in range(3))
    small = STEP[:2]  # their data may go with the announcement, or not
    for events in (first, second):
        rows = rows_of(events)
        assert rows["allreduce.x"][:2] == small
        assert [step for step in rows["process set 2: allreduce.x"] if step in small] == small * 2
        assert "process set 1: allreduce.x" not in rows
    assert "process set 2: allreduce.x" not in rows_of(third)
    assert rows_of(third)["process set 1: allreduce.x"][:2] == small
    teams = [[e["args"]["team"] for e in events if "record" in e.get("args", ())] for events in (first, second)]
    assert teams[0] == teams[1]
    assert len({*teams[0]}) == 3  # the set that has got the number of another one is told from it


@on("fresh2")
def test_the_variable_starts_one_at_each_init_and_no_file_replaces_another(tmp_path: Path) -> None:
    os.environ["HOROVOD_TIMELINE"] = str(tmp_path / "t.json")
    os.environ["HOROVOD_TIMELINE_MARK_CYCLES"] = "1"
    for number in range(3):
        hvd.init()
        hvd.allreduce(torch.ones(3), name=f"n{number}")
        hvd.barrier()
        hvd.shutdown()
    files = [tmp_path / name for name in ("t.json", "t.2.json", "t.3.json")]
    for number, path in enumerate(files if os.environ["HOROVOD_RANK"] == "0" else []):
        assert sorted(tmp_path.iterdir()) == sorted(files)
        events = parse_timeline(path)
        assert rows_of(events)[f"allreduce.n{number}"] == STEP
        assert {"CYCLE_START", "HORO_END"} <= {event.get("name") for event in events}


@on("fresh2")
def test_horovods_word_dynamic_writes_nothing_before_a_start(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
    hvd.init()
    hvd.allreduce(torch.ones(3), name="before")
    hvd.barrier()
    assert list(tmp_path.iterdir()) == []
    hvd.barrier()
    hvd.start_timeline("t.json")
    hvd.start_timeline("t.json")  # as in Horovod's own tests
    hvd.allreduce(torch.ones(3), name="x")
    hvd.stop_timeline()
    hvd.stop_timeline()
    hvd.barrier()
    assert "allreduce.x" in rows_of(parse_timeline(tmp_path / "t.json"))
    hvd.shutdown()


@on("ranks2")
def test_a_path_that_cannot_be_written_is_refused_and_the_job_goes_on(tmp_path: Path) -> None:
    path = str(tmp_path / "none" / "t.json")
    if hvd.rank() == 0:
        with pytest.raises(hvd.UsageError, match=f"the timeline '{path}' cannot be written: No such file"):
            hvd.start_timeline(path)
    else:
        hvd.start_timeline(path)  # it writes none
    for wrong in ("", "a\0b", 3, None, b"bytes"):
        with pytest.raises(ValueError, match=r"start_timeline\(file_path=.*expected the path of a file"):
            hvd.start_timeline(wrong)
    hvd.stop_timeline()  # there is none
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2


@on("fresh2")
def test_a_variable_with_such_a_path_fails_init_by_its_name(tmp_path: Path) -> None:
    path = str(tmp_path / "none" / "{rank}.json")
    os.environ["HORO_TIMELINE"] = path
    told = f"HORO_TIMELINE: the timeline '.*{os.environ['HOROVOD_RANK']}.*' cannot be written"
    with pytest.raises(hvd.UsageError, match=told):
        hvd.init()
    assert not hvd.is_initialized()
    os.environ["HORO_TIMELINE"] = ""
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
    hvd.barrier()
    hvd.shutdown()


@on("ranks2")
def test_a_forked_child_is_refused_and_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    hvd.start_timeline(path)
    hvd.barrier()

    def child() -> None:
        for call in (lambda: hvd.start_timeline(path), hvd.stop_timeline):
            with pytest.raises(hvd.UsageError):
                call()

    in_child(child)
    hvd.allreduce(torch.ones(3), name="after")
    hvd.stop_timeline()
    hvd.barrier()
    assert rows_of(parse_timeline(path))["allreduce.after"] == STEP


def test_the_ranks_that_stay_make_the_file_of_one_that_is_killed(tmp_path: Path) -> None:
    def work(path: str) -> None:
        hvd.start_timeline(path)
        hvd.barrier()
        with pytest.raises(hvd.PeerLostError):
            for step in range(1 << 30):
                hvd.allreduce(torch.ones(100), name=f"t{step % 50}")
                # The size, not the number of steps: thousands of steps may fit between two writes.
                if hvd.rank() == 0 and step % 100 == 0 and Path(f"{path}.rows").stat().st_size > 300_000:
                    os.kill(os.getpid(), signal.SIGKILL)
        hvd.shutdown()

    with RankPool(2) as pool:
        pool.run_each(work, [(str(tmp_path / "t.json"),)] * 2, lost=[0])
    assert list(tmp_path.iterdir()) == [tmp_path / "t.json"]
    events = parse_timeline(tmp_path / "t.json", is_ended=False)
    assert len(events) > 1000
    assert rows_of(events)["allreduce.t0"][:3] == STEP


HEAD = "import os\nos.environ.update({extra!r}.get(os.environ.get('HOROVOD_RANK'), {{}}))\n"
TRAIN = """
from horo.bootstrap.job import start
from horo.core.context import OPS, RequestBuffer
job = start(threads=1)
job.context.finish(job.context.submit(RequestBuffer.of(OPS["barrier"], "barrier")))
job.close()
"""
"""What says the lines is the same with torch, and here much sooner."""
START = (
    rf"horo \[0\] info: horo {re.escape(__version__)} \(core {re.escape(__version__)}\+abi\d+, \w+\): "
    r"{size}, started by {launcher}; {data}"
)


def lines_of(folder: Path, level: str, size: int, extra: dict[str, dict[str, str]] | None = None) -> list[str]:
    script = folder / "train.py"
    script.write_text(HEAD.format(extra=extra or {}) + TRAIN)
    place = ["-m", "horo.runner", "-np", str(size), "--oversubscribe", "--no-prefix", sys.executable] if size else []
    done = run_python(*place, str(script), check=True, environment={"HORO_LOG_LEVEL": level})
    assert done.stdout == ""
    return sorted(done.stderr.splitlines())


def test_a_job_in_order_says_nothing(tmp_path: Path) -> None:
    assert lines_of(tmp_path, "warning", 2) == []


STARTED: dict[str, tuple[str, str, dict[str, dict[str, str]]]] = {
    **{
        overlap: (
            r"2 ranks on 1 host \(localhost: 2\)",
            f"data in shared memory, gradients {when} backward",
            {rank: {"HORO_OVERLAP": overlap} for rank in "01"},
        )
        for overlap, when in (("always", "during"), ("never", "after"))
    },
    "alone": ("1 rank", "no data travels", {}),
    "hosts": (
        r"3 ranks on 2 hosts \(localhost: 2, h2: 1\)",
        "data in shared memory on a host, by TCP between hosts, gradients during backward",
        {"1": {"HORO_HOST_ID": "other", "HORO_HOSTNAME": "h2"}},
    ),
}


@pytest.mark.parametrize("job", STARTED)
def test_at_info_rank_0_says_what_has_started(tmp_path: Path, job: str) -> None:
    size, data, extra = STARTED[job]
    ranks = 0 if job == "alone" else int(size[0])
    (line,) = lines_of(tmp_path, "info", ranks, extra)
    assert re.fullmatch(START.format(size=size, launcher="hororun" if ranks else "nobody", data=data), line)


def test_at_debug_every_rank_says_where_it_is(tmp_path: Path) -> None:
    first, start, second = lines_of(tmp_path, "debug", 2)
    assert start.startswith("horo [0] info: horo ")
    for rank, line in enumerate((first, second)):
        pattern = (
            rf"horo \[{rank}\] debug: rank {rank} of 2 on localhost, process \d+: local rank {rank} of 2, "
            r"cross rank 0 of 1, \d+ cores? of this host, segments of 256 KiB, joined in \d+ ms"
        )
        assert re.fullmatch(pattern, line), line


def ones() -> torch.Tensor:
    return torch.ones(1 << 18)


FORMS: dict[str, Callable[[str | None], object]] = {
    "allreduce": lambda name: hvd.allreduce(ones(), name=name),
    "allreduce_async": lambda name: hvd.synchronize(hvd.allreduce_async(ones(), name=name)),
    "grouped_allreduce": lambda name: hvd.grouped_allreduce([ones(), ones()], name=name),
    "broadcast_": lambda name: hvd.broadcast_(ones(), 0, name=name),
    "allgather, repeated": lambda name: (ones(), [hvd.allgather(ones()[: 1 << 16], name=name) for _ in range(2)]),
    "reducescatter": lambda name: hvd.reducescatter(ones(), name=name),
    "alltoall": lambda name: hvd.alltoall(ones(), name=name),
}


@on_own(2)
def test_a_name_costs_no_tensor() -> None:
    """1 MiB kept for each of 64 names would be eight times what is allowed."""

    def dirty_kib() -> int:
        gc.collect()
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))

    for form, call in FORMS.items():
        for name in (*[None] * 10, "x"):
            call(name)
        before = dirty_kib()
        for number in range(64):  # names so short that what is kept of one fits into what malloc leaves behind a tensor
            call(f"{number}")
        assert dirty_kib() - before <= 8 << 10, form


BENCHMARKS = str(Path(__file__).resolve().parent.parent.parent / "benchmarks")
LOOK_S = 1.0


def begin() -> int:
    """Works a little; returns the process."""
    for step in range(3):
        handles = [hvd.allreduce_async_(torch.ones(1000), op=hvd.Sum, name=f"{step % 2}.{i}") for i in range(10)]
        assert all((hvd.synchronize(handle) == hvd.size()).all() for handle in handles)
    return os.getpid()


def count_packets(benchmarks: str) -> tuple[int, int]:
    sys.path.insert(0, benchmarks)
    from resting import own_packets  # noqa: PLC0415

    return own_packets()


@pytest.mark.parametrize("apart", [False, True], ids=["one host", "a host per rank"])
def test_an_idle_job_is_silent(apart: bool) -> None:
    sys.path.insert(0, BENCHMARKS)
    from resting import activity_of  # noqa: PLC0415

    with RankPool(2, ranks_per_host=1 if apart else 2) as pool:
        processes = pool.run(begin)
        deadline = time.monotonic() + DEADLINE_S
        while True:  # what a start leaves behind ends; what comes again and again never does
            before = pool.run(count_packets, BENCHMARKS)
            threading.Event().wait(0.1)
            resting = activity_of(processes)
            threading.Event().wait(LOOK_S)
            did = activity_of(processes).since(resting)
            after = pool.run(count_packets, BENCHMARKS)
            if (did.wake_ups, did.cpu_ns, after) == (0, 0, before):
                break
            assert time.monotonic() < deadline, f"in {LOOK_S:g} s: {did}, packets and connections {before} to {after}"
        assert all((connections > 0) == apart for _, connections in after)
