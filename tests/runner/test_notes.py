"""What ranks say of their end."""

from __future__ import annotations

import os

import pytest

from horo.bootstrap.ending import EndReporter
from horo.runner.agent.rank_reports import Note, NoteReader, open_pipe


def read(reader: NoteReader, fd: int) -> Note:
    reader.feed(os.read(fd, 1 << 16))
    return reader.note


def test_a_note_arrives_as_it_was_written() -> None:
    read_fd, write_fd, name = open_pipe()
    reader, notes = NoteReader(), EndReporter(name, ranks=(4, 6))
    notes.joined()
    assert read(reader, read_fd) == Note(joined=True)
    notes.lost(1)
    assert read(reader, read_fd) == Note(joined=True, points_at=6)
    notes.ended("SystemExit: \u00e4", "train.py, line 7", None, 75)
    assert read(reader, read_fd) == Note(True, False, "SystemExit: \u00e4", "train.py, line 7", 6, 75)
    notes.lost(None)
    with pytest.raises(BlockingIOError):
        os.read(read_fd, 1)
    os.close(read_fd)
    notes.joined()  # nobody reads any more: not this rank's business
    os.close(write_fd)


def test_a_number_that_is_another_file_by_now_is_not_written_to() -> None:
    read_fd, write_fd, name = open_pipe()
    inode = name.partition(":")[2]
    other_read, other_write = os.pipe()
    for wrong in (None, "", "x", name.partition(":")[0], f"{other_write}:{inode}", f"0:{inode}", f"99999:{inode}"):
        EndReporter(wrong).joined()
    for fd in (read_fd, other_read):
        os.set_blocking(fd, False)
        with pytest.raises(BlockingIOError):
            os.read(fd, 1)
    for fd in (read_fd, write_fd, other_read, other_write):
        os.close(fd)
