"""What the cache of requests does while other threads use it."""

from __future__ import annotations

import threading
from typing import Any

from horo.torch.engine.operation import Operation
from horo.torch.engine.request_cache import RequestCache


class Owner:
    """Stands for an optimizer."""


def test_another_thread_may_make_room_while_the_rooms_are_added_up() -> None:
    cache = RequestCache(lambda kind, name, _: f"{kind}.{name}")
    owners = [Owner() for _ in range(3)]

    class Gradients(int):
        """A number of gradients; while it is added to others, an optimizer of another thread comes."""

        def __rmul__(self, other: int) -> Gradients:
            return self

        __mul__ = __rmul__

        def __radd__(self, other: int) -> int:
            thread = threading.Thread(target=cache.make_room, args=(owners[2], 1))
            thread.start()
            thread.join(timeout=30)
            return other

    gradients: Any = Gradients(1)
    cache.make_room(owners[0], gradients)
    cache.make_room(owners[1], 1)
    cache.take_or_create("key", Operation("allreduce", "a"), sync=True, tensor_count=1).idle.append(None)
    assert cache.take("key") is not None
