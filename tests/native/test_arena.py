"""The table in which a rank shows the others of its host what it has submitted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def arena(native: ModuleType) -> Iterator[Any]:
    one = native.lib.shim_arena_create()
    yield one
    native.lib.shim_arena_destroy(one)


def test_a_pending_name_is_told_from_one_that_is_not(native: ModuleType, arena: Any) -> None:
    lib = native.lib
    names = [b"layers.%d.weight" % i for i in range(1000)]
    places = [lib.shim_arena_pending_add(arena, name) for name in names]
    assert len(set(places)) == len(names)
    assert all(lib.shim_arena_pending_has(arena, name) == 1 for name in names)
    assert lib.shim_arena_pending_has(arena, b"late") == 0


def test_more_names_than_places_are_never_denied_and_leave_no_trace(native: ModuleType, arena: Any) -> None:
    lib = native.lib
    names = [b"n%d" % i for i in range(3 * lib.shim_arena_places())]
    places = {name: lib.shim_arena_pending_add(arena, name) for name in names}
    hidden = {name for name, place in places.items() if place == lib.shim_arena_places()}
    assert len(names) - len(hidden) == lib.shim_arena_places()
    random.Random(1).shuffle(names)
    while names:
        assert all(lib.shim_arena_pending_has(arena, name) == (-1 if name in hidden else 1) for name in names[-3:])
        assert lib.shim_arena_pending_has(arena, b"late") == (-1 if hidden else 0)
        gone = names.pop()
        hidden.discard(gone)
        lib.shim_arena_pending_remove(arena, places[gone])
    assert lib.shim_arena_pending_has(arena, gone) == 0
