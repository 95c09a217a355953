"""A commit is there whole or not at all, wherever the worker that writes it is killed."""

from __future__ import annotations

import mmap
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import wait_until

from horo.elastic import commits
from horo.elastic.commits import Commit, CommitMemory, CommitShare, CommonMemory, Found
from horo.errors import ResourceError

SECRET = b"s" * 16
LAYOUT = b"l" * commits.LAYOUT_BYTES
DATA_BYTES = 3 * mmap.PAGESIZE + 5


@pytest.fixture
def memory() -> Iterator[CommitMemory]:
    made = CommitMemory(commits.create(), SECRET)
    yield made
    made.close()


def write(memory: CommitMemory, commit: Commit, size: int = DATA_BYTES, *, cut: int | None = None) -> None:
    """A commit whose every byte is its number; with ``cut``, an exception after so many bytes of its data."""

    def fill(data: mmap.mmap) -> None:
        end = size if cut is None else cut
        data[:end] = bytes([commit.number % 256]) * end
        if cut is not None:
            raise KeyboardInterrupt

    memory.write(commit, LAYOUT, size, f"objects {commit.number}".encode(), fill)


def number_of(found: Found | None, size: int = DATA_BYTES) -> int:
    """The number of a commit, all of whose bytes are its own; 0: there is none."""
    if found is None:
        return 0
    number = found.commit.number
    assert found.data[:size] == bytes([number % 256]) * size
    assert (found.objects, found.layout) == (f"objects {number}".encode(), LAYOUT)
    return number


def test_the_latest_of_two_slots_is_found(memory: CommitMemory) -> None:
    assert memory.latest() is None
    for number in range(1, 6):
        write(memory, Commit(1, number))
        assert number_of(memory.latest()) == number


def test_the_one_that_was_written_last_is_found_whatever_its_number(memory: CommitMemory) -> None:
    for commit in (Commit(1, 9), Commit(2, 8), Commit(2, 8), Commit(0, 1)):
        write(memory, commit)
        found = memory.latest()
        assert found is not None
        assert found.commit == commit
    assert max(Commit(1, 9), Commit(2, 8)) == (2, 8)


def test_commits_grow_and_shrink(memory: CommitMemory) -> None:
    for number, size in enumerate([0, 10, 5 << 20, 100, 6 << 20, 7 << 20], 1):
        write(memory, Commit(1, number), size)
        assert number_of(memory.latest(), size) == number


def test_the_memory_of_a_slot_stays_the_same_object(memory: CommitMemory) -> None:
    seen: list[mmap.mmap] = []
    for number in range(1, 9):
        memory.write(Commit(1, number), LAYOUT, DATA_BYTES, b"", seen.append)
    assert len(set(map(id, seen))) == 2


@given(cut=st.integers(0, DATA_BYTES))
def test_a_write_that_is_cut_short_leaves_the_commit_before(cut: int) -> None:
    memory = CommitMemory(commits.create(), SECRET)
    write(memory, Commit(1, 1))
    write(memory, Commit(1, 2))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            write(memory, Commit(1, 3), cut=cut)
        assert number_of(memory.latest()) == 2
    write(memory, Commit(1, 3))
    assert number_of(memory.latest()) == 3
    memory.close()


def test_a_memory_of_one_slot_has_none_then() -> None:
    memory = CommitMemory(commits.create(), SECRET, keeps_last=False)
    write(memory, Commit(1, 1))
    write(memory, Commit(1, 2))
    assert number_of(memory.latest()) == 2
    with pytest.raises(KeyboardInterrupt):
        write(memory, Commit(1, 3), cut=7)
    assert memory.latest() is None
    memory.close()


def test_memory_of_larger_commits_is_given_back() -> None:
    fd = commits.create()
    first, later = (CommitMemory(os.dup(fd), SECRET) for _ in range(2))
    for number in (1, 2):
        write(first, Commit(1, number), 5 << 20)
    assert os.fstat(fd).st_blocks * 512 > 10 << 20
    for number in (3, 4):
        write(later, Commit(1, number))
    assert os.fstat(fd).st_blocks * 512 < 3 << 20
    assert number_of(later.latest()) == 4
    first.close()
    later.close()
    os.close(fd)


# ---- What the ranks of a host write together ----

SIZE = 2 * mmap.PAGESIZE + 3


def share(
    memory: CommonMemory, number: int, index: int, count: int, generation: int = 1, *, is_cut: bool = False
) -> None:
    """A share of a commit whose every byte is its number."""

    def fill(data: mmap.mmap) -> None:
        begin, end = (SIZE * edge // count for edge in (index, index + 1))
        data[begin : begin + 1 if is_cut else end] = bytes([number]) * (1 if is_cut else end - begin)
        if is_cut:
            raise KeyboardInterrupt

    memory.write(key_of(number, generation), CommitShare(index, count, generation), SIZE, fill)


def key_of(number: int, generation: int = 1) -> bytes:
    return b"%32d" % (100 * generation + number)


def is_there(memory: CommonMemory, number: int, generation: int = 1) -> bool:
    data = memory.find(key_of(number, generation), SIZE)
    assert data is None or data[:SIZE] == bytes([number]) * SIZE
    return data is not None


@given(st.lists(st.sampled_from(["whole", "cut", "missing"]), min_size=1, max_size=4), st.integers(1, 4), st.data())
def test_a_commit_of_which_a_share_is_missing_leaves_the_one_before(ends: list[str], later: int, data: Any) -> None:
    fd, count = commits.create(), len(ends)
    ranks = [CommonMemory(os.dup(fd)) for _ in range(max(later, count))]
    reader = CommonMemory(fd)
    for number in (1, 2):
        for index in data.draw(st.permutations(range(count))):
            share(ranks[index], number, index, count)
    for index in data.draw(st.permutations(range(count))):
        if ends[index] == "cut":
            with pytest.raises(KeyboardInterrupt):
                share(ranks[index], 3, index, count, is_cut=True)
        elif ends[index] == "whole":
            share(ranks[index], 3, index, count)
        assert is_there(reader, 2)
    is_whole = set(ends) == {"whole"}
    assert is_there(reader, 3) == is_whole
    for index in data.draw(st.permutations(range(later))):  # the next generation
        assert is_there(reader, 3 if is_whole else 2)
        share(ranks[index], 3, index, later, 2)
    assert is_there(reader, 3, 2)
    assert is_there(reader, 3 if is_whole else 2)
    for memory in (*ranks, reader):
        memory.close()


def test_a_commit_that_is_tried_again_leaves_the_one_before() -> None:
    memory = CommonMemory(commits.create())
    for number in (1, 2, 3, 3, 3):
        share(memory, number, 0, 1)
        assert number == 1 or is_there(memory, number - 1)
    with pytest.raises(KeyboardInterrupt):
        share(memory, 3, 0, 1, is_cut=True)
    assert is_there(memory, 2)
    memory.close()


def test_a_host_has_a_greatest_number_of_shares() -> None:
    memory = CommonMemory(commits.create())
    with pytest.raises(ResourceError, match="a host has 5000 ranks"):
        share(memory, 1, 0, 5000)
    memory.close()


def records_of(fd: int) -> bytes:
    return os.pread(fd, mmap.PAGESIZE, 0)


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32))
def test_a_record_torn_at_any_byte_is_none(seed: int) -> None:
    """Of a record that is being cleared or written, any bytes may be there: a copy has no order."""
    fd = commits.create()
    memory = CommitMemory(fd, SECRET)
    choose = random.Random(seed)
    write(memory, Commit(1, 1))
    write(memory, Commit(1, 2))
    before = records_of(fd)
    with pytest.raises(KeyboardInterrupt):
        write(memory, Commit(1, 3), cut=0)
    cleared = records_of(fd)
    write(memory, Commit(1, 3))
    after = records_of(fd)
    # While the record is cleared, the slot has its old data: either commit may be found, whole.
    for old, new in ((before, cleared), (cleared, after)):
        changed = [place for place in range(mmap.PAGESIZE) if old[place] != new[place]]
        torn = bytearray(old)
        for place in choose.sample(changed, choose.randrange(len(changed))):
            torn[place] = new[place]
        os.pwrite(fd, torn, 0)
        found = memory.latest()
        assert found is not None
        assert found.commit in ((1, 2), (1, 3))
    memory.close()


@given(place=st.integers(0, 115), value=st.integers(1, 255))
def test_a_changed_record_is_none(place: int, value: int) -> None:
    fd = commits.create()
    memory = CommitMemory(fd, SECRET)
    write(memory, Commit(1, 1))
    os.pwrite(fd, bytes([records_of(fd)[place] ^ value]), place)
    assert memory.latest() is None
    memory.close()


def test_objects_of_somebody_without_the_secret_are_none() -> None:
    fd = commits.create()
    write(CommitMemory(os.dup(fd), b"t" * 16), Commit(5, 5))
    memory = CommitMemory(fd, SECRET)
    assert memory.latest() is None
    write(memory, Commit(1, 1))
    changed = memory.latest()
    assert changed is not None
    begin = changed.data.find(b"objects")
    changed.data[begin] ^= 1
    assert memory.latest() is None
    memory.close()


_WRITER = """
import sys
from horo.elastic.commits import Commit, CommitMemory, inherited
memory = CommitMemory(inherited(sys.argv[1]), b"s" * 16)
found = memory.latest()
size, number = int(sys.argv[2]), 0 if found is None else found.commit.number
print(number, flush=True)
while True:
    number += 1
    def fill(data):
        for begin in range(0, size, 4096):  # a copy takes a while, as that of a large model
            end = min(begin + 4096, size)
            data[begin:end] = bytes([number % 256]) * (end - begin)
    memory.write(Commit(1, number), b"l" * 32, size, f"objects {number}".encode(), fill)
"""


def test_what_a_killed_worker_has_committed_is_there_for_the_next_one() -> None:
    fd = commits.create()
    memory = CommitMemory(fd, SECRET)
    size, before = 1 << 18, 0
    for _ in range(5):
        worker = subprocess.Popen(
            [sys.executable, "-c", _WRITER, commits.words_of(fd), str(size)],
            stdout=subprocess.PIPE,
            pass_fds=[fd],
        )
        try:
            assert worker.stdout is not None
            assert int(worker.stdout.readline()) == before
            wait_until(partial(has_later, memory, before + 1), "commits of the worker")
        finally:
            worker.send_signal(signal.SIGKILL)
            worker.wait()
        assert worker.stdout is not None
        worker.stdout.close()
        before, last = number_of(memory.latest(), size), before
        assert before > last
    memory.close()


def has_later(memory: CommitMemory, number: int) -> bool:
    found = memory.latest()
    return found is not None and found.commit.number > number


def test_the_descriptor_goes_with_the_memory() -> None:
    fd = commits.create()
    memory = CommitMemory(fd, SECRET)
    write(memory, Commit(1, 1))
    del memory
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_descriptor_that_is_another_files_is_none(memory: CommitMemory) -> None:
    fd = commits.create()
    words = commits.words_of(fd)
    assert commits.inherited(words) == fd
    assert not os.get_inheritable(fd)
    os.close(fd)
    assert commits.inherited(words) is None
    other = os.memfd_create("other")
    assert commits.inherited(f"{other}:{words.partition(':')[2]}") is None
    os.close(other)
    for wrong in (None, "", "x", "7:", ":7", "-1:1"):
        assert commits.inherited(wrong) is None


def test_memory_that_cannot_be_had_is_an_error_in_words() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        with pytest.raises(
            ResourceError, match=r"no memory for commits \(memfd_create\): Too many open files; look at"
        ):
            commits.create()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
