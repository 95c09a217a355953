"""``sharding="optimizer"`` when a rank dies, stops or raises: parameters are of one step, or an error denies it."""

from __future__ import annotations  # ranks get functions without what classes in them are annotated by

import copy
import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import interrupt
from jobs import open_descriptors, state_of, wait_until
from rank_pool import RankPool, on, on_own
from small_model import Pair, assert_same_state, bits_of, cutting, make_loss, make_pair, take_steps, train_pair

import horo.torch as hvd
from horo.errors import AbortedError, PeerLostError, StalledError, UsageError
from horo.torch.optimizer.sharding.meeting import Meeting
from horo.torch.optimizer.sharding.placement import ParameterPlacement
from horo.torch.optimizer.sharding.state import StatePlacement

STEPS = 2


class Interrupted(torch.optim.SGD):
    """SGD with momentum that calls a function before or after it has stepped."""

    before: Any = None
    after: Any = None

    def step(self, closure: Any = None) -> Any:
        if self.before is not None:
            self.before()
        result = super().step(closure)
        if self.after is not None:
            self.after()
        return result


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _made() -> Pair:
    return make_pair(lambda parameters: Interrupted(parameters, lr=0.1, momentum=0.9))


def _calls(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """The method calls ``function`` with its arguments first."""
    inner = getattr(owner, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        function(*args)
        return inner(self, *args, **kwargs)

    setattr(owner, name, call)


def _kill_at_meeting(where: str) -> None:
    _calls(Meeting, "meet", lambda what, *_: _kill() if what == where else None)


def _kill_in(owner: Any, name: str) -> None:
    _calls(owner, name, lambda *_: _kill())


MOMENTS: dict[str, tuple[int, Callable[[Any], None], str, bool]] = {
    # after how many steps, what the victim does then, what the others find, whether they are told that it is torn
    "before the step": (STEPS, lambda optimizer: _kill(), "before", False),
    "at entry": (STEPS, lambda optimizer: _kill_at_meeting("entry"), "before", False),
    "in the window": (STEPS, lambda optimizer: setattr(optimizer, "before", _kill), "torn", True),
    "behind its part": (STEPS, lambda optimizer: setattr(optimizer, "after", _kill), "after", True),
    "at exit": (STEPS, lambda optimizer: _kill_at_meeting("exit"), "after", False),
    "while parameters move": (0, lambda optimizer: _kill_in(ParameterPlacement, "_copied"), "before", False),
    "while state moves": (0, lambda optimizer: _kill_in(StatePlacement, "_laid_out"), "after", True),
    "at exit of the first step": (0, lambda optimizer: _kill_at_meeting("exit"), "after", True),
}


def _lose(moment: str, victim: int, is_cut: bool) -> Any:
    with cutting(is_cut):
        return _lose_in_step(*MOMENTS[moment][:2], victim)


def _lose_in_step(steps: int, act: Callable[[Any], None], victim: int) -> Any:
    (model, optimizer), (plain, its) = _made()
    take_steps(plain, its, range(steps))
    before = bits_of(plain)
    take_steps(plain, its, range(steps, steps + 1))
    take_steps(model, optimizer, range(steps))
    hvd.barrier()
    if hvd.rank() == victim:
        act(optimizer)
    with pytest.raises(PeerLostError) as caught:
        take_steps(model, optimizer, range(steps, steps + 1))
    found = bits_of(model)
    what = "before" if found == before else "after" if found == bits_of(plain) else "torn"
    is_torn = False
    try:
        saved = optimizer.state_dict()
    except UsageError as error:
        is_torn = True
        assert re.search(r"optimizer\.state_dict\(\): parameters may be of two steps", str(error))
        with pytest.raises(UsageError, match="parameters may be of two steps"):
            optimizer.step()
        optimizer.load_state_dict(its.state_dict())
        assert optimizer.state_dict()["state"].keys() == its.state_dict()["state"].keys()
    else:
        assert len(saved["state"]) == (4 if steps else 0)
    hvd.shutdown()
    assert bits_of(model) == found
    if what == "after" and not is_torn:
        assert_same_state(optimizer.state_dict(), its.state_dict())
    return what, is_torn, str(caught.value)


@pytest.mark.parametrize(("moment", "is_cut"), [*((moment, False) for moment in MOMENTS), ("at exit", True)])
def test_a_rank_that_dies_leaves_parameters_of_one_step_or_the_error_says_that(moment: str, is_cut: bool) -> None:
    with RankPool(3) as pool:
        results = pool.run_each(_lose, [(moment, 1, is_cut)] * 3, lost=[1])
    for result in (results[0], results[2]):
        what, is_torn, text = result
        assert (what, is_torn) == MOMENTS[moment][2:], text
        assert re.search("^rank 1 ", text), text
        assert ("it was lost inside optimizer.step(): " in text) == is_torn, text
        assert ("optimizer.step() had been done on this host" in text) == (what == "after" and not is_torn), text
        if is_torn:
            assert re.search(r"\d of 4 parameters may be half stepped; load a checkpoint or the last commit$", text)


def _continue(pool: RankPool, rank: int, at_stop: Callable[[], None] = lambda: None) -> threading.Thread:
    """Has a rank go on when it has stopped itself, and has done ``at_stop()`` before."""
    started = threading.Event()

    def watch() -> None:
        deadline = time.monotonic() + 120  # as long as ranks may take to start and to stop
        while time.monotonic() < deadline:
            processes = list(pool.processes)
            if len(processes) == pool.size and (pid := processes[rank].pid):
                started.set()
                if state_of(pid) == "T":
                    at_stop()
                    os.kill(pid, signal.SIGCONT)
                    return
            time.sleep(0.005)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_others_wait_for_an_owner_that_is_stopped_in_the_window(when: str) -> None:
    def check(when: str) -> None:
        (model, optimizer), (plain, its) = _made()
        take_steps(model, optimizer, range(STEPS))
        if hvd.rank() == 1:
            setattr(optimizer, when, _stop)
        take_steps(model, optimizer, range(STEPS, STEPS + 1))
        take_steps(plain, its, range(STEPS + 1))
        assert bits_of(model) == bits_of(plain)

    with RankPool(2) as pool:
        thread = _continue(pool, 1)
        pool.run(check, when)
        thread.join()


@pytest.mark.parametrize("where", ["entry", "exit"])
def test_an_owner_that_stays_stopped_outside_the_window_ends_the_others_wait(where: str) -> None:
    def check(where: str) -> Any:
        (model, optimizer), (plain, its) = _made()
        take_steps(model, optimizer, range(STEPS))
        take_steps(plain, its, range(STEPS + (where == "exit")))
        optimizer.zero_grad()
        make_loss(model, hvd.rank(), STEPS).backward()
        if hvd.rank() == 1:
            if where == "entry":
                _stop()
            _calls(Meeting, "meet", lambda what, *_: _stop() if what == where else None)
        with pytest.raises(StalledError) as caught:
            optimizer.step()
        assert bits_of(model) == bits_of(plain)
        assert len(optimizer.state_dict()["state"]) == 4
        return str(caught.value)

    with RankPool(
        2, environment={"HORO_STALL_CHECK_TIME_SECONDS": "2", "HORO_STALL_SHUTDOWN_TIME_SECONDS": "10"}
    ) as pool:
        text = pool.run_each(check, [(where,)] * 2, lost=[1])[0]
    assert re.search("rank 1", text), text
    assert ("optimizer.step() had been done on this host: all parameters" in text) == (where == "exit"), text


def test_no_view_changes_behind_the_error_while_an_owner_is_stopped() -> None:
    def check() -> Any:
        (model, optimizer), _ = _made()
        take_steps(model, optimizer, range(STEPS))
        if hvd.rank() == 1:
            optimizer.before = _stop
        if hvd.rank() == 2:
            optimizer.after = _kill
        with pytest.raises(PeerLostError):
            take_steps(model, optimizer, range(STEPS, STEPS + 1))
        return bits_of(model), optimizer._sharded_step._placement.window.settle()

    with RankPool(3) as pool:
        thread = _continue(pool, 1)
        found = pool.run_each(check, [()] * 3, lost=[2])
        thread.join()
    assert found[0][0] == found[1][0]
    assert found[0][1] == found[1][1] == [True, True, None]


def test_an_owner_that_dies_tears_the_step_on_its_own_host_alone(tmp_path: Path) -> None:
    def check(folder: Path) -> Any:
        (model, optimizer), _ = _made()
        take_steps(model, optimizer, range(STEPS))
        before = bits_of(model)

        def has_stepped() -> None:
            (folder / str(hvd.rank())).touch()
            if hvd.rank() == 3:
                wait_until(lambda: len(list(folder.iterdir())) == 4, "all have stepped")
                _kill()

        optimizer.after = has_stepped
        with pytest.raises(PeerLostError) as caught:
            take_steps(model, optimizer, range(STEPS, STEPS + 1))
        return before, bits_of(model), str(caught.value)

    with RankPool(4, ranks_per_host=2) as pool:
        first, second, third, _ = pool.run_each(check, [(tmp_path,)] * 4, lost=[3])
    assert first[:2] == second[:2]
    assert first[0] == third[0] != first[1]
    for *_, text in (first, second, third):
        assert re.search(r"^rank 3 ", text), text
    for *_, text in (first, second):
        assert "optimizer.step() had been done on this host: all parameters are of the same step" in text, text
    assert re.search(r"2 of 4 parameters may be half stepped; load a checkpoint or the last commit$", third[2])


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@on("ranks")
def test_a_step_that_raises_on_one_rank_is_an_error_on_all(error: type[BaseException]) -> None:
    (model, optimizer), (plain, its) = pair = _made()
    train_pair(pair, range(STEPS))

    def fail() -> None:
        raise error("of this rank")

    last = hvd.size() - 1
    optimizer.zero_grad()
    make_loss(model, hvd.rank(), 7).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    if hvd.rank() == last:
        optimizer.after = fail
        with pytest.raises(error, match=r"^of this rank$"):
            optimizer.step()
        optimizer.after = None
    else:
        said = rf"^rank {last}: optimizer.step\(\) raised {error.__name__}: of this rank; parameters may be of two"
        with pytest.raises(AbortedError, match=said):
            optimizer.step()
    assert all(one is parameter.grad for one, parameter in zip(gradients, model.parameters(), strict=True))
    assert addresses == [parameter.data_ptr() for parameter in model.parameters()]
    for call in (optimizer.step, optimizer.state_dict):
        with pytest.raises(UsageError, match=rf"may be of two steps, since rank {last}: .* of this rank; load a state"):
            call()
    if hvd.rank() == 0:
        model.load_state_dict(copy.deepcopy(plain.state_dict()))
        optimizer.load_state_dict(copy.deepcopy(its.state_dict()))
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    train_pair(pair, range(3, 6))
    assert bits_of(model) == bits_of(plain)


@pytest.mark.parametrize("where", ["entry", "exit"])
def test_ctrl_c_while_a_rank_meets_the_others(where: str, tmp_path: Path) -> None:
    def check(flag: Path, written: Path) -> None:
        (model, optimizer), (plain, its) = pair = _made()
        train_pair(pair, range(STEPS))
        optimizer.zero_grad()
        make_loss(model, hvd.rank(), STEPS).backward()

        if hvd.rank() == 1:
            met: list[str] = []
            looks: list[bool] = []
            _calls(Meeting, "meet", lambda what, *_: met.append(what))

            def is_waiting() -> bool:
                looks.append(where in met)
                return sum(looks) > 1  # at the first look it may be on its way

            interrupt(optimizer.step, KeyboardInterrupt, is_waiting)
            flag.touch()
            why = "KeyboardInterrupt ended a step of this rank while it met the others"
            with pytest.raises(UsageError, match=rf"^optimizer.state_dict\(\): parameters may be of two st.* {why};"):
                optimizer.state_dict()
            optimizer.load_state_dict(copy.deepcopy(its.state_dict()))
            with pytest.raises(UsageError, match=rf"^optimizer.step\(\): {why}, who are in another step now; call hvd"):
                optimizer.step()
            wait_until(written.exists, "they have")  # the others have done their part: now this rank leaves them
        elif where == "exit":
            optimizer.after = lambda: wait_until(flag.exists, "rank 1 was interrupted")
            optimizer.step()
            written.touch()
        else:
            wait_until(flag.exists, "rank 1 was interrupted")
            optimizer.after = written.touch
            with pytest.raises(AbortedError, match=r"rank 1 .* 2 of 4 parameters may be half stepped; load"):
                optimizer.step()
        optimizer.after = None
        hvd.shutdown()
        hvd.init()
        model.load_state_dict(copy.deepcopy(plain.state_dict()))
        optimizer.load_state_dict(copy.deepcopy(its.state_dict()))
        train_pair(pair, range(3, 6))
        assert bits_of(model) == bits_of(plain)

    with RankPool(2) as pool:
        pool.run(check, tmp_path / "interrupted", tmp_path / "written")


@on("ranks")
def test_a_hook_of_a_user_that_raises_outside_the_window_leaves_all_as_it_was() -> None:
    (model, _), (plain, _) = pair = _made()
    for trained, using in pair:
        for step in range(4):
            using.zero_grad()
            make_loss(trained, hvd.rank(), step).backward()
            if step == 2:
                handle = using.register_step_pre_hook(lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    using.step()
                handle.remove()
            using.step()
    assert bits_of(model) == bits_of(plain)


@on_own(4, init=False)
def test_jobs_one_after_the_other_and_what_is_left_of_them() -> None:
    hvd.init()
    before, of_job = open_descriptors(), _files()
    (model, optimizer), (plain, its) = pair = _made()
    for number in range(3):
        hvd.init()
        train_pair(pair, range(3 * number, 3 * number + 3))
        assert bits_of(model) == bits_of(plain)
        assert str(optimizer.state_dict()) == str(its.state_dict())
        if number == 2:
            break
        hvd.shutdown()
        with torch.no_grad():  # each rank goes on by itself now
            for parameter in (*model.parameters(), *plain.parameters()):
                parameter.mul_(0.9)
            for entries in (*optimizer.state.values(), *its.state.values()):
                entries["momentum_buffer"].mul_(0.5)
        assert str(optimizer.state_dict()) == str(its.state_dict())
    assert _files() > of_job
    del model, optimizer, pair, parameter, entries
    assert not {name for _, name in open_descriptors() - before if "memfd" in name}
    assert _files() == of_job


def _files() -> int:
    """How many files without a name this process has mapped, its job's own included."""
    gc.collect()
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return len({line[4] for line in lines if "/memfd:horo" in " ".join(line)})
