"""Ranks ask rank 0 for the name of their round of a torchrun job."""

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as torch_distributed

from horo.bootstrap import torch_rounds
from horo.bootstrap.launchers.torch_store import TorchStore
from horo.bootstrap.launchers.variables import Launch
from horo.bootstrap.torch_rounds import in_round
from horo.errors import TimeoutError

DEADLINE_S = 20.0
SIZE = 4


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch_rounds, "_rounds", {})
    return torch_distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Interrupted:
    """Another client deletes the keys that say who asks, right before one call of this one."""

    def __init__(self, store: Any, other: Any, call: int) -> None:
        self._store, self._other, self._left = store, other, call

    def __getattr__(self, name: str) -> Any:
        self._left -= 1
        if self._left == 0:
            for rank in range(1, SIZE):
                self._other.delete_key(f"horo/job/rounds/round/{rank}")
        return getattr(self._store, name)


def client(server: Any, timeout_s: float = DEADLINE_S) -> Any:
    timeout = timedelta(seconds=timeout_s)
    return torch_distributed.TCPStore(
        "127.0.0.1", server.port, is_master=False, timeout=timeout, wait_for_workers=False
    )


def launch(rank: int) -> Launch:
    return Launch("torchrun", rank, SIZE, "h", job_id="job")


@pytest.mark.parametrize("call", range(1, 9))
def test_rank_0_waits_for_no_key_of_a_rank_that_may_have_its_answer(server: Any, call: int) -> None:
    asking = client(server)
    for rank in range(1, SIZE):
        asking.set(f"horo/job/rounds/round/{rank}", str(100 + rank))
        asking.add("horo/job/rounds/progress count", 1)
    store = TorchStore(Interrupted(client(server, 0.2), asking, call), "127.0.0.1")
    in_round(launch(0), store, DEADLINE_S)
    store.set("here", b"")
    for look in store.meanwhile:
        look()
    assert store.get("here", DEADLINE_S) == b""


def test_each_round_has_a_name_that_all_its_ranks_get_and_leaves_no_more_keys(server: Any) -> None:
    names: list[dict[int, str]] = []
    for _ in range(3):
        torch_rounds._rounds.clear()
        found: dict[int, str] = {}
        stores = [TorchStore(client(server), "127.0.0.1") for _ in range(SIZE)]

        def ask(rank: int, found: dict[int, str] = found, stores: list[TorchStore] = stores) -> None:
            found[rank] = in_round(launch(rank), stores[rank], DEADLINE_S).job_id

        threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(1, SIZE)]
        ask(0)
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            stores[0].meanwhile[0]()
            threads[0].join(0.001)
        names.append(found)
        assert len(found) == SIZE
        assert len(set(found.values())) == 1
        keys = {f"horo/job/rounds/{key}" for key in ("progress count", *(f"round/{rank}" for rank in range(1, SIZE)))}
        assert server.num_keys() - len(keys) <= 1  # torch's own
        assert server.check(sorted(keys))
    assert len({found[0] for found in names}) == 3


def test_where_rank_0_does_not_come_the_error_names_it_and_no_rank_that_asks(server: Any) -> None:
    stores = [TorchStore(client(server), "127.0.0.1") for _ in range(SIZE)]
    errors: list[str] = []

    def ask(rank: int) -> None:
        with pytest.raises(TimeoutError) as caught:
            in_round(launch(rank), stores[rank], 0.5)
        errors.append(str(caught.value))

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(errors) == 3
    assert all(error.startswith("rank 0 has not called horo.torch.init()") for error in errors), errors
