"""Forks of forks: who is neither a rank nor its child still owns its files."""

from __future__ import annotations

import os

from rank_pool import RankPool

import horo.torch as hvd


def test_a_grandchild_keeps_its_own_files(ranks2: RankPool) -> None:
    """The child's copies of the rank's descriptors are closed, so its own files get their numbers."""

    def check() -> None:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            files = [os.open("/dev/null", os.O_RDONLY) for _ in range(40)]
            grandchild = os.fork()
            if grandchild == 0:
                lost = []
                for file in files:
                    try:
                        os.fstat(file)
                    except OSError:
                        lost.append(file)
                os.write(writer, repr(lost).encode())
                os._exit(0)
            os.waitpid(grandchild, 0)
            os._exit(0)
        os.close(writer)
        assert os.waitpid(child, 0) == (child, 0)
        with os.fdopen(reader) as stream:
            assert stream.read() == "[]"
        hvd.barrier()

    ranks2.run(check)
