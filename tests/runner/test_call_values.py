"""Objects of ``horo.run`` pass through the store in pieces: whole, once, and without copies of their size."""

from __future__ import annotations

import pickle
import threading
from types import CodeType
from typing import Any, cast

import cloudpickle  # type: ignore[import-untyped]
import pytest

from horo.bootstrap.store.client import StoreClient
from horo.bootstrap.store.protocol import StoreTimeoutError
from horo.runner.call.pickling import Pickler, dumps
from horo.runner.call.values import get, put

PIECE = 4 << 20


class Store:
    """A store in this process that notes what it is asked."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.order: list[str] = []

    def set(self, key: str, value: bytes) -> None:
        assert 0 < len(value) <= PIECE
        self.values[key] = value
        self.order.append(key)

    def get(self, key: str, timeout_s: float) -> bytes:
        if key not in self.values:
            raise StoreTimeoutError([key])
        return self.values[key]

    def delete(self, keys: list[str]) -> None:
        for key in keys:
            self.values.pop(key, None)


def client(store: object) -> StoreClient:
    return cast(StoreClient, store)


@pytest.mark.parametrize("size", [0, 1, 5000, PIECE - 20, PIECE, 3 * PIECE + 7])
def test_an_object_of_any_size_comes_back(size: int) -> None:
    store = Store()
    value = {"data": bytes(range(256)) * (size // 256) + b"x" * (size % 256), "more": [1, "two", None]}
    put(client(store), "key", value)
    assert store.order[-1] == "key"  # a reader sees all or nothing
    assert get(client(store), "key", 0.0) == value == get(client(store), "key", 0.0, once=True)
    assert list(store.values) == ["key"]


def test_an_object_that_cannot_be_pickled_leaves_nothing() -> None:
    store = Store()
    with pytest.raises(TypeError, match="lock"):
        put(client(store), "key", [bytes(2 * PIECE), threading.Lock()], Pickler)
    assert store.order != []
    assert store.values == {}


@pytest.mark.parametrize("without_name", [False, True], ids=["this cloudpickle", "3.1.3"])
def test_code_keeps_the_name_of_its_file(monkeypatch: pytest.MonkeyPatch, without_name: bool) -> None:
    table = cloudpickle.Pickler.dispatch_table.maps[0]
    reduce_code = table[CodeType]

    def reduce_without_name(code: CodeType) -> Any:
        make, values = reduce_code(code)
        return make, tuple("<dynamic-code>" if value == code.co_filename else value for value in values)

    if without_name:
        monkeypatch.setitem(table, CodeType, reduce_without_name)
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def train():\n    return lambda: 0\n", "/k/train.py", "exec"), space)
    train = pickle.loads(dumps(space["train"]))
    assert train is not space["train"]
    assert train.__code__.co_filename == train().__code__.co_filename == "/k/train.py"
