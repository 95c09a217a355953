"""Random schedules over the whole core, checked by arithmetic: fixed seeds; `make stress` has fresh ones.

All collectives, dtypes, reductions, forms, factors, and what they travel as, come in them; so do process sets, joins,
and ranks that disagree, leave or die. And a run under a sanitizer proves that it would see a fault.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sanitize
from fabric import Relay
from native_build import FLAVOUR
from ranks import over_every_layout
from stress import Schedule, play

OPERATIONS = {"": 400, "address": 120, "thread": 80}[FLAVOUR]
SCHEDULES = 1 if FLAVOUR else 2
DEADLINE_S = 150 if FLAVOUR else 100
"""Of a schedule, which takes a second or two; where other programs have the cores, each wait takes their turns, too."""


@pytest.mark.parametrize("seed", [*range(0, 8 * SCHEDULES, SCHEDULES)])
def test_ranks_get_what_arithmetic_says_whatever_happens(seed: int) -> None:
    for each in range(seed, seed + SCHEDULES):
        play(Schedule(each, OPERATIONS), DEADLINE_S)


@pytest.mark.parametrize("seed", [1000, 2000])
def test_one_host_gets_what_arithmetic_says(seed: int) -> None:
    for each in range(seed, seed + SCHEDULES):
        play(Schedule(each, OPERATIONS, hosts=1, together=True), DEADLINE_S)


WAYS: dict[str, dict[str, Any]] = {
    "by slots": {"direct_bytes": 0},
    "direct": {"direct_bytes": 1},
    "one by one": {"fusion_bytes": 0, "cache_capacity": 0},
    "TCP": {"tcp": True},
    "three sockets": {"sockets_per_peer": 3, "tcp": True, "spin_us": 0},
    "late control": {"relay": Relay(control_delay_s=0.004)},
    "late data": {"relay": Relay(data_delay_s=0.004)},
    "control in pieces": {"relay": Relay(control_chunk_bytes=7)},
    "data in pieces": {"relay": Relay(data_chunk_bytes=1009)},
    "late and in pieces": {
        "relay": Relay(control_delay_s=0.002, data_delay_s=0.003, control_chunk_bytes=61, data_chunk_bytes=5003)
    },
}
"""What ranks compute does not depend on them."""


@over_every_layout
@pytest.mark.parametrize("way", WAYS)
def test_every_layout_and_way_gives_what_arithmetic_says(host_of_rank: list[int], way: str) -> None:
    schedule = Schedule(len(host_of_rank), OPERATIONS // 4, host_of_rank=host_of_rank, together=True, **WAYS[way])
    play(schedule, DEADLINE_S)


FOLDER = Path(__file__).resolve().parent
FAULTS = {
    "shim_fault_overflow": ("address", "AddressSanitizer: heap-buffer-overflow"),
    "shim_fault_integer": ("address", "runtime error: signed integer overflow"),
    "shim_fault_race": ("thread", "ThreadSanitizer: data race"),
}


@pytest.mark.skipif(FLAVOUR == "", reason="no sanitizer in this run (tests/native/sanitize.py starts one)")
@pytest.mark.usefixtures("native")  # built, so that the time limit is for running only
@pytest.mark.parametrize("fault", [fault for fault, (flavour, _) in FAULTS.items() if flavour == FLAVOUR])
def test_the_sanitizer_of_this_run_reports_a_deliberate_fault_and_ends_the_process(fault: str) -> None:
    report = FAULTS[fault][1]
    code = f"import native_build; print(native_build.load().lib.{fault}(), 'survived')"
    # Without the names of functions, for which the sanitizer would read all that the compiler tells of the core.
    options = {name: f"{value}:symbolize=0" for name, value in os.environ.items() if name.endswith("SAN_OPTIONS")}
    environment = {**os.environ, **options}
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=FOLDER,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode != 0
    assert report in result.stderr
    assert "survived" not in result.stdout


@pytest.mark.parametrize("sanitizer", sanitize.SANITIZERS)
def test_a_part_of_the_tests_can_be_chosen(sanitizer: str) -> None:
    everything = sanitize.selection(sanitizer, [])
    files = [str(FOLDER / f"test_{name}.py") for name in sanitize.FILES[sanitizer]]
    assert everything[: len(files)] == files
    assert [file for file in files if not Path(file).is_file()] == [], "name the file that has its tests now"
    for word in everything[len(files) :]:
        file, _, test = word.removeprefix("--deselect=").partition("::")
        assert f"\ndef {test}" in (FOLDER.parent.parent / file).read_text(), "name the test as it is called now"
    assert sanitize.selection(sanitizer, ["-k", "ring", "-x"]) == [*everything, "-k", "ring", "-x"]
    for path in (__file__, f"{__file__}::test_some[1::2]"):
        assert sanitize.selection(sanitizer, ["-x", path]) == ["-x", path]
