"""The time for which data moved while a thread waited."""

from types import ModuleType

import pytest


@pytest.mark.parametrize(
    ("begin", "end", "moved"),
    [
        (50, 120, 20),
        (110, 150, 40),
        (110, 0, 90),
        (205, 0, 0),  # it began after the waiting thread had read the clock
    ],
)
def test_data_moves_for_the_part_of_a_batch_that_lies_in_a_wait(
    native: ModuleType, begin: int, end: int, moved: int
) -> None:
    assert native.lib.shim_meter(begin, end) == moved
