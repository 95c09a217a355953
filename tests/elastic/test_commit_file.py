"""A commit in a file: whole, the latest one, and the user's own. Jobs that end before their training go on from it."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_training import EPOCHS, SAMPLES, Plan, train
from hypothesis import example, given, settings
from hypothesis import strategies as st
from seats import Seats
from test_commits import DATA_BYTES, SECRET, number_of, write

import horo.torch as hvd
from horo.elastic import commits
from horo.elastic.commit_file import _DATA_AT as DATA_AT
from horo.elastic.commit_file import CommitFile
from horo.elastic.commits import Commit, CommitMemory, Found
from horo.errors import ResourceError, UsageError
from horo.torch.elastic.keeping import Keeping


def found(number: int) -> Found:
    memory = CommitMemory(commits.create(), SECRET)
    write(memory, Commit(3, number))
    found = memory.latest()
    assert found is not None
    return found


def test_a_later_job_finds_the_latest_commit_as_one_of_its_first_generation(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    file = CommitFile(str(folder))
    assert file.read() is None
    assert file.write(found(7))
    assert not file.write(found(7))
    assert not file.write(found(5))
    assert file.write(found(8))
    read = CommitFile(str(folder)).read()
    assert read is not None and read.commit == Commit(1, 8)
    assert number_of(read) == 8
    assert (folder / "commit").stat().st_mode & 0o077 == 0


def test_what_a_killed_process_has_left_beside_the_file_disturbs_nobody(tmp_path: Path) -> None:
    file = CommitFile(str(tmp_path))
    file.write(found(7))
    (tmp_path / "commit.new.host.7").write_bytes(b"horocmf2")
    assert number_of(file.read()) == 7
    assert file.write(found(8))
    assert number_of(file.read()) == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["commit", "commit.before", "lock"]


@pytest.mark.parametrize("name", ["commit", "."])
def test_a_place_where_others_may_write_is_refused(tmp_path: Path, name: str) -> None:
    CommitFile(str(tmp_path)).write(found(7))
    (tmp_path / name).chmod(0o722)
    with pytest.raises(ResourceError, match=r"\(--elastic-dir\) cannot be .*other users may write there"):
        CommitFile(str(tmp_path)).read()


def flip(path: Path, place: int, value: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ value]))


def refused(file: CommitFile, words: str) -> None:
    with pytest.raises(
        UsageError, match=rf"{re.escape(str(file))} {words}; remove it, or name another --elastic-dir"
    ) as told:
        file.read()
    assert told.value.__suppress_context__  # else a traceback of horo's own comes before the sentence


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "is damaged in its first bytes"),
        (40, "is damaged in its first bytes"),
        (DATA_AT, r"is damaged: it has 65536 bytes instead of \d+"),
        (DATA_AT + DATA_BYTES, r"is damaged: it has \d+ bytes instead of \d+"),
        (DATA_AT + DATA_BYTES + 100, r"is damaged: it has \d+ bytes instead of \d+"),
    ],
)
def test_a_file_of_another_length_is_refused(tmp_path: Path, size: int, words: str) -> None:
    file = CommitFile(str(tmp_path))
    file.write(found(7))
    os.truncate(tmp_path / "commit", size)
    refused(file, words)


@pytest.mark.parametrize(
    ("begin", "words"),
    [(b"horocmf1", "is a file of commits of another version of horo"), (b"PK\3\4", "is no file of commits")],
)
def test_a_file_of_another_version_or_program_is_refused(tmp_path: Path, begin: bytes, words: str) -> None:
    file = CommitFile(str(tmp_path))
    (tmp_path / "commit").write_bytes(begin + bytes(DATA_AT))
    (tmp_path / "commit").chmod(0o600)
    refused(file, words)


@settings(max_examples=60)
@given(place=st.integers(0, DATA_AT + DATA_BYTES + len(b"objects 7") - 1), value=st.integers(1, 255))
@example(place=0, value=1)
@example(place=DATA_AT, value=128)
@example(place=DATA_AT + DATA_BYTES + len(b"objects 7") - 1, value=1)
def test_a_changed_byte_anywhere_is_found(place: int, value: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = CommitFile(folder)
        file.write(found(7))
        flip(Path(folder, "commit"), place, value)
        refused(file, "is .*")


def test_the_commit_before_a_damaged_one_is_read_and_later_ones_are_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = CommitFile(str(tmp_path))
    file.write(found(7))
    file.write(found(10))
    flip(tmp_path / "commit", DATA_AT)
    assert number_of(file.read()) == 7
    (line,) = caplog.messages
    assert line.startswith(f"{file} is damaged: its data do not fit their checksum; commit 7 in commit.before is read")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["commit.before", "commit.damaged", "lock"]
    assert number_of(file.read()) == 7  # another rank, or a job that has ended before its first commit
    assert file.write(found(8))
    assert number_of(file.read()) == 8
    os.truncate(tmp_path / "commit", 100)
    assert number_of(file.read()) == 7


def test_two_damaged_files_are_refused_and_stay(tmp_path: Path) -> None:
    file = CommitFile(str(tmp_path))
    file.write(found(7))
    file.write(found(8))
    flip(tmp_path / "commit", DATA_AT)
    flip(tmp_path / "commit.before", DATA_AT)
    refused(file, "is damaged: its data do not fit their checksum")
    (tmp_path / "commit").unlink()
    with pytest.raises(UsageError, match=r"commit\.before is damaged"):
        file.read()


def test_a_damaged_file_is_not_kept_as_the_commit_before(tmp_path: Path) -> None:
    file = CommitFile(str(tmp_path))
    file.write(found(7))
    file.write(found(8))
    flip(tmp_path / "commit", 20)
    file.write(found(9))
    flip(tmp_path / "commit", DATA_AT)
    assert number_of(file.read()) == 7


@pytest.mark.parametrize("renames", [0, 1])
def test_a_kill_between_two_renames_leaves_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    file, replace, done = CommitFile(str(tmp_path)), Path.replace, []
    file.write(found(7))

    def killed(path: Path, target: Path) -> None:
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(replace(path, target))

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "replace", killed)
        file.write(found(8))
    assert number_of(file.read()) == 7
    assert not file.write(found(7))
    assert file.write(found(8))
    assert number_of(file.read()) == 8


def test_a_file_that_cannot_be_written_is_an_error_in_words(tmp_path: Path) -> None:
    file = CommitFile(str(tmp_path))
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").symlink_to(tmp_path / "other")
    with pytest.raises(ResourceError, match=r"cannot be written: .*it is a symbolic link"):
        file.write(found(7))
    (tmp_path / "plain").write_text("")
    with pytest.raises(ResourceError, match="cannot be used"):
        CommitFile(str(tmp_path / "plain"))


def test_a_full_disk_leaves_the_commit_before_and_no_draft(tmp_path: Path) -> None:
    file = CommitFile(str(tmp_path))
    file.write(found(7))
    later = found(8)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (DATA_BYTES, limits[1]))
    try:
        with pytest.raises(ResourceError, match=r"cannot be written: .*File too large"):
            file.write(later)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert number_of(file.read()) == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["commit", "lock"]


def test_a_folder_in_which_nothing_can_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(ResourceError, match=r"\(--elastic-dir\) cannot be used: "):
        CommitFile(str(tmp_path))


def test_processes_without_locks_write_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(OSError("no locks here")))
    file, drafts = CommitFile(str(tmp_path)), []
    fsync = os.fsync

    def while_it_is_written(fd: int) -> None:
        drafts.extend(path.name for path in tmp_path.glob("commit.new*"))
        fsync(fd)

    monkeypatch.setattr("os.fsync", while_it_is_written)
    file.write(found(7))
    assert len(drafts) == 1 and str(os.getpid()) in drafts[0]


def test_a_state_goes_on_from_the_file_and_refuses_that_of_another_model(tmp_path: Path) -> None:
    hvd.init()
    model = torch.nn.Linear(2, 3)
    state = hvd.elastic.TorchState(model, epoch=4)
    before = model.weight.clone()
    Keeping(state, str(tmp_path)).keep()
    with torch.no_grad():
        model.weight.zero_()
    later = hvd.elastic.TorchState(model, epoch=0)
    assert Keeping(later, str(tmp_path)).resume()
    assert later.epoch == 4
    assert torch.equal(model.weight, before)
    with torch.no_grad():
        model.weight.zero_()
    later.restore()
    assert torch.equal(model.weight, before)
    with pytest.raises(UsageError, match="does not fit this state; remove it, or name another --elastic-dir"):
        Keeping(hvd.elastic.TorchState(torch.nn.Linear(3, 3)), str(tmp_path)).resume()
    hvd.shutdown()


def alone(folder: str, ends: str) -> None:
    """A process without a launcher that ends before its training."""
    os.environ["HORO_ELASTIC_DIR"] = folder
    hvd.init()
    sync = os.fsync

    @hvd.elastic.run
    def train(state: Any) -> None:
        if state.epoch == 3:
            sys.exit(33 if resets else 1)  # it has gone on
        for state.epoch in range(1, 5):
            if state.epoch == 4:
                if "while it is written" in ends:
                    os.fsync = lambda fd: (os.kill(os.getpid(), signal.SIGTERM), sync(fd))[1]
                if ends.startswith("signal"):
                    os.kill(os.getpid(), signal.SIGTERM)
                raise hvd.PeerLostError("rank 1 was lost")
            state.commit()

    resets: list[int] = []
    state = hvd.elastic.TorchState(epoch=0)
    state.register_reset_callbacks([lambda: resets.append(1)])
    train(state)


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ("signal", -signal.SIGTERM),
        ("signal, and one while it is written", -signal.SIGTERM),
        ("loss", 1),
        ("loss, and a signal while it is written", -signal.SIGTERM),
    ],
)
def test_under_any_launcher_the_last_commit_is_kept_when_the_job_ends(tmp_path: Path, ends: str, code: int) -> None:
    for expected in (code, 33):
        process = multiprocessing.get_context("forkserver").Process(target=alone, args=(str(tmp_path), ends))
        process.start()
        process.join()
        assert process.exitcode == expected


def test_ranks_that_are_to_leave_end_at_their_next_commit_and_a_later_job_goes_on(tmp_path: Path) -> None:
    kept = {"HORO_ELASTIC_DIR": str(tmp_path / "kept")}
    with Seats(train, str(tmp_path), Plan(), replace=False, environment=kept) as seats:
        seats.leaves = True
        assert seats.run(2) == {0: 0, 1: 0}, seats.logs()
    assert not list(tmp_path.glob("result.*"))
    with Seats(train, str(tmp_path), Plan(), replace=False, environment=kept) as seats:
        assert seats.run(3) == {0: 0, 1: 0, 2: 0}, seats.logs()
    results = [json.loads((tmp_path / f"result.{worker}").read_text()) for worker in range(3)]
    assert len({result["digest"] for result in results}) == 1
    for result in results:
        assert result["sizes"] == [3] and result["resets"] == 1
        assert result["commit"][1] < EPOCHS * SAMPLES / 2
        assert sorted(map(tuple, result["seen"])) == [(e, sample) for e in range(EPOCHS) for sample in range(SAMPLES)]
