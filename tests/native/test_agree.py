"""The agreement by itself: trees of nodes and ranks whose messages travel at random speeds, in one thread."""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import wire_oracle
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from wire_oracle import Request, Tensor

from horo.core import context

USAGE, MISMATCH = -1, -3
ADD_TEAM, INT32, FLOAT32 = 4, context.DTYPES["int32"], context.DTYPES["float32"]
# Shrinking a schedule takes minutes and helps little: the seed in the report replays it.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]


class Node:
    """A leader: local ranks and child hosts are its members."""

    def __init__(
        self,
        native: ModuleType,
        *,
        is_root: bool,
        local: int,
        ranks: list[int],
        size: int,
        capacity: int = 8,
        evict_after: int = 1,
        fusion_bytes: int = 1 << 20,
        speaks_for: list[int] | None = None,
    ) -> None:
        self.lib, self.ffi = native.lib, native.ffi
        self.handle = self.lib.shim_agree_create(
            is_root,
            len(ranks),
            local,
            ranks,
            speaks_for or [1] * len(ranks),
            size,
            capacity,
            evict_after,
            fusion_bytes,
        )

    def _out(self, function: Any) -> list[bytes]:
        data, size = self.ffi.new("void **"), self.ffi.new("size_t *")
        assert function(self.handle, data, size) == 0
        return list(frames(bytes(self.ffi.buffer(data[0], size[0])) if size[0] else b""))

    def collect(self) -> list[bytes]:
        return self._out(self.lib.shim_agree_collect)

    def form_batch(self) -> list[bytes]:
        return self._out(self.lib.shim_agree_form_batch)

    def receive(self, member: int, message: bytes) -> None:
        assert self.lib.shim_agree_receive(self.handle, member, message, len(message), 0) == 0

    def apply(self, record: bytes) -> None:
        assert self.lib.shim_agree_apply(self.handle, record, len(record)) == 0


def rows_of(rank: int, name: str, times: int) -> list[int]:
    """What a rank gives for the two tensors of an allgather: something else each time; none for another operation."""
    return [(rank * 50 + times * 40) % 300, (rank + times) % 2 << 40] if name.startswith("gather") else []


def gather_request(name: str, extent: int) -> Request:
    return Request(name, op=wire_oracle.ALLGATHER, tensors=(Tensor(FLOAT32, (0, extent)),) * 2)


def frames(data: bytes) -> Iterator[bytes]:
    while data:
        size = int.from_bytes(data[:4], "little")
        yield data[4 : 4 + size]
        data = data[4 + size :]


@dataclass
class Rank:
    """What announce.c does: by id if the tensor is known as it is, else in full; again in full after an eviction."""

    number: int
    member: int
    todo: list[tuple[str, int]]
    known: dict[str, tuple[int, int]] = field(default_factory=dict)  # name -> id, extent
    pending: dict[str, tuple[int, int]] = field(default_factory=dict)  # name -> extent, announced id
    to_leader: deque[tuple[Any, ...]] = field(default_factory=deque)
    log: list[bytes] = field(default_factory=list)
    done: list[tuple[str, str]] = field(default_factory=list)

    def times(self, name: str) -> int:
        """How often that is done."""
        return sum(done == name for done, _ in self.done)

    def submit(self, name: str, extent: int) -> None:
        number, known_extent = self.known.get(name, (0, -1))
        announced = number if known_extent == extent else 0
        self.pending[name] = (extent, announced)
        self.to_leader.append(("id", announced, name) if announced else ("full", name, extent))


class World:
    """A binomial tree of hosts, the log, and ranks; every queue moves when chance says so."""

    def __init__(self, native: ModuleType, hosts: list[int], capacity: int, seed: int, evict_after: int = 1) -> None:
        self.native, self.capacity, self.random = native, capacity, random.Random(seed)
        size = sum(hosts)
        first = [sum(hosts[:h]) for h in range(len(hosts))]
        self.children = {
            h: [h + (1 << b) for b in range(10) if h & ((1 << (b + 1)) - 1) == 0 and h + (1 << b) < len(hosts)]
            for h in range(len(hosts))
        }
        self.nodes = []
        self.ranks: list[Rank] = []
        self.host_of_rank: list[int] = []
        for h, count in enumerate(hosts):
            members = [first[h] + i for i in range(count)] + [first[c] for c in self.children[h]]
            options: dict[str, Any] = {"size": size, "capacity": capacity, "evict_after": evict_after}
            options["speaks_for"] = [1] * count + [sum(hosts[c : c + (c & -c)]) for c in self.children[h]]
            self.nodes.append(Node(native, is_root=h == 0, local=count, ranks=members, **options))
            self.ranks += [Rank(first[h] + i, i, []) for i in range(count)]
            self.host_of_rank += [h] * count
        self.hosts = hosts
        self.up: dict[int, deque[bytes]] = {h: deque() for h in range(len(hosts))}
        self.down: dict[int, deque[bytes]] = {h: deque() for h in range(len(hosts))}
        self.logs: list[list[bytes]] = [[] for _ in hosts]

    def close(self) -> None:
        for node in self.nodes:
            self.native.lib.shim_agree_destroy(node.handle)

    def _record(self, host: int, record: bytes) -> None:
        self.logs[host].append(record)
        for child in self.children[host]:
            self.down[child].append(record)

    def _collect(self, host: int) -> None:
        for message in self.nodes[host].collect():
            if host == 0:
                self._record(0, message)
            else:
                self.up[host].append(message)

    @staticmethod
    def _announce(node: Node, rank: Rank, kind: str, *rest: Any) -> None:
        name = rest[1] if kind == "id" else rest[0]
        rows = rows_of(rank.number, name, rank.times(name))
        if rows and kind == "id":
            node.receive(rank.member, wire_oracle.rows_message(rest[0], rows))
        elif rows:
            body = wire_oracle.request(gather_request(name, rest[1]))
            node.receive(rank.member, wire_oracle.request_message(rank.number, 0, b"", body, rows))
        elif kind == "id":
            assert node.lib.shim_agree_announce_id(node.handle, rank.member, rest[0], 0) == 0
        else:
            transient = name.startswith("once")
            assert (
                node.lib.shim_agree_announce(
                    node.handle, rank.member, rank.number, name.encode(), rest[1], transient, 0
                )
                == 0
            )

    def step_leader(self, host: int) -> None:
        node = self.nodes[host]
        for rank in (r for r in self.ranks if self.host_of_rank[r.number] == host):
            while rank.to_leader and self.random.random() < 0.7:
                self._announce(node, rank, *rank.to_leader.popleft())
        for index, child in enumerate(self.children[host]):
            while self.up[child] and self.random.random() < 0.7:
                node.receive(self.hosts[host] + index, self.up[child].popleft())
        self._collect(host)
        while self.down[host] and self.random.random() < 0.7:
            record = self.down[host].popleft()
            node.apply(record)
            self._record(host, record)
        if host == 0 and self.random.random() < 0.5:
            for record in node.form_batch():
                self._record(0, record)

    def step_rank(self, rank: Rank) -> None:
        log = self.logs[self.host_of_rank[rank.number]]
        if len(rank.log) < len(log) and self.random.random() < 0.7:
            record = log[len(rank.log)]
            rank.log.append(record)
            self._execute(rank, record)
        free = [i for i, (name, _) in enumerate(rank.todo) if name not in rank.pending]
        if free and self.random.random() < 0.7:
            rank.submit(*rank.todo.pop(free[0]))

    def _execute(self, rank: Rank, record: bytes) -> None:
        ffi, lib = self.native.ffi, self.native.lib
        ids, names, text = ffi.new("uint32_t[256]"), ffi.new("char[16384]"), ffi.new("char[512]")
        if lib.shim_agree_read_fail(record, len(record), names, text, 512) == MISMATCH:
            name = ffi.string(names).decode()
            del rank.pending[name]
            rank.done.append((name, ffi.string(text).decode()))
            return
        count = lib.shim_agree_read_batch(record, len(record), ids, names, 256)
        assert count > 0
        for i in range(count):
            name = ffi.string(names + 64 * i).decode()
            if not name:
                name = next(n for n, (number, _) in rank.known.items() if number == ids[i])
            elif ids[i]:
                self._learn(rank, name, ids[i])
            gathered = [row for r in self.ranks for row in rows_of(r.number, name, rank.times(name))]
            assert record.endswith(wire_oracle.rows(gathered))
            assert count == 1 or not gathered
            rank.done.append((name, ""))
            del rank.pending[name]

    def _learn(self, rank: Rank, name: str, number: int) -> None:
        rank.known.pop(name, None)
        for other, (other_id, _) in list(rank.known.items()):
            if other_id % self.capacity == number % self.capacity:
                del rank.known[other]
                extent, announced = rank.pending.get(other, (0, 0))
                if announced == other_id:
                    rank.pending[other] = (extent, 0)
                    rank.to_leader.append(("full", other, extent))
        rank.known[name] = (number, rank.pending[name][0])

    def run(self) -> None:
        for _ in range(100_000):
            if not any(rank.todo or rank.pending for rank in self.ranks):
                return
            if self.random.random() < 0.5:
                self.step_leader(self.random.randrange(len(self.hosts)))
            else:
                self.step_rank(self.random.choice(self.ranks))
        raise AssertionError(f"stuck: {[(rank.number, rank.pending, rank.todo) for rank in self.ranks]}")


programs = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", "gather d", "gather e", "once"]), st.integers(1, 3)), max_size=14
)


@given(
    hosts=st.lists(st.integers(1, 3), min_size=1, max_size=6),
    cache=st.tuples(st.sampled_from([0, 1, 2, 3, 64]), st.sampled_from([1, 3])),
    program=programs,
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=250, phases=PHASES)
def test_all_ranks_execute_one_log_and_every_request_ends_once(
    native: ModuleType, hosts: list[int], cache: tuple[int, int], program: list[tuple[str, int]], seed: int
) -> None:
    """Ranks run the same program, each in an order of its own that keeps the order per name."""
    capacity, evict_after = cache
    world = World(native, hosts, capacity, seed, evict_after)
    try:
        for rank in world.ranks:
            order = list(range(len(program)))
            world.random.shuffle(order)
            by_name = {n: iter([p for p in program if p[0] == n]) for n, _ in program}
            rank.todo = [next(by_name[program[i][0]]) for i in order]
        world.run()
        for rank in world.ranks:
            assert sorted(name for name, _ in rank.done) == sorted(name for name, _ in program)
            assert not any(text for _, text in rank.done)
            assert rank.log == world.logs[0]
        assert all(native.lib.shim_agree_active(node.handle) == 0 for node in world.nodes)
    finally:
        world.close()


@given(
    hosts=st.lists(st.integers(1, 3), min_size=1, max_size=4).filter(lambda hosts: sum(hosts) > 1),
    capacity=st.sampled_from([0, 2, 64]),
    rounds=st.tuples(st.sampled_from(["x", "gather x"]), st.lists(st.booleans(), min_size=1, max_size=6)),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=150, phases=PHASES)
def test_a_rank_that_means_something_else_fails_everybody_in_that_round_only(
    native: ModuleType, hosts: list[int], capacity: int, rounds: tuple[str, list[bool]], seed: int
) -> None:
    name, extents = rounds
    world = World(native, hosts, capacity, seed)
    try:
        odd = world.random.randrange(len(world.ranks))
        for rank in world.ranks:
            rank.todo = [(name, 9 if bad and rank.number == odd else 5) for bad in extents]
        world.run()
        for rank in world.ranks:
            assert [bool(text) for _, text in rank.done] == extents
            for _, text in rank.done:
                if text:
                    shape = "float32 [*, {}]" if name != "x" else "float32 [{}]"
                    assert f"rank {odd} (h) sent {shape.format(9)}" in text
                    assert f"sent {shape.format(5)}" in text
    finally:
        world.close()


def test_rows_that_no_message_can_hold_fail_for_all_ranks(native: ModuleType) -> None:
    """A leader that cannot pass them on says so instead; another one of the tree could have."""
    tensors, ranks = 30_000, 150
    options: dict[str, Any] = {"local": 1, "size": 3 * ranks}
    leaf = Node(native, is_root=False, ranks=[ranks, ranks + 1, 2 * ranks], speaks_for=[1, ranks, ranks], **options)
    root = Node(native, is_root=True, ranks=[0, ranks], speaks_for=[1, 2 * ranks + 1], **options)
    request = Request("g", op=wire_oracle.ALLGATHER, tensors=(Tensor(FLOAT32, (0,)),) * tensors)
    body, name, text = wire_oracle.request(request), native.ffi.new("char[64]"), native.ffi.new("char[1024]")
    largest = wire_oracle.var(2**63 - 1)

    def announcement(origin: int, ranks: int) -> bytes:
        count = ranks * tensors
        head = struct.pack("<BiiH", wire_oracle.REQUEST, origin, 0, 0)
        return head + wire_oracle.var(count) + largest * count + body

    try:
        for repeat in range(2):
            for member, count in enumerate((1, ranks, ranks)):
                leaf.receive(member, announcement(ranks + member, count))
            (told,) = leaf.collect()
            assert len(told) < len(body) + 1000
            root.receive(0, announcement(0, 1))
            root.receive(1, told)
            (record,) = root.collect()
            assert native.lib.shim_agree_read_fail(record, len(record), name, text, 1024) == USAGE
            size = 9 * tensors * (2 * ranks + 1) + len(body)
            assert native.ffi.string(text).decode() == (
                f"allgather 'g': the first extents of its {tensors} tensors on {2 * ranks + 1} ranks take {size} bytes "
                f"with its description; at most {(64 << 20) - 65555} can travel as one request: submit the tensors as "
                "several groups"
            ), repeat
            leaf.apply(record)
    finally:
        native.lib.shim_agree_destroy(leaf.handle)
        native.lib.shim_agree_destroy(root.handle)


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_a_number_of_rows_that_no_correct_member_sends_is_refused(native: ModuleType, count: int) -> None:
    """Of two tensors, for one rank and for two."""
    lib = native.lib
    root = Node(native, is_root=True, local=1, ranks=[0, 1], size=3, speaks_for=[1, 2])
    body = wire_oracle.request(gather_request("gather x", 5))

    def status(member: int, message: bytes) -> int:
        return int(lib.shim_agree_receive(root.handle, member, message, len(message), 0))

    try:
        expected = [2, 4]
        for member in range(2):
            good = wire_oracle.request_message(member, 0, b"", body, [7] * expected[member])
            assert status(member, good) == 0
        root.collect()
        (record,) = root.form_batch()
        number = int.from_bytes(record[5:9], "little")
        for member in range(2):
            as_wanted = count == expected[member]
            full = wire_oracle.request_message(
                member, 0, b"", wire_oracle.request(gather_request("new", 5)), [7] * count
            )
            assert (status(member, full) == 0) == as_wanted
            by_id = wire_oracle.rows_message(number, [7] * count) if count else wire_oracle.ids_message([number])
            assert (status(member, by_id) == 0) == as_wanted
    finally:
        lib.shim_agree_destroy(root.handle)


class Cache:
    """A job of one rank, which knows the ids that the log has given it."""

    def __init__(self, native: ModuleType, capacity: int) -> None:
        self.native, self.capacity = native, capacity
        ranks: dict[str, Any] = {"local": 1, "ranks": [0], "size": 1}
        self.root = Node(native, is_root=True, **ranks, capacity=capacity, evict_after=4 * capacity)
        self.ids: dict[str, int] = {}
        self.owners: dict[int, str] = {}

    def close(self) -> None:
        self.native.lib.shim_agree_destroy(self.root.handle)

    def run(self, names: list[str]) -> int:
        """One after another; how many were announced by id."""
        return sum(self._run(name) for name in names)

    def _run(self, name: str) -> bool:
        lib, ffi, handle = self.native.lib, self.native.ffi, self.root.handle
        hit = name in self.ids
        if hit:
            assert lib.shim_agree_announce_id(handle, 0, self.ids[name], 0) == 0
        else:
            assert lib.shim_agree_announce(handle, 0, 0, name.encode(), 1, False, 0) == 0
        assert self.root.collect() == []
        (record,) = self.root.form_batch()
        ids, text = ffi.new("uint32_t *"), ffi.new("char[64]")
        assert lib.shim_agree_read_batch(record, len(record), ids, text, 1) == 1
        assert ffi.string(text).decode() == ("" if hit else name)
        if not hit and ids[0]:
            former = self.owners.pop(ids[0] % self.capacity, None)
            if former is not None:
                del self.ids[former]
            self.owners[ids[0] % self.capacity] = name
            self.ids[name] = ids[0]
        return hit


@pytest.fixture
def make_cache(native: ModuleType) -> Iterator[Callable[..., Cache]]:
    made: list[Cache] = []

    def make(*arguments: int) -> Cache:
        made.append(Cache(native, *arguments))
        return made[-1]

    yield make
    for cache in made:
        cache.close()


@pytest.mark.parametrize("count", [65, 80, 128, 256])
def test_a_cache_too_small_for_all_names_of_a_step_serves_those_it_holds(
    make_cache: Callable[..., Cache], count: int
) -> None:
    """Who evicts for every newcomer has no hit in such a cycle; nobody can have more than the capacity."""
    cache = make_cache(64)
    names = [f"n{i}" for i in range(count)]
    assert [cache.run(names) for _ in range(20)] == [0] + [64] * 19


def test_a_cache_full_of_names_that_are_not_used_any_more_takes_in_those_that_are(
    make_cache: Callable[..., Cache],
) -> None:
    cache = make_cache(64)
    cache.run([f"start{i}" for i in range(1000)])
    names = [f"n{i}" for i in range(50)]
    assert cache.run(names) == 0
    for _ in range(400):
        cache.run(names)
    assert cache.run(names) == 50


def test_names_that_alternate_with_ones_used_once_are_cached_in_the_end(make_cache: Callable[..., Cache]) -> None:
    """Whoever lets in one of a number of newcomers may let in only those that never come back."""
    cache = make_cache(8)
    cache.run([f"start{i}" for i in range(8)])
    hits = [cache.run([f"step{step}", "loss"]) for step in range(400)]
    assert sum(hits[300:]) == 100


def test_a_batch_of_the_longest_names_is_a_message_of_allowed_size(native: ModuleType) -> None:
    lib = native.lib
    root = Node(native, is_root=True, local=1, ranks=[0], size=1, fusion_bytes=1 << 40)
    count, most = 70_000, 64 << 20
    try:
        for i in range(count):
            assert lib.shim_agree_announce(root.handle, 0, 0, b"%01023d" % i, 1, True, 0) == 0
        assert root.collect() == []
        records = []
        while formed := root.form_batch():
            records += formed
        assert max(map(len, records)) <= most
        assert sum(int.from_bytes(record[1:5], "little") for record in records) == count
        assert len(records) == 3
    finally:
        lib.shim_agree_destroy(root.handle)


def mismatch(native: ModuleType, one: Request, other: Request, values: Sequence[bytes] = ()) -> str:
    """What ranks 0 and 1 are told when they announce these, each with its values behind, if there are any."""
    root = Node(native, is_root=True, local=2, ranks=[0, 1], size=2)
    name, text = native.ffi.new("char[64]"), native.ffi.new("char[1024]")
    try:
        for member, request in enumerate((one, other)):
            body = wire_oracle.request(request) + b"".join(values[member : member + 1])
            root.receive(member, wire_oracle.request_message(member, 0, b"", body))
        (record,) = root.collect()
        assert native.lib.shim_agree_read_fail(record, len(record), name, text, 1024) == MISMATCH
    finally:
        native.lib.shim_agree_destroy(root.handle)
    return str(native.ffi.string(text).decode())


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ((0.5, 0.25), ("0.5", "0.25")),
        ((0.1, 0.1 + 1e-12), ("0.1", "0.100000000001")),
        ((1 / 3, 1 / 3 + 2**-54), ("0.3333333333333333", "0.3333333333333334")),
        ((1e300, -0.0), ("1e+300", "-0")),
    ],
)
def test_factors_that_differ_read_as_different(
    native: ModuleType, factors: tuple[float, float], expected: tuple[str, str]
) -> None:
    for place in ("prescale", "postscale"):
        requests = [Request("x", reduce_op=1, **{place: factor}) for factor in factors]
        text = mismatch(native, *requests)
        for rank, (value, request) in enumerate(zip(expected, requests, strict=True)):
            both = {"prescale": "1", "postscale": "1", place: value}
            said = f"prescale factor {both['prescale']} and postscale factor {both['postscale']}"
            assert f"rank {rank} (h) sent {said}" in text, (text, request)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([0, 1], [1], ("[0, 1]", "[1]")),
        (range(300), [*range(298), 299], ("[..., 296, 297, 298, 299]", "[..., 296, 297, 299]")),
        (range(300), range(299), ("[..., 297, 298, 299]", "[..., 297, 298]")),
        (range(5, 300), range(6, 300), (f"{[*range(5, 25)]}"[:-1] + ", ...]", f"{[*range(6, 26)]}"[:-1] + ", ...]")),
    ],
)
def test_teams_that_differ_read_as_different(
    native: ModuleType, one: Sequence[int], other: Sequence[int], expected: tuple[str, str]
) -> None:
    values = [struct.pack(f"<{len(ranks)}i", *ranks) for ranks in (one, other)]
    requests = [
        Request("t", op=ADD_TEAM, transient=True, tensors=(Tensor(INT32, (len(ranks),)),)) for ranks in (one, other)
    ]
    text = mismatch(native, requests[0], requests[1], values)
    calls = [
        f"(h) {verb}add_process_set for the ranks {said}" for verb, said in zip(("calls ", ""), expected, strict=True)
    ]
    assert text.startswith(f"rank 0 {calls[0]}, rank 1 {calls[1]}; all ranks must add and remove the same")


def test_a_tensor_that_is_nccls_on_one_rank_only_is_told_as_that(native: ModuleType) -> None:
    text = mismatch(native, Request("x", reduce_op=1), Request("x", reduce_op=1, on_gpu=True))
    assert text == (
        "allreduce 'x': rank 0 (h) sent it in host memory or on another GPU, "
        "rank 1 (h) sent it on the GPU that NCCL uses"
    )


def test_a_name_that_only_one_rank_gave_is_told_as_that(native: ModuleType) -> None:
    text = mismatch(native, Request("x", reduce_op=1), Request("x", reduce_op=1, transient=True))
    assert text == (
        "allreduce 'x': rank 0 (h) sent it under a name that the caller gave, "
        "rank 1 (h) sent it under an automatic name"
    )


def test_messages_that_no_correct_peer_sends_are_refused(native: ModuleType) -> None:
    lib = native.lib
    leaf = Node(native, is_root=False, local=2, ranks=[1, 2], size=4)
    root = Node(native, is_root=True, local=2, ranks=[0, 1], size=4)
    try:
        batch = b"\x05" + (1).to_bytes(4, "little") + (9).to_bytes(4, "little") + b"\x00\x00"
        assert lib.shim_agree_apply(leaf.handle, batch, len(batch)) < 0  # never announced
        assert lib.shim_agree_announce(root.handle, 0, 77, b"x", 1, 0, 0) < 0  # no such rank
        assert lib.shim_agree_receive(root.handle, 1, batch, len(batch), 0) < 0  # a record from below
        assert lib.shim_agree_announce_id(root.handle, 0, 12345, 0) == 0  # stale ids are normal
    finally:
        lib.shim_agree_destroy(leaf.handle)
        lib.shim_agree_destroy(root.handle)


@pytest.mark.parametrize("age_ns", [0, 10])
def test_what_waits_is_listed_with_who_has_announced_it(native: ModuleType, age_ns: int) -> None:
    lib, ffi = native.lib, native.ffi
    root = Node(native, is_root=True, local=2, ranks=[0, 1, 4], size=6)
    try:
        assert lib.shim_agree_announce(root.handle, 1, 1, b"grad", 3, 0, 100) == 0
        out = ffi.new("char[256]")
        assert lib.shim_agree_describe(root.handle, 105, age_ns, out, 256) == (1 if age_ns == 0 else 0)
        assert ffi.string(out).decode() == ("grad since 100 of 2" if age_ns == 0 else "")
    finally:
        lib.shim_agree_destroy(root.handle)
