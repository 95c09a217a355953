"""Jobs that cannot start as real processes: every rank gets a sentence that names the value at fault."""

from __future__ import annotations

import sys
from pathlib import Path

from jobs import Hororun
from plain_ranks import PlainRanks

LEAVES_EARLY = """
import os
from horo.bootstrap import job
if os.environ["HOROVOD_RANK"] == "0":
    job.start()
"""


def test_ranks_of_different_versions_are_told_both(tmp_path: Path) -> None:
    with PlainRanks(tmp_path, "ab") as ranks:
        ranks.tell(0, "start", "1.0+abi1")
        ranks.tell(1, "start", "2.0+abi2")
        for rank in (0, 1):
            answer = ranks.answer(rank)
            assert answer.get("error") == "MismatchError", answer
            assert "core 1.0+abi1" in answer["text"]
            assert "core 2.0+abi2" in answer["text"]
            assert "install the same version on all hosts" in answer["text"]
        assert ranks.finish() == [0, 0]


def test_a_script_that_ends_before_init_on_one_rank_is_named_by_the_others() -> None:
    hororun = Hororun()
    try:
        words = [sys.executable, "-c", LEAVES_EARLY]
        done = hororun.run("-np", "2", *words, environment={"HORO_START_TIMEOUT": "1000"})
    finally:
        hororun.clean_up()
    assert done.returncode == 1
    assert "rank 1 (localhost) exited with code 0 before it called init()" in done.stderr
    assert "hororun: rank 0 on localhost ended with PeerLostError: init() was given up" in done.stderr
